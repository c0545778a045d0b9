"""Random numbers of DTensors: each rank draws its part of what one device would draw.

PyTorch reads the state of a device's generator as the seed and the offset of a Philox generator, 16 bytes, and moves
the offset to where the rank's part begins. A soft generator draws from the CPU's, whose state is a whole table; the
same moves are made by drawing as many numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from . import native


class State:
    """Stands for ``torch.distributed.tensor._random._PhiloxState``: an offset counts from the state it began with."""

    def __init__(self, state: torch.Tensor) -> None:
        self._base = state.to("cpu")
        self._offset = torch.zeros(1, dtype=torch.int64)

    @property
    def state(self) -> torch.Tensor:
        moved: torch.Tensor = native().advanced_state(self._base, int(self._offset))
        return moved

    @property
    def offset(self) -> torch.Tensor:
        return self._offset

    @offset.setter
    def offset(self, offset: torch.Tensor) -> None:
        self._offset = offset.reshape(1).to(torch.int64)


def install(module: Any) -> None:
    """Let DTensors use that state where theirs would not fit (``torch.distributed.tensor._random``)."""
    original = getattr(module, "_PhiloxState", None)
    if original is None:
        return

    def state(given: torch.Tensor) -> Any:
        return original(given) if given.numel() == 16 else State(given)

    module._PhiloxState = state
