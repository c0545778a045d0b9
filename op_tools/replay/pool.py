"""Replays many captures, in this process (device and judges overlap) or in worker processes; results in order."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from .. import lifecycle
from ..files.captures import nbytes_of
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
    yield from _in_processes(folders, options, min(jobs, len(folders)))


# --- in this process -----------------------------------------------------------------------------------------


_MAX_JUDGES: Final = 4  # more of them wait for the GIL
_LARGE: Final = 1 << 28  # bytes of a capture that is judged before the next one is read


def _overlapped(folders: Sequence[Path], options: Options) -> Iterator[Outcome]:
    """While captures are judged, the next one runs on the device."""
    rules = verdict.Rules.from_environment()
    judges = min(_MAX_JUDGES, max(1, (os.cpu_count() or 1) - 1))
    waiting: deque[Future[Outcome]] = deque()

    def done(most: int) -> Iterator[Outcome]:
        while len(waiting) > most:
            yield waiting[0].result()
            waiting.popleft()

    with ThreadPoolExecutor(judges, "op_tools-judge") as pool:
        try:
            for folder in folders:
                yield from done(0 if nbytes_of(folder) > _LARGE else judges)
                check = Check(folder, options, rules)
                check.run()
                waiting.append(pool.submit(check.conclude))
        except KeyboardInterrupt:  # what has run on the device is not lost
            yield from done(0)
            raise
        yield from done(0)


# --- in processes --------------------------------------------------------------------------------------------


def _in_processes(folders: Sequence[Path], options: Options, jobs: int) -> Iterator[Outcome]:
    """In worker processes, each with a thread here that gives it one capture at a time."""
    cores = max(1, (os.cpu_count() or 1) // jobs)
    workers: list[_Worker] = []
    idle: list[_Worker] = []
    starting = threading.Lock()

    def replay_one(folder: Path) -> Outcome:
        with starting:
            if not idle:
                with _limited_threads(cores):
                    idle.append(_Worker(options))
                workers.append(idle[-1])
            worker = idle.pop()
        outcome = worker.replay(folder)
        if worker.process.is_alive():
            idle.append(worker)
        return outcome

    threads = ThreadPoolExecutor(jobs, "op_tools-replay")
    try:
        yield from threads.map(replay_one, folders)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        with starting:
            for worker in workers:
                if worker not in idle:
                    worker.process.terminate()  # which ends the wait of its thread
        threads.shutdown()
        for worker in workers:
            worker.close()


class _Worker:
    """A process that replays one capture at a time, so that a crash can be blamed on a capture."""

    def __init__(self, options: Options) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, options), daemon=True)
        self.process.start()
        theirs.close()

    def replay(self, folder: Path) -> Outcome:
        try:
            self._connection.send(folder)
            outcome: Outcome = self._connection.recv()
            return outcome
        except (EOFError, OSError):
            self.process.join()
            reason = f"the process that ran it died ({_death(self.process.exitcode)})"
            return Outcome(folder, op_from(folder), ERROR, reason)

    def close(self) -> None:
        self._connection.close()
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(timeout=5)


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
