"""OpAutoCompare: compares every operator with a golden run on the CPU, forward and backward.

A call is chosen, its tensors are copied on the device, a ladder of judges settles it, and the teller tells the outcome.
The run itself only copies: worker threads fetch the copies and judge them, in any order; outcomes are told in the order
of the calls.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from .. import settings
from ..call.description import Tensor, describe
from ..call.site import module_path
from ..compare import cores
from ..compare.choose import MODES, Chooser, kind_of, parse_budget
from ..compare.ladder import BACKWARD, FORWARD, PENDING, ComparedCall, Job, Judge, Setup, gradient_kind, make_ladder
from ..compare.repeat import Repeater
from ..compare.teller import Blame, Teller
from ..compat import count_dispatch_modes, in_func_transform, no_dispatch_modes
from ..copies.invocation import Region, Site
from ..copies.operands import Fetcher, Layouts, Operands
from ..copies.queue import Writer
from ..judge import golden
from ..judge.verdict import WRONG, Judgement, Rules
from ..native import measuring
from ..view import console, rows
from ..watch.intercept import Call
from .base import Tool

_WATCHING_COST: Final = 1e-5  # seconds that the interceptor needs for a call, whether or not it is compared
_MAX_GRADIENT_KINDS: Final = 20_000
_MAX_WAITING: Final = 2_000  # jobs
_MAX_CORES: Final = 4  # for one comparison, unless it is large
_part_numbers: Final = itertools.count()

_COLUMNS: Final = {
    "call_id": "INTEGER",
    "site": "INTEGER",
    "phase": "TEXT",
    **rows.SQL,
    "module": "TEXT",
    "step": "INTEGER",
    "excess": "REAL",
}


class OpAutoCompare(Tool):
    """Compare each operator's results and gradients with the CPU while the training runs.

    `mode` is `every` (call) or `once` (per operator, shape, dtype and layout); `budget="2x"` compares as much as
    keeps the run within that factor. `look="device"` has the device itself settle calls like earlier ones, in float64;
    what that leaves open goes to the CPU. All three can also be set by `OP_AUTOCOMPARE_MODE`, `OP_AUTOCOMPARE_BUDGET`
    and `OP_AUTOCOMPARE_FIRST_LOOK`.

    >>> with op_tools.OpAutoCompare() as comparison:  # doctest: +SKIP
    ...     train_step()
    >>> [row["name"] for row in comparison.records() if row["verdict"] == "wrong"]  # doctest: +SKIP
    """

    name = "OpAutoCompare"
    prefix = "OP_AUTOCOMPARE"
    feature = "autocompare"
    run_options: ClassVar[dict[str, dict[str, Any]]] = {
        "mode": {"choices": MODES, "help": "every call, or each kind of call once"},
        "budget": {"metavar": "2x", "help": "keep the run within this factor"},
    }
    nothing_found = ""  # the first line of the summary says it
    order = 20
    wants_backward = True
    columns: ClassVar[dict[str, str]] = _COLUMNS

    def __init__(
        self,
        *args: Any,
        mode: str | None = None,
        budget: str | float | None = None,
        look: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._mode, self._budget, self._precheck = mode, budget, look
        self._chooser = Chooser()

    def prepare(self) -> None:
        self._chooser = _chooser(self._mode, self._budget)
        self._sampled = self._chooser.chooses
        queue_bytes = int(settings.number("OP_AUTOCOMPARE_QUEUE_BYTES"))
        threads = int(settings.number("OP_AUTOCOMPARE_THREADS", max(1, min(4, cores.available() - 2))))
        self._at_once = self.only is not None or threads < 1
        self._threads = max(1, threads)
        # more threads would compete for the GIL, more cores for each do not
        self._cores = max(1, min(_MAX_CORES, (cores.available() - 1) // self._threads))
        # how much of a worker thread's time the run itself loses: all of it where there is no core to spare
        self._share = 1.0 if cores.available() <= threads + 1 else 0.5
        self._queue = Writer(queue_bytes, self._threads, max_jobs=_MAX_WAITING)
        rules = Rules.from_environment()
        self._teller = Teller(self, functools.partial(self._queue.submit, 0), rules.standard)
        self._ladder = make_ladder(_setup(self, rules, queue_bytes))
        self._live = tuple([judge for judge in self._ladder if judge.live])
        self._background = tuple([judge for judge in self._ladder if not judge.live])
        self._expecting, self._admitting, self._leaving, self._learning = [
            tuple([judge for judge in self._ladder if getattr(type(judge), name) is not getattr(Judge, name)])
            for name in ("expects", "admit", "leave", "learn")
        ]
        self._layouts, self._repeater = Layouts(), Repeater()
        self._gradient_kinds: dict[Any, int] = {}
        self._workers = threading.local()
        # held here, too: a forked child drops what threads hold, and freeing pinned memory there aborts it
        self._fetchers: list[Fetcher] = []
        measuring.prepare()
        self.csv_path: Path | None = None

    # -- choose ---------------------------------------------------------------------------------------

    @property
    def gated(self) -> bool:
        """Whether each call must be asked about, besides its operator."""
        return super().gated or self._chooser.chooses

    def accepts(self, call: Call) -> bool:
        """Whether this very call is compared: the base's conditions, then the budget."""
        if not super().accepts(call):
            return False
        if not self._chooser.chooses:
            return True
        started = time.perf_counter()
        kind = call.notes[(self, "kind")] = kind_of(call.op, call.args, call.kwargs)
        taken = self._chooser.take(kind)
        self._chooser.spend(None, _WATCHING_COST + time.perf_counter() - started)
        return taken

    # -- copy, on the run's thread --------------------------------------------------------------------

    def before(self, call: Call) -> None:
        started = time.perf_counter()
        kind = call.notes.get((self, "kind"))  # only where calls are chosen
        if call.traits.collective:
            self._chooser.settle(kind)
            self._teller.skip(call, "a collective: its result depends on other processes")
            return
        device = call.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        compared = ComparedCall(
            call.id,
            call.op,
            getattr(call.function, "op_tools_function", call.function),
            call.traits,
            Site(call.location, module_path(2), call.step),
            Region(device, torch.is_grad_enabled(), low),
            (call.inputs.number, 0),
            live=call,
            kind=kind,
        )
        look = (call.op, call.inputs.number)
        for judge in self._expecting:
            if look not in judge.never_settles and judge.expects(compared):
                call.notes[self] = compared
                break
        else:
            if self._copy_arguments(compared):
                call.notes[self] = compared
        if call.traits.random is not False:
            compared.drawn = self._repeater.before(call)
        if self._sampled:
            self._chooser.spend(kind, time.perf_counter() - started)

    def _copy_arguments(self, compared: ComparedCall) -> bool:
        call = compared.live
        staged = self._stage(call.inputs.number, call.tensors, (call.args, call.kwargs))
        if staged.opaque:
            self._chooser.settle(compared.kind)
            self._teller.skip(call, f"arguments of type {', '.join(dict.fromkeys(staged.opaque))} cannot be copied")
            return False
        compared.before = staged
        return True

    def _stage(self, number: int, tensors: list[Tensor], value: Any) -> Operands:
        """A snapshot that the user's dispatch modes do not see; the interceptor has switched off function modes."""
        if not count_dispatch_modes():
            return self._layouts.stage(number, tensors, value)
        with no_dispatch_modes():
            return self._layouts.stage(number, tensors, value)

    def after(self, call: Call) -> None:
        compared: ComparedCall | None = call.notes.get(self)
        if compared is None:
            return
        started = time.perf_counter()
        self.count(call)
        low = compared.region.autocast
        if low is not None:
            rounded_to = golden.autocast_rounds_to(call.op, low, call.result, call.tensors)
            compared.region = compared.region._replace(rounded_to=rounded_to)
        if compared.drawn is not None:
            compared.drawn = self._repeater.after(call, compared, compared.drawn)
        inputs, outputs = compared.numbers = (call.inputs.number, call.outputs.number)
        compared.record_site = self.site(call)
        compared.event = self._teller.lineage.made_from(call.inputs.data_ptrs, call.outputs.data_ptrs)
        job = Job(compared, FORWARD, event=compared.event, live=call)
        if self._settle_live(job):
            if self._sampled:
                self._chooser.settle(compared.kind)
        elif compared.before is None and not self._copy_arguments(compared):  # which the call left alone
            del call.notes[self]
        else:
            number = inputs << 32 | outputs if inputs and outputs else 0  # never that of arguments alone
            values = (call.args, call.kwargs, call.result)
            job.snapshot = self._stage(number, [*call.tensors, *call.results], values)
            self._submit(job, compared)
        compared.live = weakref.proxy(call)  # which holds it
        if self._sampled:
            self._chooser.spend(compared.kind, time.perf_counter() - started)

    def after_backward(self, call: Call, grad_outputs: list[Tensor | None], grad_inputs: list[Tensor | None]) -> None:
        compared: ComparedCall | None = call.notes.get(self)
        if compared is None:
            return
        unknown = _why_unknown(call, grad_outputs, grad_inputs)
        if unknown:
            self._teller.skip(call, unknown, BACKWARD)
            return
        started = time.perf_counter()
        sent, found = [[g.data_ptr() for g in grads if g is not None] for grads in (grad_outputs, grad_inputs)]
        event = self._teller.lineage.made_from(sent, found, also=(compared.event,))
        grads = (grad_outputs, grad_inputs)
        kind = gradient_kind(*grads, call.unasked)
        job = Job(compared, BACKWARD, event=event, live=call, grads=grads, grad_kind=kind, unasked=call.unasked)
        if not self._settle_live(job) and self._has_arguments(compared):
            given = [g for g in (*grad_outputs, *grad_inputs) if g is not None]
            job.snapshot = self._layouts.stage(_number_of(kind, given, self._gradient_kinds), given, grads)
            job.on_device = describe(tuple(grad_inputs)) if self.view.full else None
            job.grads = None
            if self._sampled:
                self._chooser.begin(compared.kind)
            self._submit(job, compared)
        if self._sampled:
            self._chooser.spend(compared.kind, time.perf_counter() - started)

    def _settle_live(self, job: Job) -> bool:
        """Whether a judge settles the job now, from the run's own tensors."""
        kind = (job.call.op, job.call.numbers[0])
        for judge in self._live:
            found = None if kind in judge.never_settles else judge.settle(job)
            if found is PENDING:
                self._submit_parts(job)
                return True
            if found is not None:
                job.judgement, job.number = found, self._teller.number()
                self._teller.tell(job, at_once=False)
                return True
        return False

    def _has_arguments(self, compared: ComparedCall) -> bool:
        """Whether there is a snapshot of the arguments, or one can still be had."""
        for judge in self._live if compared.before is None else ():
            found = judge.arguments(compared)
            if isinstance(found, str):
                self._teller.skip(compared.live, found, BACKWARD)
                return False
            if found is not None:
                compared.before = found
        return compared.before is not None or any(judge in compared.notes for judge in self._background)

    def _submit(self, job: Job, compared: ComparedCall) -> None:
        job.before = compared.before
        assert job.snapshot is not None
        job.nbytes = size = (job.before.nbytes if job.before is not None else 0) + job.snapshot.nbytes
        if compared.drawn is not None and compared.drawn.staged is not None:
            size += compared.drawn.staged.nbytes
        self._queue.reserve(size)  # where a run waits: Ctrl-C comes before the job has a number
        for judge in self._admitting:
            judge.admit(job)
        job.number = self._teller.number()
        self._queue.submit(size, functools.partial(self._work, job))
        if self._at_once:
            job.done.wait()

    def _submit_parts(self, job: Job) -> None:
        """Queue the parts of a job, which is told when the last of them is judged."""
        self._queue.reserve(sum([part.nbytes for part in job.parts]))
        for part in job.parts:
            for judge in self._admitting:
                judge.admit(part)
            part.number = -1 - next(_part_numbers)
        job.number = self._teller.number()
        for part in job.parts:
            self._queue.submit(part.nbytes, functools.partial(self._work, part))
        if self._at_once:
            job.done.wait()

    def _tell(self, job: Job) -> None:
        """Tell a judged job; of a part, the job that it is a part of, once all of it is judged."""
        if job.whole is None:
            self._teller.tell(job)
        elif job.whole.add(job):
            self._teller.tell(job.whole.job)

    # -- judge, on the worker threads -----------------------------------------------------------------

    def _work(self, job: Job) -> None:
        started = time.perf_counter()  # not the thread's own time: where cores are short, waiting is what it costs
        found: Judgement | None = None
        try:
            if not self._teller.abandoned:
                found = self._judge(job)
        except Exception as error:
            job.error = error
        seconds = time.perf_counter() - started
        if self._sampled:
            kind = getattr(job.call, "kind", None)
            self._chooser.spend(kind, seconds * self._share)
            self._chooser.settle(kind)
        if found is PENDING:
            return
        for judge in self._leaving:
            judge.leave(job, seconds)
        job.judgement = found
        self._tell(job)

    def _judge(self, job: Job) -> Judgement | None:
        workers = self._workers
        if not hasattr(workers, "fetcher"):
            workers.fetcher, workers.limit = Fetcher(), 0
            self._fetchers.append(workers.fetcher)
        # jobs are judged side by side on the cores that are there; a large one gets those of others that wait
        limit = max(self._cores, min(self._threads, self._threads * job.nbytes // self._queue.max_bytes))
        if workers.limit != limit:
            cores.limit_kernels(limit)
            workers.limit = limit
        job.fetcher = workers.fetcher
        for judge in self._background:
            found = judge.settle(job)
            if found is PENDING:
                return found
            if found is not None:
                job.judgement = found
                kind = (job.call.op, job.call.numbers[0])
                for other in self._learning if job.whole is None else ():
                    if kind not in other.never_settles:
                        other.learn(job)
                return found
        return None

    # -- tell, at the end -----------------------------------------------------------------------------

    def finish(self) -> None:
        teller = self._teller
        try:
            left = teller.numbered - teller.told
            if left > 50 and self.view.on and sys.stderr.isatty():
                console.wait_with_progress("comparing", left, lambda: teller.numbered - teller.told)
            self.wait()
        except KeyboardInterrupt:
            teller.abandoned = True  # what is queued is dropped; what was found is kept
            raise
        finally:
            for judge in self._ladder:
                judge.close()
            self._queue.close()
            teller.wait()
            for judge in self._ladder:
                judge.release()
            self._fetchers.clear()
            assert self._store is not None
            self.csv_path = teller.write_table(self._store, self.table_name, self._run_key, self.only is None)

    def summary(self) -> list[str]:
        notes = [line for judge in self._ladder for line in judge.summary()]
        told = self._teller.summary(self._chooser.left_out, [*notes, self._chooser.describe()])
        return [*told, f"comparisons in {self.csv_path}"]

    def progress(self) -> str:
        told, verdicts = self._teller.told, self._teller.verdicts
        return f"{super().progress()}, {told:,} comparisons, {verdicts[WRONG]:,} wrong"

    def failed(
        self, call: Call, error: BaseException, what: str = "the tool failed on this operator", phase: str = FORWARD
    ) -> None:
        if not in_func_transform():
            self._teller.coverage.miss(call, phase, f"the tool failed: {type(error).__name__}")
        super().failed(call, error, what)

    def not_watched(self, call: Call, reason: str) -> None:
        self._teller.skip(call, reason)

    @property
    def blames(self) -> Sequence[Blame]:
        """The wrong events in program order (`comparison.blames[0].module`)."""
        return tuple(sorted(self._teller.blames, key=lambda b: b.event))

    def judge(self, kind: type[Judge]) -> Any:
        """The judge of that class in this run's ladder, or None (`comparison.judge(Workers)`)."""
        return next((judge for judge in self._ladder if isinstance(judge, kind)), None)

    def wait(self) -> None:
        """Wait until every call so far is compared (`comparison.wait()`)."""
        self._queue.drain()
        for judge in self._background:
            if judge.drain():
                self._queue.drain()  # what was handed back
        self._teller.wait()

    def records(self) -> list[dict[str, Any]]:
        """All rows so far, in the order of the calls (`comparison.records()[0]["verdict"]`)."""
        if self.active:
            self.wait()
        return super().records()

    def findings(self) -> list[Any]:
        """What was found since the last start (`comparison.findings()`)."""
        if self.active:
            self.wait()
        return super().findings()

    def decode_row(self, row: dict[str, Any]) -> None:
        row.pop("described", None)
        row["allclose"] = bool(row["allclose"])


def _setup(tool: OpAutoCompare, rules: Rules, queue_bytes: int) -> Setup:
    """What the judges of a run share."""
    return Setup(
        rules,
        tool.view.full,
        tool._at_once,
        tool._sampled,
        _choice("look", tool._precheck, "OP_AUTOCOMPARE_FIRST_LOOK"),
        tool._threads,
        queue_bytes,
        int(settings.number("OP_AUTOCOMPARE_MAX_BYTES")),
        settings.number("OP_AUTOCOMPARE_MAX_SECONDS"),
        finish=tool._tell,
        again=lambda job: tool._queue.submit(0, functools.partial(tool._work, job)),
        wait=tool.wait,
        report=lambda message: tool.slowed(message.split(":")[0], message),
        skip=tool._teller.skip,
    )


def _why_unknown(call: Call, sent: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> str:
    """Why what came to a call in a backward pass is not known; empty where it is."""
    if call.mixed:
        return "in a second derivative, gradients of other calls went through its nodes as well"
    if all(g is None for g in sent) and any(g is not None for g in found):
        return "its result was changed in place, and what came back to it was not seen"
    return ""


def _number_of(kind: Any, given: Sequence[Tensor], known: dict[Any, int]) -> int:
    """A number for gradients that look alike, 0 where there is none; descriptions have positive numbers."""
    if not all(g.layout == torch.strided for g in given):
        return 0
    number = known.get(kind, 0)
    if not number and len(known) < _MAX_GRADIENT_KINDS:
        number = known[kind] = -1 - len(known)
    return number


def _choice(keyword: str, given: str | None, variable: str) -> str:
    if given is None:
        return settings.choice(variable)
    known = settings.options(variable)
    if given not in known:
        raise settings.SettingsError(f"OpAutoCompare({keyword}={given!r}): choose one of {', '.join(known)}")
    return given


def _chooser(mode: str | None, budget: str | float | None) -> Chooser:
    mode = _choice("mode", mode, "OP_AUTOCOMPARE_MODE")
    variable = "OpAutoCompare(budget=...)"
    if budget is None:
        variable, budget = "OP_AUTOCOMPARE_BUDGET", settings.read("OP_AUTOCOMPARE_BUDGET") or None
    return Chooser(mode, None if budget is None else parse_budget(str(budget), variable))
