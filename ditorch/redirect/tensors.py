"""Factories and tensor methods: the places where a device enters with every call, so these are lean."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device
from torch import _tensor_str
from torch.jit import _builtins

from ditorch.patching import Ledger, Patch
from ditorch.redirect.devices import Devices

FACTORIES = [
    "empty",
    "empty_permuted",
    "empty_strided",
    "empty_quantized",
    "empty_like",
    "ones",
    "ones_like",
    "zeros",
    "zeros_like",
    "full",
    "full_like",
    "rand",
    "rand_like",
    "randn",
    "randn_like",
    "randint",
    "randint_like",
    "randperm",
    "arange",
    "range",
    "linspace",
    "logspace",
    "eye",
    "normal",
    "bartlett_window",
    "blackman_window",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "tril_indices",
    "triu_indices",
    "tensor",
    "as_tensor",
    "asarray",
    "scalar_tensor",
    "sparse_coo_tensor",
    "sparse_compressed_tensor",
    "sparse_csr_tensor",
    "sparse_csc_tensor",
    "sparse_bsr_tensor",
    "sparse_bsc_tensor",
    "from_dlpack",
]
NAMESPACED_FACTORIES = (
    ("fft", "fftfreq"),
    ("fft", "rfftfreq"),
    ("nested", "nested_tensor"),
    ("nested", "as_nested_tensor"),
)
METHODS_WITH_KEYWORD = ["new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "new_tensor"]
METHODS_WITH_KEYWORD += ["_make_wrapper_subclass"]  # static; called through the class
WHY_PRINTED = "a tensor on a device without float64 can be printed"
WHY_FACTORY = 'device="cuda" means the accelerator'


def install(ledger: Ledger, devices: Devices) -> None:
    """Wrap the factories and the tensor methods that take a device.

    Example: ``install(ledger, devices); torch.zeros(2, device="cuda")``
    """
    # The sets that `with torch.device(...)` and TorchScript keep must hold the original functions:
    # they are filled on first use, which has to happen before anything is replaced.
    torch.utils._device._device_constructors()
    _builtins._get_builtin_table()
    for name in FACTORIES:
        if hasattr(torch, name):
            _wrap_factory(ledger, devices, torch, name)
    for namespace, name in NAMESPACED_FACTORIES:
        owner = getattr(torch, namespace)
        if hasattr(owner, name):
            _wrap_factory(ledger, devices, owner, name)
    _install_methods(ledger, devices)
    if devices.type != "cpu":
        _install_data(ledger, devices)
        ledger.redirect(_tensor_str.tensor_totype, _printed_in_float32, WHY_PRINTED, "emulated")
    _install_views(ledger, devices)


def _printed_in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch prints by way of float64, which some devices refuse."""
    told = False

    def totype(tensor: Any) -> Any:
        nonlocal told
        try:
            return original(tensor)
        except TypeError:
            if not told:
                told = True
                sys.stderr.write("Warning: Device do not support double dtype now, dtype cast repalce with float.\n")
            return tensor.float()

    return totype


def named_like(original: Any, wrapper: Callable[..., Any], qualname: str | None = None) -> Callable[..., Any]:
    """Give a wrapper the name and documentation of what it stands for.

    Example: ``named_like(torch.zeros, wrapper).__name__ == "zeros"``
    """
    wrapper.__name__ = original.__name__
    wrapper.__qualname__ = qualname or original.__name__
    wrapper.__module__ = getattr(original, "__module__", None) or "torch"
    wrapper.__doc__ = original.__doc__
    wrapper.__wrapped__ = original  # type: ignore[attr-defined]
    return wrapper


def keyword_wrapper(devices: Devices, original: Callable[..., Any]) -> Callable[..., Any]:
    """Translate the keyword ``device`` and nothing else.

    Example: ``keyword_wrapper(devices, torch.zeros)(2, device="cuda")``
    """
    real = devices.inwards.get

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None:
            device = real(device)
            if device is not None:
                kwargs["device"] = device
        return original(*args, **kwargs)

    return wrapper


def _wrap_factory(ledger: Ledger, devices: Devices, owner: Any, name: str) -> None:
    original = getattr(owner, name)
    wrapper = named_like(original, keyword_wrapper(devices, original))
    ledger.replace(owner, name, wrapper, WHY_FACTORY)
    table = _builtins._get_builtin_table()
    if id(original) in table:
        what = f"torch.jit builtin {owner.__name__}.{name}"
        ledger.put(table, id(wrapper), table[id(original)], what, "torch.jit.script knows the wrapped factory")


def _install_methods(ledger: Ledger, devices: Devices) -> None:
    for name in METHODS_WITH_KEYWORD:
        original = getattr(torch.Tensor, name)
        wrapper = named_like(original, keyword_wrapper(devices, original), f"Tensor.{name}")
        ledger.replace(torch.Tensor, name, wrapper, WHY_FACTORY)
    for name, make in (
        ("to", _make_to),
        ("cuda", _make_cuda),
        ("type", _make_type),
        ("pin_memory", _make_pin_memory),
        ("is_pinned", _make_pin_memory),
        ("new", _make_new),
        ("record_stream", _make_record_stream),
    ):
        if name == "record_stream" and devices.type != "cpu":
            continue
        original = getattr(torch.Tensor, name)
        wrapper = named_like(original, make(devices, original), f"Tensor.{name}")
        ledger.replace(torch.Tensor, name, wrapper, 'a device argument "cuda" means the accelerator')


def _make_to(devices: Devices, original: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    real = devices.inwards.get

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            device = args[0]
            if not isinstance(device, torch.Tensor):
                device = real(device)
                if device is not None:
                    return original(self, device, *args[1:], **kwargs)
        elif kwargs:
            device = kwargs.get("device")
            if device is not None:
                device = real(device)
                if device is not None:
                    kwargs["device"] = device
        return original(self, *args, **kwargs)

    return to


def _make_cuda(devices: Devices, original: Callable[..., Any]) -> Callable[..., Any]:
    move = torch.Tensor.to

    def cuda(
        self: torch.Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: Any = torch.preserve_format,
    ) -> torch.Tensor:
        target = devices.indexed(device)
        if target.type != devices.type:
            raise RuntimeError(f"Invalid device, must be cuda device: got {device}")
        return move(self, target, non_blocking=non_blocking, memory_format=memory_format)

    return cuda


def _make_pin_memory(devices: Devices, original: Callable[..., Any]) -> Callable[..., Any]:
    def pin(self: torch.Tensor, device: Any = None) -> Any:
        if devices.type == "cpu" and original.__name__ == "pin_memory":
            return self  # host memory, which is where the "device" reads it
        # The argument is deprecated in PyTorch: memory is pinned for the current accelerator.
        if device is None or devices.real(device) != device:
            return original(self)
        return original(self, device)

    return pin


def _make_record_stream(devices: Devices, original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, stream: None


def _make_new(devices: Devices, original: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    real = devices.inwards.get

    def new(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = real(kwargs["device"], kwargs["device"])
        return original(self, *args, **kwargs)

    return new


def _make_type(devices: Devices, original: Callable[..., Any]) -> Callable[..., Any]:
    from ditorch.redirect.tensor_types import dtype_of

    def type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            name = original(self)
            shown = devices.show_as_cuda and not devices.called_from_inside(1)
            return name.replace(f"torch.{devices.type}.", "torch.cuda.", 1) if shown else name
        wanted = dtype_of(dtype)
        if wanted is None:
            return original(self, dtype, non_blocking, **kwargs)
        return self.to(device=devices.indexed(None), dtype=wanted, non_blocking=non_blocking)

    return type


def _install_data(ledger: Ledger, devices: Devices) -> None:
    """``p.data = p.data.cuda()``: PyTorch lets CPU and CUDA tensors exchange their data, but not an
    out-of-tree device's, so there the parameter's whole content is exchanged."""
    original: Any = torch.Tensor.data
    write = original.__set__

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        try:
            write(self, value)
        except RuntimeError as error:
            if "incompatible tensor type" not in str(error) or self.device.type == value.device.type:
                raise
            _exchange(self, value)

    why = "a parameter's data may move between the CPU and the accelerator"
    ledger.replace(torch.Tensor, "data", property(original.__get__, set_data, doc=original.__doc__), why)


def _exchange(tensor: torch.Tensor, value: torch.Tensor) -> None:
    fresh = value.detach()
    if isinstance(tensor, torch.nn.Parameter):
        fresh = torch.nn.Parameter(fresh, tensor.requires_grad)
    elif tensor.requires_grad:
        fresh.requires_grad_()
    fresh.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, fresh)


def _install_views(ledger: Ledger, devices: Devices) -> None:
    if not devices.show_as_cuda:
        why = "off: DITORCH_SHOW_DEVICE_AS_CUDA=0" if devices.backend.shows_as_cuda else "it is the CPU"
        ledger.record(Patch("torch.Tensor.device", f"shown as {devices.type}, not as cuda ({why})", "hint", "none"))
        return
    why = "user code sees cuda:N; PyTorch itself sees the real device"
    for owner in (torch.Tensor, torch.UntypedStorage, torch.TypedStorage):
        ledger.replace(owner, "device", _device_property(devices, owner.device), why)
        ledger.replace(owner, "is_cuda", _is_cuda_property(devices, owner.is_cuda, owner.device), why)


def _device_property(devices: Devices, original: Any) -> property:
    get = original.__get__
    shown = devices.outwards.get
    inside = devices._inside.get
    frame = sys._getframe

    def device(self: Any) -> torch.device:
        real: torch.device = get(self)
        cuda = shown(real)
        if cuda is None:
            return real
        name = frame(1).f_globals.get("__name__")
        known = inside(name)
        if known is None:
            known = devices.is_inside(name)
        return real if known else cuda

    return property(device, doc=getattr(original, "__doc__", None))


def _is_cuda_property(devices: Devices, original: Any, device: Any) -> property:
    get = original.__get__
    real_type = devices.type

    def is_cuda(self: Any) -> bool:
        if get(self):
            return True
        return device.__get__(self).type == real_type and not devices.called_from_inside(1)

    return property(is_cuda, doc=getattr(original, "__doc__", None))
