"""Computes on the CPU in every Python process that finds this folder: as soon as torch and torch_npu are imported."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

_PROJECT = Path(__file__).resolve().parents[4]


def _enter(torch: ModuleType) -> None:
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        sys.path.append(str(_PROJECT))
        from tests.vendor.ascend.cpu_kernels import enter

        enter()


_spec = importlib.util.spec_from_file_location("_ditorch_imports", _PROJECT / "ditorch" / "imports.py")
assert _spec is not None
assert _spec.loader is not None
_imports = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_imports)
_imports.AfterImport("torch", _enter).install()
