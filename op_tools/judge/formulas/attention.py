"""Attention: the roundings of what the weights multiply."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional

from ...call.description import Tensor
from .query import FORMULAS, WITH_DROPOUT, Formula, FormulaQuery, Terms, arguments, incoming, position_of, single

if TYPE_CHECKING:
    from ..golden import Source

_ATTENTION_PARAMETERS: Final = (
    *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
)


def _attention(query: FormulaQuery) -> Terms | None:
    """Weights times v: the roundings of v."""
    weights, _, _, value, _ = _attended(query.source)
    grown = query.precision.inner * math.sqrt(max(query.source.args[0].shape[-1], weights.shape[-1]))
    squares = torch.matmul(weights.square_(), value.square())
    return Terms(squares, max(grown, query.precision.stored) ** 2, grown**2)


def _attention_backward(query: FormulaQuery) -> Terms | None:
    """For v the roundings of the gradient, for q and k those of v on the way through the weights."""
    source, sent = query.source, incoming(query).square()
    weights, q, k, v, scale = _attended(source)
    kept = 1.0 - float(arguments(source, *_ATTENTION_PARAMETERS)[4] or 0.0)
    squared = weights.square_().div_(kept * kept)
    grown = query.precision.inner * math.sqrt(max(max(t.shape) for t in (q, k, v)))
    which = position_of(query, *source.args[:3])
    if which == 2:
        squares = torch.matmul(squared.transpose(-2, -1), sent)
    else:
        squared.mul_(torch.matmul(sent, v.square().transpose(-2, -1))).mul_(scale * scale)
        other = (k if which == 0 else q).square()
        squares = torch.matmul(squared if which == 0 else squared.transpose(-2, -1), other)
    return Terms(squares, max(grown, query.precision.stored) ** 2, grown**2)


def _attended(source: Source) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """The attention weights, query, key, value and scale."""
    query, key, value, mask, _, causal, scale, grouped = arguments(source, *_ATTENTION_PARAMETERS)
    if grouped or len(source.args) < 3:
        raise ValueError("grouped-query attention")
    query, key, value = single(query), single(key), single(value)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    scores = torch.matmul(query, key.transpose(-2, -1)).mul_(scale)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(later, -math.inf)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(single(mask))
    return functional.softmax(scores, -1), query, key, value, scale


_ATTENTION: Final = "scaled_dot_product_flash_attention_for_cpu"
# With dropout the golden run goes step by step. A device's fused kernel still takes the result that it has stored.
WITH_DROPOUT.append(Formula(("scaled_dot_product_attention",), _attention_backward))
FORMULAS.register(_ATTENTION, Formula(("scaled_dot_product_attention",), _attention))
FORMULAS.register(
    f"{_ATTENTION}+{_ATTENTION}_backward", Formula(("scaled_dot_product_attention",), _attention_backward)
)
