"""Where in the model a call was made: `blocks.3.attn.qkv`, read off the stack of module calls."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Final

import torch

from ..compat import MODULE_CALL

_CALLS: Final = frozenset({MODULE_CALL})
_MAX_FRAMES: Final = 256

# of each outermost module: the ids of those in it; the id of one that is gone may come again
_Names = dict[int, "tuple[weakref.ref[torch.nn.Module], str]"]
_names: weakref.WeakKeyDictionary[torch.nn.Module, _Names] = weakref.WeakKeyDictionary()


def module_path(depth: int = 1) -> str:
    """Path of the innermost module that is being called, from the outermost one (`module_path()`).

    Empty where no module is being called; the class where the outermost module itself makes the call.
    """
    frame: FrameType | None = sys._getframe(depth)
    innermost = outermost = None
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code in _CALLS:
            outermost = frame.f_locals.get("self")
            if innermost is None:
                innermost = outermost
        frame = frame.f_back
    if innermost is None or outermost is None:
        return ""
    return _name(outermost, innermost) or type(innermost).__name__


def _name(root: torch.nn.Module, module: torch.nn.Module) -> str:
    known = _names.get(root)
    found = None if known is None else known.get(id(module))
    if found is None or found[0]() is not module:
        known = _names[root] = {id(m): (weakref.ref(m), name) for name, m in root.named_modules()}
        found = known.setdefault(id(module), (weakref.ref(module), f"({type(module).__name__})"))  # made on the fly
    return found[1]
