"""How `native.front` watches calls by itself for a tool that only notes them; `front_light.h` reads these tuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..call.description import Described
from ..call.traits import OpTraits
from ..watch.intercept import Call
from .base import Tool


class Seen(NamedTuple):
    """What tells the site of a call."""

    op: str
    location: str
    inputs: Described
    outputs: Described


def noted(tool: Tool, op: str, flush: Callable[[Any], Any], rows: Any, run: int) -> tuple[Any, ...]:
    """What is needed to append a row for each call of an operator to `rows`; `flush` is asked every 64 rows."""

    def find_site(*seen: Any) -> int:
        return tool.site(Seen(*seen))  # type: ignore[arg-type]

    def failed(function: Callable[..., Any], number: int, location: str, error: BaseException) -> None:
        call = Call(OpTraits(op, function), function, (), {})
        call.id, call.location = number, location
        tool.failed(call, error)

    return (op, tool.calls, rows, flush, tool._sites.young, find_site, failed, run)
