"""The CPU itself, for scripts that insist on ``cuda``: no device memory, one device, one stream."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from types import SimpleNamespace
from typing import Any

import torch

from ditorch.backend import Backend


class Event:
    """A moment on the host clock: CPU work is finished when the call returns."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self.enable_timing = enable_timing
        self._moment: float | None = None

    def record(self, stream: Any = None) -> None:
        self._moment = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Event) -> float:
        if self._moment is None or end_event._moment is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return (end_event._moment - self._moment) * 1e3


class Stream:
    """The one queue of the CPU; everything on it is done already."""

    priority = 0
    stream_id = 0
    cuda_stream = 0
    device = torch.device("cpu")
    device_index = 0

    def __init__(self, device: Any = None, priority: int = 0, **unused: Any):
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: Any) -> None:
        return None


def _memory() -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


@contextlib.contextmanager
def _nothing(*unused: Any) -> Any:
    yield


class Module:
    """What ``torch.cuda`` does when the device is the CPU."""

    __name__ = "ditorch.backends.cpu"
    Stream = Stream
    Event = Event
    _stream = Stream()
    StreamContext = staticmethod(_nothing)
    stream = staticmethod(_nothing)
    default_generators = (torch.default_generator,)

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: Any) -> None:
        Module._check(device)

    @staticmethod
    def _check(device: Any) -> None:
        index = device if isinstance(device, int) else getattr(device, "index", None)
        if index not in (None, 0, -1):
            raise RuntimeError(f"ditorch: the cpu backend has one device, cuda:0; asked for cuda:{index}")

    @staticmethod
    def synchronize(device: Any = None) -> None:
        pass

    @classmethod
    def current_stream(cls, device: Any = None) -> Any:
        return cls._stream

    default_stream = current_stream

    @staticmethod
    def set_stream(stream: Any) -> None:
        pass

    @staticmethod
    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    manual_seed_all = manual_seed

    @staticmethod
    def seed() -> None:
        torch.default_generator.seed()

    seed_all = seed

    @staticmethod
    def initial_seed() -> int:
        return torch.default_generator.initial_seed()

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.default_generator.get_state()

    @staticmethod
    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        torch.default_generator.set_state(new_state)

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return platform.processor() or platform.machine()

    @staticmethod
    def get_device_properties(device: Any = None) -> Any:
        return SimpleNamespace(
            name=Module.get_device_name(),
            total_memory=_memory()[1],
            multi_processor_count=os.cpu_count() or 1,
        )

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return _memory()

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, Any]:
        return {}

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        return 0

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        pass

    @staticmethod
    def empty_cache() -> None:
        pass

    @staticmethod
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return True


BACKEND = Backend(
    name="cpu",
    vendor="CPU",
    device_type="cpu",
    collective="gloo",
    capability=(8, 0),
    fallback=True,
    shows_as_cuda=False,
    collective_gaps=frozenset({"avg"}),
    probe=lambda: (True, "available"),
    loader=lambda: None,
    make_module=lambda: Module,
)
