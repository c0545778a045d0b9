"""Fingerprints of tensors: eight random projections, computed where the tensor is, the same number on every device.

The weight of an element depends on its place in the tensor alone, counted in logical order, so the layout does not
matter and an exchange of elements shows. The difference of two prints is the print of the difference: its size is about
the distance of the tensors, so rounding can be told from an error. The prints of the parts of a tensor, each taken at
its place in the whole, add up to that of the whole.

Sums are exact. Elements are rounded to a grid that is fine enough for 34 to 41 bits below the largest one, and integers
add up to the same number in any order: in float64 below 2**53, then in int64. NaN and Inf count as 0 and are counted.
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

_BLOCK: Final = 256
_LARGEST: Final = 15  # weights are odd numbers up to it, of either sign
POWER: Final = sum(k * k for k in range(1, _LARGEST + 1, 2)) / 8.0  # mean square of a weight
_WIDTH: Final = PROJECTIONS + 1  # and the plain sum
_HOST: Final = frozenset({"cpu", "soft"})  # computed by the CPU, whose memory it is
_MAX_WAITING: Final = 512


def _hashed(numbers: Any) -> Any:
    """splitmix64 of each number."""
    with np.errstate(over="ignore"):
        z = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def weights() -> Any:
    """The weights of the 256 elements of a block, for each projection; the last column is for the plain sum."""
    bits = _hashed(np.arange(_BLOCK * PROJECTIONS)).reshape(_BLOCK, PROJECTIONS)
    size = (bits & np.uint64(7)).astype(np.int64) * 2 + 1
    sign = 1 - 2 * ((bits >> np.uint64(40)) & np.uint64(1)).astype(np.int64)
    return np.concatenate([size * sign, np.ones((_BLOCK, 1), np.int64)], axis=1)


def signs(level: int) -> Any:
    """The signs of 256 blocks of one level, for each projection."""
    bits = _hashed(np.arange(_BLOCK * PROJECTIONS) + (level + 1) * 1_000_003).reshape(_BLOCK, PROJECTIONS)
    sign = 1 - 2 * ((bits >> np.uint64(40)) & np.uint64(1)).astype(np.int64)
    return np.concatenate([sign, np.ones((_BLOCK, 1), np.int64)], axis=1)


_tables: dict[Any, Tensor] = {}


def _table(level: int, device: torch.device) -> Tensor:
    found = _tables.get((level, device))
    if found is None:
        made = torch.from_numpy(weights()).double() if level == 0 else torch.from_numpy(signs(level))
        found = _tables[level, device] = made.to(device)
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
        x = x.to(torch.float64)
        if whole is not None and tuple(whole) != tuple(x.shape):
            padded = x.new_zeros(tuple(whole))
            padded[tuple(slice(start, start + size) for start, size in zip(at, x.shape))] = x
            counted, x = x, padded
        else:
            counted = x
        return _of_flat(x.reshape(-1), counted.reshape(-1))


def _of_flat(x: Tensor, counted: Tensor) -> Tensor:
    count = x.numel()
    if not count or not counted.numel():
        return torch.zeros(_WIDTH + 5, dtype=torch.float64, device=x.device)
    nan = counted.isnan().sum()
    inf = counted.isinf().sum()
    x, counted = (torch.nan_to_num(part, 0.0, 0.0, 0.0) for part in (x, counted))
    low, high = torch.aminmax(counted)
    norm = torch.linalg.vector_norm(counted)
    levels = max(math.ceil(math.log(count, _BLOCK)), 1)
    bits = min(41, 62 - 12 - 8 * (levels - 1))
    largest = torch.maximum(low.abs(), high.abs()).clamp(min=1e-290, max=1e290)
    exponent = bits - ((largest.view(torch.int64) >> 52) - 1022)
    exponent = exponent.clamp(-1000, 1000)
    blocks = -(-count // _BLOCK)
    # by a power of two: exact
    grid = torch.nn.functional.pad((x * _power(exponent)).round_(), (0, blocks * _BLOCK - count)).view(blocks, _BLOCK)
    sums = (grid @ _table(0, x.device)).to(torch.int64)
    level = 1
    while blocks > 1:
        parts = -(-blocks // _BLOCK)
        sums = torch.nn.functional.pad(sums, (0, 0, 0, parts * _BLOCK - blocks)).view(parts, _BLOCK, _WIDTH)
        sums = (sums * _table(level, x.device)).sum(1)
        blocks, level = parts, level + 1
    projections = sums.view(_WIDTH).double() * _power(-exponent)
    return torch.cat([projections, torch.stack([norm, low, high, nan.double(), inf.double()])])


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
