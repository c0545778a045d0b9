"""How far rounding alone may move a result: the golden run repeated with every rounding drawn at random.

Stochastic arithmetic at the level of operators. A kernel computes with some unit of rounding; the golden run does not.
So the golden run is done again, and each operator inside it gets its inputs, its result and what it stores
multiplied by 1 ± the unit that a correct kernel of the device has there. How far the results move, on
average, is what rounding can do to *this* call with *these* values: near zero, after cancellation, through
a chain of operators, in backward. It needs no formula for any operator, and no tolerance.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from ..call import facts as op_facts
from ..call.description import Tensor, tensors_in
from ..call.facts import Kind
from ..compat import DispatchMode
from . import opaque_kernels
from .opaque_kernels import address, mutated, redispatched

SINGLE: Final = 2.0**-24  # the unit of rounding of float32
STORED_TERMS: Final = 0.5  # of a unit: what storing a few partial sums of a product is worth, on average
MAX_LOW_TERMS: Final = 256  # terms that may be added up in a half type, one by one; more need a wider sum
_FINEST: Final = 2.0**-40  # unit of probes: well above that of float64, and small enough for its effects to be linear
_LANES: Final = 256  # of parallel sums
_DATA_DEPENDENT: Final = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_WITHOUT_SUMS: Final = (Kind.VIEW, Kind.EXACT, Kind.SELECT, Kind.POINTWISE)


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


@dataclasses.dataclass(frozen=True)
class Structure:
    """What the operators inside a call say about its roundings; the same for every call with the same signature."""

    exact: bool  # it only moves, selects or compares values
    elementwise: bool  # each element of a result depends on the same element of the inputs alone, as far as one can see
    selects: bool
    selects_first: bool
    contracts: bool
    sums_of_products: bool
    longest_sum: int
    steps_in_low: float  # by which products in a half type are worse than one rounding, where a device does them so
    last: frozenset[tuple[int, int]]  # operators that write the results, which are not rounded once more when stored
    kernels: tuple[str, ...]  # operators that compute something, in order
    least: tuple[float, ...]  # for each result the least error of its last operator, in units of its arithmetic
    one_kernel: bool  # does all the work: nothing is stored between steps
    opaque: Mapping[Any, bool]  # operators whose steps cannot be seen: whether they have a float32 kernel, too


def roundings(kind: str, length: int, straight: bool = False, lanes: int = _LANES) -> float:
    """How many roundings a term meets on its way into a sum; they add up like a random walk.

    Products of matrices run along the whole sum, and so do the loops inside of fused kernels (`straight`); other
    sums are done in parallel lanes that are joined pairwise.
    """
    if kind == Kind.CONTRACT or straight:
        return length
    return min(length, 1 + math.log2(length) + length / lanes)


class _Step(NamedTuple):
    """One operator inside a call."""

    name: str
    kind: str
    least: float  # what every probe does to its result, in units of its arithmetic
    length: int  # of its sums
    low: float  # see `Structure.steps_in_low`
    sum_of_products: bool


class Trace(DispatchMode):
    """Notes which operators a call is made of, and which of them wrote each piece of memory last."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self._device = device
        self._steps: list[_Step] = []
        self._opaque: dict[Any, bool] = {}
        self._writers: dict[int, tuple[int, int]] = {}
        self.depends_on_values = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op_facts.is_composition(func) and not self._is_opaque(func, args, kwargs):
            return redispatched(self, func, args, kwargs)
        result = func(*args, **kwargs)
        self.depends_on_values = self.depends_on_values or bool(_DATA_DEPENDENT & set(func.tags))
        facts = op_facts.facts_for(func, args)
        kind, length, low = facts.kind, 1, 1.0
        if kind != Kind.VIEW:
            written = (*tensors_in(result), *mutated(func, args, kwargs))
            for position, tensor in reversed(list(enumerate(written))):  # a tensor that is there twice: its first place
                self._writers[address(tensor)] = len(self._steps), position
        if kind not in _WITHOUT_SUMS:
            length = op_facts.length_of_sums(func, args, kwargs)
        if kind == Kind.CONTRACT and op_facts.computes_low(func, self._device, kwargs):
            low = op_facts.steps_in_low(func, args)
        least = op_facts.least_error(func) if facts == op_facts.facts_of(func) else facts.accuracy
        if kind in (Kind.REDUCE, Kind.CONTRACT):  # sums round along their way
            least *= math.sqrt(roundings(kind, length))
        products = op_facts.is_sum_of_products(func, args, kwargs)
        self._steps.append(_Step(op_facts.base_name(func), kind, least, length, low, products))
        return result

    def _is_opaque(self, func: Any, args: Any, kwargs: Any) -> bool:
        if op_facts.is_aten(func) or not opaque_kernels.has_hidden_work(func, args, kwargs):
            return False
        self._opaque[func] = self._opaque.get(func, True) and opaque_kernels.has_a_single_precision(func, args, kwargs)
        return True

    def structure(self, results: Sequence[Any]) -> Structure:
        """What the operators say together; `results` are those of the call that was traced."""
        steps, kinds = self._steps, [step.kind for step in self._steps if step.kind != Kind.VIEW]
        writers = [self._writers.get(address(t)) if isinstance(t, Tensor) else None for t in results]
        kernels = tuple([step.name for step in steps if step.kind not in (Kind.VIEW, Kind.EXACT)])
        return Structure(
            exact=set(kinds) <= {Kind.EXACT, Kind.SELECT},
            elementwise=set(kinds) <= {Kind.EXACT, Kind.POINTWISE},
            selects=Kind.SELECT in kinds,
            selects_first=kinds[:1] == [Kind.SELECT],
            contracts=Kind.CONTRACT in kinds,
            sums_of_products=all(step.sum_of_products for step in steps),
            longest_sum=max((step.length for step in steps), default=1),
            steps_in_low=max((step.low for step in steps), default=1.0),
            last=frozenset(writer for writer in writers if writer is not None),
            kernels=kernels,
            one_kernel=len(kernels) == 1,
            least=tuple([0.0 if writer is None else steps[writer[0]].least for writer in writers]),
            opaque=self._opaque,
        )
