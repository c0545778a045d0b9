"""How far rounding alone may move a result: the golden run repeated with every rounding drawn at random.

Stochastic arithmetic at the level of operators. A kernel computes with some unit of rounding; the golden run does not.
So the golden run is done again, and each operator inside it gets its inputs, its result and what it stores
multiplied by 1 ± the unit that a correct kernel of the device has there. How far the results move, on
average, is what rounding can do to *this* call with *these* values: near zero, after cancellation, through
a chain of operators, in backward. It needs no formula for any operator, and no tolerance.
"""

from __future__ import annotations

import functools
import math
from typing import Final

import torch

from ..call.facts import Kind

Tensor = torch.Tensor

SINGLE: Final = 2.0**-24  # the unit of rounding of float32
_FINEST: Final = 2.0**-40  # unit of probes: well above that of float64, and small enough for its effects to be linear
_LANES: Final = 256  # of parallel sums


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to nearest (`unit(torch.float32) == 2**-24`)."""
    return torch.finfo(dtype).eps / 2


class Precision:
    """The dtype that results are stored in and the unit that kernels of a device compute with inside."""

    def __init__(self, stored: torch.dtype, device: str = "") -> None:
        info = torch.finfo(stored)
        self.dtype, self.device = stored, device
        self.stored = info.eps / 2
        self.inner = min(self.stored, SINGLE)
        self.largest = info.max
        self.smallest = info.smallest_normal * info.eps  # the distance between subnormal numbers
        self.magnified = 1.0

    def for_probes(self) -> Precision:
        """As coarse as probes in float64 must be: roundings of float64 itself would vanish in their arithmetic."""
        if self.stored > _FINEST:
            return self
        probing = Precision(self.dtype, self.device)
        probing.magnified = _FINEST / self.stored
        probing.stored = probing.inner = _FINEST
        return probing


@functools.cache
def precision_of(stored: torch.dtype, device: str = "") -> Precision:
    """The same for every question (`precision_of(torch.half).stored`)."""
    return Precision(stored, device)


def weights_of_products(precision: Precision, length: int, steps_in_low: float = 1.0) -> tuple[float, float]:
    """What the probes of a sum of products tend to: its variance is the first of these times the sum of its squared
    terms, plus the second times its square (see `Noise._units`)."""
    grown = precision.inner * math.sqrt(length)
    steps = steps_in_low if precision.stored > precision.inner else 1.0
    return 2 * (max(grown, precision.stored) * steps) ** 2, grown**2


def sigma_of_products(
    precision: Precision, length: int, squares: Tensor, result: Tensor, steps_in_low: float = 1.0
) -> Tensor:
    """Sigma of sums of products, from the sums of their squared terms."""
    of_squares, of_result = weights_of_products(precision, length, steps_in_low)
    terms = squares.mul(of_squares)
    return terms.add_(result.mul(math.sqrt(of_result)).square_().to(squares.dtype)).sqrt_()


def roundings(kind: str, length: int, straight: bool = False) -> float:
    """How many roundings a term meets on its way into a sum; they add up like a random walk.

    Products of matrices run along the whole sum, and so do the loops inside of fused kernels (`straight`); other
    sums are done in parallel lanes that are joined pairwise.
    """
    if kind == Kind.CONTRACT or straight:
        return length
    return min(length, 1 + math.log2(length) + length / _LANES)
