"""One worker process, as the run sees it: the memory that both map, its conversation, and what it has to do."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ..call.description import Tensor
from ..call.devices import can_pin
from ..copies.operands import padded
from .forkserver import ForkServer
from .ring import Ring
from .worker import Answer, Message, Options

RING: Final = 32 << 20  # bytes of calls that wait for one worker
_SOCKET_BYTES: Final = 1 << 20  # of messages that wait for one worker, if the system allows as many
_STALLED_SECONDS: Final = 20.0  # without using the processor, while it has calls to judge
_MAX_PIECES: Final = 1000  # in one system call
_NOTHING: Final = memoryview(bytes(4096))  # between two pieces


class Lease:
    """A worker's promise to compare a call and its backward; ends with the object."""

    def __init__(self, worker: Process, memory: int) -> None:
        self.worker, self.memory = worker, memory
        self.kind: Hashable = None
        self.weight = 0  # microseconds of work that wait to be sent
        self.tried = threading.Event()
        self.there = False  # the arguments have arrived

    def __del__(self) -> None:
        self.worker.unneeded.append(self.memory)
        self.worker.load -= self.weight  # if it was never sent


class Flight(NamedTuple):
    """A call that was sent and not answered."""

    start: int  # of its span in the ring
    given: Any
    message: Message
    weight: int  # in the worker's load
    kind: Hashable = None


class Process:
    """One worker process, the memory shared with it, and the jobs that it has."""

    def __init__(self, server: ForkServer, complete: bool, options: Options, device: torch.device) -> None:
        self.device = device
        self.unneeded: deque[int] = deque()
        self.flights: dict[int, Flight] = {}
        self.ready = self.ended = False
        self.load = 0  # microseconds of work that were given to it and are not done
        self.kinds: set[Hashable] = set()  # of calls that it has compared
        self.change = threading.Condition()
        self._sending = threading.Lock()
        self.trees: set[int] = set()  # that it has
        self._ring = Ring(RING)
        self._pinned = self._asked_to_pin = False
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._memory = os.memfd_create("op_tools-comparisons")
        try:
            os.ftruncate(self._memory, RING)
            self._mapped = mmap.mmap(self._memory, RING)
            self.buffer = torch.frombuffer(self._mapped, dtype=torch.uint8)
            self.process = server.fork(theirs.fileno(), self._memory, RING, complete)
        except BaseException:
            os.close(self._memory)
            raise
        finally:
            theirs.close()
        self._connection = Connection(ours.detach())
        self._connection.send(options)

    def wait_until_ready(self) -> None:
        """Wait until it has started; raises EOFError if it exits instead."""
        self.process.started(self._connection.recv())
        self.ready = True

    def pin(self) -> None:
        """Pin the memory before the device writes to it the first time: the training waits while that is done."""
        if self._asked_to_pin:
            return
        self._asked_to_pin = True
        if self.device.type == "cuda" and can_pin("cuda"):
            with torch.cuda.device(self.device):  # this thread would use the first GPU, of other ranks
                self._pinned = not int(torch.cuda.cudart().cudaHostRegister(self.buffer.data_ptr(), RING, 0))

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

    def send_batch(
        self, flights: Sequence[Flight], pieces: Sequence[tuple[int, Tensor]], trees: Sequence[tuple[int, Any]]
    ) -> list[Flight]:
        """Copy bytes to places in the ring, and send calls in one message; those that have not gone."""
        with self._sending:
            try:
                write_pieces(self._memory, pieces)
            except OSError:  # it has ended
                return list(flights)
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

    def send(self, flight: Flight, trees: Sequence[tuple[int, Any]]) -> None:
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
        memory, self._memory = self._memory, -1
        if memory >= 0:
            os.close(memory)


def spans_of(storages: Sequence[Tensor], start: int) -> list[tuple[int, int]]:
    """Where storages lie, one behind the other."""
    spans = []
    for storage in storages:
        spans.append((start, storage.nbytes))
        start += padded(storage.nbytes)
    return spans


def write_pieces(file: int, pieces: Sequence[tuple[int, Tensor]]) -> None:
    """Write bytes of tensors to their places, neighbours at once: each system call hands the GIL over."""
    waiting: list[Any] = []
    first = end = 0
    for start, storage in pieces:
        if not end <= start <= end + len(_NOTHING) or len(waiting) >= _MAX_PIECES:
            _write_all(file, waiting, first)
            waiting, first, end = [], start, start
        if start > end:
            waiting.append(_NOTHING[: start - end])
        waiting.append(storage.numpy())
        end = start + storage.nbytes
    _write_all(file, waiting, first)


def _write_all(file: int, pieces: Sequence[Any], start: int) -> None:
    """Write buffers one behind the other, from a place on."""
    while pieces:
        written = os.pwritev(file, pieces, start)
        start += written
        for number, piece in enumerate(pieces):
            if written < piece.nbytes:  # a signal came
                pieces = [memoryview(piece)[written:], *pieces[number + 1 :]]
                break
            written -= piece.nbytes
        else:
            return
