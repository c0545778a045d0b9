"""The kernel behind `fingerprints.OnGpu`. Imported only where Triton is installed."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = tl.constexpr(1024)


@triton.jit(do_not_specialize=["data", "rows", "count", "share"])
def _fingerprint(data, rows, count, share):  # type: ignore[no-untyped-def]
    """Both sums over one share of the words; `fingerprints.sums` says what they are."""
    program = tl.program_id(0).to(tl.int64)
    begin = program * share
    end = tl.minimum(begin + share, count)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    first = tl.zeros((BLOCK,), tl.uint64)
    second = tl.zeros((BLOCK,), tl.uint64)
    while begin < end:
        there = begin + lanes < end
        word = tl.load(data + begin + lanes, mask=there, other=0).to(tl.int64).to(tl.uint64, bitcast=True)
        place = (begin + lanes + 1).to(tl.uint64, bitcast=True)
        z = word ^ (place * 0x9E3779B97F4A7C15)
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        z = z ^ (z >> 31)
        other = (z ^ (z >> 29)) * 0xD6E8FEB86659FD93
        first = tl.where(there, first + z, first)
        second = tl.where(there, second + other, second)
        begin += BLOCK
    row = rows + program * 2
    tl.store(row, tl.sum(first.to(tl.int64, bitcast=True), axis=0))
    tl.store(row + 1, tl.sum(second.to(tl.int64, bitcast=True), axis=0))


def compiled(dtype: torch.dtype, device: str) -> Any:
    """The kernel for words of one dtype, ready to be launched as `kernel[grid](data, rows, count, share)`."""
    data = torch.empty(1, dtype=dtype, device=device)
    rows = torch.empty(2, dtype=torch.int64, device=device)
    large = 1 << 40  # counts of words may need 64 bits
    return _fingerprint.warmup(data, rows, large, large, grid=(1,), num_warps=8)
