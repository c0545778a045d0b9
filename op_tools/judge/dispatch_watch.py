"""Dispatch modes that see the ATen operators a call is made of, and what one of them reads and writes."""

from __future__ import annotations

from typing import Any

import torch

from ..compat import CPU_KERNELS, DispatchMode

Tensor = torch.Tensor


class Watcher(DispatchMode):
    """A dispatch mode that is never compiled into a graph: PyTorch's guard against that costs more than the mode."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def redispatched(mode: DispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a custom operator so that a mode sees the ATen operators inside it."""
    with mode:
        return func.redispatch(CPU_KERNELS, *args, **kwargs)


def tensors_of(values: Any) -> list[Tensor]:
    """All tensors among an operator's arguments or results (`tensors_of((x, [y]))`)."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(tensors_of(value))
    return found


def mutated(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operator writes to (`mutated(torch.ops.aten.add_.Tensor, (x, y), {}) == [x]`)."""
    if not func._schema.is_mutable:
        return []
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found.extend(tensors_of((value,)))
    return found


def address(tensor: Tensor) -> int:
    """Address of a tensor's storage (`address(x) == address(x[1:])`)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except Exception:  # sparse tensors and the like have no storage of their own
        return id(tensor)
