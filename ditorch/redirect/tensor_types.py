"""``torch.cuda.FloatTensor`` and its family: types that make and recognise tensors of the accelerator."""

from __future__ import annotations

from typing import Any

import torch

from ditorch.patching import Ledger
from ditorch.redirect.devices import Devices

DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


class TensorType(type):
    """Metaclass of the ``torch.cuda.*Tensor`` types: calling one makes a tensor on the accelerator."""

    devices: Devices
    dtype: torch.dtype
    layout = torch.strided
    is_cuda = True
    is_sparse = False

    def __call__(cls, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = getattr(torch, cls.__name__)(*args, **kwargs)
        return made.to(cls.devices.indexed(device))

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            isinstance(instance, torch.Tensor)
            and instance.dtype == cls.dtype
            and instance.device.type == cls.devices.type
        )


def make_types(devices: Devices) -> dict[str, TensorType]:
    """The types by name.

    Example: ``make_types(devices)["FloatTensor"]([1, 2])``
    """
    return {
        name: TensorType(name, (), {"__module__": "torch.cuda", "devices": devices, "dtype": dtype})
        for name, dtype in DTYPES.items()
    }


def dtype_of(wanted: Any) -> torch.dtype | None:
    """The dtype of a cuda tensor type or of its name; None for anything else.

    Example: ``dtype_of("torch.cuda.HalfTensor") == torch.float16``
    """
    if isinstance(wanted, str) and wanted.startswith("torch.cuda."):
        return DTYPES.get(wanted.removeprefix("torch.cuda."))
    if isinstance(wanted, TensorType):
        return wanted.dtype
    return None


class DefaultType:
    """A type of the accelerator as the default: what names no device is made there, by ``torch.Tensor(...)`` too.

    Example: ``DefaultType(devices).enter(); torch.Tensor([1.0]).is_cuda``
    """

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self.active = False
        self.installed = False

    def enter(self) -> None:
        torch.set_default_device(self.devices.type)
        self.active = True
        if not self.installed:
            self.installed = True
            self._install()

    def leave(self) -> None:
        if self.active:
            torch.set_default_device(None)
            self.active = False

    def _install(self) -> None:
        """A default device says nothing to the old constructor. What is put there stays: Python cannot take it off."""
        original = torch.Tensor.__new__

        def new(*args: Any, **kwargs: Any) -> Any:  # torch.compile takes no other signature in its place
            made = original(*args, **kwargs)
            wanted = self.active and args[0] is torch.Tensor and "device" not in kwargs
            return made.to(self.devices.indexed(None)) if wanted else made

        torch.Tensor.__new__ = new  # type: ignore[method-assign]


def install(ledger: Ledger, devices: Devices) -> None:
    """Put the types into ``torch.cuda`` and let them be the default tensor type.

    Example: ``install(ledger, devices); torch.cuda.LongTensor([1])``
    """
    for name, made in make_types(devices).items():
        ledger.replace(torch.cuda, name, made, "makes tensors on the accelerator")

    default = DefaultType(devices)

    def make_setter(original: Any) -> Any:
        def set_default_tensor_type(t: Any) -> None:
            dtype = dtype_of(t)
            if dtype is None:
                original(t)
                default.leave()
            else:
                torch.set_default_dtype(dtype)
                default.enter()

        return set_default_tensor_type

    ledger.redirect(torch.set_default_tensor_type, make_setter, "torch.cuda.*Tensor as the default type")
