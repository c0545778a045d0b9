"""Operators inside code that `torch.compile(backend="aot_eager")` made, as the calls of the user's program.

That backend runs a graph of ATen operators one by one. Each node knows the call of the user's program that it comes
from, its module and its line; the nodes of one call are one operator of the trace, which can be compared with eager's.
Graphs that were compiled before OpTrace was first started run as they are: they appear as one operator, as all code of
Inductor does.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch

from ..call.description import Tensor
from ..call.graphs import line_of_stack
from ..compat import results_of_graph
from ..watch import patches
from ..watch.compiled import WhenImported
from . import format as columns
from .places import place_of_call

if TYPE_CHECKING:
    from .record import Recorder

_BACKEND: Final = "torch._dynamo.backends.debugging"
_PATCH: Final = "torch._dynamo.backends.debugging.boxed_nop"
_MAX_PLANS: Final = 256
_SUM: Final = "autograd.sum_of_gradients"


@dataclasses.dataclass(eq=False)
class _Call:
    """One call of the user's program in a graph: its nodes, and where it was made."""

    key: str
    name: str
    path: str  # of its module, from the one whose code was compiled
    location: str
    shapes: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)  # of what goes in, in order
    outputs: dict[Any, int] = dataclasses.field(default_factory=dict)  # nodes whose results leave it, and their places
    number: int = -1  # of the operator in the latest run
    taken: int = 0


class _Plan:
    """The calls in one graph."""

    def __init__(self, module: Any) -> None:
        self.backward = any(n.op == "placeholder" and n.name.startswith("tangents") for n in module.graph.nodes)
        nodes = [node for node in module.graph.nodes if node.op == "call_function" and not self._repeats(node)]
        self.calls: dict[str, _Call] = {}
        self.of: dict[Any, _Call] = {}
        self.module = -1  # whose code was compiled, in the latest run
        for node in nodes:
            self._enter(node)
        self.forward = self._forward_plan() if self.backward else None
        for node in nodes:
            call = self.of[node]
            for argument in node.all_input_nodes:
                if self.of.get(argument) is not call and (shape := _shape(argument)) is not None:
                    call.shapes.append(shape)
        self._find_outputs(nodes)
        if not self.backward:
            _plans.append(self)
            del _plans[:-_MAX_PLANS]

    def _repeats(self, node: Any) -> bool:
        """Whether a backward graph computes this once more instead of getting it from the forward."""
        return self.backward and node.meta.get("partitioner_tag") == "is_forward"

    def _enter(self, node: Any) -> None:
        meta = node.meta
        source = meta.get("source_fn_stack") or meta.get("fwd_source_fn_stack")
        if not source and node.all_input_nodes and getattr(node.target, "__name__", "") == "getitem":
            first = self.of.get(node.all_input_nodes[0])
            if first is not None:
                self.of[node] = first
                return
        key = "/".join(str(word) for word, _ in source) if source else node.name
        call = self.calls.get(key)
        if call is None:
            target = str(node.target).rpartition(".")[0] or str(node.target)
            if source:
                name = "torch.compile." + re.sub(r"_\d+$", "", str(source[-1][0]))
            else:
                name = f"{_SUM}.{target.rpartition('.')[2]}" if self.backward else target
            stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
            path = str(next(reversed(stack.values()))[0]) if stack else ""
            call = self.calls[key] = _Call(key, name, _relative(path), line_of_stack(meta.get("stack_trace") or ""))
        self.of[node] = call

    def _forward_plan(self) -> _Plan | None:
        """The forward graph that this one is the backward of: the latest of those that share the most calls with it."""
        named = [key for key, call in self.calls.items() if not call.name.startswith(_SUM)]
        shared = [(sum(key in plan.calls for key in named), n) for n, plan in enumerate(_plans)]
        most, number = max(shared, default=(0, -1))
        return _plans[number] if most else None

    def _returned(self, nodes: list[Any]) -> list[Any]:
        """The nodes whose results go to user code; what a forward graph keeps for its backward does not."""
        output = next((user for node in nodes for user in node.users if user.op == "output"), None)
        if output is None:
            return []
        if self.backward:
            return list(output.all_input_nodes)
        results = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
        return list(results[results_of_graph()])

    def _find_outputs(self, nodes: list[Any]) -> None:
        leaving: dict[str, list[Any]] = {}
        last: dict[str, Any] = {}
        returned = set(self._returned(nodes))
        for node in nodes:
            call = self.of[node]
            if _shape(node) is None:
                continue
            last[call.key] = node
            users = [user for user in node.users if self.of.get(user) is not call]
            if node in returned or any(user.op == "call_function" for user in users):
                leaving.setdefault(call.key, []).append(node)
        for key, call in self.calls.items():
            found = leaving.get(key) or ([last[key]] if key in last else [])
            there = self.forward.calls.get(key) if self.forward is not None else None
            free = list(enumerate(there.shapes)) if there is not None else []
            for node in found:  # gradients, in the order of what went into the call
                place = next((at for at, shape in free if shape == _shape(node)), None)
                if place is None:
                    place = len(call.outputs) + (100 if free else 0)
                free = [pair for pair in free if pair[0] != place]
                call.outputs[node] = place


_plans: Final[list[_Plan]] = []  # of forward graphs, the latest last


def _shape(node: Any) -> tuple[Any, ...] | None:
    """The sizes of a node's result, symbols by name: one that is asked for its number becomes a constant."""
    value = node.meta.get("val")
    return tuple(n if type(n) is int else str(n) for n in value.shape) if isinstance(value, Tensor) else None


def _relative(path: str) -> str:
    """The name of a module below the one whose code was compiled (`_relative("L['self'].h[0].attn") == "h.0.attn"`)."""
    words = re.findall(r"\w+", re.sub(r"^L\['?\w+'?\]", "", path))
    return ".".join(word for word in words if word != "_modules")


class _Runner(torch.fx.Interpreter):
    """Runs a graph as the backend does, node by node, and records its calls."""

    def __init__(self, module: Any, plan: _Plan, recorder: Recorder, step: int) -> None:
        super().__init__(module)
        self._plan, self._recorder, self._step = plan, recorder, step
        for call in plan.calls.values():
            call.number, call.taken = -1, 0

    def run_node(self, n: Any) -> Any:
        call = self._plan.of.get(n)
        if call is None:
            return super().run_node(n)
        recorder = self._recorder
        with recorder.lock:
            if call.number < 0:
                self._begin(call)
            for argument in n.all_input_nodes:
                value = self.env.get(argument)
                if isinstance(value, Tensor) and self._plan.of.get(argument) is not call:
                    recorder.edge(call.number, columns.INPUT, call.taken, recorder.tensor(value))
                    call.taken += 1
            recorder.launch()
        result = super().run_node(n)
        if isinstance(result, Tensor) and n in call.outputs:
            with recorder.lock:
                place = call.outputs[n]
                number = recorder.tensor(result, call.number, place, recorder.last_module)
                recorder.edge(call.number, columns.OUTPUT, place, number)
                recorder.launch()
        return result

    def _begin(self, call: _Call) -> None:
        recorder, plan = self._recorder, self._plan
        there = plan.forward.calls.get(call.key) if plan.forward is not None else None
        if not call.name.startswith(_SUM):  # what autograd adds up belongs to the call before it
            recorder.last_module = recorder.module_below(plan.module, call.path)
        module = recorder.last_module
        call.number = recorder.operator(
            *(call.name, columns.BACKWARD if plan.backward else columns.FORWARD, None, self._step, call.location),
            module=module,
            forward=-1 if there is None else there.number,
            arguments=recorder.writer.text(call.key),  # what the graph calls it: `linear_3`
        )


class Compiled:
    """Records graphs that run while a recorder is there (`COMPILED.listen(recorder, lambda: step)`)."""

    def __init__(self) -> None:
        self._recorder: Callable[[], tuple[Recorder, int] | None] | None = None
        self._waiting: WhenImported | None = None

    def listen(self, recorder: Callable[[], tuple[Recorder, int] | None]) -> None:
        """Ask `recorder` for who records, and the step, whenever a graph runs; it answers None where nobody does."""
        self._recorder = recorder
        if _BACKEND in sys.modules:
            self._patch()
        elif self._waiting is None:
            self._waiting = WhenImported(_BACKEND, self._patch)
            sys.meta_path.insert(0, self._waiting)

    def ignore(self) -> None:
        """Nobody records any more; graphs run as the backend made them."""
        self._recorder = None
        patches.undo(_PATCH)
        if self._waiting is not None and self._waiting in sys.meta_path:
            sys.meta_path.remove(self._waiting)
        self._waiting = None

    def _patch(self) -> None:
        backend = sys.modules[_BACKEND]
        original = getattr(backend, "boxed_nop", None)
        if original is None or any(patch.what == _PATCH for patch in patches.listed()):
            return

        def boxed_nop(fx_g: Any, example_inputs: Any) -> Any:
            run = original(fx_g, example_inputs)
            try:
                plan = _Plan(fx_g) if callable(run) and hasattr(run, "__code__") else None
            except Exception:  # a graph of another PyTorch
                plan = None
            return run if plan is None else self._recorded(fx_g, run, plan)

        backend.boxed_nop = boxed_nop  # type: ignore[attr-defined]

        def undo() -> None:
            if getattr(backend, "boxed_nop", None) is boxed_nop:
                backend.boxed_nop = original  # type: ignore[attr-defined]

        patches.record(_PATCH, "operators of aot_eager's graphs are traced", undo)

    def _recorded(self, module: Any, run: Any, plan: _Plan) -> Any:
        def traced(args: Any) -> Any:
            found = None if self._recorder is None else self._recorder()
            if found is None:
                return run(args)
            recorder, step = found
            with recorder.lock:
                recorder.ran_graphs = True
                if plan.backward:
                    plan.module = -1 if plan.forward is None else plan.forward.module
                else:
                    place = place_of_call(1, recorder.modules.parts)
                    plan.module = recorder.module_of(place)
            return _Runner(module, plan, recorder, step).boxed_run(args)

        traced._boxed_call = True  # type: ignore[attr-defined]
        return traced


COMPILED: Final = Compiled()
