"""Is what compiled code returned right, a whole graph at once? Chains of calls amplify rounding: by how much is tried.

The graph is run on the CPU in its own dtypes, in float64, and in float64 with every number moved at random by its
rounding. What the device returned may be `_FACTOR` times as far from float64 as the others are. Where that accuses it,
more runs with larger movements look for ties and jumps nearby, and the roundings inside of kernels are tried. Only
what none of that explains is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from ..call.arguments import compared_arguments
from ..call.description import Tensor
from ..call.equality import equal, leaves_of
from ..call.graphs import OP
from . import verdict
from .allowances import TF32
from .golden import Run
from .graphs import Runs, coarsest, is_coarse
from .measures import Sides, measure, wide
from .pair import decided, explained
from .rounding import Precision, precision_of
from .uncertainty import Uncertainty
from .verdict import RIGHT, WRONG, Judgement, Row, Rules

_FACTOR: Final = 8.0
_UNITS: Final = 8.0  # of rounding of the result itself
_MEMBERS: Final = 3  # runs with roundings moved
_MORE: Final = 8  # such runs for a result that seems wrong
_FURTHER: Final = 8.0  # how much further numbers are moved in those
_SIGMAS: Final = 16.0
_USUAL: Final = 3.0  # times the median
_LONG: Final = 8  # elements of a row that has a median of its own
OUTPUT, INPUT, GRADIENT = "output", "input", "grad_input"
Found = Mapping[str, Sequence[Any]]  # by part: what the device returned, wrote, or sent back; None where unknown


def judge_graph(runs: Runs, found: Found, rules: Rules, max_seconds: float | None = None) -> Judgement:
    """The judgement on one run of compiled code; raises what the CPU raises where it cannot run the graph."""
    own = runs.own
    if isinstance(own, Run):
        known = _known_to_be_right(runs, own, found, rules)
        if known is not None:
            return known
    total = Judgement(RIGHT, "")
    for part, ours in found.items():
        total += _judge_part(runs, part, ours, rules, max_seconds)
    return total


def leaves(run: Run, part: str) -> list[Any]:
    """What a run has to compare with one part of what the device did."""
    if part == GRADIENT:
        return list(run.grad_inputs or ())
    return list(leaves_of(run.outputs)) if part == OUTPUT else compared_arguments(run.args, run.kwargs)


def _known_to_be_right(runs: Runs, own: Run, found: Found, rules: Rules) -> Judgement | None:
    """Right by the run in the graph's own dtypes alone: the same bits, or as near as roundings were seen to explain."""
    rows = []
    for part, ours in found.items():
        theirs = leaves(own, part)
        if len(ours) != len(theirs):
            return None
        for position, (left, right) in enumerate(zip(ours, theirs)):
            if left is None:
                continue
            near = type(left) is type(right) and (equal(left, right) or _is_near(runs, part, position, left, right))
            if not near or (rules.standard != "ulp" and not equal(left, right)):
                return None
            rows.append(_known_row(part, position if len(ours) > 1 else None, rules, left, right))
    return Judgement(RIGHT, "", tuple(rows))


def _is_near(runs: Runs, part: str, position: int, ours: Any, own: Any) -> bool:
    if not isinstance(ours, Tensor) or not ours.is_floating_point() or ours.shape != own.shape or not ours.numel():
        return False
    usual = runs.graph.usual.get(_key(part, position, ours))
    if usual is None or ours.dtype != own.dtype:
        return False
    left, right = wide(ours), wide(own)
    return float((left - right).abs().max()) <= usual * _size(right)


def _key(part: str, position: int, ours: Tensor) -> Any:
    return part, position, ours.dtype, tuple(ours.shape)


def _size(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def _known_row(part: str, index: int | None, rules: Rules, ours: Any, own: Any) -> Row:
    atol, rtol, _ = rules.tolerance(OP, ours.dtype if isinstance(ours, Tensor) else None)
    row = Row(OP, part, index, True, 0.0, 0.0, atol, rtol, "", cosine=1.0)
    if not isinstance(ours, Tensor) or not ours.numel() or equal(ours, own):
        return row
    row = verdict.with_columns(row, measure(Sides(ours, own), atol, rtol))
    return row if row.allclose else explained(row)


def _judge_part(runs: Runs, part: str, ours: Sequence[Any], rules: Rules, max_seconds: float | None) -> Judgement:
    exact = leaves(runs.exact, part)
    if len(ours) != len(exact):
        reason = f"{len(ours)} results instead of {len(exact)}"
        row = Row(OP, part, None, False, math.inf, math.inf, 0, 0, reason)
        return Judgement(WRONG, reason, (decided(row, False, reason, math.inf),))
    if rules.standard != "ulp" or rules.tolerances:
        known = [n for n, value in enumerate(ours) if value is not None]
        sides = [ours[n] for n in known], [exact[n] for n in known]
        return verdict.judge(OP, *sides, part=part, rules=rules, indices=known if len(ours) > 1 else None)
    others = _Others(runs, part, max_seconds)
    rows = []
    for position, (left, right) in enumerate(zip(ours, exact)):
        if left is not None:
            index = position if len(ours) > 1 else None
            rows.append(_judge_leaf(part, index, position, left, right, others, rules))
    wrong = [row for row in rows if row.verdict == WRONG]
    worst = max(wrong, key=lambda row: row.excess, default=None)
    return Judgement(
        *(RIGHT, "", tuple(rows)) if worst is None else (WRONG, f"{worst.name}: {worst.reason}", tuple(rows))
    )


def _judge_leaf(
    part: str, index: int | None, position: int, ours: Any, exact: Any, others: _Others, rules: Rules
) -> Row:
    atol, rtol, _ = rules.tolerance(OP, ours.dtype if isinstance(ours, Tensor) else None)
    row = Row(OP, part, index, True, 0.0, 0.0, atol, rtol, "")
    if not isinstance(ours, Tensor) or not isinstance(exact, Tensor):
        return _judge_plain(row, ours, exact)
    own = others.own(position)
    dtype = own.dtype if isinstance(own, Tensor) else ours.dtype
    problem = ""
    if ours.shape != exact.shape:
        problem = f"shape {tuple(ours.shape)} instead of {tuple(exact.shape)}"
    elif ours.dtype != dtype:
        problem = f"dtype {ours.dtype} instead of {dtype}"
    if problem:
        return decided(row._replace(allclose=False, max_abs_diff=math.inf), False, problem, math.inf)
    if not ours.numel():
        return row
    row = verdict.with_columns(row, measure(Sides(ours, exact), atol, rtol))
    bound = _Bound(ours, exact)
    for members, sigma in others.stages(position):
        bound.add(members, sigma)
        excess, where, share = bound.excess()
        if excess <= 1:
            others.learn(position, ours, bound)
            row = row._replace(excess=excess)
            return row if row.allclose else explained(row)
    place = tuple(int(n) for n in torch.unravel_index(torch.tensor(where), ours.shape)) if ours.dim() else ()
    reason = _words(ours[place].item(), exact[place].item(), place, share, excess)
    return decided(row._replace(excess=excess, where=place), False, reason, bound.allowed())


def _words(ours: Any, exact: Any, place: tuple[int, ...], share: float, excess: float) -> str:
    at = f" at {place}" if place else ""
    times = "" if math.isinf(excess) else f", {excess:.3g} times as far off as the roundings of its graph explain"
    return f"{ours!r} instead of {exact!r}{at}{times}; {100 * share:.3g} % of its elements are wrong"


def _judge_plain(row: Row, ours: Any, exact: Any) -> Row:
    """Numbers and None, or a tensor in place of one."""
    if isinstance(ours, Tensor) or isinstance(exact, Tensor):
        there = ours if isinstance(ours, Tensor) else exact
        zero = (ours is None or exact is None) and not bool(there.any())
        return decided(row._replace(allclose=zero), zero, f"{type(ours).__name__} instead of a tensor", math.inf)
    if isinstance(ours, float) and isinstance(exact, float):
        same = math.isclose(ours, exact, rel_tol=1e-3) or (ours != ours and exact != exact)
    else:
        same = ours == exact
    return decided(row._replace(allclose=same), same, f"{ours!r} instead of {exact!r}", math.inf)


class _Others:
    """The runs that a result is seen beside; dearer ones are made only when asked for."""

    def __init__(self, runs: Runs, part: str, max_seconds: float | None) -> None:
        self._runs, self._part = runs, part
        self._moved: list[list[Any]] = []
        self._further: list[list[Any]] = []
        self._max_seconds = max_seconds
        self._uncertainty: Uncertainty | None = None

    def own(self, position: int) -> Any:
        """The result of the run in the graph's own dtypes; None where the CPU has none."""
        own = self._runs.own
        return leaves(own, self._part)[position] if isinstance(own, Run) else None

    def learn(self, position: int, ours: Tensor, bound: _Bound) -> None:
        """Remember how far roundings usually move a result, for later runs of the graph."""
        size, usual = _size(wide(ours)), bound.usual()
        if self.own(position) is not None and ours.is_floating_point() and 0 < size < math.inf and usual > 0:
            known, key = self._runs.graph.usual, _key(self._part, position, ours)
            known[key] = min(usual / size, known.get(key, math.inf))

    def stages(self, position: int) -> Any:
        """Ever more results to compare with, each with the factor that it counts; at last the uncertainty."""
        own = self.own(position)
        if not self._moved:
            self._moved = [leaves(self._runs.moved(seed), self._part) for seed in range(_MEMBERS)]
        members = [] if own is None else [(own, _FACTOR)]
        yield [*members, *((run[position], _FACTOR) for run in self._moved)], None
        if not self._further:
            seeds = range(_MEMBERS, _MEMBERS + _MORE)
            self._further = [leaves(self._runs.moved(seed, _FURTHER), self._part) for seed in seeds]
        yield [(run[position], 1.0) for run in self._further], None
        yield [], self._sigma(position)

    def _sigma(self, position: int) -> tuple[Tensor | None, Tensor | None] | None:
        """How far roundings inside of kernels move a result, and where they settle nothing; None where unknown."""
        if self._uncertainty is None:
            runs = self._runs
            result = runs.golden()
            dtype = coarsest(runs.graph, result.source.tensors)
            precision = precision_of(dtype, runs.device)
            if dtype == torch.float32 and any(is_coarse(name, runs.device) for name in runs.graph.operators):
                precision = Precision(dtype, runs.device)
                precision.stored = TF32
            found = self._uncertainty = Uncertainty(result, self._part, precision, self._max_seconds)
            try:
                while found.usable and found.grow():
                    pass
            except Exception:  # operators that cannot be done with other roundings
                return None
        return self._uncertainty.sigma(position), self._uncertainty.not_settled(position)


class _Bound:
    """How far one result may be from the exact one, by what others are."""

    def __init__(self, ours: Tensor, exact: Tensor) -> None:
        self._whole = not (ours.is_floating_point() or ours.is_complex())
        self._ours, self._exact = wide(ours), wide(exact)
        self._info = None if self._whole else torch.finfo(ours.dtype)
        size = self._exact.abs()
        if self._info is None:
            self._least = torch.zeros(size.shape, dtype=torch.float64)
        else:
            size = torch.where(size.isfinite(), size, 0.0)
            self._least = _UNITS * (size * (self._info.eps / 2) + self._info.smallest_normal * self._info.eps)
        self._spread = torch.zeros(size.shape, dtype=torch.float64)
        self._free = torch.zeros(size.shape, dtype=torch.bool)  # where nothing is settled
        if self._info is not None and not ours.is_complex():
            self._free |= (self._exact.abs() > 0.5 * self._info.max) & self._exact.isfinite()

    def add(
        self, members: Sequence[tuple[Any, float]], sigma: tuple[Tensor | None, Tensor | None] | None = None
    ) -> None:
        """Take other results into account, with the factors by which their distances count."""
        for member, factor in members:
            if not isinstance(member, Tensor) or member.shape != self._exact.shape:
                continue
            self._add_one(wide(member), factor)
        if sigma is not None:
            moved, unsettled = sigma
            if unsettled is not None:
                self._free |= unsettled
            if moved is not None and not self._whole:
                self._widen(_SIGMAS * moved)

    def _add_one(self, member: Tensor, factor: float) -> None:
        distance = (member - self._exact).abs()
        same = (member == self._exact) | (member.isnan() & self._exact.isnan())
        if self._whole:
            self._free |= ~same
            return
        finite = distance.isfinite()
        self._free |= ~finite & ~same
        self._widen(factor * torch.where(finite, distance, 0.0))

    def _widen(self, distance: Tensor) -> None:
        self._spread = torch.maximum(self._spread, distance)

    def allowed(self) -> Tensor:
        """How far each element may be off.

        Elements lean on what is usual among them: of many, some are always lucky. A jump is not usual.
        """
        spread = self._spread
        if spread.dim():
            spread = spread.clamp_min(_USUAL * self.usual())
            if spread.shape[-1] >= _LONG:
                spread = torch.maximum(spread, _USUAL * spread.median(-1, keepdim=True).values)
        return torch.where(self._free, math.inf, torch.maximum(self._least, spread))

    def usual(self) -> float:
        """The median of how far the others are off, of those that are."""
        moved = self._spread[self._spread > 0]
        return float(moved.median()) if moved.numel() else 0.0

    def excess(self) -> tuple[float, int, float]:
        """The largest error divided by what is allowed, its place, and the share of elements that are wrong."""
        same = (self._ours == self._exact) | (self._ours.isnan() & self._exact.isnan()) | self._free
        error = (self._ours - self._exact).abs()
        odd = ~error.isfinite() if not self._whole else torch.ones_like(self._free)
        share = torch.where(odd, math.inf, error / self.allowed().clamp_min(1e-300))
        share = torch.where(same, 0.0, share)
        worst, where = share.flatten().max(0)
        return float(worst), int(where), float((share > 1).double().mean())
