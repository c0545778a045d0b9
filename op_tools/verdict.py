"""The verdict: whether a device's result is right, given the golden result of the same call.

The default standard, `ulp`, asks one question of every element: can rounding alone explain the difference?
First with the rounding of the result itself, which nearly every correct element passes; where that is not
enough, with how far the roundings inside the call can move this element (`rounding.py`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from . import chance, op_facts, settings
from .golden import GoldenResult, Run
from .opcall import Tensor, children, tensors_in
from .rounding import PROBES, Noise, Precision, Signs, Trace, sigma_of_products, unit

RIGHT: Final = "right"
WRONG: Final = "wrong"
NOT_COMPARABLE: Final = "not comparable"
STANDARDS: Final = ("ulp", "torch", "dual", "seed")

# bound = STORED · u|y| + SIGMAS · sigma: u is the dtype's unit of rounding (half an ulp), sigma how far the
# roundings inside the call move the element on average (root mean square of the probes).
STORED: Final = 2.0
SIGMAS: Final = 6.0
_EXPONENT: Final = 0x7FF0000000000000  # of a float64
_TF32: Final = 2.0**-11
FEWEST_PROBES: Final = 4  # also when time is short

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
) -> Judgement:
    """Compare trees of CPU tensors: what the device returned, and the same part of the golden run.

    `part` is `output`, `input` (arguments after the call) or `grad_input`. With `result`, elements that simple
    rounding does not explain are examined by repeating the golden run with random roundings.

    >>> judge("torch.add", torch.ones(2), torch.ones(2, dtype=torch.float64)).verdict
    'right'
    """
    rules = rules or Rules()
    pairs, mismatch = _pairs(device, golden)
    if mismatch:
        row = Row(f"{name} {part}", False, math.inf, math.inf, 0, 0, mismatch, verdict=WRONG, reason=mismatch)
        return Judgement(WRONG, mismatch, (row,))
    spread = _Spread(result, part, [d for d, _ in pairs], max_seconds) if result is not None else None
    if part == "output":
        pairs = [(d, op_facts.turned(name, number, d, g)) for number, (d, g) in enumerate(pairs)]
    rows = []
    for number, (left, right) in enumerate(pairs):
        label = f"{name} {part}" if len(pairs) == 1 else f"{name} {part}[{number}]"
        rows.append(_judge_pair(_Pair(name, label, number, left, right, rules, spread)))
    verdict = WRONG if any(r.verdict == WRONG for r in rows) else RIGHT
    worst = max(rows, key=lambda r: (r.verdict == WRONG, r.excess), default=None)
    reason = f"{worst.name}: {worst.reason}" if worst is not None and worst.reason else ""
    return Judgement(verdict, reason, tuple(rows), spread.probes + spread.narrow_probes if spread else 0)


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
    found = chance.judge(name, result.source, outputs) if result.random else None
    if found is None:
        return Judgement(NOT_COMPARABLE, result.reason)
    right, reason = found
    row = Row(f"{name} output", right, 0.0, 0.0, 0.0, 0.0, "random", verdict=RIGHT if right else WRONG, reason=reason)
    return Judgement(row.verdict, reason, (row,))


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
    spread: _Spread | None


def _judge_pair(pair: _Pair) -> Row:
    if not isinstance(pair.device, Tensor) or not isinstance(pair.golden, Tensor):
        return _judge_plain(pair)
    problem, info = _difference_of_kind(pair.device, pair.golden)
    atol, rtol, user = pair.rules.tolerance(pair.name, pair.device.dtype)
    if problem:
        return Row(pair.label, False, math.inf, math.inf, atol, rtol, info, verdict=WRONG, reason=problem)
    row = Row(pair.label, True, 0.0, 0.0, atol, rtol, info)
    if pair.device.numel() == 0:
        return row
    row = _measured(row, pair.device, pair.golden)
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
    row = _measured(Row(pair.label, True, 0, 0, atol, rtol, ""), device, golden)
    if isinstance(left, int) and isinstance(right, int):
        return _decided(row, left == right, f"{left} instead of {right}")
    # The number was read out of a tensor of some dtype: the coarsest among the inputs is the measure.
    coarse = pair.spread.precision if pair.spread else Precision(torch.float32)
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


# --- measures ---------------------------------------------------------------------------------------------


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).resolve_conj().resolve_neg()


def _measured(row: Row, device: Tensor, golden: Tensor) -> Row:
    """The seeds' columns (golden rounded to the device's dtype, as they do it), cosine and the error in ulp."""
    left, exact = _wide(device), _wide(golden)
    rounded = exact
    if device.is_floating_point() or device.is_complex():
        rounded = _wide(exact.to(device.dtype))
    if torch.equal(left, rounded):  # nothing to measure but the rounding of the reference
        return dataclasses.replace(row, cosine=_cosine(left, exact), max_ulp=_largest_ulp(left, exact, device.dtype))
    close = torch.isclose(left, rounded, atol=row.atol, rtol=row.rtol, equal_nan=True)
    difference = (left - rounded).abs()
    difference = difference.masked_fill(left == rounded, 0.0)
    difference = difference.masked_fill(left.isnan() & rounded.isnan(), 0.0)
    relative = (difference / rounded.abs()).masked_fill(difference == 0, 0.0)
    return dataclasses.replace(
        row,
        allclose=bool(close.all()),
        max_abs_diff=_largest(difference),
        max_relative_diff=_largest(relative),
        cosine=_cosine(left, exact),
        max_ulp=_largest_ulp(left, exact, device.dtype),
    )


def _largest(values: Tensor) -> float:
    return float(values.nan_to_num(nan=math.inf).max()) if values.numel() else 0.0


def _cosine(left: Tensor, right: Tensor) -> float:
    a, b = left.reshape(-1), right.reshape(-1)
    size = float(torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b))
    if size == 0:
        return 1.0 if bool((a == b).all()) else 0.0
    return float(torch.vdot(b, a).real) / size


def ulps(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of a dtype at these float64 magnitudes (`ulps(x, torch.half)`)."""
    info = torch.finfo(dtype)
    power = exact.to(torch.float64).contiguous().view(torch.int64).bitwise_and(_EXPONENT).view(torch.float64)
    return (power * info.eps).clamp_(min=info.smallest_normal * info.eps)


def _largest_ulp(left: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    ratio = (left - exact).abs().div_(ulps(exact.abs(), dtype))
    return float(ratio.nan_to_num_(nan=0.0, posinf=0.0).max())


# --- other standards --------------------------------------------------------------------------------------


def _by_torch(row: Row, pair: _Pair) -> Row:
    atol, rtol = _TORCH_TOLERANCE.get(pair.device.dtype, (0.0, 0.0))
    left, right = _wide(pair.device), _wide(pair.golden)
    close = torch.isclose(left, right, atol=atol, rtol=rtol, equal_nan=True)
    row = dataclasses.replace(row, allclose=bool(close.all()), atol=atol, rtol=rtol)
    return _decided(row, row.allclose, f"{int((~close).sum())} elements outside torch.testing's tolerance")


def _by_dual(row: Row, pair: _Pair) -> Row:
    """Cosine, then the share of elements with a relative error below 1/N must exceed 1 - 1/N."""
    if not pair.device.is_floating_point():
        return _decided(row, row.max_abs_diff == 0, "whole numbers differ")
    if row.cosine <= 0.99:
        return _decided(row, False, f"cosine {row.cosine:.6f}")
    left, right = _wide(pair.device), _wide(pair.golden)
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
        chosen = op_facts.chosen_values(pair.name, pair.spread.result.source, pair.device, pair.golden)
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


class _Spread:
    """How far roundings inside a call move each of its results; computed only when asked, probe by probe."""

    def __init__(
        self,
        result: GoldenResult,
        part: str,
        device: Sequence[Any],
        max_seconds: float | None,
        precision: Precision | None = None,
    ) -> None:
        self.result, self.part = result, part
        self.probes = self.narrow_probes = 0
        self._squared: list[Any] | None = None
        self._few = False
        self.precision = precision or Precision(_coarsest(result, part, device), result.source.device)
        self.max_seconds, self._started = max_seconds, time.perf_counter()
        self._trace: Trace | None = None
        self._exact: list[Any] = []
        self._squares: list[Tensor | None] = []
        self._unsettled: list[Tensor | None] = []

    @property
    def usable(self) -> bool:
        """Kernels of other layouts rely on more than values: they are not run with anything but the truth."""
        source = self.result.source
        tensors = tensors_in((source.args, source.kwargs, self.result.outputs))
        return all(t.layout == torch.strided and not t.is_quantized and not t.is_nested for t in tensors)

    @property
    def trace(self) -> Trace:
        """The operators that the call is made of."""
        if self._trace is None:
            trace = Trace()
            self._exact = self.leaves(self.result.again(trace, self.part == "grad_input"))
            self._trace = trace
            self._last = trace.last_writers([t for t in self._exact if isinstance(t, Tensor)])
            self._squares = [None] * len(self._exact)
            self._unsettled = [None] * len(self._exact)
        return self._trace

    def by_formula(self, number: int, golden: Tensor) -> Tensor | None:
        """Sigma of a sum of products, from one run on the squares; None for everything else."""
        if not self.trace.sums_of_products or not self.trace.contracts or golden.is_complex():
            return None
        if self._squared is None:
            self._squared = self.leaves(self.result.squared(self.part == "grad_input"))
        squares = self._squared[number] if number < len(self._squared) else None
        if not isinstance(squares, Tensor) or squares.shape != golden.shape:
            return None
        return sigma_of_products(self.precision, self.trace.longest_sum, _wide(squares), golden)

    def grow(self) -> bool:
        """Do a few more probes; False when there have been enough."""
        _ = self.trace  # the exact results, before any that are moved
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
        self.probes += 1
        noise = Noise(self.precision, self._last, Signs(self.probes - 1))
        # ties among the inputs themselves are looked at exactly, in _shared_among_ties
        noise.breaks_ties = self.part != "grad_input" or not self.trace.selects_first
        moved = self.leaves(self.result.again(noise, self.part == "grad_input"))
        for number, (here, there) in enumerate(zip(self._exact, moved)):
            if isinstance(here, Tensor) and isinstance(there, Tensor) and here.shape == there.shape:
                self._add(number, here, there)

    def _add(self, number: int, here: Tensor, there: Tensor) -> None:
        exact, moved = _wide(here), _wide(there)
        finite = exact.isfinite() & moved.isfinite()
        change = (moved - exact).abs().masked_fill_(~finite, 0.0)
        square = change.square()
        settled = (exact == moved) | (exact.isnan() & moved.isnan()) | finite
        if not here.is_floating_point() and not here.is_complex():
            settled = exact == moved
        total, unsettled = self._squares[number], self._unsettled[number]
        self._squares[number] = square if total is None else total.add_(square)
        self._unsettled[number] = ~settled if unsettled is None else unsettled.logical_or_(~settled)

    def leaves(self, run: Run) -> list[Any]:
        if self.part == "grad_input":
            return list(run.grad_inputs or ())
        if self.part == "input":
            return list(tensors_in((run.args, run.kwargs)))
        return list(leaves_of(run.outputs))

    def sigma(self, number: int, like: Tensor) -> Tensor:
        """Root mean square of the movements so far, in absolute terms."""
        total = self._squares[number] if number < len(self._squares) else None
        if total is None or self.probes == 0:
            return torch.zeros(like.shape, dtype=torch.float64)
        mean = total / self.probes
        if self._few and mean.dim():
            # too few probes to trust each element's own: lean on its neighbours in the row
            mean = (mean * self.probes + mean.mean(-1, keepdim=True)) / self.probes
        return mean.sqrt()

    def not_settled(self, number: int, like: Tensor) -> Tensor:
        """Where a probe gave another whole number, or infinity or NaN instead of a number."""
        found = self._unsettled[number] if number < len(self._unsettled) else None
        return torch.zeros(like.shape, dtype=torch.bool) if found is None else found

    def unsettled(self, number: int, wanted: Tensor) -> Tensor:
        """`not_settled` after as many probes as the wanted places need."""
        if not self.usable:
            return torch.zeros(wanted.shape, dtype=torch.bool)
        while bool((wanted & ~self.not_settled(number, wanted)).any()) and self.grow():
            pass
        return self.not_settled(number, wanted)


def _coarsest(result: GoldenResult, part: str, device: Sequence[Any]) -> torch.dtype:
    """The dtype with the largest unit among the results (and the gradients that came in)."""
    tensors = [t for t in device if isinstance(t, Tensor)]
    if part == "grad_input":
        tensors += [t for t in result.source.grad_outputs or () if t is not None]
    low = result.source.autocast
    if low is not None and any(t.dtype == low for t in tensors_in((result.source.args, result.source.kwargs))):
        return low  # what lies between the steps of a composite call is kept in the lower precision
    dtypes = [t.dtype for t in tensors if t.is_floating_point() or t.is_complex()]
    if not dtypes:
        inputs = tensors_in((result.source.args, result.source.kwargs))
        dtypes = [t.dtype for t in inputs if t.is_floating_point() or t.is_complex()] or [torch.float32]
    return max(dtypes, key=unit)


def _judge_rounding(row: Row, pair: _Pair) -> Row:
    dtype = pair.device.dtype
    if pair.spread is not None and pair.spread.part == "grad_input":
        # gradients of arguments that autocast rounded: computed in the lower precision, handed out in float32
        dtype = max(dtype, pair.spread.result.source.rounded_to or dtype, key=unit)
    check = _Check(_wide(pair.device), _wide(pair.golden), Precision(dtype), pair.golden.dtype)
    suspects = check.suspects(stored=1.0, sigma=None, unsettled=None)
    if not bool(suspects.any()):
        return dataclasses.replace(row, excess=check.excess(1.0, None))
    if pair.spread is None:
        suspects = check.suspects(stored=STORED, sigma=None, unsettled=None)
        return _concluded(row, check, suspects, STORED, None, None, "")
    if not pair.spread.usable:
        # sparse and the like: the only measure is the size of the whole result
        flat = torch.full_like(check.size, float(check.size.nan_to_num(posinf=0.0).max()) * check.precision.stored)
        return _concluded(row, check, check.suspects(STORED, flat, None), STORED, flat, None, "")
    stored = 1.0 if pair.spread.trace.exact else STORED
    if stored == STORED:  # below the normal numbers, each term may be off by a whole step
        check.floor = check.precision.smallest * SIGMAS * math.sqrt(pair.spread.trace.longest_sum)
    sigma, unsettled = _movement(pair, check, stored)
    suspects = check.suspects(stored, sigma, unsettled)
    if pair.spread.part == "grad_input" and pair.spread.trace.selects and bool(suspects.any()):
        suspects = suspects & ~_shared_among_ties(pair, check, stored, sigma)
    return _concluded(row, check, suspects, stored, sigma, unsettled, _explained(pair, check, suspects, sigma))


def _movement(pair: _Pair, check: _Check, stored: float) -> tuple[Tensor, Tensor]:
    """Sigma, and where nothing is settled: by formula, by a few probes, or by as many as it takes."""
    spread = pair.spread
    assert spread is not None
    known = spread.by_formula(pair.number, check.golden)
    if known is not None:
        return known, torch.zeros(check.golden.shape, dtype=torch.bool)
    if not spread.trace.elementwise or spread.part == "input":
        return _probed(pair, check, stored)
    sigma, unsettled = _probed(pair, check, stored, most=2)
    suspects = check.suspects(stored, sigma, unsettled)
    if not bool(suspects.any()):
        return sigma, unsettled
    narrow = _probed_at(pair, check, stored, suspects)
    if narrow is None:
        return _probed(pair, check, stored)
    return sigma.masked_scatter(suspects, narrow[0]), unsettled.masked_scatter(suspects, narrow[1])


def _probed(pair: _Pair, check: _Check, stored: float, most: int = PROBES) -> tuple[Tensor, Tensor]:
    """After as many probes as it takes to clear the elements in doubt."""
    assert pair.spread is not None
    while True:
        sigma = pair.spread.sigma(pair.number, check.golden)
        unsettled = pair.spread.not_settled(pair.number, check.golden)
        if not bool(check.suspects(stored, sigma, unsettled).any()):
            return sigma, unsettled
        if pair.spread.probes >= most or not pair.spread.grow():
            return pair.spread.sigma(pair.number, check.golden), unsettled


def _probed_at(pair: _Pair, check: _Check, stored: float, suspects: Tensor) -> tuple[Tensor, Tensor] | None:
    """The same for an elementwise call, on the elements in doubt alone; None where that cannot be done."""
    spread = pair.spread
    assert spread is not None
    places = suspects.reshape(-1).nonzero().reshape(-1)
    if places.numel() > suspects.numel() // 2:
        return None
    fewer = spread.result.at(tuple(check.golden.shape), places, spread.part == "grad_input")
    if fewer is None or fewer.run is None:
        return None
    part = _Spread(fewer, spread.part, [pair.device], spread.max_seconds, spread.precision)
    leaves = part.leaves(fewer.run)
    leaf = leaves[pair.number] if pair.number < len(leaves) else None
    there = check.golden.reshape(-1)[places]
    if not isinstance(leaf, Tensor) or not _identical(_wide(leaf), there):
        return None  # not elementwise after all
    small = _Check(check.device.reshape(-1)[places], there, check.precision, pair.golden.dtype)
    small.floor = check.floor
    sigma, unsettled = _probed(dataclasses.replace(pair, spread=part), small, stored)
    spread.narrow_probes += part.probes
    return sigma, unsettled


def _identical(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _shared_among_ties(pair: _Pair, check: _Check, stored: float, sigma: Tensor) -> Tensor:
    """Where an input has equal values and only the shares of the gradient among them differ.

    Which of several equal values is the largest is free, and so is the one that gets the gradient.
    """
    inputs = list(tensors_in((pair.spread.result.source.args, pair.spread.result.source.kwargs)))  # type: ignore[union-attr]
    values = inputs[pair.number].detach().reshape(-1)
    _, group, count = torch.unique(values, return_inverse=True, return_counts=True)

    def summed(x: Tensor) -> Tensor:
        return torch.zeros(count.numel(), dtype=x.dtype).index_add_(0, group, x.reshape(-1))

    slack = summed(check.bound(stored, sigma)) + summed(check.size) * check.precision.stored
    agree = (summed(check.device - check.golden).abs() <= slack) & (count > 1)
    return agree[group].reshape(check.device.shape)


class _Check:
    """One result against its reference, element by element, in float64."""

    def __init__(self, device: Tensor, golden: Tensor, precision: Precision, golden_dtype: torch.dtype) -> None:
        self.device, self.golden, self.precision = device, golden, precision
        self.floor = 0.0
        self.error = (device - golden).abs()
        self.finite = device.isfinite() & golden.isfinite()
        self.same = (device == golden) | (device.isnan() & golden.isnan())
        if device.is_complex():
            # which part of a complex number becomes NaN is left open by IEEE arithmetic
            self.same |= ~device.isfinite() & ~golden.isfinite()
        self.size = golden.abs()
        # a reference in the same precision has an error of its own
        self.reference = 2.0 if unit(golden_dtype) >= precision.stored else 0.0

    def bound(self, stored: float, sigma: Tensor | None) -> Tensor:
        precision = self.precision
        bound = self.size * ((stored + self.reference) * precision.stored)
        bound = bound.clamp_(min=max(precision.smallest * (0.5 * stored), self.floor))
        return bound if sigma is None else bound.add_(sigma, alpha=SIGMAS)

    def suspects(self, stored: float, sigma: Tensor | None, unsettled: Tensor | None) -> Tensor:
        bound = self.bound(stored, sigma)
        fine = self.same | (self.finite & (self.error <= bound))
        if bool(fine.all()):
            return ~fine
        # too large for the dtype: infinity, or the largest number
        beyond = self.golden.isfinite() & (self.size + bound >= self.precision.largest)
        signs = self.device.sgn() == self.golden.sgn()
        fine |= beyond & signs & (self.device.isinf() | (self.device.abs() == self.precision.largest))
        if unsettled is not None:
            fine |= unsettled
        return ~fine

    def excess(self, stored: float, sigma: Tensor | None) -> float:
        ratio = (self.error / self.bound(stored, sigma)).masked_fill(self.same | ~self.finite, 0.0)
        return float(ratio.nan_to_num(nan=0.0).max()) if ratio.numel() else 0.0


def _concluded(
    row: Row,
    check: _Check,
    suspects: Tensor,
    stored: float,
    sigma: Tensor | None,
    unsettled: Tensor | None,
    hint: str,
) -> Row:
    count = int(suspects.sum())
    if count == 0:
        return dataclasses.replace(row, excess=min(1.0, check.excess(stored, sigma)))
    strange = suspects & ~check.finite
    ratio = (check.error / check.bound(stored, sigma)).masked_fill(~suspects, 0.0).nan_to_num(nan=math.inf)
    where = _first(strange) if bool(strange.any()) else _first(ratio == ratio.max())
    device, golden = check.device[where].item(), check.golden[where].item()
    excess = math.inf if bool(strange.any()) else float(ratio.max())
    size = "" if bool(strange.any()) else f", {excess:.3g} times the rounding bound"
    share = f"{count} of {suspects.numel()} elements, worst at {list(where)}"
    reason = f"{share}: {device:.9g} instead of {golden:.9g}{size}"
    return dataclasses.replace(row, verdict=WRONG, reason=_joined(reason, hint), excess=excess, where=where)


def _explained(pair: _Pair, check: _Check, suspects: Tensor, sigma: Tensor) -> str:
    """What the pattern of the errors looks like, for the reason's sake."""
    if not bool(suspects.any()):
        return ""
    wrong_device, wrong_golden = check.device[suspects], check.golden[suspects]
    if bool(wrong_device.isnan().any()):
        return "NaN where a number should be"
    if pair.spread is not None and pair.spread.trace.contracts and pair.device.dtype == torch.float32:
        # the sums' share of sigma, if every product had the ten bits of TF32
        grown = _TF32 / (check.precision.stored * math.sqrt(pair.spread.trace.longest_sum))
        limit = check.bound(STORED, None) + sigma * (SIGMAS * max(grown, 1.0))
        if bool((check.error[suspects] <= limit[suspects]).all()):
            return "as large as products in TF32 make it (allow_tf32)"
    tiny = torch.finfo(check.precision.dtype).smallest_normal
    if bool((wrong_device == 0).all()) and bool((wrong_golden.abs() < tiny).all()):
        return "subnormal numbers are flushed to zero"
    return ""
