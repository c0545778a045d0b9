"""The stack of function modes of a thread, and where the interceptor goes on it."""

from __future__ import annotations

import threading
from typing import Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

_push: Final = torch._C._push_on_torch_function_stack
_pop: Final = torch._C._pop_torch_function_stack
_depth: Final = torch._C._len_torch_function_stack
_at: Final = torch._C._get_function_stack_at

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
