"""The other doors a device comes through: contexts, generators, streams, checkpoints, profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.profiler
import torch.utils._device
import torch.utils.checkpoint
from torch.profiler import ProfilerActivity

from ditorch.patching import Ledger, Patch
from ditorch.redirect.cuda_module import stand_in
from ditorch.redirect.devices import Devices, after_import, redirect_parameters

BEFORE_CUDA = 5
"""Priority in PyTorch's registry of storage locations: lower numbers are asked first, cuda has 20."""


def install(ledger: Ledger, devices: Devices) -> None:
    """Redirect contexts, generators, streams, checkpoints and the profiler.

    Example: ``install(ledger, devices); torch.load("model.pt", map_location="cuda")``
    """
    _install_contexts(ledger, devices)
    _install_generator(ledger, devices)
    _install_streams(ledger, devices)
    _install_storages(ledger, devices)
    _install_lazy_parameters(ledger)
    _install_locations(ledger, devices)
    _install_profiler(ledger, devices)
    _install_early_imports(ledger, devices)
    _install_inductor(ledger, devices)


def _install_contexts(ledger: Ledger, devices: Devices) -> None:
    redirect_parameters(
        ledger,
        torch.utils._device.DeviceContext.__init__,
        devices.real,
        {"device": 1},
        "with torch.device('cuda'), torch.set_default_device('cuda')",
        "torch.device context",
    )
    show = _shown_to_users(devices)
    ledger.redirect(torch.get_default_device, show, "user code sees cuda:N")
    if devices.type != "cpu":
        ledger.replace(
            torch.utils.checkpoint.DefaultDeviceType,
            "_default_device_type",
            devices.type,
            "activation checkpoints keep the accelerator's random state",
        )
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and devices.type != "cpu":
        ledger.redirect(accelerator.current_accelerator, show, "user code sees cuda")
        redirect_parameters(
            ledger,
            accelerator._utils._get_device_index,
            devices.real,
            {"device": 0},
            "torch.accelerator takes cuda devices",
        )
    elif accelerator is not None:  # a build for CUDA asks torch.cuda, which says that the CPU is there
        ledger.redirect(accelerator.is_available, lambda original: lambda: False, "there is none: cuda means the CPU")


def _shown_to_users(devices: Devices) -> Callable[[Any], Any]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            # One frame up is the redirected function itself, two up is its caller.
            return found if devices.called_from_inside(2) else devices.shown(found)

        return call

    return make


def _install_generator(ledger: Ledger, devices: Devices) -> None:
    original = torch.Generator
    get = original.device.__get__

    class Generator(original):  # type: ignore[misc, valid-type]
        @property
        def device(self) -> torch.device:
            real = get(self)
            return real if devices.called_from_inside(1) else devices.shown(real)

    Generator.__module__ = "torch"

    def make(device: Any = "cpu") -> torch.Generator:
        real = devices.real(device)
        return Generator(real) if real is not device and devices.show_as_cuda else original(real)

    stand = stand_in("Generator", "torch", make, original, original.__doc__)
    ledger.replace(torch, "Generator", stand, "torch.Generator('cuda')")


def _install_streams(ledger: Ledger, devices: Devices) -> None:
    for name, handle, source in (("Stream", "cuda_stream", "stream_id"), ("Event", "cuda_event", "event_id")):
        original = getattr(torch, name)

        def make(*args: Any, _maker: Any = original, **kwargs: Any) -> Any:
            args = tuple(devices.real(argument) for argument in args)
            if "device" in kwargs:
                kwargs["device"] = devices.real(kwargs["device"])
            return _maker(*args, **kwargs)

        stand = stand_in(name, "torch", make, original, original.__doc__)
        ledger.replace(torch, name, stand, f"torch.{name}(device='cuda')")
        if devices.show_as_cuda:
            ledger.replace_in_c(original, "device", _shown_device(devices, original), "user code sees cuda:N")
            ledger.replace_in_c(original, handle, _handle(original, source), f"the handle is {source}")


def _handle(cls: Any, source: str) -> property:
    get = vars(cls)[source].__get__
    return property(lambda self: get(self))


def _shown_device(devices: Devices, cls: Any) -> property:
    get = vars(cls)["device"].__get__

    def device(self: Any) -> torch.device | None:
        real: torch.device | None = get(self)
        return real if real is None or devices.called_from_inside(1) else devices.shown(real)

    return property(device)


def _install_storages(ledger: Ledger, devices: Devices) -> None:
    def cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        return self.to(device=devices.indexed(device), non_blocking=non_blocking)

    for owner in (torch.UntypedStorage, torch.TypedStorage):
        ledger.replace(owner, "cuda", cuda, "storages move to the accelerator")
    why = "storages are made on the accelerator"
    make = torch.UntypedStorage.__new__

    def untyped(cls: type, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = devices.real(kwargs["device"])
        return make(cls, *args, **kwargs)

    ledger.replace(torch.UntypedStorage, "__new__", staticmethod(untyped), why)
    for method in (torch.TypedStorage.__new__, torch.TypedStorage.__init__):
        redirect_parameters(ledger, method, devices.real, {"device": 99}, why)


def _install_lazy_parameters(ledger: Ledger) -> None:
    parameters: Any = torch.nn.parameter
    mixin = parameters.UninitializedTensorMixin
    named = (getattr(torch.Tensor, method.__name__, None) for method in mixin._allowed_methods)
    wrapped = [method for method in named if method is not None]
    why = "nn.LazyLinear(3).cuda(): an uninitialized parameter may be moved"
    ledger.replace(mixin, "_allowed_methods", [*mixin._allowed_methods, *wrapped], why)


def _install_locations(ledger: Ledger, devices: Devices) -> None:
    registry = torch.serialization._package_registry

    def tag(storage: Any) -> str | None:
        if devices.show_as_cuda and storage.device.type == devices.type:
            return f"cuda:{storage.device.index or 0}"
        return None

    def restore(storage: Any, location: str) -> Any:
        target = devices.inwards.get(location)
        if target is None:
            return None
        if target.type == "cpu":
            return storage
        count = torch.cuda.device_count()
        if target.index is not None and target.index >= count:
            raise RuntimeError(
                f"the checkpoint wants {location}, but torch.cuda.device_count() is {count}. "
                f"Use torch.load(..., map_location='cuda:0') or another device"
            )
        return storage.to(device=target)

    torch.serialization.register_package(BEFORE_CUDA, tag, restore)
    entry = next(item for item in registry if item[1] is tag)
    why = "checkpoints tagged cuda load onto the accelerator, and are saved with that tag"
    ledger.record(
        Patch(
            "torch.serialization location cuda",
            why,
            "mapped",
            "registered",
            None,
            lambda: registry.remove(entry),
        )
    )


def _install_profiler(ledger: Ledger, devices: Devices) -> None:
    name = devices.backend.profiler_activity
    activity = getattr(ProfilerActivity, name, None) if name else None

    def translate(activities: Any) -> Any:
        if activities is None:
            return None
        wanted = list(activities)
        kept = [item for item in wanted if item != ProfilerActivity.CUDA]
        if len(kept) < len(wanted) and activity is not None and activity not in kept:
            kept.append(activity)
        return kept or [ProfilerActivity.CPU]

    why = f"ProfilerActivity.CUDA means {name}" if name else "the device has no activity of its own: host times"
    for owner in (torch.profiler.profiler._KinetoProfile, torch.profiler.profile):
        what = f"torch.profiler.{owner.__name__}"
        redirect_parameters(ledger, owner.__init__, translate, {"activities": 99}, why, what)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, enabled: bool = True, *args: Any, **kwargs: Any) -> None:
            if kwargs.pop("use_cuda", False) or kwargs.get("use_device") == "cuda":
                kwargs["use_device"] = devices.type if activity is not None else None
            original(self, enabled, *args, **kwargs)

        return init

    ledger.redirect(torch.autograd.profiler.profile.__init__, make, why, what="torch.autograd.profiler.profile")

    def enter(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self: self  # NVTX is NVIDIA's; torch.profiler shows the same operators

    emit = torch.autograd.profiler.emit_nvtx
    ledger.redirect(emit.__enter__, enter, "operators are ranges in torch.profiler", "hint")
    ledger.redirect(emit.__exit__, lambda original: lambda self, *error: False, "see emit_nvtx.__enter__", "hint")


def _install_inductor(ledger: Ledger, devices: Devices) -> None:
    def redirect(module: Any) -> None:
        why = "inductor's accelerator is the machine's"
        ledger.replace(module, "get_gpu_type", lambda: devices.type, why)

    if devices.type == "cpu":
        return
    after_import(ledger, "torch._inductor.utils", redirect, "get_gpu_type()")


def _install_early_imports(ledger: Ledger, devices: Devices) -> None:
    """Catch ``from torch import zeros`` that ran before ``import ditorch``: such a name is the C function.

    Its request for a cuda tensor arrives at the dispatcher, where a CPU build has nothing registered.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::empty.memory_format", "CUDA"):
        return
    empty, empty_strided = torch._C._VariableFunctions.empty, torch._C._VariableFunctions.empty_strided

    def on_empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, **kwargs: Any) -> Any:
        return empty(size, dtype=dtype, layout=layout, device=devices.real(device), **_given(kwargs))

    def on_empty_strided(
        size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, **kwargs: Any
    ) -> Any:
        return empty_strided(size, stride, dtype=dtype, layout=layout, device=devices.real(device), **_given(kwargs))

    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", on_empty, "CUDA")
    library.impl("empty_strided", on_empty_strided, "CUDA")
    ledger.record(
        Patch(
            "aten::empty for cuda",
            "factories that were imported by name before ditorch",
            "mapped",
            "registered",
            None,
            library._destroy,
        )
    )


def _given(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if value is not None}
