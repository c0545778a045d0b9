"""The one interceptor under all tools: it decides once per function, then costs a dict lookup per call."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode

from .. import settings
from ..call.description import Described, Descriptions, Finding, Tensor, TensorMeta, tensors_in
from ..call.devices import quiet
from ..call.location import call_site
from ..call.traits import COLLECTIVES, OpTraits, traits_of
from ..compat import DYNAMO_WRAPPERS, DeviceContext, dynamo_eval_frame
from ..compat import count_function_modes as _depth
from ..compat import function_mode_at as _mode_at
from ..compat import no_torch_function as _no_function
from ..compat import pop_function_mode as _pop
from ..compat import push_function_mode as _push
from ..copies import queue
from ..view import store
from ..view.console import View, note
from . import backward

if TYPE_CHECKING:
    from ..tools.base import Tool

_MOST_PLANS: Final = 20_000
_UNPLANNED: Final = object()
_NO_NAMES: Final[dict[str, Any]] = {}

ids = itertools.count(1)
_thread = threading.local()


class Call:
    """One call while it happens: what tools get to see in `before` and `after`."""

    __slots__ = (
        "__weakref__",
        "args",
        "function",
        "id",
        "inputs",
        "kwargs",
        "location",
        "notes",
        "op",
        "outputs",
        "result",
        "results",
        "step",
        "tensors",
        "traits",
    )

    def __init__(
        self, traits: OpTraits, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.id = 0
        self.traits = traits
        self.op = traits.name
        self.function = function
        self.args, self.kwargs = args, kwargs
        self.result: Any = None
        self.location = ""
        self.step = 0
        self.inputs: Described = _NOTHING
        self.outputs: Described = _NOTHING
        self.tensors: list[Tensor] = []  # all among the arguments, in order
        self.results: list[Tensor] = []  # all in the result, in order
        self.notes: dict[Any, Any] = {}  # what tools remember between before and after

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
        if wanted is not None and _names_device(wanted):
            return torch.device(wanted)
        if not seen and self.traits.factory and wanted is None:
            return torch.get_default_device()
        return torch.device("cpu")


_NOTHING: Final = Described((), None, ())


def _nothing() -> None:
    """Stands for the function of a call where there is none."""


_NO_TENSORS: Final[list[Tensor]] = []


class Plan:
    """What to do with one function while the present tools are active."""

    __slots__ = ("backward", "gated", "listeners", "observers", "pointers", "skipped", "tools", "traits", "transforms")

    def __init__(self, traits: OpTraits, tools: list[Tool], skipped: list[Tool]) -> None:
        self.traits = traits
        self.observers = tuple(t for t in tools if not t.transforms)
        self.transforms = tuple(t for t in tools if t.transforms)
        self.gated = any(t.gated for t in tools)
        self.tools = self.observers + self.transforms
        self.listeners = tuple(t for t in self.tools if t.wants_backward)
        self.backward = bool(self.listeners)
        self.pointers = any(t.wants_pointers or t.view.full for t in tools)
        self.skipped = tuple(skipped)


class _Inert(dict[Any, Any]):
    """Plans that say "pass" to every function: an interceptor that has been switched off."""

    def get(self, key: Any, default: Any = None) -> Any:
        return None


class Interceptor(TorchFunctionMode):
    """Sees every Python-level call of PyTorch on the threads it is pushed on and hands it to the tools."""

    def __init__(self) -> None:
        super().__init__()
        self.tools: list[Tool] = []
        self.step = 0
        self.include_cpu = False
        self._plans: dict[Any, Any] = _Inert()
        self._descriptions = Descriptions()
        self._lock = threading.RLock()
        self._undo: list[Callable[[], None]] = []
        self._passes = _Passes()
        self._capturing: Callable[[], bool] | None = None
        self._said_so = False

    # -- the hot path ---------------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        plan = self._plans.get(func, _UNPLANNED)
        if plan is _UNPLANNED:
            plan = self._make_plan(func)
        if plan is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self.watch(plan, func, args, kwargs or {})

    def watch(self, plan: Plan, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that some tool may want to see."""
        traits = plan.traits
        if traits.transparent:
            outer, _thread.in_backward = getattr(_thread, "in_backward", False), True
            try:
                return func(*args, **kwargs)
            finally:
                _thread.in_backward = outer
        if not self.include_cpu and not on_device(args, kwargs, traits):
            return func(*args, **kwargs)
        for tool in plan.skipped:
            tool.view.skip(tool.hook, traits.name)
        observers, transforms = plan.observers, plan.transforms
        if not observers and not transforms:
            return func(*args, **kwargs)
        if self._capturing is not None and self._capturing():
            return self._in_a_graph(func, args, kwargs)
        call = Call(traits, func, args, kwargs)
        call.location = call_site(3)
        call.step = self.step
        tools, listeners = plan.tools, plan.listeners
        if plan.gated:
            observers = tuple([t for t in observers if t.accepts(call)])
            transforms = tuple([t for t in transforms if t.accepts(call)])
            tools = observers + transforms
            if not tools:
                return func(*args, **kwargs)
            listeners = tuple([t for t in tools if t.wants_backward])
        call.id = next(ids)
        edges = None
        with _no_function():  # attribute reads of a tool must not reach function modes or tensor subclasses
            try:
                call.inputs = self._descriptions.of(args, kwargs, call.tensors, plan.pointers)
                if listeners and torch.is_grad_enabled():
                    edges = backward.edges_of(call.tensors)
            except Exception as error:
                tools[0].failed(call, error)
            for tool in observers:
                try:
                    tool.before(call)
                except Exception as error:
                    tool.failed(call, error)
        call.result = result = _run(func, call, transforms, 0) if transforms else func(*args, **kwargs)
        with _no_function():
            try:
                call.outputs = self._descriptions.of((result,), _NO_NAMES, call.results, plan.pointers)
            except Exception as error:
                tools[0].failed(call, error)
            for tool in reversed(tools):
                try:
                    tool.after(call)
                except Exception as error:
                    tool.failed(call, error)
            if edges is not None:
                try:
                    backward.attach(call, edges, call.results, listeners)
                except Exception as error:
                    listeners[0].failed(call, error)
        call.release()
        return result

    def _in_a_graph(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a CUDA graph records must not wait for the device, and what a tool did would be replayed with it."""
        if not self._said_so:
            self._said_so = True
            note("calls that a CUDA graph captures are not watched; run without the graph to see them")
        return func(*args, **kwargs)

    def _make_plan(self, func: Callable[..., Any]) -> Plan | None:
        self._compiler.look()
        plans = self._plans
        if len(plans) > _MOST_PLANS:  # functions made in a loop must not pile up
            plans.clear()
        try:
            plan = self.plan_for(traits_of(func))
        except Exception as error:  # an odd function is left alone, and the training goes on
            plan = None
            unknown = Call(OpTraits(repr(func)[:120], func), func, (), {})
            for tool in self.tools:
                tool.failed(unknown, error, "the tool cannot tell what this function is")
        plans[func] = plan
        return plan

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

    # -- beginning and end ----------------------------------------------------------------------------

    def add(self, tool: Tool) -> None:
        """Make a tool active on this thread and on threads started from it (`INTERCEPTOR.add(tool)`)."""
        with self._lock:
            if not self.tools:
                self.include_cpu = settings.flag("OP_TOOLS_INCLUDE_CPU")
                self._capturing = torch.cuda.is_current_stream_capturing if torch.cuda.is_available() else None
                self._said_so = False
                self._install()
            self.tools = sorted([*self.tools, tool], key=lambda t: t.order)
            self._plans = {}
            self._enter_thread()

    def remove(self, tool: Tool) -> None:
        """Take a tool out; the last one switches the interceptor off (`INTERCEPTOR.remove(tool)`)."""
        with self._lock:
            self.tools = [t for t in self.tools if t is not tool]
            self._plans = {} if self.tools else _Inert()
            if not self.tools:
                _take_off(self)
                while self._undo:
                    self._undo.pop()()

    def replan(self) -> None:
        """Forget all decisions, after a tool's settings changed (`INTERCEPTOR.replan()`)."""
        with self._lock:
            if self.tools:
                self._plans = {}

    def _enter_thread(self) -> None:
        if not _is_on(self):
            _put_on(self)

    def _install(self) -> None:
        self._undo.append(_watch_new_threads(self))
        self._undo.append(_count_steps(self))
        self._undo.append(_watch_inside_backward(self))
        self._compiler = _Compiler(self)
        self._undo.append(self._compiler.undo)
        undo = _watch_collectives(self)
        if undo is not None:
            self._undo.append(undo)

    def pass_ended(self, graph_is_kept: bool) -> None:
        """A backward pass is over (`INTERCEPTOR.pass_ended(False)`)."""
        over, kept = self._passes.end(graph_is_kept)
        if over:
            for tool in self.tools:
                try:
                    tool.after_passes(kept)
                except Exception as error:
                    tool.failed(Call(OpTraits("backward", _nothing), _nothing, (), {}), error)

    def forked(self) -> None:
        """In a forked child (a DataLoader worker) the tools of the parent are silent."""
        self._plans = _Inert()
        self.tools = []
        self._lock = threading.RLock()
        self._passes = _Passes()
        store.forget_in_child()
        queue.forget_in_child()


def _run(func: Callable[..., Any], call: Call, transforms: tuple[Tool, ...], index: int) -> Any:
    if index == len(transforms):
        return func(*call.args, **call.kwargs)
    tool = transforms[index]

    def inner(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if index + 1 == len(transforms):
            return func(*args, **kwargs)
        nested = Call(call.traits, func, args, kwargs)
        nested.id, nested.location, nested.step, nested.notes = call.id, call.location, call.step, call.notes
        return _run(func, nested, transforms, index + 1)

    return tool.transform(call, inner)


def on_device(args: tuple[Any, ...], kwargs: dict[str, Any], traits: OpTraits) -> bool:
    """Whether a call concerns a device: a tensor on it, or a device argument that names it."""
    for arg in args:
        if isinstance(arg, Tensor):
            if not arg.is_cpu:
                return arg.device.type != "meta"
        elif type(arg) in _CONTAINERS and _container_on_device(arg):
            return True
    for key, arg in kwargs.items():
        if isinstance(arg, Tensor):
            if not arg.is_cpu:
                return arg.device.type != "meta"
        elif key == "device":
            if arg is not None and _names_device(arg):
                return True
        elif type(arg) in _CONTAINERS and _container_on_device(arg):
            return True
    if traits.factory and kwargs.get("device") is None:
        return _names_device(torch.get_default_device())
    if traits.transfer:
        last = traits.name.rsplit(".", 1)[-1]
        return last not in ("to", "cpu") or any(_names_device(a) for a in args[1:2])
    return any(_odd_container_on_device(a) for a in args)


_CONTAINERS: Final = frozenset({list, tuple, dict})
_SCALARS: Final = frozenset({int, float, bool, str, type(None), torch.dtype, torch.Size, torch.device, slice})


def _names_device(value: Any) -> bool:
    if isinstance(value, int):
        return True
    if not isinstance(value, (str, torch.device)):
        return False
    try:
        return torch.device(value).type not in ("cpu", "meta")
    except RuntimeError:
        return False


def _container_on_device(value: Any) -> bool:
    for member in value.values() if type(value) is dict else value:
        if isinstance(member, Tensor):
            if not member.is_cpu and member.device.type != "meta":
                return True
        elif type(member) in _CONTAINERS and _container_on_device(member):
            return True
    return False


def _odd_container_on_device(value: Any) -> bool:
    kind = type(value)
    if kind in _SCALARS or kind in _CONTAINERS or isinstance(value, Tensor):
        return False
    return any(not t.is_cpu and t.device.type != "meta" for t in tensors_in(value))


# -- the stack of function modes ----------------------------------------------------------------------


def _is_on(mode: TorchFunctionMode) -> bool:
    return any(_mode_at(i) is mode for i in range(_depth()))


def _put_on(mode: TorchFunctionMode) -> None:
    # Below the modes that are on: their `with` blocks pop the top of the stack and must find themselves
    # there, also when a tool starts inside such a block and stops after it. A DeviceContext insists on
    # being the lowest.
    above = [_pop() for _ in range(_depth())]
    if above and isinstance(above[-1], DeviceContext):
        _push(above.pop())
    _push(mode)
    for other in reversed(above):
        _push(other)


def _take_off(mode: TorchFunctionMode) -> None:
    above = [_pop() for _ in range(_depth())]
    for other in reversed(above):
        if other is not mode:
            _push(other)


# -- calls that do not pass through the mode by themselves --------------------------------------------


def _watch_new_threads(interceptor: Interceptor) -> Callable[[], None]:
    """Function modes belong to a thread: a thread started by a watched one is watched too."""
    original = threading.Thread.start

    def start(thread: threading.Thread, *args: Any, **kwargs: Any) -> None:
        if not getattr(thread, "op_tools_internal", False) and _is_on(interceptor):
            run = thread.run

            def watched_run() -> None:
                _put_on(interceptor)
                try:
                    run()
                finally:
                    _take_off(interceptor)

            thread.run = watched_run  # type: ignore[method-assign]
        original(thread, *args, **kwargs)

    threading.Thread.start = start  # type: ignore[method-assign,assignment]

    def undo() -> None:
        if threading.Thread.start is start:
            threading.Thread.start = original  # type: ignore[method-assign]

    return undo


class _Passes:
    """Backward passes under way, in all threads; passes run inside of others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._kept = False

    def begin(self) -> None:
        with self._lock:
            self._under_way += 1

    def end(self, graph_is_kept: bool) -> tuple[bool, bool]:
        """Whether none is under way any more, and whether one of those that ended keeps its graph."""
        with self._lock:
            self._under_way -= 1
            kept = self._kept = self._kept or graph_is_kept
            if self._under_way == 0:
                self._kept = False
            return self._under_way == 0, kept


class _WatchedEngine:
    """The autograd engine with the interceptor back on: recomputation and hooks run operators too.

    `Tensor.backward` takes the mode off for as long as it runs. The engine hands the modes of the calling
    thread on to its own threads, so putting the mode back right around the engine reaches those as well.
    """

    def __init__(self, engine: Any, interceptor: Interceptor) -> None:
        self._engine, self._interceptor = engine, interceptor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        interceptor = self._interceptor
        put_on = getattr(_thread, "in_backward", False) and not _is_on(interceptor)
        interceptor._passes.begin()
        if put_on:
            _put_on(interceptor)
        try:
            return self._engine.run_backward(*args, **kwargs)
        finally:
            if put_on:
                _take_off(interceptor)
            graph_is_kept = bool(args[2]) if len(args) > 2 else True
            interceptor.pass_ended(graph_is_kept)


def _watch_inside_backward(interceptor: Interceptor) -> Callable[[], None]:
    variable: Any = torch.autograd.Variable
    engine = variable._execution_engine
    watched = _WatchedEngine(engine, interceptor)
    variable._execution_engine = watched

    def undo() -> None:
        if variable._execution_engine is watched:
            variable._execution_engine = engine

    return undo


class _Compiler:
    """Keeps the interceptor out of compiled functions, which are one piece to it and to the user.

    Dynamo would trace a function mode along with the function, break the graph at each operator, and compile again
    for every tool. So the mode is taken off for as long as Dynamo watches the frames of a thread.
    """

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        self._module: Any = None
        self._original: Callable[[Any], Any] | None = None
        self._compile = torch.compile
        torch.compile = self._compile_and_look
        self.look()

    def _compile_and_look(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self._compile(*args, **kwargs)
        self.look()
        return compiled

    def look(self) -> None:
        """Dynamo is imported when it is used first: see whether it is there by now."""
        if self._module is not None:
            return
        module = dynamo_eval_frame()
        if module is not None:
            self._module, self._original = module, module._maybe_set_eval_frame
            module._maybe_set_eval_frame = self._set

    def _set(self, callback: Any) -> Any:
        assert self._original is not None
        wrapper = sys._getframe(1)  # of a compiled function: it calls this before and after
        if getattr(_thread, "compiled", None) is wrapper:
            prior = self._original(callback)
            _thread.compiled = None
            _put_on(self._interceptor)
            return prior
        if callable(callback) and wrapper.f_code.co_name in DYNAMO_WRAPPERS and _is_on(self._interceptor):
            _take_off(self._interceptor)
            _thread.compiled = wrapper
        return self._original(callback)

    def undo(self) -> None:
        if torch.compile == self._compile_and_look:
            torch.compile = self._compile
        if self._module is not None and self._module._maybe_set_eval_frame == self._set:
            self._module._maybe_set_eval_frame = self._original


def _count_steps(interceptor: Interceptor) -> Callable[[], None]:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    first: list[weakref.ref[Any]] = []

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not first or first[0]() is None:  # none yet, or that one is gone
            first[:] = [weakref.ref(optimizer)]
        if first[0]() is optimizer:  # with several optimizers, the first one counts
            interceptor.step += 1
        interceptor._compiler.look()

    return register_optimizer_step_post_hook(stepped).remove


def _watch_collectives(interceptor: Interceptor) -> Callable[[], None] | None:
    """Collectives are plain Python functions; they are entered through the cell their wrapper calls.

    That keeps `from torch.distributed import all_reduce` watched and the function's identity intact.
    """
    dist = getattr(torch, "distributed", None)
    if dist is None or not dist.is_available():
        return None
    undo: list[Callable[[], None]] = []
    for name in COLLECTIVES:
        function = getattr(dist, name, None)
        if function is not None:
            undo.append(_enter_function(function, f"torch.distributed.{name}", interceptor, dist, name))

    def undo_all() -> None:
        for one in undo:
            one()

    return undo_all


def _enter_function(
    function: Any, full_name: str, interceptor: Interceptor, module: Any, attribute: str
) -> Callable[[], None]:
    cell = next(
        (
            c
            for n, c in zip(function.__code__.co_freevars, function.__closure__ or ())
            if n == "func" and callable(c.cell_contents)
        ),
        None,
    )
    original = cell.cell_contents if cell is not None else function
    traits = traits_of(original, full_name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        if not _is_on(interceptor):
            return original(*args, **kwargs)
        plan = interceptor._plans.get(watched, _UNPLANNED)
        if plan is _UNPLANNED:
            plan = interceptor._plans[watched] = interceptor.plan_for(traits)
        if plan is None:
            return original(*args, **kwargs)
        return interceptor.watch(plan, original, args, kwargs)

    watched.__name__ = getattr(original, "__name__", attribute)
    if cell is not None:
        cell.cell_contents = watched
        target = cell

        def undo() -> None:
            if target.cell_contents is watched:
                target.cell_contents = original

        return undo
    setattr(module, attribute, watched)
    return lambda: setattr(module, attribute, original)


INTERCEPTOR: Final = Interceptor()
os.register_at_fork(after_in_child=INTERCEPTOR.forked)

__all__ = ["INTERCEPTOR", "Call", "Finding", "Interceptor", "Plan", "View", "on_device", "quiet"]
