"""Where in the user's code a call was made, at the price of a few frame hops and a dict lookup."""

from __future__ import annotations

import linecache
import os
import sys
from types import CodeType, FrameType
from typing import Final

import torch
import typing_extensions

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
_REPLAY: Final = os.path.join(_HERE, "replay", "captured.py")
_MAX_FRAMES: Final = 64
_MAX_KNOWN: Final = 50_000  # code made by exec in a loop must not pile up

_is_user_code: dict[CodeType, bool] = {}
_texts: dict[tuple[CodeType, int], str] = {}


def _belongs_to_user(code: CodeType) -> bool:
    name = code.co_filename
    return name == _REPLAY or not name.startswith(_INTERNAL)  # a replayed call is made there


def call_site(depth: int = 2) -> str:
    """`file:line function: source line` of the nearest frame that is the user's (`call_site()`)."""
    try:
        frame: FrameType | None = sys._getframe(depth)
    except ValueError:
        return ""
    first = frame
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        mine = _is_user_code.get(code)
        if mine is None:
            if len(_is_user_code) > _MAX_KNOWN:
                _is_user_code.clear()
            mine = _is_user_code[code] = _belongs_to_user(code)
        if mine:
            return _text(code, frame.f_lineno)
        frame = frame.f_back
    return _text(first.f_code, first.f_lineno) if first is not None else ""


def _text(code: CodeType, line: int) -> str:
    key = (code, line)
    text = _texts.get(key)
    if text is None:
        if len(_texts) > _MAX_KNOWN:
            _texts.clear()
        source = linecache.getline(code.co_filename, line).strip()
        text = _texts[key] = f"{code.co_filename}:{line} {code.co_name}: {source}"
    return text
