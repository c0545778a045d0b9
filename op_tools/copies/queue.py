"""Bounds on memory: a queue of background work that never grows past its limit, and budgets of bytes."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch

from .. import lifecycle

_STOP: Final = object()
_LONGEST_PAUSE: Final = 1.0  # seconds that one reservation waits for old jobs: what they wait for may be the run itself
_all: weakref.WeakSet[Writer] = weakref.WeakSet()


class Writer:
    """Threads that do jobs in the background; `reserve` waits (or refuses) while too many bytes are queued.

    With some `patience` jobs are left alone while there is room, so that a short burst is not slowed down by
    threads that compete for the GIL: work begins when the queue is half full, when the oldest job has waited
    that many seconds, or when somebody waits for the end.

    With a `max_age` whoever reserves also waits while the oldest job in the queue is older than that: the threads are
    slower than the run, and what waits is lost if the process is killed. They have work all the
    time, so that the end comes as soon as before, or nearly.

    >>> writer = Writer(max_bytes=1 << 20)
    >>> writer.reserve(10) and writer.submit(10, lambda: None)
    >>> writer.drain()
    """

    def __init__(
        self,
        max_bytes: int,
        threads: int = 1,
        drop_when_full: bool = False,
        patience: float = 0.0,
        max_jobs: int = 1 << 30,
        max_age: float = 0.0,
    ) -> None:
        self.max_bytes, self.drop_when_full, self.patience = max_bytes, drop_when_full, patience
        self.max_jobs = max_jobs  # what a job itself takes counts, too, where its tensors are small
        self.max_age = max_age
        self._busy = False
        self._awaited = 0
        self.dropped = 0
        self.waited = 0  # how often the run had to wait for room
        self.paused_seconds = 0.0  # that it waited because jobs were old
        self.peak_bytes = 0
        self.busy_seconds = 0.0  # during which at least one job was done
        self._working = 0
        self._began = 0.0
        self.last_error: Exception | None = None
        self._bytes = 0
        self._jobs: deque[Any] = deque()
        self._unfinished = 0
        self._change = threading.Condition()
        self._wanted_threads = threads
        self._threads: list[threading.Thread] = []
        _all.add(self)

    def reserve(self, nbytes: int) -> bool:
        """Claim room for a job; False when it was refused because the queue is full."""
        with self._change:
            if self.max_age and not self.drop_when_full:
                self._await_old_jobs()
            while (
                self._bytes and nbytes and self._bytes + nbytes > self.max_bytes
            ) or self._unfinished >= self.max_jobs:
                if self.drop_when_full:
                    self.dropped += 1
                    return False
                if not self._unfinished:
                    break  # all that is claimed belongs to jobs that are not queued yet, the caller's own among them
                self.waited += 1
                self._await_change(1.0)
            self._bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        return True

    def _await_old_jobs(self) -> None:
        began = now = time.monotonic()
        while (
            self._jobs
            and self._jobs[0] is not _STOP
            and now - self._jobs[0][0] > self.max_age
            and now < began + _LONGEST_PAUSE
            and threading.current_thread() not in self._threads
        ):
            self._await_change(began + _LONGEST_PAUSE - now)
            now = time.monotonic()
        self.paused_seconds += now - began

    def _await_change(self, seconds: float) -> None:
        self._awaited += 1
        try:
            self._change.notify_all()
            self._change.wait(seconds)
        finally:  # Ctrl-C may come here
            self._awaited -= 1

    def release(self, nbytes: int) -> None:
        """Give back room that was claimed and not used."""
        with self._change:
            self._bytes -= nbytes
            self._change.notify_all()

    def submit(self, nbytes: int, job: Callable[[], None]) -> None:
        """Queue a job that has claimed `nbytes`; the room is free again when it is done."""
        with self._change:
            if len(self._threads) < self._wanted_threads:
                thread = threading.Thread(target=self._work, name="op_tools-writer", daemon=True)
                thread.op_tools_internal = True  # type: ignore[attr-defined]
                self._threads.append(thread)
                thread.start()
            self._jobs.append((time.monotonic(), nbytes, job))
            self._unfinished += 1
            if len(self._jobs) == 1 or self._may_begin():  # else a thread would wake up only to wait again
                self._change.notify()

    def _work(self) -> None:
        while True:
            with self._change:
                while not self._may_begin():
                    oldest = self._jobs[0][0] if self._jobs else None
                    self._change.wait(None if oldest is None else oldest + self.patience - time.monotonic() + 1e-3)
                item = self._jobs.popleft()
                self._busy = bool(self._jobs)
                if item is _STOP:
                    return
                if not self._working:
                    self._began = time.monotonic()
                self._working += 1
            _, nbytes, job = item
            try:
                job()
            except Exception as error:  # a job that fails must not end the thread
                self.last_error = error
            finally:
                del item, job  # a finished job must not hold its tensors while the thread waits
                with self._change:
                    self._bytes -= nbytes
                    self._unfinished -= 1
                    self._working -= 1
                    if not self._working:
                        self.busy_seconds += time.monotonic() - self._began
                    self._change.notify_all()

    def _may_begin(self) -> bool:
        if not self._jobs:
            return False
        if self._busy or self._awaited or not self.patience or self._jobs[0] is _STOP:
            return True
        return 2 * self._bytes >= self.max_bytes or time.monotonic() - self._jobs[0][0] >= self.patience

    def drain(self) -> None:
        """Wait until every job is done (`writer.drain()`)."""
        with self._change:
            self._awaited += 1
            self._change.notify_all()
            while self._unfinished:
                self._change.wait(1.0)
            self._awaited -= 1

    def is_own_thread(self) -> bool:
        """Whether this thread is one that does the jobs: it cannot wait for them."""
        return threading.current_thread() in self._threads

    def shrink(self) -> bool:
        """Finish all jobs, and hold an eighth of that at most from now on; False where nothing was freed."""
        with self._change:
            held = self._bytes
            if held:
                self.max_bytes = min(self.max_bytes, max(1, held // 8))
        if self.is_own_thread():
            return False
        self.drain()
        return held > 0

    def close(self) -> None:
        """Finish all jobs and end the threads (`writer.close()`)."""
        self.drain()
        with self._change:
            for _ in self._threads:
                self._jobs.append(_STOP)
            self._change.notify_all()
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(timeout=5)


def _close_all() -> None:
    # No thread of ours may be inside PyTorch when the interpreter goes down: it would take the process with it.
    for writer in list(_all):
        writer.close()


lifecycle.at_exit(lifecycle.Exit.WRITERS, _close_all)
lifecycle.after_fork_in_child(_all.clear)  # it has none of its parent's threads, and must not wait for them


class MemoryBudget:
    """So many bytes; a reservation is returned when its holder lets go of it.

    >>> budget = MemoryBudget(10)
    >>> budget.reserve(20) is None
    True
    """

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self._lock = threading.RLock()  # a reservation may be collected while this thread holds the lock

    def reserve(self, nbytes: int) -> Reservation | None:
        """A reservation of so many bytes, or None where fewer are left."""
        with self._lock:
            if nbytes > self.left:
                return None
            self.left -= nbytes
            return Reservation(self, nbytes)

    def _return(self, nbytes: int) -> None:
        with self._lock:
            self.left += nbytes


class Reservation:
    """Some bytes of a budget, held while this object lives."""

    __slots__ = ("_budget", "_nbytes")

    def __init__(self, budget: MemoryBudget, nbytes: int) -> None:
        self._budget, self._nbytes = budget, nbytes

    def __del__(self) -> None:
        self._budget._return(self._nbytes)


def _free_memory() -> int:
    """Bytes of the current device that a training can still get, with what its allocator keeps for later."""
    free = int(torch.cuda.mem_get_info()[0])
    with contextlib.suppress(Exception):
        free += max(0, int(torch.cuda.memory_reserved()) - int(torch.cuda.memory_allocated()))
    return free


def within_free_memory(most: int) -> int:
    """So many bytes for snapshots on the device, or a quarter of what is free there if that is less."""
    with contextlib.suppress(Exception):  # a device that does not tell
        return max(1, min(most, _free_memory() // 4))
    return most


class FreeMemory:
    """Tells before a device is full: a training that gets no memory in its backward pass cannot be helped any more.

    The device is asked every few calls, and at every call once little is left.

    >>> FreeMemory(1 << 20).is_low()
    False
    """

    _PAUSES: Final = ((16, 32), (4, 8))  # so many times what is needed is free: so many calls until the next question

    def __init__(self, held: int) -> None:
        self._needed = 2 * held  # as much as snapshots may take, and as much again for the training
        self._calls = 0  # until the next question

    def is_low(self) -> bool:
        """Whether less than twice what snapshots may take is free (`memory.is_low()`)."""
        self._calls -= 1
        if self._calls >= 0:
            return False
        try:
            free = _free_memory()
        except Exception:  # a device that does not tell
            free = 1 << 62
        self._calls = next((calls for times, calls in self._PAUSES if free > times * self._needed), 0)
        return free < self._needed
