"""Processes that help to compare, for runs that last: threads of one process wait for its interpreter.

A call goes to a process as bytes in memory that both map, pinned where the device can write to it directly, and a
few words about it. Its backward goes to the same one, which has kept the arguments and the golden forward pass.
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

from .. import lifecycle
from ..call.description import Tensor
from ..call.devices import can_pin
from ..copies.operands import Layout, Ref, Staged, Unpacker, bytes_in, padded
from .worker import Answer, Options, Spans, Task

_RING: Final = 64 << 20  # bytes that wait for one process
_CALL: Final = 1 << 17  # bytes that take as long as what a call costs in any case
_SECONDS_TO_END: Final = 5.0
_MOST_TREES: Final = 50_000
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
    """Places in a stretch of memory, given out in order and free again in almost the same order.

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
        """Where so many bytes may be put; None where there is no room."""
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
        """Have a place back."""
        for place in self._taken:
            if place[0] == start and not place[2]:
                place[2] = 1
                break
        while self._taken and self._taken[0][2]:
            self._taken.popleft()


class Remote:
    """Where a call and its backward are compared."""

    def __init__(self, helper: _Helper, memory: int) -> None:
        self.helper, self.memory = helper, memory
        self.nbytes = 0  # that wait to be sent
        self.tried = threading.Event()
        self.there = False  # the arguments have arrived

    def __del__(self) -> None:
        self.helper.unneeded.append(self.memory)
        self.helper.load -= self.nbytes  # if it was never sent


class _Flight:
    """A call that was sent and not answered."""

    def __init__(self, start: int, given: Any, task: Task, weight: int) -> None:
        self.start, self.given, self.task, self.weight = start, given, task, weight


class _Helper:
    """One process, its memory, and what it is working on."""

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
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
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
        """Until it has started; raises EOFError if it ends instead."""
        self._connection.recv()
        if self.device.type == "cuda" and can_pin("cuda"):
            with torch.cuda.device(self.device):  # this thread would use the first GPU, of other ranks
                self._pinned = not int(torch.cuda.cudart().cudaHostRegister(self.buffer.data_ptr(), _RING, 0))
        self.ready = True

    def place(self, nbytes: int) -> int | None:
        """Room for a call, waited for; None where the process has ended."""
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
                self.flights[flight.task.number] = flight
            self._connection.send(("task", flight.task))

    def receive(self) -> list[Answer]:
        answers: list[Answer] = self._connection.recv()
        return answers

    def end(self) -> None:
        """Have it end: nothing it does is needed any more."""
        with self.change:
            self.ended = True
            self.change.notify_all()
        self.process.kill()

    def let_go(self) -> None:
        """Wait for its end, and let go of the memory."""
        self.process.wait()
        if self._pinned:
            with torch.cuda.device(self.device):
                torch.cuda.cudart().cudaHostUnregister(self.buffer.data_ptr())
            self._pinned = False
        self.forget()
        self.buffer = torch.empty(0, dtype=torch.uint8)
        try:
            self._mapped.close()
        except BufferError:  # somebody still looks at it, and it goes with them
            pass

    def forget(self) -> None:
        """Close this side of the conversation."""
        try:
            self._connection.close()
        except OSError:
            pass


class Pool:
    """Some processes; `answered(given, answer)` is called for each call, in any order, with None if it was lost.

    >>> pool = Pool(4, options, "cuda", answered)  # doctest: +SKIP
    >>> remote = pool.remote()                     # doctest: +SKIP
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
        self._helpers: list[_Helper] = []
        self._memories = self._trees = 0
        self._lock = threading.Condition()
        self._sending = threading.Lock()
        self._flying = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        try:
            for _ in range(processes):
                self._thread(self._serve, _Helper(options, device))
        except BaseException:
            self.close()
            self.let_go()
            raise
        _pools.add(self)

    def _thread(self, target: Callable[..., None], helper: _Helper) -> None:
        thread = threading.Thread(target=target, args=(helper,), name="op_tools-pool", daemon=True)
        thread.op_tools_internal = True  # type: ignore[attr-defined]
        self._helpers.append(helper)
        thread.start()
        self._threads.append(thread)

    # -- for those who send ---------------------------------------------------------------------------

    def remote(self, nbytes: int) -> Remote | None:
        """A process for a call of so many bytes and its backward: the one that has least to do; None for none."""
        there = [helper for helper in self._helpers if helper.ready and not helper.ended]
        if not there or self._closed:
            return None
        with self._lock:
            if self._trees >= _MOST_TREES:  # which the processes keep
                return None
            self._memories += 1
            remote = Remote(min(there, key=lambda helper: helper.load), self._memories)
            remote.nbytes = nbytes + _CALL
            remote.helper.load += remote.nbytes
            return remote

    def send(self, remote: Remote, task: Task, parts: Sequence[Staged], unpacker: Unpacker, given: Any) -> bool:
        """Copy a call to its process; whether it has gone there. The numbers of trees and spans are filled in."""
        helper = remote.helper
        weight, remote.nbytes = remote.nbytes or task.nbytes + _CALL, 0
        if task.phase == "backward":
            self._weigh(helper, weight)
        size = sum([padded(bytes_in(s)) for part in parts for s in part.storages])
        if size > _RING:
            if task.phase == "forward":
                self._weigh(helper, -weight)
                return False
            parts, size = (), 0  # gradients may be larger than the call: it is handed back, with its arguments
        start = helper.place(size)
        if start is None:
            self._weigh(helper, -weight)
            return False
        with self._lock:
            self._flying += 1
        sent = False
        try:
            with self._sending:  # one after the other: threads that copy at once wait for the interpreter
                spans = _copied(parts, start, helper.buffer, unpacker)
                trees = [(self._number(part), part.tree) for part in parts]
                if parts:
                    task = task._replace(after=trees[-1][0], after_spans=spans[-1])
                if len(parts) == 2:
                    task = task._replace(before=trees[0][0], before_spans=spans[0])
                helper.send(_Flight(start, given, task, weight), trees)
            sent = True
        except (OSError, pickle.PicklingError, TypeError, AttributeError):  # it has ended; a tree with something odd
            with helper.change:
                helper.flights.pop(task.number, None)
        finally:
            if not sent:
                helper.give(start)
                self._weigh(helper, -weight)
                self._landed()
        return sent

    def _weigh(self, helper: _Helper, weight: int) -> None:
        with self._lock:
            helper.load += weight

    def _number(self, staged: Staged) -> int:
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
            self._lock.wait_for(lambda: all(h.ready or h.ended for h in self._helpers), seconds)
        return sum(helper.ready and not helper.ended for helper in self._helpers)

    def close(self) -> None:
        """End the processes (`pool.close()`)."""
        self._closed = True
        for helper in self._helpers:
            helper.end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_SECONDS_TO_END)
        _pools.discard(self)

    def let_go(self) -> None:
        """Let go of the memory, once nobody sends any more (`pool.let_go()`)."""
        for helper in self._helpers:
            helper.let_go()
        self._answered = _nobody

    # -- what comes back ------------------------------------------------------------------------------

    def _serve(self, helper: _Helper) -> None:
        try:
            helper.wait_until_ready()
            with self._lock:
                self._lock.notify_all()
            while True:
                for answer in helper.receive():
                    self._land(helper, answer)
        except (EOFError, OSError):
            pass
        with helper.change:
            helper.ended = True
            lost = list(helper.flights.values())
            helper.flights.clear()
            helper.change.notify_all()
        for flight in lost:
            self._answered(flight.given, None)
            self._landed()
        with self._lock:
            self._lock.notify_all()

    def _land(self, helper: _Helper, answer: Answer) -> None:
        with helper.change:
            flight = helper.flights.pop(answer.number)
        helper.give(flight.start)
        self._weigh(helper, -flight.weight)
        try:
            self._answered(flight.given, answer)
        finally:
            self._landed()

    def _landed(self) -> None:
        with self._lock:
            self._flying -= 1
            self._lock.notify_all()


def _nobody(given: Any, answer: Answer | None) -> None:
    """All has been answered."""


def forget_in_child() -> None:
    """A forked child must not keep the processes of its parent alive when that ends."""
    for pool in list(_pools):
        for helper in pool._helpers:
            helper.forget()
    _pools.clear()


lifecycle.after_fork_in_child(forget_in_child)


def available() -> bool:
    """Whether this machine can share memory in the way that is needed (`available()`)."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and bool(sys.executable)


def most_bytes() -> int:
    """The largest call that goes to a process (`most_bytes()`)."""
    return _RING // 2


def sendable(staged: Staged) -> bool:
    """Whether a process can be told all about the staged tensors (`sendable(stage((x, 2)))`)."""
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


def _copied(parts: Sequence[Staged], start: int, buffer: Tensor, unpacker: Unpacker) -> list[Spans]:
    """Copy the storages of all parts one behind the other, and wait for it; where they are."""
    spans: list[Spans] = []
    places: list[tuple[int, int]] = []
    for part in parts:
        mine = []
        for storage in part.storages:
            count = bytes_in(storage)
            mine.append((start, count))
            start += padded(count)
        spans.append(tuple(mine))
        places += mine
    storages = [storage for part in parts for storage in part.storages]
    event = next((part.event for part in reversed(parts) if part.event is not None), None)
    unpacker.put(storages, event, buffer, places)
    return spans
