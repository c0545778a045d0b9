"""Code made by `torch.compile`: tools leave it alone, forward and backward, and its share of the run is measured.

Dynamo would trace a function mode along with the function, break the graph at each operator, and compile again for
every tool. A kernel of a compiled graph is no operator of the user's program either: it gets buffers that are used
again, and values that another kernel of the graph prepared for it. So the interceptor is off

- while a compiled function runs, what Dynamo could not compile included,
- while a node that AOTAutograd made runs in the backward pass, the compilation of that backward included,
- while any other node that a compiled function made runs Python in the backward pass: recomputation, hooks, and
  custom functions.
"""

from __future__ import annotations

import bisect
import contextlib
import importlib.abc
import importlib.machinery
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ..call.devices import accelerator_type, event_class, module_of
from ..compat import (
    DYNAMO_FRAMES,
    DYNAMO_WRAPPERS,
    compilations,
    current_node,
    is_compiled_node,
    pop_own_dispatch_modes,
    push_dispatch_modes,
    sequence_number,
)
from ..view.console import note

if TYPE_CHECKING:
    from .intercept import Interceptor

FORWARD, BACKWARD = "forward", "backward"
SEEN: Final = "op_tools.seen"  # key in the metadata of a node that compiled code made: its backward is compared
_MAX_RANGES: Final = 10_000
_NOTE: Final = "code made by torch.compile is not watched, forward or backward (TORCH_COMPILE_DISABLE=1 turns it off)"
_MAX_DEPTH: Final = 3  # of functions around a function


class Tally(NamedTuple):
    """Runs of compiled code, and the time of those that are not inside of others."""

    forward: int = 0
    backward: int = 0
    timed: int = 0  # these compiled nothing
    seconds: float = 0.0
    compiling: int = 0  # these compiled something
    compile_seconds: float = 0.0

    def counting(self, phase: str) -> Tally:
        """With one run more."""
        return self._replace(**{phase: getattr(self, phase) + 1})

    def timing(self, seconds: float, compiled: bool) -> Tally:
        """With the time of a run, and whether something was compiled in it; a negative time is not known."""
        if compiled:
            return self._replace(compiling=self.compiling + 1, compile_seconds=self.compile_seconds + seconds)
        return self if seconds < 0 else self._replace(timed=self.timed + 1, seconds=self.seconds + seconds)

    def since(self, earlier: Tally) -> Tally:
        """What came after an earlier tally, or is not among another one's."""
        return Tally._make(now - then for now, then in zip(self, earlier))

    def share(self, elapsed: float) -> float | None:
        """The part of so many seconds that compiled code took, had nothing been compiled; None if no run shows it."""
        if not self.timed:
            return None
        instead = self.compiling * self.seconds / self.timed
        whole = elapsed - self.compile_seconds + instead
        return min((self.seconds + instead) / whole, 1.0) if whole > 0 else 1.0

    def describe(self, elapsed: float) -> str:
        """Runs and their share of the time, "" if there were none (`"6 forward runs, at least 45.2 % of ..."`).

        "At least", since tools slow down what they watch, and not what they leave alone.
        """
        counts = [f"{n:,} {phase}" for n, phase in ((self.forward, FORWARD), (self.backward, BACKWARD)) if n]
        if not counts:
            return ""
        share = self.share(elapsed)
        part = "share of the time unknown" if share is None else f"at least {100 * share:.1f} % of the run's time"
        return f"{' and '.join(counts)} run{'s' * (self.forward + self.backward > 1)}, {part}"


class Regions:
    """Counts and times runs of compiled code, and knows which autograd nodes were made in them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0  # runs under way, in all threads
        self._tally = Tally()
        self._seen = Tally()  # of these, the runs that somebody compares
        # first and last mark, whether something was compiled, and whether somebody compares it
        self._pending: deque[tuple[Any, Any, bool, bool]] = deque()
        self.starts: list[int] = []  # numbers of the first nodes of runs, in ascending order
        self._ends: dict[int, int] = {}

    def enter(self) -> tuple[int, Any, int]:
        """A run begins; `leave` wants what this returns."""
        with self._lock:
            self._depth += 1
            outermost = self._depth == 1
        first = _mark() if outermost else None
        return _next_node(), first, compilations()

    def leave(self, entered: tuple[int, Any, int], phase: str, seen: bool = False) -> None:
        """A run ends, on the thread on which it began; whether somebody compares it."""
        node, first, compiled = entered
        last = None if first is None else _mark()
        number = _next_node()
        with self._lock:
            self._depth -= 1
            self._tally = self._tally.counting(phase)
            self._seen = self._seen.counting(phase) if seen else self._seen
            if first is not None and type(first) is type(last):
                self._pending.append((first, last, compilations() != compiled, seen))
            if number > node:
                self._add_nodes(node, number)
        self._settle(wait=False)

    def _add_nodes(self, start: int, end: int) -> None:
        if len(self.starts) >= _MAX_RANGES:
            for old in self.starts[: _MAX_RANGES // 2]:
                del self._ends[old]
            del self.starts[: _MAX_RANGES // 2]
        if start not in self._ends:
            bisect.insort(self.starts, start)
        self._ends[start] = max(end, self._ends.get(start, 0))

    def made_running_node(self) -> bool:
        """Whether the autograd node that this thread runs was made in compiled code."""
        node = current_node()
        if node is None or is_compiled_node(node):  # around the latter only hooks of the user run
            return False
        number = node._sequence_nr()
        at = bisect.bisect_right(self.starts, number) - 1
        return at >= 0 and number < self._ends.get(self.starts[at], 0)

    def tally(self, wait: bool = False) -> Tally:
        """Runs until now, and the time of those that the device has done, or of all if told to wait."""
        self._settle(wait)
        return self._tally

    def unseen(self, wait: bool = False) -> Tally:
        """The same of runs that nobody compares."""
        return self.tally(wait).since(self._seen)

    def _settle(self, wait: bool) -> None:
        with self._lock:
            while self._pending:
                first, last, compiled, seen = self._pending[0]
                seconds = _seconds(first, last, wait)
                if seconds is None:
                    return
                self._pending.popleft()
                self._tally = self._tally.timing(seconds, compiled)
                self._seen = self._seen.timing(seconds, compiled) if seen else self._seen


_next_node: Final[Callable[[], int]] = sequence_number or (lambda: 0)


def _mark() -> Any:
    """Now, on the device: an event, a time of the host clock if it has none, or None while a graph is captured."""
    here = accelerator_type()
    module = module_of(here)
    try:
        if module is not None and getattr(module, "is_initialized", lambda: True)():
            if here == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            kind = event_class(here)
            if kind is not None:
                event = kind(enable_timing=True)
                event.record()
                return event
    except RuntimeError:
        return None
    return time.perf_counter()


def _seconds(first: Any, last: Any, wait: bool) -> float | None:
    """The time between two marks; None if the device is not there yet, negative if it cannot be known."""
    if isinstance(first, float):
        return float(last - first)
    try:
        if wait:
            last.synchronize()
        elif not last.query():
            return None
        return float(first.elapsed_time(last)) / 1e3
    except Exception:  # two devices, say
        return -1.0


UNKNOWN: Final = object()
_WHOLE_MODULES: Final = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl"})


class CompiledRun:
    """One run of a function that `torch.compile` made: what it got, and when it is over, what it returned."""

    def __init__(self, frame: FrameType, optimizers: tuple[Any, ...]) -> None:
        known = frame.f_locals
        self.function: Any = known.get("fn")
        self.args: tuple[Any, ...] = known.get("args", ())
        self.kwargs: dict[str, Any] = known.get("kwargs", {})
        self.result: Any = UNKNOWN  # also where it raised an error, and where PyTorch keeps it to itself
        self.optimizers = optimizers  # that step inside
        self.notes: dict[Any, Any] = {}  # what tools remember between begin and end

    @property
    def module(self) -> torch.nn.Module | None:
        """The module whose whole forward was compiled, if it was one."""
        owner = getattr(self.function, "__self__", None)
        if isinstance(owner, torch.nn.Module):
            return owner if getattr(self.function, "__name__", "") in _WHOLE_MODULES else None
        inner = getattr(self.function, "__wrapped__", None)  # a module of PyTorch's own, such as Sequential
        return inner if isinstance(inner, torch.nn.Module) else None

    def end(self, frame: FrameType) -> None:
        """Note what it returned."""
        self.result = frame.f_locals.get("result", UNKNOWN)

    def release(self) -> None:
        """Let go of the user's tensors."""
        self.function, self.args, self.kwargs, self.result, self.optimizers = None, (), {}, UNKNOWN, ()
        self.notes.clear()


class _Region(NamedTuple):
    """Compiled code that a thread is in."""

    frame: FrameType | None  # of Dynamo's wrapper; None in a backward pass
    was_on: bool  # whether the thread was watched
    modes: list[Any]  # dispatch modes of op_tools that were on
    entered: Any  # what `Regions.leave` wants; None where the run does not count
    optimizers: tuple[Any, ...]  # that step inside
    run: CompiledRun | None  # None in a backward pass, and where its begin was not seen


class _Thread(threading.local):
    region: _Region | None = None  # the compiled function that the thread is in
    seen = False  # whether somebody compares what runs in it


# Patches ask it first: all that they do in compiled functions is to call the original. Dynamo sees their frames there.
THREAD: Final = _Thread()


class CompiledCode:
    """Switches the interceptor off around compiled code, and what Dynamo would see of op_tools with it."""

    def __init__(self, interceptor: Interceptor, stepped: Callable[[Any], None]) -> None:
        self._interceptor, self._stepped = interceptor, stepped
        self._noted = False

    def switch(self, set_eval_frame: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The function with which Dynamo's wrapper says that it begins and ends to handle a thread's frames."""

        def switched(callback: Any) -> Any:
            wrapper = sys._getframe(1)
            region = THREAD.region
            if region is None:
                if callable(callback) and wrapper.f_code.co_name in DYNAMO_WRAPPERS:
                    THREAD.region = self._enter(wrapper)
            elif region.frame is wrapper:
                prior = set_eval_frame(callback)
                THREAD.region = None
                self._leave(region, FORWARD)
                return prior
            return set_eval_frame(callback)

        return switched

    def apply(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """The function that runs an autograd node which is written in Python."""

        def applied(node: Any, *args: Any) -> Any:
            if THREAD.region is not None or not is_compiled_node(node):
                return apply(node, *args)
            known = SEEN in getattr(node, "metadata", ())
            return self.run(False, apply, node, *args) if not known else self.run_seen(apply, node, *args)

        return applied

    def run(self, counted: bool, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that runs the backward of compiled code, or a whole pass that is compiled.

        `counted` says that the thread is watched, although the interceptor is off just now.
        """
        THREAD.region = region = self._enter(None, counted=counted)
        try:
            return function(*args, **kwargs)
        finally:
            THREAD.region = None
            self._leave(region, BACKWARD)

    def run_seen(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that runs the backward of compiled code which somebody compares."""

        def seen(*args: Any) -> Any:
            THREAD.seen = True
            return function(*args)

        return self.run(False, seen, *args)

    def starts_inside(self) -> bool:
        """A tool starts: whether this thread is in a compiled function, which is then left alone to its end."""
        frame, outermost = sys._getframe(1), None
        while (back := frame.f_back) is not None:
            if _is_wrapper(back.f_code) and callable(back.f_locals.get("callback")):
                outermost = back
            frame = back
        if outermost is not None and THREAD.region is None:
            THREAD.region = self._enter(outermost, inside=True)
        return outermost is not None

    def _enter(self, frame: FrameType | None, inside: bool = False, counted: bool = False) -> _Region:
        """`inside`: compiled code runs already, and the thread is to be watched when it has ended."""
        interceptor, was_on = self._interceptor, inside
        THREAD.seen = False
        modes = pop_own_dispatch_modes()
        if interceptor.is_on():
            was_on = True
            interceptor.take_off()
        counted = counted or was_on
        optimizers: tuple[Any, ...] = ()
        if frame is not None:
            HIDDEN.hide()
            with contextlib.suppress(Exception):  # of objects that answer questions in their own way
                optimizers = tuple(_optimizers_of(frame.f_locals.get("fn")))
        if counted and not self._noted and not all(tool.compares_compiled for tool in interceptor.tools):
            self._noted = True
            note(_NOTE)
        run = None
        if counted and frame is not None and not inside:
            run = CompiledRun(frame, optimizers)
            interceptor.compiled_code_begins(run)
        return _Region(frame, was_on, modes, interceptor.regions.enter() if counted else None, optimizers, run)

    def _leave(self, region: _Region, phase: str) -> None:
        interceptor = self._interceptor
        if region.frame is not None:
            HIDDEN.show()
        if region.entered is not None:
            interceptor.regions.leave(region.entered, phase, THREAD.seen)
            if region.run is not None and region.frame is not None:
                region.run.end(region.frame)
            interceptor.compiled_code_ran(region.run)
            if region.run is not None:
                region.run.release()
        if region.was_on and interceptor.tools and not interceptor.is_on():
            interceptor.put_on()
        push_dispatch_modes(region.modes)
        for optimizer in region.optimizers:
            self._stepped(optimizer)


def forget_region() -> None:
    """This thread is in no compiled function whose end will be noticed."""
    THREAD.region = None


def _is_wrapper(code: CodeType) -> bool:
    return code.co_name in DYNAMO_WRAPPERS and code.co_filename.endswith(DYNAMO_FRAMES)


def _optimizers_of(function: Any, depth: int = 0) -> Iterator[torch.optim.Optimizer]:
    """Optimizers whose `step` a function calls, as far as its code and what it refers to say."""
    owner, plain = getattr(function, "__self__", None), getattr(function, "__func__", function)
    code = getattr(plain, "__code__", None)
    if code is None:
        return
    if isinstance(owner, torch.optim.Optimizer):
        if plain.__name__ == "step":
            yield owner
        return
    cells = [_content(cell) for cell in getattr(plain, "__closure__", None) or ()]
    if "step" in code.co_names:
        known = plain.__globals__
        named = [known.get(name) for name in code.co_names]
        attributes = vars(owner) if hasattr(owner, "__dict__") else {}
        named += [attributes.get(name) for name in code.co_names]
        yield from (each for each in (*cells, *named) if isinstance(each, torch.optim.Optimizer))
    elif depth < _MAX_DEPTH:
        for inner in cells:
            if callable(inner):
                yield from _optimizers_of(inner, depth + 1)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


class Hidden:
    """Patches that Dynamo would trace or guard on: they are taken back while compiled functions run in any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._patches: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {}

    def add(self, what: str, hide: Callable[[], None], show: Callable[[], None]) -> None:
        """Hide one more from now on (`HIDDEN.add("torch.optim.Optimizer.step", handle.remove, register)`)."""
        with self._lock:
            self._patches[what] = (hide, show)
            if self._depth:
                hide()

    def remove(self, what: str) -> None:
        """Forget one that is undone for good."""
        with self._lock:
            self._patches.pop(what, None)

    def hide(self) -> None:
        """A compiled function begins."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                for hide, _ in self._patches.values():
                    hide()

    def show(self) -> None:
        """A compiled function ends."""
        with self._lock:
            self._depth -= 1
            if not self._depth:
                for _, show in self._patches.values():
                    show()

    def forked(self) -> None:
        """In a forked child nothing is patched."""
        self.__init__()  # type: ignore[misc]


HIDDEN: Final = Hidden()


class WhenImported(importlib.abc.MetaPathFinder):
    """Calls a function when a module has been imported, whoever imports it."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec that Python itself finds, with a loader that calls the function afterwards."""
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._then()

            loader.exec_module = exec_module
        return spec
