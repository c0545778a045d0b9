"""How uncertain each result of a call is by the roundings inside it; found out only when asked, probe by probe."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Any, Final, NamedTuple

import torch

from ..call import facts
from ..call.arguments import compared_arguments
from ..call.description import Tensor, tensors_in
from ..call.equality import leaves_of
from ..call.recent import Recent
from . import formulas, orders
from .formulas import FormulaQuery, Terms, weights_of_products
from .golden import GoldenResult, Run
from .measures import wide
from .noise import PROBES, AllSigns, Noise, Signs
from .rounding import SINGLE, Precision, Trace
from .rounding import Structure as Structure

FEWEST_PROBES: Final = 4  # also when time is short
_MAX_ELEMENTS_AT_ONCE: Final = 1 << 17  # elements, all copies together
_PLAIN: Final = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.memory_format)


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
        self._squared_terms: dict[torch.dtype, list[Any]] = {}
        # of each result, by its position: root of the sum of squared movements so far, and where a probe gave something
        # else than a number
        self._movements: dict[int, Tensor] = {}
        self._unsettled: dict[int, Tensor] = {}

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
            _structures.keep(key, structure, 1 + len(self.result.source.tensors))
        return structure

    def _trace(self) -> tuple[Structure, bool]:
        trace = Trace(self.precision.device)
        leaves = self.leaves(self.result.rerun(trace, self.backward))
        return trace.structure(leaves), not trace.depends_on_values

    def least_error(self, position: int) -> float:
        """Relative error that every correct result may have by its last operator alone."""
        least = self.structure.least
        return least[position] * self.precision.inner if position < len(least) else 0.0

    def terms(self, position: int, golden: Tensor) -> Terms | None:
        """What a formula says of the roundings inside; None where there is none."""
        source, precision, structure = self.result.source, self.precision, self.structure
        return formulas.terms(FormulaQuery(source, position, self.backward, golden, precision, structure))

    def terms_of_products(self, position: int, golden: Tensor, dtype: torch.dtype) -> Terms | None:
        """Those of a sum of products, with all of its squared terms, in a dtype; None for everything else."""
        if not self.structure.sums_of_products or not self.structure.contracts or golden.is_complex():
            return None
        if dtype not in self._squared_terms:
            self._squared_terms[dtype] = self.leaves(self._run_on_squares(dtype))
        squares = self._squared_terms[dtype]
        mine = squares[position] if position < len(squares) else None
        if not isinstance(mine, Tensor) or mine.shape != golden.shape:
            return None
        return Terms(mine, *weights_of_products(self.precision, self.structure))

    def _run_on_squares(self, dtype: torch.dtype) -> Run:
        """Of sums of products this gives the sums of the squared terms."""

        def square(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return tensor.detach().to(dtype).square().requires_grad_(tensor.requires_grad)

        squared = self.result.source.mapped(square)
        return dataclasses.replace(self.result, source=squared, cast={}, run=None).rerun(None, self.backward)

    def drift(self, position: int) -> Tensor | None:
        """How far a result is off when its sums are done in float32, in some order; None where there are no sums."""
        structure = self.structure
        if structure.longest_sum < 2 or self.precision.inner != SINGLE or structure.opaque:
            return None
        return self._drifts[position] if position < len(self._drifts) else None

    @functools.cached_property
    def _drifts(self) -> list[Any]:
        seconds = math.inf if self.max_seconds is None else self.max_seconds
        return orders.drift(self.result, self.backward, self.leaves, self.exact, seconds)

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
        moved = self._moved(Signs(self.probes))
        self.probes += 1
        for position, (here, there) in enumerate(zip(self.exact, moved)):
            if not isinstance(here, Tensor) or not isinstance(there, Tensor) or here.shape != there.shape:
                continue
            movement, unsettled = _movement(here, there)
            total, before = self._movements.get(position), self._unsettled.get(position)
            # squares of the smallest float64 are all zero: never squared
            self._movements[position] = movement if total is None else total.hypot_(movement)
            if unsettled is not None:
                self._unsettled[position] = unsettled if before is None else before.logical_or_(unsettled)

    def _moved(self, signs: Signs) -> list[Any]:
        noise = Noise(self._probing, self.structure.last, signs, opaque=self.structure.opaque)
        # ties among the inputs themselves are looked at exactly, where gradients are shared among them
        noise.breaks_ties = not self.backward or not self.structure.selects_first
        return self.leaves(self.result.rerun(noise, self.backward))

    @functools.cached_property
    def exact(self) -> list[Any]:
        """The results that probes are compared with."""
        run = self.result.run
        if run is None or (self.backward and run.grad_inputs is None):
            run = self.result.rerun(None, self.backward)
        return self.leaves(run)

    def leaves(self, run: Run) -> list[Any]:
        """The results of this part of a run, in order."""
        if self.backward:
            return list(run.grad_inputs or ())
        if self.part == "input":
            return list(leaves_of(compared_arguments(run.args, run.kwargs)))
        return list(leaves_of(run.outputs))

    def sigma(self, position: int) -> Tensor | None:
        """Root mean square of the movements so far, in absolute terms; None before the first."""
        total = self._movements.get(position)
        if total is None:
            return None
        sigma = total / (math.sqrt(self.probes) * self._probing.magnified)
        if sigma.dim() and (self._few or (self._is_drawn and self.probes >= PROBES)):
            # There are no more probes to come, and they are few, or each is one draw of roundings that do not cancel:
            # among millions of elements some are always lucky. They lean on their neighbours in the row.
            neighbours = torch.linalg.vector_norm(sigma, dim=-1, keepdim=True) / math.sqrt(
                sigma.shape[-1] * self.probes
            )
            sigma = torch.minimum(sigma.hypot(neighbours), sigma.mul_(math.sqrt(_luck(self.probes))))
        return sigma

    @functools.cached_property
    def _is_drawn(self) -> bool:
        """Whether mixed terms of roundings are left: of an opaque kernel, or where there are more than turns for them.

        Recurrent networks round thousands of times on the way to one element, in each time step again.
        """
        return bool(self.structure.opaque) or len(self.structure.kernels) >= PROBES

    def not_settled(self, position: int) -> Tensor | None:
        """Where a probe gave another whole number, or infinity or NaN instead of a number; None if nowhere."""
        return self._unsettled.get(position)

    def unsettled(self, position: int, wanted: Tensor) -> Tensor:
        """`not_settled` after as many probes as the wanted places need."""
        found: Tensor | None = None
        while self.usable and (found is None or bool((wanted & ~found).any())) and self.grow():
            found = self.not_settled(position)
        return torch.zeros(wanted.shape, dtype=torch.bool) if found is None else found

    def at(self, position: int, shape: tuple[int, ...], places: Tensor) -> Narrow | None:
        """The same call on some elements alone, where each depends on its own inputs; None where that is not so."""
        # numbers are shared by all elements, and go another way in each probe
        source = self.result.source
        numbers = any(type(v) is float for v in (*source.args, *source.kwargs.values())) or facts.is_optimizer(
            source.name
        )
        copies = PROBES if PROBES * places.numel() <= _MAX_ELEMENTS_AT_ONCE and not numbers else 1
        result = self.result
        if self.on_lists:
            position, place = divmod(position, self.on_lists)
            alone = tuple([a[place]] if isinstance(a, (list, tuple)) and a else a for a in result.source.args)
            result = dataclasses.replace(result, source=dataclasses.replace(result.source, args=alone))
        elif self.part == "input":
            return None
        fewer = result.at(shape, places.repeat(copies), self.backward)
        if fewer is None or fewer.run is None:
            return None
        part = Uncertainty(fewer, self.part, self.precision, self.max_seconds, self.structure)
        leaf = part.exact[position] if position < len(part.exact) else None
        if not isinstance(leaf, Tensor) or leaf.numel() != copies * places.numel():
            return None
        return Narrow(part, position, wide(leaf).view(copies, -1))

    @functools.cached_property
    def on_lists(self) -> int:
        """How many tensors each list has that the call changes, side by side, as optimizers do; 0 for other calls."""
        name, args = self.result.source.name, self.result.source.args
        if self.part != "input" or not facts.works_on_lists(name):
            return 0
        lists = [a for a in args if isinstance(a, (list, tuple)) and a]
        plain = all(isinstance(a, (list, tuple, float, int)) for a in args)
        plain = plain and len({len(a) for a in lists}) == 1 and all(isinstance(t, Tensor) for a in lists for t in a)
        return len(lists[0]) if plain else 0


class Narrow(NamedTuple):
    """An elementwise call on some elements alone; all probes at once if they are few."""

    uncertainty: Uncertainty
    position: int
    exact: Tensor  # what the golden run gives there, in a row for each probe

    def probed_at_once(self) -> tuple[Tensor, Tensor | None] | None:
        """Sigma after all probes, and where nothing is settled; None where they must be done one by one."""
        if len(self.exact) == 1:
            return None
        moved = self.uncertainty._moved(AllSigns())[self.position]
        self.uncertainty.probes = PROBES
        movement, unsettled = _movement(self.exact, moved.view(self.exact.shape))
        largest = movement.amax(0).clamp_(min=5e-324)
        sigma = movement.div_(largest).square_().mean(0).sqrt_().mul_(largest)
        return sigma.div_(self.uncertainty._probing.magnified), None if unsettled is None else unsettled.any(0)


_LUCKIEST_OF: Final = 1e7  # elements


@functools.cache
def _luck(draws: int) -> float:
    """How far below the truth the mean of so many squared normal numbers is at the luckiest of many elements.

    >>> round(_luck(16), 1)
    15.9
    """
    half = draws / 2  # the lower tail of chi-square: x ** half / (2 ** half * gamma(half + 1))
    return float(half * (_LUCKIEST_OF / math.gamma(half + 1)) ** (1 / half))


def _movement(here: Tensor, there: Tensor) -> tuple[Tensor, Tensor | None]:
    """How far each element moved, and where it is not a number but something else that changed."""
    exact, moved = wide(here), wide(there)
    if not here.is_floating_point() and not here.is_complex():
        return torch.zeros(exact.shape, dtype=torch.float64), exact != moved
    movement = (moved - exact).abs()
    if bool(movement.sum().isfinite()):
        return movement, None
    finite = exact.isfinite() & moved.isfinite()
    settled = (exact == moved) | (exact.isnan() & moved.isnan()) | finite
    return movement.masked_fill_(~finite, 0.0), ~settled


# --- structures are remembered: a training run makes the same calls again and again --------------------------


_MAX_KNOWN: Final = 4096  # tensors that the calls are given
_structures: Final = Recent[Any, Structure](_MAX_KNOWN)


def remembers(result: GoldenResult, part: str) -> bool:
    """Whether the structure of such a call is known without running it (`remembers(result, "output")`)."""
    return _signature(result, part) in _structures


def _signature(result: GoldenResult, part: str) -> Any:
    source = result.source
    try:
        shapes = _shape_of((source.args, source.kwargs, source.grad_outputs))
        key = (source.function, source.name, source.device, part, frozenset(result.cast.items()), shapes)
        hash(key)
        return key
    except TypeError:
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
    raise TypeError("not described by its type and value")
