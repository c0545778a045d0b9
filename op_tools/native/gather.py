"""Slices of several tensors of a GPU in one launch, written straight to pinned memory or to the device.

Each operator of PyTorch hands the GIL to other threads and waits for it afterwards; with worker threads that costs more
than the slices do. One launch through a function that keeps the GIL takes the place of all of them.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from ..call.description import Tensor
from ..compat import cuda_device, cuda_stream
from .kernels import Kernels

_MAX_PIECES: Final = 20
MAX_DIMS: Final = 6
_WORDS: Final = 4 + 3 * MAX_DIMS  # of a piece
_TABLE_BYTES: Final = 8 * (1 + _MAX_PIECES * _WORDS)
_THREADS: Final = 256
_MAX_BLOCKS: Final = 256
_UNUSED: Final = (1, 0, 0)
_Words: Final = ctypes.c_int64 * (_TABLE_BYTES // 8)

Origin = tuple[int, int]  # a tensor by its number, and bytes from its beginning
Dim = tuple[int, int, Tensor | None]  # places that are taken, bytes from one to the next, which (None: all in order)


class Piece(NamedTuple):
    """Some elements of a tensor; without a source they are zeros."""

    source: int  # the address of its first element
    itemsize: int
    dims: Sequence[Dim]  # in the order of the result

    @property
    def elements(self) -> int:
        """How many there are."""
        total = 1
        for size, _, _ in self.dims:
            total *= size
        return total


class Table:
    """The pieces of a launch that is made again for other tensors of the same layout: only addresses differ.

    `origins` says for each piece which tensor it is cut from and how far from its beginning; None for zeros.
    """

    __slots__ = ("_launches", "_offsets", "_origins", "_pieces", "lock")

    def __init__(self, pieces: Sequence[Piece], offsets: Sequence[int], origins: Sequence[Origin | None]) -> None:
        self._pieces, self._offsets, self._origins = tuple(pieces), tuple(offsets), tuple(origins)
        self.lock = threading.Lock()  # held from filling the words in until the driver has copied them
        # of each launch: its words, the parameter that points to them, how many pieces, elements of the largest,
        # then where in the words an address belongs and what is added to it
        self._launches: list[tuple[Any, Any, int, int, list[tuple[int, int, int]], list[tuple[int, int]]]] = []
        for first in range(0, len(pieces), _MAX_PIECES):
            some = pieces[first : first + _MAX_PIECES]
            words, most = _words(some, offsets[first : first + _MAX_PIECES])
            sources, targets = [], []
            for number, piece in enumerate(some):
                at, origin = 1 + number * _WORDS, origins[first + number]
                if origin is not None and piece.source:
                    sources.append((at, *origin))
                targets.append((at + 1, offsets[first + number]))
            self._launches.append((words, _parameter(words), len(some), most, sources, targets))

    def launches(self, addresses: Sequence[int], first: int) -> Iterator[tuple[Any, int, int]]:
        """Of each launch for tensors at these addresses: its parameter, how many pieces, elements of the largest.

        The words are those of the table, so that nothing is made anew: every ctypes object is announced to the audit
        hooks of the program. The caller holds the lock.
        """
        for words, parameter, count, most, sources, targets in self._launches:
            for at, number, apart in sources:
                words[at] = addresses[number] + apart
            for at, offset in targets:
                words[at] = first + offset
            yield parameter, count, most

    def filled(self, addresses: Sequence[int], first: int) -> tuple[list[Piece], list[int]]:
        """The pieces for tensors at these addresses, and where they go."""
        pieces = [
            piece if origin is None or not piece.source else piece._replace(source=addresses[origin[0]] + origin[1])
            for piece, origin in zip(self._pieces, self._origins)
        ]
        return pieces, [first + offset for offset in self._offsets]


def _words(pieces: Sequence[Piece], places: Sequence[int]) -> tuple[Any, int]:
    """What the kernel is told about some pieces, and how many elements the largest has."""
    words, most = [len(pieces)], 1
    for piece, place in zip(pieces, places):
        count = piece.elements
        most = max(most, count)
        words += (piece.source, place, count, piece.itemsize | len(piece.dims) << 8)
        for size, stride, index in reversed(piece.dims):
            words += (size, stride, 0 if index is None else index.data_ptr())
        words += _UNUSED * (MAX_DIMS - len(piece.dims))
    return _Words(*words), most


def _parameter(words: Any) -> Any:
    """The parameters of a launch: one, which lies at these words; they must live as long as it."""
    found: Any = (ctypes.c_void_p * 1)(ctypes.addressof(words))
    found.words = words
    return found


class Gather:
    """The kernel on one GPU."""

    def __init__(self, index: int, function: int) -> None:
        self.index, self._function = index, function
        driver = ctypes.PyDLL("libcuda.so.1")  # keeps the GIL
        address, number = ctypes.c_void_p, ctypes.c_uint
        driver.cuLaunchKernel.argtypes = [address, *[number] * 7, address, address, address]
        self._launch = driver.cuLaunchKernel

    def __call__(self, pieces: Sequence[Piece], places: Sequence[int]) -> bool:
        """Write each piece to its address, on the current stream; False where that cannot be done."""
        if cuda_device() != self.index or any(len(p.dims) > MAX_DIMS for p in pieces):
            return False
        stream = cuda_stream(self.index)
        for first in range(0, len(pieces), _MAX_PIECES):
            some = pieces[first : first + _MAX_PIECES]
            words, most = _words(some, places[first:])
            if not self._run(_parameter(words), most, len(some), stream):
                return False
        return True

    def again(self, table: Table, addresses: Sequence[int], first: int) -> bool:
        """Make a launch again for tensors at these addresses, to memory that begins at `first`."""
        if cuda_device() != self.index:
            return False
        stream = cuda_stream(self.index)
        with table.lock:
            for parameter, count, most in table.launches(addresses, first):
                if not self._run(parameter, most, count, stream):
                    return False
        return True

    def _run(self, parameter: Any, most: int, count: int, stream: int) -> bool:
        blocks = min(-(-most // _THREADS), _MAX_BLOCKS)
        return not self._launch(self._function, blocks, count, 1, _THREADS, 1, 1, 0, stream, parameter, None)


@functools.cache
def gather_on(index: int) -> Gather | None:
    """The kernel on a GPU; None where it cannot be compiled."""
    try:
        function = Kernels(index, "gather", 1).in_cuda("slices", [_TABLE_BYTES])
        return None if function is None else Gather(index, function)
    except Exception:  # no such driver
        return None


def piece_of(tensor: Tensor, index: Sequence[Tensor | None]) -> Piece:
    """The elements of a strided tensor at some places along each dimension (`piece_of(x, (rows, None))`)."""
    size = tensor.element_size()
    dims: list[Any] = []
    for length, stride, places in zip(tensor.shape, tensor.stride(), index):
        if places is not None:
            dims.append((places.numel(), stride * size, places))
        elif dims and dims[-1][2] is None and dims[-1][1] == stride * size * length:
            dims[-1] = (dims[-1][0] * length, stride * size, None)  # the two are one
        else:
            dims.append((length, stride * size, None))
    return Piece(tensor.data_ptr(), size, dims)


def dense_piece(address: int, itemsize: int, count: int) -> Piece:
    """Elements that lie together; zeros where the address is 0 (`dense_piece(x.data_ptr(), 4, x.numel())`)."""
    return Piece(address, itemsize, [(count, itemsize, None)])
