"""The gradients of one API call, found on its own edges of the autograd graph.

A call may be made of many autograd nodes. Its nodes are those between its outputs and the gradient edges
of its inputs, which are noted before the call because in-place operators move them. The gradient that the
call sends to an input is the sum of what its nodes send over the edges that lead to that input.

Other calls may reach the nodes of a call. Autocast keeps the copy of a weight, so that its node serves every call on
that weight. The graph of a first derivative leads into nodes of the calls that it differentiates. So nodes next to the
inputs that only move or convert values have no hook: the call's own gradient goes through them here.
A hook holds the nodes that follow its own, which that node holds as well. One that held its own node, or one before
it, would keep the graph alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ..call import facts
from ..call.description import Tensor
from ..call.devices import quiet
from ..compat import (
    COMPILED_AUTOGRAD,
    compiles_backward,
    count_dispatch_modes,
    engine_will_run,
    no_torch_function,
    sequence_number,
    top_saved_tensor_hooks,
)
from ..copies.materialise import place_of
from .compiled import THREAD
from .hooks import Hooks
from .recomputed import Saving

if TYPE_CHECKING:
    from .intercept import Call, Interceptor

_thread: Final = threading.local()  # `in_backward`: inside `Tensor.backward`
sequence_now: Final[Callable[[], int]] = sequence_number or (lambda: 0)
_MAX_NODES: Final = 2_000
WITHOUT_KERNEL: Final = facts.NODES_WITHOUT_KERNEL
_CAST: Final = "ToCopyBackward0"
_PASSES_ON: Final = WITHOUT_KERNEL | {_CAST}  # nodes that move or convert a gradient, and keep no tensors


class _Slice(NamedTuple):
    """Where a view lies in the gradient of its base."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype | None = None  # of a complex view of real numbers, or the other way round

    def of(self, grad: Tensor) -> Tensor:
        """That part of the gradient of the base."""
        if self.dtype is not None:
            grad = grad.resolve_conj().contiguous().view(self.dtype)
        return grad.as_strided(self.shape, self.stride, self.offset)


def _place(view: Tensor, base: Tensor) -> _Slice:
    start, first = int(view.storage_offset()), int(base.storage_offset())
    if view.dtype == base.dtype:
        return _Slice(view.shape, view.stride(), start - first)
    size = view.element_size()
    return _Slice(view.shape, view.stride(), start - first * base.element_size() // size, view.dtype)


_NO_GRADIENTS: Final[list[Tensor | None]] = []
_TO_LEAF: Final = _Slice((), (), 0)


# An edge over which gradients leave a call: its number, the inputs that it serves, where they lie in that gradient, the
# node at the other end, and the nodes on the way to the inputs that have no hook.
_Target = tuple[int, tuple[int, ...], "_Slice | None", Any, tuple[Any, ...]]


class Edges(NamedTuple):
    """The gradient edges of a call's inputs, as they were before the call."""

    tensors: int  # among the inputs
    targets: dict[Any, tuple[int, ...]]  # inputs by (node, output number); by id where they are leaves
    bases: dict[tuple[Any, int], tuple[int, _Slice]]  # edges of the bases of inputs that are views
    since: int
    saving: Saving | None  # where hooks get what the call saves for its backward
    twins: tuple[tuple[tuple[int, ...], ...], ...]  # inputs of other edges in one place: `mul(x[0], x[0])`


def _twins_of(tensors: list[Tensor], targets: dict[Any, tuple[int, ...]]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Inputs that a copy of the call cannot tell apart, though autograd does."""
    found: dict[Any, list[tuple[int, ...]]] = {}
    try:
        if len({tensors[inputs[0]].data_ptr() for inputs in targets.values()}) == len(targets):
            return ()
        for inputs in targets.values():
            place = place_of(tensors[inputs[0]])
            found.setdefault(place, []).append(inputs)
    except RuntimeError:  # tensors without memory
        return ()
    return tuple([tuple(several) for several in found.values() if len(several) > 1])


def edges_of(tensors: list[Tensor]) -> Edges | None:
    """Note where gradients of these arguments would flow to; None when none of them needs one."""
    targets: dict[Any, tuple[int, ...]] = {}
    bases: dict[tuple[Any, int], tuple[int, _Slice]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.requires_grad:
            try:
                node = tensor.grad_fn
            except RuntimeError:  # a view whose base was changed in place: nothing can come to it
                continue
            key = id(tensor) if node is None else (node, tensor.output_nr)
            known = targets.get(key)
            targets[key] = (index,) if known is None else (*known, index)
        if tensor._is_view() and (base := tensor._base) is not None and (node := base.grad_fn) is not None:
            bases.setdefault((node, base.output_nr), (index, _place(tensor, base)))
    if not targets and not bases:
        # closures may bring in tensors that need gradients; such calls have none among their arguments
        return None
    hooks = top_saved_tensor_hooks(True)
    twins = _twins_of(tensors, targets) if len(targets) > 1 else ()
    return Edges(len(tensors), targets, bases, sequence_now(), Saving(hooks) if hooks else None, twins)


def attach(call: Call, edges: Edges, outputs: list[Tensor], listeners: tuple[Hooks, ...]) -> None:
    """Hook the nodes of a call so that `listeners` hear of its backward pass."""
    sources: dict[Any, list[tuple[int, int]]] = {}
    targets = edges.targets
    for index, tensor in enumerate(outputs):
        node = tensor.grad_fn
        if node is not None and (node, tensor.output_nr) not in targets:  # not an input handed back as it is
            sources.setdefault(node, []).append((tensor.output_nr, index))
    if not sources:
        return
    more: Hooks | None = call.notes.get("nodes")  # of this call alone
    state = _Backward(call, listeners if more is None else (more, *listeners), len(outputs), edges.tensors)
    stand_ins = _bases_of_results(outputs, edges) if state.gradients else {}
    state.stand_ins, state.twins = bool(stand_ins), edges.twins
    nodes = _hooks_of_call(state, sources, edges, stand_ins)
    if len(nodes) > 1 and not state.gradients:  # nobody looks at the gradients: nodes that run no kernel are left out
        nodes = [pair for pair in nodes if type(pair[0]).__name__ not in WITHOUT_KERNEL] or nodes
    state.nodes = len(nodes)
    for node, hook in nodes:
        if state.starters:
            node.register_prehook(hook)
        node.register_hook(hook)


def _bases_of_results(outputs: list[Tensor], edges: Edges) -> dict[Any, list[tuple[int, int, _Slice]]]:
    """Nodes that made what results are whole views of: where these are changed in place, gradients come by there."""
    found: dict[Any, list[tuple[int, int, _Slice]]] = {}
    for index, tensor in enumerate(outputs):
        if tensor.grad_fn is None or not tensor._is_view() or (base := tensor._base) is None:
            continue
        node = base.grad_fn
        if node is None or node is tensor.grad_fn or node._sequence_nr() < edges.since:
            continue
        whole = tensor.numel() == base.numel() and base.is_contiguous() and tensor.dtype == base.dtype
        if whole and (node, base.output_nr) not in edges.targets:
            found.setdefault(node, []).append((base.output_nr, index, _place(tensor, base)))
    return found


def _hooks_of_call(
    state: _Backward,
    sources: dict[Any, list[tuple[int, int]]],
    edges: Edges,
    stand_ins: dict[Any, list[tuple[int, int, _Slice]]],
) -> list[tuple[Any, _Hook]]:
    found: list[tuple[Any, _Hook]] = []
    numbers = {node: number for number, node in enumerate(sources)}
    ends: set[Any] | None = None
    stack = list(sources)
    known, since = edges.targets, edges.since
    while stack:
        node = stack.pop()
        targets: list[_Target] = []
        inner: list[tuple[int, int, int]] = []
        for edge, following in enumerate(node.next_functions):  # pairs of a node and the number of its output
            next_node = following[0]
            if next_node is None:
                continue
            inputs = known.get(following)
            if inputs is not None:
                targets.append((edge, inputs, None, next_node, ()))
                continue
            end = _end_of(following, edges)
            if end is not None:
                if end[0]:
                    targets.append((edge, *end, next_node, ()))
                continue
            if state.gradients and type(next_node).__name__ in _PASSES_ON:
                way, passed = _way_to_input(next_node, edges)
                if way is not None:
                    targets.append((edge, *way, next_node, passed))
                    timed = passed if state.starters else ()  # their time counts, what comes to them does not
                    for other in timed:
                        if other not in numbers and other._sequence_nr() >= since:
                            numbers[other] = len(numbers)
                            found.append((other, _Hook(state, numbers[other])))
                    continue
            if ends is None:
                ends = {key[0] for key in known if type(key) is tuple}
            if next_node in ends or next_node._sequence_nr() < since:
                continue
            number = numbers.get(next_node)
            if number is None:
                number = numbers[next_node] = len(numbers)
                stack.append(next_node)
                if number > _MAX_NODES:
                    return []
            inner.append((edge, number, following[1]))
        hook = _Hook(state, numbers[node], targets, inner, sources.get(node, ()), stand_ins.get(node, ()))
        found.append((node, hook))
    if stand_ins:
        _forget_shared([hook for _, hook in found])
    return found


def _forget_shared(hooks: list[_Hook]) -> None:
    """No stand-ins where other results of the call send gradients as well: attention weights, and what they weigh."""
    senders = Counter(edge[1:] for hook in hooks for edge in hook.inner)
    for hook in hooks:
        hook.stand_ins = [s for s in hook.stand_ins if senders[hook.number, s[0]] < 2]


def _end_of(following: tuple[Any, int], edges: Edges) -> tuple[tuple[int, ...], _Slice | None] | None:
    """The inputs at the end of an edge: none where another leaf is; None where the graph goes on."""
    inputs = edges.targets.get(following)
    if inputs is not None:
        return inputs, None
    if following in edges.bases:
        index, place = edges.bases[following]
        return (index,), place
    variable = getattr(following[0], "variable", None)
    if variable is None:
        return None
    return edges.targets.get(id(variable), ()), _TO_LEAF


def _way_to_input(node: Any, edges: Edges) -> tuple[tuple[tuple[int, ...], _Slice | None] | None, tuple[Any, ...]]:
    """The inputs behind a chain of nodes that pass gradients on, and that chain."""
    passed: list[Any] = []
    while type(node).__name__ in _PASSES_ON:
        if node._sequence_nr() < edges.since and type(node).__name__ != _CAST:
            break  # not of this call; a cast may be one that autocast has kept
        passed.append(node)
        following = node.next_functions[0]
        if following[0] is None:
            break
        end = _end_of(following, edges)
        if end is not None:
            return (end if end[0] else None), tuple(passed)
        node = following[0]
    return None, ()


class _Backward:
    """What has been heard so far of the backward pass of one call."""

    __slots__ = (
        *("asked", "call", "differentiated", "grad_inputs", "grad_outputs", "gradients", "heard", "listeners", "mixed"),
        *("makes_graph", "nodes", "passed_on", "queued", "sent", "sizes", "stand_ins", "starters", "twins"),
    )

    def __init__(self, call: Call, listeners: tuple[Hooks, ...], outputs: int, inputs: int) -> None:
        self.call, self.listeners = call, listeners
        self.starters = tuple([t for t in listeners if t.wants_backward_start])
        self.gradients = False
        for tool in listeners:
            if tool.wants_gradients:
                self.gradients = True
        self.nodes = 0
        self.stand_ins = False
        self.twins: tuple[tuple[tuple[int, ...], ...], ...] = ()
        self.makes_graph = False  # a pass, this one or an earlier one, makes a graph of its own
        self.differentiated = False  # the graph of an earlier pass may lead into these nodes
        self.sizes = (outputs, inputs)
        self.heard: set[int] | None = None

    def hear(self, hook: _Hook, to_inputs: Sequence[Any], from_outputs: Sequence[Any]) -> None:
        if self.gradients:
            grad = torch.is_grad_enabled()
            self.makes_graph = self.makes_graph or grad
            with quiet() if grad or count_dispatch_modes() else no_torch_function():  # mostly, less will do
                self._hear(hook, to_inputs, from_outputs)
        elif self.nodes == 1:
            self._tell(_NO_GRADIENTS, _NO_GRADIENTS)
        else:
            self._hear(hook, to_inputs, from_outputs)

    def _hear(self, hook: _Hook, to_inputs: Sequence[Any], from_outputs: Sequence[Any]) -> None:
        if self.heard is None:
            self.heard = set()
            self.grad_outputs: list[Tensor | None] = [None] * self.sizes[0]
            self.grad_inputs: list[Tensor | None] = [None] * self.sizes[1]
            self.passed_on: dict[int, set[int]] = {}
            self.asked: set[int] = set()
            self.sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
            self.mixed = self.queued = False
        if self.gradients:
            self._add(hook, to_inputs, from_outputs)
        self.heard.add(hook.number)
        if len(self.heard) >= self.nodes:
            self._finish()
        elif not self.queued:
            # Some nodes may never run (unused outputs, `inputs=`): the end of the pass is then the end.
            self.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def _add(self, hook: _Hook, to_inputs: Sequence[Any], from_outputs: Sequence[Any]) -> None:
        for output_number, index in hook.sources:
            if output_number < len(from_outputs):
                self.grad_outputs[index] = from_outputs[output_number]
                if self.stand_ins:
                    self.passed_on[index] = {g.data_ptr() for g in to_inputs if g is not None}
        for output_number, index, whole in hook.stand_ins:
            grad = from_outputs[output_number] if output_number < len(from_outputs) else None
            # the same as what came to the result, or all there is if that was changed in place
            if grad is not None and grad.data_ptr() not in self.passed_on.get(index, ()):
                self.grad_outputs[index] = whole.of(grad.contiguous())
        if self.differentiated and self.nodes > 1:
            self._check(hook, to_inputs, from_outputs)
        for edge, inputs, place, following, through in hook.targets:
            grad = to_inputs[edge] if edge < len(to_inputs) else None
            if grad is None:
                if engine_will_run(following):
                    self.asked.update(inputs)
                continue
            for node in through:
                grad = node(grad)
            if place is _TO_LEAF:
                grad = grad.detach()  # a gradient that somebody else holds would be copied into `.grad`
            elif place is not None:
                grad = place.of(grad)
            for index in inputs:
                present = self.grad_inputs[index]
                self.grad_inputs[index] = grad if present is None else present + grad

    def _check(self, hook: _Hook, to_inputs: Sequence[Any], from_outputs: Sequence[Any]) -> None:
        """Notice gradients of other calls that came to a node between inputs and outputs."""
        own = {output_number for output_number, _ in hook.sources}
        for number, grad in enumerate(from_outputs):
            if grad is not None and number not in own:
                sent = self.sent.get((hook.number, number))
                self.mixed = self.mixed or sent != [(grad.data_ptr(), grad._version)]
        for edge, number, output_number in hook.inner:
            grad = to_inputs[edge] if edge < len(to_inputs) else None
            if grad is not None:
                self.sent.setdefault((number, output_number), []).append((grad.data_ptr(), grad._version))

    def finish(self) -> None:
        """The backward pass is over, whether or not all nodes were heard."""
        if self.heard:
            with quiet():
                self._finish()

    def _finish(self) -> None:
        grad_outputs, grad_inputs = self.grad_outputs, self.grad_inputs
        joined = self._joined(grad_inputs) if self.twins else grad_inputs
        missing = [index for index, grad in enumerate(grad_inputs) if grad is None and index not in self.asked]
        self.call.unasked, self.call.mixed = tuple(missing), self.mixed
        self.differentiated = self.makes_graph
        self.heard = None
        del self.grad_outputs, self.grad_inputs, self.passed_on, self.asked, self.sent
        self._tell(grad_outputs, grad_inputs, joined)

    def _joined(self, own: list[Tensor | None]) -> list[Tensor | None]:
        """Inputs that are the same memory get the sum of their gradients, as in a copy, where they are one tensor."""
        grads = list(own)
        for several in self.twins:
            found = [grad for inputs in several if (grad := own[inputs[0]]) is not None]
            self.call.mixed = self.mixed = self.mixed or 0 < len(found) < len(several)
            if len(found) == len(several):
                total = functools.reduce(torch.add, found)
                for inputs in several:
                    for index in inputs:
                        grads[index] = total
        return grads

    def _tell(
        self,
        grad_outputs: list[Tensor | None],
        grad_inputs: list[Tensor | None],
        joined: list[Tensor | None] = _NO_GRADIENTS,
    ) -> None:
        for tool in self.listeners:
            try:
                tool.after_backward(self.call, grad_outputs, joined if tool.wants_twins_joined else grad_inputs)
            except Exception as error:
                tool.failed(self.call, error)


@dataclasses.dataclass(slots=True, eq=False)
class _Hook:
    """Called before and after one node of a call runs."""

    state: _Backward
    number: int
    targets: Sequence[_Target] = ()
    inner: Sequence[tuple[int, int, int]] = ()  # edges to other nodes of the call: their number, and which output
    sources: Sequence[tuple[int, int]] = ()  # (output number of the node, output of the call)
    stand_ins: Sequence[tuple[int, int, _Slice]] = ()  # the same of nodes that made what these are views of
    started: Sequence[Any] = ()  # what `before_node` of each tool returned

    def __call__(self, grads: Any, grad_outputs: Any = None) -> None:
        if THREAD.region is not None:  # the whole pass is compiled, and left alone
            return
        state = self.state
        starters = state.starters
        if grad_outputs is None:  # a hook before the node gets one argument, a hook after it two
            started: list[Any] = []
            self.started = started
            for tool in starters:
                try:
                    started.append(tool.before_node(state.call, self.number))
                except Exception as error:
                    started.append(None)
                    tool.failed(state.call, error)
            return
        if starters:
            for tool, token in zip(starters, self.started):
                if token is not None:
                    try:
                        tool.after_node(state.call, token)
                    except Exception as error:
                        tool.failed(state.call, error)
            self.started = ()
        try:
            state.hear(self, grads, grad_outputs)
        except Exception as error:
            state.listeners[0].failed(state.call, error)


# --- the autograd engine itself ----------------------------------------------------------------------


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
