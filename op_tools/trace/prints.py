"""Fingerprints of tensors: eight random projections, computed where the tensor is, the same number on every device.

The weight of an element depends on its place in the tensor alone, counted in logical order, so the layout does not
matter and an exchange of elements shows. The difference of two prints is the print of the difference: its size is about
the distance of the tensors, so rounding can be told from an error. The prints of the parts of a tensor, each taken at
its place in the whole, add up to that of the whole.

Elements are taken in chunks of 8192. In a chunk they are rounded to a grid of 36 bits below its largest one: whole
numbers whose sums stay below 2**53, so they are exact in any order. The rows of chunks are added up in an order that is
the same everywhere. NaN and Inf count as 0 and are counted; so do numbers from 2**127 on, as Inf: masks of attention
have them, and the other elements would not show beside them. `native/csrc/trace_prints.cu` is the same in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from ..call.description import Tensor
from ..call.devices import quiet
from .format import PROJECTIONS

_LANES: Final = 256
_ROWS: Final = 32  # of lanes in a chunk
CHUNK: Final = _LANES * _ROWS
_GRID_BITS: Final = 36
_CHUNK_SIGNS: Final = 1_000_003  # where the hashes of chunks begin
_LARGEST: Final = 15  # weights are odd numbers up to it, of either sign
POWER: Final = sum(k * k for k in range(1, _LARGEST + 1, 2)) / 8.0  # mean square of a weight
_WIDTH: Final = PROJECTIONS + 1  # and the plain sum
_HUGE: Final = 2.0**127  # from here on a number counts as Inf
_HOST: Final = frozenset({"cpu", "soft"})  # computed by the CPU, whose memory it is
_MAX_WAITING: Final = 512
_SLAB: Final = 1 << 24  # elements of a whole that are looked at together


def _hashed(numbers: Any) -> Any:
    """splitmix64 of each number."""
    with np.errstate(over="ignore"):
        z = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _signs(first: int, count: int) -> Any:
    """Signs for some numbers, for each projection; the last column is for the plain sum."""
    bits = _hashed(np.arange(first, first + count))[:, None] >> np.arange(PROJECTIONS, dtype=np.uint64)
    sign = 1.0 - 2.0 * (bits & np.uint64(1)).astype(np.float64)
    return np.concatenate([sign, np.ones((count, 1))], axis=1)


def weights() -> Any:
    """The weights of the elements of a chunk, for each projection; the last column is for the plain sum."""
    bits = _hashed(np.arange(_LANES))[:, None] >> (4 * np.arange(PROJECTIONS, dtype=np.uint64)) & np.uint64(15)
    size = (2.0 * (bits & np.uint64(7)) + 1.0) * np.where(bits & np.uint64(8), -1.0, 1.0)
    lanes = np.concatenate([size, np.ones((_LANES, 1))], axis=1)
    return (_signs(_LANES, _ROWS)[:, None] * lanes).reshape(CHUNK, _WIDTH)


_tables: dict[Any, Tensor] = {}


def _table(device: torch.device) -> Tensor:
    found = _tables.get(device)
    if found is None:
        found = _tables[device] = torch.from_numpy(weights()).to(device)
    return found


def _chunk_signs(first: int, chunks: int, device: torch.device) -> Tensor:
    found = _tables.get((device, first, chunks))
    if found is None:
        found = torch.from_numpy(_signs(_CHUNK_SIGNS + first, chunks)).to(device)
        if first == 0 and chunks == 1:
            _tables[device, first, chunks] = found
    return found


def fingerprint(tensor: Tensor, whole: Sequence[int] | None = None, at: Sequence[int] = ()) -> Tensor:
    """The print of a tensor, or of a part that lies `at` some place in a tensor of shape `whole`; nobody waits for it.

    >>> x = torch.randn(4, 6)
    >>> torch.equal(fingerprint(x), fingerprint(x.t().contiguous().t()))
    True
    >>> parts = fingerprint(x[:, :3], (4, 6), (0, 0)) + fingerprint(x[:, 3:], (4, 6), (0, 3))
    >>> torch.allclose(parts[:8], fingerprint(x)[:8])
    True
    """
    with quiet(), torch.no_grad():
        x = tensor.detach()
        if x.device.type in _HOST:
            x = x.cpu()
        if x.is_quantized:
            x = x.dequantize()
        if x.is_complex():
            x = torch.view_as_real(x.resolve_conj())
            whole = None if whole is None else (*whole, 2)
            at = (*at, 0) if at else at
        first = 0 if whole is None or tuple(whole) == tuple(x.shape) else first_place(x.shape, whole, at)
        if first is None:
            assert whole is not None
            return _of_part(x, tuple(whole), tuple(at))
        return _of_stretch(x.to(torch.float64).reshape(-1), first)


def stretch_print(tensor: Tensor, first: int) -> Tensor:
    """The print of a tensor whose elements follow each other from place `first` of a whole on.

    >>> x = torch.randn(5, 6)
    >>> torch.equal(stretch_print(x[2:], 12), fingerprint(x[2:], (5, 6), (2, 0)))
    True
    """
    if not first:
        return fingerprint(tensor)
    return fingerprint(tensor.reshape(-1), (first + tensor.numel(),), (first,))


def first_place(shape: Sequence[int], whole: Sequence[int], at: Sequence[int]) -> int | None:
    """Where the first element of a part lies, if the others follow it in the whole; None if there are gaps.

    >>> first_place((2, 6), (4, 6), (2, 0)), first_place((4, 3), (4, 6), (0, 3))
    (12, None)
    """
    d = next((d for d, (mine, all_of_it) in enumerate(zip(shape, whole)) if mine != 1 or all_of_it == 1), len(shape))
    if tuple(shape[d + 1 :]) != tuple(whole[d + 1 :]):
        return None
    place = 0
    for size, start in zip(whole, at):
        place = place * size + start
    return place


def _of_part(x: Tensor, whole: tuple[int, ...], at: tuple[int, ...]) -> Tensor:
    """The print of a part with gaps, from slabs that are whole: a bounded number of elements at a time."""
    width = math.prod(whole[1:])
    rows = max(1, _SLAB // max(1, width))
    place = (slice(None), *(slice(start, start + size) for start, size in zip(at[1:], x.shape[1:])))
    found = None
    for start in range(0, max(1, x.shape[0]), rows):
        mine = x[start : start + rows]
        slab = torch.zeros((mine.shape[0], *whole[1:]), dtype=torch.float64, device=x.device)
        own = slab[place]
        own.copy_(mine)
        one = _of_stretch(slab.view(-1), (at[0] + start) * width, counted=own.reshape(-1))
        found = one if found is None else _added(found, one)
    assert found is not None
    return found


def _added(one: Tensor, two: Tensor) -> Tensor:
    """The print of two parts together."""
    found, norm, low, high = one + two, _WIDTH, _WIDTH + 1, _WIDTH + 2
    found[norm] = (one[norm] * one[norm] + two[norm] * two[norm]).sqrt()
    found[low], found[high] = one[low].minimum(two[low]), one[high].maximum(two[high])
    return found


def _of_stretch(x: Tensor, first: int, counted: Tensor | None = None) -> Tensor:
    """The print of elements from place `first` of the whole on; `counted` are those of them that are of the part."""
    count = x.numel()
    counted = x if counted is None else counted
    if not count or not counted.numel():
        return torch.zeros(_WIDTH + 5, dtype=torch.float64, device=x.device)
    low, high = torch.aminmax(counted)
    if x.is_cpu and low.item() > -_HUGE and high.item() < _HUGE:
        nan = inf = low.new_zeros(())
    else:
        nan, inf = counted.isnan().sum(), (counted.abs() >= _HUGE).sum()
        x, counted = (torch.where(part.abs() < _HUGE, part, 0.0) for part in (x, counted))
        low, high = torch.aminmax(counted)
    chunk, before = divmod(first, CHUNK)
    chunks = -(-(before + count) // CHUNK)
    size = CHUNK if chunks > 1 else -(-(before + count) // _LANES) * _LANES
    grid = torch.nn.functional.pad(x, (before, chunks * size - before - count)).view(chunks, size)
    squares = _in_order((grid * grid).view(chunks, -1, _LANES).transpose(0, 1).unsqueeze(-1))
    largest = grid.abs().amax(1, keepdim=True).clamp(min=1e-290, max=1e290)
    exponent = (_GRID_BITS - ((largest.view(torch.int64) >> 52) - 1022)).clamp(-1000, 1000)
    # by a power of two: exact
    rows = ((grid * _power(exponent)).round_() @ _table(x.device)[:size]) * _power(-exponent)
    rows = torch.cat([rows, squares], 1)
    rows[:, :_WIDTH] *= _chunk_signs(chunk, chunks, x.device)
    lane = chunk % _LANES
    padded = torch.nn.functional.pad(rows, (0, 0, lane, -(lane + chunks) % _LANES)).view(-1, 1, _LANES, _WIDTH + 1)
    found = _in_order(padded).view(-1) if chunks > 1 else rows.view(-1)
    if found.is_cpu:
        found[-1] = math.sqrt(found[-1].item())  # PyTorch's root on the CPU may be off by one in the last bit
    else:
        found[-1].sqrt_()
    return torch.cat([found, torch.stack([low, high, nan.double(), inf.double()])])


def _in_order(parts: Tensor) -> Tensor:
    """Sums of (rows, n, lanes, width) over rows and lanes, one order for all devices: rows, then lanes and warps."""
    total = parts[0].clone()
    for row in parts[1:]:
        total += row
    n, _, width = total.shape
    total = total.view(n, _LANES // 32, 32, width)
    for half in (16, 8, 4, 2, 1):
        total = total[:, :, :half] + total[:, :, half:]
    total = total[:, :, 0]
    for half in (4, 2, 1):
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def _power(exponent: Tensor) -> Tensor:
    """2 to an integer power, from its bits: exact on every device."""
    return ((exponent + 1023) << 52).view(torch.float64)


def distance(first: Any, second: Any) -> Any:
    """Estimated distance (L2) of tensors, from rows of their prints; right to about 25 %.

    >>> x, y = torch.randn(1000, 2).double().unbind(1)
    >>> bool(0.3 < distance(fingerprint(x).numpy(), fingerprint(y).numpy()) / (x - y).norm() < 3)
    True
    """
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.asarray(first)[..., :PROJECTIONS] - np.asarray(second)[..., :PROJECTIONS]
        return np.sqrt((apart * apart).mean(-1) / POWER)


def smallest_step(first: Any, second: Any) -> float:
    """The least by which elements differ, where few do; 0 where many differ or none.

    Of one element that moved by d, each projection moved by d times its weight, a small whole number.

    >>> x = torch.linspace(1.0, 2.0, 500).double(); y = x.clone(); y[7] += 0.5
    >>> abs(round(smallest_step(fingerprint(x).numpy(), fingerprint(y).numpy()), 3))
    0.5
    """
    apart = np.asarray(first)[:PROJECTIONS] - np.asarray(second)[:PROJECTIONS]
    largest = float(np.abs(apart).max())
    if not largest or not math.isfinite(largest):
        return 0.0
    for divisor in range(1, 2 * _LARGEST + 1):  # the largest of them is this many steps
        ratios = apart / (largest / divisor)
        if float(np.abs(ratios - np.round(ratios)).max()) < 1e-6:
            return largest / divisor
    return 0.0


class Batch:
    """Prints on their way to the host: many small results, one copy."""

    def __init__(self) -> None:
        self._waiting: dict[torch.device, tuple[list[tuple[int, int]], list[Tensor]]] = {}
        self.count = 0

    def add(self, number: int, part: int, found: Tensor) -> bool:
        """Take the print of a tensor; True when it is time to land."""
        keys, results = self._waiting.setdefault(found.device, ([], []))
        keys.append((number, part))
        results.append(found)
        self.count += 1
        return self.count >= _MAX_WAITING

    def land(self) -> list[tuple[Any, ...]]:
        """Rows of the table of prints; waits for the device."""
        rows: list[tuple[Any, ...]] = []
        for keys, results in self._waiting.values():
            with quiet():
                values = torch.stack(results).cpu().tolist()
            rows += [(number, *found, part) for (number, part), found in zip(keys, values)]
        self._waiting, self.count = {}, 0
        return rows
