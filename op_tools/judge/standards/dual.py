"""The standard `dual`: first the cosine, then how many elements have a small relative error."""

from __future__ import annotations

import torch

from ...view.rows import Row
from ..pair import Pair, decided


def judge(row: Row, pair: Pair) -> Row:
    """The cosine must exceed 0.99; then the share of elements with a relative error below 1/N must exceed 1 - 1/N."""
    if not pair.device.is_floating_point():
        return decided(row, row.max_abs_diff == 0, "whole numbers differ")
    if row.cosine <= 0.99:
        return decided(row, False, f"cosine {row.cosine:.6f}")
    left, right = pair.sides.left, pair.sides.right
    if bool((left.isfinite() != right.isfinite()).any()):
        return decided(row, False, "NaN or infinity in other places")
    if row.max_abs_diff < 1e-3:
        return row
    n = 100 if pair.device.dtype in (torch.float16, torch.bfloat16) else 1000
    relative = ((left - right).abs() / right.abs()).nan_to_num(nan=0.0)
    share = float((relative < 1 / n).double().mean())
    return decided(row, share > 1 - 1 / n, f"only {share:.4%} of the elements are within 1/{n}")
