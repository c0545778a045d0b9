"""The verdict: whether a device's result is right, given the golden result of the same call.

The default standard, `ulp`, asks one question of every element: can rounding alone explain the difference?
First with the rounding of the result itself, which nearly every correct element passes; where that is not
enough, with how far the roundings inside the call can move this element (`rounding.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from .. import settings
from ..call import facts
from ..call.description import Tensor, children, tensors_in
from . import formulas, random_draws
from .golden import GoldenResult
from .measures import Bound, Columns, Look, Sides, beyond, looks, measure
from .rounding import PROBES, Precision, precision_of, unit
from .uncertainty import Spread, Structure

RIGHT: Final = "right"
WRONG: Final = "wrong"
NOT_COMPARABLE: Final = "not comparable"
STANDARDS: Final = ("ulp", "torch", "dual", "seed")

# bound = STORED · u|y| + SIGMAS · sigma: u is the dtype's unit of rounding (half an ulp), sigma how far the
# roundings inside the call move the element on average (root mean square of the probes).
STORED: Final = 2.0
SIGMAS: Final = 6.0
_TF32: Final = 2.0**-11
_NOTICEABLE: Final = 1 / 64  # share of what TF32 may do at most that it does at least somewhere
_OF_CUDNN: Final = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_TRUST: Final = 0.5  # in what one probe says; in n of them, the square root of n as much
_MANY: Final = 1 / 16  # share of elements in doubt above which a probe of the whole call is cheaper

_SEED_TOLERANCE: Final[dict[torch.dtype, float]] = {
    torch.float16: 1e-4,
    torch.bfloat16: 1e-3,
    torch.float32: 1e-5,
    torch.float64: 1e-8,
}
_SEED_OTHER: Final = 1e-3
_SEED_NUMBER: Final = 1e-6
_TORCH_TOLERANCE: Final[dict[torch.dtype, tuple[float, float]]] = {  # atol, rtol of torch.testing
    torch.float16: (1e-5, 1e-3),
    torch.bfloat16: (1e-5, 1.6e-2),
    torch.float32: (1e-5, 1.3e-6),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1e-5, 1.3e-6),
    torch.complex128: (1e-7, 1e-7),
}


class InDoubt(Exception):
    """Tensors on a device that are not settled at a glance: the question is one for their copies on the CPU."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One compared tensor or number: the seeds' columns, what was added to them, and the verdict.

    `excess` is the largest error divided by its bound; `where` is the place of that element.
    """

    name: str
    allclose: bool
    max_abs_diff: float
    max_relative_diff: float
    atol: float
    rtol: float
    error_info: str
    cosine: float = math.nan
    max_ulp: float = 0.0
    verdict: str = RIGHT
    reason: str = ""
    excess: float = 0.0
    where: tuple[int, ...] = ()


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
    """Which standard decides, and the tolerances that users set; read once.

    >>> Rules().tolerance("torch.add", torch.float16)
    (0.0001, 0.0001, False)
    """

    standard: str = "ulp"
    tolerances: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_environment(cls) -> Rules:
        """Read `OP_AUTOCOMPARE_STANDARD` and every `*AUTOCOMPARE_ERROR_TOLERANCE*` (`Rules.from_environment()`)."""
        import os

        found = {}
        for variable, text in os.environ.items():
            if "AUTOCOMPARE_ERROR_TOLERANCE" in variable and text.strip():
                found[variable] = settings.parse_tolerance(text, variable)
        return cls(settings.choice("OP_AUTOCOMPARE_STANDARD", STANDARDS), found)

    def tolerance(self, name: str, dtype: torch.dtype | None) -> tuple[float, float, bool]:
        """atol, rtol and whether the user set them; the most specific variable wins."""
        key = "AUTOCOMPARE_ERROR_TOLERANCE"
        if dtype is not None and self.tolerances:
            suffix = "_" + str(dtype).removeprefix("torch.").upper()
            own = settings.op_prefix(name) + "_" + key
            for variable in (own + suffix, own, key + suffix, key):
                if variable in self.tolerances:
                    return (*self.tolerances[variable], True)
        default = _SEED_NUMBER if dtype is None else _SEED_TOLERANCE.get(dtype, _SEED_OTHER)
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
    labels: Sequence[str] | None = None,
) -> Judgement:
    """Compare trees of CPU tensors: what the device returned, and the same part of the golden run.

    `part` is `output`, `input` (arguments after the call) or `grad_input`. With `result`, elements that simple
    rounding does not explain are examined by repeating the golden run with random roundings. `labels` are the names of
    the rows, if they are to have others.

    >>> judge("torch.add", torch.ones(2), torch.ones(2, dtype=torch.float64)).verdict
    'right'
    """
    rules = rules or Rules()
    pairs, mismatch = _pairs(device, golden)
    if mismatch:
        row = Row(f"{name} {part}", False, math.inf, math.inf, 0, 0, mismatch, verdict=WRONG, reason=mismatch)
        return Judgement(WRONG, mismatch, (row,))
    doubts = None if result is None else _Doubts(result, part, [d for d, _ in pairs], max_seconds)
    if part == "output":
        pairs = [(d, facts.turned(name, number, d, g)) for number, (d, g) in enumerate(pairs)]
    rows = []
    for number, (left, right) in enumerate(pairs):
        if labels is not None:
            label = labels[number]
        else:
            label = f"{name} {part}" if len(pairs) == 1 else f"{name} {part}[{number}]"
        rows.append(_judge_pair(_Pair(name, label, number, left, right, rules, doubts)))
    verdict = WRONG if any(r.verdict == WRONG for r in rows) else RIGHT
    worst = max(rows, key=lambda r: (r.verdict == WRONG, r.excess), default=None)
    reason = f"{worst.name}: {worst.reason}" if worst is not None and worst.reason else ""
    return Judgement(verdict, reason, tuple(rows), 0 if doubts is None else doubts.probes)


class _Doubts:
    """What is asked about a call only where its results are not settled at once."""

    def __init__(
        self,
        result: GoldenResult,
        part: str,
        device: list[Any],
        max_seconds: float | None,
        structure: Structure | None = None,
    ) -> None:
        self.result, self.part, self._device, self._max_seconds = result, part, device, max_seconds
        self._structure = structure
        self._of_dtype: dict[torch.dtype, Spread] = {}

    @functools.cached_property
    def spread(self) -> Spread:
        return self._spread(_coarsest(self.result, self.part, self._device), self._structure)

    def spread_of(self, row: Any) -> Spread:
        """That of one of the results. A kernel that shows no steps is as precise as what it returns."""
        spread = self.spread
        if not isinstance(row, Tensor) or not spread.usable or not spread.structure.unseen:
            return spread
        if row.dtype not in self._of_dtype:
            self._of_dtype[row.dtype] = self._spread(row.dtype, spread.structure)
        return self._of_dtype[row.dtype]

    def _spread(self, dtype: torch.dtype, structure: Structure | None = None) -> Spread:
        precision = precision_of(dtype, self.result.source.device)
        return Spread(self.result, self.part, leaves_of, precision, self._max_seconds, structure)

    @property
    def probes(self) -> int:
        spreads = [s for s in (self.__dict__.get("spread"), *self._of_dtype.values()) if s is not None]
        return sum(s.probes + s.narrow_probes for s in spreads)


def only_moves(result: GoldenResult, part: str) -> bool:
    """Whether a call takes values from one place to another and computes nothing (`only_moves(result, "output")`)."""
    spread = Spread(result, part, leaves_of, precision_of(torch.float32), None)
    return spread.usable and spread.structure.exact and not spread.structure.kernels


def structure_of(result: GoldenResult, part: str) -> Structure | None:
    """What the call is made of; None where that cannot be found out (`structure_of(result, "output")`)."""
    spread = Spread(result, part, leaves_of, precision_of(torch.float32, result.source.device), None)
    return spread.structure if spread.usable else None


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
    """Judge everything that is known of one call at once.

    `inputs_after` are the device's arguments after an in-place or `out=` call.

    >>> judge_call("torch.neg", golden.run(torch.neg, (x,)), outputs=torch.neg(x)).verdict  # doctest: +SKIP
    'right'
    """
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
    row = Row(f"{name} output", right, 0.0, 0.0, 0.0, 0.0, "random", verdict=RIGHT if right else WRONG, reason=reason)
    return Judgement(row.verdict, reason, (row,))


def glance(
    name: str,
    device: Any,
    golden: Any,
    result: GoldenResult,
    part: str,
    rules: Rules,
    structure: Structure,
    needs: set[int],
    labels: Sequence[str] | None = None,
) -> Judgement:
    """`judge` for tensors that are still on the device, both sides; raises `InDoubt` unless all is right at once.

    `structure` is that of the call; `needs` are the rows of such calls that took a formula, and grows.
    """
    pairs, mismatch = _pairs(device, golden)
    if mismatch:
        raise InDoubt
    if part == "output":
        pairs = [(d, facts.turned(name, number, d, g)) for number, (d, g) in enumerate(pairs)]
    spread = _Doubts(result, part, [d for d, _ in pairs], None, structure).spread
    rows: list[Row] = []
    open_rows: list[tuple[int, Precision]] = []
    for number, (left, right) in enumerate(pairs):
        if labels is not None:
            label = labels[number]
        else:
            label = f"{name} {part}" if len(pairs) == 1 else f"{name} {part}[{number}]"
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            rows.append(_judge_plain(_Pair(name, label, number, left, right, rules, None)))
            continue
        problem, info = _difference_of_kind(left, right)
        if problem:
            raise InDoubt
        atol, rtol, _ = rules.tolerance(name, left.dtype)
        rows.append(Row(label, True, 0.0, 0.0, atol, rtol, info, 1.0))
        if left.is_floating_point() and left.numel():
            open_rows.append((number, _precision_of_row(left.dtype, result, part)))
        elif not torch.equal(left, right):
            raise InDoubt
    if any(row.verdict != RIGHT for row in rows):
        raise InDoubt
    _settle(rows, open_rows, pairs, spread, needs)
    return Judgement(RIGHT, "", tuple(rows))


def _settle(
    rows: list[Row], open_rows: list[tuple[int, Precision]], pairs: list[Any], spread: Spread, needs: set[int]
) -> None:
    """Fill in the rows of numbers; twice at most, the second time with what takes a formula."""
    while open_rows:
        asked = [_asked_of_device(rows[n], pairs[n], n, precision, spread, n in needs) for n, precision in open_rows]
        again = []
        for (number, precision), (columns, worst) in zip(open_rows, looks(asked)):
            if columns is None or columns.units is None:
                raise InDoubt
            units = columns.units * precision_of(pairs[number][0].dtype).stored / precision.stored
            if units <= 1 or (worst <= 1 and not spread.structure.exact):
                row = rows[number]
                rows[number] = Row(row.name, *columns[:3], row.atol, row.rtol, row.error_info, *columns[3:5])
            elif number in needs or spread.structure.exact:
                raise InDoubt
            else:
                again.append((number, precision))
        needs.update([number for number, _ in again])
        open_rows = again


def _asked_of_device(
    row: Row, pair: tuple[Tensor, Tensor], number: int, precision: Precision, spread: Spread, by_formula: bool
) -> Look:
    device, golden = pair
    bound, squares = _bound(precision, spread, number), None
    if by_formula:
        source = spread.result.source
        terms = formulas.terms(
            formulas.Asked(source, number, spread.backward, golden, spread.precision, spread.structure)
        )
        if terms is None:
            raise InDoubt
        bound = bound._replace(of_squares=terms.of_squares, of_result=terms.of_result)
        squares = terms.squares
    return Look(Sides(device, golden), row.atol, row.rtol, bound, squares)


# --- pairs of leaves --------------------------------------------------------------------------------------


def _pairs(device: Any, golden: Any) -> tuple[list[tuple[Any, Any]], str]:
    ours, theirs = list(leaves_of(device)), list(leaves_of(golden))
    if len(ours) != len(theirs):
        return [], f"{len(ours)} results instead of {len(theirs)}"
    return list(zip(ours, theirs)), ""


def leaves_of(value: Any) -> Iterator[Any]:
    """Everything in a nest of containers that is compared on its own (`list(leaves_of([x, 1]))`)."""
    if isinstance(value, (Tensor, str)):
        yield value
        return
    parts = children(value)
    if parts is None:
        yield value
        return
    for member in parts[1]:
        yield from leaves_of(member)


@dataclasses.dataclass
class _Pair:
    name: str
    label: str
    number: int
    device: Any
    golden: Any
    rules: Rules
    doubts: _Doubts | None
    units: float | None = None  # the largest error in units of rounding, if it is known

    @functools.cached_property
    def sides(self) -> Sides:
        return Sides(self.device, self.golden)

    @property
    def spread(self) -> Spread | None:
        return None if self.doubts is None else self.doubts.spread_of(self.device)


def _judge_pair(pair: _Pair) -> Row:
    if not isinstance(pair.device, Tensor) or not isinstance(pair.golden, Tensor):
        return _judge_plain(pair)
    problem, info = _difference_of_kind(pair.device, pair.golden)
    atol, rtol, user = pair.rules.tolerance(pair.name, pair.device.dtype)
    if problem:
        return Row(pair.label, False, math.inf, math.inf, atol, rtol, info, verdict=WRONG, reason=problem)
    if pair.device.numel() == 0:
        return Row(pair.label, True, 0.0, 0.0, atol, rtol, info)
    columns = measure(pair.sides, atol, rtol, quick=not user and pair.rules.standard == "ulp")
    pair.units = columns.units
    row = Row(
        pair.label,
        columns.allclose,
        columns.max_abs_diff,
        columns.max_relative_diff,
        atol,
        rtol,
        info,
        columns.cosine,
        columns.max_ulp,
    )
    if user or pair.rules.standard == "seed":
        why = f"allclose with {'the tolerance that was set' if user else 'the seed tolerance'}"
        return _decided(row, row.allclose, why)
    if pair.rules.standard == "torch":
        return _by_torch(row, pair)
    if pair.rules.standard == "dual":
        return _by_dual(row, pair)
    if not pair.device.is_floating_point() and not pair.device.is_complex():
        return _judge_whole_numbers(row, pair)
    return _judge_rounding(row, pair)


def _with_columns(row: Row, columns: Columns) -> Row:
    return dataclasses.replace(
        row,
        allclose=columns.allclose,
        max_abs_diff=columns.max_abs_diff,
        max_relative_diff=columns.max_relative_diff,
        cosine=columns.cosine,
        max_ulp=columns.max_ulp,
    )


def _decided(row: Row, right: bool, reason: str) -> Row:
    return dataclasses.replace(row, verdict=RIGHT if right else WRONG, reason="" if right else reason)


def _judge_plain(pair: _Pair) -> Row:
    """Numbers, None, strings, shapes: what is not a tensor."""
    left, right = pair.device, pair.golden
    numbers = all(isinstance(v, (int, float, complex)) and not isinstance(v, bool) for v in (left, right))
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        absent = left is None or right is None
        present = left if right is None else right
        zero = absent and isinstance(present, Tensor) and not bool(present.any())
        reason = "" if zero else f"{_kind(left)} instead of {_kind(right)}"
        return Row(pair.label, zero, 0, 0, 0, 0, reason, verdict=RIGHT if zero else WRONG, reason=reason)
    if not numbers:
        same = left == right or (_kind(left) == _kind(right) and not isinstance(left, (str, bool, torch.Size)))
        return _decided(Row(pair.label, bool(same), 0, 0, 0, 0, ""), bool(same), f"{left!r} instead of {right!r}")
    atol, rtol, _ = pair.rules.tolerance(pair.name, None)
    dtype = torch.complex128 if isinstance(left, complex) or isinstance(right, complex) else torch.float64
    device, golden = torch.tensor(left, dtype=dtype), torch.tensor(right, dtype=dtype)
    row = _with_columns(Row(pair.label, True, 0, 0, atol, rtol, ""), measure(Sides(device, golden), atol, rtol))
    if isinstance(left, int) and isinstance(right, int):
        return _decided(row, left == right, f"{left} instead of {right}")
    # The number was read out of a tensor of some dtype: the coarsest among the inputs is the measure.
    coarse = pair.spread.precision if pair.spread else precision_of(torch.float32)
    within = abs(left - right) <= max(2 * coarse.stored * abs(right), coarse.smallest) or left == right
    within = within or (left != left and right != right)
    return _decided(row, within, f"{left!r} instead of {right!r}")


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _difference_of_kind(device: Tensor, golden: Tensor) -> tuple[str, str]:
    """Why two tensors cannot even be compared, and what differs without being wrong."""
    notes = []
    if device.dtype != golden.dtype:
        notes.append(f"Inconsistent dtypes: {device.dtype} {golden.dtype}")
    if device.shape != golden.shape:
        notes.append(f"Inconsistent shape: {tuple(device.shape)} {tuple(golden.shape)}")
        return f"shape {tuple(device.shape)} instead of {tuple(golden.shape)}", "; ".join(notes)
    if device.layout == golden.layout == torch.strided and _strides(device) != _strides(golden):
        notes.append(f"Inconsistent stride: {device.stride()} {golden.stride()}")
    if _family(device) != _family(golden):
        return f"dtype {device.dtype} instead of {golden.dtype}", "; ".join(notes)
    if _family(device) in ("integer", "bool") and device.dtype != golden.dtype:
        return f"dtype {device.dtype} instead of {golden.dtype}", "; ".join(notes)
    return "", "; ".join(notes)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(s for n, s in zip(tensor.shape, tensor.stride()) if n > 1) if tensor.numel() > 1 else ()


def _family(tensor: Tensor) -> str:
    if tensor.is_complex():
        return "complex"
    if tensor.is_floating_point():
        return "float"
    return "bool" if tensor.dtype == torch.bool else "integer"


# --- other standards --------------------------------------------------------------------------------------


def _by_torch(row: Row, pair: _Pair) -> Row:
    atol, rtol = _TORCH_TOLERANCE.get(pair.device.dtype, (0.0, 0.0))
    left, right = pair.sides.left, pair.sides.right
    close = torch.isclose(left, right, atol=atol, rtol=rtol, equal_nan=True)
    row = dataclasses.replace(row, allclose=bool(close.all()), atol=atol, rtol=rtol)
    return _decided(row, row.allclose, f"{int((~close).sum())} elements outside torch.testing's tolerance")


def _by_dual(row: Row, pair: _Pair) -> Row:
    """Cosine, then the share of elements with a relative error below 1/N must exceed 1 - 1/N."""
    if not pair.device.is_floating_point():
        return _decided(row, row.max_abs_diff == 0, "whole numbers differ")
    if row.cosine <= 0.99:
        return _decided(row, False, f"cosine {row.cosine:.6f}")
    left, right = pair.sides.left, pair.sides.right
    if bool((left.isfinite() != right.isfinite()).any()):
        return _decided(row, False, "NaN or infinity in other places")
    if row.max_abs_diff < 1e-3:
        return row
    n = 100 if pair.device.dtype in (torch.float16, torch.bfloat16) else 1000
    relative = ((left - right).abs() / right.abs()).nan_to_num(nan=0.0)
    share = float((relative < 1 / n).double().mean())
    return _decided(row, share > 1 - 1 / n, f"only {share:.4%} of the elements are within 1/{n}")


# --- whole numbers ----------------------------------------------------------------------------------------


def _judge_whole_numbers(row: Row, pair: _Pair) -> Row:
    different = pair.device != pair.golden
    if not bool(different.any()):
        return row
    if pair.spread is not None:
        chosen = facts.chosen_values(pair.name, pair.spread.result.source, pair.device, pair.golden, pair.number)
        if chosen is not None and not bool(chosen.any()):
            return dataclasses.replace(row, error_info=_joined(row.error_info, "other places of equal values"))
        if chosen is None:
            different = different & ~pair.spread.unsettled(pair.number, different)
        else:
            different = chosen
    count = int(different.sum())
    if count == 0:
        return dataclasses.replace(row, error_info=_joined(row.error_info, "differs where rounding decides"))
    where = _first(different)
    values = (pair.device[where].item(), pair.golden[where].item())
    reason = f"{count} of {different.numel()} differ, first at {list(where)}: {values[0]} instead of {values[1]}"
    return dataclasses.replace(row, verdict=WRONG, reason=reason, excess=math.inf, where=where)


def _joined(*texts: str) -> str:
    return "; ".join(t for t in texts if t)


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0]) if mask.dim() else ()


# --- rounding ---------------------------------------------------------------------------------------------


def _coarsest(result: GoldenResult, part: str, device: Sequence[Any]) -> torch.dtype:
    """The dtype with the largest unit among the results (and the gradients that came in)."""
    tensors = [t for t in device if isinstance(t, Tensor)]
    if part == "grad_input":
        tensors += [t for t in result.source.grad_outputs or () if t is not None]
    low = result.source.autocast
    if low is not None and any(t.dtype == low for t in result.source.tensors):
        return low  # what lies between the steps of a composite call is kept in the lower precision
    dtypes = [t.dtype for t in tensors if t.is_floating_point() or t.is_complex()]
    if not dtypes:
        dtypes = [t.dtype for t in result.source.tensors if t.is_floating_point() or t.is_complex()] or [torch.float32]
    return max(dtypes, key=unit)


def _judge_rounding(row: Row, pair: _Pair) -> Row:
    dtype, doubts = pair.device.dtype, pair.doubts
    precision = precision_of(dtype) if doubts is None else _precision_of_row(dtype, doubts.result, doubts.part)
    units = None if pair.units is None else pair.units * precision_of(pair.device.dtype).stored / precision.stored
    if units is not None and units <= 1:  # as good as rounding the reference
        return dataclasses.replace(row, excess=units) if units else row
    spread = pair.spread if pair.spread is None or pair.spread.usable else None
    if units is not None and spread is not None and not spread.structure.exact:
        least = STORED + SIGMAS * spread.least_error(pair.number) / precision.stored
        if units <= least:  # what any probes would allow
            return dataclasses.replace(row, excess=units / least)
        worst = _worst_by_formula(pair, spread, precision)
        if worst <= 1:
            return dataclasses.replace(row, excess=worst)
    check = _Check(pair.sides.left, pair.sides.right, precision, pair.golden.dtype)
    if units is None and check.doubtful(1.0) is None:
        return dataclasses.replace(row, excess=check.excess(1.0))
    if pair.spread is None:
        return _concluded(row, check, check.doubtful(STORED), STORED)
    if spread is None:
        # sparse and the like: the only measure is the size of the whole result
        flat = torch.full_like(check.size, float(check.size.nan_to_num(posinf=0.0).max()) * precision.stored)
        return _concluded(row, check, check.doubtful(STORED, flat), STORED, flat)
    stored = 1.0 if spread.structure.exact else STORED
    if stored == STORED:
        check.floor = _floor(precision, spread)
        check.least = spread.least_error(pair.number)
    sigma, suspects = _movement(pair, spread, check, stored)
    if suspects is not None and spread.part == "grad_input" and spread.structure.selects:
        suspects = _any(suspects & ~_shared_among_ties(pair, check, stored, sigma))
    hint = "" if suspects is None else _explained(pair, check, suspects, sigma)
    return _concluded(row, check, suspects, stored, sigma, hint)


def _precision_of_row(dtype: torch.dtype, result: GoldenResult, part: str) -> Precision:
    if part == "grad_input" and result.source.rounded_to is not None:
        # gradients of arguments that autocast rounded: computed in the lower precision, handed out in float32
        dtype = max(dtype, result.source.rounded_to, key=unit)
    return precision_of(dtype)


def _floor(precision: Precision, spread: Spread) -> float:
    """Below the normal numbers, each term of a sum may be off by a whole step."""
    return precision.smallest * SIGMAS * math.sqrt(spread.structure.longest_sum)


def _bound(precision: Precision, spread: Spread, number: int) -> Bound:
    return Bound(
        STORED * precision.stored,
        max(precision.smallest * (0.5 * STORED), _floor(precision, spread)),
        SIGMAS,
        spread.least_error(number),
    )


def _worst_by_formula(pair: _Pair, spread: Spread, precision: Precision) -> float:
    """Largest error beside its bound, without a probe; more than 1 if that does not explain it."""
    bound = _bound(precision, spread, pair.number)
    worst = math.inf
    for find in (_by_some_roundings, _by_all_products):
        found = find(pair, spread, bound)
        worst = math.inf if found is None else found
        if worst <= 1:
            return worst
    return _by_elements_in_doubt(pair, spread, bound, precision)


def _by_some_roundings(pair: _Pair, spread: Spread, bound: Bound) -> float | None:
    """By the formulas that count less than the probes do."""
    asked = formulas.Asked(
        spread.result.source, pair.number, spread.backward, pair.golden, spread.precision, spread.structure
    )
    terms = formulas.terms(asked)
    if terms is None:
        return None
    found = beyond(pair.sides, bound._replace(of_squares=terms.of_squares, of_result=terms.of_result), terms.squares)
    return None if found is None else found.worst


def _by_all_products(pair: _Pair, spread: Spread, bound: Bound) -> float | None:
    """By all squared terms of sums of products."""
    squares = spread.squares(pair.number, torch.float32)
    if squares is None or squares.shape != pair.golden.shape:
        return None
    of_squares, of_result = spread.weights_of_squares()
    found = beyond(pair.sides, bound._replace(of_squares=of_squares, of_result=of_result), squares)
    return None if found is None else found.worst


def _by_elements_in_doubt(pair: _Pair, spread: Spread, bound: Bound, precision: Precision) -> float:
    """Of an elementwise call, by probes of the few elements in doubt."""
    if not spread.structure.elementwise:
        return math.inf
    found = beyond(pair.sides, bound, most=max(1, int(pair.device.numel() * _MANY)))
    if found is None or found.exceeding > found.places.numel():
        return math.inf
    places = found.places
    device = pair.sides.device.reshape(-1)[places].to(torch.float64)
    check = _Check(device, pair.sides.golden.reshape(-1)[places], precision, pair.golden.dtype)
    check.floor, check.least = _floor(precision, spread), bound.least
    probed = _probed_at(pair, spread, check, tuple(pair.golden.shape), places, STORED)
    if probed is None or probed[1] is not None:
        return math.inf
    return min(1.0, check.excess(STORED, probed[0]))


def _any(mask: Tensor) -> Tensor | None:
    return mask if bool(mask.any()) else None


_Doubt = tuple[Tensor | None, Tensor | None]  # sigma, and the elements that it does not explain


def _movement(pair: _Pair, spread: Spread, check: _Check, stored: float) -> _Doubt:
    """By formula, on the elements in doubt alone, or by as many probes of the whole call as it takes."""
    for dtype in (torch.float32, torch.float64):
        sigma = spread.by_formula(pair.number, check.golden, dtype)
        if sigma is None:
            break
        suspects = check.doubtful(stored, sigma.to(torch.float64))
        if dtype == torch.float64 or (suspects is None and bool(sigma.sum().isfinite())):
            return sigma.to(torch.float64), suspects
    if spread.structure.elementwise:
        found = _narrowed(pair, spread, check, stored)
        if found is not None:
            return found
    return _probed(pair.number, spread, check, stored)


def _share(mask: Tensor) -> float:
    return int(mask.sum()) / mask.numel()


def _probed(number: int, spread: Spread, check: _Check, stored: float, most: int = PROBES) -> _Doubt:
    """After as many probes as it takes to clear the elements in doubt."""
    while True:
        sigma = spread.sigma(number)
        if sigma is not None:
            sigma.mul_(min(1.0, _TRUST * math.sqrt(spread.probes)))
        suspects = check.doubtful(stored, sigma, spread.not_settled(number))
        if suspects is None or spread.probes >= most or not spread.grow():
            return sigma, suspects


def _narrowed(pair: _Pair, spread: Spread, check: _Check, stored: float) -> _Doubt | None:
    """The same for an elementwise call, on the elements in doubt alone; None where that cannot be done."""
    sigma: Tensor | None = None
    suspects = check.doubtful(stored)
    whole = not spread.on_lists  # of a list, one tensor is much less than all of them
    if whole and suspects is not None and _share(suspects) > _MANY:  # one probe of all clears most of them
        sigma, suspects = _probed(pair.number, spread, check, stored, most=1)
    if suspects is None:
        return sigma, None
    if whole and _share(suspects) > _MANY:
        return None
    places = suspects.reshape(-1).nonzero().reshape(-1)
    golden = check.golden.reshape(-1)[places]
    small = _Check(check.device.reshape(-1)[places], golden, check.precision, pair.golden.dtype)
    small.floor, small.least = check.floor, check.least
    probed = _probed_at(pair, spread, small, tuple(check.golden.shape), places, stored)
    if probed is None:
        return None
    there, left = probed
    everywhere = torch.zeros(check.golden.shape, dtype=torch.float64) if sigma is None else sigma.contiguous()
    if there is not None:
        everywhere.view(-1)[places] = there
    if left is None:
        return everywhere, None
    remaining = torch.zeros(check.golden.shape, dtype=torch.bool)
    remaining.view(-1)[places] = left
    return everywhere, remaining


def _probed_at(
    pair: _Pair, spread: Spread, check: _Check, shape: tuple[int, ...], places: Tensor, stored: float
) -> _Doubt | None:
    """Probes of an elementwise call at these places alone, which `check` is about; None where it is not elementwise."""
    narrow = spread.at(pair.number, shape, places)
    if narrow is None or not _identical(narrow.exact, check.golden):
        return None
    at_once = narrow.probed_at_once()
    if at_once is None:
        found = _probed(narrow.number, narrow.spread, check, stored)
    else:
        found = at_once[0], check.doubtful(stored, *at_once)
    spread.narrow_probes += narrow.spread.probes
    return found


def _identical(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _shared_among_ties(pair: _Pair, check: _Check, stored: float, sigma: Tensor | None) -> Tensor:
    """Where an input has equal values and only the shares of the gradient among them differ.

    Which of several equal values is the largest is free, and so is the one that gets the gradient.
    """
    values = pair.spread.result.source.tensors[pair.number].detach().reshape(-1)  # type: ignore[union-attr]
    _, group, count = torch.unique(values, return_inverse=True, return_counts=True)

    def summed(x: Tensor) -> Tensor:
        return torch.zeros(count.numel(), dtype=x.dtype).index_add_(0, group, x.reshape(-1))

    slack = summed(check.bound(stored, sigma)) + summed(check.size) * check.precision.stored
    agree: Tensor = (summed(check.device - check.golden).abs() <= slack) & (count > 1)
    return agree[group].reshape(check.device.shape)


class _Check:
    """One result against its reference, element by element, in float64."""

    def __init__(self, device: Tensor, golden: Tensor, precision: Precision, golden_dtype: torch.dtype) -> None:
        self.device, self.golden, self.precision = device, golden, precision
        self.floor = 0.0  # of the bound
        self.least = 0.0  # of sigma, relative to the result
        self.error = (device - golden).abs()
        self.size = golden.abs()
        self.regular = math.isfinite(float(self.error.sum()))  # then all numbers are
        # a reference in the same precision has an error of its own
        self.reference = 2.0 if unit(golden_dtype) >= precision.stored else 0.0

    @functools.cached_property
    def largest(self) -> float:
        return float(self.size.max())

    @functools.cached_property
    def finite(self) -> Tensor:
        return self.device.isfinite() & self.golden.isfinite()

    @functools.cached_property
    def same(self) -> Tensor:
        same = (self.device == self.golden) | (self.device.isnan() & self.golden.isnan())
        if self.device.is_complex():
            # which part of a complex number becomes NaN is left open by IEEE arithmetic
            same |= ~self.device.isfinite() & ~self.golden.isfinite()
        return same

    def bound(self, stored: float, sigma: Tensor | None) -> Tensor:
        precision = self.precision
        factor = (stored + self.reference) * precision.stored
        lowest = max(precision.smallest * (0.5 * stored), self.floor)
        if sigma is None:
            return (self.size * (factor + SIGMAS * self.least)).clamp_(min=lowest)
        if self.least:
            sigma = torch.maximum(sigma, self.size * self.least)
        return (self.size * factor).clamp_(min=lowest).add_(sigma, alpha=SIGMAS)

    def doubtful(self, stored: float, sigma: Tensor | None = None, unsettled: Tensor | None = None) -> Tensor | None:
        """The elements that are not explained; None if all are."""
        bound = self.bound(stored, sigma)
        if self.regular:
            over = self.error - bound
            if float(over.max()) <= 0:  # false for NaN
                return None
            doubtful = over > 0
            if unsettled is None and self.largest + float(bound.max()) < self.precision.largest:
                return doubtful
        else:
            doubtful = ~(self.same | (self.finite & (self.error <= bound)))
        # too large for the dtype: infinity, or the largest number
        beyond = self.golden.isfinite() & (self.size + bound >= self.precision.largest)
        if self.device.is_complex():  # arithmetic with an infinite part makes NaN of the other, or of both
            doubtful &= ~(beyond & ~self.device.isfinite())
        else:
            signs = self.device.sgn() == self.golden.sgn()
            doubtful &= ~(beyond & signs & (self.device.isinf() | (self.device.abs() == self.precision.largest)))
        if unsettled is not None:
            doubtful &= ~unsettled
        return _any(doubtful)

    def excess(self, stored: float, sigma: Tensor | None = None) -> float:
        ratio = self.error / self.bound(stored, sigma)
        if not self.regular:
            ratio = ratio.masked_fill(self.same | ~self.finite, 0.0)
        return float(ratio.nan_to_num(nan=0.0).max()) if ratio.numel() else 0.0


def _concluded(
    row: Row,
    check: _Check,
    suspects: Tensor | None,
    stored: float,
    sigma: Tensor | None = None,
    hint: str = "",
) -> Row:
    if suspects is None:
        return dataclasses.replace(row, excess=min(1.0, check.excess(stored, sigma)))
    count = int(suspects.sum())
    strange = suspects & ~check.finite
    ratio = (check.error / check.bound(stored, sigma)).masked_fill(~suspects, 0.0).nan_to_num(nan=math.inf)
    where = _first(strange) if bool(strange.any()) else _first(ratio == ratio.max())
    device, golden = check.device[where].item(), check.golden[where].item()
    excess = math.inf if bool(strange.any()) else float(ratio.max())
    size = "" if bool(strange.any()) else f", {excess:.3g} times the rounding bound"
    share = f"{count} of {suspects.numel()} elements, worst at {list(where)}"
    reason = f"{share}: {device:.9g} instead of {golden:.9g}{size}"
    return dataclasses.replace(row, verdict=WRONG, reason=_joined(reason, hint), excess=excess, where=where)


def _tf32_allowed(name: str) -> bool:
    """Whether this process lets CUDA multiply float32 in TF32 for an operator."""
    last = facts.last_name(name)
    flags = torch.backends.cudnn if last.startswith("conv") or last in _OF_CUDNN else torch.backends.cuda.matmul
    try:
        return bool(flags.allow_tf32)
    except RuntimeError:  # set in the old way and in the new one
        return True


def _explained(pair: _Pair, check: _Check, suspects: Tensor, sigma: Tensor | None) -> str:
    """What the pattern of the errors looks like, for the reason's sake."""
    wrong_device, wrong_golden = check.device[suspects], check.golden[suspects]
    if bool(wrong_device.isnan().any()):
        return "NaN where a number should be"
    structure = pair.spread.structure if pair.spread is not None else None
    if structure is not None and structure.contracts and pair.device.dtype == torch.float32 and sigma is not None:
        # the sums' share of sigma, if every product had the ten bits of TF32
        grown = _TF32 / (check.precision.stored * math.sqrt(structure.longest_sum))
        limit = check.bound(STORED, None) + sigma * (SIGMAS * max(grown, 1.0))
        share = (check.error / limit)[suspects]
        if float(share.max()) > _NOTICEABLE and float(share.max()) < 4 and float((share > 1).double().mean()) < 0.05:
            allowed = _tf32_allowed(pair.name)
            return f"as large as products in TF32 make it ({'allow_tf32' if allowed else 'but allow_tf32 is off'})"
    tiny = torch.finfo(check.precision.dtype).smallest_normal
    if bool((wrong_device == 0).all()) and bool((wrong_golden.abs() < tiny).all()):
        return "subnormal numbers are flushed to zero"
    return ""
