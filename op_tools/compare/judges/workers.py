"""The worker processes as a judge: in a run that lasts they do the golden runs, and answer where nothing is wrong."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch

from ... import lifecycle, settings
from ...call import facts
from ...call.own_operators import Origin, origin_of
from ...copies.operands import Operands
from ...judge import references
from ...judge.verdict import NOT_COMPARABLE, RIGHT, WEAK, Judgement, Row
from .. import cores, pool
from ..batches import Batches
from ..forkserver import ForkServer
from ..ladder import BACKWARD, FORWARD, PENDING, ComparedCall, Job, Judge, Setup
from ..pool import Pool
from ..process import Lease
from ..trees import needs_gradients, sendable
from ..worker import Answer, Message, Options

_MIN_CORES: Final = 8
_MAX_PROCESSES: Final = 12
_WORTH_STARTING: Final = 4.0  # seconds that a run lasts, and as many of comparing
_WORTH_STARTING_SAMPLED: Final = 24  # parts of large calls: who trains a large model waits for more than a few
_MAX_HELD: Final = 1 << 26  # bytes of small calls that wait for the processes to start
_MAX_OPERATORS: Final = 1000  # of the user's own
_LOST: Final = Judgement(NOT_COMPARABLE, "the worker holding its arguments exited")


class Workers(Judge):
    """Sends jobs to worker processes; what they do not settle as right comes back, and goes on down the ladder."""

    order = 40

    @classmethod
    def make(cls, setup: Setup) -> Workers | None:
        """None where calls are shown or sampled, where the device judges, or with too few cores."""
        given = settings.number("OP_AUTOCOMPARE_PROCESSES", -1.0)
        if setup.at_once or setup.shown or setup.sampled or setup.precheck == "device" or not pool.available():
            return None
        if given >= 0:
            return cls(setup, int(given), 0.0) if given >= 1 else None
        here = cores.available() // _ranks_here()
        return cls(setup, min(_MAX_PROCESSES, here - 4), _WORTH_STARTING) if here >= _MIN_CORES else None

    def __init__(self, setup: Setup, processes: int, patience: float) -> None:
        super().__init__(setup)
        self.processes, self._patience = processes, patience
        self.pool: Pool | None = None
        self._server: ForkServer | None = None  # until there is a pool
        self._lock = threading.Lock()
        self._busy, self._began = 0.0, time.monotonic()  # seconds of comparing in this process, and since when
        self._device: torch.device | None = None
        self._sampled = 0  # parts of large calls before there were workers
        self._batches = Batches(self._lease, self.setup.again, self.setup.report, self._origin)
        self._origins: dict[tuple[str, Any], Origin | None] = {}  # of operators of the user's own
        self._held: list[Job] = []  # until the processes have started: threads here compete with the run for the GIL
        self._held_bytes = 0

    def expects(self, call: ComparedCall) -> bool:
        if self._device is None:
            self._device = call.live.device
            if self._patience:
                self._prepare()
            else:
                self._start()
        return False

    def _prepare(self) -> None:
        """Let the process start that others are forked from: it needs seconds for its imports, and a core."""
        with contextlib.suppress(OSError), self._lock:  # what is wrong is said when processes are needed
            if self.pool is None and self._server is None:
                self._server = ForkServer()
                _active.add(self)

    def _start(self) -> None:
        setup = self.setup
        options = Options(setup.rules, setup.queue_bytes // 4 // self.processes, setup.max_bytes, setup.max_seconds)
        with self._lock:
            if self.pool is not None or not self.processes:
                return
            try:
                device = self._device or torch.device("cpu")
                server, self._server = self._server, None
                self.pool = Pool(self.processes, options, device, self._answered, self._started, server)
                _active.add(self)
            except (OSError, ValueError, RuntimeError, pickle.PicklingError) as error:
                self.processes = 0  # no memory, files or threads left
                setup.report(f"no worker processes: {type(error).__name__}: {error}")

    def admit(self, job: Job) -> None:
        if self.pool is not None and (job.phase == FORWARD or job.whole is not None) and self._may_send(job):
            assert isinstance(job.call, ComparedCall)
            lease = self._lease(self.pool, job)
            if lease is not None:
                job.call.notes[self] = lease

    def _lease(self, pool: Pool, job: Job, may_wait: bool = False) -> Lease | None:
        return pool.lease(job.nbytes, (job.call.op, job.call.numbers, job.phase), may_wait)

    def claims(self, parts: Sequence[Job]) -> bool:
        if not self.processes or not all(map(self._may_send, parts)):
            return False
        if self.pool is None:
            self._sampled += len(parts)
            if self._sampled >= _WORTH_STARTING_SAMPLED:
                self._start()
        return self.pool is not None and self._batches.reserve(parts)

    def take_parts(self, parts: Sequence[Job]) -> None:
        self._batches.add(parts)

    def _started(self) -> None:
        """The first processes have started, or none will."""
        if self.pool is not None and self.pool.is_ready():
            self._batches.start(self.pool)
        else:
            self.processes = 0
            self._batches.drain()
        self._let_go_on()

    def _hold(self, job: Job) -> bool:
        """Whether a job waits for the processes, which are about to start."""
        pool = self.pool
        if pool is None or pool.is_ready() or job.whole is not None or job.local or not self._may_send(job):
            return False
        with self._lock:
            if not self.processes or self._held_bytes + job.nbytes > _MAX_HELD:
                return False
            self._held.append(job)
            self._held_bytes += job.nbytes
        if pool.is_ready():  # meanwhile
            self._let_go_on()
        return True

    def _let_go_on(self) -> None:
        """Send on what has waited, forwards before their backwards."""
        with self._lock:
            held, self._held = self._held, []
            self._held_bytes = _MAX_HELD  # no more is held: they are there, or the run ends
        for job in held:
            self.admit(job)
            self.setup.again(job)

    def _may_send(self, job: Job) -> bool:
        """Whether a worker can compare a call and its backward: an operator that it has or gets, on plain tensors."""
        call, before, after = job.call, job.before, job.snapshot
        if job.places is not None or before is None or after is None or job.nbytes > pool.max_bytes():
            return False
        if call.traits.random is not False and (call.traits.facts.law or getattr(call, "drawn", None) is not None):
            return False  # random numbers of a run are judged together, and a backward needs those of its forward
        stock = self.setup.is_stock(call.op, call.function)
        if facts.has_free_vectors(call.op) or not (stock or self._origin(job) is not None):
            return False
        return sendable(before) and sendable(after) and torch.get_default_dtype() == torch.float32

    def _origin(self, job: Job) -> Origin | None:
        """How a worker gets an operator of the user's own; None for one of PyTorch's, or where it cannot."""
        op, function = key = job.call.op, job.call.function
        if key not in self._origins and (self.setup.is_stock(op, function) or len(self._origins) >= _MAX_OPERATORS):
            return None
        if key not in self._origins:
            usual = references.named(function, op) is None and self.setup.rules.casts.of(op) is None
            self._origins[key] = None
            with contextlib.suppress(Exception):  # modules that raise when they are looked at; another PyTorch
                self._origins[key] = origin_of(function) if usual else None
        return self._origins[key]

    def _give_up(self, job: Job) -> None:
        """A worker does not get an operator, or ended over it: from now on such calls are judged here."""
        key = job.call.op, job.call.function
        if key in self._origins:
            self._origins[key] = None

    def settle(self, job: Job) -> Judgement | None:
        call = job.call
        assert isinstance(call, ComparedCall)
        lease: Lease | None = call.notes.get(self)
        if lease is None and self._hold(job):
            return PENDING
        if lease is not None and not job.local:
            try:
                if self._send(job, call, lease):
                    return PENDING
            finally:
                lease.tried.set()
        return _LOST if job.before is None else None

    def _send(self, job: Job, call: ComparedCall, lease: Lease) -> bool:
        assert self.pool is not None
        assert job.snapshot is not None
        assert job.fetcher is not None
        backward, keep = job.phase == BACKWARD and job.whole is None, lease.memory
        if backward:
            lease.tried.wait()
            if not (lease.there and sendable(job.snapshot)):
                return False
            parts = [job.snapshot]
        else:
            assert job.before is not None
            parts = [job.before, job.snapshot]
            layouts = [part.layout for part in parts if part.layout is not None]
            if job.whole is not None or not (call.region.grad_enabled and any(map(needs_gradients, layouts))):
                keep = 0
        message = Message(job.number, job.phase, call.wire(), job.nbytes, keep, unasked=job.unasked)
        message = message._replace(origin=self._origin(job))
        sent = self.pool.send(lease, message, parts, job.fetcher, job)
        if sent and not backward:
            lease.there = True
            call.before = None  # no device memory is held for a backward to come
        return sent

    def _answered(self, job: Job, answer: Answer | None) -> None:
        """A worker has answered for a job, or has exited with it."""
        if answer is not None and answer.rows is not None:
            rows = tuple(map(Row._make, answer.rows))
            weak = next((row for row in rows if row.verdict == WEAK), None)
            job.judgement = Judgement(RIGHT, "", rows) if weak is None else Judgement(WEAK, weak.reason, rows)
            self.setup.finish(job)
            return
        job.local = True
        if answer is None or not answer.known:
            self._give_up(job)
        if answer is not None:
            if answer.failure:
                self.setup.report(f"a worker process failed on {job.call.op}: {answer.failure}")
            if answer.before is not None:
                flats = [torch.frombuffer(bytearray(b or b"\0"), dtype=torch.uint8)[: len(b)] for b in answer.before]
                job.before = Operands(answer.tree, tuple(flats), None, sum([len(b) for b in answer.before]))
        self.setup.again(job)

    def leave(self, job: Job, seconds: float) -> None:
        lease: Any = getattr(job.call, "notes", {}).get(self)
        if lease is not None:
            lease.tried.set()
        if self.pool is not None or not self.processes:
            return
        with self._lock:
            self._busy += seconds
            due = self._busy > self._patience and time.monotonic() - self._began > self._patience
        if due:  # workers take some seconds to start, and a core each
            self._start()

    def drain(self) -> bool:
        if self.pool is None:
            return False
        self._let_go_on()
        self._batches.drain()
        self.pool.drain()
        return True

    def close(self) -> None:
        self._batches.close()
        if self.pool is not None:
            self.pool.close()
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.end()
        _active.discard(self)

    def release(self) -> None:
        if self.pool is not None:
            self.pool.let_go()
        self.pool = None


_active: Final[weakref.WeakSet[Workers]] = weakref.WeakSet()


def _finish_at_exit() -> None:
    """A run that exits without `stop` still tells what its workers are comparing."""
    for workers in list(_active):
        workers.setup.wait()
        workers.close()


lifecycle.at_exit(lifecycle.Exit.WORKERS, _finish_at_exit)


def _forget_in_child() -> None:
    """A forked child must not keep the process alive that workers are forked from."""
    for workers in list(_active):
        if workers._server is not None:
            workers._server.forget()
    _active.clear()


lifecycle.after_fork_in_child(_forget_in_child)


def _ranks_here() -> int:
    """Processes of the same training on this machine, which share its cores."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else 1
