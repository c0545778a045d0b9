"""Norms: the roundings of the mean, of the deviation, of weight and bias, and of the sums behind their gradients."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch

from ...call.description import Tensor
from ...call.operators.registry import Kind
from ..rounding import roundings
from .query import FORMULAS, Formula, FormulaQuery, Terms, arguments, incoming, position_of, single


def _layer_norm(query: FormulaQuery) -> Terms | None:
    """(x - mean) · rstd · w + b: the roundings of all four, of w and of b."""
    x, shape, weight, bias, eps = arguments(query.source, "input", "normalized_shape", "weight", "bias", "eps")
    unit, length, dims = query.precision.inner, math.prod(shape), list(range(-len(shape), 0))
    few = roundings(Kind.REDUCE, length)
    x = single(x)
    n, _, rstd = torch.native_layer_norm(x, list(shape), None, None, 1e-5 if eps is None else eps)
    squared, squared_n = x.square(), n.square()
    # rounding term j of the sums behind mean and variance moves element i by x_j (1 + n_i n_j) rstd / length
    weighed = squared * n
    sums = [weighed.mul(n).sum(dims, True), weighed.sum(dims, True).mul_(2), squared.sum(dims, True)]
    own = squared.mul_(squared_n.add(1).mul_(-1 / length).add_(1).square_()).mul_(few)
    shared = sums[0].mul(n).add_(sums[1]).mul_(n).add_(sums[2]).clamp_(min=0).mul_(1 / length)
    squares = shared.add_(own).mul_(rstd.square())
    if weight is not None:
        squares.add_(squared_n, alpha=few).mul_(single(weight).square())
    if bias is not None:
        squares.add_(single(bias).square(), alpha=few)
    return Terms(squares, unit**2, few * unit**2)


def _layer_norm_backward(query: FormulaQuery) -> Terms | None:
    x, shape, weight, bias, eps = arguments(query.source, "input", "normalized_shape", "weight", "bias", "eps")
    sent, unit = incoming(query), query.precision.inner
    few = roundings(Kind.REDUCE, max(max(t.shape, default=1) for t in (x, sent)))
    length, dims = math.prod(shape), list(range(-len(shape), 0))
    outer = list(range(x.dim() - len(shape)))
    many = few + (math.prod(x.shape[d] for d in outer) if outer else 0)
    which = position_of(query, x, weight, bias)
    if which == 2:  # g, summed over the rows
        return Terms(sent.square().sum(outer) if outer else sent.square(), many * unit**2, many * unit**2)
    n, _, rstd = torch.native_layer_norm(single(x), list(shape), None, None, 1e-5 if eps is None else eps)
    if which == 1:  # g · n, summed over the rows
        product = n.mul_(sent).square_()
        return Terms(product.sum(outer) if outer else product, many * unit**2, many * unit**2)
    # rstd · (gw - mean(gw) - n · mean(gw · n)): g and w as far as they concern the same element, and both sums
    scaled = sent if weight is None else sent * single(weight)
    with_n = scaled * n
    sum_of, sum_with = scaled.sum(dims, True).square_(), with_n.sum(dims, True).square_()
    squared, squared_n = scaled.square(), n.square_()
    sum_of.add_(squared.sum(dims, True))
    sum_with.add_(with_n.square_().sum(dims, True))
    own = squared.mul_(squared_n.add(1).mul_(-1 / length).add_(1).square_()).mul_((1 if weight is None else 2) * few)
    squares = squared_n.mul_(sum_with).add_(sum_of).mul_(1 / length).add_(own).mul_(rstd.square())
    return Terms(squares, unit**2, few * unit**2)


_NORMS: Final = ("layer_norm", "native_layer_norm")
FORMULAS.register("native_layer_norm", Formula(_NORMS, _layer_norm))
FORMULAS.register("native_layer_norm+native_layer_norm_backward", Formula(_NORMS, _layer_norm_backward))


# --- batch_norm -------------------------------------------------------------------------------------------------


_BATCH_NORM: Final = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


class _Batch(NamedTuple):
    """What a batch norm in training has computed, in float32."""

    dims: list[int]  # that the means are taken over
    length: int  # elements in each mean
    normal: Tensor  # (x - mean) · rstd
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None  # in the shape of the means
    few: float  # roundings of what goes in


def _batch(query: FormulaQuery) -> _Batch:
    x, _, _, weight, _, training, _, eps = arguments(query.source, *_BATCH_NORM)
    if not training:
        raise ValueError("the statistics of earlier batches")
    x = single(x)
    dims = [d for d in range(x.dim()) if d != 1]
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    rstd = variance.add_(1e-5 if eps is None else eps).rsqrt_()
    few = roundings(Kind.REDUCE, query.structure.longest_sum)
    weight = None if weight is None else _like(weight, rstd)
    return _Batch(dims, x.numel() // x.shape[1], (x - mean).mul_(rstd), mean, rstd, weight, few)


def _like(weight: Tensor, means: Tensor) -> Tensor:
    return single(weight).view(means.shape)


def _batch_norm(query: FormulaQuery) -> Terms | None:
    """(x - mean) · rstd · w + b: x as far as it concerns the same element, w and b."""
    x, _, _, _, bias, *_ = arguments(query.source, *_BATCH_NORM)
    batch, variance = _batch(query), query.precision.inner**2
    normal = batch.normal.square_()
    squares = normal.add(1).mul_(-1 / batch.length).add_(1).mul_(single(x)).mul_(batch.rstd).square_()
    if batch.weight is not None:
        squares.add_(normal).mul_(batch.weight.square())
    if bias is not None:
        squares.add_(_like(bias, batch.rstd).square())
    return Terms(squares, batch.few * variance, batch.few * variance)


def _batch_norm_backward(query: FormulaQuery) -> Terms | None:
    """As those of a layer norm; mean and deviation are those of a channel, and sums run along all of it.

    Mean and deviation were stored in between: they may have been rounded as results are.
    """
    x, _, _, weight, bias, *_ = arguments(query.source, *_BATCH_NORM)
    given, variance = incoming(query), query.precision.inner**2
    position = position_of(query, x, weight, bias)
    if position == 2:  # g, summed up
        dims = [d for d in range(given.dim()) if d != 1]
        many = variance * (given.numel() // given.shape[1])
        return Terms(given.square().sum(dims), many, many)
    batch, stored = _batch(query), query.precision.stored**2 / variance
    moved, normal = batch.mean.mul(batch.rstd), batch.normal  # by how much n moves with the mean
    of_product = normal.mul(given)
    if position == 1:  # g · n, summed up
        squares = given.sum(batch.dims, True).mul_(moved).square_().add_(of_product.sum(batch.dims, True).square_())
        squares = squares.mul_(stored / batch.length).add_(of_product.square_().sum(batch.dims, True))
        return Terms(squares.flatten(), variance * batch.length, variance * batch.length)
    # rstd · w · (g - mean(g) - n · mean(g · n)): both sums, and g as far as it concerns the same element
    scale = batch.rstd if batch.weight is None else batch.rstd * batch.weight
    mean, product, squared = given.mean(batch.dims, True), of_product.mean(batch.dims, True), given.square()
    by_mean = normal.mul(mean).add_(product).mul_(moved).square_()
    by_rstd = given.sub(mean).sub_(normal.mul(product), alpha=3).square_()
    normal = normal.square_()
    of_mean, of_product = squared.mean(batch.dims, True), of_product.square_().mean(batch.dims, True)
    own = normal.add(1).mul_(-1 / batch.length).add_(1).square_().mul_(squared).mul_(batch.few)
    squares = own.add_(of_mean).add_(normal.mul_(of_product)).add_(by_mean.add_(by_rstd), alpha=stored)
    return Terms(squares.mul_(scale.square()), variance, (0.0 if batch.weight is None else batch.few) * variance)


FORMULAS.register("native_batch_norm", Formula(("batch_norm",), _batch_norm))
FORMULAS.register("native_batch_norm+native_batch_norm_backward", Formula(("batch_norm",), _batch_norm_backward))
