"""Runs of compiled code whose operators nobody sees, such as Inductor's: each is one operator, and so is its backward.

What goes in are the arguments, and the parameters and buffers of the module whose forward was compiled. What PyTorch
does not tell of (before 2.12 a compiled function keeps its result to itself) is known when somebody uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, NamedTuple

import torch

from ..call import site
from ..call.description import Tensor, tensors_in
from ..call.devices import get_rng_state
from ..call.graphs import OP
from ..call.traits import OpTraits
from ..compat import MODULE_CALL, compiles_backward, running_pass, sequence_number
from ..watch import backward
from ..watch.compiled import UNKNOWN, CompiledRun
from ..watch.hooks import Hooks
from ..watch.intercept import INTERCEPTOR, Call, ids
from . import format as columns
from .behaviour import DREW
from .places import Place
from .record import Recorder

_MAX_NODES: Final = 10_000  # of autograd that one run may make
_TRAITS: Final = OpTraits(OP, torch.compile, random=None, mutates=True)


class _Begun(NamedTuple):
    """What is known of a run before it."""

    call: Call
    place: Place
    inputs: list[int]  # numbers of the tensors that go in
    versions: list[int]
    edges: backward.Edges | None  # of autograd
    since: int  # the number that its next node gets
    random: list[Any]  # states of random numbers


class CompiledRuns:
    """Records them for OpTrace."""

    def __init__(self, tool: Hooks, recorder: Callable[[], Recorder]) -> None:
        self._tool, self._recorder = tool, recorder

    def begin(self, run: CompiledRun) -> None:
        """Note what goes in."""
        call = Call(_TRAITS, torch.compile, run.args, run.kwargs)
        call.tensors = [*tensors_in((run.args, run.kwargs)), *_members(run)]
        if call.device.type == "cpu" and not INTERCEPTOR.include_cpu:
            return
        call.id, call.step, call.location = next(ids), INTERCEPTOR.step, site.call_site()
        recorder = self._recorder()
        with recorder.lock:
            place = _place(run)
            recorder.module_of(place)  # its parameters are known from here on
            inputs, versions = recorder.inputs(call.tensors), recorder.versions(call.tensors)
            recorder.launch()
        edges = backward.edges_of(call.tensors) if torch.is_grad_enabled() and not compiles_backward() else None
        since = (sequence_number or (lambda: 0))()
        run.notes[self] = _Begun(call, place, inputs, versions, edges, since, _random_states(call.device))

    def end(self, run: CompiledRun) -> bool:
        """Add the operator, and listen for its backward; whether its results are still to be found."""
        begun: _Begun | None = run.notes.pop(self, None)
        if begun is None:
            return False
        call, recorder = begun.call, self._recorder()
        with recorder.lock:
            if recorder.graphs_ran(columns.FORWARD):  # its operators are there
                return False
            recorder.book.forget()
            module = recorder.module_of(begun.place)
            number = recorder.operator(
                *(OP, _phase(run), begun.place, call.step, call.location),
                module=module,
                arguments=recorder.writer.text(_told(run, begun.random != _random_states(call.device))),
            )
            recorder.edges(number, columns.INPUT, begun.inputs)
            call.notes[self._tool] = (number, module)
            if run.result is UNKNOWN:
                call.args, call.kwargs = (), {}
                recorder.await_results(number, module, lambda result: self._listen(begun, number, [result]))
                return True
            results = list(tensors_in(run.result))
            recorder.outputs(
                number, module, results, _written(run, begun, recorder.versions(call.tensors)), _phase(run)
            )
            recorder.launch()
            self._listen(begun, number, results)
        return False

    def _listen(self, begun: _Begun, number: int, results: list[Tensor]) -> bool:
        """Hear of the backward of a run whose results are known; whether there is one."""
        call, edges, recorder = begun.call, begun.edges, self._recorder()
        leaves = _leaves(results, call.tensors, begun.since)
        for place, leaf in enumerate(recorder.inputs(leaves), len(begun.inputs)):
            recorder.edge(number, columns.INPUT, place, leaf)
        if leaves and not compiles_backward():
            edges = _with_leaves(edges, leaves, len(call.tensors), begun.since)
        if edges is not None:
            backward.attach(call, edges, results, (self._tool,))
        call.release()
        return edges is not None

    def backward_ran(self) -> None:
        """The backward of compiled code has run; hooks tell what it sent, where its results were known."""
        recorder = self._recorder()
        with recorder.lock:
            if not recorder.graphs_ran(columns.BACKWARD):
                recorder.book.forget()
                recorder.backward_of_awaited(INTERCEPTOR.step)


def _leaves(results: list[Tensor], known: list[Tensor], since: int) -> list[Tensor]:
    """Parameters that a compiled function uses besides its arguments: those that its results lead back to."""
    seen = {id(t) for t in known}
    found: list[Tensor] = []
    nodes = [t.grad_fn for t in results if t.grad_fn is not None]
    visited = set(nodes)
    while nodes and len(visited) < _MAX_NODES:
        for node, _ in nodes.pop().next_functions:
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, Tensor):
                if id(leaf) not in seen:
                    seen.add(id(leaf))
                    found.append(leaf)
            elif node is not None and node not in visited and node._sequence_nr() >= since:
                visited.add(node)
                nodes.append(node)
    return found


def _with_leaves(edges: backward.Edges | None, leaves: list[Tensor], before: int, since: int) -> backward.Edges | None:
    more = backward.edges_of(leaves)
    if more is None:
        return edges
    targets = {key: tuple(n + before for n in places) for key, places in more.targets.items()}
    if edges is None:
        return more._replace(tensors=before + len(leaves), targets=targets, since=since)
    return edges._replace(tensors=before + len(leaves), targets={**edges.targets, **targets})


def _members(run: CompiledRun) -> list[Tensor]:
    """What a module, or an optimizer, has besides its arguments."""
    module = run.module
    if module is not None:
        return [t for t in (*module.parameters(), *module.buffers()) if isinstance(t, Tensor)]
    found = _optimized(run)
    return found + [p.grad for p in found if p.grad is not None]


def _optimized(run: CompiledRun) -> list[Tensor]:
    return [p for one in run.optimizers for group in one.param_groups for p in group["params"]]


def _written(run: CompiledRun, begun: _Begun, versions: list[int]) -> list[Tensor]:
    found = [t for t, one, two in zip(begun.call.tensors, begun.versions, versions) if one != two]
    known = {id(t) for t in found}
    return found + [t for t in _optimized(run) if id(t) not in known]  # below autograd nobody counts versions


def _place(run: CompiledRun) -> Place:
    """The module that was compiled, or the one that calls what was, and the outermost one."""
    innermost = outermost = run.module
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            outermost = frame.f_locals.get("self")
            innermost = innermost or outermost
        frame = frame.f_back
    return Place(innermost, outermost, bool(run.optimizers))


def _phase(run: CompiledRun) -> int:
    if run.optimizers:
        return columns.OPTIMIZER
    return columns.FORWARD if running_pass() == -1 else columns.RECOMPUTED


def _told(run: CompiledRun, drew: bool) -> str:
    """What was compiled, unless it is the module, and whether it drew random numbers (`"loss_of, drew=True"`)."""
    words = [] if run.module is not None else [getattr(run.function, "__qualname__", type(run.function).__name__)]
    return ", ".join(words + [DREW] * drew)


def _random_states(device: torch.device) -> list[Any]:
    states = [torch.get_rng_state(), None if device.type == "cpu" else get_rng_state(device)]
    return [None if state is None else state.numpy().tobytes() for state in states]
