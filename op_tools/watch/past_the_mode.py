"""Shorter ways than PyTorch's to and past the mode.

Methods of optimizers ask a thousand questions in each step (`p.grad`, `is_complex`), more than it calls operators.
Under a mode each takes microseconds; where a method only asks, the mode is off while it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch

from ..compat import count_function_modes, function_mode_at, pop_function_mode, push_function_mode
from .compiled import THREAD

if TYPE_CHECKING:
    from .intercept import Interceptor


def quiet_methods() -> Iterator[tuple[type, str, Callable[..., bool]]]:
    """Methods that call no operator, each with its class and what tells whether that holds for a call of it."""
    yield torch.optim.Optimizer, "zero_grad", _only_forgets
    yield torch.nn.Module, "zero_grad", _only_forgets_parameters
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and "_init_group" in vars(kind):
            yield kind, "_init_group", _only_collects


def _only_forgets(_: Any, set_to_none: bool = True) -> bool:
    """Whether gradients are dropped, not set to zero."""
    return set_to_none


def _only_forgets_parameters(module: torch.nn.Module, set_to_none: bool = True) -> bool:
    """The same for the parameters of a module, where that finds them as all do."""
    kind, plain = type(module), torch.nn.Module
    own = kind.parameters is not plain.parameters or kind.named_parameters is not plain.named_parameters
    return set_to_none and not own


def _only_collects(optimizer: torch.optim.Optimizer, group: dict[str, Any], *_: Any, **__: Any) -> bool:
    """Whether all state is there: what is not gets made by operators."""
    if isinstance(optimizer, torch.optim.SGD):  # its state is made elsewhere
        return True
    state, needed = optimizer.state, _STATE.get(type(optimizer).__name__, "step")
    return all(needed in state.get(p, ()) for p in group["params"] if p.grad is not None)


# What an optimizer has put into the state of a parameter once that is there, if it is not "step".
_STATE: Final = {"Muon": "momentum_buffer"}


def past_the_mode(interceptor: Interceptor, original: Callable[..., Any], holds: Callable[..., bool]) -> Any:
    """A function that runs with the mode off where its arguments say so."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if THREAD.region is not None or not interceptor.is_on():
            return original(*args, **kwargs)
        interceptor.take_off()
        try:
            if _is_sure(holds, *args, **kwargs):
                return original(*args, **kwargs)
        finally:
            interceptor.put_on()
        return original(*args, **kwargs)

    return function


def _is_sure(holds: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    try:
        return holds(*args, **kwargs)
    except Exception:  # odd arguments, or an optimizer that keeps its state otherwise
        return False


def straight_to_the_mode(interceptor: Interceptor, original: Callable[..., Any]) -> Callable[..., Any]:
    """How functions of `torch.nn.functional` call the interceptor where it is the only one that they may have to ask.

    PyTorch's own way looks for tensors that override functions and enters a context manager, for each call.
    """

    def handle_torch_function(public_api: Any, relevant_args: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            count_function_modes() != 1
            or function_mode_at(0) is not interceptor
            or not _PLAIN.issuperset(map(type, relevant_args))
        ):
            return original(public_api, relevant_args, *args, **kwargs)
        pop_function_mode()
        try:
            return interceptor.__torch_function__(public_api, (), args, kwargs)
        finally:
            push_function_mode(interceptor)

    return handle_torch_function


_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})
