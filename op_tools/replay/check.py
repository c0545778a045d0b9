"""What comes of replaying a capture: whether it ran, how long it took, and whether it is right.

Two references are asked: the captured results (the same device must give the same bits) and the golden run on
the CPU, which tells rounding from error whatever device the capture came from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from ..call import facts
from ..call.description import Described, Tensor, describe, map_tensors, tensors_in
from ..call.devices import event_class, quiet, synchronize
from ..compat import no_torch_function
from ..files.archive import ArchiveError, unknown_in
from ..files.captures import CannotReplay, one_line
from ..judge import golden, verdict
from .captured import CapturedOp, leaves_of

IDENTICAL: Final = "bit-identical"
RIGHT: Final = "right within rounding"
WRONG: Final = "wrong"
NOT_COMPARABLE: Final = "not comparable"
RAN: Final = "ran"
ERROR: Final = "error"
STATUSES: Final = (IDENTICAL, RIGHT, RAN, NOT_COMPARABLE, WRONG, ERROR)
_FAILED: Final = frozenset({WRONG, ERROR})
_KEEP_FREE: Final = 0.5  # share of the free memory that one call may fill
_LITTLE: Final = 32 << 20  # bytes


@dataclasses.dataclass(frozen=True)
class Options:
    """How to replay.

    >>> Options(acc_check=True, run_times=3).forward
    True
    """

    device: str | None = None
    dtype: torch.dtype | None = None
    contiguous: bool = False
    acc_check: bool = False
    time: bool = False
    run_times: int = 1
    forward: bool = True  # measured and judged; it always runs
    backward: bool = True
    describe: bool = False  # keep what the tables of arguments show

    def __post_init__(self) -> None:
        if self.run_times < 1:
            raise ValueError(f"run_times={self.run_times}: an operator must run at least once")
        if not (self.forward or self.backward):
            raise ValueError("only forward and only backward exclude each other")


@dataclasses.dataclass(frozen=True)
class Shown:
    """Descriptions of the tensors of one pass, for its table."""

    parts: tuple[tuple[str, Described], ...]
    cast: str = ""


@dataclasses.dataclass
class Outcome:
    """What came of one capture.

    >>> Outcome(Path("x"), "torch.add", IDENTICAL).passed
    True
    """

    folder: Path
    op: str
    status: str
    reason: str = ""
    location: str = ""
    device: str = ""
    rows: tuple[verdict.Row, ...] = ()
    forward_ms: list[float] = dataclasses.field(default_factory=list)
    backward_ms: list[float] = dataclasses.field(default_factory=list)
    went_backward: bool = False
    like_capture: str = ""  # how the result compares with the captured one
    repeatable: bool = True
    notes: list[str] = dataclasses.field(default_factory=list)
    shown_forward: Shown | None = None
    shown_backward: Shown | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong with it (`outcome.passed`)."""
        return self.status not in _FAILED

    def as_dict(self) -> dict[str, Any]:
        """JSON-able values (`json.dumps(outcome.as_dict())`)."""
        return {
            "folder": str(self.folder),
            "op": self.op,
            "status": self.status,
            "reason": self.reason,
            "like_capture": self.like_capture,
            "repeatable": self.repeatable,
            "notes": self.notes,
            "location": self.location,
            "device": self.device,
            "went_backward": self.went_backward,
            "forward_ms": self.forward_ms,
            "backward_ms": self.backward_ms,
            "seconds": self.seconds,
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }


def replay(folder: Path, options: Options | None = None, rules: verdict.Rules | None = None) -> Outcome:
    """Run one captured call again and say what came of it; never raises for what a file holds.

    >>> replay(Path("op_tools_results/.../torch.add/1/1/t"), Options(acc_check=True)).status  # doctest: +SKIP
    'bit-identical'
    """
    check = Check(folder, options or Options(), rules)
    check.run()
    return check.conclude()


def op_from(folder: Path) -> str:
    """The operator by the path of a capture that cannot even be read (`op_from(Path("torch.add/1/2"))`)."""
    return next((part for part in reversed(folder.parts) if part.startswith("torch.")), "")


class Check:
    """One capture on its way: it runs on the device, then it is judged, in another thread if that is wanted.

    What a file or an operator throws becomes its outcome.

    >>> check = Check(Path("op_tools_results/.../torch.add/1/1/t"), Options(acc_check=True))  # doctest: +SKIP
    >>> check.run()                                                                           # doctest: +SKIP
    >>> check.conclude().status                                                               # doctest: +SKIP
    'bit-identical'
    """

    op: CapturedOp

    def __init__(self, folder: Path, options: Options, rules: verdict.Rules | None = None) -> None:
        self.options, self.outcome = options, Outcome(folder, op_from(folder), ERROR)
        self._rules = rules
        self._ran = False
        self.outputs: Any = None
        self.inputs_after: Any = None
        self.grads: list[Tensor | None] | None = None
        self.sent: list[Tensor | None] | None = None

    def run(self) -> None:
        """Read it and run it (`check.run()`)."""
        options = self.options
        with self._caught():
            self.op = CapturedOp(self.outcome.folder, options.device, options.dtype, options.contiguous)
            self._run()
            self._ran = True

    def conclude(self) -> Outcome:
        """What came of it (`check.conclude().status`)."""
        if self._ran:
            with self._caught():
                self._conclude()
        return self.outcome

    @functools.cached_property
    def rules(self) -> verdict.Rules:
        return self._rules or verdict.Rules.from_environment()

    @contextlib.contextmanager
    def _caught(self) -> Iterator[None]:
        outcome, began = self.outcome, time.perf_counter()
        try:
            yield
        except CannotReplay as reason:
            outcome.status, outcome.reason = NOT_COMPARABLE, str(reason)
        except ArchiveError as error:
            outcome.status, outcome.reason = ERROR, str(error)
        except (MemoryError, torch.OutOfMemoryError) as error:
            outcome.status, outcome.reason = ERROR, f"not enough memory to run it ({one_line(error)})"
        except Exception as error:  # whatever an operator, or a file that was tampered with, throws
            lost = self.op.payload["as_tuples"] if hasattr(self, "op") else []
            hint = f"; an argument of type {lost[0]} was captured as a tuple" if lost else ""
            outcome.status, outcome.reason = ERROR, one_line(error) + hint
        outcome.seconds += time.perf_counter() - began

    def _run(self) -> None:
        op, outcome = self.op, self.outcome
        outcome.op, outcome.location, outcome.device = op.name, op.location, str(op.device)
        if op.note:
            outcome.notes.append(op.note)
        _check_memory(op)
        if self.options.time:
            _warm_up(op.device)
        self._run_all()
        if op.has_twins and not _same(self.grads, self._captured_gradients()):
            self._try_apart(self._captured_gradients())
        if self.options.describe:
            self._describe()

    def _conclude(self) -> None:
        if not self.options.acc_check:
            self._conclude_run()
            return
        captured_output = self.op.captured("output") if self.options.forward else None
        self._judge(captured_output, self._captured_gradients())

    def _captured_gradients(self) -> Any:
        return self.op.captured("grad_inputs") if self.options.backward and self.options.acc_check else None

    # -- runs -----------------------------------------------------------------------------------------

    def _run_all(self) -> None:
        """All runs; the first is compared, the others must give the same bits."""
        op, options = self.op, self.options
        forwards = options.run_times if options.forward else 1
        backwards = options.run_times if options.backward else 0
        for number in range(forwards):
            op.prepare()
            op.run_forward(self._clock(self.outcome.forward_ms) if options.forward else None)
            if number < backwards and options.forward:
                self._run_backward()
            self._keep(number)
        if not options.forward:
            for _ in range(backwards):
                self._run_backward()

    def _run_backward(self) -> None:
        op = self.op
        if not op.can_go_backward:
            return
        op.prepare_backward()
        try:
            grads = op.run_backward(self._clock(self.outcome.backward_ms))
        except (RuntimeError, NotImplementedError) as error:
            if op.has_backward:
                raise
            # nobody went backward through it while it was captured: that it cannot be done is no failure
            self.outcome.notes.append(f"its backward pass was not captured and does not run ({one_line(error)})")
            return
        if grads is None:
            return
        found = [None if g is None else _on_host(g) for g in grads]
        if self.grads is None:
            self.grads = found
            self.sent = op.sent_gradients()
            self.device_grads, self.outcome.went_backward = grads, True
        elif not _same(found, self.grads):
            self._not_repeatable("gradients")

    def _keep(self, number: int) -> None:
        if not self.options.acc_check:
            return
        with quiet():
            outputs = map_tensors(self.op.result, _on_host)
            if number == 0:
                self.outputs = outputs
                self.inputs_after = map_tensors((self.op.args, self.op.kwargs), _on_host)
            elif not _same(outputs, self.outputs):
                self._not_repeatable("results")

    def _not_repeatable(self, what: str) -> None:
        if self.outcome.repeatable:
            self.outcome.notes.append(f"two runs gave different {what}")
        self.outcome.repeatable = False

    @contextlib.contextmanager
    def _clock(self, times: list[float]) -> Iterator[None]:
        """Add the milliseconds of what is inside, by the device's own clock where it has one."""
        if not self.options.time:
            yield
            return
        kind = self.op.device.type
        make = event_class(kind)
        marks = [make(enable_timing=True) for _ in range(2)] if make else []
        synchronize(kind)
        began = time.perf_counter()
        if marks:
            marks[0].record()
        yield
        if marks:
            marks[1].record()
        synchronize(kind)
        times.append(marks[0].elapsed_time(marks[1]) if marks else (time.perf_counter() - began) * 1e3)

    def _try_apart(self, captured: Any) -> None:
        """Arguments of the same look were taken for one tensor, and the gradients do not fit: try them as two."""
        if captured is None or self.grads is None:
            return
        self.op.apart = True
        kept = (self.op.args, self.op.kwargs, self.op.result, self.op._leaves)
        self.op.prepare()
        self.op.run_forward()
        grads = self.op.run_backward()
        if grads is not None and _same([None if g is None else _on_host(g) for g in grads], captured):
            self.grads, self.device_grads = list(captured), grads
        else:
            self.op.apart = False
            self.op.args, self.op.kwargs, self.op.result, self.op._leaves = kept

    def _conclude_run(self) -> None:
        self.outcome.status = RAN
        if not self.options.forward and not self.outcome.went_backward:
            self.outcome.status, self.outcome.reason = NOT_COMPARABLE, _NO_BACKWARD

    # -- judgement ------------------------------------------------------------------------------------

    def _judge(self, captured_output: Any, captured_grads: Any) -> None:
        op, outcome = self.op, self.outcome
        if not self.options.forward and not outcome.went_backward:
            outcome.status, outcome.reason = NOT_COMPARABLE, _NO_BACKWARD
            return
        same = self._like_capture(captured_output, captured_grads)
        reference = self._golden()
        judged = self._judged(reference, self.outputs, self.grads, self.inputs_after if op.writes else None)
        if self.options.forward and not op.writes:
            judged += self._untouched_inputs(reference)
        outcome.rows = judged.rows
        if reference.note:
            outcome.notes.append(reference.note)
        self._describe_golden(reference)
        if judged.verdict == verdict.WRONG:
            outcome.status, outcome.reason = WRONG, judged.reason
            if same:
                outcome.notes.append("the captured result is the same, bit for bit: it is wrong, too")
        elif same:
            outcome.status = IDENTICAL
        elif judged.verdict == verdict.RIGHT:
            outcome.status, outcome.reason = RIGHT, judged.reason
        else:
            outcome.status = NOT_COMPARABLE
            outcome.reason = f"it drew from {op.drew_from}" if op.drew_from else judged.reason
        if not same:
            self._judge_capture(reference, captured_output, captured_grads)

    def _like_capture(self, output: Any, grads: Any) -> bool:
        """Compare bits with the capture; True when everything that was captured is the same."""
        options, outcome = self.options, self.outcome
        if options.dtype is not None:
            outcome.like_capture = f"not compared: another dtype ({options.dtype})"
            return False
        found: list[str] = []
        compared = False
        if options.forward and unknown_in((output,)):
            outcome.notes.append("the result could not be captured")
        elif options.forward and output is not None:
            compared = True
            found += _differences("output", self.outputs, output)
        elif options.forward:
            outcome.notes.append("it returns nothing" if self.outputs is None else "no result was captured")
        if grads is not None and self.grads is not None:
            compared = True
            found += _differences("grad", self.grads, grads, absent_is_unknown=True)
        outcome.like_capture = "; ".join(found) if found else (IDENTICAL if compared else "nothing to compare with")
        return compared and not found

    def _golden(self) -> golden.GoldenResult:
        op = self.op
        args, kwargs = op.reference_arguments()
        return golden.run(
            op.traits.function,
            args,
            kwargs,
            dtype_cast=golden.casts_of(op.name),
            grad_outputs=self.sent if self.grads is not None else None,
            name=op.name,
            traits=op.traits,
            device=op.device.type,
            max_bytes=_memory_for_one(8 * sum(t.numel() for t in tensors_in((args, kwargs)))),
            rounded_to=self._autocast_dtype(),
            outputs=map_tensors(self.outputs, lambda t: t.detach().cpu()) if facts.has_free_vectors(op.name) else None,
        )

    def _autocast_dtype(self) -> torch.dtype | None:
        autocast = self.op.payload.get("autocast")
        if not isinstance(autocast, dict):
            return None
        low = getattr(torch, str(autocast.get("dtype")).removeprefix("torch."))
        return golden.autocast_rounds_to(self.op.name, low, self.op.result)

    def _judged(self, reference: golden.GoldenResult, outputs: Any, grads: Any, inputs: Any) -> verdict.Judgement:
        forward = self.options.forward
        return verdict.judge_call(
            self.op.name,
            reference,
            outputs=outputs if forward else None,
            inputs_after=inputs if forward else None,
            grad_inputs=grads,
            rules=self.rules,
        )

    def _untouched_inputs(self, reference: golden.GoldenResult) -> verdict.Judgement:
        """What the call was given must still be there, or be what the reference made of it (running statistics)."""
        name = self.op.name
        ours = list(tensors_in(self.inputs_after))
        theirs = list(tensors_in((self.op.host_args, self.op.host_kwargs)))
        if not all(same_bits(a, b) for a, b in zip(ours, theirs)):
            if reference.comparable:
                return self._judged(reference, None, None, self.inputs_after)
            return verdict.judge(name, ours, theirs, part="input", rules=self.rules)
        rows = []
        for number, tensor in enumerate(ours):
            atol, rtol, _ = self.rules.tolerance(name, tensor.dtype)
            label = f"{name} input" if len(ours) == 1 else f"{name} input[{number}]"
            rows.append(verdict.Row(label, True, 0.0, 0.0, atol, rtol, "", cosine=1.0))
        return verdict.Judgement(verdict.RIGHT, "", tuple(rows))

    def _judge_capture(self, reference: golden.GoldenResult, output: Any, grads: Any) -> None:
        """The results differ: say which of the two is at fault."""
        if not reference.comparable or self.options.dtype is not None or (output is None and grads is None):
            return
        usable = grads if self.grads is not None and grads is not None and len(grads) == len(self.grads) else None
        judged = self._judged(reference, None if unknown_in((output,)) else output, usable, None)
        self.outcome.notes.append(f"the captured result is {judged.verdict} by the CPU")

    # -- what is shown --------------------------------------------------------------------------------

    def _describe(self) -> None:
        op = self.op
        if self.options.forward:
            parts = (("inputs", describe(op.args, op.kwargs)), ("outputs", describe((op.result,))))
            self.outcome.shown_forward = Shown(parts)
        if self.grads is not None:
            sent = describe(tuple(g for g in op.grad_outputs or () if g is not None))
            found = describe(tuple(g for g in self.device_grads if g is not None))
            self.outcome.shown_backward = Shown((("grad_outputs", sent), ("grad_inputs", found)))

    def _describe_golden(self, reference: golden.GoldenResult) -> None:
        if not self.options.describe or reference.run is None:
            return
        cast = str(reference.cast_info) if reference.cast_info else ""
        forward, backward = self.outcome.shown_forward, self.outcome.shown_backward
        if forward is not None:
            more = (
                ("inputs(cpu)", describe(*reference.inputs_after)),
                ("outputs(cpu)", describe((reference.outputs,))),
            )
            self.outcome.shown_forward = Shown(forward.parts + more, cast)
        if backward is not None:
            found = describe(tuple(g for g in reference.grad_inputs or () if g is not None))
            self.outcome.shown_backward = Shown((*backward.parts, ("grad_inputs(cpu)", found)), cast)


_NO_BACKWARD: Final = "it has no backward pass"


@functools.cache
def _warm_up(device: torch.device) -> None:
    """What a process does once (start the device, the autograd engine, late imports) is no operator's time."""
    with no_torch_function():
        leaf = torch.ones(1, device=device, requires_grad=True)
        torch.autograd.grad([leaf * 2], [leaf], [torch.ones(1, device=device)], retain_graph=True)
        synchronize(device.type)


# --- bits -------------------------------------------------------------------------------------------------


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_quantized:
        plain = plain.int_repr()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    plain = plain.contiguous().reshape(-1)
    if plain.numel() < 2:  # one element counts as contiguous whatever its stride, but not when seen as bytes
        plain = plain.clone(memory_format=torch.contiguous_format)
    nbytes = plain.numel() * plain.element_size()
    # eight bytes at a time are compared many times faster than one
    whole = nbytes % 8 == 0 and plain.storage_offset() * plain.element_size() % 8 == 0
    return plain.view(torch.int64 if whole else torch.uint8)


def same_bits(left: Any, right: Any) -> bool:
    """Whether two results are the same, bit for bit; layout does not count (`same_bits(x, x.t().t())`)."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        ours, theirs = _bits(left), _bits(right)
        if ours.dtype != theirs.dtype:
            ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
        return torch.equal(ours, theirs)
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return False
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (left != left and right != right)
    return bool(left == right)


def _same(left: Any, right: Any) -> bool:
    ours, theirs = list(leaves_of(left)), list(leaves_of(right))
    return len(ours) == len(theirs) and all(same_bits(a, b) for a, b in zip(ours, theirs))


def _differences(what: str, ours: Any, captured: Any, absent_is_unknown: bool = False) -> list[str]:
    """One line per leaf that is not the captured one."""
    left, right = list(leaves_of(ours)), list(leaves_of(captured))
    if len(left) != len(right):
        return [f"{len(left)} {what}s, {len(right)} were captured"]
    found = []
    for number, (a, b) in enumerate(zip(left, right)):
        if (absent_is_unknown and b is None) or same_bits(a, b):
            continue
        label = what if len(left) == 1 else f"{what}[{number}]"
        found.append(f"{label} {_how_different(a, b)}")
    return found


def _how_different(ours: Any, captured: Any) -> str:
    if not isinstance(ours, Tensor) or not isinstance(captured, Tensor):
        return f"is {_brief(ours)}, {_brief(captured)} was captured"
    if ours.shape != captured.shape:
        return f"has shape {tuple(ours.shape)}, {tuple(captured.shape)} was captured"
    if ours.dtype != captured.dtype:
        return f"is {ours.dtype}, {captured.dtype} was captured"
    with quiet():
        wide = torch.complex128 if ours.is_complex() else torch.float64
        left, right = (t.to_dense() if t.layout != torch.strided else t for t in (ours, captured))
        left, right = (t.dequantize() if t.is_quantized else t for t in (left, right))
        gap = (left.to(wide) - right.to(wide)).abs().nan_to_num(nan=0.0)
        count = int((left != right).sum())
    if count == 0:
        return "differs in the sign of zeros or the bits of NaNs"
    return f"differs in {count} of {ours.numel()} elements, by {float(gap.max()):.3g} at most"


def _brief(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]


# --- memory -----------------------------------------------------------------------------------------------


def _free_memory() -> int | None:
    """Bytes that the machine, or the container around this process, can still give; None where neither says."""
    found = []
    with contextlib.suppress(OSError, StopIteration, ValueError, IndexError), open("/proc/meminfo") as handle:
        line = next(line for line in handle if line.startswith("MemAvailable"))
        found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        most, used = ((group / f"memory.{what}").read_text() for what in ("max", "current"))
        found.append(max(0, int(most) - int(used)))
    return min(found, default=None)


def _memory_for_one(needed: int) -> int | None:
    """What a call may take, None where it takes so little that nobody need be asked."""
    free = _free_memory() if needed > _LITTLE else None
    return None if free is None else int(free * _KEEP_FREE)


def _check_memory(op: CapturedOp) -> None:
    """A few bytes can stand for a tensor of any size (stride 0): refuse what would take the machine down."""
    needed = max((t.numel() * t.element_size() for t in tensors_in((op.host_args, op.host_kwargs))), default=0)
    limit = _memory_for_one(needed)
    if limit is not None and needed > limit:
        raise ArchiveError(
            f"{op.folder / 'input.pth'}: {op.name} on a tensor of {needed / 2**30:,.1f} GiB; "
            f"{limit / 2**30:,.1f} GiB are free for it here"
        )


def counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many captures came to each status (`counts(outcomes)["wrong"]`)."""
    found = Counter(outcome.status for outcome in outcomes)
    return {status: found[status] for status in STATUSES if found[status]}
