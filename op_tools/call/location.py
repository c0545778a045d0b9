"""Where in the user's code a call was made, at the price of a few frame hops and a dict lookup."""

from __future__ import annotations

import linecache
import os
import sys
from types import CodeType, FrameType
from typing import Final

import torch

_HERE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH: Final = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_DITORCH: Final = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "ditorch") + os.sep
_INTERNAL_FILES: Final = frozenset(
    os.path.join(os.path.dirname(os.path.abspath(os.__file__)), name)
    for name in ("contextlib.py", "threading.py", "functools.py", "concurrent/futures/thread.py")
)

_REPLAY: Final = os.path.join(_HERE, "replay", "captured.py")

_is_user_code: dict[CodeType, bool] = {}
_texts: dict[tuple[CodeType, int], str] = {}
_DEEPEST: Final = 64


def _belongs_to_user(code: CodeType) -> bool:
    name = code.co_filename
    if name == _REPLAY:  # a replayed call is made there
        return True
    return not (name.startswith((_TORCH, _HERE, _DITORCH, "<frozen")) or name in _INTERNAL_FILES)


def call_site(depth: int = 2) -> str:
    """`file:line function: source line` of the nearest frame that is the user's (`call_site()`)."""
    try:
        frame: FrameType | None = sys._getframe(depth)
    except ValueError:
        return ""
    first = frame
    for _ in range(_DEEPEST):
        if frame is None:
            break
        code = frame.f_code
        mine = _is_user_code.get(code)
        if mine is None:
            if len(_is_user_code) > 50_000:  # code made by exec in a loop must not pile up
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
        if len(_texts) > 50_000:
            _texts.clear()
        source = linecache.getline(code.co_filename, line).strip()
        text = _texts[key] = f"{code.co_filename}:{line} {code.co_name}: {source}"
    return text
