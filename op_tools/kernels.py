"""Triton kernels of one GPU, compiled once for each dtype, and a short way to launch them.

Triton's own way to launch takes longer than most of the kernels that the tools need. All of theirs take nothing but
64-bit numbers (addresses, counts, bits), so the driver can be called with them as they are; where the driver does not
confirm that, Triton launches.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

Launch = Callable[..., Any]  # (stream, *numbers)
_MOST_HIDDEN: Final = 8  # parameters that Triton adds at the end; they are zero for kernels without scratch memory


class Kernels:
    """The kernels of one kind on one device.

    >>> kernels = Kernels(0, triton_statistics.compiled, arguments=4)    # doctest: +SKIP
    >>> kernels.launch(torch.float32, 16)(kernels.stream(), *numbers)    # doctest: +SKIP
    """

    def __init__(self, index: int, compiled: Callable[[torch.dtype, str], Any], arguments: int) -> None:
        self.index = index
        self._source, self._arguments = compiled, arguments
        self._compiled: dict[torch.dtype, Any] = {}
        self._launches: dict[tuple[torch.dtype, int], Launch] = {}

    def current(self) -> bool:
        """Whether their device is the one that launches go to."""
        return bool(torch._C._cuda_getDevice() == self.index)

    def stream(self) -> int:
        """The current stream of the device, as its driver knows it."""
        return int(torch._C._cuda_getCurrentRawStream(self.index))

    def launch(self, dtype: torch.dtype, programs: int) -> Launch:
        """How to run the kernel for a dtype in so many programs; the device must be the current one then."""
        return self._launches.get((dtype, programs)) or self._new_launch(dtype, programs)

    def _new_launch(self, dtype: torch.dtype, programs: int) -> Launch:
        with torch.cuda.device(self.index):
            kernel = self._compiled.get(dtype)
            if kernel is None:
                kernel = self._compiled[dtype] = self._source(dtype, f"cuda:{self.index}")
            by_triton = kernel[(programs, 1, 1)]
        launch = _direct(kernel, programs, self._arguments) or _launched_by(by_triton)
        self._launches[(dtype, programs)] = launch
        return launch


def _launched_by(runner: Any) -> Launch:
    return lambda stream, *numbers: runner(*numbers, stream=stream)


class _Direct:
    """A kernel, its grid, and its arguments where the driver reads them."""

    __slots__ = ("_call", "_lock", "_numbers", "_pointers", "_zero")

    def __init__(self, driver: Any, kernel: Any, programs: int, arguments: int) -> None:
        self._numbers = (ctypes.c_int64 * arguments)()
        self._zero = ctypes.c_int64(0)
        first = ctypes.addressof(self._numbers)
        places = [first + 8 * k for k in range(arguments)] + [ctypes.addressof(self._zero)] * _MOST_HIDDEN
        self._pointers = (ctypes.c_void_p * len(places))(*places)
        threads, shared = 32 * kernel.metadata.num_warps, kernel.metadata.shared
        call = functools.partial(driver.cuLaunchKernel, kernel.function, programs, 1, 1, threads, 1, 1, shared)
        self._call = call
        self._lock = threading.Lock()

    def __call__(self, stream: int, *numbers: int) -> None:
        with self._lock:  # until the driver has read them
            self._numbers[:] = numbers  # type: ignore[call-overload]
            error = self._call(stream, self._pointers, None)
        if error:
            raise RuntimeError(f"cuLaunchKernel: error {error}")


def _direct(kernel: Any, programs: int, arguments: int) -> Launch | None:
    """A launch without Triton; None where it is not sure that the kernel takes what it would be given."""
    try:
        driver = _driver()
        if driver is None or kernel.metadata.num_ctas != 1 or not _takes(driver, kernel.function, arguments):
            return None
        return _Direct(driver, kernel, programs, arguments)
    except Exception:  # another Triton
        return None


def _takes(driver: Any, function: int, arguments: int) -> bool:
    """Whether a kernel has so many 64-bit parameters, and behind them only some that may be zero."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    count = 0
    while driver.cuFuncGetParamInfo(function, count, ctypes.byref(offset), ctypes.byref(size)) == 0:
        if size.value != 8 or offset.value != 8 * count or count >= arguments + _MOST_HIDDEN:
            return False
        count += 1
    return count >= arguments


@functools.cache
def _driver() -> Any:
    if torch.version.cuda is None:  # ROCm calls its devices cuda, too
        return None
    library = ctypes.CDLL("libcuda.so.1")
    address, number = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = [address, *[number] * 7, address, address, address]
    library.cuFuncGetParamInfo.argtypes = [address, ctypes.c_size_t, address, address]
    return library
