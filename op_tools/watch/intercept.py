"""The one interceptor under all tools: it decides once per function, then costs a dict lookup per call."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from .. import lifecycle, settings
from ..call import site
from ..call.description import Described, Descriptions, Tensor, TensorMeta, tensors_in
from ..call.devices import accelerator_type, names_device, stream_captures
from ..call.placement import is_on_device
from ..call.traits import OpTraits, traits_of
from ..compat import (
    DeviceContext,
    count_dispatch_modes,
    count_function_modes,
    function_mode_at,
    in_fake_mode,
    is_below_autograd,
    no_torch_function,
    pop_function_mode,
    push_function_mode,
    running_pass,
)
from ..native import front
from ..view.console import note
from . import backward, functions, inside, patches, room, sums
from .compiled import HIDDEN, CompiledRun, Regions
from .hooks import Hooks
from .interpreter import Interpreter

_MAX_PLANS: Final = 20_000
_UNPLANNED: Final = object()
_NO_NAMES: Final[dict[str, Any]] = {}
_NO_TENSORS: Final[list[Tensor]] = []
_NOTHING: Final = Described((), None, ())

ids = itertools.count(1)


class Call:
    """One call while it happens: what tools get to see in `before` and `after`."""

    __slots__ = (
        *("__weakref__", "args", "function", "id", "inputs", "inside", "kwargs", "location", "mixed", "notes", "op"),
        *("outputs", "result", "results", "step", "tensors", "traits", "unasked"),
    )

    def __init__(
        self, traits: OpTraits, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.id = 0
        self.traits, self.op = traits, traits.name
        self.function = function
        self.args, self.kwargs = args, kwargs
        self.result: Any = None
        self.location, self.step = "", 0
        self.inputs: Described = _NOTHING
        self.outputs: Described = _NOTHING
        self.tensors: list[Tensor] = []  # all among the arguments, in order
        self.results: list[Tensor] = []  # all in the result, in order
        self.notes: dict[Any, Any] = {}  # what tools remember between before and after
        self.unasked: tuple[int, ...] = ()  # tensors whose gradient the last backward pass was not asked for
        self.mixed = False  # whether its nodes also got gradients of other calls in that pass
        self.inside: inside.Inside | None = None  # the call on wrapper tensors that it is a part of

    def release(self) -> None:
        """Let go of the user's tensors; the description stays."""
        self.args, self.kwargs, self.result = (), {}, None
        self.tensors = self.results = _NO_TENSORS

    @property
    def device(self) -> torch.device:
        """The device of the call: that of the first tensor that is not on the CPU, or the one it names."""
        for tensor in self.tensors:
            if not tensor.is_cpu:
                return tensor.device
        if self.tensors and self.result is None:
            return self.tensors[0].device
        seen = False
        for tensor in itertools.chain(tensors_in(self.args), tensors_in(self.kwargs), tensors_in(self.result)):
            if not tensor.is_cpu:
                return tensor.device
            seen = True
        for part in self.inputs.args:  # of a call that has let go of its tensors
            if type(part) is TensorMeta and part.device.type != "cpu":
                return part.device
        wanted = self.kwargs.get("device")
        if wanted is not None and names_device(wanted):
            return torch.device(wanted)
        if not seen and self.traits.factory and wanted is None:
            return torch.get_default_device()
        return torch.device("cpu")


class Plan:
    """What to do with one function while the present tools are active."""

    __slots__ = ("gated", "light", "listeners", "observers", "pointers", "skipped", "tools", "traits", "transforms")

    def __init__(self, traits: OpTraits, tools: list[Hooks], skipped: list[Hooks]) -> None:
        self.traits = traits
        self.observers = tuple(t for t in tools if not t.transforms)
        self.transforms = tuple(t for t in tools if t.transforms)
        self.gated = any(t.gated for t in tools)
        self.tools = self.observers + self.transforms
        self.listeners = tuple(t for t in self.tools if t.wants_backward)
        self.pointers = any(t.wants_pointers or t.view.full for t in tools)
        self.skipped = tuple(skipped)
        self.light: tuple[Any, ...] | None = None  # for `native.front`, which then watches most calls by itself


class Interceptor(TorchFunctionMode):
    """Sees every Python-level call of PyTorch on the threads it is pushed on and hands it to the tools."""

    def __init__(self) -> None:
        super().__init__()
        self.tools: list[Hooks] = []
        self.step = 0
        self.include_cpu = False
        self._plans: dict[Any, Any] | None = None  # by function; None where nothing is watched
        self._front: Any = None  # the hot path in machine code, once it is compiled
        self.descriptions = Descriptions(recalls=True)
        self.sums = sums.GradientSums(self)
        self._lock = threading.RLock()
        self._patches: patches.Installed | None = None
        self._interpreter = Interpreter()
        self.capturing: Callable[[], bool] | None = None
        self.regions = Regions()
        self._graph_noted = False

    # -- the hot path ---------------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Watch a call or let it pass; `native.front` does the same in machine code."""
        plans = self._plans
        plan = None if plans is None else plans.get(func, _UNPLANNED)
        if plan is _UNPLANNED:
            plan = self._make_plan(func)
        if plan is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self.watch(plan, func, args, kwargs or {})

    def watch(
        self,
        plan: Plan,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        part_of: inside.Inside | None = None,
    ) -> Any:
        """Run a call that some tool may want to see, by itself or as a part of one on wrapper tensors."""
        traits = plan.traits
        if traits.transparent:
            with backward.around_backward():
                return func(*args, **kwargs)
        first = args[0] if args else None
        obvious = isinstance(first, Tensor) and not first.is_cpu and not first.is_meta  # as for most calls
        if not obvious and not self.include_cpu and not is_on_device(args, kwargs, traits):
            return func(*args, **kwargs)
        if count_dispatch_modes() and part_of is None:
            around = inside.active()
            if in_fake_mode() or (around is not None and is_below_autograd()):  # nothing is computed; it sees the call
                return func(*args, **kwargs)
            if around is not None:  # checkpointing runs the forward again while a node runs
                with around.off():
                    return self.watch(plan, func, args, kwargs)
        if self.regions.starts and running_pass() != -1 and self.regions.made_running_node():
            return func(*args, **kwargs)
        for tool in plan.skipped:
            tool.skipped(traits.name)
        observers, transforms = plan.observers, plan.transforms
        if not observers and not transforms:
            return func(*args, **kwargs)
        if self.capturing is not None and self.capturing():
            return self._in_a_graph(func, args, kwargs)
        call = Call(traits, func, args, kwargs)
        call.location, call.inside = (site.call_site(), None) if part_of is None else (part_of.location, part_of)
        call.step = self.step
        tools, listeners = plan.tools, plan.listeners
        if plan.gated:
            observers = tuple([t for t in observers if t.accepts(call)])
            transforms = tuple([t for t in transforms if t.accepts(call)])
            tools = observers + transforms
            if not tools:
                functions.lose_track()
                return func(*args, **kwargs)
            listeners = tuple([t for t in tools if t.wants_backward])
        call.id = next(ids)
        edges, entered = None, None
        with no_torch_function():  # attribute reads of a tool must not reach function modes or tensor subclasses
            try:
                call.inputs = self.descriptions.of(args, kwargs, call.tensors, plan.pointers)
                for tensor in call.tensors:
                    if type(tensor) not in inside.PLAIN_TYPES and part_of is None:
                        entered = inside.enter(self, call, observers)
                        break
                if entered is not None:
                    func, (observers, tools) = entered.around(func), map(entered.others, (observers, tools))
                    listeners = (inside.Nodes(entered), *entered.others(listeners))
                if listeners and part_of is None and torch.is_grad_enabled():
                    edges = backward.edges_of(call.tensors)
            except Exception as error:
                plan.tools[0].failed(call, error)
            for tool in observers:
                try:
                    tool.before(call)
                except Exception as error:
                    tool.failed(call, error)
        try:
            try:
                call.result = result = _run(func, call, transforms, 0) if transforms else func(*args, **kwargs)
            except Exception as error:
                if not room.made(error, call, tools):
                    raise
                call.result = result = _run(func, call, transforms, 0) if transforms else func(*args, **kwargs)
        except Exception as error:
            if edges is not None and edges.saving is not None:
                with no_torch_function():
                    edges.saving.stopped(call, tools, error, self)
            raise
        with no_torch_function():
            try:
                call.outputs = self.descriptions.of((result,), _NO_NAMES, call.results, plan.pointers)
            except Exception as error:
                plan.tools[0].failed(call, error)
            if entered is not None:
                entered.tell(call)
            if edges is not None and edges.saving is not None:
                edges.saving.ran(call, tools)
            for tool in reversed(tools):
                try:
                    tool.after(call)
                except Exception as error:
                    tool.failed(call, error)
            if edges is not None:
                try:
                    backward.attach(call, edges, call.results, listeners)
                    if self.sums.wanted:
                        self.sums.note(edges.since, backward.sequence_now(), call)
                except Exception as error:
                    listeners[0].failed(call, error)
            if getattr(functions.THREAD, "made", None) is not None:
                functions.note(call)
        call.release()
        return result

    def plan_inside(self, func: Callable[..., Any], tools: tuple[Hooks, ...]) -> Plan | None:
        """Which of the tools that look inside a call work on a function there; None when none does."""
        plans = self._plans
        plan: Plan | None = None if plans is None else plans.get((func, tools), _UNPLANNED)
        if plans is not None and plan is _UNPLANNED:
            traits = traits_of(func)
            wanted = [t for t in tools if not traits.bookkeeping and t.wants_inside(traits)]
            plan = plans[func, tools] = Plan(traits, wanted, []) if wanted else None
        return plan

    def _in_a_graph(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a CUDA graph records must not wait for the device, and what a tool did would be replayed with it."""
        if not self._graph_noted:
            self._graph_noted = True
            note("calls that a CUDA graph captures are not watched; run without the graph to see them")
        return func(*args, **kwargs)

    def _make_plan(self, func: Callable[..., Any]) -> Plan | None:
        plans = self._plans
        if plans is None:
            return None
        if len(plans) > _MAX_PLANS:  # functions made in a loop must not pile up
            plans.clear()
        try:
            plan = self.plan_for(traits_of(func))
        except Exception as error:  # an odd function is left alone, and the training goes on
            plan = None
            unknown = Call(OpTraits(repr(func)[:120], func), func, (), {})
            for tool in self.tools:
                tool.failed(unknown, error, "the tool cannot tell what this function is")
        if plan is not None and self._front is not None and plan.tools == tuple(self.tools) and len(plan.tools) == 1:
            plan.light = plan.tools[0].light(plan.traits)
        plans[func] = plan
        return plan

    def watch_function(
        self, key: Any, traits: OpTraits, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a Python function that no mode sees as one operator; `key` stands for it among the plans."""
        plans = self._plans
        plan: Plan | None = None if plans is None else plans.get(key, _UNPLANNED)
        if plans is not None and plan is _UNPLANNED:
            plan = plans[key] = self.plan_for(traits)
        if plan is None:
            return function(*args, **kwargs)

        def one_unit(*args: Any, **kwargs: Any) -> Any:
            # What the function calls inside is not watched on its own.
            self.take_off()
            try:
                return function(*args, **kwargs)
            finally:
                if self.tools:
                    self.put_on()

        one_unit.op_tools_function = function  # type: ignore[attr-defined]
        return self.watch(plan, one_unit, args, kwargs)

    def plan_for(self, traits: OpTraits) -> Plan | None:
        """Which of the active tools work on a function; None when nothing is to be done for it."""
        if traits.transparent:
            return Plan(traits, [], [])
        tools, skipped = [], []
        for tool in self.tools:
            wanted = tool.wants(traits)
            if wanted and not traits.bookkeeping:
                tools.append(tool)
            elif not wanted and tool.view.full and tool.names_skips:
                skipped.append(tool)
        return Plan(traits, tools, skipped) if tools or skipped else None

    # -- the stack of function modes of this thread ---------------------------------------------------

    def is_on(self) -> bool:
        """Whether this thread is watched (`INTERCEPTOR.is_on()`)."""
        return any(function_mode_at(i) is self for i in range(count_function_modes()))

    def put_on(self) -> None:
        """Go below the other modes of this thread (`INTERCEPTOR.put_on()`).

        Their `with` blocks pop the top of the stack and must find themselves there, also when a tool starts inside such
        a block and stops after it. A DeviceContext insists on being the lowest.
        """
        above = [pop_function_mode() for _ in range(count_function_modes())]
        if above and isinstance(above[-1], DeviceContext):
            push_function_mode(above.pop())
        push_function_mode(self)
        for other in reversed(above):
            push_function_mode(other)

    def take_off(self) -> None:
        """Leave this thread's stack, wherever on it this mode is (`INTERCEPTOR.take_off()`)."""
        above = [pop_function_mode() for _ in range(count_function_modes())]
        for other in reversed(above):
            if other is not self:
                push_function_mode(other)

    # -- beginning and end ----------------------------------------------------------------------------

    def add(self, tool: Hooks) -> None:
        """Make a tool active on this thread and on threads started from it (`INTERCEPTOR.add(tool)`)."""
        with self._lock:
            if not self.tools:
                self.include_cpu = settings.flag("OP_TOOLS_INCLUDE_CPU")
                self.capturing = torch.cuda.is_current_stream_capturing if torch.cuda.is_available() else None
                self._graph_noted = False
                self.regions = Regions()
                self._patches = patches.Installed(self, backward.WatchedEngine)
                self._interpreter.ease()
            self.tools = sorted([*self.tools, tool], key=lambda t: t.order)
            self.descriptions.make_room()
            self.sums.tools_changed(self.tools)
            self._start_plans({})
            if not self.is_on() and not (self._patches is not None and self._patches.code.starts_inside()):
                self.put_on()

    def _start_plans(self, plans: dict[Any, Any] | None) -> None:
        """Decide anew about every function; where the hot path has been compiled by now, it decides from here on."""
        self._plans = plans
        if self._front is None and plans is not None:
            self._front = front.ready()
            if self._front is not None:  # PyTorch asks the object before the class
                vars(self)["__torch_function__"] = self._front.bound_to(self)
        if self._front is not None:
            front.use_reader()
            shared = (
                self,
                self.descriptions.known,
                self.descriptions.of_result,
                ids,
                self.regions.starts,
                self.capturing and stream_captures(accelerator_type()),
            )
            self._front.set_plans(plans, self._make_plan, self.watch, shared)

    def remove(self, tool: Hooks) -> None:
        """Take a tool out; the last one switches the interceptor off (`INTERCEPTOR.remove(tool)`)."""
        with self._lock:
            self.tools = [t for t in self.tools if t is not tool]
            self.sums.tools_changed(self.tools)
            self._start_plans({} if self.tools else None)
            if not self.tools:
                self.take_off()
                if self._patches is not None:
                    self._patches.undo()
                    self._patches = None

    def finished(self) -> None:
        """A tool that was taken out has written its results: the interpreter need not go easy any more."""
        with self._lock:
            if not self.tools:
                self._interpreter.restore()

    def count_step(self) -> None:
        """A training step is over (`INTERCEPTOR.count_step()`)."""
        with self._lock:
            self.step += 1
            if self._front is None and self._plans is not None:
                self._start_plans({})
            front.use_reader()  # where it was compiled meanwhile

    def pass_begins(self, roots: Sequence[Any]) -> None:
        """A backward pass is about to begin (`INTERCEPTOR.pass_begins([loss])`)."""
        found = [root for root in roots if isinstance(root, Tensor)]
        self._tell("before_backward_pass", torch.autograd.backward, found)

    def passes_ended(self, graph_is_kept: bool) -> None:
        """Backward passes have ended, and none is under way (`INTERCEPTOR.passes_ended(False)`)."""
        self._tell("after_backward_passes", torch.autograd.backward, graph_is_kept)

    def compiled_code_begins(self, run: CompiledRun) -> None:
        """A compiled function is about to run; tools will not see what it does."""
        self._tell("before_compiled_code", torch.compile, run)

    def compiled_code_ran(self, run: CompiledRun | None) -> None:
        """Compiled code has run; tools did not see it (`INTERCEPTOR.compiled_code_ran(None)`)."""
        self._tell("after_compiled_code", torch.compile, run)

    def _tell(self, hook: str, function: Callable[..., Any], *args: Any) -> None:
        for tool in self.tools:
            try:
                getattr(tool, hook)(*args)
            except Exception as error:
                tool.failed(Call(OpTraits(function.__name__, function), function, (), {}), error)

    def forked(self) -> None:
        """In a forked child (a DataLoader worker) the tools of the parent are silent, and nothing is patched."""
        self._lock = threading.RLock()
        self._start_plans(None)
        self.tools = []
        self.sums.wanted = False
        self._patches = None
        self.take_off()
        HIDDEN.forked()
        patches.undo_all_in_child()


def _run(func: Callable[..., Any], call: Call, transforms: tuple[Hooks, ...], index: int) -> Any:
    tool = transforms[index]

    def inner(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if index + 1 == len(transforms):
            return func(*args, **kwargs)
        nested = Call(call.traits, func, args, kwargs)
        nested.id, nested.location, nested.step, nested.notes = call.id, call.location, call.step, call.notes
        return _run(func, nested, transforms, index + 1)

    return tool.transform(call, inner)


INTERCEPTOR: Final = Interceptor()
lifecycle.after_fork_in_child(INTERCEPTOR.forked)
