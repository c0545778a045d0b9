"""Elementwise calls: GELU, and sums of products that are done element by element."""

from __future__ import annotations

import math
from typing import Final

import torch

from ...call import facts
from ...call.description import Tensor, tensors_in
from ...call.operators.registry import Kind
from ..rounding import roundings
from .query import FORMULAS, Formula, FormulaQuery, Terms, arguments, incoming, position_of, single


def _gelu(query: FormulaQuery) -> Terms | None:
    """x/2 · (1 + erf): what goes into erf and what comes out of it counts in full where the sum is near zero."""
    x, approximate = arguments(query.source, "input", "approximate")
    if approximate not in (None, "none"):
        return None
    unit, x = query.precision.inner, single(x)
    squares = torch.sub(single(query.golden), x, alpha=0.5).mul_(_ERF).square_()  # x/2 · erf
    slope = x.square().mul_(-0.5).exp_().mul_(x).mul_(x).mul_(_SLOPE * _INTO_ERF).square_()
    # of the result: x/2, the sum, the product, and the kernel as a whole
    return Terms(squares.add_(slope), unit**2, 1.75 * unit**2)


def _gelu_backward(query: FormulaQuery) -> Terms | None:
    """g · ((1 + erf)/2 + x · density)."""
    x, approximate = arguments(query.source, "input", "approximate")
    if approximate not in (None, "none"):
        return None
    unit, x = query.precision.inner, single(x)
    erf = torch.erf(x * math.sqrt(0.5))
    # the sum and its half; the error function; what goes into it, and the product with the density
    squares = erf.add(1).square_().mul_(0.125).add_(erf.square_(), alpha=(0.5 * _ERF) ** 2)
    slope = x.square().mul_(-0.5).exp_().mul_(x).mul_(_SLOPE).square_()
    squares.add_(slope, alpha=_INTO_ERF**2 + 1.5).mul_(incoming(query).square())
    return Terms(squares, unit**2, 2.25 * unit**2)


FORMULAS.register("gelu", Formula(("gelu",), _gelu))
FORMULAS.register("gelu+gelu_backward", Formula(("gelu",), _gelu_backward))


def _added_to(query: FormulaQuery) -> Terms | None:
    """self + alpha · other, self + value · a · b, self + value · a / b: all that goes in, each rounded once."""
    source, name = query.source, query.structure.kernels[0]
    alpha = source.kwargs.get("alpha", 1)
    if query.backward or not source.args or (name == "add" and alpha in (1, -1)):
        return None  # correctly rounded, or another operator than its name says
    summand = single(list(tensors_in(source.args[0]))[query.number])
    result = single(query.golden)
    added = torch.sub(result, summand).square_()
    squares = added.mul_(1 if name == "add" else 2).add_(summand.square())
    low = facts.computes_low(torch.ops.aten.add.Tensor, query.precision.device, {"alpha": alpha})
    unit = query.precision.stored if low else query.precision.inner
    return Terms(squares, unit**2, unit**2)


def _summed(query: FormulaQuery) -> Terms | None:
    """A broadcast operand gets the sum of its gradients."""
    if not query.backward or "alpha" in query.source.kwargs or len(query.source.args) != 2:
        return None
    return _of_sum(query, incoming(query))


def _summed_products(query: FormulaQuery) -> Terms | None:
    """A broadcast factor gets the sum of its gradients times the other one; what is added to the product, their sum."""
    *added, left, right = query.source.args
    if not query.backward or query.source.kwargs or len(added) > 1:
        return None
    position, sent = position_of(query, left, right, *added), incoming(query)
    return _of_sum(query, sent if position == 2 else sent * single((right, left)[position]))


def _of_sum(query: FormulaQuery, terms: Tensor) -> Terms | None:
    """That of terms which are added up to the shape of the result, in parallel lanes."""
    length = terms.numel() // max(1, query.golden.numel())
    if length <= 1:
        return None
    variance = query.precision.inner**2 * roundings(Kind.REDUCE, length)
    return Terms(terms.square().sum_to_size(query.golden.shape), variance, variance)


_ADDS: Final = [
    f"{before}add{what}{after}" for before in ("", "_foreach_") for what in ("", "cmul", "cdiv") for after in ("", "_")
]
FORMULAS.register("add addcmul addcdiv", Formula(_ADDS, _added_to))
FORMULAS.register("add+sum", Formula(_ADDS, _summed))
FORMULAS.register("addcmul+mul+mul+sum+sum", Formula(("addcmul",), _summed_products))
FORMULAS.register("mul+mul+sum", Formula(("mul",), _summed_products))
_SLOPE: Final = 1 / math.sqrt(2 * math.pi)  # of erf(x / sqrt(2)) / 2 at zero


_ERF: Final = facts.facts_of(torch.ops.aten.erf.default).accuracy
# Roundings of the argument of erf: its own jitter, the product x · sqrt(1/2) and that number itself.
_INTO_ERF: Final = math.sqrt(_ERF**2 + 0.25 + 1)
