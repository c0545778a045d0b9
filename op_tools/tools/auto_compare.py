"""OpAutoCompare: compares every operator with a golden run on the CPU, forward and backward.

The run only copies: arguments and results are staged on the device, and threads fetch them, do the golden run
and judge. Comparisons may end in any order; they are told in the order of the calls.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import math
import os
import pickle
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from .. import settings
from ..call import facts as op_facts
from ..call.description import Tensor, TensorMeta, describe, labelled
from ..call.devices import quiet
from ..call.module_path import module_path
from ..compare import cores, lineage
from ..compare import pool as compare_pool
from ..compare.choose import MODES, Chooser, kind_of, parse_budget
from ..compare.comparing import Comparer, Comparison, Memory, rebuilt
from ..compare.lineage import Blame, Lineage
from ..compare.pool import Pool, Remote, needs_gradients, sendable
from ..compare.precheck import FirstLook, Question, Room
from ..compare.precheck import Kept as Looked
from ..compare.reshapes import Places, View, Views, places
from ..compare.worker import Answer, Options, Task
from ..copies.operands import MOST_BORROWED, Layouts, Staged, Unpacker, rebuild, stage
from ..copies.queue import Writer
from ..files import archive, reproducer
from ..judge import golden
from ..judge.golden import GoldenResult
from ..judge.verdict import NOT_COMPARABLE, RIGHT, WRONG, Judgement, Row, Rules
from ..native import device_measures, measuring
from ..replay import captured
from ..view import console, store
from ..watch.intercept import Call
from .base import Tool

_SEEING: Final = 1e-5  # seconds that the interceptor needs for a call, whether or not it is compared
_MOST_KINDS: Final = 20_000
_MOST_SAVED: Final = 200  # wrong calls that are saved to disk
_MOST_BLAMES: Final = 10_000
_MOST_WAITING: Final = 2_000  # comparisons
_MOST_CORES: Final = 4  # for one comparison, unless it is large
_MOST_SHOWN: Final = 5_000  # rows of the table at the end
_UNSTAGED: Final = Staged(None, (), None, 0)
_LOST: Final = Judgement(NOT_COMPARABLE, "the process that had its arguments ended")
_CORES_FOR_PROCESSES: Final = 8
_MOST_PROCESSES: Final = 12
_WORTH_PROCESSES: Final = 4.0  # seconds, and as many of comparing
LOOKS: Final = ("cpu", "device")  # where a call that is like an earlier one is looked at first


@dataclasses.dataclass
class _Job:
    """One comparison to do: what the call was, and the copies of its tensors."""

    event: int
    phase: str
    call: Call
    device: str
    site: int
    module: str
    kind: Hashable
    function: Any
    before: Staged
    after: Staged | None = None  # (args, kwargs, result)
    grads: Staged | None = None  # (grad_outputs, grad_inputs)
    rounded_to: torch.dtype | None = None
    autocast: torch.dtype | None = None
    grad_enabled: bool = True
    twin: _Job | None = None  # what waits for the backward of the same call
    memory: Memory | None = None  # of that call, for its backward
    remote: Remote | None = None  # the process that compares both
    view: View | None = None  # what is known of calls like this one, if they run no kernel
    places: Places | None = None  # of the results in the memory of the arguments
    question: Question | None = None  # to be looked at on the device first
    looked: Looked | None = None  # of a twin that was: for its backward
    looks: Hashable = None  # of a backward: of its gradients
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    # what came out
    judgement: Judgement | None = None
    result: GoldenResult | None = None
    error: BaseException | None = None
    host: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in (self.before, self.after, self.grads) if s is not None)

    def forget(self) -> None:
        """Let go of all tensors."""
        self.after = self.grads = self.result = self.twin = None
        self.host = {}


class _Settled:
    """A comparison that was done at once."""

    error = None

    def __init__(self, job: _Job, phase: str, event: int, judgement: Judgement, call: Call | None = None) -> None:
        self.call, self.site, self.module = call or job.call, job.site, job.module
        self.phase, self.event, self.judgement = phase, event, judgement
        self.done = _ALREADY

    def forget(self) -> None:
        """Nothing is held."""


class _Done:
    def set(self) -> None:
        """Nobody waits."""


_ALREADY: Final = _Done()


class OpAutoCompare(Tool):
    """Compare each operator's results and gradients with the CPU while the training runs.

    `mode` is `every` (call) or `once` (per operator, shape, dtype and layout); `budget="2x"` compares as much as
    keeps the run within that factor. `look="device"` has the device itself settle calls like earlier ones, in float64;
    what is in doubt goes to the CPU. All three can also be set by `OP_AUTOCOMPARE_MODE`, `OP_AUTOCOMPARE_BUDGET` and
    `OP_AUTOCOMPARE_FIRST_LOOK`.

    >>> with op_tools.OpAutoCompare() as comparison:  # doctest: +SKIP
    ...     train_step()
    >>> [row["name"] for row in comparison.records() if row["verdict"] == "wrong"]  # doctest: +SKIP
    """

    name = "OpAutoCompare"
    prefix = "OP_AUTOCOMPARE"
    order = 20
    wants_backward = True
    columns: ClassVar[dict[str, str]] = {
        "call_id": "INTEGER",
        "site": "INTEGER",
        "phase": "TEXT",
        "name": "TEXT",
        "allclose": "INTEGER",
        "max_abs_diff": "REAL",
        "max_relative_diff": "REAL",
        "atol": "REAL",
        "rtol": "REAL",
        "error_info": "TEXT",
        "cosine": "REAL",
        "max_ulp": "REAL",
        "verdict": "TEXT",
        "reason": "TEXT",
        "module": "TEXT",
        "step": "INTEGER",
    }

    def __init__(
        self,
        *args: Any,
        mode: str | None = None,
        budget: str | float | None = None,
        look: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._mode, self._budget, self._where_first = mode, budget, look
        self._chooser = Chooser()

    def prepare(self) -> None:
        self._rules = Rules.from_environment()
        golden.casts_of("torch.add")  # a mistake in the variable is an error now
        self._chooser = _chooser(self._mode, self._budget)
        queued = int(settings.number("OP_AUTOCOMPARE_QUEUE_BYTES", 2**30))
        threads = int(settings.number("OP_AUTOCOMPARE_THREADS", max(1, min(4, cores.available() - 2))))
        self._at_once = self.only is not None or threads < 1
        self._threads = max(1, threads)
        # more threads would wait for the interpreter, more cores for each do not
        self._spare = max(1, min(_MOST_CORES, (cores.available() - 1) // self._threads))
        self._writer = Writer(queued, self._threads, most_jobs=_MOST_WAITING)
        self._layouts = Layouts()
        self._looks: dict[Hashable, int] = {}
        self._look = self._first_look()
        self._comparer = Comparer(
            self._rules,
            Room(queued // 4),
            int(settings.number("OP_AUTOCOMPARE_MAX_BYTES", 8 * 2**30)),
            settings.number("OP_AUTOCOMPARE_MAX_SECONDS", 10.0),
            self._threads,
            whole=self._look is not None,
        )
        self._pool: Pool | None = None
        self._processes, self._patience = self._helping()
        self._busy, self._began = 0.0, time.monotonic()  # seconds that comparisons took here, and since when
        self._of_pytorch: dict[str, bool] = {}  # operators: whether they are what their names say
        self._views = Views()
        self._where: torch.device | None = None
        measuring.prepare()
        # how much of a worker's time the run itself loses: all of it where there is no core to spare
        self._share = 1.0 if cores.available() <= threads + 1 else 0.5
        self._workers = threading.local()
        self._order_lock = threading.RLock()
        self._ready: dict[int, _Job | _Settled] = {}
        self._submitted = self._told = 0
        self._abandoned = False
        self._lineage = Lineage()
        self._blames: list[Blame] = []
        self._verdicts: Counter[str] = Counter()
        self._compared_by_op: Counter[str] = Counter()
        self._not_comparable: Counter[str] = Counter()
        self._saved = 0
        self._folder = settings.results_dir() / "op_capture_results"
        self.csv_path: Path | None = None

    def _first_look(self) -> FirstLook | None:
        where = self._where_first
        if where is None:
            where = settings.choice("OP_AUTOCOMPARE_FIRST_LOOK", LOOKS)
        elif where not in LOOKS:
            raise settings.SettingsError(f"OpAutoCompare(look={where!r}): choose one of {', '.join(LOOKS)}")
        # tables of both sides, tolerances and other standards are for results on the CPU
        if where == "cpu" or self.view.full or self._rules.standard != "ulp" or self._rules.tolerances:
            return None
        device_measures.prepare()
        return FirstLook(self._rules)

    def _helping(self) -> tuple[int, float]:
        """How many processes may help to compare, and after how many seconds of comparing they are worth it."""
        given = settings.number("OP_AUTOCOMPARE_PROCESSES", -1.0)
        if self._at_once or self.view.full or self._look is not None or self._chooser.chooses:
            return 0, 0.0
        if not compare_pool.available():
            return 0, 0.0
        if given >= 0:
            return int(given), 0.0
        there = cores.available() // _ranks_here()
        return (min(_MOST_PROCESSES, there - 4), _WORTH_PROCESSES) if there >= _CORES_FOR_PROCESSES else (0, 0.0)

    def _start_pool(self) -> None:
        comparer, queued = self._comparer, self._writer.most_bytes
        room = queued // 4 // self._processes
        options = Options(self._rules, room, comparer.max_bytes, comparer.max_seconds)
        try:
            self._pool = Pool(self._processes, options, self._where or torch.device("cpu"), self._answered)
            _helped.add(self)
        except (OSError, ValueError, RuntimeError, pickle.PicklingError):  # no memory, files or threads left
            self._processes = 0

    # -- which calls ----------------------------------------------------------------------------------

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
        self._chooser.spend(None, _SEEING + time.perf_counter() - started)
        return taken

    # -- while the training runs ----------------------------------------------------------------------

    def before(self, call: Call) -> None:
        started = time.perf_counter()
        if call.traits.collective:
            self._chooser.settle(call.notes.get((self, "kind")))
            self._skip(call, "a collective: its result depends on other processes")
            return
        where = call.device
        device = where.type
        if self._where is None:
            self._where = where
            if self._processes and not self._patience:
                self._start_pool()
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        kind = call.notes.get((self, "kind"))  # only where calls are chosen
        grad_enabled = torch.is_grad_enabled()
        module = module_path(2)
        function = getattr(call.function, "op_tools_function", call.function)
        job = _Job(
            -1, "forward", call, device, 0, module, kind, function, _UNSTAGED, autocast=low, grad_enabled=grad_enabled
        )
        job.view = self._views.get(_view_kind(job))
        if job.view is None and self._look is not None and self._comparer.cast(call.op) is None:
            job.question = self._look.question(call, low, grad_enabled)
        unwritten = job.view is not None or (job.question is not None and not job.question.kind.writes)
        if unwritten or self._stage_arguments(job):
            call.notes[self] = job
        self._chooser.spend(kind, time.perf_counter() - started)

    def _stage_arguments(self, job: _Job) -> bool:
        call = job.call
        with quiet():
            staged = self._layouts.stage(call.inputs.number, call.tensors, (call.args, call.kwargs))
        if staged.opaque:
            self._chooser.settle(job.kind)
            self._skip(call, f"arguments of type {', '.join(staged.opaque)} cannot be copied")
            return False
        job.before = staged
        return True

    def after(self, call: Call) -> None:
        job: _Job | None = call.notes.get(self)
        if job is None:
            return
        started = time.perf_counter()
        self.announce(call)
        if job.autocast is not None:
            job.rounded_to = golden.autocast_rounds_to(call.op, job.autocast, call.result)
        job.site = self.site(call)
        job.event = self._lineage.made_from(call.inputs.data_ptrs, call.outputs.data_ptrs)
        may_be_a_view = not (call.traits.mutates or self.view.full or "as_strided" in call.op)
        if may_be_a_view and self._is_of_pytorch(call.op, job.function):
            job.places = places(call.tensors, call.results)
        if self._is_a_view(job) or (job.question is not None and self._looked_at(job)):
            self._chooser.settle(job.kind)
            self._chooser.spend(job.kind, time.perf_counter() - started)
            return
        if job.before is _UNSTAGED and not self._stage_arguments(job):  # which the call left alone
            call.notes.pop(self, None)
            return
        inputs, outputs = call.inputs.number, call.outputs.number
        number = inputs << 32 | outputs if inputs and outputs else 0  # never that of arguments alone
        with quiet():
            job.after = self._layouts.stage(
                number, [*call.tensors, *call.results], (call.args, call.kwargs, call.result)
            )
        # the arguments stay with the call for a backward to come; the rest goes with the job
        job.memory = Memory()
        twin = dataclasses.replace(job, call=weakref.proxy(call), after=None, done=threading.Event(), host={})
        job.twin = call.notes[self] = twin
        self._submit(job)
        self._chooser.spend(job.kind, time.perf_counter() - started)

    def _is_a_view(self, job: _Job) -> bool:
        """Whether a call did what calls like it did, which is to give memory another shape."""
        view = job.view
        if view is None or view.results != job.call.outputs.number or view.places != job.places:
            job.view = None
            return False
        self._tell_now(_Settled(job, "forward", job.event, view.judgement))
        job.call = weakref.proxy(job.call)  # which holds the job while it lives
        return True

    def _passes_on(self, call: Call, forward: _Job, event: int, sent: Any, found: Any) -> bool:
        """The same for its gradients."""
        view = self._views.get((_view_kind(forward), "backward"))
        if view is None or view.results != _looks_of(sent, found) or view.places != _passed(sent, found):
            return False
        self._tell_now(_Settled(forward, "backward", event, view.judgement, call))
        return True

    def _looked_at(self, job: _Job) -> bool:
        """Whether the device itself settles the call."""
        look, question = self._look, job.question
        assert look is not None
        assert question is not None
        question.rounded_to = job.rounded_to
        found: tuple[Judgement, Looked | None] | None
        if question.kind.writes:
            with quiet():
                arguments = rebuild(job.before.tree, job.before.storages)
            written = look.written(question, job.call, job.function, arguments)
            found = None if written is None else (written, None)
        else:
            found = look.forward(question, job.call, job.function)
        if found is None:
            job.question = None
            return False
        judgement, job.looked = found
        self._tell_now(_Settled(job, "forward", job.event, judgement))
        job.call = weakref.proxy(job.call)  # which holds the job, and what is kept on the device, while it lives
        return True

    def _looked_back(self, call: Call, forward: _Job, event: int, sent: Any, found: Any) -> bool:
        """The same for its gradients; if not, the arguments as they were are staged."""
        looked = forward.looked
        assert looked is not None
        assert self._look is not None
        judgement = self._look.backward(looked, sent, found, _looks_of(sent, found))
        if judgement is not None:
            self._tell_now(_Settled(forward, "backward", event, judgement, call))
            return True
        arguments = looked.arguments()
        if arguments is None:
            self._skip(call, "its arguments were changed before its backward")
            return True
        with quiet():
            forward.before = stage(arguments)
        forward.looked = None
        return False

    def _tell_now(self, settled: _Settled) -> None:
        with self._order_lock:
            number = self._submitted
            self._submitted += 1
        self._tell_in_order(number, settled)

    def after_backward(self, call: Call, grad_outputs: list[Tensor | None], grad_inputs: list[Tensor | None]) -> None:
        forward: _Job | None = call.notes.get(self)
        if forward is None:
            return
        if forward.question is not None and forward.before is _UNSTAGED and forward.looked is None:
            return  # nothing was kept of a call without gradients
        if all(g is None for g in grad_outputs) and any(g is not None for g in grad_inputs):
            self._skip(call, "its result was changed in place, and what came back to it was not seen")
            return
        started = time.perf_counter()
        pointers = [[g.data_ptr() for g in grads if g is not None] for grads in (grad_outputs, grad_inputs)]
        event = self._lineage.made_from(pointers[0], pointers[1], also=(forward.event,))
        if forward.places is not None and self._passes_on(call, forward, event, grad_outputs, grad_inputs):
            self._chooser.spend(forward.kind, time.perf_counter() - started)
            return
        if forward.view is not None:
            forward.before = forward.view.arguments()
        if forward.looked is not None and self._looked_back(call, forward, event, grad_outputs, grad_inputs):
            self._chooser.spend(forward.kind, time.perf_counter() - started)
            return
        staged = self._stage_gradients(grad_outputs, grad_inputs)
        job = dataclasses.replace(
            forward,
            call=call,
            event=event,
            phase="backward",
            grads=staged,
            looks=_looks_of(grad_outputs, grad_inputs) if self._look is not None or forward.places else None,
            places=_passed(grad_outputs, grad_inputs) if forward.places else None,
            twin=None,
            done=threading.Event(),
            host={},
        )
        self._chooser.begin(job.kind)
        self._submit(job)
        self._chooser.spend(job.kind, time.perf_counter() - started)

    def _stage_gradients(self, sent: list[Tensor | None], found: list[Tensor | None]) -> Staged:
        grads = [*sent, *found]
        if any(g is not None and g.layout != torch.strided for g in grads):
            return stage((sent, found))
        looks = _looks_of(sent, found)
        number = self._looks.get(looks)
        if number is None:
            if len(self._looks) >= _MOST_KINDS:
                return stage((sent, found))
            number = self._looks[looks] = -1 - len(self._looks)  # descriptions have positive numbers
        return self._layouts.stage(number, [g for g in grads if g is not None], (sent, found))

    def _skip(self, call: Call, reason: str) -> None:
        self._not_comparable[call.op] += 1
        self.found(call, "skipped", f"not comparable: {reason}", once=True)

    def _submit(self, job: _Job) -> None:
        size = job.nbytes
        self._writer.reserve(size)  # where a run waits: Ctrl-C comes before the call has a number
        pool = self._pool
        if pool is not None and job.twin is not None and self._may_leave(job):
            job.remote = job.twin.remote = pool.remote(size)
        with self._order_lock:
            number = self._submitted
            self._submitted += 1
        self._writer.submit(size, functools.partial(self._work, number, job))
        if self._at_once:
            job.done.wait()

    # -- in the threads -------------------------------------------------------------------------------

    def _work(self, number: int, job: _Job) -> None:
        started = time.perf_counter()  # not the thread's own time: where cores are short, waiting is what it costs
        sent, remote = False, job.remote
        try:
            if not self._abandoned:
                self._prepare_thread(job)
                sent = remote is not None and self._sent(number, job, remote)
                if not sent and job.judgement is None:
                    self._compare(job)
        except Exception as error:
            job.error = error
        finally:
            if remote is not None:
                remote.tried.set()
            seconds = time.perf_counter() - started
            self._chooser.spend(job.kind, seconds * self._share)
            self._chooser.settle(job.kind)
            if not sent:
                self._tell_in_order(number, job)
                self._ask_for_help(seconds)

    def _ask_for_help(self, seconds: float) -> None:
        """Processes take some seconds to start, and a core each: they are for runs that last."""
        if self._pool is not None or not self._processes or self._abandoned:
            return
        self._busy += seconds
        if self._busy > self._patience and time.monotonic() - self._began > self._patience:
            with self._order_lock:
                if self._pool is None:
                    self._start_pool()

    # -- in other processes ---------------------------------------------------------------------------

    def _may_leave(self, job: _Job) -> bool:
        """Whether another process can compare a call and its backward: one of PyTorch's, of plain tensors."""
        op, after = job.call.op, job.after
        if job.places is not None or after is None or job.nbytes > compare_pool.most_bytes():
            return False
        if not self._is_of_pytorch(op, job.function) or op_facts.has_free_vectors(op):
            return False
        return sendable(job.before) and sendable(after) and torch.get_default_dtype() == torch.float32

    def _is_of_pytorch(self, op: str, function: Any) -> bool:
        """Whether an operator is the one of PyTorch that has its name, and its golden run is the usual one."""
        known = self._of_pytorch.get(op)
        if known is None:
            try:
                known = captured.function_of(op) == function and self._comparer.cast(op) is None
            except Exception:
                known = False
            self._of_pytorch[op] = known
        return known

    def _sent(self, number: int, job: _Job, remote: Remote) -> bool:
        """Whether a comparison goes on in another process; if not, it is done here."""
        pool, call, before, twin = self._pool, job.call, job.before, job.twin  # which is gone with an answer
        assert pool is not None
        backward = job.phase == "backward"
        parts: list[Staged]
        if backward:
            remote.tried.wait()
            job.remote = None
            assert job.grads is not None
            parts = [job.grads] if remote.there and sendable(job.grads) else []
        else:
            assert job.after is not None
            parts = [before, job.after]
        layouts = [part.layout for part in parts if part.layout is not None]
        task = Task(
            number,
            job.phase,
            call.op,
            job.device,
            (call.inputs.number, call.outputs.number),
            job.nbytes,
            job.rounded_to,
            job.autocast,
            job.grad_enabled,
            remote.memory if backward or (job.grad_enabled and any(map(needs_gradients, layouts))) else 0,
            *(0, (), 0, ()),
        )
        sent = False
        try:
            with quiet():
                sent = bool(parts) and pool.send(remote, task, parts, self._workers.unpacker, (number, job))
            if sent and twin is not None:
                remote.there = True
                twin.before = _UNSTAGED  # no device memory is held for a backward to come
        finally:
            remote.tried.set()
        if not sent and backward and before is _UNSTAGED:
            job.judgement = _LOST
        return sent

    def _answered(self, given: tuple[int, _Job], answer: Answer | None) -> None:
        """What another process found, if it is right; all else is looked at here."""
        number, job = given
        if answer is not None and answer.rows is not None:
            job.judgement = Judgement(RIGHT, "", tuple([Row(*row) for row in answer.rows]))
            self._tell_in_order(number, job)
            return
        job.remote = None
        if answer is not None and answer.before is not None:
            flats = [torch.frombuffer(bytearray(b or b"\0"), dtype=torch.uint8)[: len(b)] for b in answer.before]
            job.before = Staged(answer.tree, tuple(flats), None, sum([len(b) for b in answer.before]))
        if job.phase == "backward" and job.before is _UNSTAGED:
            job.judgement = _LOST
        self._writer.submit(0, functools.partial(self._work, number, job))

    def _prepare_thread(self, job: _Job) -> None:
        workers, limit = self._workers, self._kernel_threads(job.nbytes)
        if not hasattr(workers, "unpacker"):
            workers.unpacker, workers.limit = Unpacker(), 0
        if workers.limit != limit:
            cores.limit_kernels(limit)
            workers.limit = limit

    def _kernel_threads(self, nbytes: int) -> int:
        """Comparisons go on side by side, on the cores that are there; a large one gets those of others that wait."""
        return max(self._spare, min(self._threads, self._threads * nbytes // self._writer.most_bytes))

    def _compare(self, job: _Job) -> None:
        with quiet():
            args, kwargs = self._fetch(job)
        call, shown = job.call, self.view.full
        done = Comparison(
            job.phase,
            call.op,
            job.function,
            call.traits,
            job.device,
            (call.inputs.number, call.outputs.number),
            args,
            kwargs,
            job.host,
            job.nbytes,
            job.rounded_to,
            job.autocast,
            job.grad_enabled,
            job.memory,
        )
        job.judgement = found = self._comparer.compare(done, shown)
        job.result = result = done.result
        if done.moves and job.places is not None:
            self._learn_view(job, found)
        if self._look is not None and result is not None:
            self._look.learn(call, result, found, job.grad_enabled, done.moves, job.looks)
        if found.verdict == WRONG or shown:
            with quiet():  # what was borrowed is shown and saved later
                self._unpack(job, self._workers.unpacker.fetch)

    def _learn_view(self, job: _Job, found: Judgement) -> None:
        call, kind = job.call, _view_kind(job)
        assert job.places is not None
        if job.phase == "backward":
            self._views.learn((kind, "backward"), job.looks, job.places, found, job.before)
        else:
            self._views.learn(kind, call.outputs.number, job.places, found, job.before)

    def _fetch(self, job: _Job) -> tuple[Any, Any]:
        """The arguments on the host, to keep; results and gradients in `job.host`, valid until the next comparison."""
        unpacker, before = self._workers.unpacker, job.before
        later = job.after or job.grads
        assert later is not None
        together = before.nbytes + later.nbytes <= MOST_BORROWED
        if together and job.after is not None:  # the later event includes the earlier one
            flats = unpacker.borrow((*before.storages, *later.storages), later.event or before.event)
            count = len(before.storages)
            own = [f if s.is_cpu else f.clone() for s, f in zip(before.storages, flats)]
            self._unpack(job, lambda _: flats[count:])
        else:
            own = unpacker.fetch(before)
            self._unpack(job, unpacker.fetch if not together else lambda s: unpacker.borrow(s.storages, s.event))
        before = before._replace(storages=tuple(own), event=None)
        if job.twin is not None:
            job.twin.before = before  # no device memory is held for a backward to come
        arguments: tuple[Any, Any] = rebuilt(before.tree, own)
        return arguments

    def _unpack(self, job: _Job, fetch: Callable[[Staged], Sequence[Tensor]]) -> None:
        host = job.host
        if job.after is not None:
            host["args"], host["kwargs"], host["result"] = rebuilt(job.after.tree, fetch(job.after))
        if job.grads is not None:
            host["grad_outputs"], host["grad_inputs"] = rebuilt(job.grads.tree, fetch(job.grads))

    # -- telling, in the order of the calls -----------------------------------------------------------

    def _tell_in_order(self, number: int, job: _Job | _Settled) -> None:
        with self._order_lock:
            self._ready[number] = job
            while self._told in self._ready:
                self._told += 1
                ready = self._ready.pop(self._told - 1)
                try:
                    if not self._abandoned or ready.judgement is not None:
                        self._tell(ready)
                except Exception as error:
                    self.failed(ready.call, error)
                finally:
                    ready.forget()
                    ready.done.set()

    def _tell(self, job: _Job | _Settled) -> None:
        call, judgement = job.call, job.judgement
        if job.error is not None:
            self.failed(call, job.error)
            return
        if judgement is None:
            return
        if judgement.verdict == NOT_COMPARABLE and not judgement.rows:
            self._skip(call, judgement.reason)
            return
        self._verdicts[judgement.verdict] += 1
        self._compared_by_op[call.op] += 1
        for row in judgement.rows:
            self.record(
                call.id,
                job.site,
                job.phase,
                row.name,
                int(row.allclose),
                row.max_abs_diff,
                row.max_relative_diff,
                row.atol,
                row.rtol,
                row.error_info,
                row.cosine,
                row.max_ulp,
                row.verdict,
                row.reason,
                job.module,
                call.step,
            )
        if isinstance(job, _Settled):
            return
        if self.view.full:
            self._show(job, judgement)
        if judgement.verdict == WRONG:
            self._accuse(job, judgement)

    def _accuse(self, job: _Job, judgement: Judgement) -> None:
        call = job.call
        worst = max((r for r in judgement.rows if r.verdict == WRONG), key=lambda r: r.excess)
        folder = ""
        if self._saved < _MOST_SAVED:
            self._saved += 1
            folder = self._save(job, worst)
        if len(self._blames) < _MOST_BLAMES:
            self._blames.append(
                Blame(
                    job.event,
                    call.id,
                    call.op,
                    job.phase,
                    f"{worst.name}: {worst.reason}",
                    worst.excess,
                    call.location,
                    job.module,
                    call.step,
                    folder,
                )
            )
        where = f" in module {job.module}" if job.module else ""
        self.found(
            call,
            "difference",
            f"{worst.name} is wrong{where}: {worst.reason} (max_abs_diff {worst.max_abs_diff:.6g}, "
            f"{worst.max_ulp:.3g} ulp)",
        )

    def _save(self, job: _Job, worst: Row) -> str:
        """The saved call, both sides, and a script that repeats it; what cannot be saved is left out."""
        call, host, result = job.call, job.host, job.result
        assert result is not None
        stamp = call.notes.setdefault((self, "stamp"), store.time_label())
        folder = self._folder / call.op / settings.process_label() / "autocompare" / str(call.id) / stamp
        facts = {
            "name": call.op,
            "id": call.id,
            "location": call.location,
            "module": job.module,
            "step": call.step,
            "grad_enabled": job.grad_enabled,
            "autocast": None if job.autocast is None else [job.device, str(job.autocast).removeprefix("torch.")],
            "rng": None,
        }
        source = result.source
        sides: dict[str, dict[str, dict[str, Any]]] = {
            "device": {
                "input": {**facts, "args": archive.encode(source.args), "kwargs": archive.encode(source.kwargs)}
            },
            "cpu": {},
        }
        if job.phase == "forward":
            after = result.inputs_after
            sides["device"]["output"] = {"name": call.op, "result": archive.encode(host["result"])}
            args, kwargs = archive.encode(after[0]), archive.encode(after[1])
            sides["cpu"]["input"] = {"name": call.op, "args": args, "kwargs": kwargs}
            sides["cpu"]["output"] = {"result": archive.encode(result.outputs)}
        else:
            sides["device"]["grad_outputs"] = {"grad_outputs": archive.encode(tuple(host["grad_outputs"]))}
            sides["device"]["grad_inputs"] = {"grad_inputs": archive.encode(tuple(host["grad_inputs"]))}
            sides["cpu"]["grad_inputs"] = {"grad_inputs": archive.encode(tuple(result.grad_inputs or ()))}
        lines = []
        for side, parts in sides.items():
            (folder / side).mkdir(parents=True, exist_ok=True)
            for part, payload in parts.items():
                path = folder / side / f"{part}.pth"
                if not path.exists():
                    archive.save(path, payload)
                    lines.append(f"{path} saved")
        script = reproducer.write(
            folder,
            call.op,
            {
                "device": job.device,
                "location": call.location,
                "module": job.module,
                "reason": f"{worst.name}: {worst.reason}",
                "part": "grad_input" if job.phase == "backward" else "output",
                "observed": worst.max_abs_diff if worst.max_abs_diff < float("inf") else 0.0,
                "rounded_to": job.rounded_to,
                "autocast": job.autocast,
                "mutates": bool(call.traits.mutates) or "out" in source.kwargs,
                "ditorch": "ditorch" in sys.modules,
            },
        )
        self.view.block(*lines, f"{script} saved")
        return str(folder)

    # -- the end --------------------------------------------------------------------------------------

    def finish(self) -> None:
        try:
            self._drain()
        except KeyboardInterrupt:
            self._abandoned = True  # what is queued is dropped; what was found is kept
            raise
        finally:
            pool = self._pool
            if pool is not None:
                pool.close()
            self._writer.close()
            if pool is not None:
                pool.let_go()
            self._pool = None
            _helped.discard(self)
            self._write_table()

    def _drain(self) -> None:
        with self._order_lock:
            left = self._submitted - self._told
        if left > 50 and self.view.on and sys.stderr.isatty():
            console.wait_with_progress("comparing", left, lambda: self._submitted - self._told)
        self.wait()

    def _write_table(self) -> None:
        assert self._store is not None
        folder = settings.results_dir() / "op_autocompare_result"
        self.csv_path = folder / f"op_autocompare_info_pid{settings.process_label()}_{store.time_label()}.csv"
        header = ["forward_id", *console.COMPARE_COLUMNS, *console.VERDICT_COLUMNS, "reason", "module", "location"]
        rows = self._store.tuples(
            "SELECT r.call_id, r.module, s.location, r.name, r.allclose, r.max_abs_diff, r.max_relative_diff, r.atol, "
            "r.rtol, r.error_info, r.cosine, r.max_ulp, r.verdict, r.reason "
            f"FROM {self.table_name} r LEFT JOIN sites s ON s.site = r.site WHERE r.run = ? ORDER BY r.rowid",
            (self._run_key,),
        )
        if self.view.full and rows and self.only is None:
            body = [[str(row[0]), *_cells(_row(row[3:]))] for row in rows[:_MOST_SHOWN]]
            self.view.block(console.table(header[: 1 + len(console.COMPARE_COLUMNS) + 3], body))
        table = ([row[0], *[c.strip() for c in _cells(_row(row[3:]))], row[13], row[1], row[2]] for row in rows)
        store.write_csv(self.csv_path, header, table)

    def summary(self) -> list[str]:
        total = sum(self._verdicts.values())
        text = f"{total} comparisons, {self._verdicts[WRONG]} wrong"
        if self._not_comparable:
            names = ", ".join(f"{op} {n}" for op, n in self._not_comparable.most_common(5))
            text += f"; not comparable: {names}"
        facts = [text]
        if self._look is not None and self._look.settled:
            facts.append(
                f"{self._look.settled} settled on the device in float64, as calls like them were right on the CPU; "
                f"{self._look.passed_on} more were passed on to the CPU"
            )
        left_out = self._chooser.describe()
        if left_out:
            facts.append(left_out)
        if self._abandoned:
            facts.append("interrupted: comparisons that were still queued were dropped")
        facts += lineage.report(self._blames, self._lineage, self._compared_by_op)
        facts.append(f"comparisons in {self.csv_path}")
        return facts

    @property
    def blames(self) -> Sequence[Blame]:
        """The wrong events in program order (`comparison.blames[0].module`)."""
        return tuple(sorted(self._blames, key=lambda b: b.event))

    def wait(self) -> None:
        """Wait until every call so far is compared (`comparison.wait()`)."""
        self._writer.drain()
        pool = self._pool
        if pool is not None:
            pool.drain()
            self._writer.drain()  # what was handed back

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

    def polish(self, row: dict[str, Any]) -> None:
        row.pop("described", None)
        row["allclose"] = bool(row["allclose"])

    # -- what is shown --------------------------------------------------------------------------------

    def _show(self, job: _Job, judgement: Judgement) -> None:
        call, result = job.call, job.result
        assert result is not None
        if job.phase == "forward":
            cpu_inputs, cpu_outputs = describe(*result.inputs_after), describe((result.outputs,))
            parts = [
                (call.inputs, "inputs"),
                (call.outputs, "outputs"),
                (cpu_inputs, "inputs(cpu)"),
                (cpu_outputs, "outputs(cpu)"),
            ]
        else:
            grads = job.host
            parts = [
                (describe(tuple(g for g in grads["grad_outputs"] if g is not None)), "grad_output(cpu)"),
                (describe(tuple(grads["grad_inputs"])), "grad_inputs"),
                (describe(tuple(result.grad_inputs or ())), "grad_inputs(cpu)"),
            ]
        shown: list[tuple[str, TensorMeta | str]] = []
        pointers: tuple[int, ...] = ()
        for described, what in parts:
            shown += labelled(described, what)
            pointers += described.data_ptrs
        info = f"    cpu_dtype_cast_info(from:to): {result.cast_info}" if result.cast_info else ""
        self.view.block(
            f"{call.op} forward_id: {call.id}{info}",
            call.location,
            console.tensor_table(call.op, shown, pointers),
            console.table([*console.COMPARE_COLUMNS, *console.VERDICT_COLUMNS], [_cells(r) for r in judgement.rows]),
            *[f"{r.name}: {r.reason}" for r in judgement.rows if r.verdict == WRONG],
            "",
        )


_helped: Final[weakref.WeakSet[OpAutoCompare]] = weakref.WeakSet()


@atexit.register
def _wait_for_helpers() -> None:
    """A run that ends without `stop` still tells what its processes are working on."""
    for tool in list(_helped):
        pool = tool._pool
        if pool is not None and tool._pid == os.getpid():
            tool.wait()
            pool.close()


def _chooser(mode: str | None, budget: str | float | None) -> Chooser:
    if mode is None:
        mode = settings.choice("OP_AUTOCOMPARE_MODE", MODES)
    elif mode not in MODES:
        raise settings.SettingsError(f"OpAutoCompare(mode={mode!r}): choose one of {', '.join(MODES)}")
    variable = "OpAutoCompare(budget=...)"
    if budget is None:
        variable, budget = "OP_AUTOCOMPARE_BUDGET", settings.read("OP_AUTOCOMPARE_BUDGET") or None
    return Chooser(mode, None if budget is None else parse_budget(str(budget), variable))


def _ranks_here() -> int:
    """Processes of the same training on this machine, which share its cores."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else 1


def _view_kind(job: _Job) -> Hashable:
    """The same for calls with the same arguments, apart from values."""
    call = job.call
    return (call.op, call.inputs.number, job.autocast, job.grad_enabled)


def _passed(sent: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> Places | None:
    return places([g for g in sent if g is not None], [g for g in found if g is not None])


def _looks_of(sent: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> Hashable:
    return (
        len(sent),
        *[None if g is None else (g.shape, g.stride(), g.dtype, g.requires_grad) for g in (*sent, *found)],
    )


def _cells(row: Row) -> list[str]:
    return [
        f"{row.name:<30}",
        str(row.allclose),
        console.number(row.max_abs_diff),
        console.number(row.max_relative_diff),
        console.number(row.atol),
        console.number(row.rtol),
        row.error_info,
        "" if row.cosine != row.cosine else f"{row.cosine:.6f}",
        f"{row.max_ulp:.3g}",
        row.verdict,
    ]


def _row(stored: Sequence[Any]) -> Row:
    """A row again, from its columns in the records, where NaN is nothing."""
    name, allclose, apart, relative, atol, rtol, info, cosine, ulp, found, reason = stored
    apart, relative, cosine, ulp = [math.nan if v is None else v for v in (apart, relative, cosine, ulp)]
    return Row(name, bool(allclose), apart, relative, atol, rtol, info, cosine, ulp, found, reason)
