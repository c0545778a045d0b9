"""The verdict: whether a device's result is right, given the golden result of the same call.

This pairs what the device returned with the golden result, measures each pair, asks the standard that was chosen
(`standards/`) and puts the rows together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from .. import settings
from ..call import facts
from ..call.description import Tensor, tensors_in
from ..call.equality import leaves_of as leaves_of
from ..native import measuring
from ..native.device_measures import DeviceQuery
from ..native.measuring import Bound, Columns
from ..view.rows import NOT_COMPARABLE as NOT_COMPARABLE
from ..view.rows import RIGHT as RIGHT
from ..view.rows import WRONG as WRONG
from ..view.rows import Row as Row
from . import formulas, random_draws
from .formulas import FormulaQuery
from .golden import GoldenResult
from .measures import Sides, measure, measure_on_device
from .pair import CallUncertainty, Pair, decided
from .rounding import Precision, precision_of
from .standards import STANDARDS, seed, ulp
from .uncertainty import Structure, Uncertainty, remembers

_MAX_FAILURES: Final = 4  # of a plan, one after the other: then calls of this kind need the full way


class Unresolved(Exception):
    """Tensors on a device that cannot be judged there: their copies on the CPU are to be."""


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The verdict on one call: that of its worst row, and all rows."""

    verdict: str
    reason: str
    rows: tuple[Row, ...] = ()
    probes: int = 0

    def __add__(self, other: Judgement) -> Judgement:
        """Both together: the worse verdict counts (`judge(...) + judge(...)`)."""
        order = (RIGHT, NOT_COMPARABLE, WRONG)
        worse = max((self, other), key=lambda j: order.index(j.verdict))
        return Judgement(worse.verdict, worse.reason, self.rows + other.rows, self.probes + other.probes)


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which standard decides, and the tolerances and casts of golden runs that users set; read once.

    >>> Rules().tolerance("torch.add", torch.float16)
    (0.0001, 0.0001, False)
    """

    standard: str = "ulp"
    tolerances: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    casts: settings.Casts = dataclasses.field(default_factory=settings.Casts)

    @classmethod
    def from_environment(cls) -> Rules:
        """Read the standard, all tolerances and all casts; mistakes are errors now (`Rules.from_environment()`)."""
        standard = settings.choice("OP_AUTOCOMPARE_STANDARD")
        return cls(standard, settings.tolerances(), settings.Casts.from_environment())

    def tolerance(self, name: str, dtype: torch.dtype | None) -> tuple[float, float, bool]:
        """atol, rtol and whether the user set them; the most specific variable wins."""
        key = "AUTOCOMPARE_ERROR_TOLERANCE"
        if dtype is not None and self.tolerances:
            suffix = "_" + str(dtype).removeprefix("torch.").upper()
            own = settings.op_prefix(name) + "_" + key
            for variable in (own + suffix, own, key + suffix, key):
                if variable in self.tolerances:
                    return (*self.tolerances[variable], True)
        default = seed.NUMBER_TOLERANCE if dtype is None else seed.TOLERANCE.get(dtype, seed.OTHER_TOLERANCE)
        return default, default, False


def judge(
    name: str,
    device: Any,
    golden: Any,
    *,
    result: GoldenResult | None = None,
    part: str = "output",
    rules: Rules | None = None,
    max_seconds: float | None = None,
    indices: Sequence[int | None] | None = None,
    plan: Plan | None = None,
) -> Judgement:
    """Compare trees of CPU tensors: what the device returned, and the same part of the golden run.

    `part` is `output`, `input` (arguments after the call) or `grad_input`. With `result`, elements that simple
    rounding does not explain are examined by repeating the golden run with random roundings. `indices` are those of
    the rows, if they are to have others than the leaves. `plan` is what earlier calls of the same kind have taught.

    >>> judge("torch.add", torch.ones(2), torch.ones(2, dtype=torch.float64)).verdict
    'right'
    """
    if plan is not None and result is not None:
        known = plan.judge(device, golden, result, indices)
        if known is not None:
            return known
    rules = rules or Rules()
    pairs, mismatch = _pairs(name, part, device, golden)
    if mismatch:
        row = Row(name, part, None, False, math.inf, math.inf, 0, 0, mismatch, verdict=WRONG, reason=mismatch)
        return Judgement(WRONG, mismatch, (row,))
    of_call = None if result is None else CallUncertainty(result, part, [d for d, _ in pairs], max_seconds)
    indices = indices or _indices(pairs)
    asked = [Pair(name, part, indices[n], n, left, right, of_call) for n, (left, right) in enumerate(pairs)]
    rows = [_judge_pair(pair, rules) for pair in asked]
    verdict = WRONG if any(r.verdict == WRONG for r in rows) else RIGHT
    worst = max(rows, key=lambda r: (r.verdict == WRONG, r.excess), default=None)
    reason = f"{worst.name}: {worst.reason}" if worst is not None and worst.reason else ""
    if plan is not None and verdict == RIGHT and rules.standard == "ulp" and not plan.gave_up:
        plan.learn(asked, rows)
    return Judgement(verdict, reason, tuple(rows), 0 if of_call is None else of_call.probes)


class _KnownRow(NamedTuple):
    """What the row of one result needs beside what is measured, in calls of one kind."""

    looks: tuple[Any, ...]  # of the result and the reference; see `_looks`
    row: Row
    unit: float = 1.0  # of rounding of its dtype, divided by that of its precision
    least: float = 0.0  # units that are right whatever the values are; 0 where only one is
    bound: Bound | None = None  # with which a formula may explain more
    precision: Precision | None = None
    structure: Structure | None = None


class Plan:
    """How calls of one kind are judged that turn out to be right: by measuring alone, with all else known beforehand.

    The kind is the function with the shapes, dtypes, strides and plain values of its arguments, on one device, under
    the same rules. Verdict and rows are those of the full way, which follows wherever a plan cannot say "right".
    """

    def __init__(self) -> None:
        self._rows: tuple[_KnownRow, ...] = ()
        self._failures = 0

    @property
    def gave_up(self) -> bool:
        """Whether calls of this kind turned out to need the full way."""
        return self._failures > _MAX_FAILURES

    def judge(
        self, device: Any, golden: Any, result: GoldenResult, indices: Sequence[int | None] | None
    ) -> Judgement | None:
        """The judgement of a call that is right by what is known; None otherwise."""
        known = self._rows
        left, right = ((v,) if isinstance(v, Tensor) else v for v in (device, golden))
        flat = isinstance(left, (list, tuple)) and isinstance(right, (list, tuple))
        if not known or not flat or not len(left) == len(right) == len(known) or self.gave_up:
            return None
        if not all(v is None or isinstance(v, Tensor) for v in (*left, *right)):
            return None
        indices = indices or _indices(left)
        rows = []
        for n, row_plan in enumerate(known):
            row = _row_by_plan(row_plan, left[n], right[n], result, n)
            if row is None:
                self._failures += 1
                return None
            rows.append(row if row.index == indices[n] else row._replace(index=indices[n]))
        self._failures = 0
        return Judgement(RIGHT, "", tuple(rows))

    def learn(self, pairs: Sequence[Pair], rows: Sequence[Row]) -> None:
        """Take over what the full way has found out about a call that is right."""
        known = [found for pair, row in zip(pairs, rows) if (found := _known_row(pair, row)) is not None]
        self._rows = tuple(known) if len(known) == len(rows) else ()


def _looks(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.stride(), value.layout


def _known_row(pair: Pair, row: Row) -> _KnownRow | None:
    device, golden, call = pair.device, pair.golden, pair.of_call
    if device is None and golden is None:
        return _KnownRow((), row)
    if call is None or pair.units is None or pair.tolerance_set or facts.has_free_vectors(pair.op):
        return None
    info = _difference_of_kind(device, golden)[1]
    row = Row(pair.op, pair.part, pair.index, True, 0.0, 0.0, row.atol, row.rtol, info)
    known = _KnownRow((*_looks(device), *_looks(golden)), row, pair.unit_ratio)
    uncertainty = call.known
    if uncertainty is None or uncertainty.structure.exact or not remembers(call.result, pair.part):
        return known
    return known._replace(
        least=ulp.least_units(pair, uncertainty),
        bound=ulp.bound_without_probes(pair, uncertainty),
        precision=uncertainty.precision,
        structure=uncertainty.structure,
    )


def _row_by_plan(known: _KnownRow, device: Any, golden: Any, result: GoldenResult, position: int) -> Row | None:
    """The row of a result that is right by one of the first steps of the standard `ulp`; None otherwise."""
    if device is None or golden is None:
        return known.row if device is golden and not known.looks else None
    if (*_looks(device), *_looks(golden)) != known.looks:
        return None
    device, golden, row = device.detach(), golden.detach(), known.row
    sums = measuring.measure(device, golden, row.atol, row.rtol)
    columns = None if sums is None else sums.columns(device.dtype)
    if columns is None or columns.units is None:
        return None
    excess = units = columns.units * known.unit
    if units > 1:
        if known.bound is None or known.precision is None or known.structure is None:
            return None
        excess = units / known.least
        if units > known.least:
            backward = row.part == "grad_input"
            query = FormulaQuery(result.source, position, backward, golden, known.precision, known.structure)
            terms = formulas.terms(query)
            found = None if terms is None else measuring.beyond(device, golden, *terms.added_to(known.bound))
            if found is None or not found.regular or not found.worst <= 1:
                return None
            excess = found.worst
    return _with_columns(row, columns)._replace(excess=excess)


def only_moves(result: GoldenResult, part: str) -> bool:
    """Whether a call takes values from one place to another and computes nothing (`only_moves(result, "output")`)."""
    structure = structure_of(result, part)
    return structure is not None and structure.exact and not structure.kernels


def structure_of(result: GoldenResult, part: str) -> Structure | None:
    """What the call is made of; None where that cannot be found out (`structure_of(result, "output")`)."""
    uncertainty = Uncertainty(result, part, precision_of(torch.float32, result.source.device), None)
    return uncertainty.structure if uncertainty.usable else None


def judge_call(
    name: str,
    result: GoldenResult,
    *,
    outputs: Any = None,
    inputs_after: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    grad_inputs: Sequence[Tensor | None] | None = None,
    rules: Rules | None = None,
    max_seconds: float | None = None,
) -> Judgement:
    """Judge all that is known of a call; `inputs_after` are the device's arguments after an in-place or `out=` call."""
    if not result.comparable:
        return _judge_random(name, result, outputs)
    total = Judgement(RIGHT, "")
    options: dict[str, Any] = {"result": result, "rules": rules, "max_seconds": max_seconds}
    if outputs is not None:
        total += judge(name, outputs, result.outputs, part="output", **options)
    if inputs_after is not None:
        args, kwargs = inputs_after
        ours, theirs = list(tensors_in((tuple(args), dict(kwargs)))), list(tensors_in(result.inputs_after))
        total += judge(name, ours, theirs, part="input", **options)
    if grad_inputs is not None and result.grad_inputs is not None:
        total += judge(name, list(grad_inputs), result.grad_inputs, part="grad_input", **options)
    return total


def _judge_random(name: str, result: GoldenResult, outputs: Any) -> Judgement:
    found = random_draws.judge(name, result.source, outputs) if result.random else None
    if found is None:
        return Judgement(NOT_COMPARABLE, result.reason)
    right, reason = found
    row = decided(Row(name, "output", None, right, 0.0, 0.0, 0.0, 0.0, "random"), right, reason)
    return Judgement(row.verdict, reason, (row,))


def judge_on_device(
    name: str,
    device: Any,
    golden: Any,
    result: GoldenResult,
    part: str,
    rules: Rules,
    structure: Structure,
    needs: set[int],
    indices: Sequence[int | None] | None = None,
) -> Judgement:
    """`judge` for tensors that are still on the device, both sides; raises `Unresolved` unless all is right at once.

    `structure` is that of the call; `needs` are the positions of results that took a formula in such calls, and grows.
    """
    pairs, mismatch = _pairs(name, part, device, golden)
    if mismatch:
        raise Unresolved
    of_call = CallUncertainty(result, part, [d for d, _ in pairs], None, structure)
    rows: list[Row] = []
    undecided: list[Pair] = []
    indices = indices or _indices(pairs)
    for n, (left, right) in enumerate(pairs):
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            rows.append(_judge_plain(Pair(name, part, indices[n], n, left, right, None), rules))
            continue
        problem, info = _difference_of_kind(left, right)
        if problem:
            raise Unresolved
        atol, rtol, _ = rules.tolerance(name, left.dtype)
        rows.append(Row(name, part, indices[n], True, 0.0, 0.0, atol, rtol, info, 1.0))
        if left.is_floating_point() and left.numel():
            undecided.append(Pair(name, part, indices[n], n, left.detach(), right.detach(), of_call))
        elif not torch.equal(left, right):
            raise Unresolved
    if any(row.verdict != RIGHT for row in rows):
        raise Unresolved
    _settle(rows, undecided, of_call.whole, needs)
    return Judgement(RIGHT, "", tuple(rows))


def _settle(rows: list[Row], pairs: list[Pair], uncertainty: Uncertainty, needs: set[int]) -> None:
    """Fill in the rows of numbers; in two rounds at most, the second one for what takes a formula."""
    while pairs:
        queries = [_query(rows[pair.position], pair, uncertainty, pair.position in needs) for pair in pairs]
        again = []
        for pair, (columns, worst) in zip(pairs, measure_on_device(queries)):
            if columns is None or columns.units is None:
                raise Unresolved
            if columns.units * pair.unit_ratio <= 1 or (worst <= 1 and not uncertainty.structure.exact):
                rows[pair.position] = _with_columns(rows[pair.position], columns)
            elif pair.position in needs or uncertainty.structure.exact:
                raise Unresolved
            else:
                again.append(pair)
        needs.update([pair.position for pair in again])
        pairs = again


def _query(row: Row, pair: Pair, uncertainty: Uncertainty, by_formula: bool) -> DeviceQuery:
    bound = ulp.bound_without_probes(pair, uncertainty)
    terms = uncertainty.terms(pair.position, pair.golden) if by_formula else None
    if by_formula and terms is None:
        raise Unresolved
    known = (bound, None) if terms is None else terms.added_to(bound)
    return DeviceQuery(pair.device, pair.golden, row.atol, row.rtol, *known)


def _pairs(name: str, part: str, device: Any, golden: Any) -> tuple[list[tuple[Any, Any]], str]:
    """The leaves side by side, with signs that are free as the device has them; or why there are no pairs."""
    ours, theirs = list(leaves_of(device)), list(leaves_of(golden))
    if len(ours) != len(theirs):
        return [], f"{len(ours)} results instead of {len(theirs)}"
    if part == "output":
        theirs = [facts.align_signs(name, number, d, g) for number, (d, g) in enumerate(zip(ours, theirs))]
    return list(zip(ours, theirs)), ""


def _indices(pairs: Sequence[Any]) -> Sequence[int | None]:
    return range(len(pairs)) if len(pairs) > 1 else (None,)


def _judge_pair(pair: Pair, rules: Rules) -> Row:
    if not isinstance(pair.device, Tensor) or not isinstance(pair.golden, Tensor):
        return _judge_plain(pair, rules)
    problem, info = _difference_of_kind(pair.device, pair.golden)
    atol, rtol, pair.tolerance_set = rules.tolerance(pair.op, pair.device.dtype)
    if problem:
        return decided(pair.row(False, math.inf, atol, rtol, info), False, problem)
    row = pair.row(True, 0.0, atol, rtol, info)
    if pair.device.numel() == 0:
        return row
    standard = STANDARDS["seed" if pair.tolerance_set else rules.standard]  # a tolerance that was set decides alone
    columns = measure(pair.sides, atol, rtol, standard.quick)
    pair.units = columns.units
    return standard.judge(_with_columns(row, columns), pair)


def _judge_plain(pair: Pair, rules: Rules) -> Row:
    """Numbers, None, strings, shapes: what is not a tensor."""
    left, right = pair.device, pair.golden
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        zero = (left is None or right is None) and not bool((left if right is None else right).any())
        reason = "" if zero else f"{_kind(left)} instead of {_kind(right)}"
        return decided(pair.row(zero, 0, 0, 0, reason), zero, reason)
    if not all(isinstance(v, (int, float, complex)) and not isinstance(v, bool) for v in (left, right)):
        same = left == right or (_kind(left) == _kind(right) and not isinstance(left, (str, bool, torch.Size)))
        return decided(pair.row(bool(same), 0, 0, 0, ""), bool(same), f"{left!r} instead of {right!r}")
    atol, rtol, _ = rules.tolerance(pair.op, None)
    dtype = torch.complex128 if isinstance(left, complex) or isinstance(right, complex) else torch.float64
    device, golden = torch.tensor(left, dtype=dtype), torch.tensor(right, dtype=dtype)
    row = _with_columns(pair.row(True, 0, atol, rtol, ""), measure(Sides(device, golden), atol, rtol))
    if isinstance(left, int) and isinstance(right, int):
        return decided(row, left == right, f"{left} instead of {right}")
    # The number was read out of a tensor of some dtype: the coarsest among the inputs is the measure.
    coarse = pair.uncertainty.precision if pair.uncertainty else precision_of(torch.float32)
    within = abs(left - right) <= max(2 * coarse.stored * abs(right), coarse.smallest) or left == right
    within = within or (left != left and right != right)
    return decided(row, within, f"{left!r} instead of {right!r}")


def _with_columns(row: Row, columns: Columns) -> Row:
    """The row with what was measured."""
    measured = columns._asdict()
    del measured["units"]
    return row._replace(**measured)


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _difference_of_kind(device: Tensor, golden: Tensor) -> tuple[str, str]:
    """Why two tensors cannot even be compared, and what differs without being wrong."""
    problem, notes = "", []
    strided = device.layout == golden.layout == torch.strided and device.stride() != golden.stride()
    if device.dtype != golden.dtype:
        notes.append(f"Inconsistent dtypes: {device.dtype} {golden.dtype}")
        kind, expected = ((t.is_floating_point(), t.is_complex()) for t in (device, golden))
        if kind != expected or not any(kind):
            # the golden run computes in float64: which of the floating dtypes was expected is not known
            expected_kind = (
                "a complex one" if golden.is_complex() else "a floating-point one" if any(expected) else golden.dtype
            )
            problem = f"dtype {device.dtype} instead of {expected_kind}"
    if device.shape != golden.shape:
        notes.append(f"Inconsistent shape: {tuple(device.shape)} {tuple(golden.shape)}")
        problem = f"shape {tuple(device.shape)} instead of {tuple(golden.shape)}"
    elif strided and _strides(device) != _strides(golden):
        notes.append(f"Inconsistent stride: {device.stride()} {golden.stride()}")
    return problem, "; ".join(notes)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(s for n, s in zip(tensor.shape, tensor.stride()) if n > 1) if tensor.numel() > 1 else ()
