"""The vendor's streams, events and graphs, completed: CUDA's signatures, CUDA's handles, devices shown as cuda."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ditorch import surface
from ditorch.errors import UnsupportedError
from ditorch.patching import Ledger
from ditorch.redirect.devices import Devices
from ditorch.redirect.signatures import adapt

_HANDLES = {
    "Stream": ("cuda_stream", ("{}_stream", "sycl_queue", "native_handle", "stream_id")),
    "Event": ("cuda_event", ("{}_event", "sycl_event", "event_id")),
}
_NO_EFFECT = ("enable_debug_mode",)
_HEAP_TYPE, _IMMUTABLE = 1 << 9, 1 << 8


def is_open(cls: Any) -> bool:
    """Whether attributes of a class can be set: true of Python classes, not of most C ones.

    Example: ``is_open(torch.Stream)`` is False.
    """
    return isinstance(cls, type) and bool(cls.__flags__ & _HEAP_TYPE) and not cls.__flags__ & _IMMUTABLE


def complete(ledger: Ledger, devices: Devices, name: str, cuda: type, vendor: Any) -> None:
    """Let objects of the vendor's class take what CUDA's take; the vendor's own code sees no difference.

    Example: ``complete(ledger, devices, "Event", torch.cuda.Event, torch.npu.Event)``
    """
    if not is_open(vendor) or vendor.__module__.startswith(("ditorch.soft", "ditorch.backends")):
        return
    for method, function in vars(cuda).items():
        if method.startswith("_") or not inspect.isfunction(function):
            continue
        theirs = getattr(vendor, method, None)
        if theirs is None:
            why = f"{devices.backend.where_module()}.{name} has none"
            made = _no_effect if method in _NO_EFFECT else _refuse(devices, f"{name}.{method}")
            ledger.replace(vendor, method, made, why, "hint" if method in _NO_EFFECT else "unsupported")
            continue
        adapter = adapt(devices, f"{name}.{method}", function, theirs, skip=1)
        if adapter is not None:
            ledger.replace(vendor, method, _for_users(devices, adapter, theirs), "takes CUDA's arguments")
    show_device(ledger, devices, vendor)
    if name in _HANDLES:
        handle, sources = _HANDLES[name]
        source = next((s.format(devices.type) for s in sources if hasattr(vendor, s.format(devices.type))), None)
        if source is not None and not hasattr(vendor, handle):
            ledger.replace(vendor, handle, property(lambda self: getattr(self, source)), f"the handle is {source}")


def handle_of(stream: Any, device_type: str) -> int:
    """The number that a kernel launcher takes for a stream.

    Example: ``handle_of(torch.npu.current_stream(), "npu")``
    """
    names = ("cuda_stream", *(name.format(device_type) for name in _HANDLES["Stream"][1]))
    found = next((value for name in names if (value := getattr(stream, name, None)) is not None), 0)
    return int(found() if callable(found) else found)


def show_device(ledger: Ledger, devices: Devices, vendor: type) -> None:
    """Show the ``device`` of a vendor's object as ``cuda:N`` to user code.

    Example: ``show_device(ledger, devices, torch.npu.Stream)``
    """
    original = inspect.getattr_static(vendor, "device", None)
    if original is None or not devices.show_as_cuda or not hasattr(original, "__get__"):
        return
    get: Callable[..., Any] = original.__get__

    def device(self: Any) -> torch.device:
        real: torch.device = get(self, type(self))
        return real if devices.called_from_inside(1) else devices.outwards.get(real, real)

    ledger.replace(vendor, "device", property(device), "user code sees cuda:N")


def _for_users(devices: Devices, adapter: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return (theirs if devices.called_from_inside(1) else adapter)(*args, **kwargs)

    return call


def _no_effect(self: Any, *args: Any, **kwargs: Any) -> None:
    return None


def _refuse(devices: Devices, call: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(f"torch.cuda.{call}", surface.label(devices.backend), surface.NO_ALTERNATIVE)

    return refuse
