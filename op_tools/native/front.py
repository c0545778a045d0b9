"""The steps that every call of PyTorch takes while tools are on, in machine code; each has a twin in Python.

Compiled in the background on first use, like the other libraries; until then, and where there is no compiler or no
`Python.h`, the twins run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from ..call import description, site
from ..compat import TensorBase, count_dispatch_modes, count_function_modes
from . import compiling, tensors

_SOURCE: Final = compiling.SOURCES / "front.cpp"
# Each value of these is one object as long as the process runs.
_CONSTANTS: Final = frozenset([torch.dtype, torch.layout, torch.memory_format])


def _build(include: str, key: str) -> Path | None:
    return compiling.compiled(_SOURCE, ("-O2", "-std=c++17", "-fvisibility=hidden", include), key=key)


def _load() -> Any:
    module = compiling.extension("op_tools_front", _build)
    if module is None:
        return None
    kinds = (TensorBase, torch.Tensor, torch.nn.Parameter, description.PLAIN_TYPES)
    module.set_up(*kinds, site.is_user_code, site.text_of, count_function_modes, count_dispatch_modes)
    return module


LIBRARY: Final = compiling.Library("front", _load)


def ready() -> Any:
    """The compiled steps, put in the place of their twins; None until they are there (`ready().bound_to(mode)`)."""
    tensors.LIBRARY.begin()
    front = LIBRARY.get()
    if front is not None:
        description.key_of = front.key_of
        site.call_site = front.call_site
        tensors.LIBRARY.get()
        use_reader()
    return front


_reading = False


def use_reader() -> None:
    """Read tensors in machine code from now on, if what does that has been compiled by now (`use_reader()`)."""
    global _reading
    if not _reading and LIBRARY.loaded is not None and tensors.LIBRARY.loaded is not None:
        LIBRARY.loaded.set_reader(tensors.LIBRARY.loaded, TensorBase, _CONSTANTS, torch.device)
        description.recall, description.retain = LIBRARY.loaded.recall, LIBRARY.loaded.retain
        _reading = True
