"""What keeps a golden run apart from the training: no modes, no random numbers, no backward pass that anyone sees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from ..call import facts
from ..call.description import Tensor
from .dispatch_watch import Watcher

_ENGINE: Final = torch._C._ImperativeEngine()  # the one that all use, without wrappers


class DrawsRandomNumbers(Exception):
    """The call would consume random numbers, so that two runs of it cannot be compared."""


class NoRandomNumbers(Watcher):  # type: ignore[no-untyped-call]
    """Stops a call before it draws from any random stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and facts.really_draws(func, args, kwargs):
            raise DrawsRandomNumbers(str(func))
        return func(*args, **kwargs)


class neutral:
    """Leaves all modes of the calling thread for as long as a golden run takes."""

    __slots__ = ("_functions", "_grad", "_more", "_wanted")

    def __init__(self, grad: bool) -> None:
        self._wanted = grad

    def __enter__(self) -> None:
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()
        self._more = _less_common_modes(self._wanted)
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self._wanted)

    def __exit__(self, *error: Any) -> None:
        torch._C._set_grad_enabled(self._grad)
        if self._more is not None:
            self._more.__exit__(*error)
        self._functions.__exit__(*error)


def _less_common_modes(grad: bool) -> contextlib.ExitStack | None:
    inference, autocast = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    hooks = grad and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    if not (inference or autocast or hooks):
        return None
    stack = contextlib.ExitStack()
    if inference:
        stack.enter_context(torch.inference_mode(False))
    if autocast:
        stack.enter_context(torch.autocast("cpu", enabled=False))
    if hooks:
        # checkpointing counts what is saved under its hooks: the golden run is not to be counted
        stack.enter_context(_without_hooks())
    return stack


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    """Take the hooks for saved tensors off; hooks that only pass tensors on would keep whole graphs alive for ever."""
    taken = []
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        taken.append(hooks)
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def differentiated(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], sent: Sequence[Tensor], keep: bool = False
) -> Sequence[Tensor | None]:
    """`torch.autograd.grad` without its checks, which import SymPy, and not seen as a pass of the training.

    >>> x = torch.ones(1, requires_grad=True)
    >>> differentiated([3 * x], [x], [torch.ones(1)])
    (tensor([3.]),)
    """
    found = _ENGINE.run_backward(tuple(outputs), tuple(sent), keep, False, tuple(inputs), True, accumulate_grad=False)
    return tuple(found)
