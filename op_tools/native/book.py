"""The book of a trace in machine code; `trace/book.py` has the twin in Python and says what it is for.

Compiled against PyTorch's headers in the background on first use; until then, and without a compiler, the twin runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from ..compat import TensorBase
from ..view import console
from . import compiling

_SOURCE: Final = compiling.SOURCES / "trace_book.cpp"


def _build(include: str, key: str) -> Path | None:
    said = "compiling what records traces in the background (once); until then, Python does it"
    return compiling.against_torch(_SOURCE, lambda: console.note(said), (include, "-O1"), key)


def _load() -> Any:
    module = compiling.extension("op_tools_book", _build)
    usable = module is not None and module.set_types(TensorBase, torch.Tensor, torch.nn.Parameter)
    return module if usable else None


LIBRARY: Final = compiling.Library("book", _load)
