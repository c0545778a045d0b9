"""Cores that this process may use, and how many of them the kernels of one thread take."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch


def available() -> int:
    """Cores that this process may use (`available() >= 1`)."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


_LIMITS: Final = (
    *[(library, "omp_set_num_threads") for library in ("libgomp", "libiomp", "libomp")],
    *[(library, "MKL_Set_Num_Threads_Local") for library in ("libtorch_cpu", "libmkl_rt")],
)


@functools.cache
def _thread_limits() -> list[Any]:
    """Functions that set how many threads the calling thread's kernels use."""
    try:
        with open("/proc/self/maps") as maps:
            words = [line.split()[-1] for line in maps if ".so" in line]
    except OSError:
        return []
    found = []
    for path in sorted({w for w in words if "/" in w}):
        for library, name in _LIMITS:
            if os.path.basename(path).startswith(library):
                try:
                    found.append(getattr(ctypes.CDLL(path), name))
                except (OSError, AttributeError):
                    continue
    return found


def side_by_side(function: Callable[[Any], Any], values: Sequence[Any], most: int) -> list[Any]:
    """What a function makes of each value, in some threads of one core each; raises what it raises.

    >>> side_by_side(abs, [-1, 2, -3], most=2)
    [1, 2, 3]
    """
    results: list[Any] = [None] * len(values)
    errors: list[BaseException] = []
    waiting = iter(range(len(values)))

    def work() -> None:
        limit_kernels(1)
        for place in waiting:  # the GIL makes this safe
            if errors:
                return
            try:
                results[place] = function(values[place])
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, name="op_tools-piece", daemon=True) for _ in range(min(most, len(values)))]
    for thread in threads:
        thread.op_tools_internal = True  # type: ignore[attr-defined]
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def limit_kernels(most: int) -> None:
    """How many cores the kernels of the calling thread use (`limit_kernels(1)`)."""
    torch.get_num_threads()  # the first question sets this thread up, which would undo what follows
    for limit in _thread_limits():
        limit(most)
