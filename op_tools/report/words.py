"""The words of the page, in both languages, and texts that views share."""

from __future__ import annotations

import re
import shlex
from typing import Final

from ditorch_common.page import Text

_LOCATION: Final = re.compile(r"^(.*?):(\d+) ([^\s:]*):?(?: (.*))?$", re.DOTALL)
_REASON: Final = re.compile(
    r"^(\d+) of (\d+) elements, worst at (.*?): (.*?) instead of (.*?)(?:, (\S+) times the rounding bound)?$"
)
_BYTES: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def both(en: str, zh: str) -> Text:
    """A text in English and in Chinese (`both("Time", "时间")`)."""
    return {"en": en, "zh": zh}


def reason(text: str) -> Text:
    """Why a call is wrong; the usual form in both languages.

    Example: ``reason("2 of 8 elements, worst at [0]: 3 instead of 1")``
    """
    found = _REASON.match(text)
    if not found:
        return text
    wrong, elements, place, got, wanted, times = found.groups()
    zh = f"{elements} 个元素中有 {wrong} 个错误，最差处 {place}：得到 {got}，应为 {wanted}"
    return both(text, zh + (f"，是舍入界的 {times} 倍" if times else ""))


def line_of(location: str) -> str:
    """`file:line` of a call site (`line_of("train.py:7 main: y = f(x)") == "train.py:7"`)."""
    found = _LOCATION.match(location)
    return f"{found[1]}:{found[2]}" if found else location


def source_of(location: str) -> str:
    """The line of source of a call site (`source_of("train.py:7 main: y = f(x)") == "y = f(x)"`)."""
    found = _LOCATION.match(location)
    return found[4] or "" if found else ""


def size_of(nbytes: float) -> str:
    """Bytes in words (`size_of(2048) == "2.0 KiB"`)."""
    place = 0
    while abs(nbytes) >= 1024 and place < len(_BYTES) - 1:
        nbytes, place = nbytes / 1024, place + 1
    return f"{nbytes:.1f} {_BYTES[place]}" if place else f"{int(nbytes)} B"


def times_bound(excess: float) -> str:
    """An error in rounding bounds (`times_bound(1234.5) == "1,230"`)."""
    if excess != excess or excess == float("inf"):
        return "∞"
    return f"{float(f'{excess:.3g}'):,.15g}" if excess < 1e6 else f"{excess:.2e}"


def short_op(op: str) -> str:
    """The last word of an operator's name (`short_op("torch.nn.functional.linear") == "linear"`)."""
    return op.rpartition(".")[2] or op


def shell(*words: str) -> str:
    """A command line that can be pasted (`shell("python", "a b.py") == "python 'a b.py'"`)."""
    return " ".join(shlex.quote(word) for word in words)
