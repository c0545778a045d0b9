"""What a formula for sigma is asked and answers, how it is registered and found; and products of matrices.

Products are most of what is asked: they need no other file.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ...call.description import Tensor
from ...call.operators.registry import FUNCTIONS, Registry, kernel_names, last_name
from ...native.measuring import Bound
from ..rounding import STORED_TERMS, Precision, Structure

if TYPE_CHECKING:
    from ..golden import Source

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


WITH_DROPOUT: Final[list[Formula]] = []  # of backwards whose golden run, with dropout, goes step by step
FORMULAS: Final = Registry[Formula]("formula for", kernel_names)


def arguments(source: Source, *names: str) -> list[Any]:
    """The values of these parameters, in order; None for those not given."""
    found: list[Any] = list(source.args[: len(names)])
    found += [source.kwargs.get(name) for name in names[len(found) :]]
    return found


def single(tensor: Tensor) -> Tensor:
    """A tensor in float32; may be the tensor itself, so never write to it."""
    return tensor.detach().to(torch.float32)


def gradient(query: FormulaQuery) -> Tensor:
    """That of the only result."""
    grads = query.source.grad_outputs or ()
    if len(grads) != 1 or grads[0] is None:
        raise ValueError("not exactly one gradient")
    return grads[0].detach()


def incoming(query: FormulaQuery) -> Tensor:
    return single(gradient(query))


def position_of(query: FormulaQuery, *candidates: Any) -> int:
    """Position among these arguments of the one that a gradient belongs to."""
    target = query.source.tensors[query.number]
    found = [n for n, candidate in enumerate(candidates) if candidate is target]
    if len(found) != 1:
        raise ValueError("the same tensor in two arguments")
    return found[0]


@functools.cache
def _by_kernels() -> dict[tuple[str, ...], Formula]:
    return {tuple(kernels.split("+")): formula for kernels, formula in FORMULAS.by_name.items()}


def terms(query: FormulaQuery) -> Terms | None:
    """The terms of one result, or None where no formula applies (`terms(FormulaQuery(...))`)."""
    structure = query.structure
    known = _by_kernels().get(structure.kernels)
    if known is None and query.source.draws and query.backward:
        known = next((f for f in WITH_DROPOUT if last_name(query.source.name) in f.functions), None)
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


# --- products of matrices ---------------------------------------------------------------------------------------


def _products(query: FormulaQuery) -> Terms | None:
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
