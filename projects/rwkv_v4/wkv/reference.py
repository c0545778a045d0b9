"""The definition of wkv, step by step in float64: slow, obvious, and what every kernel is measured against."""

from __future__ import annotations

import torch
from torch import Tensor

EMPTY = -1e38
"""Exponent of a sum with no terms: smaller than any real one, and finite so that differences stay finite."""


def wkv_reference(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weighted average of ``v`` over the past, in float64 and differentiable by autograd.

    ``y[t] = (sum_{i<t} e^{(t-1-i) w + k[i]} v[i] + e^{u + k[t]} v[t]) / (the same sum without v)``

    >>> one = torch.ones(1)
    >>> wkv_reference(-one, one, torch.zeros(1, 2, 1), torch.ones(1, 2, 1)).flatten().tolist()
    [1.0, 1.0]
    """
    w, u, k, v = (x.double() for x in (w, u, k, v))
    top = torch.full_like(k[:, 0], EMPTY)
    weighted = torch.zeros_like(top)
    weights = torch.zeros_like(top)
    outputs = []
    for t in range(k.shape[1]):
        key, value = k[:, t], v[:, t]
        # The largest exponent is taken out of numerator and denominator alike; it is a constant to autograd.
        high = torch.maximum(top, u + key).detach()
        past, now = torch.exp(top - high), torch.exp(u + key - high)
        outputs.append((past * weighted + now * value) / (past * weights + now))
        high = torch.maximum(top + w, key).detach()
        past, now = torch.exp(top + w - high), torch.exp(key - high)
        weighted, weights, top = past * weighted + now * value, past * weights + now, high
    return torch.stack(outputs, 1)
