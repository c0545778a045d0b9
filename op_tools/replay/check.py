"""Replays a capture: runs it, times it, and judges its results.

There are two references: the captured results (the same device must give the same bits) and the golden run on
the CPU, which tells rounding from error whatever device the capture came from.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..call import facts
from ..call.arguments import Numbers, compared_arguments, numbers_of
from ..call.description import Described, Tensor, describe, golden_pair, labelled, map_tensors, tensors_in
from ..call.devices import event_class, quiet, synchronize
from ..call.equality import same_bits
from ..compat import no_torch_function
from ..files.archive import ArchiveError, unknown_in
from ..files.captures import CannotReplay, one_line
from ..files.limits import memory_for_one
from ..judge import golden, verdict
from . import guard
from .bits import differences, on_host, same
from .captured import CapturedOp
from .outcome import ERROR, IDENTICAL, NOT_COMPARABLE, RAN, RIGHT, WRONG, Options, Outcome, Shown, op_from


def replay(folder: Path, options: Options | None = None, rules: verdict.Rules | None = None) -> Outcome:
    """Run one captured call again, in this process, and judge it; never raises for what a file holds.

    A kernel that crashes takes this process along: `pool.replay_all` is for captures that one does not trust.

    >>> replay(Path("op_tools_results/.../torch.add/1/1/t"), Options(acc_check=True)).status  # doctest: +SKIP
    'bit-identical'
    """
    check = Check(folder, options or Options(), rules)
    check.run()
    return check.conclude()


class Runs:
    """A captured call, run on the device as often as asked: results on the host, times, and whether runs agree.

    >>> Runs(CapturedOp(folder, "cpu"), Options(), outcome).all()  # doctest: +SKIP
    """

    def __init__(self, op: CapturedOp, options: Options, outcome: Outcome) -> None:
        self.op, self.options, self.outcome = op, options, outcome
        self.outputs: Any = None
        self.inputs_after: Any = None
        self.grads: list[Tensor | None] | None = None
        self.device_grads: list[Tensor | None] = []
        self.sent: list[Tensor | None] | None = None

    def all(self) -> None:
        """All runs; the results of the first are kept, the others must give the same bits."""
        op, options = self.op, self.options
        forwards = options.run_times if options.forward else 1
        backwards = options.run_times if options.backward else 0
        for number in range(forwards):
            op.prepare()
            op.run_forward(self._clock(self.outcome.forward_ms) if options.forward else None)
            if number < backwards and options.forward:
                self._backward()
            self._keep(number)
        if not options.forward:
            for _ in range(backwards):
                self._backward()

    def _backward(self) -> None:
        op = self.op
        if not op.can_go_backward:
            return
        op.prepare_backward()
        try:
            grads = op.run_backward(self._clock(self.outcome.backward_ms))
        except (RuntimeError, NotImplementedError) as error:
            if op.has_backward:
                raise
            # no backward pass was captured: that there is none is not a failure
            self.outcome.notes.append(f"its backward pass was not captured and does not run ({one_line(error)})")
            return
        if grads is None:
            return
        found = [None if g is None else on_host(g) for g in grads]
        if self.grads is None:
            self.grads = found
            self.sent = op.sent_gradients()
            self.device_grads, self.outcome.went_backward = grads, True
        elif not same(found, self.grads):
            self._not_repeatable("gradients")

    def _keep(self, number: int) -> None:
        if not self.options.acc_check:
            return
        with quiet():
            outputs = map_tensors(self.op.result, on_host)
            if number == 0:
                self.outputs = outputs
                self.inputs_after = map_tensors((self.op.args, self.op.kwargs), on_host)
            elif not same(outputs, self.outputs):
                self._not_repeatable("results")

    def _not_repeatable(self, what: str) -> None:
        if self.outcome.repeatable:
            self.outcome.notes.append(f"two runs gave different {what}")
        self.outcome.repeatable = False

    @contextlib.contextmanager
    def _clock(self, times: list[float]) -> Iterator[None]:
        """Append the milliseconds that the body took, measured by device events where there are any."""
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

    def try_distinct_leaves(self, captured: Any) -> None:
        """Arguments of one place were taken for one tensor: if the gradients do not fit, try them as two."""
        if captured is None or self.grads is None or same(self.grads, captured):
            return
        self.op.distinct_leaves = True
        kept = (self.op.args, self.op.kwargs, self.op.result, self.op._leaves)
        self.op.prepare()
        self.op.run_forward()
        grads = self.op.run_backward()
        if grads is not None and same([None if g is None else on_host(g) for g in grads], captured):
            self.grads, self.device_grads = list(captured), grads
        else:
            self.op.distinct_leaves = False
            self.op.args, self.op.kwargs, self.op.result, self.op._leaves = kept


class Check:
    """The replay of one capture: `run` on the device, then `conclude`, which may happen in another thread.

    Whatever a file or an operator raises becomes the outcome.

    >>> check = Check(Path("op_tools_results/.../torch.add/1/1/t"), Options(acc_check=True))  # doctest: +SKIP
    >>> check.run()                                                                           # doctest: +SKIP
    >>> check.conclude().status                                                               # doctest: +SKIP
    'bit-identical'
    """

    op: CapturedOp
    runs: Runs
    rules: verdict.Rules

    def __init__(self, folder: Path, options: Options, rules: verdict.Rules | None = None) -> None:
        self.options, self.outcome = options, Outcome(folder, op_from(folder), ERROR)
        self._rules = rules
        self._ran = False

    def run(self) -> None:
        """Read the capture and run it (`check.run()`)."""
        options, outcome = self.options, self.outcome
        with self._caught():
            guard.limit_memory(outcome.folder, options)
            op = self.op = CapturedOp(outcome.folder, options.device, options.dtype, options.contiguous)
            outcome.op, outcome.location, outcome.device = op.name, op.site.location, str(op.device)
            if op.note:
                outcome.notes.append(op.note)
            if not options.trusted:
                guard.check_arguments(op)
            guard.check_results(op, options)
            if options.time:
                _warm_up(op.device)
            self.runs = Runs(op, options, outcome)
            self.runs.all()
            if op.has_aliased_leaves:
                self.runs.try_distinct_leaves(self._captured_gradients())
            if options.describe:
                self._describe()
            self._ran = True

    def conclude(self) -> Outcome:
        """Judge the results and return the outcome (`check.conclude().status`)."""
        options, outcome = self.options, self.outcome
        if not self._ran:
            return outcome
        with self._caught():
            if not options.forward and not outcome.went_backward:
                outcome.status, outcome.reason = NOT_COMPARABLE, "it has no backward pass"
            elif not options.acc_check:
                outcome.status = RAN
            else:
                self.rules = self._rules or verdict.Rules.from_environment()
                self._judge(self.op.captured("output") if options.forward else None, self._captured_gradients())
        return outcome

    @contextlib.contextmanager
    def _caught(self) -> Iterator[None]:
        outcome, began = self.outcome, time.perf_counter()
        try:
            yield
        except CannotReplay as reason:
            outcome.status, outcome.reason = NOT_COMPARABLE, str(reason)
        except ArchiveError as error:
            outcome.status, outcome.reason = ERROR, str(error)
        except Exception as error:  # whatever an operator, or a file that was tampered with, throws
            outcome.out_of_memory = guard.is_out_of_memory(error)
            outcome.device_is_lost = guard.loses_the_device(error)
            lost = self.op.lost_types if hasattr(self, "op") else []
            hint = f"; an argument of type {lost[0]} was captured as a tuple" if lost else ""
            outcome.status, outcome.reason = ERROR, one_line(error) + hint
            if outcome.out_of_memory:
                limit = guard.memory_limit(outcome.folder, self.options) / 2**30
                outcome.reason = f"not enough memory to run it; a capture may take {limit:,.1f} GiB ({one_line(error)})"
        outcome.seconds += time.perf_counter() - began

    @functools.cached_property
    def numbers(self) -> Numbers:
        """Of the arguments, in the rows of all tables."""
        return numbers_of(self.op.name, self.op.host_args, self.op.host_kwargs)

    def _captured_gradients(self) -> Any:
        return self.op.captured("grad_inputs") if self.options.backward and self.options.acc_check else None

    # -- judgement ------------------------------------------------------------------------------------

    def _judge(self, captured_output: Any, captured_grads: Any) -> None:
        op, outcome = self.op, self.outcome
        same = self._like_capture(captured_output, captured_grads)
        reference = self._golden()
        inputs_after = self.runs.inputs_after if op.writes else None
        judged = self._judged(reference, self.runs.outputs, self.runs.grads, inputs_after)
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
        elif judged.verdict in (verdict.RIGHT, verdict.WEAK):
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
            found += differences("output", self.runs.outputs, output)
        elif options.forward:
            outcome.notes.append("it returns nothing" if self.runs.outputs is None else "no result was captured")
        if grads is not None and self.runs.grads is not None:
            compared = True
            labels = self.numbers.labels("grad")
            found += differences("grad", self.runs.grads, grads, absent_is_unknown=True, labels=labels)
        outcome.like_capture = "; ".join(found) if found else (IDENTICAL if compared else "nothing to compare with")
        return compared and not found

    def _golden(self) -> golden.GoldenResult:
        op, low = self.op, self.op.region.autocast
        args, kwargs = op.reference_arguments()
        return golden.run(
            op.traits.function,
            args,
            kwargs,
            dtype_cast=self.rules.casts.of(op.name),
            grad_outputs=self.runs.sent if self.runs.grads is not None else None,
            name=op.name,
            traits=op.traits,
            device=op.device.type,
            max_bytes=memory_for_one(8 * sum(t.numel() for t in tensors_in((args, kwargs)))),
            rounded_to=None
            if low is None
            else golden.autocast_rounds_to(op.name, low, op.result, tensors_in((op.args, op.kwargs))),
            autocast=low,
            outputs=map_tensors(self.runs.outputs, on_host) if facts.has_free_vectors(op.name) else None,
        )

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
        """Arguments must be unchanged, or changed as in the reference run (running statistics)."""
        name, after = self.op.name, self.runs.inputs_after
        before = (self.op.host_args, self.op.host_kwargs)
        if not all(same_bits(a, b) for a, b in zip(tensors_in(after), tensors_in(before))):
            if reference.comparable:
                return self._judged(reference, None, None, after)
            ours, theirs = compared_arguments(*after), compared_arguments(*before)
            return verdict.judge(name, ours, theirs, part="input", rules=self.rules)
        used = before if reference.run is None else reference.inputs_after
        rows = verdict.unchanged_rows(name, compared_arguments(*after), compared_arguments(*used), self.rules)
        return verdict.Judgement(verdict.RIGHT, "", rows)

    def _judge_capture(self, reference: golden.GoldenResult, output: Any, grads: Any) -> None:
        """The results differ: note whether the captured ones are right."""
        if not reference.comparable or self.options.dtype is not None or (output is None and grads is None):
            return
        ours = self.runs.grads
        usable = grads if ours is not None and grads is not None and len(grads) == len(ours) else None
        judged = self._judged(reference, None if unknown_in((output,)) else output, usable, None)
        self.outcome.notes.append(f"the captured result is {judged.verdict} by the CPU")

    # -- what is shown --------------------------------------------------------------------------------

    def _describe(self) -> None:
        op = self.op
        if self.options.forward:
            forward = self.outcome.shown_forward = Shown()
            for what, described in zip(("inputs", "outputs"), self._described()):
                forward.add(labelled(described, what), described)
        if self.runs.grads is None:
            return
        backward = self.outcome.shown_backward = Shown()
        if self.options.acc_check:
            sent, found = _describe_present(self.runs.sent), describe(tuple(self.runs.device_grads))
            backward.add(labelled(sent, "grad_output(cpu)"), sent)
            backward.add(self.numbers.labelled(found, "grad_inputs"), found)
        else:
            for what, grads in (("grad_outputs", op.grad_outputs), ("grad_inputs", self.runs.device_grads)):
                described = _describe_present(grads)
                backward.add(labelled(described, what, "gradients"), described)

    def _described(self) -> tuple[Described, Described]:
        return describe(self.op.args, self.op.kwargs), describe((self.op.result,))

    def _describe_golden(self, reference: golden.GoldenResult) -> None:
        if not self.options.describe or reference.run is None:
            return
        cast = str(reference.cast_info) if reference.cast_info else ""
        forward, backward = self.outcome.shown_forward, self.outcome.shown_backward
        if forward is not None:
            on_cpu = describe(*reference.inputs_after), describe((reference.outputs,))
            for what, described in zip(("inputs(cpu)", "outputs(cpu)"), golden_pair(*self._described(), on_cpu)):
                forward.add(labelled(described, what), described)
            forward.cast = cast
        if backward is not None:
            found = describe(tuple(reference.grad_inputs or ()))
            backward.add(self.numbers.labelled(found, "grad_inputs(cpu)"), found)
            backward.cast = cast


def _describe_present(grads: Sequence[Tensor | None] | None) -> Described:
    return describe(tuple([g for g in grads or () if g is not None]))


@functools.cache
def _warm_up(device: torch.device) -> None:
    """Do what happens once per process (device, autograd engine, late imports), so that no operator is charged."""
    with no_torch_function():
        leaf = torch.ones(1, device=device, requires_grad=True)
        torch.autograd.grad([leaf * 2], [leaf], [torch.ones(1, device=device)], retain_graph=True)
        synchronize(device.type)
