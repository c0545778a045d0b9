"""Background writing with a bound: work waits in a queue that never grows past its limit."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

_STOP: Final = object()
_all: weakref.WeakSet[Writer] = weakref.WeakSet()


class Writer:
    """Threads that do jobs in the background; `reserve` waits (or refuses) while too many bytes are queued.

    >>> writer = Writer(most_bytes=1 << 20)
    >>> writer.reserve(10) and writer.submit(10, lambda: None)
    >>> writer.drain()
    """

    def __init__(self, most_bytes: int, threads: int = 1, drop_when_full: bool = False) -> None:
        self.most_bytes, self.drop_when_full = most_bytes, drop_when_full
        self.dropped = 0
        self.waited = 0  # how often the run had to wait for the disk
        self.peak_bytes = 0
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
            while self._bytes and self._bytes + nbytes > self.most_bytes:
                if self.drop_when_full:
                    self.dropped += 1
                    return False
                self.waited += 1
                self._change.wait(1.0)
            self._bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        return True

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
            self._jobs.append((nbytes, job))
            self._unfinished += 1
            self._change.notify()

    def _work(self) -> None:
        while True:
            with self._change:
                while not self._jobs:
                    self._change.wait()
                item = self._jobs.popleft()
            if item is _STOP:
                return
            nbytes, job = item
            try:
                job()
            except Exception as error:  # a job that fails must not end the thread
                self.last_error = error
            finally:
                del item, job  # a finished job must not hold its tensors while the thread waits
                with self._change:
                    self._bytes -= nbytes
                    self._unfinished -= 1
                    self._change.notify_all()

    def drain(self) -> None:
        """Wait until every job is done (`writer.drain()`)."""
        with self._change:
            while self._unfinished:
                self._change.wait(1.0)

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


@atexit.register
def _drain_all() -> None:
    for writer in list(_all):
        writer.drain()


def forget_in_child() -> None:
    """A forked child has none of its parent's threads: it must not wait for them."""
    _all.clear()
