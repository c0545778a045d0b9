"""Fingerprints on a GPU of NVIDIA: one kernel for all new tensors of a call, and one small copy for many calls."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from ..call.description import Tensor
from ..call.devices import quiet
from ..compat import in_fake_mode, in_func_transform
from ..native import front
from ..native.kernels import Kernels, launch_in_cuda, launcher
from .format import PROJECTIONS
from .prints import CHUNK, fingerprint

_ROWS: Final = 131_072  # of chunks in the buffer, 16 MB
_ROW_BYTES: Final = 128
_WIDTH: Final = PROJECTIONS + 6
_NORM: Final = PROJECTIONS + 1
_THREADS: Final = 256
_TABLE_BYTES: Final = 16 + 32 * 56  # the parameter of the kernel
_DTYPES: Final = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
_MAX_BLOCKS: Final = 1 << 30
BROKEN: Final[dict[int, str]] = {}  # GPUs whose kernel does not work, and why


class _Kernel(NamedTuple):
    kernels: Kernels
    launch: Any  # of `native.front`
    numbers: tuple[int, int, int]  # the address of the driver's function, the kernel, its threads
    together: int


class DevicePrints:
    """Fingerprints of the tensors of one GPU on their way to the host.

    >>> prints = DevicePrints(kernel_of(0)); prints.add([((3, 0), x)]); prints.land(wait=True)   # doctest: +SKIP
    """

    def __init__(self, kernel: _Kernel) -> None:
        self._kernel, self._kernels = kernel, kernel.kernels
        self._device = torch.device("cuda", self._kernels.index)
        self._rows = torch.empty((_ROWS, _ROW_BYTES // 8), dtype=torch.float64, device=self._device)
        self._address = self._rows.data_ptr()
        self._free = 0
        self._keys: list[Any] = []
        self._starts: list[int] = []
        self._streams: set[int] = set()
        self._landing: deque[tuple[list[Any], Tensor, Any]] = deque()

    def add(self, wanted: list[tuple[Any, Tensor]]) -> list[tuple[Any, Tensor]]:
        """Print tensors with one launch, each under a key; returns those that it cannot print."""
        kernels = self._kernels
        keys, tensors, left = [], [], []
        for pair in wanted:
            tensor = pair[1]
            if tensor.dtype not in _DTYPES or not tensor.numel() or tensor.numel() > CHUNK * (_ROWS - 1):
                left.append(pair)
            else:
                keys.append(pair[0])
                tensors.append(tensor if tensor.is_contiguous() and not tensor.is_neg() else _in_one_piece(tensor))
        if not tensors:
            return left
        with torch.cuda.device(kernels.index) if not kernels.current() else _HERE:
            stream = kernels.stream()
            self._streams.add(stream)
            done = 0
            for _ in range(2):
                while done < len(tensors):
                    place = (stream, kernels.index, self._address + _ROW_BYTES * self._free, 0, _ROWS - self._free)
                    *found, rows = self._kernel.launch(
                        *self._kernel.numbers, *place, CHUNK, _MAX_BLOCKS, tensors[done:] if done else tensors
                    )
                    if not found:
                        break
                    self._starts += [self._free + start for start in found[1::2]]
                    self._keys += keys[done : done + len(found) // 2]
                    done += len(found) // 2
                    self._free += rows
                if done == len(tensors):
                    break
                self._send()
        return left + list(zip(keys[done:], tensors[done:]))

    @property
    def sent(self) -> int:
        """Batches on their way."""
        return len(self._landing)

    def _send(self) -> None:
        """Put the rows of each tensor together, and start their copy to the host."""
        if not self._keys:
            return
        kernels, count = self._kernels, len(self._keys)
        if self._streams != {kernels.stream()}:  # what follows waits for one stream only
            torch.cuda.synchronize(kernels.index)
        with quiet(), torch.cuda.device(kernels.index):
            starts = torch.tensor([*self._starts, self._free], dtype=torch.int64, pin_memory=True)
            starts_there = starts.to(self._device, non_blocking=True)
            found = torch.empty((count, _WIDTH), dtype=torch.float64, device=self._device)
            numbers = (self._address, starts_there.data_ptr(), found.data_ptr())
            launch_in_cuda(self._kernel.together, kernels.stream(), count, _THREADS, *numbers)
            host = torch.empty((count, _WIDTH), dtype=torch.float64, pin_memory=True)
            host.copy_(found, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._landing.append((self._keys, host, event))
        self._keys, self._starts, self._free, self._streams = [], [], 0, set()

    def land(self, wait: bool = False) -> tuple[list[Any], Any]:
        """Keys and prints that have arrived, or all of them after waiting."""
        if wait:
            self._send()
        keys: list[Any] = []
        rows = [np.zeros((0, _WIDTH))]
        while self._landing:
            some, host, event = self._landing[0]
            if wait:
                event.synchronize()
            elif not event.query():
                break
            self._landing.popleft()
            keys += some
            rows.append(host.numpy().copy())
        found = np.concatenate(rows)
        found[:, _NORM] = np.sqrt(found[:, _NORM])
        return keys, found


class _Here:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


_HERE: Final = _Here()


def _in_one_piece(tensor: Tensor) -> Tensor:
    with quiet():
        return tensor.detach().resolve_neg().contiguous()


def kernel_of(index: int) -> _Kernel | None:
    """The kernel of a GPU; None where it cannot be compiled, differs from the CPU, or nothing is computed."""
    return None if in_fake_mode() or in_func_transform() else _kernel_of(index)


@functools.cache
def _kernel_of(index: int) -> _Kernel | None:
    try:
        library = front.LIBRARY.wait()
        kernels = Kernels(index, "trace_prints", arguments=3)
        torch.zeros(1, device=f"cuda:{index}")  # the driver needs a context
        function = None if library is None else kernels.in_cuda("table", [_TABLE_BYTES])
        together = None if function is None else kernels.in_cuda("together", [8, 8, 8])
        if library is None or function is None or together is None:
            return None
        found = _Kernel(kernels, library.launch_statistics, (launcher(), function, _THREADS), together)
        with quiet():
            if _agrees(found):
                return found
        BROKEN[index] = "the kernel finds other fingerprints than the CPU"
    except Exception as error:
        BROKEN[index] = f"{type(error).__name__}: {str(error)[:200]}"
    return None


def _agrees(kernel: _Kernel) -> bool:
    """Whether the kernel finds what PyTorch finds on the CPU, bit for bit."""
    draw = torch.Generator().manual_seed(3)
    host = [torch.randn(count, generator=draw).to(dtype) for dtype in _DTYPES for count in (1, 300, 8_192, 2_200_000)]
    for tensor in host:
        tensor[0] *= 1000
        if tensor.numel() == 300:
            tensor[7], tensor[9] = float("nan"), float("-inf")
    prints = DevicePrints(kernel)
    there = [tensor.to(f"cuda:{kernel.kernels.index}") for tensor in host]
    left = prints.add([(number, tensor) for number, tensor in enumerate(there)])
    keys, rows = prints.land(wait=True)
    expected = [fingerprint(host[key]).numpy() for key in keys]
    return not left and len(keys) == len(host) and all(np.array_equal(a, b) for a, b in zip(rows, expected))
