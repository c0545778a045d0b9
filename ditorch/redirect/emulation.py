"""What ditorch does itself where a vendor's module has no counterpart of a ``torch.cuda`` call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ditorch.redirect.devices import Devices

CUDA_LEVEL = "12.4"
"""What ``torch.version.cuda`` answers: the CUDA release whose Python surface is provided."""
NCCL_LEVEL = (2, 21, 5)
"""What ``torch.cuda.nccl.version`` answers: collectives of that release are provided, AVG among them."""


class Properties:
    """Device properties with the fields that CUDA code reads, whatever the vendor's object lacks."""

    def __init__(self, vendor: Any, capability: tuple[int, int], name: str, memory: int) -> None:
        self._vendor = vendor
        self._defaults = {
            "name": name,
            "major": capability[0],
            "minor": capability[1],
            "total_memory": memory,
            "multi_processor_count": 1,
            "is_integrated": False,
            "is_multi_gpu_board": False,
            "max_threads_per_multi_processor": 2048,
            "regs_per_multiprocessor": 65536,
            "warp_size": 32,
            "L2_cache_size": 0,
            "gcnArchName": "",
            "shared_memory_per_block_optin": 49152,
        }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        vendor = self.__dict__["_vendor"]
        found = None if name in ("major", "minor") else getattr(vendor, name, None)
        if found is None:
            found = self.__dict__["_defaults"].get(name)
        if found is None:
            raise AttributeError(f"device properties have no {name!r}")
        return found

    def __repr__(self) -> str:
        return f"Properties({self._vendor!r})"


class Emulation:
    """Methods are named like the calls they stand for, with ``_`` for the dot of a submodule."""

    ALWAYS = frozenset(
        {
            "is_available",
            "get_device_properties",
            "get_device_capability",
            "nvtx.range_push",
            "nvtx.range_pop",
            "nvtx.range_start",
            "nvtx.range_end",
            "nvtx.mark",
            "nccl.version",
            "nccl.is_available",
            "cudart",
            "_get_device_index",
            "_lazy_call",
        }
    )

    def __init__(self, devices: Devices, module: Any) -> None:
        self._devices = devices
        self._module = module
        self._ranges = threading.local()
        self._open_ranges: dict[int, Any] = {}

    # device ----------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        return bool(self._module.is_available()) and self.device_count() > 0

    def device_count(self) -> int:
        count = getattr(self._module, "device_count", None)
        return int(count()) if count else int(self._module.is_available())

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        index = self._get_device_index(device)
        if index > 0:
            raise RuntimeError(f"{self._devices.backend.vendor} has one device: cuda:{index} does not exist")

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize()

    def _exchange_device(self, index: int) -> int:
        previous = int(torch.cuda.current_device())
        if index >= 0 and index != previous:
            torch.cuda.set_device(index)
        return previous

    _maybe_exchange_device = _exchange_device

    def _get_device_index(self, device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
        if isinstance(device, int):
            return device
        if device is None and not optional:
            raise ValueError("Expected a torch.device with a specified index or an integer, but got: None")
        if isinstance(device, torch.cuda.device):
            return int(device.idx)
        wanted = None if device is None else torch.device(device)
        if wanted is not None and wanted.type not in ("cuda", self._devices.type):
            if allow_cpu and wanted.type == "cpu":
                return -1
            raise ValueError(f"Expected a cuda device, but got: {device}")
        if wanted is None or wanted.index is None:
            if not optional:
                raise ValueError(f"Expected a torch.device with a specified index or an integer, but got: {device}")
            return int(torch.cuda.current_device())
        return int(wanted.index)

    def _lazy_init(self) -> None:
        start = getattr(self._module, "_lazy_init", None) or getattr(self._module, "init", None)
        if start is not None:
            start()

    init = _lazy_init

    def _lazy_call(self, function: Any, **unused: Any) -> None:
        function()

    def _is_in_bad_fork(self) -> bool:
        return False

    def is_initialized(self) -> bool:
        return True

    def can_device_access_peer(self, device: Any, peer_device: Any) -> bool:
        return False

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        known = self._devices.backend.capability
        if isinstance(known, tuple):
            return known
        index = self._get_device_index(device, optional=True)
        ask = getattr(self._module, "get_device_capability", None)
        answer: Any = ask(index) if ask else None
        if isinstance(answer, tuple) and len(answer) == 2:
            return (int(answer[0]), int(answer[1]))
        return known(str(torch.cuda.get_device_name(index))) if known else (8, 0)

    def get_device_name(self, device: Any = None) -> str:
        return self._devices.backend.vendor

    def get_device_properties(self, device: Any = None) -> Properties:
        ask = getattr(self._module, "get_device_properties", None)
        index = torch.cuda.current_device() if device is None else self._get_device_index(device, True)
        vendor = ask(index) if ask else SimpleNamespace()
        needs_memory = getattr(vendor, "total_memory", None) is None
        memory = torch.cuda.mem_get_info(index)[1] if needs_memory else 0
        return Properties(vendor, self.get_device_capability(index), torch.cuda.get_device_name(index), memory)

    def get_arch_list(self) -> list[str]:
        return []

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        try:
            torch.zeros(1, dtype=torch.bfloat16, device=self._devices.type).add_(1)
        except (AssertionError, RuntimeError, TypeError):
            return False
        return True

    def is_tf32_supported(self) -> bool:
        return False

    def get_sync_debug_mode(self) -> int:
        return 0

    # memory ----------------------------------------------------------------------------------------

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        if hasattr(self._module, "recommended_max_memory"):
            total = int(self._module.recommended_max_memory())
            return max(total - int(self._module.driver_allocated_memory()), 0), total
        info = torch.accelerator.get_memory_info(self._devices.indexed(device).index)
        return int(info[0]), int(info[1])

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for key, value in torch.cuda.memory_stats(device).items():
            *groups, last = key.split(".")
            inner = nested
            for group in groups:
                inner = inner.setdefault(group, {})
            inner[last] = value
        return nested

    def empty_cache(self) -> None:
        memory = getattr(self._module, "memory", None)
        clear = getattr(memory, "empty_cache", None)
        if clear is not None:
            clear()

    def _from_stats(self, key: str, device: Any) -> int:
        return int(torch.cuda.memory_stats(device).get(key, 0))

    def get_allocator_backend(self) -> str:
        return "native"

    def get_per_process_memory_fraction(self, device: Any = None) -> float:
        return 1.0

    @contextlib.contextmanager
    def use_mem_pool(self, pool: Any, device: Any = None) -> Any:
        yield

    # random numbers --------------------------------------------------------------------------------

    def manual_seed_all(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    def seed_all(self) -> None:
        torch.cuda.manual_seed_all(torch.seed())

    def seed(self) -> None:
        torch.cuda.manual_seed(torch.seed())

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def _get_generator(self, device: Any) -> torch.Generator:
        index = device.index if getattr(device, "index", None) is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]

    # streams ---------------------------------------------------------------------------------------

    def current_stream(self, device: Any = None) -> Any:
        return torch.cuda.Stream()

    def default_stream(self, device: Any = None) -> Any:
        # The current stream belongs to a thread, and a new thread begins with the default one.
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(torch.cuda.current_stream(device)))
        thread.start()
        thread.join()
        return found[0]

    def set_stream(self, stream: Any) -> None:
        return None

    def stream(self, stream: Any) -> Any:
        return torch.cuda.StreamContext(stream)

    def is_current_stream_capturing(self) -> bool:
        from ditorch.redirect import graphs

        return graphs.capturing()

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 0)

    # ranges and profilers --------------------------------------------------------------------------

    def nvtx_range_push(self, msg: str) -> int:
        stack = self._stack()
        stack.append(_open_range(msg))
        return len(stack) - 1

    def nvtx_range_pop(self) -> int:
        stack = self._stack()
        if not stack:
            return -2
        _close_range(stack.pop())
        return len(stack)

    def nvtx_range_start(self, msg: str) -> int:
        key = max(self._open_ranges, default=0) + 1
        self._open_ranges[key] = _open_range(msg)
        return key

    def nvtx_range_end(self, range_id: int) -> None:
        _close_range(self._open_ranges.pop(range_id, None))

    def nvtx_mark(self, msg: str) -> None:
        _close_range(_open_range(msg))

    def _stack(self) -> list[Any]:
        if not hasattr(self._ranges, "stack"):
            self._ranges.stack = []
        stack: list[Any] = self._ranges.stack
        return stack

    def check_error(self, res: int) -> None:
        if res != 0:
            raise RuntimeError(f"device error {res}")

    def cudart(self) -> Any:
        return SimpleNamespace(
            cudaProfilerStart=lambda: 0,
            cudaProfilerStop=lambda: 0,
            cudaMemGetInfo=lambda device=0: torch.cuda.mem_get_info(device),
            cudaError=SimpleNamespace(success=0),
            cudaGetErrorString=lambda code: "no error" if code == 0 else f"error {code}",
        )

    # collectives -----------------------------------------------------------------------------------

    def nccl_version(self) -> tuple[int, int, int]:
        return NCCL_LEVEL

    def nccl_is_available(self, tensors: Sequence[torch.Tensor]) -> bool:
        return False


def _open_range(msg: str) -> Any | None:
    # A range is visible only in a profile, so it costs nothing outside of one.
    if not torch._C._autograd._profiler_enabled():
        return None
    block = torch.profiler.record_function(str(msg))
    block.__enter__()
    return block


def _close_range(block: Any | None) -> None:
    if block is not None:
        block.__exit__(None, None, None)
