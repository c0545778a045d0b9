"""A device without free memory: tools give back what they hold there, and the call that failed is made again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..call.facts import may_mutate
from ..compat import no_torch_function
from .hooks import Hooks

if TYPE_CHECKING:
    from .intercept import Call


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had too little memory (`is_out_of_memory(torch.OutOfMemoryError())`)."""
    return type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error).lower()


def make_room(tools: Iterable[Hooks], call: Call) -> bool:
    """Have tools give back what they hold on the device; whether any of them did."""
    made = False
    for tool in tools:
        with contextlib.suppress(Exception), no_torch_function():  # it may need memory itself
            made |= tool.make_room(call)
    return made


def made(error: Exception, call: Call, tools: Iterable[Hooks]) -> bool:
    """Whether a call that failed can be made again: it wanted memory, tools gave some back, and nothing is half done.

    What wrote to an argument or drew random numbers before it failed must not do so twice.
    """
    traits = call.traits
    half_done = traits.mutates or traits.random is not False or may_mutate(call.op, call.kwargs)
    return is_out_of_memory(error) and make_room(tools, call) and not half_done
