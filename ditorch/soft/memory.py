"""Memory statistics and limits of the soft devices, under the names that torch.cuda uses."""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from typing import Any

import torch

from . import native

Device = torch.device | str | int | None
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(text: str) -> int:
    """Read a size such as ``1048576``, ``512MiB``, ``2g`` or ``1.5 GB`` (units are powers of 1024).

    >>> parse_bytes("512MiB")
    536870912
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size; write it like 1048576, 512MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def device_index(device: Device) -> int:
    """Index of a soft device given in any of the usual ways; None means the current one."""
    if device is None:
        return int(native().current_device())
    if isinstance(device, int):
        index = device
    else:
        device = torch.device(device)
        if device.type != "soft":
            raise ValueError(f"expected a soft device, got {device}")
        index = -1 if device.index is None else device.index
    if index < 0:
        return int(native().current_device())
    count = native().device_count()
    if index >= count:
        raise RuntimeError(
            f"soft:{index} does not exist: this process has {count} soft device(s), soft:0 to soft:{count - 1}. "
            f"Set DITORCH_SOFT_DEVICES={index + 1} before starting to have more."
        )
    return index


def memory_stats(device: Device = None) -> dict[str, Any]:
    """Flat dictionary of statistics with the keys of ``torch.cuda.memory_stats``.

    >>> torch.soft.memory_stats()["allocated_bytes.all.current"]  # doctest: +SKIP
    4096
    """
    raw = native().memory_stats(device_index(device))
    bytes_ = (raw["allocated"], raw["peak"], raw["total_allocated"], raw["total_freed"])
    blocks = (raw["blocks"], raw["peak_blocks"], raw["total_blocks"], raw["freed_blocks"])
    stats: dict[str, Any] = OrderedDict()
    for group, values in (
        ("active", blocks),
        ("active_bytes", bytes_),
        ("allocated_bytes", bytes_),
        ("allocation", blocks),
        ("requested_bytes", bytes_),
        ("reserved_bytes", bytes_),
        ("segment", blocks),
    ):
        for name, value in zip(("current", "peak", "allocated", "freed"), values):
            # CUDA serves small and large blocks from two pools; here is one, for blocks of any size.
            stats[f"{group}.all.{name}"] = stats[f"{group}.large_pool.{name}"] = value
            stats[f"{group}.small_pool.{name}"] = 0
    for name in ("current", "peak", "allocated", "freed"):
        for pool in ("all", "large_pool", "small_pool"):
            stats[f"inactive_split.{pool}.{name}"] = 0
            stats[f"inactive_split_bytes.{pool}.{name}"] = 0
        stats[f"oversize_allocations.{name}"] = stats[f"oversize_segments.{name}"] = 0
    stats["max_split_size"] = -1
    stats |= dict.fromkeys(("num_alloc_retries", "num_sync_all_streams"), 0)
    stats["num_device_alloc"], stats["num_device_free"] = raw["total_blocks"], raw["freed_blocks"]
    stats["num_ooms"] = raw["ooms"]
    return stats


def memory_allocated(device: Device = None) -> int:
    """Bytes in use by tensors on the device."""
    return int(native().memory_stats(device_index(device))["allocated"])


def max_memory_allocated(device: Device = None) -> int:
    """Largest ``memory_allocated`` since the start or the last ``reset_peak_memory_stats``."""
    return int(native().memory_stats(device_index(device))["peak"])


# Nothing is cached: what is reserved is what is allocated.
memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: Device = None) -> None:
    """Start measuring the peak anew."""
    native().reset_peak(device_index(device))


reset_max_memory_allocated = reset_peak_memory_stats
reset_max_memory_cached = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Set the totals of allocated and freed memory back to zero."""
    native().reset_accumulated(device_index(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and total bytes: of the limit if one is set, else of the host."""
    free, total = native().memory_info(device_index(device))
    return int(free), int(total)


def set_memory_limit(limit: int | str | None, device: Device = None) -> None:
    """Let a device hold at most ``limit`` bytes (``"512MiB"`` works too); None removes the limit.

    >>> torch.soft.set_memory_limit("1GiB")  # doctest: +SKIP
    """
    size = 0 if limit is None else parse_bytes(limit) if isinstance(limit, str) else int(limit)
    native().set_memory_limit(device_index(device), size)


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Limit a device to a fraction of the host's memory, as torch.cuda does of the GPU's."""
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must lie in (0, 1], got {fraction}")
    index = device_index(device)
    native().set_memory_limit(index, 0)
    native().set_memory_limit(index, int(fraction * mem_get_info(index)[1]))


def empty_cache() -> None:
    """Return unused cached memory to the host: there is none, memory is freed with its tensor."""


def memory_snapshot(device: Device = None) -> list[dict[str, Any]]:
    """No segments: memory comes straight from the host and is not cached."""
    return []


def _record_memory_history(*args: Any, **kwargs: Any) -> None:
    """Accepted: no history is kept, memory comes straight from the host."""


def _snapshot(device: Device = None) -> dict[str, Any]:
    """A snapshot as ``torch.cuda.memory`` writes it: one live block per device, no history."""
    segments = []
    for index in range(native().device_count()):
        size = memory_allocated(index)
        if not size:
            continue
        block = {"address": 0, "size": size, "requested_size": size, "state": "active_allocated", "frames": []}
        segments.append(
            {
                "device": index,
                "address": 0,
                "total_size": size,
                "allocated_size": size,
                "active_size": size,
                "requested_size": size,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": [block],
            }
        )
    traces: list[list[Any]] = [[] for _ in range(native().device_count())]
    return {"segments": segments, "device_traces": traces, "allocator_settings": {}, "external_annotations": []}


def _dump_snapshot(filename: str = "dump_snapshot.pickle") -> None:
    """Write that snapshot to a file, as ``torch.cuda.memory._dump_snapshot`` does."""
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(), file)


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """Readable table of the statistics."""
    index = device_index(device)
    raw = native().memory_stats(index)
    free, total = mem_get_info(index)
    rows = [
        ("allocated", raw["allocated"]),
        ("peak", raw["peak"]),
        ("allocated since start", raw["total_allocated"]),
        ("freed since start", raw["total_freed"]),
        ("free", free),
        ("total", total),
    ]
    lines = [f"soft:{index} memory", *(f"  {name:<22}{value / 2**20:>14,.2f} MiB" for name, value in rows)]
    if not abbreviated:
        lines += [
            f"  {'live allocations':<22}{raw['blocks']:>14,}",
            f"  {'out of memory errors':<22}{raw['ooms']:>14,}",
        ]
    return "\n".join(lines)
