"""A process that compares calls of a run in another one; `compare_pool` starts it and says what it is sent.

The bytes of a call lie in memory that both map. The answer to a call that is right is its rows; any other call is
handed back, and the run looks at it itself: what is wrong is found, shown and saved in one place.
"""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import torch

from .. import lifecycle
from ..call.description import Tensor
from ..call.traits import OpTraits, traits_of
from ..judge.verdict import RIGHT, Rules
from ..native import measuring
from ..replay import captured
from .comparing import Comparer, Comparison, Memory, rebuilt
from .precheck import Room

_AT_ONCE: Final = 8  # answers
Spans = tuple[tuple[int, int], ...]  # of each storage: where its bytes begin in the shared memory, and how many


class Options(NamedTuple):
    """What all comparisons of a run have in common."""

    rules: Rules
    room: int  # bytes of golden runs that wait for a backward
    max_bytes: int
    max_seconds: float


class Task(NamedTuple):
    """A call to compare; trees go by numbers, and are sent once each."""

    number: int
    phase: str
    op: str
    device: str
    numbers: tuple[int, int]
    nbytes: int
    rounded_to: torch.dtype | None
    autocast: torch.dtype | None
    grad_enabled: bool
    memory: int  # of the call and its backward
    before: int  # tree of the arguments; zero for a backward, whose arguments are here
    before_spans: Spans
    after: int  # tree of what they are afterwards and the result, or of gradients sent and found
    after_spans: Spans


class Answer(NamedTuple):
    """What came out: `rows` where all is right; if None, the call is handed back, with arguments kept here."""

    number: int
    rows: list[tuple[Any, ...]] | None
    tree: Any = None
    before: list[bytes] | None = None


class _Remembered(NamedTuple):
    tree: Any
    flats: list[Tensor]
    memory: Memory


class Helper:
    """Compares what it is sent."""

    def __init__(self, buffer: Tensor, options: Options) -> None:
        self._buffer = buffer
        self._comparer = Comparer(options.rules, Room(options.room), options.max_bytes, options.max_seconds)
        self._trees: dict[int, Any] = {}
        self._remembered: dict[int, _Remembered] = {}

    def serve(self, connection: Connection) -> None:
        """Go on until the other side is gone; answers wait for each other while there is more to do."""
        answers: list[Answer] = []
        while True:
            try:
                kind, message = connection.recv()
                if kind == "tree":
                    number, tree = message
                    self._trees[number] = tree
                elif kind == "forget":
                    for number in message:
                        self._remembered.pop(number, None)
                else:
                    answers.append(self.answer(message))
                if answers and (len(answers) >= _AT_ONCE or not connection.poll(0)):
                    connection.send(answers)
                    answers = []
            except (EOFError, OSError):
                return

    def answer(self, task: Task) -> Answer:
        """Compare one call (`helper.answer(task).rows is None`)."""
        rows = None
        try:
            rows = self._rows(task)
        except Exception:  # the run finds out itself
            pass
        if rows is not None or task.phase == "forward":
            return Answer(task.number, rows)
        known = self._remembered.get(task.memory)
        if known is None:
            return Answer(task.number, None)
        return Answer(task.number, None, known.tree, [f.numpy().tobytes() for f in known.flats])

    def _rows(self, task: Task) -> list[tuple[Any, ...]] | None:
        if task.before:
            tree, flats = self._trees[task.before], self._flats(task.before_spans)
            memory = Memory()
            if task.memory:
                flats = [f.clone() for f in flats]
                self._remembered[task.memory] = _Remembered(tree, flats, memory)
        else:
            tree, flats, memory = self._remembered[task.memory]
        args, kwargs = rebuilt(tree, flats)
        after = rebuilt(self._trees[task.after], self._flats(task.after_spans))
        names = ("args", "kwargs", "result") if task.phase == "forward" else ("grad_outputs", "grad_inputs")
        function, traits = _operator(task.op)
        comparison = Comparison(
            task.phase,
            task.op,
            function,
            traits,
            task.device,
            task.numbers,
            args,
            kwargs,
            dict(zip(names, after)),
            task.nbytes,
            task.rounded_to,
            task.autocast,
            task.grad_enabled,
            memory if task.memory else None,
        )
        found = self._comparer.compare(comparison)
        return [tuple(vars(row).values()) for row in found.rows] if found.verdict == RIGHT else None

    def _flats(self, spans: Spans) -> list[Tensor]:
        return [self._buffer[start : start + count] for start, count in spans]


@functools.lru_cache(maxsize=4096)
def _operator(name: str) -> tuple[Callable[..., Any], OpTraits]:
    function = captured.function_of(name)
    return function, traits_of(function)


def main(socket: int, memory: int, size: int) -> None:
    """Serve the process that holds the other end of a socket; both map `size` bytes of a file."""
    lifecycle.ignore_ctrl_c()  # this process ends when the run does
    torch.set_num_threads(1)
    connection = Connection(socket)
    try:
        options = connection.recv()
        helper = Helper(torch.frombuffer(mmap.mmap(memory, size), dtype=torch.uint8), options)
        measuring.prepare()
        connection.send("ready")
        helper.serve(connection)
    except (EOFError, OSError):
        pass
    os._exit(0)  # at once: the run waits, and there is nothing to clean up
