"""The parts of `SyncBatchNorm`, for which PyTorch has kernels on accelerators alone, written out in its operators.

Statistics of each rank, of all ranks together, the normalised images, and the two halves of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from ..call.description import Tensor


def _flat(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Images as (channels, values)."""
    return images.transpose(0, 1).flatten(1).to(dtype)


def _unflat(values: Tensor, like: Tensor) -> Tensor:
    turned = like.transpose(0, 1)
    return values.reshape(turned.shape).transpose(0, 1).to(like.dtype)


def stats(images: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation of each channel."""
    x = _flat(images, torch.promote_types(images.dtype, torch.float32))
    mean = x.mean(1)
    return mean, (x.sub(mean[:, None]).square().mean(1) + eps).rsqrt()


def gathered(
    images: Tensor,
    means: Tensor,
    inverses: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Any,
) -> tuple[Tensor, Tensor]:
    """The same of all ranks, (ranks, channels) of them; running statistics follow by `momentum`."""
    weights = counts if isinstance(counts, Tensor) else torch.full((len(means),), float(counts))
    weights = weights.to(means.dtype).reshape(-1, 1)
    total = weights.sum()
    mean = (weights * means).sum(0) / total
    # around the common mean; eps is in what the ranks sent
    within = (weights * (inverses.square().reciprocal() - eps)).sum(0)
    between = (weights * (means - mean).square()).sum(0)
    for running, value in ((running_mean, mean), (running_var, (within + between) / (total - 1))):
        if running is not None:
            running.copy_((1 - momentum) * running + momentum * value)
    return mean, ((within + between) / total + eps).rsqrt()


def normalised(
    images: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, eps: float
) -> Tensor:
    """Images by these statistics."""
    x = (_flat(images, mean.dtype) - mean[:, None]) * inverse[:, None]
    x = x if weight is None else x * weight[:, None]
    return _unflat(x if bias is None else x + bias[:, None], images)


def reduced(
    sent: Tensor, images: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Tensor | None, ...]:
    """Sums over a rank: gradients, gradients times centred images, and what they mean for weight and bias."""
    grad, x = _flat(sent, mean.dtype), _flat(images, mean.dtype)
    total, product = grad.sum(1), (grad * (x - mean[:, None])).sum(1)
    of_images, of_weight, of_bias = wanted
    kind = mean.dtype if weight is None else weight.dtype
    return (
        *((total, product) if of_images else (None, None)),
        (product * inverse).to(kind) if of_weight else None,
        total.to(kind) if of_bias else None,
    )


def returned(
    sent: Tensor,
    images: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    total: Tensor,
    product: Tensor,
    counts: Tensor,
) -> Tensor:
    """The gradient of the images, by the sums over all ranks."""
    grad, x = _flat(sent, mean.dtype), _flat(images, mean.dtype)
    count = counts.sum().to(mean.dtype)
    along = (product / count * inverse.square())[:, None] * (x - mean[:, None])
    scale = inverse if weight is None else inverse * weight
    return _unflat((grad - (total / count)[:, None] - along) * scale[:, None], images)


PARTS: Final[dict[str, Callable[..., Any]]] = {
    "batch_norm_stats": stats,
    "batch_norm_gather_stats": gathered,
    "batch_norm_gather_stats_with_counts": gathered,
    "batch_norm_elemt": normalised,
    "batch_norm_backward_reduce": reduced,
    "batch_norm_backward_elemt": returned,
}
