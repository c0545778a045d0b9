"""Times of calls and of their backward passes, kept in C++ without a hook on any node; OpTimeMeasure asks for them.

A call is known by the numbers that its nodes got in the forward pass: PyTorch counts nodes per thread. Where there is
no compiler, or it has not finished yet, or another tool listens already, hooks on the nodes do the same, slower.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from ..compat import sequence_number
from ..native import compiling
from ..view import console
from . import patches
from .backward import WITHOUT_KERNEL

_SOURCE: Final = compiling.SOURCES / "backward_clock.cpp"
_CALLBACK: Final = "at::addGlobalCallback, of backward functions"
_MAX_CALLS: Final = 200_000  # of a thread that may still be run backward
_AT_ONCE: Final = 1_024  # times
_LIGHT: Final = "\n".join(sorted(WITHOUT_KERNEL)).encode()
# A time, as `Row` of backward_clock.cpp has it: the call, whether it is of its backward, who ran it, when it began by
# the host's clock in nanoseconds, and milliseconds.
_ROW: Final = np.dtype(
    [(name, "i8") for name in ("id", "site", "step", "backward", "thread", "began")] + [("elapsed", "f8")]
)


class Way(enum.IntEnum):
    """What the backward pass of a call is timed by."""

    EVENTS = 0
    HOST = 1  # the host's clock
    NONE = 2  # it runs on another accelerator


class Counts(NamedTuple):
    """How much a clock holds: times to be read, calls that may be run backward, device events that nobody uses."""

    waiting: int
    calls: int
    events: int


class BackwardClock:
    """Listens to the autograd engine from `listening` until `stop`."""

    def __init__(self, short: Any, waiting: Any, number: int) -> None:
        self._short, self._waiting = short, waiting
        self._listening = True
        self._rows = np.zeros(_AT_ONCE, dtype=_ROW)
        self.sequence: Callable[[], int] = sequence_number or short.op_tools_clock_sequence
        found = (
            short.op_tools_clock_mark,
            short.op_tools_clock_release,
            short.op_tools_clock_sequence,
            short.op_tools_clock_ran,
        )
        # what `native.front` needs: addresses of functions, and which listening it is
        self.functions = [*(ctypes.cast(function, ctypes.c_void_p).value for function in found), number]

    @classmethod
    def listening(cls, device_type: str) -> BackwardClock | None:
        """A clock that has started, or None where there cannot be one (`BackwardClock.listening("cuda")`)."""
        libraries = LIBRARIES.get()
        if libraries is None:
            return None
        short, waiting = libraries
        number = short.op_tools_clock_start(device_type.encode(), _LIGHT, _MAX_CALLS)
        if not number:
            return None
        clock = cls(short, waiting, number)
        patches.record(_CALLBACK, "tells in C++ which autograd node ran when", clock._end, "native")
        return clock

    def note(self, start: int, end: int, call: tuple[int, int, int], way: Way) -> None:
        """The nodes of a call (id, site, step) have the numbers from `start` up to `end` of this thread."""
        self._short.op_tools_clock_note(start, end, *call, way)

    def passes(self, graph_is_kept: bool) -> None:
        """Backward passes have ended, and none is under way: their times wait to be read (`clock.passes(False)`)."""
        self._short.op_tools_clock_passes(graph_is_kept)

    def read(self, wait: bool) -> Any:
        """Times from the oldest on that the device has passed, as rows; with `wait`, all that there are.

        >>> clock.read(wait=True)["elapsed"].sum()  # doctest: +SKIP
        """
        found, taken = list[Any](), ctypes.c_int64(_AT_ONCE)
        while taken.value == _AT_ONCE:
            place = self._rows.ctypes.data
            count = self._waiting.op_tools_clock_read(place, _AT_ONCE, wait, ctypes.byref(taken))
            found.append(self._rows[:count].copy())
        return found[0] if len(found) == 1 else np.concatenate(found)

    def counts(self) -> Counts:
        """How much it holds (`clock.counts().waiting`)."""
        numbers = (ctypes.c_int64 * 3)()
        self._short.op_tools_clock_count(numbers)
        return Counts(*numbers)

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
    address, number = ctypes.c_void_p, ctypes.c_int64
    short.op_tools_clock_start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, number]
    short.op_tools_clock_sequence.restype = ctypes.c_uint64
    short.op_tools_clock_note.argtypes = [number] * 6
    short.op_tools_clock_count.argtypes = [address]
    for function in (short.op_tools_clock_note, short.op_tools_clock_count, short.op_tools_clock_stop):
        function.restype = None
    short.op_tools_clock_passes.restype = number
    waiting.op_tools_clock_read.argtypes = [address, number, ctypes.c_int, address]
    waiting.op_tools_clock_read.restype = number
    return short, waiting


LIBRARIES: Final = compiling.Library("clock", _load)
