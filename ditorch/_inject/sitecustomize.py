"""Runs at the start of every Python process below ``ditorch run``: activates ditorch once torch is imported."""

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType

_here = os.path.dirname(os.path.abspath(__file__))
# Nobody else should find this folder, and the machine's own sitecustomize must still run.
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _here]


def _load(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _activate(torch: ModuleType) -> None:
    import ditorch  # noqa: F401


def _translate_variables() -> None:
    # `import torch` loads the packages of several vendors, which read their variables then.
    common = os.path.join(os.path.dirname(os.path.dirname(_here)), "ditorch_common", "environment.py")
    _load("_ditorch_environment", common).set_for_installed(os.environ)


# By path: `import ditorch.imports` would import ditorch, and with it torch, into every process.
_imports = _load("_ditorch_imports", os.path.join(os.path.dirname(_here), "imports.py"))
_imports.AfterImport("torch", _activate, _translate_variables).install()

_next = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _next is not None and _next.loader is not None:
    _module = importlib.util.module_from_spec(_next)
    sys.modules["sitecustomize"] = _module
    _next.loader.exec_module(_module)
