"""Everything that op_tools changes in PyTorch and Python while tools are active: listed, and undone by one call.

>>> [patch.what for patch in listed()]
[]
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ditorch_common.patching import Ledger, Patch, full_name

from ..call.traits import COLLECTIVES, traits_of
from ..compat import DYNAMO_MODULE, JIT_TRACER, PythonNode, dynamo_eval_frame, hide_from_dynamo
from . import compiled, functions
from .compiled import THREAD
from .past_the_mode import past_the_mode, quiet_methods, straight_to_the_mode

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

    def __init__(self, interceptor: Interceptor, watched_engine: Any) -> None:
        self._interceptor = interceptor
        self._has_dynamo = False  # whether it is patched
        self._first_optimizer: weakref.ref[Any] | None = None
        self.code = compiled.CompiledCode(interceptor, self._stepped)
        self._names: list[str] = []
        self._functions: list[Any] = [watched_engine.run_backward, watched_engine.__getattr__]  # that replace others
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
        compiled.forget_region()
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
        if isinstance(value, FunctionType):
            self._functions.append(value)

    def _watch_new_threads(self) -> None:
        interceptor, original = self._interceptor, threading.Thread.start

        def start(thread: threading.Thread, *args: Any, **kwargs: Any) -> None:
            if THREAD.region is None and not getattr(thread, "op_tools_internal", False) and interceptor.is_on():
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
        register: Callable[..., Any] = register_optimizer_step_post_hook
        handle = register(lambda optimizer, args, kwargs: self._stepped(optimizer))

        def hide() -> None:
            handle.remove()

        def show() -> None:
            nonlocal handle
            handle = register(lambda optimizer, args, kwargs: self._stepped(optimizer))

        def undo() -> None:
            compiled.HIDDEN.remove(what)
            handle.remove()

        what = "torch.optim.Optimizer.step"
        record(what, "counts training steps", undo, "registered")
        self._names.append(what)
        compiled.HIDDEN.add(what, hide, show)

    def _stepped(self, optimizer: Any) -> None:
        first = self._first_optimizer
        if first is None or first() is None:  # none yet, or that one is gone
            first = self._first_optimizer = weakref.ref(optimizer)
        if first() is optimizer:  # with several optimizers, the first one counts
            self._interceptor.count_step()

    # -- compiled code --------------------------------------------------------------------------------

    def _watch_compiler(self) -> None:
        finder = compiled.WhenImported(DYNAMO_MODULE, self.look_for_dynamo)

        def undo() -> None:
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)

        record("sys.meta_path", "Dynamo is patched when it is imported", undo, "registered")
        self._names.append("sys.meta_path")
        sys.meta_path.insert(0, finder)
        self.look_for_dynamo()

    def look_for_dynamo(self) -> None:
        """Patch Dynamo and what runs its backward, if it has been imported by now; see `compiled`."""
        module = dynamo_eval_frame()
        with _lock:
            original = getattr(module, "_maybe_set_eval_frame", None)
            if original is None or self._has_dynamo:
                return
            self._has_dynamo = True
            why = "the mode is off inside compiled functions, which stay whole"
            self._replace(module, "_maybe_set_eval_frame", self.code.switch(original), why)
            why = "the mode is off in the backward of compiled functions"
            for name in ("apply", "apply_boxed"):
                if hasattr(PythonNode, name):
                    self._replace(PythonNode, name, self.code.apply(getattr(PythonNode, name)), why)
            for function in self._functions:
                hide_from_dynamo(function)

    # -- methods of classes ---------------------------------------------------------------------------

    def _watch_classes(self) -> None:
        interceptor, owner = self._interceptor, torch.autograd.Function
        original = vars(owner)["apply"]

        def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
            own = original.__get__(None, kind)
            if THREAD.region is not None or not interceptor.is_on():
                return own(*args, **kwargs)
            return functions.applied(interceptor, kind, own, args, kwargs)

        self._replace_in_class(
            owner, "apply", classmethod(apply), "a kernel that is called inside is no operator: no mode sees it"
        )
        for kind, name, holds in quiet_methods():
            method = past_the_mode(interceptor, vars(kind)[name], holds)
            self._replace_in_class(kind, name, method, "it asks many questions and calls no operator: the mode is off")

        for place, name in ((JIT_TRACER, "_trace_impl"), (torch.jit, "trace_module"), (torch.jit, "_get_trace_graph")):
            if hasattr(place, name):
                traced = past_the_mode(interceptor, getattr(place, name), lambda *_, **__: True)
                self._replace(place, name, traced, "sizes are tensors there, and what a tool asks would be traced")
        functional: Any = torch.nn.functional
        handle = straight_to_the_mode(interceptor, functional.handle_torch_function)
        self._replace(functional, "handle_torch_function", handle, "a shorter way to the mode")

    def _replace_in_class(self, owner: Any, name: str, patched: Any, why: str) -> None:
        """Set an attribute of a class; compiled functions find the original one."""
        original = vars(owner)[name]

        def hide() -> None:
            if vars(owner).get(name) is patched:
                setattr(owner, name, original)

        def show() -> None:
            if vars(owner).get(name) is original:
                setattr(owner, name, patched)

        def undo() -> None:
            compiled.HIDDEN.remove(what)
            hide()

        what = f"{full_name(owner)}.{name}"
        record(what, why, undo, "replaced", original)
        show()
        self._names.append(what)
        compiled.HIDDEN.add(what, hide, show)

    # -- collectives ----------------------------------------------------------------------------------

    def _watch_collective(self, name: str) -> None:
        """Collectives are plain Python functions; they are entered through the cell that their wrapper calls.

        That keeps `from torch.distributed import all_reduce` watched and the function's identity intact.
        """
        interceptor, function = self._interceptor, getattr(torch.distributed, name)
        cells = zip(function.__code__.co_freevars, function.__closure__ or ())
        own = function.__globals__["__name__"].startswith("torch.")  # not what somebody put in its place
        cell = next((c for n, c in cells if own and n == "func" and callable(c.cell_contents)), None)
        what, why = f"torch.distributed.{name}", "collectives are Python functions that no mode sees"

        def instead_of(original: Callable[..., Any]) -> Callable[..., Any]:
            traits = traits_of(original, what)

            def watched(*args: Any, **kwargs: Any) -> Any:
                if THREAD.region is not None or not interceptor.is_on():
                    return original(*args, **kwargs)
                return interceptor.watch_function(watched, traits, original, args, kwargs)

            watched.__name__ = getattr(original, "__name__", name)
            return watched

        if cell is not None:
            self._replace(cell, "cell_contents", instead_of(cell.cell_contents), why, what, "redirected")
        elif own:  # `P2POp` asks whether it was given `isend` itself
            with _lock:
                _ledger.redirect(function, instead_of, why, "watched", what)
            self._names.append(what)
        else:
            self._replace(torch.distributed, name, instead_of(function), why)
