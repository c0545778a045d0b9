"""The gradients of one API call, found on its own edges of the autograd graph.

A call may be made of many autograd nodes. Its nodes are those between its outputs and the gradient edges
of its inputs, which are noted before the call because in-place operators move them. The gradient that the
call sends to an input is the sum of what its nodes send over the edges that lead to that input.
Hooks hold descriptions, never nodes: a hook that held its node would keep the graph alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from .devices import quiet
from .opcall import Tensor, tensors_in

if TYPE_CHECKING:
    from .intercept import Call
    from .tools.base import Tool

_sequence_now: Final[Callable[[], int]] = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
_MOST_NODES: Final = 2_000


class _Slice(NamedTuple):
    """Where a view lies in the gradient of its base."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Edges(NamedTuple):
    """The gradient edges of a call's inputs, as they were before the call."""

    tensors: int  # among the inputs
    by_node: dict[tuple[Any, int], list[int]]  # (node, output number) of inputs that have a history
    nodes: set[Any]
    leaves: dict[int, list[int]]  # id of inputs that are leaves
    bases: dict[tuple[Any, int], tuple[int, _Slice]]  # edges of the bases of inputs that are views
    since: int


def edges_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Edges | None:
    """Note where gradients of these arguments would flow to; None when none of them needs one."""
    by_node: dict[tuple[Any, int], list[int]] = {}
    nodes: set[Any] = set()
    leaves: dict[int, list[int]] = {}
    bases: dict[tuple[Any, int], tuple[int, _Slice]] = {}
    count = 0
    for tensor in _input_tensors(args, kwargs):
        if tensor.requires_grad:
            node = tensor.grad_fn
            if node is None:
                leaves.setdefault(id(tensor), []).append(count)
            else:
                by_node.setdefault((node, tensor.output_nr), []).append(count)
                nodes.add(node)
        if tensor._is_view():
            base = tensor._base
            if base is not None and base.requires_grad and base.grad_fn is not None:
                place = _Slice(
                    tuple(tensor.shape),
                    tuple(tensor.stride()),
                    int(tensor.storage_offset()) - int(base.storage_offset()),
                )
                bases.setdefault((base.grad_fn, base.output_nr), (count, place))
        count += 1
    if not by_node and not leaves and not bases:
        # closures may bring in tensors that need gradients; such calls have none among their arguments
        return None
    return Edges(count, by_node, nodes, leaves, bases, _sequence_now())


def _input_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        else:
            found.extend(tensors_in(arg))
    for arg in kwargs.values():
        if isinstance(arg, Tensor):
            found.append(arg)
        else:
            found.extend(tensors_in(arg))
    return found


class _Target(NamedTuple):
    """An edge of a node that leaves the call: which inputs it serves."""

    edge: int
    inputs: Sequence[int]
    place: _Slice | None


class _Node(NamedTuple):
    targets: tuple[_Target, ...]
    sources: tuple[tuple[int, int], ...]  # (output number of the node, output of the call)


def attach(call: Call, edges: Edges, listeners: tuple[Tool, ...]) -> None:
    """Hook the nodes of a call so that `listeners` hear of its backward pass."""
    sources: dict[Any, list[tuple[int, int]]] = {}
    outputs = list(tensors_in(call.result))
    for index, tensor in enumerate(outputs):
        node = tensor.grad_fn if tensor.requires_grad else None
        if node is None or (node, tensor.output_nr) in edges.by_node:
            continue  # no history, or an input handed back as it is
        sources.setdefault(node, []).append((tensor.output_nr, index))
    if not sources:
        return
    found = _nodes_of_call(sources, edges)
    if not found:
        return
    state = _Backward(call, listeners, len(found), len(outputs), edges.tensors)
    before = tuple([t for t in listeners if t.wants_backward_start])
    for number, (node, facts) in enumerate(found):
        if before:
            node.register_prehook(_Before(state, number, before))
        node.register_hook(_After(state, number, facts))


def _nodes_of_call(sources: dict[Any, list[tuple[int, int]]], edges: Edges) -> list[tuple[Any, _Node]]:
    found: list[tuple[Any, _Node]] = []
    seen: set[Any] = set(sources)
    stack = list(sources)
    while stack:
        node = stack.pop()
        targets = []
        for number, (following, output_number) in enumerate(node.next_functions):
            if following is None:
                continue
            key = (following, output_number)
            inputs = edges.by_node.get(key)
            place = None
            if inputs is None and key in edges.bases:
                index, place = edges.bases[key]
                inputs = [index]
            if inputs is None and following not in edges.nodes:
                variable = getattr(following, "variable", None)
                if variable is not None:
                    inputs = edges.leaves.get(id(variable))
                elif following not in seen and following._sequence_nr() >= edges.since:
                    seen.add(following)
                    stack.append(following)
                    if len(seen) > _MOST_NODES:
                        return []
            if inputs is not None:
                targets.append(_Target(number, inputs, place))
        found.append((node, _Node(tuple(targets), tuple(sources.get(node, ())))))
    return found


class _Backward:
    """What has been heard so far of the backward pass of one call."""

    __slots__ = ("call", "grad_inputs", "grad_outputs", "heard", "listeners", "nodes", "queued", "sizes")

    def __init__(self, call: Call, listeners: tuple[Tool, ...], nodes: int, outputs: int, inputs: int) -> None:
        self.call, self.listeners, self.nodes = call, listeners, nodes
        self.sizes = (outputs, inputs)
        self.reset()

    def reset(self) -> None:
        self.heard: set[int] = set()
        self.grad_outputs: list[Tensor | None] = [None] * self.sizes[0]
        self.grad_inputs: list[Tensor | None] = [None] * self.sizes[1]
        self.queued = False

    def add(self, facts: _Node, number: int, to_inputs: Sequence[Any], from_outputs: Sequence[Any]) -> None:
        for output_number, index in facts.sources:
            if output_number < len(from_outputs):
                self.grad_outputs[index] = from_outputs[output_number]
        for target in facts.targets:
            grad = to_inputs[target.edge] if target.edge < len(to_inputs) else None
            if grad is None:
                continue
            if target.place is not None:
                grad = grad.as_strided(*target.place)
            for index in target.inputs:
                present = self.grad_inputs[index]
                self.grad_inputs[index] = grad if present is None else present + grad
        self.heard.add(number)
        if len(self.heard) == self.nodes:
            self.finish()
        elif not self.queued:
            # Some nodes may never run (unused outputs, `inputs=`): the end of the pass is then the end.
            self.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def finish(self) -> None:
        if not self.heard:
            return
        grad_outputs, grad_inputs = self.grad_outputs, self.grad_inputs
        self.reset()
        with quiet():
            for tool in self.listeners:
                try:
                    tool.after_backward(self.call, grad_outputs, grad_inputs)
                except Exception as error:
                    tool.failed(self.call, error)


class _Before:
    __slots__ = ("listeners", "number", "state")

    def __init__(self, state: _Backward, number: int, listeners: tuple[Tool, ...]) -> None:
        self.state, self.number, self.listeners = state, number, listeners

    def __call__(self, grad_outputs: Any) -> None:
        for tool in self.listeners:
            try:
                tool.before_node(self.state.call, self.number)
            except Exception as error:
                tool.failed(self.state.call, error)


class _After:
    __slots__ = ("facts", "number", "state")

    def __init__(self, state: _Backward, number: int, facts: _Node) -> None:
        self.state, self.number, self.facts = state, number, facts

    def __call__(self, grad_inputs: Any, grad_outputs: Any) -> None:
        state = self.state
        try:
            for tool in state.listeners:
                if tool.wants_backward_start:
                    tool.after_node(state.call, self.number)
            with quiet():
                state.add(self.facts, self.number, grad_inputs, grad_outputs)
        except Exception as error:
            state.listeners[0].failed(state.call, error)
