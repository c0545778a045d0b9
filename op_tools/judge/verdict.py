"""The verdict: whether a device's result is right, given the golden result of the same call.

This pairs what the device returned with the golden result, measures each pair, asks the standard that was chosen
(`standards/`) and puts the rows together.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from .. import settings
from ..call import facts
from ..call.arguments import Numbers, compared_arguments, numbers_of
from ..call.description import Tensor
from ..call.equality import leaves_of as leaves_of
from ..native import measuring
from ..native.measuring import Bound, Columns
from ..view.rows import NOT_COMPARABLE as NOT_COMPARABLE
from ..view.rows import RIGHT as RIGHT
from ..view.rows import WEAK as WEAK
from ..view.rows import WRONG as WRONG
from ..view.rows import Row as Row
from . import formulas, random_draws
from .formulas import FormulaQuery
from .golden import GoldenResult
from .measures import Sides, measure
from .pair import CallUncertainty, Pair, decided, explained
from .rounding import Precision, precision_of
from .standards import STANDARDS, seed, ulp
from .uncertainty import Structure, Uncertainty

_MAX_FAILURES: Final = 4  # of a plan, one after the other: then calls of this kind need the full way


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The verdict on one call: that of its worst row, and all rows."""

    verdict: str
    reason: str
    rows: tuple[Row, ...] = ()
    probes: int = 0

    def __add__(self, other: Judgement) -> Judgement:
        """Both together: the worse verdict counts (`judge(...) + judge(...)`)."""
        order = (RIGHT, WEAK, NOT_COMPARABLE, WRONG)
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
    allowances: bool = False  # TF32 where it is allowed, and known weaknesses of kernels, are not wrong

    @classmethod
    def from_environment(cls) -> Rules:
        """Read the standard, all tolerances and all casts; mistakes are errors now (`Rules.from_environment()`)."""
        standard = settings.choice("OP_AUTOCOMPARE_STANDARD")
        allowances = settings.choice("OP_AUTOCOMPARE_KNOWN") == "note"
        return cls(standard, settings.tolerances(), settings.Casts.from_environment(), allowances)

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
    pairs, mismatch = pairs_of(name, part, device, golden)
    if mismatch:
        row = Row(name, part, None, False, math.inf, math.inf, 0, 0, mismatch)
        return Judgement(WRONG, mismatch, (decided(row, False, mismatch, math.inf),))
    of_call = None if result is None else CallUncertainty(result, part, [d for d, _ in pairs], max_seconds)
    indices = indices or indices_of(pairs)
    asked = [Pair(name, part, indices[n], n, left, right, of_call) for n, (left, right) in enumerate(pairs)]
    rows = [_judge_pair(pair, rules) for pair in asked]
    verdict = next((v for v in (WRONG, WEAK) if any(r.verdict == v for r in rows)), RIGHT)
    worst = max(rows, key=lambda r: (r.verdict == verdict, r.excess), default=None)
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
        if not known or self.gave_up:
            return None
        left, right = map(_leaves, (device, golden))
        if not len(left) == len(right) == len(known):
            return None
        if not all(v is None or isinstance(v, Tensor) for v in (*left, *right)):
            return None
        indices = indices or indices_of(left)
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


def _leaves(value: Any) -> Sequence[Any]:
    """What is compared on its own; quicker than `leaves_of` for a tensor, or a list of them."""
    if isinstance(value, Tensor):
        return (value,)
    flat = isinstance(value, (list, tuple)) and all(v is None or isinstance(v, Tensor) for v in value)
    return value if flat else list(leaves_of(value))


def _looks(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.stride(), value.layout


def _known_row(pair: Pair, row: Row) -> _KnownRow | None:
    device, golden, call = pair.device, pair.golden, pair.of_call
    if device is None and golden is None:
        return _KnownRow((), row)
    if call is None or pair.units is None or pair.tolerance_set or facts.has_free_vectors(pair.op):
        return None
    info = difference_of_kind(device, golden)[1]
    row = Row(pair.op, pair.part, pair.index, True, 0.0, 0.0, row.atol, row.rtol, info)
    known = _KnownRow((*_looks(device), *_looks(golden)), row, pair.unit_ratio)
    uncertainty = call.known(device)
    if uncertainty is None or uncertainty.structure.exact or not call.remembered:
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
    row = with_columns(row, columns)._replace(excess=excess)
    return row if row.allclose else explained(row)


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
        mask = random_draws.recover(name, result.source.args, result.source.kwargs, outputs) if result.random else None
        if mask is None:
            return judge_samples(name, result, outputs)
        total = unlikely(name, random_draws.Tally().mask(name, mask))
        mask = mask.completed(next((g for g in grad_inputs or () if g is not None), None))
        result = result.with_draws((mask.kept,))
        if not result.comparable:
            return Judgement(NOT_COMPARABLE, result.reason)
        mask.clean(result.outputs)
    else:
        total = Judgement(RIGHT, "")
    options: dict[str, Any] = {"result": result, "rules": rules, "max_seconds": max_seconds}
    if outputs is not None:
        total += judge(name, outputs, result.outputs, part="output", **options)
    if inputs_after is not None:
        ours, theirs = compared_arguments(*inputs_after), compared_arguments(*result.inputs_after)
        total += judge(name, ours, theirs, part="input", **options)
    if grad_inputs is not None and result.grad_inputs is not None:
        numbers = numbers_of(name, result.source.args, result.source.kwargs)
        total += judge_gradients(name, grad_inputs, result.grad_inputs, numbers, **options)
    return total


def judge_gradients(
    name: str, device: Sequence[Tensor | None], golden: Sequence[Tensor | None], numbers: Numbers, **options: Any
) -> Judgement:
    """`judge` for the gradients of all tensors among the arguments, in rows that are numbered like these."""
    known = len(device) == len(golden) == len(numbers.inputs)
    judged = judge(name, device, golden, part="grad_input", indices=numbers.indices if known else None, **options)
    return dataclasses.replace(judged, rows=gradient_rows(name, judged.rows, numbers)) if known else judged


def gradient_rows(name: str, rows: Sequence[Row], numbers: Numbers) -> tuple[Row, ...]:
    """The rows of what may have a gradient, from those of all tensors; a Python number has none."""
    return tuple(
        [
            Row(name, "grad_input", index, True, 0.0, 0.0, 0.0, 0.0, "") if place is None else rows[place]
            for index, place in numbers.gradients
        ]
    )


def unchanged_rows(name: str, device: Any, golden: Any, rules: Rules) -> tuple[Row, ...]:
    """The rows of arguments that a call has left alone."""
    ours, theirs = list(leaves_of(device)), list(leaves_of(golden))
    pairs = itertools.zip_longest(ours, theirs[: len(ours)])
    indices = indices_of(ours)
    return tuple([_unchanged_row(name, index, *pair, rules) for index, pair in zip(indices, pairs)])


def _unchanged_row(name: str, index: int | None, leaf: Any, reference: Any, rules: Rules) -> Row:
    dtype = leaf.dtype if isinstance(leaf, Tensor) else None
    number = isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)
    if dtype is None and not number:
        return Row(name, "input", index, True, 0.0, 0.0, 0.0, 0.0, "", cosine=1.0)
    atol, rtol, _ = rules.tolerance(name, dtype)
    info = ""
    if dtype is not None and isinstance(reference, Tensor) and reference.dtype != dtype:
        info = f"Inconsistent dtypes: {dtype} {reference.dtype}"
    return Row(name, "input", index, True, 0.0, 0.0, atol, rtol, info, cosine=1.0)


def judge_samples(
    name: str,
    result: GoldenResult,
    outputs: Any,
    tally: random_draws.Tally | None = None,
    states: random_draws.States | None = None,
) -> Judgement:
    """Judge what a random call returned by its distribution, if that is known."""
    found = random_draws.judge_samples(name, result.source, outputs, tally, states) if result.random else None
    if found is None:
        return Judgement(NOT_COMPARABLE, result.reason)
    right, reason = found
    return unlikely(name, reason) if not right else Judgement(RIGHT, "", (_random_row(name, True, ""),))


def unlikely(name: str, reason: str) -> Judgement:
    """The judgement on random numbers, given why they cannot be right: nothing at all where "" (`unlikely(op, "")`)."""
    return Judgement(WRONG, reason, (_random_row(name, False, reason),)) if reason else Judgement(RIGHT, "")


def _random_row(name: str, right: bool, reason: str) -> Row:
    return decided(Row(name, "output", None, right, 0.0, 0.0, 0.0, 0.0, "random"), right, reason)


def pairs_of(name: str, part: str, device: Any, golden: Any) -> tuple[list[tuple[Any, Any]], str]:
    """The leaves side by side, with signs that are free as the device has them; or why there are no pairs."""
    ours, theirs = list(leaves_of(device)), list(leaves_of(golden))
    if len(ours) != len(theirs):
        return [], f"{len(ours)} results instead of {len(theirs)}"
    if part == "output":
        theirs = [facts.align_signs(name, number, d, g) for number, (d, g) in enumerate(zip(ours, theirs))]
    return list(zip(ours, theirs)), ""


def indices_of(pairs: Sequence[Any]) -> Sequence[int | None]:
    return range(len(pairs)) if len(pairs) > 1 else (None,)


def _judge_pair(pair: Pair, rules: Rules) -> Row:
    if not isinstance(pair.device, Tensor) or not isinstance(pair.golden, Tensor):
        return judge_plain(pair, rules)
    problem, info = difference_of_kind(pair.device, pair.golden)
    atol, rtol, pair.tolerance_set = rules.tolerance(pair.op, pair.device.dtype)
    pair.allowances = rules.allowances
    if problem and facts.may_be_empty(pair.op, pair.position) and 0 in (pair.device.numel(), pair.golden.numel()):
        return pair.row(True, 0.0, atol, rtol, "not compared: the algorithm chosen here does not compute it")
    if problem:
        return decided(pair.row(False, math.inf, atol, rtol, info), False, problem, math.inf)
    row = pair.row(True, 0.0, atol, rtol, info)
    if pair.device.numel() == 0:
        return row
    standard = STANDARDS["seed" if pair.tolerance_set else rules.standard]  # a tolerance that was set decides alone
    columns = measure(pair.sides, atol, rtol, standard.quick)
    pair.units = columns.units
    row = standard.judge(with_columns(row, columns), pair)
    return row if row.allclose or row.verdict != RIGHT else explained(row, rules.standard)


def judge_plain(pair: Pair, rules: Rules) -> Row:
    """Numbers, None, strings, shapes: what is not a tensor."""
    left, right = pair.device, pair.golden
    if isinstance(left, str) and isinstance(right, Tensor):  # the text says what it was (`copies.operands.Opaque`)
        return pair.row(True, 0, 0, 0, f"not compared: results of type {left} cannot be copied")
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        zero = (left is None or right is None) and not bool((left if right is None else right).any())
        reason = "" if zero else f"{_kind(left)} instead of {_kind(right)}"
        return decided(pair.row(zero, 0, 0, 0, reason), zero, reason, math.inf)
    if not all(isinstance(v, (int, float, complex)) and not isinstance(v, bool) for v in (left, right)):
        same = left == right or (_kind(left) == _kind(right) and not isinstance(left, (str, bool, torch.Size)))
        same = same or pair.op == "torch.Tensor.type"  # the text names the device and the dtype, which are the CPU's
        return decided(pair.row(bool(same), 0, 0, 0, ""), bool(same), f"{left!r} instead of {right!r}", math.inf)
    atol, rtol, _ = rules.tolerance(pair.op, None)
    dtype = torch.complex128 if isinstance(left, complex) or isinstance(right, complex) else torch.float64
    device, golden = torch.tensor(left, dtype=dtype), torch.tensor(right, dtype=dtype)
    row = with_columns(pair.row(True, 0, atol, rtol, ""), measure(Sides(device, golden), atol, rtol))
    if isinstance(left, int) and isinstance(right, int):
        return decided(row, left == right, f"{left} instead of {right}", 0.0)
    # The number was read out of a tensor of some dtype: the coarsest among the inputs is the measure.
    coarse = pair.uncertainty.precision if pair.uncertainty else precision_of(torch.float32)
    bound = max(2 * coarse.stored * abs(right), coarse.smallest)
    within = abs(left - right) <= bound or left == right
    within = within or (left != left and right != right)
    if within and not row.allclose:
        row = row._replace(error_info="within rounding")
    return decided(row, within, f"{left!r} instead of {right!r}", bound)


def with_columns(row: Row, columns: Columns) -> Row:
    """The row with what was measured."""
    measured = columns._asdict()
    del measured["units"]
    return row._replace(**measured)


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def difference_of_kind(device: Tensor, golden: Tensor) -> tuple[str, str]:
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
