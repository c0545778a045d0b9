"""Results compared bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..call.description import Tensor
from ..call.devices import quiet
from ..call.equality import leaves_of, same_bits, same_leaves


def on_host(tensor: Tensor) -> Tensor:
    """The values of a tensor in main memory (`on_host(x)`)."""
    return tensor.detach().cpu()


def same(left: Any, right: Any) -> bool:
    """Whether two trees of results are the same, bit for bit (`same((x, 1), (x, 1))`)."""
    return same_leaves(left, right, same_bits)


def differences(
    what: str, ours: Any, captured: Any, absent_is_unknown: bool = False, labels: Sequence[str] = ()
) -> list[str]:
    """One line per leaf that is not the captured one; `labels` are the names of the leaves."""
    left, right = list(leaves_of(ours)), list(leaves_of(captured))
    if len(left) != len(right):
        return [f"{len(left)} {what}s, {len(right)} were captured"]
    found = []
    for number, (a, b) in enumerate(zip(left, right)):
        if (absent_is_unknown and b is None) or same_bits(a, b):
            continue
        label = what if len(left) == 1 else f"{what}[{number}]"
        label = labels[number] if number < len(labels) else label
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
