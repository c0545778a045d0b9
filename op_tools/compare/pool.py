"""Worker processes for long runs: the threads of one process compete for its GIL.

A call goes to a worker as bytes in memory that both map, pinned where the device can write to it directly, and a
short message. Its backward goes to the same worker, which has kept the arguments and the golden forward pass.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import pickle
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from .. import lifecycle
from ..call.description import Tensor
from ..call.devices import can_pin
from ..copies.operands import Fetcher, Operands, padded
from . import forkserver
from .forkserver import ForkServer
from .ring import Ring
from .trees import number_of
from .worker import Answer, Message, Options, Spans

_RING: Final = 64 << 20  # bytes of calls that wait for one worker
_SOCKET_BYTES: Final = 1 << 20  # of messages that wait for one worker, if the system allows as many
# microseconds that comparing takes, until it is known
_CALL_COST: Final = 4_000  # of any call
_BYTES_COST: Final = 50  # bytes in a microsecond
_KIND_COST: Final = 60_000  # of the first call of a kind
_MAX_KINDS: Final = 50_000
_MAX_SECONDS_TO_END: Final = 5.0
_MAX_TREES: Final = 50_000
_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


_STALLED_SECONDS: Final = 20.0  # without using the processor, while it has calls to judge


class Lease:
    """A worker's promise to compare a call and its backward; ends with the object."""

    def __init__(self, worker: _Process, memory: int) -> None:
        self.worker, self.memory = worker, memory
        self.kind: Hashable = None
        self.weight = 0  # microseconds of work that wait to be sent
        self.tried = threading.Event()
        self.there = False  # the arguments have arrived

    def __del__(self) -> None:
        self.worker.unneeded.append(self.memory)
        self.worker.load -= self.weight  # if it was never sent


class _Flight(NamedTuple):
    """A call that was sent and not answered."""

    start: int  # of its span in the ring
    given: Any
    message: Message
    weight: int  # in the worker's load
    kind: Hashable = None


class Sending(NamedTuple):
    """A call that is sent together with others."""

    lease: Lease
    message: Message
    parts: tuple[Operands, Operands]  # arguments and values
    nbytes: int  # in the ring
    copy: Callable[[int, int], Sequence[tuple[int, int]]]  # to memory at an address, from so many bytes on; the spans
    given: Any


class _Process:
    """One worker process, the memory shared with it, and the jobs that it has."""

    def __init__(self, server: ForkServer, complete: bool, options: Options, device: torch.device) -> None:
        self.device = device
        self.unneeded: deque[int] = deque()
        self.flights: dict[int, _Flight] = {}
        self.ready = self.ended = False
        self.load = 0  # microseconds of work that were given to it and are not done
        self.kinds: set[Hashable] = set()  # of calls that it has compared
        self.change = threading.Condition()
        self._sending = threading.Lock()
        self.trees: set[int] = set()  # that it has
        self._ring = Ring(_RING)
        self._pinned = False
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        memory = os.memfd_create("op_tools-comparisons")
        try:
            os.ftruncate(memory, _RING)
            self._mapped = mmap.mmap(memory, _RING)
            self.buffer = torch.frombuffer(self._mapped, dtype=torch.uint8)
            self.process = server.fork(theirs.fileno(), memory, _RING, complete)
        finally:
            theirs.close()
            os.close(memory)
        self._connection = Connection(ours.detach())
        self._connection.send(options)

    def wait_until_ready(self) -> None:
        """Wait until it has started; raises EOFError if it exits instead."""
        self.process.started(self._connection.recv())
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

    def place_now(self, nbytes: int) -> int | None:
        """A span for a call, or None where there is no room at the moment."""
        with self.change:
            return None if self.ended else self._ring.take(nbytes)

    def send_batch(self, flights: Sequence[_Flight], trees: Sequence[tuple[int, Any]]) -> list[_Flight]:
        """Send calls in one message; those that have not gone."""
        with self._sending:
            new = {number: tree for number, tree in trees if number not in self.trees}
            with self.change:
                if self.ended:
                    return list(flights)
                self.flights.update({flight.message.number: flight for flight in flights})
            try:
                self._connection.send(("batch", (list(new.items()), [flight.message for flight in flights])))
                self.trees.update(new)
            except Exception:
                return [f for f in flights if self.flights.pop(f.message.number, None) is not None]
        return []

    def send(self, flight: _Flight, trees: Sequence[tuple[int, Any]]) -> None:
        with self._sending:
            for number, tree in trees:
                if number not in self.trees:
                    self._connection.send(("tree", (number, tree)))
                    self.trees.add(number)
            if self.unneeded:
                forgotten = [self.unneeded.popleft() for _ in range(len(self.unneeded))]
                self._connection.send(("forget", forgotten))
            with self.change:
                if self.ended:
                    raise BrokenPipeError
                self.flights[flight.message.number] = flight
            try:
                self._connection.send(("job", flight.message))
            except Exception:
                if self.flights.pop(flight.message.number, None) is not None:
                    raise
                # else it exited in between, and the call is one of those that were lost with it

    def receive(self) -> list[Answer]:
        """What it answers next; one that does nothing for long, stopped or hung, is ended and raises EOFError."""
        seen, since = -1, time.monotonic()
        while not self._connection.poll(_STALLED_SECONDS / 4):
            spent = self._cpu_time() if self.flights else -1
            if spent < 0 or spent != seen:
                seen, since = spent, time.monotonic()
            elif time.monotonic() - since > _STALLED_SECONDS:
                self.process.kill()
                break
        answers: list[Answer] = self._connection.recv()
        return answers

    def _cpu_time(self) -> int:
        """Ticks of the processor that it has used, -1 where unknown."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])
        except (OSError, ValueError, IndexError):
            return -1

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
        with contextlib.suppress(BufferError):  # a tensor still refers to it; it goes with the last one
            self._mapped.close()

    def forget(self) -> None:
        """Close this side of the conversation."""
        with contextlib.suppress(OSError):
            self._connection.close()


class Pool:
    """The worker processes of a run; `answered(given, answer)` is called for each job, in any order; None means lost.

    `started()` is called, maybe more than once, when half of them are there, or none will be.

    >>> pool = Pool(4, options, "cuda", answered)  # doctest: +SKIP
    >>> lease = pool.lease(nbytes)                     # doctest: +SKIP
    """

    def __init__(
        self,
        processes: int,
        options: Options,
        device: torch.device,
        answered: Callable[[Any, Answer | None], None],
        started: Callable[[], None] = lambda: None,
    ) -> None:
        self._answered, self._started = answered, started
        self._processes: list[_Process] = []
        self._memories = 0
        self._costs: dict[Hashable, int] = {}  # of calls of a kind, in microseconds
        self._lock = threading.Condition()
        self._sending = threading.Lock()
        self._flying = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._server = ForkServer()
        try:
            for number in range(processes):  # the first half starts sooner
                worker = _Process(self._server, number >= processes // 2, options, device)
                self._processes.append(worker)
                thread = threading.Thread(target=self._serve, args=(worker,), name="op_tools-pool", daemon=True)
                thread.op_tools_internal = True  # type: ignore[attr-defined]
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            self.let_go()
            raise
        _pools.add(self)

    # -- for those who send ---------------------------------------------------------------------------

    def lease(self, nbytes: int, kind: Hashable = None) -> Lease | None:
        """The least-loaded worker, for a call of so many bytes and its backward, or None.

        The first call of a kind takes a worker as long as many others: one that knows the kind may have more to do.
        """
        there = [w for w in self._processes if w.ready and not w.ended and len(w.trees) < _MAX_TREES]
        if not there or self._closed:
            return None
        with self._lock:
            self._memories += 1
            best = min(there, key=lambda worker: worker.load + (0 if kind in worker.kinds else _KIND_COST))
            best.kinds.add(kind)
            lease = Lease(best, self._memories)
            lease.kind, lease.weight = kind, self._cost(kind, nbytes)
            lease.worker.load += lease.weight
            return lease

    def _cost(self, kind: Hashable, nbytes: int) -> int:
        return self._costs.get(kind) or nbytes // _BYTES_COST + _CALL_COST

    def send(self, lease: Lease, message: Message, parts: Sequence[Operands], fetcher: Fetcher, given: Any) -> bool:
        """Copy a call to its process; whether it has gone there. The numbers of trees and spans are filled in."""
        worker = lease.worker
        weight, lease.weight = lease.weight or self._cost(None, message.nbytes), 0
        alone = len(parts) == 1  # a backward whose arguments the worker has
        if alone:
            self._weigh(worker, weight)
        size = sum([padded(s.nbytes) for part in parts for s in part.storages])
        if size > _RING:
            if not alone:
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
                trees = [(number_of(part), part.tree) for part in parts]
                if parts:
                    message = message._replace(after=trees[-1][0], after_spans=spans[-1])
                if len(parts) == 2:
                    message = message._replace(before=trees[0][0], before_spans=spans[0])
            # others go on where this one has much to do and its socket is full
            worker.send(_Flight(start, given, message, weight, None if alone else lease.kind), trees)
            sent = True
        except (OSError, pickle.PicklingError, TypeError, AttributeError):  # it has exited; an odd tree
            pass
        finally:
            if not sent:
                worker.give(start)
                self._weigh(worker, -weight)
                self._landed()
        return sent

    def send_batch(self, worker: _Process, batch: Sequence[Sending]) -> tuple[int, list[Any]]:
        """Copy as many calls to a process as it has room for, and tell it of them in one message.

        How many of the batch are done with, and what was given with those that cannot be sent.
        """
        flights: list[_Flight] = []
        trees: list[tuple[int, Any]] = []
        failed: list[Any] = []
        first, done = worker.buffer.data_ptr(), 0
        for each in batch:
            start = worker.place_now(each.nbytes) if each.nbytes <= _RING else None
            if start is None and each.nbytes <= _RING and not worker.ended:
                break  # it has enough to do
            done += 1
            if start is None:
                failed.append(each.given)
                continue
            weight, each.lease.weight = each.lease.weight, 0
            spans, (before, after) = iter(each.copy(first, start)), each.parts
            own = tuple(itertools.islice(spans, len(before.storages)))
            message = each.message._replace(
                before=number_of(before), before_spans=own, after=number_of(after), after_spans=tuple(spans)
            )
            trees += [(message.before, before.tree), (message.after, after.tree)]
            flights.append(_Flight(start, each.given, message, weight, each.lease.kind))
        if flights:
            with self._lock:
                self._flying += len(flights)
            for flight in worker.send_batch(flights, trees):
                worker.give(flight.start)
                self._weigh(worker, -flight.weight)
                self._landed()
                failed.append(flight.given)
        return done, failed

    def _weigh(self, worker: _Process, weight: int) -> None:
        with self._lock:
            worker.load += weight

    def is_ready(self) -> bool:
        """Whether there is a process to send to (`pool.is_ready()`)."""
        return any(worker.ready and not worker.ended for worker in self._processes)

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
        self._server.end()
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
        self._answered, self._started = lambda given, answer: None, lambda: None  # nobody waits any more

    # -- what comes back ------------------------------------------------------------------------------

    def _serve(self, worker: _Process) -> None:
        try:
            worker.wait_until_ready()
            with self._lock:
                self._lock.notify_all()
                enough = sum([w.ready or w.ended for w in self._processes]) >= max(1, len(self._processes) // 2)
            if enough:
                self._started()
            while True:
                for answer in worker.receive():
                    self._land(worker, worker.flights.pop(answer.number), answer)
        except (EOFError, OSError):
            pass
        with worker.change:
            worker.ended = True
            lost = list(worker.flights.values())
            worker.flights.clear()
            worker.change.notify_all()
        for flight in lost:
            self._land(worker, flight, None)
        with self._lock:
            self._lock.notify_all()
        if not any(w.ready and not w.ended for w in self._processes):
            self._started()  # none will

    def _land(self, worker: _Process, flight: _Flight, answer: Answer | None) -> None:
        worker.give(flight.start)
        self._weigh(worker, -flight.weight)
        if answer is not None and flight.kind is not None:
            known = self._costs.get(flight.kind)
            if known is not None or len(self._costs) < _MAX_KINDS:
                spent = int(answer.seconds * 1e6) + 1
                self._costs[flight.kind] = spent if known is None else (known + spent) // 2
        try:
            self._answered(flight.given, answer)
        finally:
            self._landed()

    def _landed(self) -> None:
        with self._lock:
            self._flying -= 1
            self._lock.notify_all()


def forget_in_child() -> None:
    """A forked child must not keep its parent's workers alive."""
    for pool in list(_pools):
        pool._server.forget()
        for worker in pool._processes:
            worker.forget()
    _pools.clear()


lifecycle.after_fork_in_child(forget_in_child)


def available() -> bool:
    """Whether this machine can share memory with worker processes (`available()`)."""
    linux = sys.platform == "linux" and hasattr(os, "memfd_create") and bool(sys.executable)
    return linux and forkserver.available()


def max_bytes() -> int:
    """The largest call that goes to a worker (`max_bytes()`)."""
    return _RING // 2


def _copied(parts: Sequence[Operands], start: int, buffer: Tensor, fetcher: Fetcher) -> list[Spans]:
    """Copy the storages of all parts one behind the other, and wait for it; where they are."""
    spans = []
    storages = [storage for part in parts for storage in part.storages]
    for storage in storages:
        spans.append((start, storage.nbytes))
        start += padded(storage.nbytes)
    event = next((part.event for part in reversed(parts) if part.event is not None), None)
    fetcher.put(storages, event, buffer, spans)
    rest = iter(spans)
    return [tuple(itertools.islice(rest, len(part.storages))) for part in parts]
