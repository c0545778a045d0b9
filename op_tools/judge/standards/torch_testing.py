"""The standard `torch`: the tolerances of `torch.testing.assert_close`."""

from __future__ import annotations

from typing import Final

import torch

from ...view.rows import Row
from ..pair import Pair, decided

_TOLERANCE: Final[dict[torch.dtype, tuple[float, float]]] = {  # atol, rtol of torch.testing
    torch.float16: (1e-5, 1e-3),
    torch.bfloat16: (1e-5, 1.6e-2),
    torch.float32: (1e-5, 1.3e-6),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1e-5, 1.3e-6),
    torch.complex128: (1e-7, 1e-7),
}


def judge(row: Row, pair: Pair) -> Row:
    """All elements must be within the tolerance; allclose, atol and rtol become those of this standard."""
    atol, rtol = _TOLERANCE.get(pair.device.dtype, (0.0, 0.0))
    left, right = pair.sides.left, pair.sides.right
    close = torch.isclose(left, right, atol=atol, rtol=rtol, equal_nan=True)
    row = row._replace(allclose=bool(close.all()), atol=atol, rtol=rtol)
    why = f"{int((~close).sum())} elements outside torch.testing's tolerance"
    return decided(row, row.allclose, why, None if row.allclose else atol + rtol * right.abs())
