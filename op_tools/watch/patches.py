"""Everything that op_tools changes in PyTorch and Python while tools are active: listed, and undone by one call.

>>> [patch.what for patch in listed()]
[]
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ditorch_common.patching import Ledger, Patch, full_name

from ..call.traits import COLLECTIVES, traits_of
from ..compat import dynamo_eval_frame
from .modes import is_on, put_on, take_off, thread

if TYPE_CHECKING:
    from .intercept import Interceptor

_ledger: Final = Ledger()
_lock = threading.RLock()


def listed() -> list[Patch]:
    """What is patched now, oldest first (`listed()[0].why`)."""
    with _lock:
        return list(_ledger.patches)


def record(what: str, why: str, undo: Callable[[], None], how: str = "replaced", original: Any = None) -> None:
    """List a change that has been made, and how to undo it (`record("c10::SetCPUAllocator", "...", stop)`)."""
    with _lock:
        _ledger.record(Patch(what, why, "watched", how, original, undo))


def replace(owner: Any, name: str, value: Any, why: str) -> str:
    """Set an attribute and say under which name it is listed; undoing it keeps what others have put there since."""
    original = getattr(owner, name)
    what = f"{full_name(owner)}.{name}"

    def undo() -> None:
        if getattr(owner, name) is value:
            setattr(owner, name, original)

    record(what, why, undo, original=original)
    setattr(owner, name, value)
    return what


def undo(what: str) -> None:
    """Take back one change; nothing happens where that has been done (`undo("torch.compile")`)."""
    with _lock:
        _ledger.undo(what)


def undo_all() -> None:
    """Take back every change, the last one first: all objects are the original ones again (`undo_all()`)."""
    with _lock:
        _ledger.undo_all()


def undo_all_in_child() -> None:
    """The same in a forked child. Native changes stay: it must not use locks and device events of its parent."""
    global _lock
    _lock = threading.RLock()
    for patch in reversed(listed()):
        if patch.how == "native":
            _ledger.forget(patch.what)
        else:
            _ledger.undo(patch.what)


class Installed:
    """The patches that lead calls to the interceptor where its mode does not see them, from `__init__` to `undo`."""

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        self._dynamo: Any = None  # its module, once it is patched
        self._names: list[str] = []
        self._watch_new_threads()
        self._count_steps()
        engine = torch.autograd.Variable._execution_engine
        self._replace(
            torch.autograd.Variable,
            "_execution_engine",
            _WatchedEngine(engine, interceptor),
            "backward passes take the mode off: it is put back on, and their end is noticed",
        )
        self._watch_compiler()
        self._watch_collectives()

    def undo(self) -> None:
        """Take these patches back, the last one first."""
        while self._names:
            undo(self._names.pop())

    def _replace(self, owner: Any, name: str, value: Any, why: str) -> None:
        self._names.append(replace(owner, name, value, why))

    def _watch_new_threads(self) -> None:
        interceptor, original = self._interceptor, threading.Thread.start

        def start(thread: threading.Thread, *args: Any, **kwargs: Any) -> None:
            if not getattr(thread, "op_tools_internal", False) and is_on(interceptor):
                run = thread.run

                def watched_run() -> None:
                    put_on(interceptor)
                    try:
                        run()
                    finally:
                        take_off(interceptor)

                thread.run = watched_run  # type: ignore[method-assign]
            original(thread, *args, **kwargs)

        why = "modes belong to a thread: one that is started by a watched thread is watched too"
        self._replace(threading.Thread, "start", start, why)

    def _count_steps(self) -> None:
        first: list[weakref.ref[Any]] = []

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not first or first[0]() is None:  # none yet, or that one is gone
                first[:] = [weakref.ref(optimizer)]
            if first[0]() is optimizer:  # with several optimizers, the first one counts
                self._interceptor.count_step()
            self.look_for_dynamo()

        what = "torch.optim.Optimizer.step"
        record(what, "counts training steps", register_optimizer_step_post_hook(stepped).remove, "registered")
        self._names.append(what)

    # -- compiled functions ---------------------------------------------------------------------------

    def _watch_compiler(self) -> None:
        original = torch.compile

        def compile(*args: Any, **kwargs: Any) -> Any:
            compiled = original(*args, **kwargs)
            self.look_for_dynamo()
            return compiled

        self._replace(torch, "compile", compile, "Dynamo is imported when it is used first")
        self.look_for_dynamo()

    def look_for_dynamo(self) -> None:
        """Patch Dynamo if it has been imported by now.

        Dynamo would trace a function mode along with the function, break the graph at each operator, and compile again
        for every tool. So the mode is taken off for as long as Dynamo handles the frames of a thread.
        """
        if self._dynamo is not None:
            return
        module = dynamo_eval_frame()
        with _lock:
            original = getattr(module, "_maybe_set_eval_frame", None)
            if original is None or self._dynamo is not None:
                return
            self._dynamo = module
            why = "the mode is off inside compiled functions, which stay whole"
            self._replace(module, "_maybe_set_eval_frame", self._switch(original), why)

    def _switch(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        interceptor = self._interceptor

        def set_eval_frame(callback: Any) -> Any:
            wrapper = sys._getframe(1)  # of a compiled function: it calls this before and after
            if getattr(thread, "compiled", None) is wrapper:
                prior = original(callback)
                thread.compiled = None
                put_on(interceptor)
                return prior
            if callable(callback) and wrapper.f_code.co_name in _COMPILED and is_on(interceptor):
                take_off(interceptor)
                thread.compiled = wrapper
            return original(callback)

        return set_eval_frame

    # -- collectives ----------------------------------------------------------------------------------

    def _watch_collectives(self) -> None:
        """Collectives are plain Python functions; they are entered through the cell their wrapper calls.

        That keeps `from torch.distributed import all_reduce` watched and the function's identity intact.
        """
        dist = getattr(torch, "distributed", None)
        if dist is None or not dist.is_available():
            return
        for name in COLLECTIVES:
            function = getattr(dist, name, None)
            if function is not None:
                self._enter(function, dist, name)

    def _enter(self, function: Any, module: Any, name: str) -> None:
        interceptor = self._interceptor
        cells = zip(function.__code__.co_freevars, function.__closure__ or ())
        cell = next((c for n, c in cells if n == "func" and callable(c.cell_contents)), None)
        original = cell.cell_contents if cell is not None else function
        traits = traits_of(original, f"torch.distributed.{name}")

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not is_on(interceptor):
                return original(*args, **kwargs)
            return interceptor.watch_function(watched, traits, original, args, kwargs)

        watched.__name__ = getattr(original, "__name__", name)
        why = "collectives are Python functions that no mode sees"
        if cell is None:
            self._replace(module, name, watched, why)
            return
        target = cell

        def undo() -> None:
            if target.cell_contents is watched:
                target.cell_contents = original

        what = f"torch.distributed.{name}"
        record(what, why, undo, "redirected", original)
        target.cell_contents = watched
        self._names.append(what)


_COMPILED: Final = frozenset({"compile_wrapper", "_fn"})  # what Dynamo calls what it puts around a function


class _WatchedEngine:
    """The autograd engine with the interceptor back on: recomputation and hooks run operators too.

    `Tensor.backward` takes the mode off for as long as it runs. The engine hands the modes of the calling
    thread on to its own threads, so putting the mode back right around the engine reaches those as well.
    """

    def __init__(self, engine: Any, interceptor: Interceptor) -> None:
        self._engine, self._interceptor = engine, interceptor
        self._lock = threading.Lock()
        self._passes = 0  # under way, in all threads; passes run inside of others
        self._graph_is_kept = False  # by one of those that ended since none was under way

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        interceptor = self._interceptor
        must_put_on = getattr(thread, "in_backward", False) and not is_on(interceptor)
        with self._lock:
            self._passes += 1
        if must_put_on:
            put_on(interceptor)
        try:
            return self._engine.run_backward(*args, **kwargs)
        finally:
            if must_put_on:
                take_off(interceptor)
            with self._lock:
                self._passes -= 1
                ended = self._passes == 0
                kept = self._graph_is_kept or (bool(args[2]) if len(args) > 2 else True)
                self._graph_is_kept = kept and not ended
            if ended:
                interceptor.passes_ended(kept)
