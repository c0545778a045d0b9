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
from collections.abc import Sequence
from typing import Any, Final

import torch

from ..call import facts as op_facts
from ..call.facts import Facts, Kind
from ..compat import DispatchMode
from . import opaque_kernels
from .opaque_kernels import address, mutated, redispatched, tensors_of

Tensor = torch.Tensor

SINGLE: Final = 2.0**-24  # the unit of rounding of float32
_FINEST: Final = 2.0**-40  # unit of probes: well above that of float64, and small enough for its effects to be linear
_LANES: Final = 256  # of parallel sums
_DATA_DEPENDENT: Final = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


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


@functools.cache
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


class Trace(DispatchMode):
    """Notes which operators a call is made of, and which of them wrote each piece of memory last."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device
        self.steps_in_low = 1.0
        self.operators: list[Any] = []
        self.longest_sum = 1
        self.selects = self.selects_first = False
        self.contracts = False
        self.sums_of_products = True
        self.depends_on_values = False
        self.opaque: dict[
            Any, bool
        ] = {}  # operators whose steps cannot be seen: whether they have a float32 kernel, too
        self._worked = False
        self._facts: list[Facts] = []
        self._writers: dict[int, tuple[int, int]] = {}
        self._least: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op_facts.is_composition(func) and not self._is_opaque(func, args, kwargs or {}):
            return redispatched(self, func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        number = len(self.operators)
        self.operators.append(func)
        self._least.append(_least_error(func, args, kwargs or {}))
        self.depends_on_values = self.depends_on_values or bool(_DATA_DEPENDENT & set(func.tags))
        if self.sums_of_products:
            self.sums_of_products = op_facts.is_sum_of_products(func, args, kwargs or {})
        facts = op_facts.facts_for(func, args)
        self._facts.append(facts)
        if facts.kind == Kind.VIEW:
            return result
        written = (*tensors_of((result,)), *mutated(func, args, kwargs or {}))
        for position, tensor in reversed(list(enumerate(written))):  # a tensor that is there twice: its first place
            self._writers[address(tensor)] = number, position
        self.selects_first = self.selects_first or (facts.kind == Kind.SELECT and not self._worked)
        self.selects = self.selects or facts.kind == Kind.SELECT
        self._worked = True
        if facts.kind not in (Kind.EXACT, Kind.SELECT, Kind.POINTWISE):
            self.longest_sum = max(self.longest_sum, op_facts.length_of_sums(func, args, kwargs or {}))
            self.contracts = self.contracts or facts.kind == Kind.CONTRACT
            if facts.kind == Kind.CONTRACT and op_facts.computes_low(func, self.device, kwargs or {}):
                self.steps_in_low = max(self.steps_in_low, op_facts.steps_in_low(func, args))
        return result

    def _is_opaque(self, func: Any, args: Any, kwargs: Any) -> bool:
        if op_facts.is_aten(func) or not opaque_kernels.works_unseen(func, args, kwargs):
            return False
        self.opaque[func] = self.opaque.get(func, True) and opaque_kernels.has_a_single_precision(func, args, kwargs)
        return True

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the operators that compute something, in order."""
        moves = (Kind.VIEW, Kind.EXACT)
        return tuple(
            [op_facts.base_name(f) for f, facts in zip(self.operators, self._facts) if facts.kind not in moves]
        )

    @property
    def exact(self) -> bool:
        """Whether the call only moves, selects or compares values."""
        exact = (Kind.VIEW, Kind.EXACT, Kind.SELECT)
        return all(facts.kind in exact for facts in self._facts)

    @property
    def elementwise(self) -> bool:
        """Whether each element of a result depends on the same element of the inputs alone, as far as one can see."""
        kinds = (Kind.VIEW, Kind.EXACT, Kind.POINTWISE)
        return all(facts.kind in kinds for facts in self._facts)

    def least_error(self, result: Tensor) -> float:
        """The least error of the operator that wrote a result, in units of the arithmetic inside."""
        writer = self._writers.get(address(result))
        return 0.0 if writer is None else self._least[writer[0]]

    def last_writers(self, results: Sequence[Tensor]) -> frozenset[tuple[int, int]]:
        """Which result of which operator these are: they are not rounded once more by being stored."""
        return frozenset(self._writers.get(address(t), (-1, -1)) for t in results)


def _least_error(func: Any, args: Any, kwargs: Any) -> float:
    """What every probe does to the result of an operator, in units of its arithmetic: sums round along their way."""
    facts = op_facts.facts_for(func, args)
    kind = facts.kind
    if facts != op_facts.facts_of(func):
        return facts.accuracy
    if kind not in (Kind.REDUCE, Kind.CONTRACT):
        return op_facts.least_error(func)
    return op_facts.least_error(func) * math.sqrt(roundings(kind, op_facts.length_of_sums(func, args, kwargs)))
