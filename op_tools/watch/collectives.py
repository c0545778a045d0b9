"""Collectives as they begin and end, whoever calls them: user code, FSDP, compiled code, the Reducer of DDP in C++.

All of them go through the operators of `c10d`. While somebody listens, these have a kernel at `BackendSelect`, a
dispatch key that every call passes below autograd and dispatch modes: it notes the call and passes it on unchanged.
A collective has ended where its caller waits for it: in `Work.wait`, in a callback of its future, in `wait_tensor`, at
the end of a C++ function that waits itself, and for the buckets of DDP at the end of the backward pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

from ..call.description import Tensor
from ..call.devices import quiet
from ..compat import AFTER_BACKEND_SELECT, Future, c10d_classes
from . import patches
from .traffic import OPERATORS, Traffic, traffic_of

NO_BUCKET: Final = -1
_OPERATORS: Final = "operators of c10d"
_MAX_PENDING: Final = 4096  # works that nobody waits for must not pile up
_DDP: Final = "torch/nn/parallel/distributed.py"
_HOOKS: Final = "torch/distributed/algorithms/ddp_comm_hooks/"
_READING: Final = 5.0  # seconds: a callback of a collective that has ended needs no more than the GIL
REDUCER: Final = "Reducer"  # of DDP, whose buckets and map of unused parameters go through it
BROADCAST: Final = "_broadcast_coalesced"  # of DDP: parameters and buffers
# functions of DDP in C++ that wait themselves
_WAITING: Final = (BROADCAST, "_verify_params_across_processes", "Reducer._rebuild_buckets")


@dataclasses.dataclass(eq=False)
class Launch:
    """A collective that has begun, for one listener."""

    listener: Listener
    name: str  # of the operator of c10d
    group: Any
    rank: int  # in the group
    size: int
    traffic: Traffic
    reduction: int | None  # as c10d counts them; None where nothing is reduced
    bucket: int | None  # of DDP, NO_BUCKET for its map of unused parameters; None where its Reducer does not call
    work: Any = None
    notes: Any = None  # of the listener


class Listener(Protocol):
    """Who is told of collectives; what it raises is told to `failed`, and the collective goes on."""

    def wants(self, tensors: Sequence[Tensor], function: str) -> bool:
        """Whether it wants to be told of a collective on these tensors.

        `function` of PyTorch's C++ code calls it: `REDUCER`, `BROADCAST` and others; empty where Python does.
        """

    def began(self, launch: Launch) -> None:
        """What is sent is still there; nothing has been received."""

    def ended(self, launch: Launch, is_intact: Callable[[], bool]) -> None:
        """The results are there, for work on the current stream; afterwards `is_intact` says if they still were."""

    def lost(self, launch: Launch, reason: str) -> None:
        """The end of a collective will not be known."""

    def failed(self, name: str, error: Exception) -> None:
        """The tool itself failed."""


class _Function(NamedTuple):
    """A C++ function that is running, and what it has launched."""

    name: str
    launches: list[Launch]


class Collectives:
    """Tells listeners of all collectives of this process, from the first `add` to the last `remove`."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self._lock = threading.RLock()
        self._by_work: dict[Any, list[Launch]] = {}  # several that are coalesced have one
        self._by_address: dict[int, list[Launch]] = {}  # of results
        self._in_backward: list[Launch] = []
        self._reading: dict[Any, threading.Event] = {}  # futures whose results are about to be copied
        self._buckets = 0
        self._thread = threading.local()  # `open`: C++ functions that are running
        self._names: list[str] = []

    # -- beginning and end ----------------------------------------------------------------------------

    def add(self, listener: Listener) -> bool:
        """Tell a listener from now on; False where this PyTorch has no collectives."""
        classes = c10d_classes()
        if classes is None:
            return False
        if not self.listeners:
            self._install(classes)
        self.listeners = [*self.listeners, listener]
        return True

    def remove(self, listener: Listener) -> None:
        """Tell it no more; collectives that nobody has waited for are lost to it."""
        if listener not in self.listeners:
            return
        self.listeners = [other for other in self.listeners if other is not listener]
        if not self.listeners:
            while self._names:
                patches.undo(self._names.pop())
        with self._lock:
            left = [launch for launches in self._by_work.values() for launch in launches if launch.listener is listener]
        for launch in left:
            self._drop(launch, "nobody waited for it while the tool was on")

    def _install(self, classes: tuple[Any, Any]) -> None:
        """Register the kernels, and patch what callers wait with."""
        self._group_class, self._work_class = classes
        work = self._work_class
        library, functional = (torch.library.Library(name, "IMPL") for name in ("c10d", "_c10d_functional"))
        for name in OPERATORS:
            overload = getattr(getattr(torch.ops.c10d, name, None), "default", None)
            if overload is not None:
                library.impl(name, self._kernel(name, overload), "BackendSelect", with_keyset=True)
        functional.impl("wait_tensor", self._wait_tensor, "BackendSelect", with_keyset=True)

        def unregister() -> None:
            library._destroy()
            functional._destroy()

        self._record(_OPERATORS, "collectives of every caller are seen", unregister)
        for name, wrapped in (("wait", self._wait), ("synchronize", self._wait), ("get_future", self._get_future)):
            if hasattr(work, name):
                self._replace(work, name, wrapped(getattr(work, name)))
        group = self._group_class
        for name, wrapped in (("_start_coalescing", self._start_coalescing), ("_end_coalescing", self._end_coalescing)):
            if hasattr(group, name):
                self._replace(group, name, wrapped(getattr(group, name)))
        self._add_callback = Future.then
        for name, wrapped in (("wait", self._wait_future), ("then", self._then), ("add_done_callback", self._then)):
            self._replace(Future, name, wrapped(getattr(Future, name)))
        for path in _WAITING:
            home, _, name = path.rpartition(".")
            owner = getattr(torch.distributed, home, None) if home else torch.distributed
            if hasattr(owner, name):
                self._replace(owner, name, self._waits_inside(name, getattr(owner, name)))

    def _record(self, what: str, why: str, undo: Callable[[], None]) -> None:
        patches.record(what, why, undo, "registered")
        self._names.append(what)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, value)

        def undo() -> None:
            if getattr(owner, name) is value:
                setattr(owner, name, original)

        self._record(f"{owner.__name__}.{name}", "collectives have ended where they are waited for", undo)

    # -- where a collective begins --------------------------------------------------------------------

    def _kernel(self, name: str, overload: Any) -> Callable[..., Any]:
        names = [argument.name for argument in overload._schema.arguments]

        def kernel(keys: Any, *args: Any) -> Any:
            launches: list[Launch] = []
            try:
                launches = self._begin(name, dict(zip(names, args)), _caller())
            except Exception as error:
                self._failed(name, error)
            result = overload.redispatch(keys & AFTER_BACKEND_SELECT, *args)
            try:
                work = result[-1] if isinstance(result, tuple) else result
                for launch in launches:
                    if launch.traffic.results:
                        self._pend(launch, work)
            except Exception as error:
                self._failed(name, error)
            return result

        return kernel

    def _begin(self, name: str, given: Mapping[str, Any], caller: Any) -> list[Launch]:
        group = self._group_class.unbox(given["process_group"])
        rank, size = group.rank(), group.size()
        launches: list[Launch] = []
        with quiet():
            traffic = traffic_of(name, given, rank, size)
            if traffic is None:
                return []
            opened: list[_Function] = getattr(self._thread, "open", [])
            by_reducer = name == "allreduce_" and not opened and _is_ddp(caller)
            function = REDUCER if by_reducer else opened[-1].name if opened else ""
            tensors = [*traffic.sent, *[r.tensor for r in traffic.results]]
            listeners = [one for one in self.listeners if self._wants(one, name, tensors, function)]
            bucket = None
            if by_reducer and listeners:
                bucket = NO_BUCKET
                if given["tensors"][0].is_floating_point():
                    bucket, self._buckets = self._buckets, self._buckets + 1
            reduction = _reduction(given["reduce_op"]) if "reduce_op" in given else None
            for listener in listeners:
                launch = Launch(listener, name, group, rank, size, traffic, reduction, bucket)
                try:
                    listener.began(launch)
                except Exception as error:
                    listener.failed(name, error)
                else:
                    launches.append(launch)
        return launches

    def _wants(self, listener: Listener, name: str, tensors: Sequence[Tensor], function: str) -> bool:
        try:
            return listener.wants(tensors, function)
        except Exception as error:
            listener.failed(name, error)
            return False

    def _failed(self, name: str, error: Exception) -> None:
        for listener in self.listeners:
            listener.failed(name, error)

    def _pend(self, launch: Launch, work: Any) -> None:
        launch.work = self._work_class.unbox(work)
        with self._lock:
            if len(self._by_work) >= _MAX_PENDING:
                for oldest in list(next(iter(self._by_work.values()))):
                    self._drop(oldest, "nobody waited for it for a long time")
            self._by_work.setdefault(launch.work, []).append(launch)
            for result in launch.traffic.results:
                at = self._by_address.setdefault(result.tensor.data_ptr(), [])
                at[:] = [other for other in at if other.listener is not launch.listener] + [launch]
            self._by_address.pop(0, None)  # of empty ones
            if launch.bucket is not None:
                self._in_backward.append(launch)
        for function in getattr(self._thread, "open", [])[-1:]:
            function.launches.append(launch)
        coalesced = getattr(self._thread, "coalesced", None)
        if coalesced is not None:
            coalesced.append(launch)

    def _start_coalescing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def start_coalescing(*args: Any, **kwargs: Any) -> Any:
            self._thread.coalesced = []
            return original(*args, **kwargs)

        return start_coalescing

    def _end_coalescing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What was launched meanwhile begins now, and has ended when the work returned here has."""

        @functools.wraps(original)
        def end_coalescing(*args: Any, **kwargs: Any) -> Any:
            launches, self._thread.coalesced = getattr(self._thread, "coalesced", None) or [], None
            work = original(*args, **kwargs)
            with self._lock:
                for launch in launches if work is not None else ():
                    if self._forget(launch):
                        launch.work = work
                        self._by_work.setdefault(work, []).append(launch)
            return work

        return end_coalescing

    # -- where it ends --------------------------------------------------------------------------------

    def _forget(self, launch: Launch) -> bool:
        """Whether the launch was still pending."""
        with self._lock:
            together = self._by_work.get(launch.work, ())
            if launch not in together:
                return False
            if len(together) == 1:
                del self._by_work[launch.work]
            else:
                together.remove(launch)  # type: ignore[union-attr]
            for result in launch.traffic.results:
                address = result.tensor.data_ptr()
                at = self._by_address.get(address, [])
                if launch in at:
                    at.remove(launch)
                    if not at:
                        del self._by_address[address]
        return True

    def _end(self, launch: Launch, is_intact: Callable[[], bool] = lambda: True) -> None:
        if not self._forget(launch):
            return
        try:
            with quiet():
                launch.listener.ended(launch, is_intact)
        except Exception as error:
            launch.listener.failed(launch.name, error)

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            done = original(work, *args, **kwargs)
            for launch in list(self._by_work.get(work, ())):
                self._end(launch)
            return done

        return wait

    def _get_future(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What is done with a future has to wait until the results are copied, which a callback of ours does.

        On a GPU it runs now, on a stream that waits for the collective; the current stream waits for ours.
        """

        @functools.wraps(original)
        def get_future(work: Any) -> Any:
            future = original(work)
            launches = list(self._by_work.get(work, ()))
            if launches:
                try:
                    self._read_first(future, launches)
                except Exception as error:
                    self._failed(launches[0].name, error)
            return future

        return get_future

    def _read_first(self, future: Any, launches: Sequence[Launch]) -> None:
        versions, is_read = [_versions(launch) for launch in launches], threading.Event()

        def ended(done: Any) -> None:
            try:
                done.value()
            except Exception:  # the caller is told of it
                for launch in launches:
                    self._drop(launch, "it failed")
            else:
                for launch, version in zip(launches, versions):
                    self._end(launch, functools.partial(_is_still, launch, version))
            finally:
                self._reading.pop(future, None)
                is_read.set()

        self._reading[future] = is_read
        self._add_callback(future, ended)
        for launch in launches:
            event = getattr(launch.notes, "event", None)
            if event is not None and hasattr(event, "wait"):  # of copies on another stream
                event.wait()

    def _then(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A callback that is added after the end of a collective runs at once: not before ours has."""

        @functools.wraps(original)
        def then(future: Any, callback: Any) -> Any:
            is_read = self._reading.get(future)
            if is_read is None:
                return original(future, callback)
            return original(future, lambda done: (is_read.wait(_READING), callback(done))[1])

        return then

    def _wait_future(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(future: Any) -> Any:
            is_read = self._reading.get(future)
            found = original(future)
            if is_read is not None:
                is_read.wait(_READING)
            return found

        return wait

    def _drop(self, launch: Launch, reason: str) -> None:
        if self._forget(launch):
            launch.listener.lost(launch, reason)

    def _wait_tensor(self, keys: Any, tensor: Tensor) -> Any:
        result = torch.ops._c10d_functional.wait_tensor.default.redispatch(keys & AFTER_BACKEND_SELECT, tensor)
        if self._by_address:
            for launch in list(self._by_address.get(tensor.data_ptr(), ())):
                self._end(launch)
        return result

    def _waits_inside(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def waiting(*args: Any, **kwargs: Any) -> Any:
            with self._opened(name):
                return original(*args, **kwargs)

        return waiting

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[None]:
        opened: list[_Function] = self._thread.__dict__.setdefault("open", [])
        opened.append(_Function(name, []))
        try:
            yield
        except BaseException:
            for launch in opened.pop().launches:
                self._drop(launch, "it failed")
            raise
        for launch in opened.pop().launches:
            self._end(launch)

    def backward_ended(self) -> None:
        """No backward pass is under way: DDP has waited for all its buckets."""
        for is_read in list(self._reading.values()):
            is_read.wait(_READING)
        if self._in_backward:
            with self._lock:
                ended, self._in_backward, self._buckets = self._in_backward, [], 0
            for launch in ended:
                self._end(launch)


def _caller() -> Any:
    """The nearest frame of Python below a kernel; None in a thread that has none."""
    try:
        return sys._getframe(2)
    except ValueError:
        return None


def _is_ddp(caller: Any) -> bool:
    """Whether DDP's Reducer calls: from a thread of the engine, or for parameters that a forward left unused."""
    if caller is None or caller.f_code.co_name in ("run_backward", "_engine_run_backward"):
        return True
    file: str = caller.f_code.co_filename.replace("\\", "/")
    return file.endswith(_DDP) or _HOOKS in file  # a hook in Python may have the Reducer do it


def _reduction(operation: Any) -> int | None:
    try:
        return int(operation.op())
    except Exception:  # not in early releases
        return -1


def _versions(launch: Launch) -> list[int]:
    return [0 if r.tensor.is_inference() else r.tensor._version for r in launch.traffic.results]


def _is_still(launch: Launch, versions: list[int]) -> bool:
    return _versions(launch) == versions


COLLECTIVES: Final = Collectives()
