"""The host judge: one call, as the device did it, against the golden run; all on the host, in whichever process.

A `Comparer` remembers what it has learned of calls that look alike. The threads of a run share one; each worker
process has its own.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Hashable, Iterable
from typing import Any, Final

import torch

from ...call import facts
from ...call.arguments import Numbering, compared_arguments
from ...call.description import Tensor, map_tensors, tensors_in
from ...call.equality import equal, same_leaves, same_values
from ...copies.operands import MAX_BORROWED
from ...copies.queue import MemoryBudget, Reservation
from ...judge import golden, random_draws, verdict
from ...judge.draws import Draw
from ...judge.golden import GoldenResult
from ...judge.random_draws import Mask
from ...judge.references import NO_GRADIENT, NOT_JUDGED, shape_problem
from ...judge.verdict import NOT_COMPARABLE, RIGHT, WRONG, Judgement, Row, Rules
from .. import cores, pieces
from ..ladder import BACKWARD, FORWARD, ComparedCall, Job, Judge, Setup, asked, gradient_kind
from ..looks import Looks
from ..memory import Guarded, NodeGuard, Outside, wild
from ..snapshots import Snapshots

_MAX_KINDS: Final = 20_000
_MAX_WAIT: Final = 60.0  # seconds
_SAME: Final = 0.9  # of the elements of a repeated result: then it is by the same random numbers


@dataclasses.dataclass(eq=False)
class ForwardRun:
    """What the comparison of a forward leaves for that of its backward."""

    golden: tuple[GoldenResult, Reservation] | None = None  # the golden forward pass, and the memory it takes
    returned: Any = None  # what the device returned, where signs are free
    mask: Mask | None = None  # of a dropout
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    lock: Any = dataclasses.field(default_factory=threading.Lock)

    def take(self) -> tuple[GoldenResult, Reservation] | None:
        """The golden forward pass, for one backward alone."""
        with self.lock:
            kept, self.golden = self.golden, None
        return kept


class Host(Judge):
    """Settles every job, on a worker thread of the run's own process."""

    order = 90

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.comparer = Comparer(
            setup.rules,
            MemoryBudget(setup.queue_bytes // 4),
            setup.max_bytes,
            setup.max_seconds,
            setup.threads,
            whole=setup.precheck == "device",
        )
        self.snapshots: Snapshots | None = None  # of the run; None where a job is judged on its own

    def settle(self, job: Job) -> Judgement:
        call = job.call
        assert isinstance(call, ComparedCall)
        shares = _fetch_draws(job, call) if call.drawn is not None else []
        guarded: Guarded | None = call.notes.pop(Guarded, None)
        assert job.fetcher is not None
        assert self.snapshots is not None
        neighbours = self.snapshots.neighbours
        elsewhere = None if guarded is None else neighbours.judge(call.op, guarded, job.fetcher)
        if job.phase == BACKWARD and NodeGuard in call.notes:
            elsewhere = call.notes.pop(NodeGuard).judge(call.op, job.fetcher)
        _fetch(job)
        job.alone = guarded is not None and guarded.alone
        # of the forward and the backward, either may be judged first
        forward: ForwardRun = call.notes.get(self) or call.notes.setdefault(self, ForwardRun())
        if call.gradients_only:
            forward.done.set()
        found = self.comparer.compare(job, forward, self.setup.shown)
        if found.verdict == WRONG:
            doubt = (call.doubts or {}).get(job.phase) or _doubt(job, self.snapshots)
            if doubt:
                return Judgement(NOT_COMPARABLE, doubt)
        if found.verdict == WRONG and not all(float(share) >= _SAME for share in shares):
            found = Judgement(NOT_COMPARABLE, "random: the device repeats it with another result")
        elif found.verdict == NOT_COMPARABLE and call.drawn is not None and call.drawn.reason:
            found = Judgement(NOT_COMPARABLE, call.drawn.reason)
        elif found.verdict == NOT_COMPARABLE and found.reason.startswith(NOT_JUDGED) and "repeated" in call.notes:
            found = Judgement(NOT_COMPARABLE, f"{found.reason}; {call.notes['repeated']}")
        if elsewhere is not None:
            found = found + elsewhere
        if job.suspicion:
            neighbours.suspect(call.op, job.suspicion)
        if found.verdict == WRONG or self.setup.shown:  # told after the fetcher has gone on: copy what was borrowed
            assert job.snapshot is not None
            assert job.fetcher is not None
            job.values = job.fetcher.unpack(job.snapshot)
        return found

    def summary(self) -> list[str]:
        return [] if self.snapshots is None else self.snapshots.neighbours.summary()


@dataclasses.dataclass
class Comparer:
    """Compares calls; several threads may ask at once.

    >>> Comparer(Rules()).compare(job).verdict  # doctest: +SKIP
    'right'
    """

    rules: Rules
    budget: MemoryBudget = dataclasses.field(default_factory=lambda: MemoryBudget(1 << 28))  # for kept golden runs
    max_bytes: int = 8 * 2**30
    max_seconds: float = 10.0
    threads: int = 1  # for calls that are compared in pieces
    whole: bool = False  # every call is compared in full: both sides are shown, or learned from
    only_gradients: bool = False  # of a backward nothing else is looked at: what is wrong is compared elsewhere again

    def __post_init__(self) -> None:
        self._casts = self.rules.casts if self.rules.casts.texts else None
        self._moves: dict[Hashable, Judgement | None] = {}  # kinds of calls: what is found where they only move values
        self._unchanged_rows: dict[Hashable, tuple[Row, ...]] = {}
        self._plans: dict[Hashable, verdict.Plan] = {}
        self._tally = random_draws.Tally()
        self._numbering = Numbering()
        self._outside, self._looks = Outside(), Looks()

    def compare(self, job: Job, forward: ForwardRun | None = None, shown: bool = False) -> Judgement:
        """Judge a job; its golden run is kept in it where one was needed, and always where it is shown."""
        try:
            found = self._compare(job, forward, shown)
            if job.flats is None or job.before is None or job.snapshot is None:
                return found
            if (job.before.layout, job.snapshot.layout) in self._outside.without_gaps:
                return found
            beside = self._outside.judge(job.call.op, job.before, job.snapshot, job.flats)
            if beside is not None and not job.alone:
                job.suspicion = beside.rows[0].reason
                return found
            return found if beside is None else found + beside
        finally:
            if forward is not None:
                forward.done.set()

    def _compare(self, job: Job, forward: ForwardRun | None, shown: bool) -> Judgement:
        kind = None if shown else self._kind(job)
        known = self._moves.get(kind) if kind is not None else None
        if known is not None and self._moved_as_before(job):
            job.moves_only = True
            return known
        found = None if shown or self.whole else self._in_pieces(job, forward)
        if found is not None:
            return found
        job.golden = result = self._golden(job, job.args, job.kwargs, forward)
        if job.phase == BACKWARD:
            found = self._judge_backward(job, result, kind)
        else:
            if forward is not None and facts.has_free_vectors(job.call.op):
                forward.returned = map_tensors(job.values[2], lambda t: t.clone())
            found = self._judge_forward(job, result, kind)
            looks = self._looks
            if not shown and found.verdict == RIGHT and kind not in looks.fine and (kind or looks.wanted(job.call.op)):
                found += looks.judge(job, kind) or Judgement(RIGHT, "")
        if kind is not None:
            if kind not in self._moves and len(self._moves) < _MAX_KINDS:
                self._moves[kind] = found if _only_moves(job, result, found) else None
            job.moves_only = self._moves.get(kind) is not None
        return found

    # -- the golden run -------------------------------------------------------------------------------

    def _golden(self, job: Job, args: Any, kwargs: Any, forward: ForwardRun | None) -> GoldenResult:
        """The golden run, or its backward alone where the forward pass was kept."""
        call, region, backward = job.call, job.call.region, job.phase == BACKWARD
        sent: Any = job.values[0] if backward else None
        returned = None
        if backward and forward is not None:
            if facts.has_free_vectors(call.op):
                forward.done.wait(_MAX_WAIT)  # another thread may still be at its forward
            returned = forward.returned
            kept = forward.take()
            if kept is not None:
                return golden.backward(kept[0], sent, returned)
        draws = self._draws(job, forward) if call.traits.random is not False else None
        keeps = not backward and forward is not None and region.grad_enabled
        keeps = keeps and (job.mask is None or job.mask.complete)
        room = self.budget.reserve(4 * job.nbytes) if keeps else None  # arguments and results in double precision
        only = None
        if backward and self.only_gradients:
            tensors = enumerate(tensors_in((args, kwargs)))
            only = tuple([n for n, t in tensors if t.requires_grad and n not in job.unasked])
        result = golden.run(
            call.function,
            args,
            kwargs,
            dtype_cast=self._casts.of(call.op) if self._casts else None,
            grad_outputs=sent,
            name=call.op,
            traits=call.traits,
            device=region.device,
            rounded_to=region.rounded_to,
            autocast=region.autocast,
            max_bytes=self.max_bytes,
            keep_graph=room is not None,
            outputs=returned,
            draws=draws,
            only=only,
        )
        if job.mask is not None and result.run is not None:
            job.mask.clean(result.run.outputs)
        if room is not None and result.graph is not None and forward is not None:
            forward.golden = (dataclasses.replace(result), room)
            result.graph = None
        return result

    def _draws(self, job: Job, forward: ForwardRun | None) -> tuple[Tensor, ...] | None:
        """The random numbers that the device drew in this call, as far as they are known."""
        if job.draws is not None or not random_draws.is_dropout(job.call.op):
            return job.draws
        if job.phase == FORWARD:
            job.mask = random_draws.recover(job.call.op, job.args, job.kwargs, job.values[2])
            if forward is not None and job.mask is not None:
                forward.mask = job.mask.packed()
        elif forward is not None:
            forward.done.wait(_MAX_WAIT)  # another thread may still be at its forward
            found = next((g for g in job.values[1] if g is not None), None)
            job.mask = None if forward.mask is None else forward.mask.completed(found)
        return None if job.mask is None else (job.mask.kept,)

    def _judge_draws(self, job: Job) -> Judgement:
        """What must hold for whatever was drawn."""
        op, drawn = job.call.op, getattr(job.call, "drawn", None)
        states = drawn.states if drawn is not None else None
        if job.mask is not None:
            return verdict.unlikely(op, self._tally.mask(op, job.mask, states))
        draws = map(Draw, job.draws or (), drawn.laws if drawn is not None else ())
        reasons = [self._tally.draw(op, draw, states, number) for number, draw in enumerate(draws)]
        return verdict.unlikely(op, next(filter(None, reasons), ""))

    def _in_pieces(self, job: Job, forward: ForwardRun | None) -> Judgement | None:
        """What is found in a large call on lists, piece by piece; None where it must be compared as a whole."""
        if job.phase != FORWARD or job.nbytes < pieces.WORTH_IT:
            return None
        if forward is not None and job.call.region.grad_enabled:  # its backward needs the golden run of the whole
            return None
        op, (args_after, kwargs_after, result) = job.call.op, job.values
        found = pieces.pieces(op, pieces.Sides(tuple(job.args), tuple(args_after), result), job.kwargs)
        if not found:
            return None

        def judge(piece: pieces.Piece) -> Judgement:
            before, after, part_of_result = piece.sides
            part = dataclasses.replace(job, values=(after, kwargs_after, part_of_result), piece=True)
            return self._judge_forward(part, self._golden(part, before, job.kwargs, None))

        judged = cores.side_by_side(judge, found, self.threads)
        if any(judgement.verdict != RIGHT for judgement in judged):
            return None  # it is to be saved and shown with all that belongs to it
        return pieces.together(op, list(zip(found, judged)))

    # -- calls that only move values ------------------------------------------------------------------

    def _kind(self, job: Job) -> Hashable:
        """The same for jobs that look the same; None where that cannot be said."""
        call = job.call
        if not all(call.numbers) or job.piece or (self._casts and self._casts.of(call.op) is not None):
            return None
        key = (call.op, call.function, *call.numbers, call.region.autocast)
        if job.phase == FORWARD:
            return key
        sent, found = job.values
        return (*key, job.grad_kind or gradient_kind(sent, found, job.unasked))

    def _moved_as_before(self, job: Job) -> bool:
        """Whether the device moved the same values to the same places as the CPU does, in its own dtype."""
        call, backward = job.call, job.phase == BACKWARD
        try:
            sent = job.values[0] if backward else None
            outputs, grads = golden.run_as_is(call.function, call.op, job.args, job.kwargs, sent)
        except Exception:  # then it is compared in full
            return False
        if backward:
            return same_leaves(job.values[1], asked(grads or [], job.unasked), equal)
        after, kwargs_after, result = job.values
        if after is not None:
            arguments = compared_arguments(after, kwargs_after), compared_arguments(job.args, job.kwargs)
            if not same_leaves(*arguments, equal):
                return False
        return same_leaves(result, outputs, equal)

    # -- judging --------------------------------------------------------------------------------------

    def _plan(self, kind: Hashable) -> verdict.Plan | None:
        plan = self._plans.get(kind)
        if plan is None and kind is not None and len(self._plans) < _MAX_KINDS:
            plan = self._plans.setdefault(kind, verdict.Plan())
        return plan

    def _judge_forward(self, job: Job, result: GoldenResult, kind: Hashable = None) -> Judgement:
        name = job.call.op
        if not result.comparable and result.reason.startswith(NOT_JUDGED):
            problem = shape_problem(job.call.function, job.args, job.kwargs, job.values[2])
            if problem:
                row = Row(name, "output", None, False, math.inf, math.inf, 0, 0, problem, verdict=WRONG, reason=problem)
                return Judgement(WRONG, problem, (row,))
        if not result.comparable:
            states = getattr(getattr(job.call, "drawn", None), "states", None)
            return verdict.judge_samples(name, result, job.values[2], self._tally, states)
        options: dict[str, Any] = {"result": result, "rules": self.rules, "max_seconds": self.max_seconds}
        run = result.run
        assert run is not None
        # of a sample, only arguments that the call may write to are there
        sampled = job.values[0] is None
        inputs = Judgement(RIGHT, "") if sampled else self._judge_inputs(job, result, run, kind, options)
        options["plan"] = self._plan(kind)
        found = verdict.judge(name, job.values[2], run.outputs, part="output", **options)
        if found.verdict == WRONG and result.source.by_reference and verdict.only_moves(result, "output"):
            # of a reference in numpy no steps are seen, so nothing is known of their roundings
            options["rules"], options["plan"] = dataclasses.replace(self.rules, standard="torch"), None
            found = verdict.judge(name, job.values[2], run.outputs, part="output", **options)
        found = inputs + found
        return found if result.source.draws is None else found + self._judge_draws(job)

    def _judge_inputs(
        self, job: Job, result: GoldenResult, run: golden.Run, kind: Hashable, options: dict[str, Any]
    ) -> Judgement:
        """Arguments after the call: for unchanged ones, equal bits are enough."""
        name, source, reads = job.call.op, result.source, not (_wrote(result) or run.wrote)
        sides = (job.values[0], job.values[1]), (run.args, run.kwargs), (source.args, source.kwargs)
        ours, theirs, earlier = [compared_arguments(*side) if side[1] else list(side[0]) for side in sides]
        kept = len(ours) == len(theirs) and _unchanged(ours, earlier)
        rows = self._unchanged_rows.get(kind)
        if not kept or not reads or (rows is None and not _left_alone(theirs, earlier, source.rounded_to)):
            plan = None if kind is None else self._plan((kind, "input"))
            found = verdict.judge(name, ours, theirs, part="input", plan=plan, **options)
            changed = reads and not kept and found.verdict != WRONG and _left_alone(theirs, earlier, source.rounded_to)
            changed = changed and all(t.layout == torch.strided for t in tensors_in(ours))  # a sparse one may be sorted
            return found + wild(name, None, "it changes an argument that it only reads") if changed else found
        if rows is None:
            rows = verdict.unchanged_rows(name, ours, theirs, self.rules)
            if kind is not None and len(self._unchanged_rows) < _MAX_KINDS:
                self._unchanged_rows[kind] = rows
        return Judgement(RIGHT, "", rows)

    def _judge_backward(self, job: Job, result: GoldenResult, kind: Hashable = None) -> Judgement:
        name = job.call.op
        if not result.comparable:
            return Judgement(NOT_COMPARABLE, result.reason)
        if facts.has_free_vectors(name) and result.source.outputs is None:
            return Judgement(NOT_COMPARABLE, "which signs the vectors had on the device is not known")
        assert result.run is not None
        expected, by_reference = result.run.grad_inputs or [], result.source.by_reference
        if by_reference and not any(g is not None for g in expected) and any(g is not None for g in job.values[1]):
            return Judgement(NOT_COMPARABLE, NO_GRADIENT)
        numbers = self._numbering.known.get((name, job.call.numbers[0]))
        return verdict.judge_gradients(
            name,
            job.values[1],
            asked(expected, job.unasked) if job.unasked else expected,
            numbers or self._numbering.of(name, job.call.numbers[0], job.args, job.kwargs),
            result=result,
            rules=self.rules,
            max_seconds=self.max_seconds,
            plan=self._plan(kind),
        )


def _doubt(job: Job, snapshots: Snapshots) -> str:
    """Why the copies that show a job to be wrong cannot be trusted; empty where they can."""
    assert job.snapshot is not None
    assert job.before is not None
    assert job.fetcher is not None
    if job.flats is not None:  # what is borrowed will be overwritten
        before, values = [[flat.clone() for flat in some] for some in job.flats]
    else:
        before, values = [], job.fetcher.fetch(job.snapshot)
    return snapshots.routes.doubt([(job.before, before), (job.snapshot, values)])


def _fetch_draws(job: Job, call: ComparedCall) -> list[Tensor]:
    """Bring the random numbers of a call to the host, where they stay; the share that came out the same again."""
    drawn, fetcher = call.drawn, job.fetcher
    assert fetcher is not None
    if drawn.staged is None:
        return []
    drawn.staged = drawn.staged._replace(storages=tuple(fetcher.fetch(drawn.staged)), event=None)
    draws, shares = drawn.staged.tensors()
    job.draws = tuple(draws)
    return list(shares)


def _fetch(job: Job) -> None:
    """Bring arguments and values to the host; the arguments stay there for a backward to come."""
    call, values, fetcher = job.call, job.snapshot, job.fetcher
    before = job.before
    assert before is not None
    assert values is not None
    assert fetcher is not None
    together = before.nbytes + values.nbytes <= MAX_BORROWED
    if together and job.phase == FORWARD:
        own, borrowed = fetcher.fetch_and_borrow(before, values)
    else:
        own = fetcher.fetch(before)
        borrowed = fetcher.borrow(values.storages, values.event) if together else fetcher.fetch(values)
    job.values = values.tensors(borrowed)
    if job.phase == FORWARD:
        job.flats = own, borrowed
        call.before = before._replace(storages=tuple(own), event=None)  # no device memory is held for a backward
    job.args, job.kwargs = before.tensors(own)


def _only_moves(job: Job, result: GoldenResult, judgement: Judgement) -> bool:
    """Whether a call like this one moves values about and nothing else, as its golden run has shown."""
    if judgement.verdict != RIGHT or not result.comparable or result.note or _wrote(result) or result.source.draws:
        return False
    if any(row.max_abs_diff or row.max_ulp for row in judgement.rows):
        return False
    part = "grad_input" if job.phase == BACKWARD else "output"
    return verdict.only_moves(result, part)


def _unchanged(after: Iterable[Any], before: Iterable[Any]) -> bool:
    ours, earlier = list(tensors_in(after)), list(tensors_in(before))
    return len(ours) == len(earlier) and all(map(_has_kept_its_values, ours, earlier))


def _left_alone(after: Iterable[Any], before: Iterable[Any], rounded_to: torch.dtype | None) -> bool:
    """Whether a golden run did not change its arguments; before it they were in the device's dtypes."""

    def same(after: Tensor, before: Tensor) -> bool:
        if rounded_to is not None and before.dtype == torch.float32:
            before = before.to(rounded_to)
        return after.layout != torch.strided or same_values(after, before.detach().to(after.dtype))

    return all(map(same, tensors_in(after), tensors_in(before)))


def _has_kept_its_values(after: Tensor, before: Tensor) -> bool:
    dense = after.layout == before.layout == torch.strided and after.dtype == before.dtype and not after.is_complex()
    return (dense and torch.equal(after, before)) or same_values(after, before)


def _wrote(result: GoldenResult) -> bool:
    """Whether the golden run changed its arguments."""
    return bool(result.source.traits.mutates) or result.source.may_mutate
