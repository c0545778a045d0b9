"""Replays many captures, in this process (device and judges overlap) or in worker processes; results in order."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

from .. import lifecycle
from ..judge import verdict
from .check import Check, replay
from .outcome import ERROR, Options, Outcome, op_from


def replay_all(folders: Sequence[Path], options: Options, jobs: int = 0) -> Iterator[Outcome]:
    """Replay captures in order; with `jobs`, in that many worker processes.

    >>> [outcome.status for outcome in replay_all(folders, Options(acc_check=True), jobs=4)]  # doctest: +SKIP
    """
    if jobs < 1:
        overlap = options.acc_check and not options.time
        yield from _overlapped(folders, options) if overlap else (replay(folder, options) for folder in folders)
        return
    with contextlib.closing(_Pool(folders, options, min(jobs, len(folders)))) as pool:
        yield from pool.outcomes()


# --- in this process -----------------------------------------------------------------------------------------


_MOST_JUDGES: Final = 4  # more of them wait for the GIL
_LARGE: Final = 1 << 28  # bytes of a capture that is judged before the next one is read


def _overlapped(folders: Sequence[Path], options: Options) -> Iterator[Outcome]:
    """While captures are judged, the next one runs on the device."""
    rules = verdict.Rules.from_environment()
    judges = min(_MOST_JUDGES, max(1, (os.cpu_count() or 1) - 1))
    waiting: deque[Future[Outcome]] = deque()

    def done(most: int) -> Iterator[Outcome]:
        while len(waiting) > most:
            yield waiting[0].result()
            waiting.popleft()

    with ThreadPoolExecutor(judges, "op_tools-judge") as pool:
        try:
            for folder in folders:
                yield from done(0 if _nbytes(folder) > _LARGE else judges)
                check = Check(folder, options, rules)
                check.run()
                waiting.append(pool.submit(check.conclude))
        except KeyboardInterrupt:  # what has run on the device is not lost
            yield from done(0)
            raise
        yield from done(0)


def _nbytes(folder: Path) -> int:
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(".pth"))
    except OSError:
        return 0


# --- in processes --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Worker:
    process: Any
    connection: Connection
    number: int | None = None  # of the capture it is working on


class _Pool:
    """Worker processes with one capture each at a time, so that a crash can be blamed on a capture."""

    def __init__(self, folders: Sequence[Path], options: Options, jobs: int) -> None:
        self._folders, self._options = folders, options
        self._threads = max(1, (os.cpu_count() or 1) // jobs)
        self._context = multiprocessing.get_context("spawn")
        self._next = 0
        self._done: dict[int, Outcome] = {}
        self._workers = [self._start() for _ in range(jobs)]

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        with _limited_threads(self._threads):
            process = self._context.Process(target=_work, args=(theirs, self._options), daemon=True)
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def outcomes(self) -> Iterator[Outcome]:
        for number in range(len(self._folders)):
            while number not in self._done:
                self._step()
            yield self._done.pop(number)

    def _step(self) -> None:
        for worker in list(self._workers):
            if worker.number is None and self._next < len(self._folders):
                self._give(worker)
        ready = wait([w.connection for w in self._workers])
        for worker in [w for w in self._workers if w.connection in ready]:
            self._take(worker)

    def _give(self, worker: _Worker) -> None:
        worker.number, self._next = self._next, self._next + 1
        try:
            worker.connection.send(self._folders[worker.number])
        except OSError:  # it died meanwhile; reading from its pipe will tell
            pass

    def _take(self, worker: _Worker) -> None:
        try:
            outcome = worker.connection.recv()
        except (EOFError, OSError):
            self._bury(worker)
            return
        assert worker.number is not None
        self._done[worker.number] = outcome
        worker.number = None

    def _bury(self, worker: _Worker) -> None:
        worker.process.join()
        self._workers.remove(worker)
        worker.connection.close()
        if worker.number is not None:
            reason = f"the process that ran it died ({_death(worker.process.exitcode)})"
            folder = self._folders[worker.number]
            self._done[worker.number] = Outcome(folder, op_from(folder), ERROR, reason)
        if self._next < len(self._folders):
            self._workers.append(self._start())

    def close(self) -> None:
        """Stop all workers, busy or not (`pool.close()`)."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            if worker.number is None:
                worker.process.join(timeout=5)
            if worker.process.is_alive():
                worker.process.terminate()
                worker.process.join(timeout=5)


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


@contextlib.contextmanager
def _limited_threads(threads: int) -> Iterator[None]:
    """Limit the threads of child processes through the environment; never above what the user set."""
    before = os.environ.get("OMP_NUM_THREADS")
    chosen = min(threads, int(before)) if before and before.isdecimal() else threads
    os.environ["OMP_NUM_THREADS"] = str(chosen)
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _work(connection: Connection, options: Options) -> None:
    """The loop of a worker: captures in, outcomes out, until the pipe closes."""
    lifecycle.ignore_ctrl_c()
    activate(options.device)
    with contextlib.suppress(EOFError, OSError):
        while True:
            folder = connection.recv()
            connection.send(replay(folder, options))


def activate(device: str | None) -> str:
    """Import ditorch, if installed, to activate this machine's device; returns its name (`activate(None)`)."""
    if device == "cpu":
        return ""
    try:
        import ditorch
    except ImportError:
        return ""
    return str(ditorch.framework)
