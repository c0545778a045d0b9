"""Products of matrices, and rows that an embedding adds up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from ...call.description import Tensor
from ...call.operators.registry import FUNCTIONS, last_name
from ..rounding import MAX_LOW_TERMS
from .query import (
    FORMULAS,
    Formula,
    FormulaQuery,
    Terms,
    arguments,
    gradient,
    incoming,
    position_of,
    single,
    weights_of_products,
)

if TYPE_CHECKING:
    from ..golden import Source

_MIN_TERMS: Final = 32  # of a long sum of products: enough to know its size within a factor


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


def products(query: FormulaQuery) -> Terms | None:
    """Some of the squared terms of each sum: fewer than all, and nearly always enough."""
    name, source = last_name(query.source.name), query.source
    if query.backward and name == "linear" and source.tensors[query.number] is arguments(source, *_LINEAR)[2]:
        sent = incoming(query)  # the bias gets the sum of the gradients
        squares = sent.reshape(-1, sent.shape[-1]).square().sum(0)
    else:
        left, right = _factors_of(name, query)
        if left.shape[-1] != right.shape[-2] or left.shape[:-2] != right.shape[:-2]:
            return None
        # a GPU has the time for all of them
        step = max(1, left.shape[-1] // _MIN_TERMS) if left.is_cpu else 1
        squares = torch.matmul(single(left[..., ::step]).square(), single(right[..., ::step, :]).square())
    of_squares, of_result = weights_of_products(query.precision, query.structure)
    if query.source.rounded_to is not None:  # autocast rounds the factors first
        of_squares *= 0.9
    return Terms(squares.reshape(query.golden.shape), of_squares, of_result)


def _factors_of(name: str, query: FormulaQuery) -> tuple[Tensor, Tensor]:
    """The matrices whose product a result is."""
    given, linear = _operands(name, query.source), name == "linear"
    left, right = given[0].detach(), given[1].detach()
    right = right.t() if linear else right
    if left.dim() < 2 or right.dim() < 2 or not left.is_floating_point() or not right.is_floating_point():
        raise ValueError("not two matrices")
    rows = left.dim() > 2 and right.dim() == 2
    left = left.reshape(-1, left.shape[-1]) if rows else left
    if not query.backward:
        return left, right
    grad = gradient(query)
    grad = grad.reshape(-1, grad.shape[-1]) if rows else grad
    if position_of(query, *given) == 0:
        return grad, right.transpose(-2, -1)
    return (grad.transpose(-2, -1), left) if linear else (left.transpose(-2, -1), grad)


def _operands(name: str, source: Source) -> Sequence[Tensor]:
    """The two matrices that a function multiplies, as they were given."""
    if name == "linear":
        return arguments(source, *_LINEAR)[:2]
    known = FUNCTIONS.by_name.get(name)
    if known is None or known.factors_at is None:
        raise ValueError("not known to multiply two matrices")
    return source.args[known.factors_at : known.factors_at + 2]


_LINEAR: Final = ("input", "weight", "bias")
