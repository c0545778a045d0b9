"""How uncertain each result of a call is by the roundings inside it; found out only when asked, probe by probe."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Any, Final

import torch

from ..call import facts
from ..call.description import Tensor, map_tensors, tensors_in
from ..call.equality import leaves_of
from .golden import GoldenResult, Run
from .measures import wide
from .noise import PROBES, AllSigns, Noise, Signs
from .rounding import Precision, Trace, sigma_of_products, weights_of_products

FEWEST_PROBES: Final = 4  # also when time is short
_MAX_ELEMENTS_AT_ONCE: Final = 1 << 17  # elements, all copies together
_PLAIN: Final = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.memory_format)


@dataclasses.dataclass(frozen=True)
class Structure:
    """What the operators inside a call say about its roundings; the same for every call with the same signature."""

    exact: bool
    elementwise: bool
    selects: bool
    selects_first: bool
    contracts: bool
    sums_of_products: bool
    longest_sum: int
    steps_in_low: float  # by which products in a half type are worse than one rounding, where a device does them so
    last: frozenset[tuple[int, int]]  # operators that write the results
    kernels: tuple[str, ...]  # operators that compute something, in order
    least: tuple[float, ...]  # for each result the least error of its last operator, in units of its arithmetic
    opaque: tuple[tuple[Any, bool], ...] = ()  # operators whose steps cannot be seen, and whether they do float32


class Uncertainty:
    """How far rounding moves the results of one part of a call (`output`, `input`, `grad_input`)."""

    def __init__(
        self,
        result: GoldenResult,
        part: str,
        precision: Precision,
        max_seconds: float | None,
        structure: Structure | None = None,
    ) -> None:
        self.result, self.part, self.precision, self.max_seconds = result, part, precision, max_seconds
        self.backward = part == "grad_input"
        self._probing = precision.for_probes()
        self.probes = self.narrow_probes = 0
        self._started = time.perf_counter()
        if structure is not None:
            self.structure = structure
        self._few = False
        self._squared: dict[torch.dtype, list[Any]] = {}
        self._exact: list[Any] | None = None
        self._squares: list[Tensor | None] = []
        self._unsettled: list[Tensor | None] = []
        self._scales: dict[int, Tensor] = {}

    @functools.cached_property
    def usable(self) -> bool:
        """Whether the call can be repeated with other values: kernels of sparse layouts and the like rely on more."""
        tensors = (*self.result.source.tensors, *tensors_in(self.result.outputs))
        return all(t.layout == torch.strided and not t.is_quantized and not t.is_nested for t in tensors)

    @functools.cached_property
    def structure(self) -> Structure:
        """Of the operators that the call is made of; remembered for calls with the same signature."""
        key = _signature(self.result, self.part)
        known = _structures.get(key)
        if known is not None:
            return known
        structure, reusable = self._trace()
        if key is not None and reusable:
            if len(_structures) >= _MAX_KNOWN:
                _structures.clear()
            _structures[key] = structure
        return structure

    def _trace(self) -> tuple[Structure, bool]:
        trace = Trace(self.precision.device)
        leaves = self.leaves(self.result.again(trace, self.backward))
        least = tuple(trace.least_error(t) if isinstance(t, Tensor) else 0.0 for t in leaves)
        structure = Structure(
            exact=trace.exact,
            elementwise=trace.elementwise,
            selects=trace.selects,
            selects_first=trace.selects_first,
            contracts=trace.contracts,
            sums_of_products=trace.sums_of_products,
            longest_sum=trace.longest_sum,
            steps_in_low=trace.steps_in_low,
            last=trace.last_writers([t for t in leaves if isinstance(t, Tensor)]),
            kernels=trace.kernels,
            least=least,
            opaque=tuple(trace.opaque.items()),
        )
        return structure, not trace.depends_on_values

    def least_error(self, position: int) -> float:
        """Relative error that every correct result may have by its last operator alone."""
        least = self.structure.least
        return least[position] * self.precision.inner if position < len(least) else 0.0

    def by_formula(self, position: int, golden: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Sigma of a sum of products, from one run on the squares in a dtype; None for everything else."""
        squares = self.squares(position, dtype)
        if squares is None or squares.shape != golden.shape or golden.is_complex():
            return None
        structure = self.structure
        return sigma_of_products(self.precision, structure.longest_sum, squares, golden, structure.steps_in_low)

    def weights_of_squares(self) -> tuple[float, float]:
        """What the formula multiplies the squared terms and the squared result with."""
        structure = self.structure
        return weights_of_products(self.precision, structure.longest_sum, structure.steps_in_low)

    def squares(self, position: int, dtype: torch.dtype) -> Tensor | None:
        """For each sum of products the sum of its squared terms; None for everything else."""
        if not self.structure.sums_of_products or not self.structure.contracts:
            return None
        if dtype not in self._squared:
            self._squared[dtype] = self.leaves(self._run_on_squares(dtype))
        squares = self._squared[dtype]
        mine = squares[position] if position < len(squares) else None
        return mine if isinstance(mine, Tensor) else None

    def _run_on_squares(self, dtype: torch.dtype) -> Run:
        """Of sums of products this gives the sums of the squared terms."""

        def square(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return tensor.detach().to(dtype).square().requires_grad_(tensor.requires_grad)

        source = self.result.source
        sent = None if source.grad_outputs is None else map_tensors(list(source.grad_outputs), square)
        args, kwargs = map_tensors(source.args, square), map_tensors(source.kwargs, square)
        squared = dataclasses.replace(source, args=args, kwargs=kwargs, grad_outputs=sent)
        return dataclasses.replace(self.result, source=squared, cast={}, run=None).again(None, self.backward)

    def grow(self) -> bool:
        """Do a few more probes; False when there have been enough."""
        target = min(PROBES, max(1, 2 * self.probes))
        late = self.max_seconds is not None and time.perf_counter() - self._started > self.max_seconds
        if target <= self.probes:
            return False
        if late and self.probes >= FEWEST_PROBES:
            self._few = True
            return False
        while self.probes < target:
            self._probe()
        return True

    def _probe(self) -> None:
        exact = self.exact()
        moved = self._moved(Signs(self.probes))
        self.probes += 1
        for position, (here, there) in enumerate(zip(exact, moved)):
            if isinstance(here, Tensor) and isinstance(there, Tensor) and here.shape == there.shape:
                self._add(position, here, there)

    def _moved(self, signs: Signs) -> list[Any]:
        noise = Noise(self._probing, self.structure.last, signs, opaque=dict(self.structure.opaque))
        # ties among the inputs themselves are looked at exactly, where gradients are shared among them
        noise.breaks_ties = not self.backward or not self.structure.selects_first
        return self.leaves(self.result.again(noise, self.backward))

    def exact(self) -> list[Any]:
        """The results that probes are compared with."""
        if self._exact is None:
            run = self.result.run
            if run is None or (self.backward and run.grad_inputs is None):
                run = self.result.again(None, self.backward)
            self._exact = self.leaves(run)
            self._squares = [None] * len(self._exact)
            self._unsettled = [None] * len(self._exact)
        return self._exact

    def _add(self, position: int, here: Tensor, there: Tensor) -> None:
        square, unsettled = _movement(here, there, self._scale_of(position))
        total, before = self._squares[position], self._unsettled[position]
        self._squares[position] = square if total is None else total.add_(square)
        if unsettled is not None:
            self._unsettled[position] = unsettled if before is None else before.logical_or_(unsettled)

    def leaves(self, run: Run) -> list[Any]:
        """The results of this part of a run, in order."""
        if self.backward:
            return list(run.grad_inputs or ())
        if self.part == "input":
            return list(tensors_in((run.args, run.kwargs)))
        return list(leaves_of(run.outputs))

    def sigma(self, position: int) -> Tensor | None:
        """Root mean square of the movements so far, in absolute terms; None before the first."""
        total = self._squares[position] if position < len(self._squares) else None
        if total is None or self.probes == 0:
            return None
        mean = total / self.probes
        if mean.dim() and (self._few or (self.structure.opaque and self.probes >= PROBES)):
            # There are no more probes to come, and they are few, or each is one draw of an opaque kernel's roundings:
            # among millions of elements some are always lucky. They lean on their neighbours in the row.
            mean = torch.minimum(mean + mean.mean(-1, keepdim=True) / self.probes, mean * _luck(self.probes))
        return mean.sqrt_().div_(self._scale_of(position)).div_(self._probing.magnified)

    def _scale_of(self, position: int) -> Tensor:
        if position not in self._scales:
            self._scales[position] = _scale(self.exact()[position])
        return self._scales[position]

    def not_settled(self, position: int) -> Tensor | None:
        """Where a probe gave another whole number, or infinity or NaN instead of a number; None if nowhere."""
        return self._unsettled[position] if position < len(self._unsettled) else None

    def unsettled(self, position: int, wanted: Tensor) -> Tensor:
        """`not_settled` after as many probes as the wanted places need."""
        found: Tensor | None = None
        while self.usable and (found is None or bool((wanted & ~found).any())) and self.grow():
            found = self.not_settled(position)
        return torch.zeros(wanted.shape, dtype=torch.bool) if found is None else found

    def at(self, position: int, shape: tuple[int, ...], places: Tensor) -> Narrow | None:
        """The same call on some elements alone, where each depends on its own inputs; None where that is not so."""
        # the numbers of an optimizer are shared by all elements, and go another way in each probe
        at_once = PROBES * places.numel() <= _MAX_ELEMENTS_AT_ONCE and not facts.is_optimizer(self.result.source.name)
        copies = PROBES if at_once else 1
        result = self.result
        if self.on_lists:
            result, position = self._one_of_each_list(position)
        elif self.part == "input":
            return None
        fewer = result.at(shape, places.repeat(copies), self.backward)
        if fewer is None or fewer.run is None:
            return None
        part = Uncertainty(fewer, self.part, self.precision, self.max_seconds, self.structure)
        leaves = part.exact()
        leaf = leaves[position] if position < len(leaves) else None
        if not isinstance(leaf, Tensor) or leaf.numel() != copies * places.numel():
            return None
        return Narrow(part, position, copies, wide(leaf).view(copies, -1))

    @functools.cached_property
    def on_lists(self) -> bool:
        """Whether the call changes lists of tensors, side by side, as optimizers do."""
        name, args = self.result.source.name, self.result.source.args
        if self.part != "input" or not facts.works_on_lists(name):
            return False
        lists = [a for a in args if isinstance(a, (list, tuple)) and a]
        plain = all(isinstance(a, (list, tuple, float, int)) for a in args)
        return plain and len({len(a) for a in lists}) == 1 and all(isinstance(t, Tensor) for a in lists for t in a)

    def _one_of_each_list(self, position: int) -> tuple[GoldenResult, int]:
        """The call on the tensors beside one of them alone, and which one it is there."""
        source = self.result.source
        which, place = divmod(position, next(len(a) for a in source.args if isinstance(a, (list, tuple)) and a))
        alone = tuple([a[place]] if isinstance(a, (list, tuple)) and a else a for a in source.args)
        return dataclasses.replace(self.result, source=dataclasses.replace(source, args=alone)), which


class Narrow:
    """An elementwise call on some elements alone; all probes at once if they are few."""

    def __init__(self, uncertainty: Uncertainty, position: int, copies: int, exact: Tensor) -> None:
        self.uncertainty, self.position, self._copies = uncertainty, position, copies
        self._exact = exact

    @property
    def exact(self) -> Tensor:
        """What the golden run gives there."""
        return self._exact[0]

    def probed_at_once(self) -> tuple[Tensor, Tensor | None] | None:
        """Sigma after all probes, and where nothing is settled; None where they must be done one by one."""
        if self._copies == 1:
            return None
        moved = self.uncertainty._moved(AllSigns())[self.position]
        self.uncertainty.probes = PROBES
        scale = _scale(self.exact)
        square, unsettled = _movement(self._exact, moved.view(self._copies, -1), scale)
        sigma = square.mean(0).sqrt_().div_(scale).div_(self.uncertainty._probing.magnified)
        return sigma, None if unsettled is None else unsettled.any(0)


_LUCKIEST_OF: Final = 1e7  # elements


@functools.cache
def _luck(draws: int) -> float:
    """How far below the truth the mean of so many squared normal numbers is at the luckiest of many elements.

    >>> round(_luck(16), 1)
    15.9
    """
    half = draws / 2  # the lower tail of chi-square: x ** half / (2 ** half * gamma(half + 1))
    return float(half * (_LUCKIEST_OF / math.gamma(half + 1)) ** (1 / half))


def _scale(exact: Tensor) -> Tensor:
    """What movements are multiplied with before they are squared: squares of the smallest float64 are all zero."""
    size = wide(exact).abs()
    return torch.ones_like(size).masked_fill_(size < 1e-100, 2.0**700)


def _movement(here: Tensor, there: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """Squared movement of each element, and where it is not a number but something else that changed."""
    exact, moved = wide(here), wide(there)
    if not here.is_floating_point() and not here.is_complex():
        return torch.zeros(exact.shape, dtype=torch.float64), exact != moved
    change = (moved - exact).mul_(scale)
    square = (change.abs() if change.is_complex() else change).square_()
    if bool(square.sum().isfinite()):
        return square, None
    finite = exact.isfinite() & moved.isfinite()
    settled = (exact == moved) | (exact.isnan() & moved.isnan()) | finite
    return square.masked_fill_(~finite, 0.0), ~settled


# --- structures are remembered: a training run makes the same calls again and again --------------------------


_MAX_KNOWN: Final = 2048
_structures: Final[dict[Any, Structure]] = {}


def remembers(result: GoldenResult, part: str) -> bool:
    """Whether the structure of such a call is known without running it (`remembers(result, "output")`)."""
    return _signature(result, part) in _structures


class _NotPlain(Exception):
    """An argument that is not described by its type and value."""


def _signature(result: GoldenResult, part: str) -> Any:
    source = result.source
    try:
        sent = None if source.grad_outputs is None else _shape_of(list(source.grad_outputs))
        arguments = _shape_of(source.args), _shape_of(source.kwargs)
        key = (source.function, source.name, source.device, part, frozenset(result.cast.items()), sent, arguments)
        hash(key)
        return key
    except (_NotPlain, TypeError):
        return None


def _shape_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), tuple(value.stride()), value.requires_grad
    if isinstance(value, (list, tuple)):
        return type(value), tuple([_shape_of(v) for v in value])
    if isinstance(value, dict):
        return tuple([(k, _shape_of(v)) for k, v in value.items()])
    if isinstance(value, _PLAIN):
        return type(value), value
    raise _NotPlain
