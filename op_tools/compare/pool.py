"""Worker processes for long runs: the threads of one process compete for its GIL.

A call goes to a worker as bytes in memory that both map, pinned where the device can write to it directly, and a
short message. Its backward goes to the same worker, which has kept the arguments and the golden forward pass.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple

import torch

from .. import lifecycle
from ..call.description import Tensor
from ..copies.operands import Fetcher, Operands, padded
from . import forkserver
from .forkserver import ForkServer
from .process import RING, Flight, Lease, Process, spans_of
from .trees import number_of
from .worker import Answer, Message, Options, Spans

# microseconds that comparing takes, until it is known
_CALL_COST: Final = 4_000  # of any call
_BYTES_COST: Final = 50  # bytes in a microsecond
_ENOUGH: Final = 200_000  # of work that a worker has ahead
_MAX_KINDS: Final = 50_000
_MAX_SECONDS_TO_END: Final = 5.0
_MAX_TREES: Final = 50_000
_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


class Sending(NamedTuple):
    """A call that is sent together with others."""

    lease: Lease
    message: Message
    parts: tuple[Operands, Operands]  # arguments and values
    nbytes: int  # in the ring
    given: Any


class Pool:
    """The worker processes of a run; `answered(given, answer)` is called for each job, in any order; None means lost.

    `started()` is called, maybe more than once, when half of them are there, or none will be. They are forks of
    `server`, which ends with the pool.

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
        server: ForkServer | None = None,
    ) -> None:
        self._answered, self._started = answered, started
        self._processes: list[Process] = []
        self._memories = 0
        self._costs: dict[Hashable, int] = {}  # of calls of a kind, in microseconds
        self._lock = threading.Condition()
        self._sending = threading.Lock()
        self._flying = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._server = server or ForkServer()
        try:
            for number in range(processes):  # the first half starts sooner
                worker = Process(self._server, number >= processes // 2, options, device)
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

    def lease(self, nbytes: int, kind: Hashable = None, may_wait: bool = False) -> Lease | None:
        """A worker for a call of so many bytes and its backward; None if there is none, or all have enough to do.

        As few workers as can do the work: each answer takes the GIL from the run, and each worker learns every kind.
        Where all have enough to do, a call that may not wait goes to the least-loaded one.
        """
        there = self._there()
        with self._lock:
            idle = [w for w in there if w.load < _ENOUGH]
            if not idle and not may_wait:
                idle = sorted(there, key=lambda worker: worker.load)[:1]
            best = next((w for w in idle if kind in w.kinds), idle[0] if idle else None)
            if best is None:
                return None
            best.kinds.add(kind)
            self._memories += 1
            lease = Lease(best, self._memories)
            lease.kind, lease.weight = kind, self._cost(kind, nbytes)
            lease.worker.load += lease.weight
            return lease

    def _there(self) -> list[Process]:
        """Those that take calls."""
        every = () if self._closed else self._processes
        return [w for w in every if w.ready and not w.ended and len(w.trees) < _MAX_TREES]

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
        if size > RING:
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
                worker.pin()
                spans = _copied(parts, start, worker.buffer, fetcher)
                trees = [(number_of(part), part.tree) for part in parts]
                if parts:
                    message = message._replace(after=trees[-1][0], after_spans=spans[-1])
                if len(parts) == 2:
                    message = message._replace(before=trees[0][0], before_spans=spans[0])
            # others go on where this one has much to do and its socket is full
            worker.send(Flight(start, given, message, weight, None if alone else lease.kind), trees)
            sent = True
        except (OSError, pickle.PicklingError, TypeError, AttributeError):  # it has exited; an odd tree
            pass
        finally:
            if not sent:
                worker.give(start)
                self._weigh(worker, -weight)
                self._landed()
        return sent

    def send_batch(self, worker: Process, batch: Sequence[Sending]) -> tuple[int, list[Any]]:
        """Copy as many calls to a process as it has room for, and tell it of them in one message.

        How many of the batch are done with, and what was given with those that cannot be sent.
        """
        flights: list[Flight] = []
        pieces: list[tuple[int, Tensor]] = []
        trees: list[tuple[int, Any]] = []
        failed: list[Any] = []
        done = 0
        for each in batch:
            start = worker.place_now(each.nbytes) if each.nbytes <= RING else None
            if start is None and each.nbytes <= RING and not worker.ended:
                break  # it has enough to do
            done += 1
            if start is None:
                failed.append(each.given)
                continue
            weight, each.lease.weight = each.lease.weight, 0
            before, after = each.parts
            storages = [*before.storages, *after.storages]
            spans = spans_of(storages, start)
            pieces += [(first, storage) for (first, _), storage in zip(spans, storages)]
            own, others = tuple(spans[: len(before.storages)]), tuple(spans[len(before.storages) :])
            message = each.message._replace(
                before=number_of(before), before_spans=own, after=number_of(after), after_spans=others
            )
            trees += [(message.before, before.tree), (message.after, after.tree)]
            flights.append(Flight(start, each.given, message, weight, each.lease.kind))
        if flights:
            with self._lock:
                self._flying += len(flights)
            for part in [part for each in batch[:done] for part in each.parts]:
                if part.event is not None and not part.event.query():
                    part.event.synchronize()
            for flight in worker.send_batch(flights, pieces, trees):
                worker.give(flight.start)
                self._weigh(worker, -flight.weight)
                self._landed()
                failed.append(flight.given)
        return done, failed

    def _weigh(self, worker: Process, weight: int) -> None:
        with self._lock:
            worker.load += weight

    def is_ready(self) -> bool:
        """Whether there is a process to send to (`pool.is_ready()`)."""
        return bool(self._there())

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

    def _serve(self, worker: Process) -> None:
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

    def _land(self, worker: Process, flight: Flight, answer: Answer | None) -> None:
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
    return RING // 2


def _copied(parts: Sequence[Operands], start: int, buffer: Tensor, fetcher: Fetcher) -> list[Spans]:
    """Copy the storages of all parts one behind the other, and wait for it; where they are."""
    storages = [storage for part in parts for storage in part.storages]
    spans = spans_of(storages, start)
    event = next((part.event for part in reversed(parts) if part.event is not None), None)
    fetcher.put(storages, event, buffer, spans)
    rest = iter(spans)
    return [tuple(itertools.islice(rest, len(part.storages))) for part in parts]
