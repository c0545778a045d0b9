"""One call on the device, and op_tools' verdict on it: what every check is made of."""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ditorch.conformance.cases import ERROR, NOT_COMPARABLE, PASS, WRONG, Case, Limits, Result
from ditorch.conformance.coverage import OBSERVER
from op_tools.call.arguments import numbers_of
from op_tools.call.description import map_tensors, tensors_in
from op_tools.call.traits import OpTraits
from op_tools.judge import golden, verdict

JUDGE_SECONDS = 5.0
"""Time for the verdict on one call; with less, fewer random roundings are tried before it decides."""
MOST_DETAILS = 4
_STATUS = {verdict.RIGHT: PASS, verdict.WRONG: WRONG, verdict.NOT_COMPARABLE: NOT_COMPARABLE}


class DeviceLost(RuntimeError):
    """The device refuses all further work in this process (a sticky CUDA error), so the process must be replaced.

    `result` is that of the case, where it knows more than the error: what was found before.
    """

    def __init__(self, message: str, result: Result | None = None) -> None:
        super().__init__(message)
        self.result = result


class Skip(Exception):
    """A sample that does not apply to a check."""


class Place(NamedTuple):
    """The worst element of a wrong result, or of the gradient of so many-th tensor among the arguments.

    >>> Place("output", 0, (2, 1), 1e-6).allowed
    1e-06
    """

    part: str
    number: int
    where: tuple[int, ...]
    allowed: float
    """How far it may be off the result in float64."""


@dataclass(frozen=True)
class Outcome:
    """What one sample showed.

    >>> Outcome(PASS).status
    'pass'
    """

    status: str
    message: str = ""
    details: str = ""
    worst: Place | None = None


def one_line(error: BaseException) -> str:
    """Type and first line of an error (`"RuntimeError: shape mismatch"`)."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}"


def is_sticky(error: BaseException) -> bool:
    """Whether the device is lost to this process after an error.

    >>> is_sticky(RuntimeError("CUDA error: device-side assert triggered"))
    True
    >>> is_sticky(RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul"))
    False
    >>> is_sticky(RuntimeError("CUDA error: invalid argument"))  # of an empty grid: the kernel was not started
    False
    """
    text = str(error)
    if "_STATUS_NOT_SUPPORTED" in text or "_STATUS_INVALID_VALUE" in text:
        return False  # a library refused its arguments: nothing ran
    if "CUDA error: invalid argument" in text or "CUDA error: invalid configuration argument" in text:
        return False  # a kernel was not started
    return ("CUDA error" in text and "out of memory" not in text) or "device-side assert" in text


def failed(error: BaseException) -> Outcome:
    """An error of the device, with the place where it was raised (`failed(error).status == "error"`)."""
    return Outcome(ERROR, one_line(error), without_folders("".join(traceback.format_exception(error, limit=-6))))


def without_folders(text: str) -> str:
    """A text for a page that others read: files of the packages without the folders of this machine.

    Example: ``without_folders('File "/home/me/venv/lib/torch/nn/modules/linear.py"')``
    """
    for root in (Path(torch.__file__).parents[1], Path(__file__).parents[2], Path(os.__file__).parent):
        text = text.replace(f"{root}{os.sep}", "")
    return text


# --- moving ---------------------------------------------------------------------------------------------


def moved(value: Any, device: str, stay: Callable[[torch.Tensor], bool] = lambda tensor: False) -> Any:
    """Private copies on a device: strides, offsets and shared memory are kept, device arguments follow.

    Example: ``args, kwargs = moved((args, kwargs), "cuda:0")``
    """
    storages: dict[int, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            where = "cpu" if stay(tensor) else device
            made[id(tensor)] = _copied(tensor, where, storages)
        return made[id(tensor)]

    return _with_device(map_tensors(value, move), device)


def _copied(tensor: torch.Tensor, device: str, storages: dict[int, torch.Tensor]) -> torch.Tensor:
    source = tensor.detach()
    if source.device.type == "meta":
        return tensor
    if source.layout != torch.strided or source.is_quantized or source.is_conj() or source.is_neg():
        return source.clone().to(device).requires_grad_(tensor.requires_grad)
    storage = source.untyped_storage()
    if storage._cdata not in storages:
        # As bytes, and by a plain copy: no kernel of the device takes part in making its inputs.
        flat = torch.empty(0, dtype=torch.uint8, device=source.device).set_(storage, 0, (storage.nbytes(),), (1,))
        storages[storage._cdata] = flat.to(device, copy=True)
    copy = torch.empty(0, dtype=source.dtype, device=device)
    copy.set_(storages[storage._cdata].untyped_storage(), source.storage_offset(), source.shape, source.stride())
    return copy.requires_grad_(tensor.requires_grad)


def _with_device(value: Any, device: str) -> Any:
    if isinstance(value, torch.device) or (isinstance(value, str) and value in ("cpu", "cuda")):
        return device
    if type(value) in (list, tuple):
        return type(value)(_with_device(member, device) for member in value)
    if type(value) is dict:
        return {key: _with_device(member, device) for key, member in value.items()}
    return value


def on_host(value: Any) -> Any:
    """CPU copies of every tensor (`on_host(outputs)`)."""
    return map_tensors(value, lambda t: t.detach().clone() if t.device.type == "cpu" else t.detach().cpu())


def nearly_same(ours: Any, theirs: Any) -> bool:
    """Whether the tensors of two trees on the CPU have one shape and dtype, and bits that differ in rounding alone.

    In float32 and float64, that is an eps of each number, one or two units in the last place. A verdict takes ten times
    as long, and on a device that rounds otherwise than the CPU nearly every call would need one.

    Example: ``nearly_same(x, torch.nextafter(x, x + 1))``
    """
    left, right = list(tensors_in(ours)), list(tensors_in(theirs))
    return len(left) == len(right) and all(_same_bits(a, b) or _close(a, b) for a, b in zip(left, right))


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.shape, a.dtype, a.layout, b.layout) != (b.shape, b.dtype, torch.strided, torch.strided):
        return False
    if a.dtype not in (torch.float32, torch.float64):
        return False
    apart = (a - b).abs() <= torch.finfo(a.dtype).eps * b.abs()
    return bool(((apart & (a.signbit() == b.signbit())) | (a == b) & (b != 0)).all())


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.shape, a.dtype, a.layout, b.layout) != (b.shape, b.dtype, torch.strided, torch.strided) or a.is_quantized:
        return False
    plain = [t.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format) for t in (a, b)]
    return torch.equal(*(t.reshape(-1).view(torch.uint8) for t in plain))


# --- judging --------------------------------------------------------------------------------------------


@dataclass
class Trial:
    """A call with CPU copies of its arguments, to be done on the device and judged.

    `reference`, where given, is done on the CPU in place of `call`: the same mathematics by another road.

    Example: ``Trial("torch.add", torch.add, (x, y), {}, "cuda:0").run()``
    """

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: str
    reference: Callable[..., Any] | None = None
    stay: Callable[[torch.Tensor], bool] = lambda tensor: False
    random: bool | None = None
    """Whether it draws random numbers; None lets the golden run find out, under a dispatch mode."""
    before: Any = field(init=False)
    outputs: Any = field(init=False, default=None)
    """What was judged last, on the CPU; `gradients` likewise, None where none were."""
    gradients: Any = field(init=False, default=None)
    expected: Any = field(init=False, default=None)
    """Results and gradients of the CPU, once `ask_cpu` has run: what is nearly the same is not judged any further."""

    def __post_init__(self) -> None:
        self.before = moved((self.args, self.kwargs), "cpu")  # the call may change its arguments

    def run(self, backward: bool = False, forward: bool = True, number: int = 0) -> Outcome:
        """Do it and judge results (`forward`) and gradients (`backward`)."""
        try:
            outputs, cotangents, gradients = self._on_device(backward, number)
        except Skip:
            raise
        except Exception as error:
            return self._refused(error, backward)
        if backward and gradients is None:
            raise Skip("no gradient for these arguments")
        self.outputs, self.gradients = outputs, gradients
        OBSERVER.repeat(lambda: self._on_device(backward, number))
        if self.expected is not None and nearly_same((outputs, gradients), self.expected):
            return Outcome(PASS)
        return self._judged(outputs if forward else None, cotangents, gradients)

    def judge(self, outputs: Any) -> Outcome:
        """Judge results that another way of calling gave."""
        self.outputs, self.gradients = outputs, None
        if self.expected is not None and nearly_same(outputs, self.expected[0]):
            return Outcome(PASS)
        return self._judged(outputs, None, None)

    def on_cpu(self, backward: bool = False) -> Any:
        """Results on the CPU in the dtypes as they are; raises what the CPU raises."""
        args, kwargs = moved(self.before, "cpu")
        function = self.reference or self.call
        return _called(function, args, kwargs, backward, 0, "cpu")[0]

    def ask_cpu(self, backward: bool = False) -> str:
        """Why the CPU does not do this call; empty if it does, and then what it gives is `expected`."""
        args, kwargs = moved(self.before, "cpu")
        try:
            outputs, _, gradients = _called(self.reference or self.call, args, kwargs, backward, 0, "cpu")
        except Exception as error:
            return one_line(error)
        self.expected = (outputs, gradients)
        return ""

    def refused_by_cpu(self, backward: bool = False) -> str:
        """Why the CPU does not do this call either; empty if it does."""
        try:
            self.on_cpu(backward)
        except Exception as error:
            return one_line(error)
        return ""

    def _refused(self, error: Exception, backward: bool) -> Outcome:
        if is_sticky(error):
            raise DeviceLost(one_line(error)) from error
        why = self.refused_by_cpu(backward)
        if why:
            return Outcome(NOT_COMPARABLE, f"the CPU refuses it too: {why}")
        return failed(error)

    def _on_device(self, backward: bool, number: int) -> tuple[Any, Any, Any]:
        args, kwargs = moved(self.before, self.device, self._stays)
        return _called(self.call, args, kwargs, backward, number, self.device)

    def _stays(self, tensor: torch.Tensor) -> bool:
        return self.stay(tensor)

    def _judged(self, outputs: Any, cotangents: Any, gradients: Any) -> Outcome:
        try:
            found = self._verdict(outputs, cotangents, gradients)
        except Exception as error:  # a failure of the judge says nothing about the device
            return Outcome(NOT_COMPARABLE, f"no verdict: {one_line(error)}")
        wrong = [row for row in found.rows if row.verdict == verdict.WRONG]
        place = self._place(max(wrong, key=lambda row: row.excess)) if wrong else None
        return Outcome(_STATUS[found.verdict], found.reason[:300], "\n".join(_row(row) for row in wrong), place)

    def _place(self, row: verdict.Row) -> Place | None:
        """Where a row is off by most; None where there is no bound to tell."""
        number = row.index or 0
        if row.part == "grad_input":
            found = numbers_of(self.name, *self.before).place(row.part, row.index)
            if found is None:
                return None
            number = found
        try:
            bound = row.bound[row.where] if isinstance(row.bound, torch.Tensor) else row.bound
            allowed = float(bound)
        except (IndexError, TypeError):
            return None
        return Place(row.part, number, tuple(row.where), allowed) if math.isfinite(allowed) else None

    def _verdict(self, outputs: Any, cotangents: Any, gradients: Any) -> verdict.Judgement:
        args, kwargs = self.before
        function = self.reference or self.call
        result = golden.run(
            function,
            args,
            kwargs,
            name=self.name,
            traits=OpTraits(self.name, function, random=self.random),
            grad_outputs=cotangents,
            device=torch.device(self.device).type,
        )
        return verdict.judge_call(self.name, result, outputs=outputs, grad_inputs=gradients, max_seconds=JUDGE_SECONDS)


def _row(row: verdict.Row) -> str:
    return (
        f"{row.name}: {row.reason or row.error_info} (at {list(row.where)}, largest difference {row.max_abs_diff:.3g}, "
        f"{row.max_ulp:.3g} ulp, {row.excess:.3g} times what rounding explains)"
    )


def _called(
    call: Callable[..., Any], args: Any, kwargs: Any, backward: bool, number: int, device: str
) -> tuple[Any, Any, Any]:
    inputs = list(tensors_in((args, kwargs)))
    outputs = call(*args, **kwargs)
    host = on_host(outputs)
    if not backward:
        return host, None, None
    tensors = list(tensors_in(outputs))
    used = [t for t in tensors if t.requires_grad and (t.is_floating_point() or t.is_complex())]
    wanted = [t for t in inputs if t.requires_grad and t.is_leaf]
    if not wanted or not used:
        return host, None, None
    generator = torch.Generator().manual_seed(number)
    cotangents: list[Any] = [_cotangent(t, generator) if any(t is u for u in used) else None for t in tensors]
    sent = [cotangent.to(device) for cotangent in cotangents if cotangent is not None]
    found = torch.autograd.grad(used, wanted, sent, allow_unused=True)
    by_input = {id(t): g for t, g in zip(wanted, found)}
    return host, cotangents, [on_host(by_input.get(id(t))) for t in inputs]


def _cotangent(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    kind = torch.complex64 if tensor.is_complex() else torch.float32
    return torch.randn(tensor.shape, generator=generator, dtype=kind).to(tensor.dtype)


# --- adding up ------------------------------------------------------------------------------------------

_WORST_FIRST = (WRONG, ERROR, PASS, NOT_COMPARABLE)


def over_samples(case: Case, samples: Iterable[Any], check: Callable[[int, Any], Outcome], limits: Limits) -> Result:
    """The result of a case: its worst sample decides; right ones outweigh those that nobody can judge.

    Example: ``over_samples(case, samples, lambda number, sample: Outcome(PASS), Limits())``
    """
    started = time.monotonic()
    outcomes: list[tuple[int, Outcome]] = []
    skipped: list[str] = []
    note = ""
    for number, sample in enumerate(samples):
        if limits.samples is not None and len(outcomes) >= limits.samples:
            note = f"the first {limits.samples} samples"
            break
        if time.monotonic() - started > limits.sampling_seconds:
            note = f"only {len(outcomes)} samples: the others did not fit into half of the time limit"
            break
        try:
            outcomes.append((number, check(number, sample)))
        except Skip as reason:
            skipped.append(str(reason))
    return _summed(case, outcomes, skipped, note, time.monotonic() - started)


def _summed(case: Case, outcomes: list[tuple[int, Outcome]], skipped: list[str], note: str, seconds: float) -> Result:
    if not outcomes:
        why = skipped[0] if skipped else "the database has no sample"
        return Result(case, NOT_COMPARABLE, why, 0, 0, round(seconds, 4), note)
    status = next(s for s in _WORST_FIRST if any(outcome.status == s for _, outcome in outcomes))
    worst = [(number, outcome) for number, outcome in outcomes if outcome.status == status]
    unclear = sum(outcome.status == NOT_COMPARABLE for _, outcome in outcomes)
    message = worst[0][1].message
    details: tuple[str, ...] = ()
    if status in (WRONG, ERROR):
        message = f"sample {worst[0][0]}: {message} ({len(worst)} of {len(outcomes)} samples)"
        details = tuple(f"sample {n}: {o.details or o.message}" for n, o in worst[:MOST_DETAILS])
    elif status == PASS:
        message = ""
    return Result(case, status, message, len(outcomes), unclear, round(seconds, 4), note, details)
