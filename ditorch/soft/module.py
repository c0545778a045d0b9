"""What ``torch.soft`` is: the device module, with the surface that torch.cuda and vendor modules have."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from . import amp, cuda_only, memory, native, sharing
from .memory import (
    Device,
    device_index,
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_max_memory_cached,
    reset_peak_memory_stats,
    set_memory_limit,
    set_per_process_memory_fraction,
)

__all__ = [
    "amp",
    "memory",
    "Event",
    "Stream",
    "StreamContext",
    "can_device_access_peer",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_arch_list",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "ipc_collect",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_memory_limit",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]

CAPABILITY = (8, 0)
default_generators: tuple[torch.Generator, ...] = ()


def fill_in() -> None:
    """Complete the module once the device exists."""
    global default_generators
    default_generators = tuple(native().default_generator(index) for index in range(device_count()))
    for name in ("amp", "memory"):
        sys.modules[f"torch.soft.{name}"] = globals()[name]


# --- devices -----------------------------------------------------------------


_asked_for = False


def init() -> None:
    """Note that the program uses the device, which is ready as soon as it is loaded."""
    global _asked_for
    _asked_for = True


def is_initialized() -> bool:
    """Whether the program has used the device: before that, a DeviceMesh chooses the one of its rank."""
    return _asked_for or any(native().memory_stats(index)["total_blocks"] for index in range(device_count()))


def is_available() -> bool:
    return True


def device_count() -> int:
    """Number of devices (``DITORCH_SOFT_DEVICES``, 1 by default)."""
    return int(native().device_count())


def current_device() -> int:
    """Index of the device that new tensors of this thread go to."""
    return int(native().current_device())


def set_device(device: Device) -> None:
    """Choose the current device of this thread."""
    init()
    native().set_device(device_index(device))


class device:
    """Context manager that changes the current device.

    >>> with torch.soft.device(1):  # doctest: +SKIP
    ...     torch.empty(1, device="soft").device
    device(type='soft', index=1)
    """

    def __init__(self, device: Device) -> None:
        self.idx = device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = native().exchange_device(self.idx)

    def __exit__(self, *exc: object) -> None:
        native().set_device(self.prev_idx)


class device_of(device):
    """Context manager that makes the device of a tensor current; does nothing for other tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == "soft" else None)


@dataclass(frozen=True)
class DeviceProperties:
    """What a program may ask about a device."""

    name: str
    total_memory: int
    major: int = 8
    minor: int = 0
    multi_processor_count: int = 1

    @property
    def gcnArchName(self) -> str:
        return self.name


def get_device_properties(device: Device = None) -> DeviceProperties:
    """Name, memory size and number of processors (the host's threads)."""
    return DeviceProperties(
        name=get_device_name(device),
        total_memory=mem_get_info(device)[1],
        multi_processor_count=torch.get_num_threads(),
    )


def get_device_name(device: Device = None) -> str:
    device_index(device)
    return "ditorch software accelerator"


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """(8, 0), as under CUDA's name: bfloat16 and TF32's switches are there, float8 kernels of later GPUs are not."""
    device_index(device)
    return CAPABILITY


def get_arch_list() -> list[str]:
    return []


def can_device_access_peer(device: Device, peer: Device) -> bool:
    """Devices share the host's memory."""
    return device_index(device) != device_index(peer)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def ipc_collect() -> None:
    """Nothing to collect: shared memory goes with the last tensor over it."""


# What the redirect asks for when tensors go to other processes.
_reduce_tensor = sharing.reduce_tensor
_share = sharing.share
# What `ditorch doctor` shows.
_gaps = cuda_only.REFUSED


def _native_operators() -> set[str]:
    """Operators with a kernel of the device's own library, as in ``aten::add.Tensor``."""
    own = {f"aten::{name}" for name in ("record_stream",)}
    return set(native().planned_operators()) | own


_initialized = True  # checkpointing saves the state of the generators only then


_was_used = _in_bad_fork = False


def _is_in_bad_fork() -> bool:
    return _in_bad_fork


def _before_fork() -> None:
    global _was_used
    stats = [native().memory_stats(index) for index in range(device_count())]
    _was_used = any(found["total_blocks"] or found["peak_blocks"] for found in stats)


def _after_fork() -> None:
    """A child has none of its parent's threads, OpenMP's and autograd's: work on the device would wait for ever."""
    global _in_bad_fork
    if _was_used:
        _in_bad_fork = True
        native().set_fault_hook(_refuse, _refuse, set(torch._C._dispatch_get_all_op_names()))


def _refuse(*_: Any) -> None:
    raise RuntimeError(
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' "
        "start method (the device is soft, the software accelerator, and was in use when this process was forked)"
    )


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def synchronize(device: Device = None) -> None:
    """Wait for the device: work is complete when the call that issued it returns."""
    device_index(device)


# --- random numbers ------------------------------------------------------------


def _generator(device: Device) -> torch.Generator:
    return default_generators[device_index(device)]


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    """Seed the current device's generator with a random number."""
    _generator(None).seed()


def seed_all() -> None:
    """Seed all devices with the same random number."""
    manual_seed_all(_generator(None).seed())


def initial_seed() -> int:
    return _generator(None).initial_seed()


def get_rng_state(device: Device = "soft") -> torch.Tensor:
    """State of a device's generator, as a CPU byte tensor."""
    return _generator(device).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state(new_state: torch.Tensor, device: Device = "soft") -> None:
    """Restore a state taken with ``get_rng_state``."""
    _generator(device).set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# --- streams and events ----------------------------------------------------------


class _OnSoft(type):
    """Instances are torch's own streams and events, so ``isinstance`` looks at their device."""

    kind: type

    def __instancecheck__(cls, instance: Any) -> bool:
        on = getattr(instance, "device", None)
        return isinstance(instance, cls.kind) and on is not None and on.type == "soft"


class Stream(metaclass=_OnSoft):
    """A queue of work. ``Stream(device=None, priority=0)`` gives a ``torch.Stream`` on that device."""

    kind = torch.Stream

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> Any:
        if "stream_id" in kwargs:
            return torch.Stream(**kwargs)
        return torch.Stream(device=torch.device("soft", device_index(device)), priority=priority)


class Event(metaclass=_OnSoft):
    """A point in a stream. ``Event(enable_timing=True)`` gives a ``torch.Event`` with ``elapsed_time``."""

    kind = torch.Event

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Any:
        if interprocess:
            raise RuntimeError("soft: events cannot be shared between processes; use interprocess=False")
        return torch.Event(
            device=torch.device("soft", current_device()), enable_timing=enable_timing, blocking=blocking
        )


def current_stream(device: Device = None) -> torch.Stream:
    """Stream that this thread's work on the device goes to."""
    return torch.accelerator.current_stream(torch.device("soft", device_index(device)))


def default_stream(device: Device = None) -> torch.Stream:
    index = device_index(device)
    return torch.Stream(stream_id=0, device_index=index, device_type=torch.Stream(device=f"soft:{index}").device_type)


def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream current on its device, without a context."""
    if stream is not None:
        with device(current_device()):  # the current device stays what it is
            torch.accelerator.set_stream(stream)


class StreamContext:
    """Context manager that makes a stream, and its device, current; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> torch.Stream | None:
        if self.stream is not None:
            index = self.stream.device_index
            self._previous = current_stream(index)
            self._device = native().exchange_device(index)
            torch.accelerator.set_stream(self.stream)
        return self.stream

    def __exit__(self, *exc: object) -> None:
        if self.stream is not None:
            torch.accelerator.set_stream(self._previous)
            native().set_device(self._device)


def stream(stream: torch.Stream | None) -> StreamContext:
    """Run what follows on ``stream``.

    >>> with torch.soft.stream(torch.soft.Stream()):  # doctest: +SKIP
    ...     y = x + 1
    """
    return StreamContext(stream)


# --- asked for by torch ------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Types that autocast may use on this device."""
    return amp.SUPPORTED_DTYPES
