"""The standard `seed`: `torch.allclose` with the tolerances of the documented tables, or with those that users set."""

from __future__ import annotations

from typing import Final

import torch

from ...view.rows import Row
from ..pair import Pair, decided

TOLERANCE: Final = {
    torch.float16: 1e-4,
    torch.bfloat16: 1e-3,
    torch.float32: 1e-5,
    torch.float64: 1e-8,
}  # atol and rtol
OTHER_TOLERANCE: Final = 1e-3  # of other dtypes
NUMBER_TOLERANCE: Final = 1e-6  # of what is not a tensor


def judge(row: Row, pair: Pair) -> Row:
    """The verdict is the column allclose."""
    why = f"allclose with {'the tolerance that was set' if pair.tolerance_set else 'the seed tolerance'}"
    return decided(row, row.allclose, why, None if row.allclose else row.atol + row.rtol * pair.sides.right.abs())
