"""Replays many captures: in worker processes, which a hostile one may crash, or in this process; results in order."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import torch

from .. import lifecycle
from ..call.devices import accelerator_type, module_of
from ..files.captures import nbytes_of
from ..judge import verdict
from ..settings import SettingsError
from . import guard
from .check import Check, replay
from .outcome import ERROR, Options, Outcome, op_from


def replay_all(
    folders: Sequence[Path],
    options: Options,
    jobs: int | None = None,
    ready: Callable[[str], None] = lambda name: None,
) -> Iterator[Outcome]:
    """Replay captures in order, in so many worker processes. `ready` gets the name of their device.

    By default in one, since a hostile capture may crash whoever runs it, and in this process if `options.trusted`
    says that the captures are one's own; `jobs=0` is this process in any case.

    >>> [outcome.status for outcome in replay_all(folders, Options(acc_check=True), jobs=4)]  # doctest: +SKIP
    """
    if jobs is None:
        jobs = 0 if options.trusted else 1
    if jobs < 1:
        ready(activate(options.device))
        check_device(options.device)
        yield from _in_order(folders, options)
    elif folders:
        yield from _Workers(folders, options, min(jobs, len(folders)), ready).outcomes()


# --- in one process ------------------------------------------------------------------------------------------


_MAX_JUDGES: Final = 4  # more of them wait for the GIL
_LARGE: Final = 1 << 28  # bytes of a capture that is judged before the next one is read


def _judges(options: Options) -> int:
    """How many captures are judged while the next one runs; none while times are measured."""
    return min(_MAX_JUDGES, max(1, (os.cpu_count() or 1) - 1)) if options.acc_check and not options.time else 0


def _in_order(folders: Iterable[Path | None], options: Options) -> Iterator[Outcome]:
    """Outcomes in order; None among the folders asks for all that are under way."""
    judges = _judges(options)
    if not judges:
        yield from (replay(folder, options) for folder in folders if folder is not None)
        return
    rules = verdict.Rules.from_environment()
    waiting: deque[Future[Outcome]] = deque()

    def done(most: int) -> Iterator[Outcome]:
        while len(waiting) > most:
            yield waiting[0].result()
            waiting.popleft()

    with ThreadPoolExecutor(judges, "op_tools-judge") as pool:
        try:
            for folder in folders:
                yield from done(0 if folder is None or nbytes_of(folder) > _LARGE else judges)
                if folder is not None:
                    check = Check(folder, options, rules)
                    check.run()
                    waiting.append(pool.submit(check.conclude))
        except KeyboardInterrupt:  # what has run on the device is not lost
            yield from done(0)
            raise
        yield from done(0)


# --- in processes --------------------------------------------------------------------------------------------


class _Workers:
    """Worker processes that replay captures, several of which are under way in each.

    When a worker dies, or says nothing for longer than a capture may take, those that were under way in it are replayed
    alone, so that the one that did it is known.
    """

    def __init__(self, folders: Sequence[Path], options: Options, jobs: int, ready: Callable[[str], None]) -> None:
        self._ready: Callable[[str], None] | None = ready
        self._folders, self._options, self._jobs = folders, options, jobs
        self._waiting = deque(range(len(folders)))
        self._alone: deque[int] = deque()
        self._found: dict[int, Outcome] = {}
        self._workers: list[_Worker] = []

    def outcomes(self) -> Iterator[Outcome]:
        """All of them, in order."""
        try:
            for number in range(len(self._folders)):
                while number not in self._found:
                    self._hand_out()
                    self._hear()
                yield self._found.pop(number)
        finally:
            for worker in self._workers:
                worker.end()

    def _hand_out(self) -> None:
        while len(self._workers) < self._jobs and len(self._workers) < len(self._waiting) + len(self._alone):
            self._workers.append(_Worker(self._options, self._jobs))
        for worker in self._workers:
            if self._alone and not worker.busy:
                worker.give(self._alone.popleft(), self._folders, alone=True)
            while self._waiting and not self._alone and worker.takes_more:
                worker.give(self._waiting.popleft(), self._folders)
            if not self._waiting or self._alone:
                worker.finish()

    def _hear(self) -> None:
        """Wait until a worker answers, dies or has had its time."""
        until = min(worker.deadline for worker in self._workers)
        ready = wait([w.connection for w in self._workers], max(0.0, min(60.0, until - time.monotonic())))
        for worker in list(self._workers):
            try:
                if worker.connection in ready:
                    self._take(worker)
                elif worker.deadline < time.monotonic():
                    limit = self._options.time_limit
                    self._blame(worker, f"it took longer than {limit:g} s, the time limit of a capture (--time-limit)")
            except pickle.UnpicklingError as error:
                self._blame(worker, f"the process that ran it was taken over ({error})")
            except (EOFError, OSError):
                worker.process.join(timeout=5)
                self._blame(worker, f"the process that ran it died ({_death(worker.process.exitcode)})")

    def _take(self, worker: _Worker) -> None:
        found = worker.answer()
        if isinstance(found, str):
            name, _, problem = found.partition("\n")
            if problem:
                raise SettingsError(problem)
            if self._ready is not None:
                self._ready(name)
                self._ready = None
            return
        number, outcome = found
        if outcome.out_of_memory and worker.crowded:  # others took some of it
            self._alone.append(number)
        else:
            self._found[number] = outcome
        if outcome.device_is_lost:  # whatever ran on it meanwhile, or will, fails
            self._workers.remove(worker)
            worker.end()
            self._alone.extend(worker.busy)

    def _blame(self, worker: _Worker, reason: str) -> None:
        self._workers.remove(worker)
        worker.end()
        if not worker.started:
            raise RuntimeError(f"a worker process could not start: {reason}")
        if len(worker.busy) == 1:
            number = worker.busy[0]
            folder = self._folders[number]
            self._found[number] = Outcome(folder, op_from(folder), ERROR, reason)
        else:
            self._alone.extend(worker.busy)


class _Worker:
    """One process; `busy` are the numbers of the captures that are under way in it, the oldest first."""

    def __init__(self, options: Options, jobs: int) -> None:
        context: Any = multiprocessing.get_context("fork" if _can_fork() else "spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, options, jobs), daemon=True)
        with _limited_threads(max(1, (os.cpu_count() or 1) // jobs)):
            self.process.start()
        theirs.close()
        self._limit = options.time_limit or float("inf")
        self._depth = _judges(options) + 2
        self.started = self.crowded = self._asked = False
        self.deadline = time.monotonic() + _START_SECONDS
        self.busy: deque[int] = deque()

    @property
    def takes_more(self) -> bool:
        """Whether it should have another capture."""
        return len(self.busy) < self._depth and (self.crowded or not self.busy)

    def give(self, number: int, folders: Sequence[Path], alone: bool = False) -> None:
        if self.started and not self.busy:
            self.deadline = time.monotonic() + self._limit
        self.crowded, self._asked = not alone, False
        self.busy.append(number)
        with contextlib.suppress(OSError):  # it has died, which `answer` finds
            self.connection.send(folders[number])

    def finish(self) -> None:
        """Ask for the outcomes of all captures that are under way."""
        if self.busy and not self._asked:
            self._asked = True
            with contextlib.suppress(OSError):
                self.connection.send(None)

    def answer(self) -> str | tuple[int, Outcome]:
        """The next outcome and its number; first of all the name of the device, and what is wrong with it."""
        found = _Answer(io.BytesIO(self.connection.recv_bytes())).load()
        self.deadline = time.monotonic() + self._limit
        if not self.started:
            self.started = True
            return str(found)
        if not isinstance(found, Outcome):
            raise EOFError
        number = self.busy.popleft()
        if not self.busy:
            self.deadline = float("inf")
        return number, found

    def end(self) -> None:
        """End the process now: nobody waits for what it does."""
        self.process.kill()
        self.process.join(timeout=5)
        self.connection.close()


_START_SECONDS: Final = 300.0  # in which a worker must have started
_SAFE_MODULES: Final = ("op_tools.", "pathlib", "_codecs")
_SAFE_NAMES: Final = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"),  # never called: dtypes are pickled by name
}


class _Answer(pickle.Unpickler):
    """Reads what a worker sends. A capture may have taken the worker over: only plain data is accepted from it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "device"):
            return _device
        if module.startswith(_SAFE_MODULES) or (module, name) in _SAFE_NAMES:
            found = super().find_class(module, name)
            if isinstance(found, type) or module == "torch.serialization":
                return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"a worker sent {module}.{name}")


def _device(*parts: Any) -> Any:
    """The device of a tensor that was described; its name where only the workers know such a device."""
    try:
        return torch.device(*parts)
    except RuntimeError:
        return ":".join(map(str, parts))


def _can_fork() -> bool:
    """Whether a fork, which is quick, is safe: no threads, not even PyTorch's own, and no device in use."""
    kind = accelerator_type()
    is_initialized = getattr(module_of(kind), "is_initialized", None)
    if kind != "cpu" and (is_initialized is None or is_initialized()):
        return False
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


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


def _work(connection: Connection, options: Options, jobs: int) -> None:
    """The loop of a worker: captures in, outcomes out, until the pipe closes."""
    lifecycle.leave_signals_to_parent()
    torch.set_num_threads(min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) // jobs)))
    try:
        name = activate(options.device)
        check_device(options.device)
    except SettingsError as error:
        connection.send(f"\n{error}")
        return
    guard.confine(options, jobs)
    connection.send(name)

    def given() -> Iterator[Path | None]:
        with contextlib.suppress(EOFError, OSError):
            while True:
                yield connection.recv()

    for outcome in _in_order(given(), options):
        connection.send(outcome)


def activate(device: str | None) -> str:
    """Import ditorch, if installed, to activate this machine's device; returns its name (`activate(None)`)."""
    if device == "cpu":
        return ""
    try:
        import ditorch
    except ImportError:
        return ""
    return str(ditorch.framework)


def check_device(name: str | None) -> None:
    """A device that is not there is one error, not one per capture (`check_device("cpu")`)."""
    try:
        if name is not None:
            torch.empty(1, device=torch.device(name))
    except (RuntimeError, AssertionError, ImportError, AttributeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SettingsError(f"--device {name}: not usable on this machine ({first})") from None
