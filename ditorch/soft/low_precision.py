"""What an operator would return if its sums were kept in float16 or bfloat16.

Each emulation adds one term at a time and rounds the running sum to the low precision, as a
kernel without a wide accumulator does. It is exact about where it rounds, not fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["ACCUMULATING", "accumulate_in"]


def accumulate_in(operator: str, args: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """The first result of ``operator(*args)`` with sums rounded to ``dtype`` after each term."""
    with torch.no_grad():
        return ACCUMULATING[operator](dtype, *args)


def _sum(terms: torch.Tensor, dim: int, low: torch.dtype) -> torch.Tensor:
    total = torch.zeros_like(terms.select(dim, 0) if terms.shape[dim] else terms.sum(dim)).float()
    for term in terms.float().unbind(dim):
        total = (total + term).to(low).float()
    return total


def _matmul(a: torch.Tensor, b: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    a, b = a.float(), b.float()
    total = torch.zeros(*a.shape[:-1], b.shape[-1])
    for k in range(a.shape[-1]):
        total = (total + a[..., k : k + 1] * b[..., k : k + 1, :]).to(low).float()
    return total


def _mm(low: torch.dtype, a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
    return _matmul(a, b, low)


def _mv(low: torch.dtype, a: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    return _matmul(a, v[:, None], low)[:, 0]


def _dot(low: torch.dtype, a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
    return _sum(a.float() * b.float(), 0, low)


def _plus(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A product that is added to a bias."""

    def added(
        low: torch.dtype,
        bias: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        beta: float = 1,
        alpha: float = 1,
        *_: Any,
    ) -> torch.Tensor:
        scaled = product(low, a, b) * alpha
        return scaled if beta == 0 else scaled + bias.float() * beta

    return added


_addmm, _addmv = _plus(_mm), _plus(_mv)


def _sum_dims(
    low: torch.dtype,
    x: torch.Tensor,
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *_: Any,
) -> torch.Tensor:
    dims = sorted({d % max(x.dim(), 1) for d in (dim or range(x.dim()))})
    kept = [d for d in range(x.dim()) if d not in dims]
    total = _sum(x.permute(*kept, *dims).flatten(len(kept)) if dims else x.unsqueeze(-1), -1, low)
    for d in dims if keepdim else ():
        total = total.unsqueeze(d)
    return total


def _mean_dims(low: torch.dtype, x: torch.Tensor, dim: Any = None, keepdim: bool = False, *_: Any) -> torch.Tensor:
    total = _sum_dims(low, x, dim, keepdim)
    return total / (x.numel() / max(total.numel(), 1))


def _sum_all(low: torch.dtype, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return _sum_dims(low, x)


def _mean_all(low: torch.dtype, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return _mean_dims(low, x)


def _cumsum(low: torch.dtype, x: torch.Tensor, dim: int, *_: Any) -> torch.Tensor:
    if x.dim() == 0 or x.numel() == 0:
        return x.float()
    total = torch.zeros_like(x.select(dim, 0)).float()
    steps = []
    for term in x.float().unbind(dim):
        total = (total + term).to(low).float()
        steps.append(total)
    return torch.stack(steps, dim)


def _softmax(low: torch.dtype, x: torch.Tensor, dim: int, *_: Any) -> torch.Tensor:
    terms = (x.float() - x.float().amax(dim, keepdim=True)).exp()
    return terms / _sum(terms, dim, low).unsqueeze(dim)


def _log_softmax(low: torch.dtype, x: torch.Tensor, dim: int, *_: Any) -> torch.Tensor:
    shifted = x.float() - x.float().amax(dim, keepdim=True)
    return shifted - _sum(shifted.exp(), dim, low).log().unsqueeze(dim)


def _layer_norm(
    low: torch.dtype, x: torch.Tensor, shape: list[int], weight: Any, bias: Any, eps: float, *_: Any
) -> torch.Tensor:
    rows = x.float().flatten(x.dim() - len(shape))
    mean = _sum(rows, -1, low) / rows.shape[-1]
    centered = rows - mean.unsqueeze(-1)
    variance = _sum(centered * centered, -1, low) / rows.shape[-1]
    out = (centered * (variance.unsqueeze(-1) + eps).rsqrt()).view(x.shape)
    if weight is not None:
        out = out * weight.float()
    return out if bias is None else out + bias.float()


def _convolution(
    low: torch.dtype,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    *_: Any,
) -> torch.Tensor:
    if transposed or weight.dim() != 4:
        raise NotImplementedError("accumulate: only 2-d, non-transposed convolutions can be emulated")
    patches = F.unfold(x.float(), tuple(weight.shape[2:]), tuple(dilation), tuple(padding), tuple(stride))
    parts = []
    for columns, rows in zip(patches.chunk(groups, 1), weight.float().flatten(1).chunk(groups, 0)):
        parts.append(_matmul(rows.expand(x.shape[0], *rows.shape), columns, low))
    size = [
        (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (weight.shape[2 + i] - 1) - 1) // stride[i] + 1 for i in (0, 1)
    ]
    out = torch.cat(parts, 1).view(x.shape[0], weight.shape[0], *size)
    return out if bias is None else out + bias.float().view(1, -1, 1, 1)


ACCUMULATING: dict[str, Callable[..., torch.Tensor]] = {
    "aten::mm": _mm,
    "aten::mm.out": _mm,
    "aten::bmm": _mm,
    "aten::bmm.out": _mm,
    "aten::mv": _mv,
    "aten::dot": _dot,
    "aten::addmm": _addmm,
    "aten::addmm_": _addmm,
    "aten::addmm.out": _addmm,
    "aten::baddbmm": _addmm,
    "aten::baddbmm_": _addmm,
    "aten::baddbmm.out": _addmm,
    "aten::addmv": _addmv,
    "aten::sum": _sum_all,
    "aten::sum.dim_IntList": _sum_dims,
    "aten::mean": _mean_all,
    "aten::mean.dim": _mean_dims,
    "aten::cumsum": _cumsum,
    "aten::_softmax": _softmax,
    "aten::_log_softmax": _log_softmax,
    "aten::native_layer_norm": _layer_norm,
    "aten::convolution": _convolution,
}
