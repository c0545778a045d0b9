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
from ..call.devices import quiet, stream_captures
from ..compat import cuda_stream, in_fake_mode, in_func_transform
from ..native import book as native
from ..native.kernels import Kernels, launch_in_cuda, launcher
from .format import PROJECTIONS
from .prints import stretch_print

_ROWS: Final = 131_072  # of chunks in the buffer, 16 MB
_ROW_BYTES: Final = 128
_WIDTH: Final = PROJECTIONS + 6
_NORM: Final = PROJECTIONS + 1
_THREADS: Final = 256  # of a block that puts rows together
_TABLE_BYTES: Final = 16 + 32 * 120  # the parameter of the kernel that makes them
_FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
Wanted = tuple[Any, Tensor, int]  # a key, a tensor, and where it begins in a whole
BROKEN: Final[dict[int, str]] = {}  # GPUs whose kernel does not work, and why


class _Kernel(NamedTuple):
    kernels: Kernels
    launcher: int  # the address of the driver's function
    chunks: int  # the kernel that makes rows of chunks, which a book launches
    together: int  # the one that puts them together


class BookPrints:
    """The prints of tensors on one GPU: a book in machine code launches the kernel, this fetches the rows.

    >>> BookPrints(kernel_of(0), book, write)                              # doctest: +SKIP
    """

    def __init__(self, kernel: _Kernel, book: Any, write: Callable[[list[int], Any], None]) -> None:
        self._kernels, self._together, self._book, self._write = kernel.kernels, kernel.together, book, write
        self._device = torch.device("cuda", kernel.kernels.index)
        self._rows = torch.empty((_ROWS, _ROW_BYTES // 8), dtype=torch.float64, device=self._device)
        self._landing: deque[tuple[list[int], Tensor, Any]] = deque()
        self._streams: set[int] = set()  # all that were ever used
        self._sent: Any = None  # the event of the last copy: from there on, the buffer may be written to again
        self._captures = stream_captures("cuda") or (lambda: False)
        where = (str(self._device), self._rows.data_ptr(), _ROWS)
        book.print_on(kernel.launcher, kernel.chunks, *where, self._send, self._new_stream)

    def _new_stream(self, index: int) -> int:
        """The current stream, which prints for the first time: not before what was sent last has been read."""
        stream = cuda_stream(index)
        self._streams.add(stream)
        if self._sent is not None and not self._captures():
            torch.cuda.current_stream(index).wait_event(self._sent)
        return stream

    def send_early(self) -> None:
        """Write what has arrived and start the next copy, so that a run that is killed leaves them; nobody waits.

        Where several streams print, whoever sends has to wait for the others: that is left to a full buffer.
        """
        with quiet(), torch.cuda.device(self._device):
            if self._streams != {self._kernels.stream()} or self._captures():
                return
            self._write_landed(wait=False)
            if not self._landing:
                self._send()

    def _send(self) -> None:
        """Put the rows of each tensor together, and start their copy: the buffer is full, or the trace ends."""
        numbers, starts, chunks, streams = [np.frombuffer(part, np.int64) for part in self._book.take_printed()]
        if len(numbers):
            self._send_rows(numbers.tolist(), np.concatenate([starts, chunks]), set(streams.tolist()))
        if len(self._landing) > 1:
            self._write_landed(wait=False)

    def _send_rows(self, numbers: list[int], places: Any, streams: set[int]) -> None:
        """`places`: where the rows of each tensor begin and where all end, and the first chunk of each."""
        kernels, count = self._kernels, len(numbers)
        if streams != {kernels.stream()}:  # what follows waits for one stream only
            torch.cuda.synchronize(kernels.index)
        with quiet(), torch.cuda.device(kernels.index):
            there = torch.tensor(places, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)
            found = torch.empty((count, _WIDTH), dtype=torch.float64, device=self._device)
            starts, chunks = there.data_ptr(), there.data_ptr() + 8 * (count + 1)
            numbers_there = (self._rows.data_ptr(), starts, chunks, found.data_ptr())
            launch_in_cuda(self._together, kernels.stream(), count, _THREADS, *numbers_there)
            host = torch.empty((count, _WIDTH), dtype=torch.float64, pin_memory=True)
            host.copy_(found, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._sent = event
        self._landing.append((numbers, host, event))

    def _write_landed(self, wait: bool) -> None:
        """Write the prints that have arrived, or all of them after waiting."""
        while self._landing:
            numbers, host, event = self._landing[0]
            if wait:
                event.synchronize()
            elif not event.query():
                break
            self._landing.popleft()
            found = host.numpy().copy()
            found[:, _NORM] = np.sqrt(found[:, _NORM])
            self._write(numbers, found)

    def land(self) -> None:
        """Wait for all of them and write them."""
        self._send()
        self._write_landed(wait=True)


class DevicePrints(BookPrints):
    """Fingerprints of tensors of one GPU that Python hands over; `write` gets their keys and the prints.

    >>> prints = DevicePrints(kernel_of(0), write); prints.add([((3, 0), x, 0)]); prints.land()   # doctest: +SKIP
    """

    def __init__(self, kernel: _Kernel, write: Callable[[list[Any], Any], None]) -> None:
        printer = native.LIBRARY.get().Book(lambda _: 0, lambda: None, lambda: None, "cpu")
        super().__init__(kernel, printer, lambda numbers, rows: write([self._keys.pop(one) for one in numbers], rows))
        self._keys: dict[int, Any] = {}  # by the numbers that they have in C++
        self._numbers = itertools.count()

    def add(self, wanted: list[Wanted]) -> list[Wanted]:
        """Print tensors with one launch; returns those that it cannot print."""
        numbers = [next(self._numbers) for _ in wanted]
        self._keys.update({number: one[0] for number, one in zip(numbers, wanted)})
        taken = self._book.print([tensor for _, tensor, _ in wanted], numbers, [first for _, _, first in wanted])
        left = [(number, one) for number, one, done in zip(numbers, wanted, taken) if not done]
        for number, _ in left:
            del self._keys[number]
        return [one for _, one in left]


def kernel_of(index: int) -> _Kernel | None:
    """The kernel of a GPU; None where it is not compiled, or not yet, differs from the CPU, or nothing is computed."""
    return None if in_fake_mode() or in_func_transform() or is_compiling(index) else _kernel_of(index)


def is_compiling(index: int) -> bool:
    """Whether something that the kernel needs is still being compiled, in the background: the run does not wait."""
    compiler = _compiler(index)  # beside the library, not after it
    waits_for_library = native.LIBRARY.get() is None and native.LIBRARY.building
    return waits_for_library or (compiler is not None and compiler.building)


@functools.cache
def _compiler(index: int) -> Any:
    try:
        return Kernels(index, "trace_prints", arguments=3).compile_beside()
    except Exception:  # a GPU that is not there: `_kernel_of` says so
        return None


@functools.cache
def _kernel_of(index: int) -> _Kernel | None:
    try:
        library, kernels = native.LIBRARY.get(), Kernels(index, "trace_prints", arguments=3)
        torch.zeros(1, device=f"cuda:{index}")  # the driver needs a context
        chunks = None if library is None else kernels.in_cuda("chunks", [_TABLE_BYTES])
        together = None if chunks is None else kernels.in_cuda("together", [8, 8, 8, 8])
        if chunks is None or together is None:
            return None
        found = _Kernel(kernels, launcher(), chunks, together)
        name = f"prints-{hashlib.sha256(str(library.__file__).encode()).hexdigest()[:16]}"  # its path names its source
        with quiet():
            if kernels.is_checked(name) or _agrees(found):
                kernels.note_checked(name)
                return found
        BROKEN[index] = "the kernel finds other fingerprints than the CPU"
    except Exception as error:
        BROKEN[index] = f"{type(error).__name__}: {str(error)[:200]}"
    return None


def _agrees(kernel: _Kernel) -> bool:
    """Whether the kernel finds what PyTorch finds on the CPU, bit for bit: dtypes, sizes, layouts, NaN and Inf."""
    draw = torch.Generator().manual_seed(3)
    counts = [(dtype, count) for dtype in _FLOATS for count in (1, 300, 8_192, 20_000)]
    counts.append((torch.bfloat16, 2_200_000))  # more chunks than a block has threads
    host = [torch.randn(count, generator=draw).to(dtype) for dtype, count in counts]
    for tensor in host:
        tensor[0] *= 1000
        if tensor.numel() in (300, 20_000):
            tensor[7], tensor[9], tensor[11] = float("nan"), float("-inf"), torch.finfo(tensor.dtype).min
    x = torch.randn((5, 30, 7, 90), generator=draw)
    for one in (*[x.to(dtype) for dtype in _FLOATS], (x * 50).to(torch.int64), (x * 50).to(torch.int32), x > 0):
        flat, mixed = one.view(-1), one.permute(3, 1, 0, 2)
        host += [
            one.transpose(1, 2),
            mixed,
            one[:, ::2, :, 3:],
            one[0, 0, 0].expand(300, 90),
            flat[1:9000],
            flat[:8192],
        ]
    found: dict[int, Any] = {}
    prints = DevicePrints(kernel, lambda keys, rows: found.update(zip(keys, rows)))
    firsts = [(0, 0, 1, 8_192 * 300 + 70)[number % 4] for number in range(len(host))]
    wanted = [_like(tensor, kernel.kernels.index) for tensor in host]
    left = prints.add(list(zip(range(len(host)), wanted, firsts)))
    prints.land()
    expected = [stretch_print(tensor, first).numpy() for tensor, first in zip(host, firsts)]
    agree = [np.array_equal(found[number], one) for number, one in enumerate(expected)]
    return not left and all(agree)


def _like(tensor: Tensor, index: int) -> Tensor:
    """The same numbers on a GPU, and as far from the beginning and from each other."""
    base = tensor if tensor._base is None else tensor._base
    return base.to(f"cuda:{index}").as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
