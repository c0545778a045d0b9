"""The book of a trace in machine code; `trace/book.py` has the twin in Python and says what it is for.

Compiled against PyTorch's headers in the background on first use; until then, and without a compiler, the twin runs.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any, Final

import torch

from ..compat import TensorBase
from ..view import console
from . import compiling

_SOURCE: Final = compiling.SOURCES / "trace_book.cpp"
_NAME: Final = "op_tools_book"


def _load() -> Any:
    include = Path(sysconfig.get_paths()["include"])
    has_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")  # a book has no other lock
    if not (include / "Python.h").exists() or not has_gil:
        return None
    path = compiling.against_torch(
        _SOURCE,
        lambda: console.note("compiling what records traces in the background (once); until then, Python does it"),
        (f"-I{include}", "-O1"),
        f"{sys.implementation.cache_tag} {sys.version}",
    )
    if path is None:
        return None
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    if spec is None:
        raise OSError(f"{path} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module if module.set_types(TensorBase, torch.Tensor, torch.nn.Parameter) else None


LIBRARY: Final = compiling.Library("book", _load)
