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
from ..compat import DYNAMO_WRAPPERS, dynamo_eval_frame
from . import functions

if TYPE_CHECKING:
    from .intercept import Interceptor

_ledger: Final = Ledger()
_lock = threading.RLock()
_compiled: Final = threading.local()  # `frame`: of the compiled function that this thread is in


def listed() -> list[Patch]:
    """What is patched now, oldest first (`listed()[0].why`)."""
    with _lock:
        return list(_ledger.patches)


def record(what: str, why: str, undo: Callable[[], None], how: str = "replaced", original: Any = None) -> None:
    """List a change that has been made, and how to undo it (`record("c10::SetCPUAllocator", "...", stop)`)."""
    with _lock:
        _ledger.record(Patch(what, why, "watched", how, original, undo))


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

    def __init__(self, interceptor: Interceptor, watched_engine: Callable[[Any, Interceptor], Any]) -> None:
        self._interceptor = interceptor
        self._dynamo: Any = None  # its module, once it is patched
        self._names: list[str] = []
        self._watch_new_threads()
        self._count_steps()
        engine = watched_engine(torch.autograd.Variable._execution_engine, interceptor)
        why = "backward passes take the mode off: it is put back on, and their end is noticed"
        self._replace(torch.autograd.Variable, "_execution_engine", engine, why)
        self._watch_compiler()
        self._watch_classes()
        if hasattr(torch, "distributed") and torch.distributed.is_available():
            for name in COLLECTIVES:
                if hasattr(torch.distributed, name):
                    self._watch_collective(name)

    def undo(self) -> None:
        """Take these patches back, the last one first."""
        while self._names:
            undo(self._names.pop())

    def _replace(self, owner: Any, name: str, value: Any, why: str, what: str = "", how: str = "replaced") -> None:
        """Set an attribute; undoing it keeps what others have put there since."""
        original = getattr(owner, name)
        what = what or f"{full_name(owner)}.{name}"

        def undo() -> None:
            if getattr(owner, name) is value:
                setattr(owner, name, original)

        record(what, why, undo, how, original)
        setattr(owner, name, value)
        self._names.append(what)

    def _watch_new_threads(self) -> None:
        interceptor, original = self._interceptor, threading.Thread.start

        def start(thread: threading.Thread, *args: Any, **kwargs: Any) -> None:
            if not getattr(thread, "op_tools_internal", False) and interceptor.is_on():
                run = thread.run

                def watched_run() -> None:
                    interceptor.put_on()
                    try:
                        run()
                    finally:
                        interceptor.take_off()

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
            if getattr(_compiled, "frame", None) is wrapper:
                prior = original(callback)
                _compiled.frame = None
                interceptor.put_on()
                return prior
            if callable(callback) and wrapper.f_code.co_name in DYNAMO_WRAPPERS and interceptor.is_on():
                interceptor.take_off()
                _compiled.frame = wrapper
            return original(callback)

        return set_eval_frame

    # -- kernels behind torch.autograd.Function -------------------------------------------------------

    def _watch_classes(self) -> None:
        interceptor, owner = self._interceptor, torch.autograd.Function
        original = vars(owner)["apply"]

        def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
            own = original.__get__(None, kind)
            if not interceptor.is_on():
                return own(*args, **kwargs)
            return functions.applied(interceptor, kind, own, args, kwargs)

        patched: Any = classmethod(apply)

        def undo() -> None:
            if vars(owner).get("apply") is patched:
                owner.apply = original  # type: ignore[method-assign]

        what = f"{full_name(owner)}.apply"
        record(what, "a kernel that is called inside is no operator: no mode sees it", undo, "replaced", original)
        owner.apply = patched  # type: ignore[method-assign]
        self._names.append(what)

    # -- collectives ----------------------------------------------------------------------------------

    def _watch_collective(self, name: str) -> None:
        """Collectives are plain Python functions; they are entered through the cell that their wrapper calls.

        That keeps `from torch.distributed import all_reduce` watched and the function's identity intact.
        """
        interceptor, function = self._interceptor, getattr(torch.distributed, name)
        cells = zip(function.__code__.co_freevars, function.__closure__ or ())
        cell = next((c for n, c in cells if n == "func" and callable(c.cell_contents)), None)
        original = cell.cell_contents if cell is not None else function
        what = f"torch.distributed.{name}"
        traits = traits_of(original, what)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not interceptor.is_on():
                return original(*args, **kwargs)
            return interceptor.watch_function(watched, traits, original, args, kwargs)

        watched.__name__ = getattr(original, "__name__", name)
        why = "collectives are Python functions that no mode sees"
        if cell is None:
            self._replace(torch.distributed, name, watched, why)
        else:
            self._replace(cell, "cell_contents", watched, why, what, "redirected")
