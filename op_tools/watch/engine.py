"""The autograd engine, with tools that hear of passes and see what runs in them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from ..compat import COMPILED_AUTOGRAD, compiles_backward
from .compiled import THREAD

if TYPE_CHECKING:
    from .intercept import Interceptor

_thread: Final = threading.local()  # `in_backward`: inside `Tensor.backward`


@contextlib.contextmanager
def around_backward() -> Iterator[None]:
    """While `Tensor.backward` runs on this thread."""
    outer, _thread.in_backward = _inside_backward(), True
    try:
        yield
    finally:
        _thread.in_backward = outer


def _inside_backward() -> bool:
    return bool(getattr(_thread, "in_backward", False))


class WatchedEngine:
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
        if THREAD.region is not None:
            return self._engine.run_backward(*args, **kwargs)
        interceptor = self._interceptor
        if args and any(tool.hears_roots for tool in interceptor.tools):
            interceptor.pass_begins(args[0])
        if COMPILED_AUTOGRAD in sys.modules and compiles_backward() and interceptor._patches is not None:
            return interceptor._patches.code.run(_inside_backward(), self._engine.run_backward, *args, **kwargs)
        must_put_on = _inside_backward() and not interceptor.is_on()
        with self._lock:
            self._passes += 1
            if self._passes == 1 and interceptor.sums.wanted:
                interceptor.sums.begin()
        if must_put_on:
            interceptor.put_on()
        try:
            return self._engine.run_backward(*args, **kwargs)
        finally:
            if must_put_on:
                interceptor.take_off()
            with self._lock:
                self._passes -= 1
                ended = self._passes == 0
                if ended and interceptor.sums.listening:
                    interceptor.sums.end()
                kept = self._graph_is_kept or (bool(args[2]) if len(args) > 2 else True)
                self._graph_is_kept = kept and not ended
            if ended and any(tool.hears_passes for tool in interceptor.tools):
                interceptor.passes_ended(kept)
