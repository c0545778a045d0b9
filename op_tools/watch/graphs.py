"""Runs of the graphs that Dynamo compiles, shown to those who compare them.

Dynamo hands each graph to a backend and installs what that returns. Both meet in one method, which is patched while
somebody watches: the graph is kept as it is before the backend changes it, and a function is put around the backend's.
Dynamo never traces that function; guards, graphs and code are the same as without it. What was compiled before stays
as it is, and so does what Dynamo saves to a file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, Protocol

from ..call.graphs import Graph, graph_of
from ..compat import DYNAMO_GRAPHS, compiled_code_of, dynamo_output_graph, is_packaged
from . import patches
from .compiled import THREAD, WhenImported

_PATCH: Final = f"{DYNAMO_GRAPHS}.OutputGraph.call_user_compiler"


class Watcher(Protocol):
    """Who compares compiled code."""

    def run(self, graph: Graph, compiled: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run compiled code; what it returns and raises is the caller's."""


class Graphs:
    """Shows runs of compiled graphs to one watcher at a time (`GRAPHS.watch(watcher)`)."""

    def __init__(self) -> None:
        self._watcher: Watcher | None = None
        self._waiting: WhenImported | None = None

    def watch(self, watcher: Watcher) -> bool:
        """Show every graph that is compiled from now on to a watcher; False where another one has them."""
        if self._watcher is not None:
            return False
        self._watcher = watcher
        if dynamo_output_graph() is not None:
            self._patch()
        else:
            self._waiting = WhenImported(DYNAMO_GRAPHS, self._patch)
            sys.meta_path.insert(0, self._waiting)
        return True

    def ignore(self, watcher: Watcher) -> None:
        """Nobody watches any more; compiled code runs as the backend made it."""
        if self._watcher is not watcher:
            return
        self._watcher = None
        patches.undo(_PATCH)
        if self._waiting is not None and self._waiting in sys.meta_path:
            sys.meta_path.remove(self._waiting)
        self._waiting = None

    def _patch(self) -> None:
        kind = dynamo_output_graph()
        if kind is None or any(patch.what == _PATCH for patch in patches.listed()):
            return
        original = kind.call_user_compiler

        def call_user_compiler(output: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                graph = None if is_packaged(output) else graph_of(module, compiled_code_of(output))
            except Exception:  # a graph of another PyTorch
                graph = None
            compiled = original(output, module, *args, **kwargs)
            return compiled if graph is None or not callable(compiled) else self._watched(graph, compiled)

        kind.call_user_compiler = call_user_compiler

        def undo() -> None:
            if kind.call_user_compiler is call_user_compiler:
                kind.call_user_compiler = original

        patches.record(_PATCH, "compiled code is compared as a whole", undo, "replaced", original)

    def _watched(self, graph: Graph, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            watcher, region = self._watcher, THREAD.region
            if watcher is None or region is None or not region.was_on:
                return compiled(*args)
            THREAD.seen = True
            return watcher.run(graph, compiled, args)

        return watched


GRAPHS: Final = Graphs()
