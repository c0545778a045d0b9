"""Fingerprints of memory: 128 bits that tell different contents apart, computed on the device that holds them.

What a tensor holds is known by its bytes alone. Version counters, addresses and object identities are not asked: writes
through `.data`, raw pointers, collectives and a reused allocation change the bytes and nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from ..call.devices import module_of, quiet
from .kernels import Kernels

Tensor = torch.Tensor
Span = tuple[Tensor, int, int]  # bytes of the storage that a tensor lies in: first and last

_WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_STEP: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # constants of splitmix64, as signed numbers
_FACTORS: Final = tuple(
    f - (1 << 64) if f >> 63 else f for f in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
)
_ALIGNMENT: Final = 8  # of memory that is read as words
_CHUNK: Final = 1 << 20  # words that PyTorch's operators take at once
_HOST_DEVICES: Final = frozenset({"cpu", "soft", "meta"})  # their memory is hashed by the host

_ROWS: Final = 16_384  # of partial sums in the buffer of a GPU
_MIN_SHARE: Final = 8_192  # words that one program of the kernel takes at least
_MAX_PROGRAMS: Final = 1_024


def of_host(buffer: Any) -> bytes:
    """The fingerprint of bytes on the host (`of_host(b"abc")`); never equal to one from a device."""
    return hashlib.sha1(buffer, usedforsecurity=False).digest()


def of_device(spans: Sequence[Span]) -> list[bytes | None]:
    """Fingerprints of memory on accelerators; waits for them. None where the host must compute it.

    >>> of_device([(torch.ones(2), 0, 8)])
    [None]
    """
    found: list[bytes | None] = [None] * len(spans)
    by_device: dict[torch.device, list[int]] = {}
    for number, (tensor, start, end) in enumerate(spans):
        if end > start and not tensor.is_cpu and not (tensor.untyped_storage().data_ptr() + start) % _ALIGNMENT:
            by_device.setdefault(tensor.device, []).append(number)
    for device, numbers in by_device.items():
        method = _method(device)
        if method is not None:
            for number, digest in zip(numbers, method([spans[number] for number in numbers])):
                found[number] = digest
    return found


def sums(copies: Sequence[Tensor]) -> list[Tensor]:
    """What `from_sums` needs of copies that `of_device` has fingerprints of; still on the device, nobody waits."""
    found: list[Tensor] = []
    for copy in copies:
        method = _method(copy.device)
        assert method is not None
        found.append(method.sums(copy))
    return found


def from_sums(rows: Any, nbytes: int) -> bytes:
    """The fingerprint of so many bytes, from the bytes of their sums on the host."""
    first, second = np.frombuffer(rows, dtype=np.uint64).reshape(-1, 2).sum(axis=0, dtype=np.uint64)
    return _packed(int(first), int(second), nbytes)


def fits(digest: bytes, flat: Tensor) -> bool:
    """Whether bytes on the host are those that a device has computed this fingerprint of."""
    return ByOperators(torch.device("cpu"))([(flat, 0, flat.nbytes)]) == [digest]


@functools.cache
def _method(device: torch.device) -> OnGpu | ByOperators | None:
    """The fastest way that computes the right fingerprints on a device; None where there is none."""
    if device.type in _HOST_DEVICES:
        return None
    makers: tuple[Callable[[torch.device], OnGpu | ByOperators], ...] = (OnGpu, ByOperators)
    for make in makers:
        try:
            with quiet():
                method = make(device)
                if _agrees(method, device):
                    return method
            BROKEN[str(device)] = "the fingerprints are not those of the CPU"
        except Exception as error:  # no Triton, another Triton, no 64-bit integers on the device
            if not isinstance(error, ImportError):
                BROKEN[str(device)] = f"{type(error).__name__}: {str(error)[:200]}"
    return None


BROKEN: Final[dict[str, str]] = {}  # devices where a fast way does not work, and why


def _agrees(method: OnGpu | ByOperators, device: torch.device) -> bool:
    """Whether a method finds the fingerprints that the CPU finds, for words of every size."""
    host = torch.arange(40_003 * 8, dtype=torch.int64).mul_(0x2545F4914F6CDD1D).view(torch.uint8)
    there = host.to(device)
    spans = [(0, 320_000), (64, 320_020), (0, 65_546), (128, 33_335), (64, 65)]
    found = method([(there, start, end) for start, end in spans])
    return found == ByOperators(torch.device("cpu"))([(host, start, end) for start, end in spans])


def _words(nbytes: int) -> tuple[int, torch.dtype]:
    """The largest words that so many bytes are made of: their size and dtype."""
    return next((size, dtype) for size, dtype in _WORDS if not nbytes % size)


def _packed(first: int, second: int, nbytes: int) -> bytes:
    mask = (1 << 64) - 1
    return b"".join([(number & mask).to_bytes(8, "little") for number in (first, second, nbytes)])


class ByOperators:
    """Fingerprints by PyTorch's operators on 64-bit integers, on any device that has them.

    Of word `x` at place `i`, `z = splitmix64(x ^ (i + 1) * step)`; the fingerprint is the sum of all `z` and the sum of
    all `(z ^ z >> 29) * factor`, modulo 2**64, and the number of bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: Tensor | None = None

    def __call__(self, spans: Sequence[Span]) -> list[bytes]:
        with quiet():
            found = torch.stack([self._sums(*span) for span in spans]).tolist()
        return [_packed(first, second, end - start) for (first, second), (_, start, end) in zip(found, spans)]

    def sums(self, copy: Tensor) -> Tensor:
        with quiet():
            return self._sums(copy, 0, copy.nbytes)

    def _sums(self, tensor: Tensor, start: int, end: int) -> Tensor:
        size, dtype = _words(end - start)
        count = (end - start) // size
        words = torch.empty(0, dtype=dtype, device=self._device)
        words.set_(tensor.untyped_storage(), start // size, (count,), (1,))
        if self._places is None:
            self._places = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=self._device).mul_(_STEP)
        total = torch.zeros(2, dtype=torch.int64, device=self._device)
        for place in range(0, count, _CHUNK):
            some = words[place : place + _CHUNK].to(torch.int64)
            z = (self._places[: some.numel()] + _signed(place * _STEP)).bitwise_xor_(some)
            for shift, factor in ((30, _FACTORS[0]), (27, _FACTORS[1]), (31, None), (29, _FACTORS[2])):
                shifted = (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # of signed numbers it copies the sign
                z.bitwise_xor_(shifted)
                if factor is not None:
                    z.mul_(factor)
                else:
                    total[0] += z.sum()
            total[1] += z.sum()
        return total


def _signed(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


class OnGpu:
    """The same by one kernel per tensor, which leaves rows of partial sums; one small copy brings them to the host."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ImportError
        self._kernels = Kernels(device.index, "fingerprints", arguments=4)
        self._device = device
        self._rows = torch.empty((_ROWS, 2), dtype=torch.int64, device=device)
        self._host = torch.empty((_ROWS, 2), dtype=torch.int64, pin_memory=True)
        self._lock = threading.Lock()

    def __call__(self, spans: Sequence[Span]) -> list[bytes]:
        found: list[bytes] = []
        batch: list[tuple[int, int]] = []  # first row, bytes
        free, address = 0, self._rows.data_ptr()
        with self._lock, torch.cuda.device(self._device):
            for tensor, start, end in spans:
                if free > _ROWS - _MAX_PROGRAMS:
                    found += self._collect(batch, free)
                    batch, free = [], 0
                batch.append((free, end - start))
                place = tensor.untyped_storage().data_ptr() + start
                free += self._launch(place, end - start, address + 16 * free)
            return found + self._collect(batch, free)

    def sums(self, copy: Tensor) -> Tensor:
        with quiet(), torch.cuda.device(self._device):
            size, _ = _words(copy.nbytes)
            rows = torch.empty((_programs(copy.nbytes // size), 2), dtype=torch.int64, device=self._device)
            self._launch(copy.untyped_storage().data_ptr(), copy.nbytes, rows.data_ptr())
        return rows

    def _launch(self, data: int, nbytes: int, rows: int) -> int:
        """Start the kernel; returns how many rows it will write."""
        size, dtype = _words(nbytes)
        count = nbytes // size
        programs = _programs(count)
        self._kernels.launch(dtype, programs)(self._kernels.stream(), data, rows, count, -(-count // programs))
        return programs

    def _collect(self, batch: list[tuple[int, int]], used: int) -> list[bytes]:
        with quiet():
            self._host[:used].copy_(self._rows[:used], non_blocking=True)
        module_of("cuda").current_stream(self._device).synchronize()
        rows = self._host[:used].numpy()
        ends = [first for first, _ in batch[1:]] + [used]
        return [from_sums(rows[first:end].tobytes(), nbytes) for (first, nbytes), end in zip(batch, ends)]


def _programs(count: int) -> int:
    return min(-(-count // _MIN_SHARE), _MAX_PROGRAMS)
