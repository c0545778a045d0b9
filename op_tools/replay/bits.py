"""Results compared bit by bit."""

from __future__ import annotations

from typing import Any

import torch

from ..call.description import Tensor
from ..call.devices import quiet
from ..judge.verdict import leaves_of


def on_host(tensor: Tensor) -> Tensor:
    """The values of a tensor in main memory (`on_host(x)`)."""
    return tensor.detach().cpu()


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_quantized:
        plain = plain.int_repr()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    plain = plain.contiguous().reshape(-1)
    if plain.numel() < 2:  # one element counts as contiguous whatever its stride, but not when seen as bytes
        plain = plain.clone(memory_format=torch.contiguous_format)
    nbytes = plain.numel() * plain.element_size()
    # eight bytes at a time are compared many times faster than one
    whole = nbytes % 8 == 0 and plain.storage_offset() * plain.element_size() % 8 == 0
    return plain.view(torch.int64 if whole else torch.uint8)


def same_bits(left: Any, right: Any) -> bool:
    """Whether two results are the same, bit for bit; layout does not count (`same_bits(x, x.t().t())`)."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        ours, theirs = _bits(left), _bits(right)
        if ours.dtype != theirs.dtype:
            ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
        return torch.equal(ours, theirs)
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return False
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (left != left and right != right)
    return bool(left == right)


def same(left: Any, right: Any) -> bool:
    """Whether two trees of results are the same, bit for bit (`same((x, 1), (x, 1))`)."""
    ours, theirs = list(leaves_of(left)), list(leaves_of(right))
    return len(ours) == len(theirs) and all(same_bits(a, b) for a, b in zip(ours, theirs))


def differences(what: str, ours: Any, captured: Any, absent_is_unknown: bool = False) -> list[str]:
    """One line per leaf that is not the captured one."""
    left, right = list(leaves_of(ours)), list(leaves_of(captured))
    if len(left) != len(right):
        return [f"{len(left)} {what}s, {len(right)} were captured"]
    found = []
    for number, (a, b) in enumerate(zip(left, right)):
        if (absent_is_unknown and b is None) or same_bits(a, b):
            continue
        label = what if len(left) == 1 else f"{what}[{number}]"
        found.append(f"{label} {_how_different(a, b)}")
    return found


def _how_different(ours: Any, captured: Any) -> str:
    if not isinstance(ours, Tensor) or not isinstance(captured, Tensor):
        return f"is {_brief(ours)}, {_brief(captured)} was captured"
    if ours.shape != captured.shape:
        return f"has shape {tuple(ours.shape)}, {tuple(captured.shape)} was captured"
    if ours.dtype != captured.dtype:
        return f"is {ours.dtype}, {captured.dtype} was captured"
    with quiet():
        wide = torch.complex128 if ours.is_complex() else torch.float64
        left, right = (t.to_dense() if t.layout != torch.strided else t for t in (ours, captured))
        left, right = (t.dequantize() if t.is_quantized else t for t in (left, right))
        gap = (left.to(wide) - right.to(wide)).abs().nan_to_num(nan=0.0)
        count = int((left != right).sum())
    if count == 0:
        return "differs in the sign of zeros or the bits of NaNs"
    return f"differs in {count} of {ours.numel()} elements, by {float(gap.max()):.3g} at most"


def _brief(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
