"""Parts of large calls on their way to the worker processes, many at a time.

Their slices are on the host already, so there is nothing to fetch. Each thread that works while the training runs takes
the GIL from it: the training only appends to a list, and one thread sends what has gathered there.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

from ..call.own_operators import Origin
from ..copies.operands import padded
from .ladder import Job
from .pool import Pool, Sending
from .process import Lease
from .worker import Message

_SECONDS: Final = 0.1  # between two batches
_FULL_SECONDS: Final = 0.02  # until processes that all have enough to do are asked again
_AT_ONCE: Final = 32  # parts in one message
_LOOKED_AT: Final = 64  # parts for which there is no process at the moment, until others are not looked at
MAX_BYTES: Final = 3 << 29  # of parts that wait


class Batches:
    """Gathers parts, and sends them as soon as there are processes; `back(job)` gets those that cannot be sent.

    >>> if batches.reserve([part]): batches.add([part])  # doctest: +SKIP
    """

    def __init__(
        self,
        lease: Callable[[Pool, Job, bool], Lease | None],
        back: Callable[[Job], None],
        failed: Callable[[str], None] = lambda why: None,
        origin: Callable[[Job], Origin | None] = lambda part: None,
    ) -> None:
        self._lease, self._back, self._failed, self._origin = lease, back, failed, origin
        self._unsent: dict[int, Job] = {}
        self._change = threading.Condition()
        self._waiting: list[Job] = []
        self._bytes = 0
        self._pool: Pool | None = None
        self._thread: threading.Thread | None = None
        self._busy = self._awaited = self._closed = False
        self._process = os.getpid()  # a forked child has no thread that sends

    def reserve(self, parts: Sequence[Job]) -> bool:
        """Claim room for parts; False where another way is better: no room, or slices on a device."""
        size = 0
        for part in parts:
            assert part.before is not None
            assert part.snapshot is not None
            if part.local or not all(s.is_cpu for s in (*part.before.storages, *part.snapshot.storages)):
                return False
            size += part.nbytes
        with self._change:
            while self._pool is not None and not self._closed and self._bytes + size > MAX_BYTES and self._bytes:
                self._change.wait(1.0)  # the processes are slower than the run
            if self._closed or os.getpid() != self._process or self._bytes + size > MAX_BYTES:
                return False
            self._bytes += size
        return True

    def add(self, parts: Sequence[Job]) -> None:
        """Send these parts soon; room is claimed for them."""
        with self._change:
            self._waiting += parts

    def start(self, pool: Pool) -> None:
        """There are processes to send to."""
        with self._change:
            if self._pool is not None or self._closed:
                return
            self._pool = pool
            self._thread = threading.Thread(target=self._work, name="op_tools-batches", daemon=True)
            self._thread.op_tools_internal = True  # type: ignore[attr-defined]
            self._thread.start()

    def drain(self) -> None:
        """Send everything now; without processes it goes back (`batches.drain()`)."""
        with self._change:
            if self._pool is None:
                waiting, self._waiting, self._bytes = self._waiting, [], 0
            else:
                waiting, self._awaited = [], True
                self._change.notify_all()
                while (self._waiting or self._busy) and self._thread is not None and self._thread.is_alive():
                    self._change.wait(1.0)
                self._awaited = False
        for part in waiting:
            self._back(part)

    def close(self) -> None:
        """Take nothing any more (`batches.close()`)."""
        self.drain()
        with self._change:
            self._closed = True
            self._change.notify_all()

    def _work(self) -> None:
        while True:
            with self._change:
                if not self._waiting:
                    if self._closed:
                        return
                    self._change.wait(_SECONDS)
                elif not self._awaited:
                    self._change.wait(_SECONDS)
                parts, self._waiting = self._waiting, []
                self._busy = bool(parts)
            if parts:
                self._unsent = {id(part): part for part in parts}
                try:
                    self._send(parts)
                except Exception as error:  # the run goes on without the processes for these
                    self._failed(f"sending to worker processes failed: {type(error).__name__}: {error}")
                for part in list(self._unsent.values()):
                    self._done([part])
                    self._back(part)
                with self._change:
                    self._busy = False
                    self._change.notify_all()

    def _send(self, parts: Sequence[Job]) -> None:
        """Send parts to the processes, to each as much as it will do soon: those that start later get their share."""
        assert self._pool is not None
        waiting, queues = deque(parts), dict[int, deque[tuple[Job, Sending]]]()
        while waiting or queues:
            if waiting and not self._pool.is_ready():
                self._done(waiting)
                for part in waiting:
                    self._back(part)
                waiting.clear()
            self._deal(waiting, queues)
            sent = 0
            for number, queue in list(queues.items()):
                batch = [sending for _, sending in itertools.islice(queue, _AT_ONCE)]
                done, failed = self._pool.send_batch(batch[0].lease.worker, batch)
                sent += done
                self._done([queue.popleft()[0] for _ in range(done)])
                for part in failed:
                    self._back(part)
                if not queue:
                    del queues[number]
            if not sent and (waiting or queues):
                time.sleep(_FULL_SECONDS)

    def _deal(self, waiting: deque[Job], queues: dict[int, deque[tuple[Job, Sending]]]) -> None:
        """Choose processes for parts, until all have enough to do."""
        assert self._pool is not None
        later: list[Job] = []
        while waiting and len(later) < _LOOKED_AT:
            part = waiting.popleft()
            lease = self._lease(self._pool, part, True)
            if lease is None:
                later.append(part)
            else:
                queues.setdefault(id(lease.worker), deque()).append((part, self._sending(part, lease)))
        waiting.extendleft(reversed(later))

    def _done(self, parts: Collection[Job]) -> None:
        for part in parts:
            self._unsent.pop(id(part), None)
        with self._change:
            self._bytes -= sum([part.nbytes for part in parts])
            self._change.notify_all()

    def _sending(self, part: Job, lease: Lease) -> Sending:
        assert part.before is not None
        assert part.snapshot is not None
        message = Message(
            part.number, part.phase, part.call.wire(), part.nbytes, 0, unasked=part.unasked, origin=self._origin(part)
        )
        operands = (part.before, part.snapshot)
        size = sum([padded(s.nbytes) for each in operands for s in each.storages])
        return Sending(lease, message, operands, size, part)
