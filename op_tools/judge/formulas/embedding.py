"""Rows that the gradient of an embedding adds up."""

from __future__ import annotations

import torch

from ..rounding import MAX_LOW_TERMS
from .query import FORMULAS, Formula, FormulaQuery, Terms, arguments, incoming, position_of


def _embedding_backward(query: FormulaQuery) -> Terms | None:
    """Rows of the gradient, added up: the roundings of the summands."""
    index, weight, padding, longest, _, by_frequency, sparse = arguments(
        query.source, "input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"
    )
    if longest is not None or by_frequency or sparse or position_of(query, index, weight) != 1:
        return None
    sent, index = incoming(query), index.detach().reshape(-1).long()
    squares = torch.zeros(weight.shape, device=weight.device)
    squares.index_add_(0, index, sent.reshape(-1, sent.shape[-1]).square())
    if padding is not None:
        squares[padding] = 0.0
    hits = int(torch.bincount(index).max()) if index.numel() else 0
    if query.precision.stored > query.precision.inner:
        hits = min(hits, MAX_LOW_TERMS)
    variance = hits * query.precision.stored**2 if hits > 1 else query.precision.inner**2
    return Terms(squares, variance, variance)


FORMULAS.register("embedding_dense_backward", Formula(("embedding",), _embedding_backward))
