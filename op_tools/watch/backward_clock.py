"""When autograd nodes ran, heard in C++ without a hook on any node; OpTimeMeasure asks it for backward times.

A call is known by the numbers that its nodes got in the forward pass: PyTorch counts nodes per thread. Where there is
no compiler, or it is not through yet, or another tool listens already, hooks on the nodes do the same, slower.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ..compat import sequence_number
from ..native import compiling
from ..view import console
from .backward import WITHOUT_KERNEL

_SOURCE: Final = compiling.SOURCES / "backward_clock.cpp"
_MOST_CALLS: Final = 50_000  # of a thread that may still be run backward
_AT_ONCE: Final = 1_024
_LIGHT: Final = "\n".join(sorted(WITHOUT_KERNEL)).encode()


class Span(ctypes.Structure):
    """One run of one node. The last two are device events, None where the host's clock must do."""

    _fields_ = (
        ("thread", ctypes.c_uint64),
        ("sequence", ctypes.c_int64),
        ("runner", ctypes.c_int64),
        ("light", ctypes.c_int64),
        ("began", ctypes.c_int64),
        ("ended", ctypes.c_int64),
        ("first", ctypes.c_void_p),
        ("last", ctypes.c_void_p),
    )


class Pass(NamedTuple):
    """The backward pass of one call."""

    call: Any
    began: int  # nanoseconds of the host's clock
    host_ns: int  # spent in its nodes
    events: tuple[int, ...]  # first and last of each node, one after the other; empty where the host's clock must do
    thread: int


class _Thread:
    """Calls of one thread by the numbers of their nodes."""

    __slots__ = ("calls", "ends", "number", "starts")

    def __init__(self, number: int) -> None:
        self.number = number
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.calls: list[Any] = []

    def note(self, start: int, end: int, call: Any) -> None:
        if len(self.calls) >= _MOST_CALLS:
            self.keep(range(_MOST_CALLS // 2, len(self.calls)))
        self.starts.append(start)
        self.ends.append(end)
        self.calls.append(call)

    def find(self, sequence: int) -> int | None:
        place = bisect_right(self.starts, sequence) - 1
        return place if place >= 0 and sequence < self.ends[place] else None

    def keep(self, places: Any) -> None:
        self.starts = [self.starts[i] for i in places]
        self.ends = [self.ends[i] for i in places]
        self.calls = [self.calls[i] for i in places]


class BackwardClock:
    """Listens to the autograd engine from `listening` until `stop`."""

    def __init__(self, short: Any, waiting: Any) -> None:
        self._short, self._waiting = short, waiting
        self._threads: dict[int, _Thread] = {}  # by Python's number of the thread
        self._by_number: dict[int, _Thread] = {}  # by PyTorch's
        self._taken = (Span * _AT_ONCE)()
        self._guard = threading.Lock()
        self.sequence: Callable[[], int] = sequence_number or short.op_tools_clock_sequence
        self.ready: Callable[[int], int] = short.op_tools_clock_ready
        self.elapsed: Callable[[int, int], float] = waiting.op_tools_clock_elapsed

    @classmethod
    def listening(cls, device_type: str) -> BackwardClock | None:
        """A clock that has started, or None where there cannot be one (`BackwardClock.listening("cuda")`)."""
        libraries = LIBRARIES.get()
        if libraries is None or not libraries[0].op_tools_clock_start(device_type.encode(), _LIGHT):
            return None
        return cls(*libraries)

    def note(self, start: int, end: int, call: Any) -> None:
        """The nodes of a call have the numbers from `start` up to `end` of this thread (`clock.note(7, 9, call)`)."""
        here = threading.get_ident()
        thread = self._threads.get(here)
        if thread is None:
            thread = _Thread(int(self._short.op_tools_clock_thread()))
            self._threads[here] = self._by_number[thread.number] = thread
        if thread.starts and start < thread.ends[-1]:  # the thread's number was given to a new one
            thread = _Thread(int(self._short.op_tools_clock_thread()))
            self._threads[here] = self._by_number[thread.number] = thread
        thread.note(start, end, call)

    def passes(self, graph_is_kept: bool) -> list[Pass]:
        """Backward passes heard since the last time; call it when no pass is under way (`clock.passes(False)`)."""
        with self._guard:
            found: dict[tuple[int, int], list[Span]] = {}
            while True:
                count = self._short.op_tools_clock_take(self._taken, _AT_ONCE)
                for span in self._taken[:count]:
                    thread = self._by_number.get(span.thread)
                    place = None if thread is None else thread.find(span.sequence)
                    if place is None:
                        self._short.op_tools_clock_release(span.first, span.last)
                    else:
                        found.setdefault((span.thread, place), []).append(Span.from_buffer_copy(span))
                if count < _AT_ONCE:
                    break
            passes = [self._pass(self._by_number[key[0]].calls[key[1]], spans) for key, spans in found.items()]
            if not graph_is_kept:
                self._forget(found)
            return passes

    def release(self, events: tuple[int | None, ...]) -> None:
        """Nobody will ask how far apart these are (`clock.release(one.events)`)."""
        for pair in zip(events[::2], events[1::2]):
            self._short.op_tools_clock_release(*pair)

    def _pass(self, call: Any, spans: list[Span]) -> Pass:
        kept = [span for span in spans if not span.light] or spans
        if len(kept) < len(spans):
            self.release(_marks([span for span in spans if span.light]))
        host = sum([span.ended - span.began for span in kept])
        began = min([span.began for span in spans])
        events = _marks(kept)
        if not all(events):
            self.release(events)
            events = ()
        return Pass(call, began, host, events, kept[0].runner)

    def _forget(self, heard: Any) -> None:
        gone: dict[int, set[int]] = {}
        for number, place in heard:
            gone.setdefault(number, set()).add(place)
        for number, places in gone.items():
            thread = self._by_number[number]
            thread.keep([i for i in range(len(thread.calls)) if i not in places])

    def stop(self) -> None:
        """Listen no more (`clock.stop()`)."""
        self._short.op_tools_clock_stop()


def _marks(spans: list[Span]) -> tuple[Any, ...]:
    return tuple([mark for span in spans for mark in (span.first, span.last)])


def _load() -> tuple[Any, Any] | None:
    """The library twice: for calls that return at once, and for those that may wait and let other threads go on."""
    path = compiling.against_torch(
        _SOURCE, lambda: console.note("compiling the backward clock in the background (once); until then, hooks do")
    )
    if path is None:
        return None
    short, waiting = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
    short.op_tools_clock_start.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    short.op_tools_clock_thread.restype = short.op_tools_clock_sequence.restype = ctypes.c_uint64
    short.op_tools_clock_take.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    short.op_tools_clock_take.restype = ctypes.c_int64
    short.op_tools_clock_ready.argtypes = [ctypes.c_void_p]
    short.op_tools_clock_release.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    short.op_tools_clock_release.restype = short.op_tools_clock_stop.restype = None
    waiting.op_tools_clock_elapsed.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    waiting.op_tools_clock_elapsed.restype = ctypes.c_double
    return short, waiting


LIBRARIES: Final = compiling.Library("clock", _load)
