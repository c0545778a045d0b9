"""Where a call was made: the line in the user's code, and the path in the model, both read off the stack."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import weakref
from types import CodeType, FrameType
from typing import Any, Final

import torch
import typing_extensions

from ..compat import MODULE_CALL
from .description import held_by

_HERE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH: Final = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_DITORCH: Final = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "ditorch") + os.sep
_STANDARD: Final = os.path.dirname(os.path.abspath(os.__file__))
_INTERNAL_FILES: Final = (  # wrappers around functions: decorators, threads, deprecations
    *(os.path.join(_STANDARD, f"{name}.py") for name in ("contextlib", "threading", "functools", "warnings")),
    os.path.join(_STANDARD, "concurrent/futures/thread.py"),
    os.path.abspath(typing_extensions.__file__),
)
_INTERNAL: Final = (_TORCH, _HERE, _DITORCH, "<frozen", "<ditorch", *_INTERNAL_FILES)
_REPLAY: Final = os.path.join(_HERE, "replay", "captured.py")  # makes the calls that are replayed
_MAX_FRAMES: Final = 64  # below a call, until one of the user's
MAX_MODULE_FRAMES: Final = 256
_MAX_KNOWN: Final = 50_000  # code made by exec in a loop must not pile up

_owners: dict[CodeType, bool | None] = {}
_texts: dict[tuple[CodeType, int], str] = {}


def call_site() -> str:
    """`file:line function: source line` of the nearest frame that is the user's (`call_site()`).

    `native.front` puts its twin in machine code in this place.
    """
    frame: FrameType | None = sys._getframe(1)
    nearest = None
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        mine = _owners.get(code, _UNKNOWN)
        if mine is _UNKNOWN:
            if len(_owners) > _MAX_KNOWN:
                _owners.clear()
            mine = _owners[code] = is_user_code(code)
        if mine:
            return text_of(code, frame.f_lineno)
        if nearest is None and mine is not None:
            nearest = frame
        frame = frame.f_back
    return text_of(nearest.f_code, nearest.f_lineno) if nearest is not None else ""


_UNKNOWN: Final[Any] = object()


def is_user_code(code: CodeType) -> bool | None:
    """Whether code is the user's; None for that of op_tools, which is never the place of a call."""
    name = code.co_filename
    if name == _REPLAY:
        return True
    return None if name.startswith(_HERE) else not name.startswith(_INTERNAL)


def text_of(code: CodeType, line: int) -> str:
    """`file:line function: source line` of a line of code (`text_of(f.__code__, 3)`)."""
    key = (code, line)
    text = _texts.get(key)
    if text is None:
        if len(_texts) > _MAX_KNOWN:
            _texts.clear()
        source = linecache.getline(code.co_filename, line).strip()
        text = _texts[key] = f"{code.co_filename}:{line} {code.co_name}: {source}".rstrip()
    return text


# of each outermost module: the ids of those in it; the id of one that is gone may come again
_Names = dict[int, "tuple[weakref.ref[torch.nn.Module], str]"]
_names: weakref.WeakKeyDictionary[torch.nn.Module, _Names] = weakref.WeakKeyDictionary()
_parameters: dict[int, str] = {}  # names by address, in models that have been called


def module_path(depth: int = 1) -> str:
    """Path of the innermost module that is being called, from the outermost one (`module_path()`).

    Empty where no module is being called; the class where the outermost module itself makes the call.
    """
    return module_path_at(sys._getframe(depth))


def module_path_at(frame: FrameType | None) -> str:
    """The same from a frame on (`module_path_at(sys._getframe())`)."""
    innermost = outermost = None
    for _ in range(MAX_MODULE_FRAMES):
        if frame is None:
            break
        if frame.f_code is MODULE_CALL:
            outermost = frame.f_locals.get("self")
            if innermost is None:
                innermost = outermost
        frame = frame.f_back
    if innermost is None or outermost is None:
        return ""
    return _name(outermost, innermost) or type(innermost).__name__


def parameter_names() -> dict[tuple[int, tuple[int, ...]], str]:
    """The parameters of all modules that were called, by address and shape (`parameter_names()`)."""
    found: dict[tuple[int, tuple[int, ...]], str] = {}
    for root in [reference() for reference in _names.keyrefs()]:
        with contextlib.suppress(Exception):  # the run goes on meanwhile; some parameters have no memory
            for name, parameter in root.named_parameters() if root is not None else ():
                for part in held_by(parameter):
                    key = (part.data_ptr(), tuple(part.shape))
                    found[key] = max(name, found.get(key, ""), key=len)  # the longer name is from further out
    return found


def live_state() -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers of all modules that were called, with their names (`live_state()`)."""
    found: list[tuple[str, torch.Tensor]] = []
    for root in [reference() for reference in _names.keyrefs()]:
        with contextlib.suppress(Exception):  # the run goes on meanwhile
            if root is not None:
                found += [(f"parameter {name}", parameter) for name, parameter in root.named_parameters()]
                found += [(f"buffer {name}", buffer) for name, buffer in root.named_buffers()]
    return found


def _name(root: torch.nn.Module, module: torch.nn.Module) -> str:
    known = _names.get(root)
    found = None if known is None else known.get(id(module))
    if found is None or found[0]() is not module:
        known = _names[root] = {id(m): (weakref.ref(m), name) for name, m in root.named_modules()}
        if len(_parameters) > _MAX_KNOWN:
            _parameters.clear()
        _parameters.update((p.data_ptr(), name) for name, p in root.named_parameters() if type(p.data) is torch.Tensor)
        found = known.setdefault(id(module), (weakref.ref(module), f"({type(module).__name__})"))  # made on the fly
    return found[1]


def name_of_parameter(address: int) -> str:
    """The name of the parameter at this address, in a model that has been called; empty where there is none."""
    return _parameters.get(address, "") if address else ""
