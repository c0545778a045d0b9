"""What a formula for sigma is asked and answers, and how it is registered."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ...call.description import Tensor
from ...call.operators.registry import Registry, kernel_names
from ...native.measuring import Bound
from ..rounding import STORED_TERMS, Precision, Structure

if TYPE_CHECKING:
    from ..golden import Source

import torch


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
