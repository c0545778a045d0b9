"""wkv as a log-step scan in plain torch operators: for any device that has no kernel of its own.

A prefix of the sequence is summed up by (p, values): the sums are ``values * exp(p)``. Two neighbouring
stretches join by scaling both to the larger exponent, so log2(T) joins of whole tensors give all prefixes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .reference import EMPTY


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype wkv is computed in and answers in: float64 if any input is, otherwise float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def forward(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output y and the logarithm of its denominator, which backward needs."""
    w, u, k, v = _as_compute(w, u, k, v)
    top, (weighted, weights), _ = _prefix_sums(w, k, [v, torch.ones_like(k)], [])
    top, weighted, weights = _delay(top, EMPTY), _delay(weighted), _delay(weights)
    high = torch.maximum(top, u + k)
    past, now = torch.exp(top - high), torch.exp(u + k - high)
    total = past * weights + now
    return (past * weighted + now * v) / total, high + torch.log(total)


def backward(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, y: Tensor, log_total: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of w, u, k and v: the same scan from the end, over what each later output asks of the past."""
    dtypes = [x.dtype for x in (w, u, k, v)]
    w, u, k, v, y, log_total, grad = _as_compute(w, u, k, v, y, log_total, grad)
    flipped = [-log_total.flip(1), grad.flip(1), (-grad * y).flip(1)]
    top, sums, slopes = _prefix_sums(w, flipped[0], flipped[1:], [0, 1])
    top = _delay(top, EMPTY).flip(1)
    ask_v, ask_1 = (_delay(x).flip(1) for x in sums)
    slope_v, slope_1 = (_delay(x).flip(1) for x in slopes)
    now = torch.exp(u + k - log_total) * grad
    later = torch.exp(k + top)
    grad_u = now * (v - y)
    grad_k = grad_u + later * (v * ask_v + ask_1)
    grad_v = now + later * ask_v
    grad_w = (later * (v * slope_v + slope_1)).sum((0, 1))
    return tuple(g.to(d) for g, d in zip((grad_w, grad_u.sum((0, 1)), grad_k, grad_v), dtypes))  # type: ignore[return-value]


def _as_compute(*tensors: Tensor) -> list[Tensor]:
    dtype = compute_dtype(*tensors)
    return [x.to(dtype) for x in tensors]


def _delay(x: Tensor, first: float = 0.0, by: int = 1) -> Tensor:
    return pad(x, (0, 0, by, 0), value=first)[:, : x.shape[1]]


def _prefix_sums(
    w: Tensor, top: Tensor, sums: list[Tensor], with_slope: list[int]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """All prefixes of ``sums * exp(top)`` decayed by w per step; for some of the sums, their derivative by w too."""
    slopes = [torch.zeros_like(top) for _ in with_slope]
    length, step = top.shape[1], 1
    while step < length:
        before = _delay(top, EMPTY, step) + step * w
        high = torch.maximum(before, top)
        past, now = torch.exp(before - high), torch.exp(top - high)
        slopes = [
            past * (_delay(d, by=step) + step * _delay(sums[i], by=step)) + now * d for i, d in zip(with_slope, slopes)
        ]
        sums = [past * _delay(x, by=step) + now * x for x in sums]
        top, step = high, 2 * step
    return top, sums, slopes
