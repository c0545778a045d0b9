"""Lower bounds of sigma for common operators, by formula: no probe has to run the call again.

Each formula counts some of the roundings that the probes of `rounding.py` draw at random, those that dominate where a
result is near zero, and leaves the others out. So it never exceeds what the probes would find: what it explains is
explained, and what it does not is probed. Squares are computed in float32: one digit is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.nn import functional

from ..call import facts
from ..call.description import Tensor, tensors_in
from ..call.operators.registry import FUNCTIONS, Kind, Registry, kernel_names, last_name
from ..native.measuring import Bound
from .rounding import MAX_LOW_TERMS, STORED_TERMS, Precision, Structure, roundings

if TYPE_CHECKING:
    from .golden import Source

_MIN_TERMS: Final = 32  # of a long sum of products: enough to know its size within a factor


class Terms(NamedTuple):
    """Sigma of each element y: the root of `of_squares · squares + of_result · y²`."""

    squares: Tensor
    of_squares: float
    of_result: float

    def sigma(self, golden: Tensor) -> Tensor:
        """That of each element of a reference (`terms.sigma(golden)`)."""
        of_result = golden.mul(math.sqrt(self.of_result)).square_().to(self.squares.dtype)
        return self.squares.mul(self.of_squares).add_(of_result).sqrt_()

    def added_to(self, bound: Bound) -> tuple[Bound, Tensor]:
        """The bound that follows, and its squares (`measures.beyond(sides, *terms.added_to(bound))`)."""
        return bound._replace(of_squares=self.of_squares, of_result=self.of_result), self.squares


def weights_of_products(precision: Precision, structure: Structure) -> tuple[float, float]:
    """The variance of a sum of products: the first of these times the sum of its squared terms, plus the second times
    its square. At most what the probes tend to (see `Noise._units`), which take all partial sums for stored ones."""
    grown = precision.inner * math.sqrt(structure.longest_sum)
    steps = structure.steps_in_low if precision.stored > precision.inner else 1.0
    return 2 * max(grown * steps, precision.stored * (steps if steps > 1 else STORED_TERMS)) ** 2, grown**2


class FormulaQuery(NamedTuple):
    """One result of a call, whose roundings a formula counts."""

    source: Source
    number: int  # among the results, or among the tensors of the arguments for a gradient
    backward: bool
    golden: Tensor
    precision: Precision
    structure: Structure


class Formula(NamedTuple):
    """The terms of calls in which certain kernels do all the arithmetic."""

    functions: Collection[str]  # whose arguments it understands
    terms: Callable[[FormulaQuery], Terms | None]


_FORMULAS: Final = Registry[Formula]("formula for", kernel_names)


def terms(query: FormulaQuery) -> Terms | None:
    """The terms of one result, or None where no formula applies (`terms(FormulaQuery(...))`)."""
    structure = query.structure
    known = _BY_KERNELS.get(structure.kernels)
    if known is None and query.source.draws and last_name(query.source.name) in _FUSED_WITH_DROPOUT.functions:
        known = _FUSED_WITH_DROPOUT if query.backward else None
    if known is None:
        if not structure.sums_of_products or not structure.contracts:
            return None
    elif last_name(query.source.name) not in known.functions:
        return None
    try:
        with torch.no_grad():
            found = _products(query) if known is None else known.terms(query)
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError):  # arguments that were not foreseen
        return None
    return found if found is not None and found.squares.shape == query.golden.shape else None


def _arguments(source: Source, *names: str) -> list[Any]:
    """The values of these parameters, in order; None for those not given."""
    found: list[Any] = list(source.args[: len(names)])
    found += [source.kwargs.get(name) for name in names[len(found) :]]
    return found


def _single(tensor: Tensor) -> Tensor:
    """A tensor in float32; may be the tensor itself, so never write to it."""
    return tensor.detach().to(torch.float32)


def _gradient(query: FormulaQuery) -> Tensor:
    """That of the only result."""
    grads = query.source.grad_outputs or ()
    if len(grads) != 1 or grads[0] is None:
        raise ValueError("not exactly one gradient")
    return grads[0].detach()


def _sent(query: FormulaQuery) -> Tensor:
    return _single(_gradient(query))


def _which(query: FormulaQuery, *candidates: Any) -> int:
    """Position among these arguments of the one that a gradient belongs to."""
    target = query.source.tensors[query.number]
    found = [n for n, candidate in enumerate(candidates) if candidate is target]
    if len(found) != 1:
        raise ValueError("the same tensor in two arguments")
    return found[0]


# --- elementwise ------------------------------------------------------------------------------------------------


def _gelu(query: FormulaQuery) -> Terms | None:
    """x/2 · (1 + erf): what goes into erf and what comes out of it counts in full where the sum is near zero."""
    x, approximate = _arguments(query.source, "input", "approximate")
    if approximate not in (None, "none"):
        return None
    unit, x = query.precision.inner, _single(x)
    squares = torch.sub(_single(query.golden), x, alpha=0.5).mul_(_ERF).square_()  # x/2 · erf
    slope = x.square().mul_(-0.5).exp_().mul_(x).mul_(x).mul_(_SLOPE * _INTO_ERF).square_()
    # of the result: x/2, the sum, the product, and the kernel as a whole
    return Terms(squares.add_(slope), unit**2, 1.75 * unit**2)


def _gelu_backward(query: FormulaQuery) -> Terms | None:
    """g · ((1 + erf)/2 + x · density)."""
    x, approximate = _arguments(query.source, "input", "approximate")
    if approximate not in (None, "none"):
        return None
    unit, x = query.precision.inner, _single(x)
    erf = torch.erf(x * math.sqrt(0.5))
    # the sum and its half; the error function; what goes into it, and the product with the density
    squares = erf.add(1).square_().mul_(0.125).add_(erf.square_(), alpha=(0.5 * _ERF) ** 2)
    slope = x.square().mul_(-0.5).exp_().mul_(x).mul_(_SLOPE).square_()
    squares.add_(slope, alpha=_INTO_ERF**2 + 1.5).mul_(_sent(query).square())
    return Terms(squares, unit**2, 2.25 * unit**2)


_FORMULAS.register("gelu", Formula(("gelu",), _gelu))
_FORMULAS.register("gelu+gelu_backward", Formula(("gelu",), _gelu_backward))


def _added_to(query: FormulaQuery) -> Terms | None:
    """self + alpha · other, self + value · a · b, self + value · a / b: all that goes in, each rounded once."""
    source, name = query.source, query.structure.kernels[0]
    alpha = source.kwargs.get("alpha", 1)
    if query.backward or not source.args or (name == "add" and alpha in (1, -1)):
        return None  # correctly rounded, or another operator than its name says
    summand = _single(list(tensors_in(source.args[0]))[query.number])
    result = _single(query.golden)
    added = torch.sub(result, summand).square_()
    squares = added.mul_(1 if name == "add" else 2).add_(summand.square())
    low = facts.computes_low(torch.ops.aten.add.Tensor, query.precision.device, {"alpha": alpha})
    unit = query.precision.stored if low else query.precision.inner
    return Terms(squares, unit**2, unit**2)


def _summed(query: FormulaQuery) -> Terms | None:
    """A broadcast operand gets the sum of its gradients."""
    if not query.backward or "alpha" in query.source.kwargs or len(query.source.args) != 2:
        return None
    sent, shape = _sent(query), query.golden.shape
    length = sent.numel() // max(1, query.golden.numel())
    if length <= 1:
        return None
    variance = query.precision.inner**2 * roundings(Kind.REDUCE, length)
    return Terms(sent.square().sum_to_size(shape), variance, variance)


_ADDS: Final = [
    f"{before}add{what}{after}" for before in ("", "_foreach_") for what in ("", "cmul", "cdiv") for after in ("", "_")
]
_FORMULAS.register("add addcmul addcdiv", Formula(_ADDS, _added_to))
_FORMULAS.register("add+sum", Formula(_ADDS, _summed))
_SLOPE: Final = 1 / math.sqrt(2 * math.pi)  # of erf(x / sqrt(2)) / 2 at zero


_ERF: Final = facts.facts_of(torch.ops.aten.erf.default).accuracy
# Roundings of the argument of erf: its own jitter, the product x · sqrt(1/2) and that number itself.
_INTO_ERF: Final = math.sqrt(_ERF**2 + 0.25 + 1)


# --- layer_norm -------------------------------------------------------------------------------------------------


def _layer_norm(query: FormulaQuery) -> Terms | None:
    """(x - mean) · rstd · w + b: the roundings of all four, of w and of b."""
    x, shape, weight, bias, eps = _arguments(query.source, "input", "normalized_shape", "weight", "bias", "eps")
    unit, length, dims = query.precision.inner, math.prod(shape), list(range(-len(shape), 0))
    few = roundings(Kind.REDUCE, length)
    x = _single(x)
    n, _, rstd = torch.native_layer_norm(x, list(shape), None, None, 1e-5 if eps is None else eps)
    squared, squared_n = x.square(), n.square()
    # rounding term j of the sums behind mean and variance moves element i by x_j (1 + n_i n_j) rstd / length
    weighed = squared * n
    sums = [weighed.mul(n).sum(dims, True), weighed.sum(dims, True).mul_(2), squared.sum(dims, True)]
    own = squared.mul_(squared_n.add(1).mul_(-1 / length).add_(1).square_()).mul_(few)
    shared = sums[0].mul(n).add_(sums[1]).mul_(n).add_(sums[2]).clamp_(min=0).mul_(1 / length)
    squares = shared.add_(own).mul_(rstd.square())
    if weight is not None:
        squares.add_(squared_n, alpha=few).mul_(_single(weight).square())
    if bias is not None:
        squares.add_(_single(bias).square(), alpha=few)
    return Terms(squares, unit**2, few * unit**2)


def _layer_norm_backward(query: FormulaQuery) -> Terms | None:
    x, shape, weight, bias, eps = _arguments(query.source, "input", "normalized_shape", "weight", "bias", "eps")
    sent, unit = _sent(query), query.precision.inner
    few = roundings(Kind.REDUCE, max(max(t.shape, default=1) for t in (x, sent)))
    length, dims = math.prod(shape), list(range(-len(shape), 0))
    outer = list(range(x.dim() - len(shape)))
    many = few + (math.prod(x.shape[d] for d in outer) if outer else 0)
    which = _which(query, x, weight, bias)
    if which == 2:  # g, summed over the rows
        return Terms(sent.square().sum(outer) if outer else sent.square(), many * unit**2, many * unit**2)
    n, _, rstd = torch.native_layer_norm(_single(x), list(shape), None, None, 1e-5 if eps is None else eps)
    if which == 1:  # g · n, summed over the rows
        product = n.mul_(sent).square_()
        return Terms(product.sum(outer) if outer else product, many * unit**2, many * unit**2)
    # rstd · (gw - mean(gw) - n · mean(gw · n)): g and w as far as they concern the same element, and both sums
    scaled = sent if weight is None else sent * _single(weight)
    with_n = scaled * n
    sum_of, sum_with = scaled.sum(dims, True).square_(), with_n.sum(dims, True).square_()
    squared, squared_n = scaled.square(), n.square_()
    sum_of.add_(squared.sum(dims, True))
    sum_with.add_(with_n.square_().sum(dims, True))
    own = squared.mul_(squared_n.add(1).mul_(-1 / length).add_(1).square_()).mul_((1 if weight is None else 2) * few)
    squares = squared_n.mul_(sum_with).add_(sum_of).mul_(1 / length).add_(own).mul_(rstd.square())
    return Terms(squares, unit**2, few * unit**2)


_NORMS: Final = ("layer_norm", "native_layer_norm")
_FORMULAS.register("native_layer_norm", Formula(_NORMS, _layer_norm))
_FORMULAS.register("native_layer_norm+native_layer_norm_backward", Formula(_NORMS, _layer_norm_backward))

# --- embedding --------------------------------------------------------------------------------------------------


def _embedding_backward(query: FormulaQuery) -> Terms | None:
    """Rows of the gradient, added up: the roundings of the summands."""
    index, weight, padding, longest, _, by_frequency, sparse = _arguments(
        query.source, "input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"
    )
    if longest is not None or by_frequency or sparse or _which(query, index, weight) != 1:
        return None
    sent, index = _sent(query), index.detach().reshape(-1).long()
    squares = torch.zeros(weight.shape, device=weight.device)
    squares.index_add_(0, index, sent.reshape(-1, sent.shape[-1]).square())
    if padding is not None:
        squares[padding] = 0.0
    hits = int(torch.bincount(index).max()) if index.numel() else 0
    if query.precision.stored > query.precision.inner:
        hits = min(hits, MAX_LOW_TERMS)
    variance = hits * query.precision.stored**2 if hits > 1 else query.precision.inner**2
    return Terms(squares, variance, variance)


_FORMULAS.register("embedding_dense_backward", Formula(("embedding",), _embedding_backward))

# --- attention --------------------------------------------------------------------------------------------------


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
    source, sent = query.source, _sent(query).square()
    weights, q, k, v, scale = _attended(source)
    kept = 1.0 - float(_arguments(source, *_ATTENTION_PARAMETERS)[4] or 0.0)
    squared = weights.square_().div_(kept * kept)
    grown = query.precision.inner * math.sqrt(max(max(t.shape) for t in (q, k, v)))
    which = _which(query, *source.args[:3])
    if which == 2:
        squares = torch.matmul(squared.transpose(-2, -1), sent)
    else:
        squared.mul_(torch.matmul(sent, v.square().transpose(-2, -1))).mul_(scale * scale)
        other = (k if which == 0 else q).square()
        squares = torch.matmul(squared if which == 0 else squared.transpose(-2, -1), other)
    return Terms(squares, max(grown, query.precision.stored) ** 2, grown**2)


def _attended(source: Source) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """The attention weights, query, key, value and scale."""
    query, key, value, mask, _, causal, scale, grouped = _arguments(source, *_ATTENTION_PARAMETERS)
    if grouped or len(source.args) < 3:
        raise ValueError("grouped-query attention")
    query, key, value = _single(query), _single(key), _single(value)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    scores = torch.matmul(query, key.transpose(-2, -1)).mul_(scale)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(later, -math.inf)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(_single(mask))
    return functional.softmax(scores, -1), query, key, value, scale


_ATTENTION: Final = "scaled_dot_product_flash_attention_for_cpu"
# With dropout the golden run goes step by step. A device's fused kernel still takes the result that it has stored.
_FUSED_WITH_DROPOUT: Final = Formula(("scaled_dot_product_attention",), _attention_backward)
_FORMULAS.register(_ATTENTION, Formula(("scaled_dot_product_attention",), _attention))
_FORMULAS.register(
    f"{_ATTENTION}+{_ATTENTION}_backward", Formula(("scaled_dot_product_attention",), _attention_backward)
)

# --- products of matrices ---------------------------------------------------------------------------------------


def _products(query: FormulaQuery) -> Terms | None:
    """Some of the squared terms of each sum: fewer than all, and nearly always enough."""
    name, source = last_name(query.source.name), query.source
    if query.backward and name == "linear" and source.tensors[query.number] is _arguments(source, *_LINEAR)[2]:
        sent = _sent(query)  # the bias gets the sum of the gradients
        squares = sent.reshape(-1, sent.shape[-1]).square().sum(0)
    else:
        left, right = _factors_of(name, query)
        if left.shape[-1] != right.shape[-2] or left.shape[:-2] != right.shape[:-2]:
            return None
        # a GPU has the time for all of them
        step = max(1, left.shape[-1] // _MIN_TERMS) if left.is_cpu else 1
        squares = torch.matmul(_single(left[..., ::step]).square(), _single(right[..., ::step, :]).square())
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
    grad = _gradient(query)
    grad = grad.reshape(-1, grad.shape[-1]) if rows else grad
    if _which(query, *given) == 0:
        return grad, right.transpose(-2, -1)
    return (grad.transpose(-2, -1), left) if linear else (left.transpose(-2, -1), grad)


def _operands(name: str, source: Source) -> Sequence[Tensor]:
    """The two matrices that a function multiplies, as they were given."""
    if name == "linear":
        return _arguments(source, *_LINEAR)[:2]
    known = FUNCTIONS.by_name.get(name)
    if known is None or known.factors_at is None:
        raise ValueError("not known to multiply two matrices")
    return source.args[known.factors_at : known.factors_at + 2]


_LINEAR: Final = ("input", "weight", "bias")
_BY_KERNELS: Final = {tuple(kernels.split("+")): formula for kernels, formula in _FORMULAS.by_name.items()}
