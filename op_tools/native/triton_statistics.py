"""The kernel behind `statistics.FusedBatch`. Imported only where Triton is installed."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = tl.constexpr(1024)


@triton.jit(do_not_specialize=["data", "rows", "numel", "share"])
def _statistics(data, rows, numel, share):  # type: ignore[no-untyped-def]
    """Count, mean, squared distances, infinities, minimum and maximum of one share of the elements."""
    program = tl.program_id(0).to(tl.int64)
    begin = program * share
    end = tl.minimum(begin + share, numel)
    lanes = tl.arange(0, BLOCK)
    if data.dtype.element_ty == tl.float64:
        count = tl.zeros((BLOCK,), tl.float64)
    else:
        count = tl.zeros((BLOCK,), tl.float32)
    mean = count
    distances = count
    infinite = count
    nans = count
    low = count + float("inf")
    high = count - float("inf")
    while begin < end:
        there = begin + lanes < end
        value = tl.load(data + begin + lanes, mask=there, other=0.0).to(count.dtype)
        count = tl.where(there, count + 1, count)
        step = value - mean
        moved = mean + step / tl.maximum(count, 1.0)
        distances = tl.where(there, distances + step * (value - moved), distances)
        mean = tl.where(there, moved, mean)
        infinite = tl.where(there & (tl.abs(value) == float("inf")), infinite + 1, infinite)
        nans = tl.where(there & (value != value), nans + 1, nans)
        low = tl.where(there & (value < low), value, low)
        high = tl.where(there & (value > high), value, high)
        begin += BLOCK
    total = tl.sum(count, axis=0)
    whole = tl.sum(count * mean, axis=0) / tl.maximum(total, 1.0)
    apart = mean - whole
    squares = tl.sum(distances + count * apart * apart, axis=0)
    strange = tl.sum(nans, axis=0) > 0
    nothing = whole * 0 + float("nan")
    row = rows + program * 6
    tl.store(row, total)
    tl.store(row + 1, whole)
    tl.store(row + 2, squares)
    tl.store(row + 3, tl.sum(infinite, axis=0))
    tl.store(row + 4, tl.where(strange, nothing, tl.min(low, axis=0)))
    tl.store(row + 5, tl.where(strange, nothing, tl.max(high, axis=0)))


def compiled(dtype: torch.dtype, device: str) -> Any:
    """The kernel for one dtype, ready to be launched as `kernel[grid](data, rows, numel, share)` with addresses."""
    data = torch.empty(1, dtype=dtype, device=device)
    rows = torch.empty(1, dtype=torch.float64, device=device)
    large = 1 << 40  # counts of elements may need 64 bits
    return _statistics.warmup(data, rows, large, large, grid=(1,), num_warps=8)
