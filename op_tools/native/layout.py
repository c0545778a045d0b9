"""How the elements of a tensor lie in memory."""

from __future__ import annotations

import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill one stretch of memory, in whichever order (`is_dense(x.t())`)."""
    if tensor.is_neg() or tensor.is_conj():
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for step, size in sorted([(s, n) for s, n in zip(tensor.stride(), tensor.shape) if n > 1]):
        if step != expected:
            return False
        expected *= size
    return True
