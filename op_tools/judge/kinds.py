"""What a result is, apart from its values: shape, dtype, strides, and whose memory it lies in.

PyTorch says what it must be by the same call on tensors without memory (`meta`). The golden run cannot: it computes in
float64, on copies. Strides are PyTorch's to say where a call is elementwise; libraries choose those of convolutions and
attention as they like.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..call.description import Tensor, map_tensors, tensors_in
from ..call.operators.registry import last_name


class Expected(NamedTuple):
    """One result of a call on tensors without memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    borrowed: bool  # it lies in the memory of an argument
    overlaps: bool  # several of its elements share memory


def expected(function: Callable[..., Any], args: Any, kwargs: Any) -> list[Expected] | None:
    """What the results of a call must be; None where that depends on values, or cannot be said without them.

    >>> expected(torch.t, (torch.ones(2, 3),), {})[0].stride
    (1, 3)
    """
    storages: dict[int, Tensor] = {}

    def without_memory(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ValueError("no strides")
        storage = tensor.untyped_storage()
        flat = storages.get(storage._cdata)
        if flat is None:
            flat = storages[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
        made = torch.empty(0, dtype=tensor.dtype, device="meta")
        return made.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    try:
        with torch.no_grad():
            given = map_tensors((args, kwargs), without_memory)
            found = list(tensors_in(function(*given[0], **given[1])))
        owners = {t.untyped_storage()._cdata for t in tensors_in(given)}
        return [_of(t, owners) for t in found if t.device.type == "meta"] if found else None
    except Exception:
        return None


def _of(tensor: Tensor, owners: set[int]) -> Expected:
    borrowed = tensor.untyped_storage()._cdata in owners
    return Expected(tuple(tensor.shape), tensor.dtype, tensor.stride(), borrowed, _overlaps(tensor))


def _overlaps(tensor: Tensor) -> bool:
    return any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride()))


def problem(op: str, wanted: Sequence[Expected], outputs: Any, given: Any = None) -> str:
    """What is wrong about results, apart from values; empty where nothing is.

    `given` are the arguments; without them nothing is said about whose memory is whose.

    >>> problem("torch.neg", expected(torch.neg, (torch.ones(2),), {}), torch.ones(2).double())
    'dtype torch.float64 instead of torch.float32'
    """
    found = list(tensors_in(outputs))
    if len(found) != len(wanted):
        return f"{len(found)} tensors instead of {len(wanted)}"
    owners = {t.untyped_storage()._cdata for t in tensors_in(given) if t.layout is torch.strided and t.numel()}
    for number, (ours, theirs) in enumerate(zip(found, wanted)):
        if tuple(ours.shape) != theirs.shape:
            return f"shape {tuple(ours.shape)} instead of {theirs.shape}"
        if number == 0 and ours.dtype != theirs.dtype:  # statistics beside it may be wider on some devices
            return f"dtype {ours.dtype} instead of {theirs.dtype}"
        if ours.layout is not torch.strided or ours.numel() < 2:
            continue
        if _overlaps(ours) and not theirs.overlaps:
            return f"strides {ours.stride()} instead of {theirs.stride}: several elements share memory"
        if is_pointwise(op) and not theirs.borrowed and _of_long(ours.shape, ours.stride()) != _of_long(*theirs[:3:2]):
            return f"strides {ours.stride()} instead of {theirs.stride}"
        if given is not None and (ours.untyped_storage()._cdata in owners) != theirs.borrowed:
            if theirs.borrowed:
                return "it is a copy; it must lie in the memory of an argument"
            return "it lies in the memory of an argument; it must have its own"
    return ""


def _of_long(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides of the dimensions with more than one element; the others may have any."""
    return tuple(s for n, s in zip(shape, stride) if n > 1)


@functools.cache
def is_pointwise(op: str) -> bool:
    """Whether PyTorch says that an operator is elementwise (`is_pointwise("torch.Tensor.add")`)."""
    packet = getattr(torch.ops.aten, last_name(op), None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
