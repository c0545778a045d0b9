"""The stack of function modes of a thread, and where the interceptor goes on it."""

from __future__ import annotations

import threading
from typing import Final

from torch.overrides import TorchFunctionMode

from ..compat import DeviceContext, count_function_modes, function_mode_at, pop_function_mode, push_function_mode

_push: Final = push_function_mode
_pop: Final = pop_function_mode
_depth: Final = count_function_modes
_at: Final = function_mode_at

thread = threading.local()  # `in_backward`: inside `Tensor.backward`; `compiled`: frame of the compiled function around


def is_on(mode: TorchFunctionMode) -> bool:
    """Whether a mode is on this thread's stack (`is_on(INTERCEPTOR)`)."""
    return any(_at(i) is mode for i in range(_depth()))


def put_on(mode: TorchFunctionMode) -> None:
    """Put a mode below the others of this thread (`put_on(INTERCEPTOR)`).

    Their `with` blocks pop the top of the stack and must find themselves there, also when a tool starts inside such a
    block and stops after it. A DeviceContext insists on being the lowest.
    """
    above = [_pop() for _ in range(_depth())]
    if above and isinstance(above[-1], DeviceContext):
        _push(above.pop())
    _push(mode)
    for other in reversed(above):
        _push(other)


def take_off(mode: TorchFunctionMode) -> None:
    """Remove a mode from this thread's stack, wherever it is (`take_off(INTERCEPTOR)`)."""
    above = [_pop() for _ in range(_depth())]
    for other in reversed(above):
        if other is not mode:
            _push(other)
