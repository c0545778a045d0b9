"""Automatic mixed precision: ``cuda`` as a device type in autocast, GradScaler and their helpers."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.amp
import torch.cuda.amp

from ditorch import surface
from ditorch.patching import Ledger
from ditorch.redirect.devices import Devices, redirect_parameters
from ditorch.redirect.tensors import named_like

WHY = "device type cuda means the accelerator"


def install(ledger: Ledger, devices: Devices) -> None:
    """Translate the device type wherever mixed precision takes one.

    Example: ``install(ledger, devices); torch.autocast("cuda", dtype=torch.bfloat16)``
    """
    real_type = devices.real_type
    default = [torch.float16] if devices.type == "cpu" else None
    if default is None:
        init = torch.amp.autocast_mode.autocast.__init__
        redirect_parameters(ledger, init, real_type, {"device_type": 1}, WHY, "torch.autocast")
    else:
        _install_default(ledger, devices, default)
    for function, parameters, what in (
        (
            torch.amp.autocast_mode.is_autocast_available,
            {"device_type": 0},
            "torch.amp.is_autocast_available",
        ),
        (torch.amp.autocast_mode.custom_fwd, {"device_type": 9}, "torch.amp.custom_fwd"),
        (torch.amp.autocast_mode.custom_bwd, {"device_type": 9}, "torch.amp.custom_bwd"),
    ):
        redirect_parameters(ledger, function, real_type, parameters, WHY, what)
    _install_scaler(ledger, devices)
    _install_state(ledger, devices, default)


def _install_default(ledger: Ledger, devices: Devices, default: list[torch.dtype]) -> None:
    """On the CPU autocast means bfloat16 unless told; code that says ``cuda`` counts on CUDA's float16."""

    def make(original: Any) -> Any:
        def init(
            self: Any,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:
            if device_type == "cuda" and dtype is None:
                dtype = default[0]
            original(self, devices.real_type(device_type), dtype, enabled, cache_enabled)

        return init

    ledger.redirect(torch.amp.autocast_mode.autocast.__init__, make, WHY, what="torch.autocast")


def _install_scaler(ledger: Ledger, devices: Devices) -> None:
    path = devices.backend.grad_scaler
    vendor = surface.find(devices.backend.module, path) if path else None
    why = WHY
    if vendor is not None:
        why = f"{devices.backend.where_module()}.{path}: sees overflows where the chip saturates"

    def make(original: Any) -> Any:
        def init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
            real = devices.real_type(device)
            if vendor is None or real != devices.type or isinstance(self, vendor):
                original(self, real, *args, **kwargs)
                return
            # The object becomes the vendor's and stays what it was, for isinstance and for subclasses.
            own: Any = type(self)
            self.__class__ = _joined(own, vendor)
            vendor.__init__(self, *args, **kwargs)
            self._device = real

        return init

    ledger.redirect(torch.amp.grad_scaler.GradScaler.__init__, make, why, what="torch.amp.GradScaler")


@functools.cache
def _joined(own: type, vendor: type) -> type:
    if own is torch.amp.GradScaler:
        return vendor
    if own is torch.cuda.amp.GradScaler:
        return type(own.__name__, (vendor, own), {"__module__": own.__module__})
    return type(own.__name__, (own, vendor), {"__module__": own.__module__})


def _install_state(ledger: Ledger, devices: Devices, default: list[torch.dtype] | None) -> None:
    """The same for the questions and settings; ``default`` is what ``cuda`` means outside of any region, where the
    device's own default is another."""
    device_type = devices.type
    enabled, set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
    get_dtype, set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype

    def is_autocast_enabled(device: str | None = None) -> bool:
        return enabled(device_type if device is None or device == "cuda" else device)

    def set_autocast_enabled(*args: Any) -> None:
        device, value = (device_type, args[0]) if len(args) == 1 else args
        set_enabled(devices.real_type(device), value)

    def get_autocast_dtype(device: str) -> torch.dtype:
        if default is not None and device == "cuda" and not enabled(device_type):
            return default[0]
        return get_dtype(devices.real_type(device))

    def set_autocast_dtype(device: str, dtype: torch.dtype) -> None:
        if default is not None and device == "cuda":
            default[0] = dtype
        set_dtype(devices.real_type(device), dtype)

    def get_autocast_gpu_dtype() -> torch.dtype:
        return get_autocast_dtype("cuda")

    def set_autocast_gpu_dtype(dtype: torch.dtype) -> None:
        set_autocast_dtype("cuda", dtype)

    for replacement in (
        is_autocast_enabled,
        set_autocast_enabled,
        get_autocast_dtype,
        set_autocast_dtype,
        get_autocast_gpu_dtype,
        set_autocast_gpu_dtype,
    ):
        name = replacement.__name__
        ledger.replace(torch, name, named_like(getattr(torch, name), replacement), WHY)
