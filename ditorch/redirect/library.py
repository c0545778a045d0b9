"""Operators that user code registers for CUDA are found for the accelerator's tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.library

from ditorch.patching import Ledger
from ditorch.redirect.devices import Devices, redirect_parameters

WHY = "an implementation for CUDA is the accelerator's"
_KEYS = ("CUDA", "AutogradCUDA", "AutocastCUDA", "SparseCUDA", "QuantizedCUDA")
_ON_THE_WAY = ("torch.library", "torch._library", "ditorch")


def install(ledger: Ledger, devices: Devices) -> None:
    """Translate the dispatch key and the device types of user registrations.

    Example: ``install(ledger, devices); torch.library.custom_op("my::op", device_types="cuda", mutates_args=())``
    """
    if devices.type == "cpu":
        return  # an operator may have an implementation of its own for the CPU
    key = torch._C._dispatch_key_for_device(devices.type)

    def real_key(name: Any) -> Any:
        return name.replace("CUDA", key) if name in _KEYS and _asked_by_user(devices) else name

    def real_types(types: Any) -> Any:
        if isinstance(types, (list, tuple)):
            return tuple(dict.fromkeys(devices.real_type(kind) for kind in types))
        return devices.real_type(types)

    library: Any = torch.library.Library
    redirect_parameters(ledger, library.__init__, real_key, {"dispatch_key": 3}, WHY, "torch.library.Library")
    redirect_parameters(ledger, library.impl, real_key, {"dispatch_key": 3}, WHY, "torch.library.Library.impl")
    by_type: list[tuple[Any, Callable[[Any], Any], dict[str, int]]] = []
    for name, position in (("_device_type_to_key", 0), ("register_autocast", 1)):
        function = getattr(torch.library, name, None)
        if function is not None:
            by_type.append((function, devices.real_type, {"device_type": position}))
    custom = getattr(getattr(torch._library, "custom_ops", None), "CustomOpDef", None)
    for name in ("register_kernel", "register_autocast", "set_kernel_enabled"):
        method = getattr(custom, name, None)
        if method is not None:
            by_type.append((method, real_types, {"device_types": 1, "device_type": 1}))
    for function, translate, parameters in by_type:
        redirect_parameters(ledger, function, translate, parameters, WHY)


def _asked_by_user(devices: Devices) -> bool:
    """Whether the registration began outside of PyTorch, the vendor's package and ditorch."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_ON_THE_WAY):
        frame = frame.f_back
    return frame is not None and not devices.is_inside(frame.f_globals.get("__name__"))
