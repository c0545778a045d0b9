"""The steps that every call of PyTorch takes while tools are on, in machine code; each has a twin in Python.

Compiled in the background on first use, like the other libraries; until then, and where there is no compiler or no
`Python.h`, the twins run.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any, Final

import torch

from ..call import description, site
from . import compiling

_SOURCE: Final = compiling.SOURCES / "front.cpp"
_NAME: Final = "op_tools_front"


def _load() -> Any:
    include = Path(sysconfig.get_paths()["include"])
    has_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")  # its tables have no other lock
    if not (include / "Python.h").exists() or not has_gil:
        return None
    flags = ("-O2", "-std=c++17", "-fvisibility=hidden", f"-I{include}")
    path = compiling.compiled(_SOURCE, flags, key=f"{sys.implementation.cache_tag} {sys.version}")
    if path is None:
        return None
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    if spec is None:
        raise OSError(f"{path} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    module.set_up(torch.Tensor, description.PLAIN_TYPES, site.is_user_code, site.text_of)
    return module


LIBRARY: Final = compiling.Library("front", _load)


def ready() -> Any:
    """The compiled steps, put in the place of their twins; None until they are there (`ready().bound_to(mode)`)."""
    front = LIBRARY.get()
    if front is not None:
        description.key_of = front.key_of
        site.call_site = front.call_site
    return front
