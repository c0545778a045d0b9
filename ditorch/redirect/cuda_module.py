"""Fills ``torch.cuda`` in place: it stays the same module, and so do its functions."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.cuda.comm
import torch.cuda.nccl
import torch.cuda.nvtx
import torch.cuda.profiler

from ditorch import surface
from ditorch.errors import UnsupportedError
from ditorch.patching import Ledger, Patch
from ditorch.redirect import one_queue
from ditorch.redirect.classes import complete, handle_of
from ditorch.redirect.devices import Devices, translate_call
from ditorch.redirect.emulation import CUDA_LEVEL, Emulation
from ditorch.redirect.signatures import adapt

STREAM = torch.Stream
SUBMODULES = ("", "memory", "random", "nvtx", "nccl", "profiler", "jiterator", "tunable", "gds", "graphs")
PRIVATE = (
    "_exchange_device",
    "_maybe_exchange_device",
    "_get_device_index",
    "_lazy_init",
    "_lazy_call",
    "_is_in_bad_fork",
    "_get_generator",
    "_sleep",
    "memory._snapshot",
    "memory._dump_snapshot",
    "memory._record_memory_history",
    "_compile_kernel",
    "jiterator._create_jit_fn",
    "jiterator._create_multi_output_jit_fn",
)
CLASSES = ("Stream", "Event", "ExternalStream", "StreamContext", "MemPool", "CUDAPluggableAllocator")
STATS = {
    "memory_allocated": "allocated_bytes.all.current",
    "max_memory_allocated": "allocated_bytes.all.peak",
    "memory_reserved": "reserved_bytes.all.current",
    "max_memory_reserved": "reserved_bytes.all.peak",
}


def install(ledger: Ledger, devices: Devices) -> None:
    """Redirect every function and class of ``torch.cuda``.

    Example: ``install(ledger, devices); torch.cuda.synchronize()``
    """
    module = devices.backend.module
    emulation = Emulation(devices, module)
    for name, function in functions():
        _install_function(ledger, devices, module, emulation, name, function)
    if surface.counterpart(devices.backend, module, "memory_summary") is None:
        why = "PyTorch's own table, or a short one where the backend keeps few statistics"
        ledger.redirect(torch.cuda.memory.memory_summary, _short_summary, why, "emulated")
    for name in CLASSES:
        _install_class(ledger, devices, module, name)
    generators = Generators(module, emulation._lazy_init)
    ledger.replace(torch.cuda, "default_generators", generators, f"{devices.backend.where_module()}'s generators")
    if _says_uninitialized(module):
        why = "activation checkpoints save the random state of initialized devices alone"
        ledger.replace(module, "_initialized", True, why, "emulated")
    _install_c_functions(ledger, devices)
    _install_version(ledger)
    ledger.redirect(
        torch.backends.cuda.is_built,
        # PyTorch's own code asks before it takes CUDA's parts of its library, which are not there.
        lambda original: lambda: original() if devices.called_from_inside(2) else True,
        "cuda means the accelerator, which is there",
        "emulated",
    )
    for what, why in surface.LIBRARY_HINTS.items():
        ledger.record(Patch(what, why, "hint", "none"))


_BUILT_FOR_CUDA = ("torchvision.extension", "torchaudio._extension.utils")
"""Modules that hold the CUDA release which they were built for against PyTorch's, and refuse to go on."""


def _install_version(ledger: Ledger) -> None:
    built_for = torch.version.cuda

    class Version(types.ModuleType):
        """`torch.version`, whose `cuda` is what PyTorch was built for where binaries are checked against it."""

        @property
        def cuda(self) -> Any:
            checks = sys._getframe(1).f_globals.get("__name__") in _BUILT_FOR_CUDA
            return built_for if checks else vars(self)["cuda"]

        @cuda.setter
        def cuda(self, value: Any) -> None:
            vars(self)["cuda"] = value

    ledger.replace(torch.version, "cuda", CUDA_LEVEL, "code parses it to choose features", "emulated")
    torch.version.__class__ = Version
    why = "a CUDA build of torchvision can be imported"
    undo = functools.partial(setattr, torch.version, "__class__", types.ModuleType)
    ledger.record(Patch("torch.version.__class__", why, "emulated", undo=undo))


class Generators(Sequence[torch.Generator]):
    """The vendor's default generators as they are now: vendors make a new tuple when the device is initialized."""

    def __init__(self, module: Any, initialize: Callable[[], None]) -> None:
        self._module, self._initialize = module, initialize

    def _now(self) -> tuple[torch.Generator, ...]:
        found = getattr(self._module, "default_generators", None)
        if found is not None and not len(found):
            self._initialize()
            found = self._module.default_generators
        one = getattr(self._module, "_get_default_mps_generator", None)
        return tuple(found or ((one(),) if one else ()))

    def __getitem__(self, index: Any) -> Any:
        return self._now()[index]

    def __len__(self) -> int:
        return len(self._now())

    def __repr__(self) -> str:
        return repr(self._now())


def _says_uninitialized(module: Any) -> bool:
    """Whether ``_initialized`` is absent, or a copy that the vendor's initialization does not change."""
    if not isinstance(module, types.ModuleType):
        return False
    start = getattr(module, "_lazy_init", None) or getattr(module, "init", None)
    home = getattr(start, "__globals__", None)
    return not hasattr(module, "_initialized") or (not module._initialized and home not in (None, vars(module)))


def _install_c_functions(ledger: Ledger, devices: Devices) -> None:
    """Private functions of ``torch._C`` that kernel launchers call; a build without CUDA has none of them."""

    def raw_stream(index: int) -> int:
        return handle_of(torch.cuda.current_stream(index), devices.type)

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        make: Any = torch.cuda.Stream
        torch.cuda.set_stream(make(stream_id=stream_id, device_index=device_index, device_type=device_type))

    for name, function in (
        ("_cuda_getCurrentRawStream", raw_stream),
        ("_cuda_setStream", set_stream),
        ("_cuda_setDevice", lambda index: torch.cuda.set_device(index)),
        ("_cuda_getDevice", lambda: torch.cuda.current_device()),
        ("_cuda_synchronize", lambda: torch.cuda.synchronize()),
    ):
        if not hasattr(torch._C, name):
            ledger.replace(torch._C, name, function, "kernel launchers ask for it")


def functions() -> Iterator[tuple[str, types.FunctionType]]:
    """Every Python function of ``torch.cuda`` with its dotted name below it, each object once.

    Example: ``dict(functions())["synchronize"] is torch.cuda.synchronize``
    """
    seen: set[int] = set()
    for name in [*_public_names(), *PRIVATE]:
        found: Any = surface.find(torch.cuda, name)
        # torch.cuda also holds functions of torch._utils, which serve every device.
        ours = isinstance(found, types.FunctionType) and f"{found.__module__}.".startswith("torch.cuda.")
        if ours and id(found) not in seen:
            seen.add(id(found))
            yield name, found


def _public_names() -> Iterator[str]:
    for submodule in SUBMODULES:
        owner = surface.find(torch.cuda, submodule) if submodule else torch.cuda
        if owner is None:
            continue
        prefix = f"{submodule}." if submodule else ""
        for name, value in vars(owner).items():
            if not name.startswith("_") and isinstance(value, types.FunctionType):
                yield prefix + name


def _install_function(
    ledger: Ledger,
    devices: Devices,
    module: Any,
    emulation: Emulation,
    name: str,
    function: types.FunctionType,
) -> None:
    kind, why = surface.classify(devices.backend, module, emulation, name)
    if name in surface.COMPOSED and surface.counterpart(devices.backend, module, name) is None:
        return
    call: Callable[..., Any]
    if kind == "emulated" or (kind == "mapped" and name in Emulation.ALWAYS):
        call = getattr(emulation, name.replace(".", "_"))
    elif kind == "hint":
        call = _do_nothing
    elif kind == "unsupported" and name in STATS and hasattr(module, "memory_stats"):
        kind, why = "emulated", f"{devices.backend.where_module()}.memory_stats"
        call = _stat(STATS[name])
    elif kind == "unsupported":
        call = _refuse(devices, f"torch.cuda.{name}", why)
        if name.startswith("jiterator."):  # libraries make kernels when they are imported, and may never launch them
            call = _later(call)
    else:
        vendor = surface.counterpart(devices.backend, module, name)
        if vendor is None:
            return
        call = adapt(devices, name, function, vendor) or translate_call(devices, vendor)
        if name in ("current_stream", "default_stream") and getattr(module.Stream, "kind", None) is STREAM:
            call = _as_shown(call)
        if name == "set_device" and devices.backend.one_device_per_process:
            call = _by_number(emulation, vendor)
    ledger.redirect(function, lambda original: call, why, kind, f"torch.cuda.{name}")


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _as_shown(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Streams that are plain ``torch.Stream`` objects become those that show their device as cuda."""

    def call(device: Any = None) -> Any:
        found = ask(device)
        make: Any = torch.Stream
        return make(stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type)

    return call


def _by_number(emulation: Emulation, set_device: Callable[[int], None]) -> Callable[..., None]:
    """Tensors have one device there, so the number of the chosen one must not get lost in translation."""
    return lambda device: set_device(emulation._get_device_index(device, optional=True))


def _stat(key: str) -> Callable[..., int]:
    return lambda device=None: int(torch.cuda.memory_stats(device).get(key, 0))


def _short_summary(original: Callable[..., str]) -> Callable[..., str]:
    def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
        try:
            return original(device, abbreviated)
        except KeyError:
            stats = torch.cuda.memory_stats(device)
            return "\n".join(f"{name:<48} {value}" for name, value in sorted(stats.items()))

    return memory_summary


def _refuse(devices: Devices, call: str, instead: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(call, surface.label(devices.backend), instead)

    return refuse


def _later(refuse: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: refuse


class Stand(type):
    """Metaclass of a class that stands for another: it makes and recognises objects of that one."""

    _make: Callable[..., Any]
    _real: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._make(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls._real is not None and isinstance(instance, cls._real)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return cls._real is not None and issubclass(subclass, cls._real)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or cls._real is None:
            raise AttributeError(name)
        return getattr(cls._real, name)


def stand_in(name: str, module_name: str, make: Callable[..., Any], real: Any, doc: str | None) -> Stand:
    """A class that makes objects with ``make`` and whose instances are those of ``real``.

    Example: ``stand_in("Stream", "torch.cuda", torch.npu.Stream, torch.npu.Stream, None)``
    """
    body = {
        "__module__": module_name,
        "__qualname__": name,
        "__doc__": doc,
        "_make": staticmethod(make),
        "_real": real,
    }
    return Stand(name, (), body)


def _install_class(ledger: Ledger, devices: Devices, module: Any, name: str) -> None:
    original = getattr(torch.cuda, name, None)
    if original is None:
        return
    kind, why = surface.classify(devices.backend, module, None, name)
    real: Any = None
    if kind == "mapped":
        real = surface.counterpart(devices.backend, module, name)
        make = adapt(devices, name, original, real) or translate_call(devices, real)
    elif name in one_queue.CLASSES and not hasattr(module, "Stream"):
        kind, why = "emulated", "the device has one queue, which is every stream"
        real = make = one_queue.CLASSES[name]
    elif kind == "hint":
        real = make = _Accepted
    else:
        make = _refuse(devices, f"torch.cuda.{name}", why)
    stand = stand_in(name, original.__module__, make, real if isinstance(real, type) else None, original.__doc__)
    for owner in _owners(original, name):
        ledger.replace(owner, name, stand, why, kind)
    if kind == "mapped":
        complete(ledger, devices, name, original, real)
    # A class that was imported earlier keeps its identity and makes the same objects.
    ledger.replace(original, "__new__", staticmethod(lambda cls, *a, **k: make(*a, **k)), why, kind)


def _owners(original: type, name: str) -> Iterator[types.ModuleType]:
    yield torch.cuda
    home = surface.find(torch, original.__module__.removeprefix("torch."))
    if isinstance(home, types.ModuleType) and home is not torch.cuda and hasattr(home, name):
        yield home


class _Accepted:
    """Stands for an object that only carries a hint, such as a memory pool."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.id = (0, 0)
        self.allocator = None

    def use_count(self) -> int:
        return 1

    def snapshot(self) -> list[Any]:
        return []
