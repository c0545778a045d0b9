"""What reads a tensor for `native.front`, compiled against PyTorch's headers; without it, Python's objects are read."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final

from . import compiling

_SOURCE: Final = compiling.SOURCES / "tensors.cpp"


def _load() -> Any:
    path: Path | None = compiling.against_torch(_SOURCE)
    if path is None:
        return None
    return ctypes.cast(ctypes.CDLL(str(path)).op_tools_read_tensor, ctypes.c_void_p).value


LIBRARY: Final = compiling.Library("tensors", _load)
