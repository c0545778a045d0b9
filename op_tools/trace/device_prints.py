"""Fingerprints on a GPU of NVIDIA: one kernel for all new tensors of a call, and one small copy for many calls."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from ..call.description import Tensor
from ..call.devices import quiet
from ..compat import cuda_stream, in_fake_mode, in_func_transform
from ..native import book as native
from ..native import ledger
from ..native.kernels import Kernels, launch_in_cuda, launcher
from .format import PROJECTIONS
from .prints import CHUNK, fingerprint

_ROWS: Final = 131_072  # of chunks in the buffer, 16 MB
_ROW_BYTES: Final = 128
_WIDTH: Final = PROJECTIONS + 6
_NORM: Final = PROJECTIONS + 1
_THREADS: Final = 256
_TABLE_BYTES: Final = 16 + 32 * 56  # the parameter of the kernel
_STRIDED_BYTES: Final = 16 + 32 * 96
_DTYPES: Final = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
_MAX_BLOCKS: Final = 1 << 30
BROKEN: Final[dict[int, str]] = {}  # GPUs whose kernel does not work, and why


class _Kernel(NamedTuple):
    kernels: Kernels
    rows: Any  # of `native.ledger`: what launches it
    numbers: tuple[int, int]  # the address of the driver's function, the kernel
    together: int
    strided: int | None  # the kernel that the book in machine code launches


class _Landing:
    """A buffer on a GPU for the rows of chunks, and the prints that are made of them on their way to the host."""

    def __init__(self, kernel: _Kernel) -> None:
        self._kernel, self._kernels = kernel, kernel.kernels
        self._device = torch.device("cuda", self._kernels.index)
        self._rows = torch.empty((_ROWS, _ROW_BYTES // 8), dtype=torch.float64, device=self._device)
        self._address = self._rows.data_ptr()
        self._landing: deque[tuple[Any, Tensor, Any]] = deque()

    @property
    def sent(self) -> int:
        """Batches on their way."""
        return len(self._landing)

    def _send_rows(self, keys: Any, starts: Any, streams: set[int]) -> None:
        """Put the rows of each tensor together, and start their copy to the host; `starts` ends with their number."""
        kernels, count = self._kernels, len(keys)
        if streams != {kernels.stream()}:  # what follows waits for one stream only
            torch.cuda.synchronize(kernels.index)
        with quiet(), torch.cuda.device(kernels.index):
            starts = torch.tensor(starts, dtype=torch.int64).pin_memory()
            starts_there = starts.to(self._device, non_blocking=True)
            found = torch.empty((count, _WIDTH), dtype=torch.float64, device=self._device)
            numbers = (self._address, starts_there.data_ptr(), found.data_ptr())
            launch_in_cuda(self._kernel.together, kernels.stream(), count, _THREADS, *numbers)
            host = torch.empty((count, _WIDTH), dtype=torch.float64, pin_memory=True)
            host.copy_(found, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._landing.append((keys, host, event))

    def _landed(self, wait: bool) -> tuple[list[Any], Any]:
        """Keys and prints that have arrived, or all of them after waiting."""
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


class BookPrints(_Landing):
    """The prints that the book in machine code takes by itself: it launches the kernel, this fetches the rows.

    >>> BookPrints(kernel_of(0), book, write)                              # doctest: +SKIP
    """

    def __init__(self, kernel: _Kernel, book: Any, write: Callable[[list[Any], Any], None]) -> None:
        super().__init__(kernel)
        self._book, self._write = book, write
        book.print_on(
            *(kernel.numbers[0], kernel.strided, str(self._device), self._address, _ROWS),
            *(self._send, cuda_stream),
        )

    def _send(self) -> None:
        """The buffer is full, or the trace ends."""
        numbers, starts, streams = [np.frombuffer(part, np.int64) for part in self._book.take_printed()]
        if len(numbers):
            self._send_rows(numbers.tolist(), starts, set(streams.tolist()))
        if self.sent > 1:
            self._write(*self._landed(wait=False))

    def land(self) -> None:
        """Wait for all of them and write them."""
        self._send()
        self._write(*self._landed(wait=True))


class DevicePrints(_Landing):
    """Fingerprints of the tensors of one GPU on their way to the host.

    >>> prints = DevicePrints(kernel_of(0)); prints.add([((3, 0), x)]); prints.land(wait=True)   # doctest: +SKIP
    """

    def __init__(self, kernel: _Kernel) -> None:
        super().__init__(kernel)
        where = (_ROW_BYTES, str(self._device), self._address, _ROWS, CHUNK, _MAX_BLOCKS, cuda_stream)
        self._native = kernel.rows(*kernel.numbers, *where)
        self._keys: dict[int, Any] = {}  # by the numbers that they have in C++
        self._numbers = itertools.count()

    def add(self, wanted: list[tuple[Any, Tensor]]) -> list[tuple[Any, Tensor]]:
        """Print tensors with one launch, each under a key; returns those that it cannot print."""
        fits = [pair[1].dtype in _DTYPES and 0 < pair[1].numel() <= CHUNK * (_ROWS - 1) for pair in wanted]
        left = [pair for pair, fit in zip(wanted, fits) if not fit]
        waiting = [(key, _in_one_piece(tensor)) for (key, tensor), fit in zip(wanted, fits) if fit]
        for _ in range(2):  # the second time the buffer is empty
            numbers = [next(self._numbers) for _ in waiting]
            taken = self._native.measure([tensor for _, tensor in waiting], numbers)
            self._keys.update({number: key for number, (key, _), done in zip(numbers, waiting, taken) if done})
            waiting = [pair for pair, done in zip(waiting, taken) if not done]
            if not waiting:
                break
            self._send()
        return left + waiting

    def _send(self) -> None:
        numbers, _, starts, streams = [np.frombuffer(part, np.int64) for part in self._native.take()]
        if len(numbers):
            self._send_rows([self._keys.pop(number) for number in numbers.tolist()], starts, set(streams.tolist()))

    def land(self, wait: bool = False) -> tuple[list[Any], Any]:
        """Keys and prints that have arrived, or all of them after waiting."""
        if wait:
            self._send()
        return self._landed(wait)


@functools.cache
def book_agrees(index: int) -> bool:
    """Whether the book in machine code finds the prints of the CPU on a GPU, in layouts that are not in order, too."""
    kernel, library = kernel_of(index), native.LIBRARY.get()
    if kernel is None or kernel.strided is None or library is None:
        return False
    name = f"strided-{hashlib.sha256(str(library.__file__).encode()).hexdigest()[:16]}"  # its path names its source
    if kernel.kernels.is_checked(name):
        return True
    found: list[tuple[int, Any]] = []
    book = library.Book(lambda _: 0, lambda: None, lambda *_: None)
    prints = BookPrints(kernel, book, lambda numbers, rows: found.extend(zip(numbers, rows.tolist())))
    draw = torch.Generator().manual_seed(4)
    with quiet():
        x = torch.randn((5, 30, 7, 90), generator=draw)
        views = [x, x.transpose(1, 2), x.permute(3, 1, 0, 2), x[:, ::2, :, 3:], x[0, 0, 0].expand(300, 90)]
        host = [view.to(dtype) for dtype in _DTYPES for view in views] + [
            (x * 50).to(torch.int64).transpose(0, 3),
            x > 0,
        ]
        there = [tensor.to(f"cuda:{index}") for tensor in host]
        for tensor in there:
            book.number(tensor, tensor, 0, -1, 0, -1, False, True)
        left = book.take_fresh()
        prints.land()
        book.close()
        expected = [fingerprint(tensor).tolist() for tensor in host]
    if not left and [row for _, row in sorted(found)] == expected:
        kernel.kernels.note_checked(name)
        return True
    BROKEN[index] = "the kernel for all layouts finds other fingerprints than the CPU"
    return False


def _in_one_piece(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    with quiet():
        return tensor.detach().resolve_neg().contiguous()


def kernel_of(index: int) -> _Kernel | None:
    """The kernel of a GPU; None where it is not compiled, or not yet, differs from the CPU, or nothing is computed."""
    return None if in_fake_mode() or in_func_transform() or is_compiling(index) else _kernel_of(index)


def is_compiling(index: int) -> bool:
    """Whether something that the kernel needs is still being compiled, in the background: the run does not wait."""
    if ledger.LIBRARY.get() is None and ledger.LIBRARY.building:
        return True
    compiler = _compiler(index)
    return compiler is not None and compiler.building


@functools.cache
def _compiler(index: int) -> Any:
    try:
        return Kernels(index, "trace_prints", arguments=3).compile_beside()
    except Exception:  # a GPU that is not there: `_kernel_of` says so
        return None


@functools.cache
def _kernel_of(index: int) -> _Kernel | None:
    try:
        library = ledger.LIBRARY.get()
        kernels = Kernels(index, "trace_prints", arguments=3)
        torch.zeros(1, device=f"cuda:{index}")  # the driver needs a context
        function = None if library is None else kernels.in_cuda("table", [_TABLE_BYTES])
        together = None if function is None else kernels.in_cuda("together", [8, 8, 8])
        strided = None if function is None else kernels.in_cuda("strided", [_STRIDED_BYTES])
        if library is None or function is None or together is None:
            return None
        found = _Kernel(kernels, library.Rows, (launcher(), function), together, strided)
        with quiet():
            if kernels.is_checked("prints") or _agrees(found):
                kernels.note_checked("prints")
                return found
        BROKEN[index] = "the kernel finds other fingerprints than the CPU"
    except Exception as error:
        BROKEN[index] = f"{type(error).__name__}: {str(error)[:200]}"
    return None


def _agrees(kernel: _Kernel) -> bool:
    """Whether the kernel finds what PyTorch finds on the CPU, bit for bit."""
    draw = torch.Generator().manual_seed(3)
    counts = [(dtype, count) for dtype in _DTYPES for count in (1, 300, 8_192, 20_000)]
    counts.append((torch.bfloat16, 2_200_000))  # more chunks than a block has threads
    host = [torch.randn(count, generator=draw).to(dtype) for dtype, count in counts]
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
