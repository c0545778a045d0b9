"""The additions that autograd makes itself, heard in C++ and handed to the tools as calls.

Where several calls use a tensor, the engine adds up the gradients that they send; AccumulateGrad adds to `.grad`, or
copies into it. No user code calls these kernels, and no hook sees what the engine makes of them before other hooks
do. So C++ listens as a profiler does, while backward passes run. The call before, its result and what it is the
gradient of come to Python on the thread of the engine; nothing in the engine changes. Without a compiler, or until it
has finished, nothing is heard, and the summary says so.
"""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ..call.description import Tensor, held_by
from ..call.devices import quiet
from ..call.functions import ACCUMULATION, KERNELS_OF_ENGINE, SUM
from ..call.site import parameter_names
from ..call.traits import OpTraits, traits_of
from ..native import compiling
from ..view import console
from . import patches
from .inside import Inside, is_wrapper

if TYPE_CHECKING:
    from .hooks import Hooks
    from .intercept import Call, Interceptor, Plan

_SOURCE: Final = compiling.SOURCES / "gradient_sums.cpp"
_CALLBACK: Final = "at::addGlobalCallback, of operators in backward passes"
_MAX_CALLS: Final = 20_000  # of a thread, whose results may get a sum of gradients
_FEW_CALLS: Final = 1_000  # after so many, those that are gone are forgotten
_MAX_COUNTED: Final = 8  # gradients in a sum; more are not told apart


class _Place(ctypes.Structure):
    """A node, by PyTorch's number of the thread that made it, and its own number there."""

    _fields_ = (("thread", ctypes.c_uint64), ("sequence", ctypes.c_int64))


class _Sum(ctypes.Structure):
    """One addition; see `gradient_sums.cpp`."""

    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("accumulates", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in ("total", "added", "variable")],
        ("sender", _Place),
        ("maker", _Place),
        ("sender_name", ctypes.c_char_p),
    )


_Before: Final = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(_Sum))
_After: Final = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)


def _traits(kernel: str, accumulates: bool) -> OpTraits:
    name = f"{ACCUMULATION if accumulates else SUM}.{kernel}"
    return dataclasses.replace(traits_of(KERNELS_OF_ENGINE[kernel]), name=name, by_engine=True)


_TRAITS: Final = {(k.encode(), a): _traits(k, bool(a)) for k in KERNELS_OF_ENGINE for a in (0, 1)}
NAMES: Final = tuple([traits.name for traits in _TRAITS.values()])


class _Calls:
    """The calls of one thread by the numbers of their nodes."""

    __slots__ = ("_room", "calls", "ends", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.calls: list[weakref.ref[Call]] = []
        self._room = _FEW_CALLS

    def note(self, start: int, end: int, call: Call) -> None:
        if len(self.calls) >= self._room:
            kept = [n for n, ref in enumerate(self.calls) if ref() is not None][-_MAX_CALLS // 2 :]
            self.starts, self.ends = [self.starts[n] for n in kept], [self.ends[n] for n in kept]
            self.calls = [self.calls[n] for n in kept]
            self._room = max(_FEW_CALLS, 2 * len(kept))
        self.starts.append(start)
        self.ends.append(end)
        self.calls.append(weakref.ref(call))

    def find(self, number: int) -> Call | None:
        at = bisect.bisect_right(self.starts, number) - 1
        return self.calls[at]() if at >= 0 and number < self.ends[at] else None


class GradientSums:
    """Listens from `begin` to `end` of backward passes, for tools that want sums."""

    def __init__(self, watcher: Interceptor) -> None:
        self._watcher = watcher
        self._library: Any = None  # while it is listening, or has been
        self.listening = False
        self._callbacks: tuple[Any, ...] = ()
        self._tools: list[Hooks] | None = None  # those that the plans are for
        self._plans: dict[OpTraits, Plan | None] = {}
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[Call, tuple[Hooks, ...], Inside | None]] = {}
        self._threads: dict[int, _Calls] = {}  # by Python's number of the thread
        self._by_number: dict[int, _Calls] = {}  # by PyTorch's
        self._terms: Counter[Any] = Counter()  # in sums of this pass, by who gets them
        self._names: dict[tuple[int, tuple[int, ...]], str] | None = None  # of parameters
        self.wanted = False  # by a tool
        self.direct: Any = None  # makes callbacks in machine code of those here, for a tool that is alone
        self.elsewhere: Callable[[int, int], Call | None] | None = None  # knows calls that are recorded without Python
        self.unheard = 0  # backward passes

    # -- beginning and end ----------------------------------------------------------------------------

    def tools_changed(self, tools: list[Hooks]) -> None:
        """The active tools are others now (`sums.tools_changed([tool])`)."""
        wanted = any(tool.wants_sums for tool in tools)
        if wanted and not self.wanted:
            self.unheard = 0
            self._prepare()
        self.wanted = wanted

    def _prepare(self) -> Any:
        library = LIBRARY.get()
        if library is not None and self._library is None:
            callbacks = _Before(self._before), _After(self._after)
            if library.op_tools_sums_prepare(id(self._watcher), *callbacks):
                self._library, self._callbacks = library, callbacks
        return self._library

    def begin(self) -> None:
        """The first of the backward passes that are under way begins; called where a tool wants sums."""
        library = self._library or self._prepare()
        if library is not None:
            library.op_tools_sums_prepare(id(self._watcher), *self._callbacks_now())
        if library is None or not library.op_tools_sums_begin(self._watcher.include_cpu):
            self.unheard += 1
            return
        self._terms.clear()
        self._names = None
        self.listening = True
        patches.record(_CALLBACK, "tells in C++ what autograd adds up itself", self._end, "native")

    def _callbacks_now(self) -> tuple[Any, ...]:
        """Who is told in this pass: Python, or first the machine code of a tool that is alone and wants all sums."""
        if self.direct is None or len(self._watcher.tools) != 1:
            return self._callbacks
        plans = [self._plan(traits) for traits in _TRAITS.values()]
        if any(plan is None or plan.gated for plan in plans):
            return self._callbacks
        before, after = self.direct(*[ctypes.cast(one, ctypes.c_void_p).value for one in self._callbacks])
        return _Before(before), _After(after)

    def end(self) -> None:
        """No backward pass is under way any more."""
        patches.undo(_CALLBACK)

    def _end(self) -> None:
        self.listening = False
        self._library.op_tools_sums_end()

    def why_unheard(self) -> str:
        """Why sums of some passes were not heard, with their number; empty where all were."""
        if not self.unheard:
            return ""
        reason = "there is no C++ compiler, or OP_TOOLS_NATIVE=0"
        if LIBRARY.failure:
            reason = f"what listens to autograd could not be built: {LIBRARY.failure}"
        elif LIBRARY.loaded is not None or LIBRARY.building:
            reason = "what listens to autograd was still being compiled"
        passes = f"{self.unheard:,} backward pass{'es' * (self.unheard != 1)}"
        return f"sums of gradients in {passes} not compared: {reason}"

    # -- whose gradient it is -------------------------------------------------------------------------

    def note(self, start: int, end: int, call: Call) -> None:
        """The nodes of a call have the numbers from `start` up to `end` of this thread."""
        if self._library is None:
            return
        here = threading.get_ident()
        known = self._threads.get(here)
        if known is None or (known.starts and start < known.starts[-1]):  # Python gave the number to a new thread
            known = _Calls()
            self._threads[here] = self._by_number[self._library.op_tools_sums_thread()] = known
        known.note(start, end, call)

    def _call_at(self, place: _Place) -> Call | None:
        known = self._by_number.get(place.thread)
        found = None if known is None else known.find(place.sequence)
        if found is None and self.elsewhere is not None and place.sequence >= 0:
            found = self.elsewhere(place.thread, place.sequence)
        return found

    def _words(self, heard: _Sum, counted: bool) -> tuple[str, Call | None]:
        """What is added up, in words, and the call that made what it is the gradient of."""
        if heard.variable:
            leaf = self._library.op_tools_sums_tensor(heard.variable)
            name = self._name_of_leaf(leaf)
            if heard.kernel == b"to":
                return f"conversion of the sum of gradients of {name}", None
            if heard.accumulates:
                return f"accumulation into .grad of {name}", None
            return f"{self._count((name, heard.variable), counted)} of {name}", None
        maker = self._call_at(heard.maker)
        if maker is not None:
            count = self._count((heard.maker.thread, heard.maker.sequence), counted)
            return f"{count} of the result of {maker.op}, {maker.location}", maker
        sender = self._call_at(heard.sender)
        if sender is None:
            return f"sum of gradients; the last one is from {heard.sender_name.decode()}", None
        return f"sum of gradients; the last one is from {sender.op}, {sender.location}", sender

    def _name_of_leaf(self, leaf: Tensor) -> str:
        if self._names is None:
            self._names = parameter_names()  # once for each pass: models come and go, and addresses are used again
        shape = tuple(leaf.shape)
        for part in held_by(leaf):
            name = self._names.get((part.data_ptr(), tuple(part.shape)))
            if name:
                return name
        return f"a leaf of shape {shape}"

    def _count(self, target: Any, counted: bool) -> str:
        if not counted:  # some sums are left out
            return "sum of gradients"
        self._terms[target] += 1
        number = self._terms[target] + 1
        return f"sum of {number if number <= _MAX_COUNTED else f'more than {_MAX_COUNTED}'} gradients"

    # -- one addition, on the thread of the engine ----------------------------------------------------

    def _before(self, address: Any) -> int:
        try:
            with quiet():
                return self._begin(address.contents)
        except Exception as error:
            self._failed(error)
            return 0

    def _begin(self, heard: _Sum) -> int:
        from .intercept import Call, ids

        watcher = self._watcher
        traits = _TRAITS[heard.kernel, heard.accumulates]
        plan = self._plan(traits)
        if plan is None or (watcher.capturing is not None and watcher.capturing()):
            return 0
        make = self._library.op_tools_sums_tensor
        args = tuple([make(tensor) for tensor in (heard.total, heard.added) if tensor])
        if heard.kernel == b"to":
            args += (make(heard.variable).dtype,)
        call = Call(traits, traits.function, args, {})
        call.step = watcher.step
        tools = tuple([tool for tool in plan.observers if tool.wants_sums])
        if plan.gated:
            tools = tuple([tool for tool in tools if tool.accepts(call)])
        if not tools:
            return 0
        call.location, call.notes["maker"] = self._words(heard, counted=not plan.gated)
        call.id = next(ids)
        call.inputs = watcher.descriptions.of(args, {}, call.tensors, plan.pointers)
        entered = self._enter(call, tools) if any(map(is_wrapper, map(type, call.tensors))) else None
        if entered is not None:
            tools = entered.others(tools)
        for tool in tools:
            try:
                tool.before(call)
            except Exception as error:
                tool.failed(call, error)
        number = next(self._numbers)
        self._open[number] = call, tools, entered
        return number

    def _enter(self, call: Call, tools: tuple[Hooks, ...]) -> Inside | None:
        """Show the tools what wrapper tensors do in an addition, until it ends."""
        looking = tuple([tool for tool in tools if tool.looks_inside])
        if not looking:
            return None
        inside = Inside(self._watcher, call, looking).in_backward()
        maker = call.notes["maker"]
        inside.module = "" if maker is None or maker.inside is None else maker.inside.module
        return inside.__enter__()

    def _plan(self, traits: OpTraits) -> Plan | None:
        if self._tools is not self._watcher.tools:
            self._tools = self._watcher.tools
            self._plans = {}
        if traits not in self._plans:
            self._plans[traits] = self._watcher.plan_for(traits)
        return self._plans[traits]

    def _after(self, number: int, result: int | None) -> None:
        call, tools, inside = self._open.pop(number)
        if inside is not None:
            inside.__exit__()
        if not result:  # the kernel raised an error, which the user gets
            return
        try:
            with quiet():
                call.result = total = self._library.op_tools_sums_tensor(result)
                if call.traits.mutates:  # a sparse one has got other memory, which the tensor from before does not show
                    call.args, call.tensors[0] = (total, *call.args[1:]), total
                call.outputs = self._watcher.descriptions.of((call.result,), {}, call.results, True)
                if inside is not None:
                    inside.tell(call)
                for tool in tools:
                    try:
                        tool.after(call)
                    except Exception as error:
                        tool.failed(call, error)
                call.release()
        except Exception as error:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        from .intercept import Call

        traits = _TRAITS[b"add", 0]
        for tool in self._watcher.tools:
            if tool.wants_sums:
                tool.failed(Call(traits, traits.function, (), {}), error)


def _load() -> Any:
    path = compiling.against_torch(
        _SOURCE,
        lambda: console.note("compiling what listens to autograd in the background (once); until then, no sums"),
    )
    if path is None:
        return None
    library = ctypes.PyDLL(str(path))
    library.op_tools_sums_prepare.argtypes = [ctypes.c_void_p, _Before, _After]
    library.op_tools_sums_begin.argtypes = [ctypes.c_int]
    library.op_tools_sums_end.restype = None
    library.op_tools_sums_thread.restype = ctypes.c_uint64
    library.op_tools_sums_tensor.argtypes = [ctypes.c_void_p]
    library.op_tools_sums_tensor.restype = ctypes.py_object
    return library


LIBRARY: Final = compiling.Library("sums", _load)
