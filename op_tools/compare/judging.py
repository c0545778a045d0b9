"""Leads jobs through the ladder: live judges on the run's thread, the others on worker threads, then the teller."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from .. import settings
from ..call.devices import quiet
from ..copies.operands import Fetcher
from ..copies.queue import FreeMemory, Writer, within_free_memory
from ..judge.verdict import Judgement, Rules
from . import cores
from .choose import Chooser
from .judges.host import Host
from .ladder import BACKWARD, PENDING, ComparedCall, Job, Judge, Setup, make_ladder
from .snapshots import Snapshots
from .teller import Reporter, Teller

_MAX_WAITING: Final = 2_000  # jobs
_MAX_AGE: Final = 0.1  # seconds that a job waits before the run does: verdicts that are not there are lost at a kill
_MAX_CORES: Final = 4  # for one comparison, unless it is large
_part_numbers: Final = itertools.count()


class ComparingTool(Reporter, Protocol):
    """What judging needs of its tool."""

    only: Callable[..., bool] | None

    def slowed(self, part: str, why: str) -> None:
        """Report that a fast path is broken."""


class Judging:
    """The judges of one run, its queue and worker threads, and the teller of what comes out.

    >>> Judging(tool, Chooser(), "cpu", Snapshots(print)).submit(job, compared)  # doctest: +SKIP
    """

    def __init__(self, tool: ComparingTool, chooser: Chooser, look: str, snapshots: Snapshots) -> None:
        self._chooser, self._snapshots = chooser, snapshots
        self.chooses = chooser.chooses
        queue_bytes = int(settings.number("OP_AUTOCOMPARE_QUEUE_BYTES", within_free_memory(2**30)))
        threads = int(settings.number("OP_AUTOCOMPARE_THREADS", max(1, min(4, cores.available() - 2))))
        self._at_once = tool.only is not None or threads < 1
        self._threads = max(1, threads)
        # more threads would compete for the GIL, more cores for each do not
        self._cores = max(1, min(_MAX_CORES, (cores.available() - 1) // self._threads))
        # how much of a worker thread's time the run itself loses: all of it where there is no core to spare
        self._share = 1.0 if cores.available() <= threads + 1 else 0.5
        # within a budget the chooser sees to it that the run waits for nothing
        max_age = 0.0 if self.chooses else _MAX_AGE
        self._queue = Writer(queue_bytes, self._threads, max_jobs=_MAX_WAITING, max_age=max_age)
        self._memory: FreeMemory | None = FreeMemory(queue_bytes)
        self._workers = threading.local()
        rules = Rules.from_environment()
        self.teller = Teller(tool, functools.partial(self._queue.submit, 0), rules.standard)
        setup = Setup(
            rules,
            tool.view.full,
            self._at_once,
            self.chooses,
            look,
            self._threads,
            queue_bytes,
            int(settings.number("OP_AUTOCOMPARE_MAX_BYTES")),
            settings.number("OP_AUTOCOMPARE_MAX_SECONDS"),
            finish=self._tell,
            again=lambda job: self._queue.submit(0, functools.partial(self._work, job)),
            wait=self.wait,
            report=lambda message: tool.slowed(message.split(":")[0], message),
            skip=self.teller.skip,
        )
        self.ladder = make_ladder(setup)
        self._live = tuple([judge for judge in self.ladder if judge.live])
        self._background = tuple([judge for judge in self.ladder if not judge.live])
        settling, self.expecting, self._admitting, self._leaving, self._learning, self._claiming = [
            tuple([judge for judge in self.ladder if getattr(type(judge), name) is not getattr(Judge, name)])
            for name in ("settle", "expects", "admit", "leave", "learn", "claims")
        ]
        self._settling = tuple([judge for judge in settling if not judge.live])
        self.judge(Host).snapshots = snapshots

    def judge(self, kind: type[Judge]) -> Any:
        """The judge of that class, or None (`judging.judge(Workers)`)."""
        return next((judge for judge in self.ladder if isinstance(judge, kind)), None)

    # -- on the run's thread --------------------------------------------------------------------------

    def settle_live(self, job: Job) -> bool:
        """Whether a judge settles the job now, from the run's own tensors (`judging.settle_live(job)`)."""
        kind = (job.call.op, job.call.numbers[0])
        for judge in self._live:
            found = None if kind in judge.never_settles else judge.settle(job)
            if found is PENDING:
                self._submit_parts(job)
                return True
            if found is not None:
                job.judgement, job.number = found, self.teller.number()
                job.grads = None  # it may wait for its turn to be told
                self.teller.tell(job, at_once=False)
                return True
        return False

    def has_arguments(self, compared: ComparedCall) -> bool:
        """Whether there is a snapshot of the arguments, or one can still be had (`judging.has_arguments(compared)`)."""
        for judge in self._live if compared.before is None else ():
            found = judge.arguments(compared)
            if isinstance(found, str):
                self.teller.skip(compared.live, found, BACKWARD)
                return False
            if found is not None:
                compared.before = found
        return compared.before is not None or any(judge in compared.notes for judge in self._background)

    def submit(self, job: Job, compared: ComparedCall) -> None:
        """Queue a job with its snapshot (`judging.submit(job, compared)`)."""
        job.before = compared.before
        assert job.snapshot is not None
        job.nbytes = size = (job.before.nbytes if job.before is not None else 0) + job.snapshot.nbytes
        if compared.drawn is not None and compared.drawn.staged is not None:
            size += compared.drawn.staged.nbytes
        self._queue.reserve(size)  # where a run waits: Ctrl-C comes before the job has a number
        for judge in self._admitting:
            judge.admit(job)
        job.number = self.teller.number()
        self._queue.submit(size, functools.partial(self._work, job))
        if self._at_once:
            job.done.wait()

    def _submit_parts(self, job: Job) -> None:
        """Queue the parts of a job, which is told when the last of them is judged."""
        for part in job.parts:
            part.number = -1 - next(_part_numbers)
        for judge in self._claiming:
            if not self._at_once and judge.claims(job.parts):
                job.number = self.teller.number()
                judge.take_parts(job.parts)
                return
        self._queue.reserve(sum([part.nbytes for part in job.parts]))
        for part in job.parts:
            for judge in self._admitting:
                judge.admit(part)
        job.number = self.teller.number()
        for part in job.parts:
            self._queue.submit(part.nbytes, functools.partial(self._work, part))
        if self._at_once:
            job.done.wait()

    def in_background(self, nbytes: int, work: Callable[[Fetcher], None]) -> None:
        """Have a worker thread do something with so many bytes of copies."""
        self._queue.reserve(nbytes)
        self._queue.submit(nbytes, lambda: work(self._fetcher()))

    # -- on the worker threads ------------------------------------------------------------------------

    def _work(self, job: Job) -> None:
        started = time.perf_counter()  # not the thread's own time: where cores are short, waiting is what it costs
        found: Judgement | None = None
        try:
            if not self.teller.abandoned:
                found = self._settle(job)
        except Exception as error:
            job.error = error
        seconds = time.perf_counter() - started
        if self.chooses:
            kind = getattr(job.call, "kind", None)
            self._chooser.spend(kind, seconds * self._share)
            self._chooser.settle(kind)
        if found is PENDING:
            return
        for judge in self._leaving:
            judge.leave(job, seconds)
        job.judgement = found
        self._tell(job)

    def _tell(self, job: Job) -> None:
        """Tell a judged job; of a part, the job that it is a part of, once all of it is judged."""
        if job.whole is None:
            self.teller.tell(job)
        elif job.whole.add(job):
            self.teller.tell(job.whole.job)

    def _fetcher(self) -> Fetcher:
        """That of the worker thread that asks."""
        workers = self._workers
        if not hasattr(workers, "fetcher"):
            workers.fetcher, workers.limit = self._snapshots.fetcher(), 0
        found: Fetcher = workers.fetcher
        return found

    def _settle(self, job: Job) -> Judgement | None:
        fetcher, workers = self._fetcher(), self._workers
        # jobs are judged side by side on the cores that are there; a large one gets those of others that wait
        limit = max(self._cores, min(self._threads, self._threads * job.nbytes // self._queue.max_bytes))
        if workers.limit != limit:
            cores.limit_kernels(limit)
            workers.limit = limit
        job.fetcher = fetcher
        for judge in self._settling:
            if judge.ops is not None and job.call.op not in judge.ops:
                continue
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

    # -- at the end -----------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until every call so far is judged and told (`judging.wait()`)."""
        self._queue.drain()
        for judge in self._background:
            if judge.drain():
                self._queue.drain()  # what was handed back
        self.teller.wait()

    def leave_memory(self) -> None:
        """Hold no snapshots on the device once little memory is left there; on the run's thread, before a call."""
        if self._memory is not None and self._memory.is_low():
            self._memory = None
            self.make_room()

    def make_room(self) -> bool:
        """Judge every call so far, and hold no snapshots on the device from now on; False on a worker thread."""
        if self._queue.is_own_thread():
            self._snapshots.routes.spare_memory()
            return False
        self.wait()
        with quiet():
            self._snapshots.make_room()
        return True

    def close(self) -> None:
        """End the judges and the threads, and free what they hold (`judging.close()`)."""
        for judge in self.ladder:
            judge.close()
        self._queue.close()
        self.teller.wait()
        for judge in self.ladder:
            judge.release()
        self._snapshots.release()
