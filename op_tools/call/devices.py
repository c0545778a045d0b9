"""The few things the tools ask of a device, the same way for every accelerator."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from ..compat import count_dispatch_modes, cuda_stream_captures, no_dispatch_modes, no_torch_function, set_grad_enabled

# What stands in for these dtypes on a device that does not have them, and what is said then.
NARROWER: Final = {torch.float64: torch.float32, torch.complex128: torch.complex64}
NO_DOUBLE: Final = "Warning: Device do not support double dtype now, dtype cast repalce with float."


class quiet:
    """Run the tool's own tensor work unseen: no gradients, no function or dispatch modes.

    >>> with quiet():
    ...     torch.ones(2, requires_grad=True).mul(2).requires_grad
    False
    """

    __slots__ = ("_functions", "_grad", "_modes")

    def __enter__(self) -> None:
        self._functions = no_torch_function()
        self._functions.__enter__()
        self._grad = torch.is_grad_enabled()
        set_grad_enabled(False)
        self._modes = None
        if count_dispatch_modes():
            self._modes = no_dispatch_modes()
            self._modes.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._modes is not None:
            self._modes.__exit__(*error)
        set_grad_enabled(self._grad)
        self._functions.__exit__(*error)


@functools.cache
def module_of(device_type: str) -> Any:
    """The `torch.<device>` module of a device type, or None for the CPU (`module_of("cuda").Event`)."""
    if device_type in ("cpu", "meta"):
        return None
    return torch.get_device_module(device_type)


def names_device(value: Any) -> bool:
    """Whether a device argument names an accelerator (`names_device("cuda:0")`)."""
    if isinstance(value, int):
        return True
    try:
        return isinstance(value, (str, torch.device)) and torch.device(value).type not in ("cpu", "meta")
    except RuntimeError:
        return False


def accelerator_type() -> str:
    """Device type of this process's accelerator, `cpu` where there is none (`accelerator_type() == "cuda"`)."""
    with contextlib.suppress(RuntimeError):  # torch.cuda is not asked: with ditorch it may mean the CPU
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return "cpu" if found is None else found.type
    return "cpu"


def stream_captures(device_type: str) -> Callable[[], bool] | None:
    """What tells whether the current stream is being captured into a graph; None where a device has no such graphs.

    Graphs that ditorch emulates record below a dispatch mode: whoever sees that mode need not ask.
    """
    if device_type == "cuda" and cuda_stream_captures is not None:
        return cuda_stream_captures
    return getattr(module_of(device_type), "is_current_stream_capturing", None)


def synchronize(device_type: str) -> None:
    """Wait until the device has done all its work; nothing to do on the CPU (`synchronize("cuda")`)."""
    module = module_of(device_type)
    if module is not None and hasattr(module, "synchronize"):
        module.synchronize()


@functools.cache
def event_class(device_type: str) -> Any:
    """What makes timing events, or None where the device has none and the host clock must do."""
    module = module_of(device_type)
    if module is None:
        return None
    # torch.Event finds the current stream in C++; torch.cuda.Event does it in Python, ten times slower.
    for make in (functools.partial(torch.Event, device_type), getattr(module, "Event", None)):
        try:
            start, end = make(enable_timing=True), make(enable_timing=True)  # type: ignore[misc]
            start.record()
            end.record()
            end.synchronize()
            start.elapsed_time(end)
        except Exception:
            continue
        return make
    return None


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast computes in here, None where it is off (`autocast_dtype("cuda")`)."""
    try:
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    except (RuntimeError, TypeError):  # a device that autocast does not know
        return None


def get_rng_state(device: torch.device) -> torch.Tensor | None:
    """State of the device's default generator, or None where it has none (`get_rng_state(x.device)`)."""
    try:
        if device.type == "cpu":
            return torch.get_rng_state()
        state: torch.Tensor = module_of(device.type).get_rng_state(device)
        return state
    except Exception:
        return None


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Put a state from `get_rng_state` back (`set_rng_state(x.device, state)`)."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        module_of(device.type).set_rng_state(state, device)


@functools.cache
def can_pin(device_type: str) -> bool:
    """Whether copies to pinned host memory are worth it for this device."""
    if device_type == "cpu":
        return False
    try:
        return torch.empty(8, dtype=torch.uint8, pin_memory=True).is_pinned()
    except Exception:
        return False
