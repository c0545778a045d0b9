"""Runs of compiled code under comparison, on the run's thread: each run of a graph is one call, `torch.compile`.

What goes into a graph is copied before it runs, what comes out and what it writes to is copied after; its backward is
heard of as that of any call. `judges.compiled` settles the jobs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch

from ..call import site
from ..call.description import Tensor
from ..call.graphs import OP, Graph
from ..call.traits import OpTraits
from ..compat import MODULE_CALL, compiles_backward, in_fake_mode, is_compiled_node, no_torch_function
from ..copies.invocation import Region, Site
from ..copies.operands import is_plain
from ..judge.graphs import graph_function
from ..watch import backward
from ..watch.compiled import SEEN
from ..watch.graphs import GRAPHS
from ..watch.hooks import Hooks
from ..watch.intercept import INTERCEPTOR, Call, ids
from .choose import Chooser, kind_of
from .judging import Judging
from .ladder import BACKWARD, FORWARD, ComparedCall, Job, gradient_kind
from .snapshots import Snapshots

_MAX_NODES: Final = 200  # of the autograd graph, on the way to one that compiled code made
_FIRST_KIND: Final = -(1 << 40)  # other descriptions have numbers around zero
_TRAITS: Final = OpTraits(OP, graph_function, random=None, mutates=True)


class Tool(Protocol):
    """What this needs of OpAutoCompare."""

    only: Callable[..., bool] | None

    def wants(self, traits: OpTraits) -> bool: ...
    def accepts_call(self, call: Call) -> bool: ...
    def count(self, call: Call) -> None: ...
    def site(self, call: Call) -> int: ...
    def failed(self, call: Call, error: BaseException, what: str = ..., phase: str = ...) -> None: ...


class CompiledRegions(Hooks):
    """Compares runs of the graphs that Dynamo compiles while it is started."""

    name = "OpAutoCompare"
    wants_backward = True

    def __init__(self, tool: Tool, judging: Judging, chooser: Chooser, snapshots: Snapshots, max_bytes: int) -> None:
        self._tool, self._judging, self._chooser, self._snapshots = tool, judging, chooser, snapshots
        self._teller, self._max_bytes = judging.teller, max_bytes
        self._kinds: dict[Any, int] = {}  # numbers of gradients that look alike, for their layout

    def start(self) -> None:
        """Begin to watch, unless the tool's lists leave compiled code out."""
        if self._tool.only is None and self._tool.wants(_TRAITS):
            GRAPHS.watch(self)

    def stop(self) -> None:
        """Watch no more."""
        GRAPHS.ignore(self)

    # -- around a run ---------------------------------------------------------------------------------

    def run(self, graph: Graph, compiled: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run compiled code and queue what it did for comparison; errors of the tool's own are told, not raised."""
        if in_fake_mode() or (INTERCEPTOR.capturing is not None and INTERCEPTOR.capturing()):
            return compiled(*args)
        call = Call(_TRAITS, graph_function, args, {})
        call.location, call.step, call.id = graph.location or site.call_site(), INTERCEPTOR.step, next(ids)
        edges, versions, module = None, None, sys._getframe(1)
        with no_torch_function():
            try:
                call.inputs = INTERCEPTOR.descriptions.of(args, {}, call.tensors, True)
                if self._is_wanted(call, graph, args):
                    edges = backward.edges_of(call.tensors) if torch.is_grad_enabled() else None
                    self._before(call, graph, module)
                versions = [t._version for t in call.tensors if not t.is_inference()]
            except Exception as error:
                self._tool.failed(call, error)
        result = compiled(*args)
        with no_torch_function():
            try:
                call.result = result
                call.outputs = INTERCEPTOR.descriptions.of((result,), {}, call.results, True)
                self._mark_nodes(call.results)
                if call.notes.get(self) is not None:
                    changed = versions != [t._version for t in call.tensors if not t.is_inference()]
                    self._after(call, graph, args)
                    self._attach(call, edges, changed)
            except Exception as error:
                self._tool.failed(call, error)
        call.release()
        return result

    def _is_wanted(self, call: Call, graph: Graph, args: tuple[Any, ...]) -> bool:
        if call.device.type == "cpu" and not INTERCEPTOR.include_cpu:
            return False
        if not self._tool.accepts_call(call):
            return False
        reason = self._why_not(call, graph)
        if reason:
            self._teller.skip(call, reason)
            return False
        if self._chooser.chooses:
            kind = call.notes["kind"] = (OP, id(graph), *kind_of(OP, args, {})[1:])  # type: ignore[index]
            return self._chooser.take(kind)
        return True

    def _why_not(self, call: Call, graph: Graph) -> str:
        if graph.why_not:
            return f"compiled code with {graph.why_not}"
        odd = dict.fromkeys(type(t).__name__ for t in (*call.tensors, *graph.constants) if not is_plain(t))
        if odd:
            return f"compiled code on arguments of type {', '.join(odd)}"
        needed = 8 * (sum(t.numel() for t in (*call.tensors, *graph.constants)) + graph.elements)
        if needed > self._max_bytes:
            limit = self._max_bytes / 2**20
            return f"needs {needed / 2**20:,.0f} MiB in double precision; the limit is {limit:,.0f} MiB"
        return ""

    def _before(self, call: Call, graph: Graph, frame: Any) -> None:
        started = time.perf_counter()
        kind, device = call.notes.get("kind"), call.device
        routes = self._snapshots.routes
        if device not in routes.checked:
            routes.check(device)
        if routes.broken:
            self._chooser.settle(kind)
            self._teller.skip(call, routes.broken)
            return
        where = Site(call.location, _module(frame), call.step)
        numerics = Region(device.type, torch.is_grad_enabled(), None)
        compared = ComparedCall(call.id, OP, graph_function, _TRAITS, where, numerics, live=call, kind=kind)
        compared.notes[Graph] = graph
        everything = (*call.args, *graph.constants)
        compared.before = self._snapshots.layouts.stage(0, [*call.tensors, *graph.constants], (everything, {}))
        call.notes[self] = compared
        self._chooser.spend(kind, time.perf_counter() - started)

    def _after(self, call: Call, graph: Graph, args: tuple[Any, ...]) -> None:
        started = time.perf_counter()
        compared: ComparedCall = call.notes[self]
        self._tool.count(call)
        compared.record_site = self._tool.site(call)
        compared.event = self._teller.lineage.made_from(call.inputs.data_ptrs, call.outputs.data_ptrs)
        job = Job(compared, FORWARD, event=compared.event, live=call, local=True)
        everything = (*args, *graph.constants)  # optimizers write to constants: their parameters
        written = range(len(everything)) if graph.writes is None else graph.writes
        after = tuple([a if n in written and isinstance(a, Tensor) else None for n, a in enumerate(everything)])
        job.snapshot = self._snapshots.layouts.stage(0, [], (after, {}, call.result))
        self._judging.submit(job, compared)
        self._chooser.spend(compared.kind, time.perf_counter() - started)

    # -- its backward -----------------------------------------------------------------------------------

    def _attach(self, call: Call, edges: Any, changed: bool) -> None:
        if edges is None:
            return
        reason = ""
        if compiles_backward():
            reason = "its backward is compiled as a whole, with others"
        elif edges.saving is not None:
            reason = "hooks of the user's get what it saves for its backward"
        elif changed and any(t.requires_grad and t.grad_fn is not None for t in call.tensors):
            reason = "it may change arguments that need gradients"
        if reason:
            self._teller.skip(call, reason, BACKWARD)
        else:
            backward.attach(call, edges, call.results, (self,))

    def after_backward(self, call: Call, grad_outputs: list[Tensor | None], grad_inputs: list[Tensor | None]) -> None:
        compared: ComparedCall | None = call.notes.get(self)
        if compared is None or compared.before is None:
            return
        if call.mixed or all(g is None for g in grad_outputs):
            self._teller.skip(call, "what came to it in the backward pass was not seen", BACKWARD)
            return
        started = time.perf_counter()
        sent = [g.data_ptr() for g in grad_outputs if g is not None and g.layout is torch.strided]
        made = [g.data_ptr() for g in grad_inputs if g is not None and g.layout is torch.strided]
        event = self._teller.lineage.made_from(sent, made, also=(compared.event,))
        job = Job(compared, BACKWARD, event=event, live=call, unasked=call.unasked, local=True)
        grads = (grad_outputs, grad_inputs)
        given = [g for g in (*grad_outputs, *grad_inputs) if g is not None]
        number = self._kinds.setdefault((OP, gradient_kind(*grads, call.unasked)), _FIRST_KIND - len(self._kinds))
        job.snapshot = self._snapshots.layouts.stage(number, given, grads, gradients=True)
        self._chooser.begin(compared.kind)
        self._judging.submit(job, compared)
        self._chooser.spend(compared.kind, time.perf_counter() - started)

    def failed(self, call: Call, error: BaseException, what: str = "the tool failed on this operator") -> None:
        self._tool.failed(call, error, what, phase=BACKWARD)

    def _mark_nodes(self, results: Sequence[Tensor]) -> None:
        """Say to `watch.compiled` that somebody knows of the backward of these results."""
        waiting: list[Any] = [t.grad_fn for t in results if t.grad_fn is not None]
        seen: set[Any] = set()
        while waiting and len(seen) < _MAX_NODES:
            node = waiting.pop()
            if node in seen or node is None:
                continue
            seen.add(node)
            if is_compiled_node(node):
                node.metadata[SEEN] = True
            else:
                waiting += [following for following, _ in node.next_functions]


def _module(frame: Any) -> str:
    """The module whose code was compiled, without the wrapper that `torch.compile` puts around it."""
    path = site.module_path_at(frame)
    words = [word for word in path.split(".") if word != "_orig_mod"]
    if path and not words:  # it was compiled itself: its class, as for any outermost module
        while frame is not None and frame.f_code is not MODULE_CALL:
            frame = frame.f_back
        return "" if frame is None else type(frame.f_locals.get("self")).__name__
    return ".".join(words)
