"""A worker process: it compares calls of the run that started it (`pool`).

The bytes of a call lie in memory that both processes map. The answer to a call that is right, or off by no more than
its kernel is known to be, is its rows; any other call is handed back, and the run compares it itself: what is wrong is
found, shown and saved in one place.
"""

from __future__ import annotations

import mmap
import os
import time
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple, NoReturn

import torch

from ..call.description import Tensor
from ..call.own_operators import NotKnown, Origin
from ..compat import forget_compilers
from ..copies.invocation import BACKWARD, Invocation, Region
from ..copies.operands import Operands, tensors_over
from ..copies.queue import MemoryBudget
from ..judge.verdict import RIGHT, WEAK, Rules
from ..native import measuring
from .judges.host import Comparer, ForwardRun
from .ladder import Job

_BATCH: Final = 8  # answers that are sent together
Spans = tuple[tuple[int, int], ...]  # of each storage: where its bytes begin in the shared memory, and how many


class Options(NamedTuple):
    """What all comparisons of a run have in common."""

    rules: Rules
    kept_bytes: int  # of golden runs that wait for a backward
    max_bytes: int
    max_seconds: float


class Message(NamedTuple):
    """A job on its way to a worker; trees go by numbers, and are sent once each."""

    number: int
    phase: str
    call: tuple[str, Region, tuple[int, int]]  # see `Invocation.wire`
    nbytes: int
    memory: int  # names the call and its backward; zero where no backward can come
    before: int = 0  # tree of the arguments; zero for a backward, whose arguments the worker has
    before_spans: Spans = ()
    after: int = 0  # tree of the values: see `Job`
    after_spans: Spans = ()
    unasked: tuple[int, ...] = ()
    origin: Origin | None = None  # of an operator of the user's own


class Answer(NamedTuple):
    """What came out: `rows` where nothing is wrong; if None, the job is handed back, with arguments that were kept."""

    number: int
    rows: list[tuple[Any, ...]] | None
    failure: str = ""  # what went wrong in the worker, if anything did
    known: bool = True  # it has the operator
    tree: Any = None
    before: list[bytes] | None = None
    seconds: float = 0.0  # that comparing took


class _Remembered(NamedTuple):
    tree: Any
    flats: list[Tensor]
    forward: ForwardRun


class Worker:
    """Compares what it is sent."""

    def __init__(self, buffer: Tensor, options: Options) -> None:
        self._buffer = buffer
        limits = MemoryBudget(options.kept_bytes), options.max_bytes, options.max_seconds
        self._comparer = Comparer(options.rules, *limits, only_gradients=True)
        self._trees: dict[int, Any] = {}
        self._remembered: dict[int, _Remembered] = {}

    def serve(self, connection: Connection) -> None:
        """Answer until the run ends; answers are batched while more messages wait."""
        answers: list[Answer] = []
        while True:
            try:
                kind, message = connection.recv()
                if kind == "tree":
                    number, tree = message
                    self._trees[number] = tree
                elif kind == "batch":
                    trees, messages = message
                    self._trees.update(trees)
                    answers += map(self.answer, messages)
                elif kind == "forget":
                    for number in message:
                        self._remembered.pop(number, None)
                else:
                    answers.append(self.answer(message))
                if answers and (len(answers) >= _BATCH or not connection.poll(0)):
                    connection.send(answers)
                    answers = []
            except (EOFError, OSError):
                return

    def answer(self, message: Message) -> Answer:
        """Compare one call (`worker.answer(message).rows is None`)."""
        rows, failure, known, started = None, "", True, time.perf_counter()
        try:
            given = self._given(message)
            call = Invocation.from_wire(*message.call, message.origin)
            started = time.perf_counter()  # what is imported once does not count
            rows = self._rows(message, call, given)
        except NotKnown:
            known = False
        except Exception as error:  # the run compares it itself, and reports what failed here
            failure = f"{type(error).__name__}: {error}"
        kept = self._remembered.get(message.memory) if rows is None and message.phase == BACKWARD else None
        if kept is None:
            return Answer(message.number, rows, failure, known, seconds=time.perf_counter() - started)
        return Answer(message.number, None, failure, known, kept.tree, [f.numpy().tobytes() for f in kept.flats])

    def _given(self, message: Message) -> _Remembered:
        """The arguments; those of a call whose backward may come are kept."""
        if not message.before:
            return self._remembered[message.memory]
        found = _Remembered(self._trees[message.before], self._flats(message.before_spans), ForwardRun())
        if message.memory:
            found = self._remembered[message.memory] = found._replace(flats=[f.clone() for f in found.flats])
        return found

    def _rows(self, message: Message, call: Invocation, given: _Remembered) -> list[tuple[Any, ...]] | None:
        tree, flats, forward = given
        job = Job(call, message.phase, nbytes=message.nbytes, unasked=message.unasked)
        job.args, job.kwargs = tensors_over(tree, flats)
        values = self._flats(message.after_spans)
        job.values = tensors_over(self._trees[message.after], values)
        if message.before:
            job.before = Operands(tree, (), None, 0)
            job.snapshot, job.flats = Operands(self._trees[message.after], (), None, 0), (flats, values)
        found = self._comparer.compare(job, forward if message.memory else None)
        settled = found.verdict in (RIGHT, WEAK) and not job.suspicion
        return list(map(tuple, found.rows)) if settled else None

    def _flats(self, spans: Spans) -> list[Tensor]:
        return [self._buffer[start : start + count] for start, count in spans]


def main(socket: int, memory: int, size: int) -> NoReturn:
    """Serve the process that holds the other end of a socket; both map `size` bytes of a file.

    The fork server has left signals to the run, and limited PyTorch to one thread.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # only the run knows what it allows
    connection = Connection(socket)
    try:
        options = connection.recv()
        worker = Worker(torch.frombuffer(mmap.mmap(memory, size), dtype=torch.uint8), options)
        measuring.prepare()
        forget_compilers()
        connection.send(os.getpid())
        worker.serve(connection)
    except (EOFError, OSError):
        pass
    os._exit(0)  # at once: the run waits, and there is nothing to clean up
