"""How much memory one captured call may take, so that a small file cannot cost all there is."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from .archive import ArchiveError

_MAX_SHARE_OF_FREE: Final = 0.5  # of the memory that one call may fill
_ASK_ABOVE: Final = 32 << 20  # bytes of a call for which the free memory is looked up


class MemoryLimit(ArchiveError):
    """A call takes more memory than it may."""


def memory_for_one(needed: int) -> int | None:
    """The most bytes that a call may take; None (no limit) for small calls and where free memory is unknown."""
    free = free_memory() if needed > _ASK_ABOVE else None
    return None if free is None else int(free * _MAX_SHARE_OF_FREE)


def check_memory(needed: int, what: str = "it") -> None:
    """Raise MemoryLimit where a call would take more than it may (`check_memory(1 << 20)`)."""
    limit = memory_for_one(needed)
    if limit is not None and needed > limit:
        raise MemoryLimit(f"{what} needs {needed / 2**30:,.1f} GiB; {limit / 2**30:,.1f} GiB are free for it here")


def free_memory() -> int | None:
    """Free bytes of the machine or of the container, whichever is less; None where unknown."""
    found = []
    with contextlib.suppress(OSError, StopIteration, ValueError, IndexError), open("/proc/meminfo") as handle:
        line = next(line for line in handle if line.startswith("MemAvailable"))
        found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        most, used = ((group / f"memory.{what}").read_text() for what in ("max", "current"))
        found.append(max(0, int(most) - int(used)))
    return min(found, default=None)
