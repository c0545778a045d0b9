"""Whether a call concerns a device at all; most functions on the CPU are none of the tools' business."""

from __future__ import annotations

from typing import Any, Final

import torch

from .description import Tensor, tensors_in
from .devices import names_device
from .traits import OpTraits


def is_on_device(args: tuple[Any, ...], kwargs: dict[str, Any], traits: OpTraits) -> bool:
    """Whether a call concerns a device: a tensor on it, or a device argument that names it.

    >>> is_on_device((torch.ones(2),), {}, traits_of(torch.neg))  # doctest: +SKIP
    False
    """
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, Tensor):
            if not arg.is_cpu:
                return arg.device.type != "meta"
        elif type(arg) in _CONTAINERS and _has_member_on_device(arg):
            return True
    wanted = kwargs.get("device")
    if wanted is not None and names_device(wanted):
        return True
    if traits.factory and wanted is None:
        return names_device(torch.get_default_device())
    if traits.transfer:
        return not traits.name.endswith(".cpu")
    if traits.conversion:
        return any(names_device(a) for a in args[1:2])
    others = [a for a in args if type(a) not in _SCALARS and type(a) not in _CONTAINERS and not isinstance(a, Tensor)]
    return any(not t.is_cpu and t.device.type != "meta" for t in tensors_in(others))


_CONTAINERS: Final = frozenset({list, tuple, dict})
_SCALARS: Final = frozenset({int, float, bool, str, type(None), torch.dtype, torch.Size, torch.device, slice})


def _has_member_on_device(value: Any) -> bool:
    for member in value.values() if type(value) is dict else value:
        if isinstance(member, Tensor):
            if not member.is_cpu and member.device.type != "meta":
                return True
        elif type(member) in _CONTAINERS and _has_member_on_device(member):
            return True
    return False
