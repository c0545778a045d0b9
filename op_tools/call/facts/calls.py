"""Questions about a call, answered from the name of its function: no ATen operator need be known."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from .. import optimizers
from ..registry import FUNCTIONS, NODES, last_name

Tensor = torch.Tensor

UNINITIALISED: Final = FUNCTIONS.names(lambda f: f.uninitialised)
AUTOCAST_LOW: Final = FUNCTIONS.names(lambda f: f.autocast_low)
STAYS_ON_DEVICE: Final = FUNCTIONS.names(lambda f: f.stays)
UNDECLARED_WRITES: Final = {name: f.writes for name, f in FUNCTIONS.by_name.items() if f.writes}
COPIES_BETWEEN_DEVICES: Final = FUNCTIONS.names(lambda f: f.moves)
BY_CUDNN: Final = FUNCTIONS.names(lambda f: f.cudnn)
NODES_WITHOUT_KERNEL: Final = NODES.names(lambda runs_kernel: not runs_kernel)
_INPLACE_OPTION: Final = FUNCTIONS.names(lambda f: f.inplace_option)
_TRANSFERS: Final = FUNCTIONS.names(lambda f: f.converts == "device")
_DEVICE_TYPES: Final = _TRANSFERS | {"privateuseone"}


def names_a_device(text: str) -> bool:
    """Whether a text is `cuda`, `npu:0` and the like (`names_a_device("cuda:1")`)."""
    kind, _, index = text.partition(":")
    return kind in _DEVICE_TYPES and (not index or index.isdecimal())


def is_bound_to_dtype(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call only means something in its own dtype (`x.view(torch.int16)`)."""
    last = last_name(name)
    facts = FUNCTIONS.by_name.get(last)
    if facts is not None and facts.bound_to_dtype:
        return True
    return last == "view" and any(isinstance(v, torch.dtype) for v in (*args, *kwargs.values()))


def may_mutate(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may write to its arguments (`may_mutate("torch.Tensor.add_", {})`)."""
    last = last_name(name)
    if last.startswith("__"):
        return last == "__setitem__" or (last.startswith("__i") and last not in ("__invert__", "__index__", "__int__"))
    return last.endswith("_") or kwargs.get("out") is not None or "inplace" in kwargs or last in _INPLACE_OPTION


def on_cpu(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function to call on the CPU: a transfer to another device is a copy."""
    if name.startswith("torch.Tensor.") and last_name(name) in _TRANSFERS:
        return lambda tensor, *args, **kwargs: tensor.clone()
    if is_optimizer(name):
        return functools.partial(_with_narrow_numbers, function)
    return function


def is_optimizer(name: str) -> bool:
    """Whether a function is a fused optimizer (`is_optimizer("torch._fused_adam_")`)."""
    return optimizers.steps_of(last_name(name).strip("_")) is not None


def works_on_lists(name: str) -> bool:
    """Whether a function does the same to each tensor of its lists (`works_on_lists("torch._foreach_add_")`)."""
    return is_optimizer(name) or last_name(name).startswith("_foreach_")


def _with_narrow_numbers(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Fused optimizers take numbers of steps and scales in float32 alone, whatever they optimize."""

    def narrow(value: Any) -> Any:
        if isinstance(value, list) and value and all(isinstance(t, Tensor) and t.dim() == 0 for t in value):
            return [t.to(torch.float32) for t in value]
        return value

    tensors = {k: v.to(torch.float32) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    state_steps = len(args) - 1
    return function(*(narrow(a) if i == state_steps else a for i, a in enumerate(args)), **tensors)


def adapt(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments whose default depends on the dtype, written out (the `eps` of `rms_norm`)."""
    kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    facts = FUNCTIONS.by_name.get(last_name(name))
    if facts is None or facts.defaults is None:
        return args, kwargs
    inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
    if inputs:
        args, kwargs = facts.defaults(args, kwargs, torch.finfo(inputs[0].dtype))
    return args, kwargs
