"""What a result is, apart from its values: shape, dtype, strides, and whether it lies in the memory of an argument.

The golden run does not tell: it computes in float64, on copies. The same call on the CPU, in the device's dtypes and on
arguments that lie in memory as the device's do, does. Strides are PyTorch's to say where a call is elementwise;
libraries choose those of convolutions and attention as they like.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch

from ..call.description import Tensor, tensors_in
from ..call.operators.registry import last_name

_MOVES_DEVICES: Final = frozenset({"to", "cuda", "cpu", "type", "pin_memory", "npu", "mlu", "xpu", "musa", "hpu"})


class Kind(NamedTuple):
    """What one result is, apart from its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    borrowed: bool | None  # it lies in the memory of an argument; None where that is not known
    put_off: str = ""  # what is still to be done to its values, as a bit of the tensor says


def kinds_of(results: Any, borrowed: Iterable[bool | None]) -> list[Kind]:
    """What the tensors of a result are (`kinds_of(x.t(), borrowed([x], [x.t()]))`)."""
    return [
        Kind(tuple(t.shape), t.dtype, t.stride(), own, _put_off(t)) for t, own in zip(tensors_in(results), borrowed)
    ]


def _put_off(tensor: Tensor) -> str:
    return "conjugate" if tensor.is_conj() else "negative" if tensor.is_neg() else ""


def borrowed(given: Any, results: Any) -> list[bool | None]:
    """Of each result, whether it lies in the memory of an argument.

    >>> x = torch.ones(2, 3)
    >>> borrowed(x, [x.t(), x + 1])
    [True, False]
    """
    owners = {_storage(t) for t in tensors_in(given)} - {None}
    return [None if _storage(t) is None else _storage(t) in owners for t in tensors_in(results)]


def places(results: Any) -> list[Hashable]:
    """Where the first element of each result lies; None where it has none (`places([x, x.t()])`, twice the same)."""
    return [None if _storage(t) is None else (_storage(t), t.storage_offset()) for t in tensors_in(results)]


def shared(found: Sequence[Hashable], wanted: Sequence[Hashable]) -> str:
    """Which two results lie at one place and must not; empty where none do.

    >>> shared(["a", "b", "a"], ["a", "b", "c"])
    'results 0 and 2 lie in the same memory'
    """
    for second, place in enumerate(found):
        first = found.index(place)
        if place is not None and first != second and wanted[first] != wanted[second]:
            return f"results {first} and {second} lie in the same memory"
    return ""


def _storage(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided and tensor.numel() else None


def _overlaps(kind: Kind) -> bool:
    return any(n > 1 and s == 0 for n, s in zip(kind.shape, kind.stride))


def problem(op: str, found: Sequence[Kind], wanted: Sequence[Kind]) -> str:
    """What is wrong about results, apart from values; empty where nothing is.

    >>> problem("torch.neg", kinds_of(torch.ones(2).double(), [None]), kinds_of(torch.ones(2), [None]))
    'dtype torch.float64 instead of torch.float32'
    """
    if len(found) != len(wanted):
        return f"{len(found)} tensors instead of {len(wanted)}"
    for number, (ours, theirs) in enumerate(zip(found, wanted)):
        if ours.shape != theirs.shape:
            return f"shape {ours.shape} instead of {theirs.shape}"
        if number == 0 and ours.dtype != theirs.dtype:  # statistics beside it may be wider on some devices
            return f"dtype {ours.dtype} instead of {theirs.dtype}"
        if _overlaps(ours) and not _overlaps(theirs):
            return f"strides {ours.stride} instead of {theirs.stride}: several elements share memory"
        if is_pointwise(op) and not theirs.borrowed and _of_long(ours) != _of_long(theirs):
            return f"strides {ours.stride} instead of {theirs.stride}"
        if is_pointwise(op) and ours.put_off and not theirs.put_off:
            return f"its {ours.put_off} bit is set: the values are still to be changed"
        if None in (ours.borrowed, theirs.borrowed) or last_name(op) in _MOVES_DEVICES:
            continue
        if theirs.borrowed and not ours.borrowed:
            return "it is a copy; it must lie in the memory of an argument"
        if ours.borrowed and not theirs.borrowed:
            return "it lies in the memory of an argument; it must have its own"
    return ""


def _of_long(kind: Kind) -> tuple[int, ...]:
    """Strides of the dimensions with more than one element; the others may have any."""
    return tuple(s for n, s in zip(kind.shape, kind.stride) if n > 1) if 0 not in kind.shape else ()


@functools.cache
def is_pointwise(op: str) -> bool:
    """Whether PyTorch says that an operator is elementwise (`is_pointwise("torch.Tensor.add")`)."""
    packet = getattr(torch.ops.aten, last_name(op), None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
