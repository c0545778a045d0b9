"""When autograd nodes ran, heard in C++ without a hook on any node; OpTimeMeasure asks it for backward times.

A call is known by the numbers that its nodes got in the forward pass: PyTorch counts nodes per thread. Where there is
no compiler, or it has not finished yet, or another tool listens already, hooks on the nodes do the same, slower.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Container
from typing import Any, Final, NamedTuple

import numpy as np

from ..compat import sequence_number
from ..native import compiling
from ..view import console
from . import patches
from .backward import WITHOUT_KERNEL

_SOURCE: Final = compiling.SOURCES / "backward_clock.cpp"
_CALLBACK: Final = "at::addGlobalCallback, of backward functions"
_MAX_NODES: Final = 200_000  # of a thread that may still be run backward
_MAX_SPANS: Final = 1_024
_LIGHT: Final = "\n".join(sorted(WITHOUT_KERNEL)).encode()


_COLUMNS: Final = 8  # of one run of one node, as `Span` of backward_clock.cpp has them


class Pass(NamedTuple):
    """The backward pass of one call."""

    call: Any  # a tuple whose first member is its id
    began: int  # nanoseconds of the host's clock
    host_ns: int  # spent in its nodes
    events: bytes  # addresses of first and last of each node, in turns; empty where the host's clock must do
    thread: int
    idle: bool = False  # no kernel runs in it


class _Heard:
    """What was heard of the backward pass of one call so far."""

    __slots__ = ("began", "call", "events", "host_ns", "light_ns", "runner")

    def __init__(self, call: Any, runner: int, began: int) -> None:
        self.call, self.runner, self.began = call, runner, began
        self.host_ns = self.light_ns = 0  # in nodes that run a kernel, and in the others
        self.events: list[int] = []  # of the first: 0 where the host's clock must do


class _Thread:
    """Calls of one thread by the numbers of their nodes; another thread may run them backward."""

    __slots__ = ("calls", "end", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.end = 0
        self.calls: dict[int, Any] = {}  # its methods need no lock

    def note(self, start: int, end: int, call: Any) -> bool:
        """False where node numbers have started again: Python gave the thread's number to a new thread."""
        if start < self.end:
            return False
        calls = self.calls
        if len(calls) >= _MAX_NODES:
            for oldest in list(calls)[: _MAX_NODES // 2]:
                calls.pop(oldest, None)
        self.end = end
        for number in range(start, end):
            calls[number] = call
        return True

    def forget(self, ids: Container[int]) -> None:
        """These calls have been run backward, and will not be again."""
        calls = self.calls
        for number in [number for number, call in calls.copy().items() if call[0] in ids]:
            calls.pop(number, None)


class BackwardClock:
    """Listens to the autograd engine from `listening` until `stop`."""

    def __init__(self, short: Any, waiting: Any) -> None:
        self._short = short
        self._listening = True
        self._threads: dict[int, _Thread] = {}  # by Python's number of the thread
        self._by_number: dict[int, _Thread] = {}  # by PyTorch's
        self._taken = np.zeros((_MAX_SPANS, _COLUMNS), dtype=np.int64)
        self._guard = threading.Lock()
        self.sequence: Callable[[], int] = sequence_number or short.op_tools_clock_sequence
        self._waiting = waiting
        found = (short.op_tools_clock_mark, short.op_tools_clock_release)
        self.functions = [ctypes.cast(function, ctypes.c_void_p).value for function in found]  # for `native.front`

    @classmethod
    def listening(cls, device_type: str) -> BackwardClock | None:
        """A clock that has started, or None where there cannot be one (`BackwardClock.listening("cuda")`)."""
        libraries = LIBRARIES.get()
        if libraries is None or not libraries[0].op_tools_clock_start(device_type.encode(), _LIGHT):
            return None
        clock = cls(*libraries)
        patches.record(_CALLBACK, "tells in C++ which autograd node ran when", clock._end, "native")
        return clock

    def note(self, start: int, end: int, call: Any) -> None:
        """The nodes of a call have the numbers from `start` up to `end` of this thread (`clock.note(7, 9, (12,))`)."""
        here = threading.get_ident()
        thread = self._threads.get(here)
        if thread is None or not thread.note(start, end, call):
            thread = _Thread(int(self._short.op_tools_clock_thread()))
            self._threads[here] = self._by_number[thread.number] = thread
            thread.note(start, end, call)

    def passes(self, graph_is_kept: bool) -> list[Pass]:
        """Backward passes heard since the last time; call it when no pass is under way (`clock.passes(False)`)."""
        with self._guard:
            found: dict[int, _Heard] = {}  # by id of the call
            heard: set[int] = set()  # numbers of threads
            count = _MAX_SPANS
            while count == _MAX_SPANS:
                count = self._short.op_tools_clock_take(self._taken.ctypes.data, _MAX_SPANS)
                for number, sequence, runner, light, began, ended, first, last in self._taken[:count].tolist():
                    thread = self._by_number.get(number)
                    call = None if thread is None else thread.calls.get(sequence)
                    if call is None:
                        self._short.op_tools_clock_release(first, last)
                        continue
                    heard.add(number)
                    known = found.get(call[0])
                    if known is None:
                        known = found[call[0]] = _Heard(call, runner, began)
                    if light:
                        known.light_ns += ended - began
                    else:
                        known.runner = known.runner if known.events else runner
                        known.host_ns += ended - began
                        known.events += (first, last)
                    if began < known.began:
                        known.began = began
            for number in () if graph_is_kept else heard:
                self._by_number[number].forget(found)
            return [self._pass(one) for one in found.values()]

    def times(self, events: list[bytes], wait: bool) -> list[float]:
        """Milliseconds of timings, each the sum over its pairs of events, negative where they cannot be known.

        Those from the first on that the device has passed; with `wait`, all. Others may use their events from now on.
        """
        pairs = np.array([len(one) // 16 for one in events], dtype=np.int64)
        addresses, found = np.frombuffer(b"".join(events), dtype=np.int64), np.empty(len(events))
        places = (addresses.ctypes.data, pairs.ctypes.data, len(events), wait, found.ctypes.data)
        count = self._waiting.op_tools_clock_read(*places)
        done: list[float] = found[:count].tolist()
        return done

    def release(self, events: bytes) -> None:
        """Nobody will ask how far apart these are (`clock.release(one.events)`)."""
        addresses = np.frombuffer(events, dtype=np.int64).tolist()
        for pair in zip(addresses[::2], addresses[1::2]):
            self._short.op_tools_clock_release(*pair)

    def _pass(self, heard: _Heard) -> Pass:
        events = heard.events
        if not events:
            return Pass(heard.call, heard.began, heard.light_ns, b"", heard.runner, idle=True)
        packed = struct.pack(f"={len(events)}q", *events)
        if not all(events):
            self.release(packed)
            packed = b""
        return Pass(heard.call, heard.began, heard.host_ns, packed, heard.runner)

    def stop(self) -> None:
        """Listen no more (`clock.stop()`)."""
        if self._listening:
            patches.undo(_CALLBACK)

    def _end(self) -> None:
        self._listening = False
        self._short.op_tools_clock_stop()


def _load() -> tuple[Any, Any] | None:
    """The library twice: for calls that return at once, and for those that may wait and let other threads go on."""
    path = compiling.against_torch(
        _SOURCE,
        lambda: console.note("compiling the backward clock in the background (once); until then, node hooks"),
    )
    if path is None:
        return None
    short, waiting = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
    short.op_tools_clock_start.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    short.op_tools_clock_thread.restype = short.op_tools_clock_sequence.restype = ctypes.c_uint64
    short.op_tools_clock_take.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    short.op_tools_clock_take.restype = ctypes.c_int64
    short.op_tools_clock_release.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    short.op_tools_clock_release.restype = short.op_tools_clock_stop.restype = None
    address, number = ctypes.c_void_p, ctypes.c_int64
    waiting.op_tools_clock_read.argtypes = [address, address, number, ctypes.c_int, address]
    waiting.op_tools_clock_read.restype = number
    return short, waiting


LIBRARIES: Final = compiling.Library("clock", _load)
