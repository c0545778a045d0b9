"""Worker processes for long runs: the threads of one process compete for its GIL.

A call goes to a worker as bytes in memory that both map, pinned where the device can write to it directly, and a
short message. Its backward goes to the same worker, which has kept the arguments and the golden forward pass.
"""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch

from .. import lifecycle, settings
from ..call.description import Tensor
from ..call.devices import can_pin
from ..copies.operands import Fetcher, Layout, Operands, Ref, padded
from .worker import Answer, Message, Options, Spans

_RING: Final = 64 << 20  # bytes of calls that wait for one worker
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CALL: Final = 1 << 17  # the fixed cost of a call, in bytes that take as long
_MAX_SECONDS_TO_END: Final = 5.0
_MAX_TREES: Final = 50_000
# what means the same in another process
_SIMPLE: Final = frozenset(
    {
        *(int, float, bool, complex, str, type(None), type(...)),
        *(torch.dtype, torch.memory_format, torch.layout, torch.Size),  # a device may not exist there
    }
)


_numbers = itertools.count(1)
_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


class Ring:
    """A ring buffer: spans are taken in order, and given back in almost the same order.

    >>> ring = Ring(100)
    >>> ring.take(60), ring.take(60)
    (0, None)
    >>> ring.give(0)
    >>> ring.take(60)
    0
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: deque[list[int]] = deque()  # [start, end, whether it is free again]

    def take(self, nbytes: int) -> int | None:
        """Where a span of so many bytes begins, or None while there is no room."""
        nbytes = max(nbytes, 1)  # a place of its own
        if not self._taken:
            start = 0
        else:
            first, last = self._taken[0][0], self._taken[-1][1]
            start = last
            if self._taken[-1][0] >= first:  # not around the end yet
                if last + nbytes > self.size:
                    start = 0
                    if nbytes > first:
                        return None
            elif last + nbytes > first:
                return None
        if start + nbytes > self.size:
            return None
        self._taken.append([start, start + nbytes, 0])
        return start

    def give(self, start: int) -> None:
        """Give a span back."""
        for place in self._taken:
            if place[0] == start and not place[2]:
                place[2] = 1
                break
        while self._taken and self._taken[0][2]:
            self._taken.popleft()


class Lease:
    """A worker's promise to compare a call and its backward; ends with the object."""

    def __init__(self, worker: _Process, memory: int) -> None:
        self.worker, self.memory = worker, memory
        self.nbytes = 0  # that wait to be sent
        self.tried = threading.Event()
        self.there = False  # the arguments have arrived

    def __del__(self) -> None:
        self.worker.unneeded.append(self.memory)
        self.worker.load -= self.nbytes  # if it was never sent


class _Flight:
    """A call that was sent and not answered."""

    def __init__(self, start: int, given: Any, message: Message, weight: int) -> None:
        self.start, self.given, self.message, self.weight = start, given, message, weight


class _Process:
    """One worker process, the memory shared with it, and the jobs that it has."""

    def __init__(self, options: Options, device: torch.device) -> None:
        self.device = device
        self.unneeded: deque[int] = deque()
        self.flights: dict[int, _Flight] = {}
        self.ready = self.ended = False
        self.load = 0  # bytes of calls that were given to it and are not done
        self.change = threading.Condition()
        self._sending = threading.Lock()
        self._known: set[int] = set()
        self._ring = Ring(_RING)
        self._pinned = False
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("op_tools-comparisons")
        try:
            os.ftruncate(memory, _RING)
            self._mapped = mmap.mmap(memory, _RING)
            self.buffer = torch.frombuffer(self._mapped, dtype=torch.uint8)
            self.process = subprocess.Popen(
                _command(theirs.fileno(), memory),
                env={**settings.environment(), **dict.fromkeys(_ONE_THREAD, "1"), "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), memory),
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(memory)
        self._connection = Connection(ours.detach())
        self._connection.send(options)

    def wait_until_ready(self) -> None:
        """Wait until it has started; raises EOFError if it exits instead."""
        self._connection.recv()
        if self.device.type == "cuda" and can_pin("cuda"):
            with torch.cuda.device(self.device):  # this thread would use the first GPU, of other ranks
                self._pinned = not int(torch.cuda.cudart().cudaHostRegister(self.buffer.data_ptr(), _RING, 0))
        self.ready = True

    def place(self, nbytes: int) -> int | None:
        """A span for a call, as soon as there is room, or None where the worker has exited."""
        with self.change:
            while not self.ended:
                start = self._ring.take(nbytes)
                if start is not None:
                    return start
                self.change.wait(1.0)
        return None

    def give(self, start: int) -> None:
        with self.change:
            self._ring.give(start)
            self.change.notify_all()

    def send(self, flight: _Flight, trees: Sequence[tuple[int, Any]]) -> None:
        with self._sending:
            new = [(number, tree) for number, tree in trees if number not in self._known]
            for item in new:
                self._connection.send(("tree", item))
                self._known.add(item[0])
            if self.unneeded:
                forgotten = [self.unneeded.popleft() for _ in range(len(self.unneeded))]
                self._connection.send(("forget", forgotten))
            with self.change:
                if self.ended:
                    raise BrokenPipeError
                self.flights[flight.message.number] = flight
            self._connection.send(("job", flight.message))

    def receive(self) -> list[Answer]:
        answers: list[Answer] = self._connection.recv()
        return answers

    def end(self) -> None:
        """End it: its answers are not needed any more."""
        with self.change:
            self.ended = True
            self.change.notify_all()
        self.process.kill()

    def let_go(self) -> None:
        """Wait for its exit, and free the memory."""
        self.process.wait()
        if self._pinned:
            with torch.cuda.device(self.device):
                torch.cuda.cudart().cudaHostUnregister(self.buffer.data_ptr())
            self._pinned = False
        self.forget()
        self.buffer = torch.empty(0, dtype=torch.uint8)
        try:
            self._mapped.close()
        except BufferError:  # a tensor still refers to it; it goes with the last one
            pass

    def forget(self) -> None:
        """Close this side of the conversation."""
        try:
            self._connection.close()
        except OSError:
            pass


class Pool:
    """The worker processes of a run; `answered(given, answer)` is called for each job, in any order; None means lost.

    >>> pool = Pool(4, options, "cuda", answered)  # doctest: +SKIP
    >>> lease = pool.lease(nbytes)                     # doctest: +SKIP
    """

    def __init__(
        self,
        processes: int,
        options: Options,
        device: torch.device,
        answered: Callable[[Any, Answer | None], None],
    ) -> None:
        self._answered = answered
        self.number = next(_numbers)
        self._processes: list[_Process] = []
        self._memories = self._trees = 0
        self._lock = threading.Condition()
        self._sending = threading.Lock()
        self._flying = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        try:
            for _ in range(processes):
                self._thread(self._serve, _Process(options, device))
        except BaseException:
            self.close()
            self.let_go()
            raise
        _pools.add(self)

    def _thread(self, target: Callable[..., None], worker: _Process) -> None:
        thread = threading.Thread(target=target, args=(worker,), name="op_tools-pool", daemon=True)
        thread.op_tools_internal = True  # type: ignore[attr-defined]
        self._processes.append(worker)
        thread.start()
        self._threads.append(thread)

    # -- for those who send ---------------------------------------------------------------------------

    def lease(self, nbytes: int) -> Lease | None:
        """The least-loaded worker, for a call of so many bytes and its backward, or None."""
        there = [worker for worker in self._processes if worker.ready and not worker.ended]
        if not there or self._closed:
            return None
        with self._lock:
            if self._trees >= _MAX_TREES:  # which the processes keep
                return None
            self._memories += 1
            lease = Lease(min(there, key=lambda worker: worker.load), self._memories)
            lease.nbytes = nbytes + _CALL
            lease.worker.load += lease.nbytes
            return lease

    def send(self, lease: Lease, message: Message, parts: Sequence[Operands], fetcher: Fetcher, given: Any) -> bool:
        """Copy a call to its process; whether it has gone there. The numbers of trees and spans are filled in."""
        worker = lease.worker
        weight, lease.nbytes = lease.nbytes or message.nbytes + _CALL, 0
        if message.phase == "backward":
            self._weigh(worker, weight)
        size = sum([padded(s.nbytes) for part in parts for s in part.storages])
        if size > _RING:
            if message.phase == "forward":
                self._weigh(worker, -weight)
                return False
            parts, size = (), 0  # too large for the ring: the worker hands the call back, with its arguments
        start = worker.place(size)
        if start is None:
            self._weigh(worker, -weight)
            return False
        with self._lock:
            self._flying += 1
        sent = False
        try:
            with self._sending:  # one at a time: threads that copy at once compete for the GIL
                spans = _copied(parts, start, worker.buffer, fetcher)
                trees = [(self._number(part), part.tree) for part in parts]
                if parts:
                    message = message._replace(after=trees[-1][0], after_spans=spans[-1])
                if len(parts) == 2:
                    message = message._replace(before=trees[0][0], before_spans=spans[0])
                worker.send(_Flight(start, given, message, weight), trees)
            sent = True
        except (
            OSError,
            pickle.PicklingError,
            TypeError,
            AttributeError,
        ):  # it has exited; an odd tree
            with worker.change:
                worker.flights.pop(message.number, None)
        finally:
            if not sent:
                worker.give(start)
                self._weigh(worker, -weight)
                self._landed()
        return sent

    def _weigh(self, worker: _Process, weight: int) -> None:
        with self._lock:
            worker.load += weight

    def _number(self, staged: Operands) -> int:
        """The number of a tree, given once to each layout."""
        layout = staged.layout
        assert layout is not None
        with self._lock:
            key = ("pool", self.number)
            number = layout.notes.get(key)
            if number is None:
                self._trees += 1
                number = layout.notes[key] = self._trees
            return int(number)

    def drain(self) -> None:
        """Wait until all that was sent is answered (`pool.drain()`)."""
        with self._lock:
            while self._flying:
                self._lock.wait(1.0)

    def wait_until_ready(self, seconds: float = 60.0) -> int:
        """Wait for the processes to start; how many there are (`pool.wait_until_ready()`)."""
        with self._lock:
            self._lock.wait_for(lambda: all(h.ready or h.ended for h in self._processes), seconds)
        return sum(worker.ready and not worker.ended for worker in self._processes)

    def close(self) -> None:
        """End the processes (`pool.close()`)."""
        self._closed = True
        for worker in self._processes:
            worker.end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_MAX_SECONDS_TO_END)
        _pools.discard(self)

    def let_go(self) -> None:
        """Let go of the memory, once nobody sends any more (`pool.let_go()`)."""
        for worker in self._processes:
            worker.let_go()
        self._answered = _nobody

    # -- what comes back ------------------------------------------------------------------------------

    def _serve(self, worker: _Process) -> None:
        try:
            worker.wait_until_ready()
            with self._lock:
                self._lock.notify_all()
            while True:
                for answer in worker.receive():
                    self._land(worker, answer)
        except (EOFError, OSError):
            pass
        with worker.change:
            worker.ended = True
            lost = list(worker.flights.values())
            worker.flights.clear()
            worker.change.notify_all()
        for flight in lost:
            self._answered(flight.given, None)
            self._landed()
        with self._lock:
            self._lock.notify_all()

    def _land(self, worker: _Process, answer: Answer) -> None:
        with worker.change:
            flight = worker.flights.pop(answer.number)
        worker.give(flight.start)
        self._weigh(worker, -flight.weight)
        try:
            self._answered(flight.given, answer)
        finally:
            self._landed()

    def _landed(self) -> None:
        with self._lock:
            self._flying -= 1
            self._lock.notify_all()


def _nobody(given: Any, answer: Answer | None) -> None:
    """Answers that nobody waits for."""


def forget_in_child() -> None:
    """A forked child must not keep its parent's workers alive."""
    for pool in list(_pools):
        for worker in pool._processes:
            worker.forget()
    _pools.clear()


lifecycle.after_fork_in_child(forget_in_child)


def available() -> bool:
    """Whether this machine can share memory with worker processes (`available()`)."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and bool(sys.executable)


def most_bytes() -> int:
    """The largest call that goes to a worker (`most_bytes()`)."""
    return _RING // 2


def sendable(staged: Operands) -> bool:
    """Whether a worker can be told all about a snapshot (`sendable(stage((x, 2)))`)."""
    layout = staged.layout
    if layout is None:
        return False
    found = layout.notes.get(sendable)
    if found is None:
        found = layout.notes[sendable] = _is_simple(layout.tree)
    return bool(found)


def needs_gradients(layout: Layout) -> bool:
    """Whether any of the tensors may get a gradient (`needs_gradients(staged.layout)`)."""
    found = layout.notes.get(needs_gradients)
    if found is None:
        found = layout.notes[needs_gradients] = any(ref.requires_grad for ref in _refs(layout.tree))
    return bool(found)


def _is_simple(value: Any) -> bool:
    kind = type(value)
    if kind in (list, tuple):
        return all(map(_is_simple, value))
    if kind is dict:
        return all(type(key) is str and _is_simple(v) for key, v in value.items())
    if kind is slice:
        return all(map(_is_simple, (value.start, value.stop, value.step)))
    return kind is Ref or kind in _SIMPLE


def _refs(value: Any) -> Iterator[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _refs(member)
    elif isinstance(value, dict):
        yield from _refs(list(value.values()))


def _command(sock: int, memory: int) -> list[str]:
    root = str(Path(__file__).resolve().parents[2])
    path = [root, *[p for p in sys.path if p and p != root]]
    code = (
        f"import sys; sys.path[:] = {path!r}; from op_tools.compare.worker import main; main({sock}, {memory}, {_RING})"
    )
    return [sys.executable, "-c", code]


def _copied(parts: Sequence[Operands], start: int, buffer: Tensor, fetcher: Fetcher) -> list[Spans]:
    """Copy the storages of all parts one behind the other, and wait for it; where they are."""
    spans: list[Spans] = []
    places: list[tuple[int, int]] = []
    for part in parts:
        mine = []
        for storage in part.storages:
            count = storage.nbytes
            mine.append((start, count))
            start += padded(count)
        spans.append(tuple(mine))
        places += mine
    storages = [storage for part in parts for storage in part.storages]
    event = next((part.event for part in reversed(parts) if part.event is not None), None)
    fetcher.put(storages, event, buffer, places)
    return spans
