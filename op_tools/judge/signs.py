"""Which way each rounding of a probe goes: random signs, arranged so that few probes suffice."""

from __future__ import annotations

import threading
from typing import Final

import torch

Tensor = torch.Tensor

PROBES: Final = 16  # a power of two
# Columns of the matrix of turns. In column 0 all roundings go the same way: it comes last, since the first few probes
# are often the only ones.
_ORDER: Final = (15, 5, 10, 3, 12, 6, 9, 1, 2, 4, 8, 7, 11, 13, 14, 0)
_LARGEST_POOL: Final = 1 << 23
_PROBE_STEP: Final = 7919
_SIZE_STEP: Final = 104729
_ONE: Final = torch.ones((), dtype=torch.float64)


class _Pool:
    """Random signs, drawn once: each use takes a stretch of them that begins elsewhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._signs = self._draw(1 << 16)

    def signs(self, numel: int, start: int) -> Tensor:
        signs = self._signs
        length = signs.numel()
        if numel > length // 2 and length < _LARGEST_POOL:
            with self._lock:
                wanted = min(_LARGEST_POOL, 1 << (2 * numel - 1).bit_length())
                if self._signs.numel() < wanted:
                    self._signs = self._draw(wanted)
                signs = self._signs
            length = signs.numel()
        if numel > length:
            return signs[: length - 1].repeat(1 + numel // (length - 1))[:numel]  # of odd length: no pattern
        return signs.narrow(0, start % (length - numel + 1), numel)

    @staticmethod
    def _draw(length: int) -> Tensor:
        drawn = torch.empty(length, dtype=torch.int8).random_(0, 2, generator=torch.Generator().manual_seed(2))
        return drawn.to(torch.float64).mul_(2).sub_(1)


_POOL: Final = _Pool()


class Signs:
    """Which way each rounding of one probe goes.

    Every place has its own random sign, drawn anew for each probe; every rounding turns all of them by its row of a
    Hadamard matrix. So terms of a sum go their ways independently, while over all probes the mixed terms of
    different roundings at one place cancel exactly: their mean square is the sum of the squares, without luck.
    """

    def __init__(self, probe: int) -> None:
        self._probe, self._drawn = _ORDER[probe], 0
        self._factors: dict[tuple[int, float], Tensor] = {}  # most roundings of a probe are equal in size

    def next(self, numel: int) -> tuple[Tensor, float]:
        """Signs in float64 for so many places, and the turn of one more rounding."""
        self._drawn += 1
        return _POOL.signs(numel, _PROBE_STEP * self._probe + _SIZE_STEP * numel), self._turn(self._probe)

    def coin(self) -> bool:
        """True in half of the probes, for one more choice."""
        return self.next(1)[1] > 0

    def factors(self, numel: int, by: float) -> Tensor:
        """One plus or minus `by`, for one more rounding; not to be written to."""
        signs, turn = self.next(numel)
        if not self._reusable(numel):
            return torch.add(_ONE, signs, alpha=by * turn)
        key = numel, by * turn
        if key not in self._factors:
            self._factors[key] = torch.add(_ONE, signs, alpha=by * turn)
        return self._factors[key]

    def _reusable(self, numel: int) -> bool:
        return True

    def like(self, tensor: Tensor, size: float) -> Tensor:
        """Plus or minus `size` in float64 for each element of one more rounding."""
        signs, turn = self.next(tensor.numel())
        return signs.view(tensor.shape).mul(size * turn)

    def uniform(self, tensor: Tensor) -> Tensor:
        """Numbers in [0, 1) that differ from probe to probe."""
        self._drawn += 1
        generator = torch.Generator().manual_seed(self._drawn * PROBES + self._probe)
        return torch.rand(tensor.shape, generator=generator, dtype=torch.float64)

    def _turn(self, probe: int) -> float:
        row = 1 + self._drawn % (PROBES - 1)  # the first row would turn nothing
        return 1.0 - 2.0 * ((probe & row).bit_count() % 2)


class AllSigns(Signs):
    """All probes at once, for a call on `PROBES` copies of its elements, one after the other."""

    def __init__(self) -> None:
        super().__init__(0)

    def _reusable(self, numel: int) -> bool:
        return bool(numel % PROBES)

    def next(self, numel: int) -> tuple[Tensor, float]:
        """Signs for all copies; single numbers go one way."""
        signs, turn = super().next(numel)
        if numel % PROBES:
            return signs, turn
        turns = torch.tensor([self._turn(probe) for probe in range(PROBES)], dtype=torch.float64)
        return (signs.view(PROBES, -1) * turns[:, None]).view(-1), 1.0
