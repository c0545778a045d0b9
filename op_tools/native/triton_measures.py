"""The kernel behind `device_measures`. Imported only where Triton is installed.

Numbers come as the bits of a float64: as numbers they would arrive in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = tl.constexpr(1024)
EXPONENT = tl.constexpr(0x7FF0000000000000)  # of a float64
_LARGE = 1 << 40  # counts of elements, and the bits of numbers, need 64 bits
_MEASURED = ["data", "golden", "squares", "rows", "numel", "share", "atol", "rtol", "normal"]
_OF_BOUND = ["factor", "lowest", "sigmas", "least", "of_squares", "of_result"]


@triton.jit
def _number(bits):  # type: ignore[no-untyped-def]
    return bits.to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=[*_MEASURED, *_OF_BOUND])
def _measure(  # type: ignore[no-untyped-def]
    data, golden, squares, rows, numel, share, atol, rtol, normal,
    factor, lowest, sigmas, least, of_squares, of_result,
):  # fmt: skip
    """Of one share of the elements, what csrc/measure.cpp finds in its two passes: columns, and the worst excess."""
    atol, rtol, normal = _number(atol), _number(rtol), _number(normal)
    factor, lowest, sigmas, least = _number(factor), _number(lowest), _number(sigmas), _number(least)
    of_squares, of_result = _number(of_squares), _number(of_result)
    program = tl.program_id(0).to(tl.int64)
    begin = program * share
    end = tl.minimum(begin + share, numel)
    lanes = tl.arange(0, BLOCK)
    none = tl.zeros((BLOCK,), tl.float64)
    ee, eg, gg, too_far, different, strange = none, none, none, none, none, none
    units, ulp, largest, relative, worst = none, none, none, none, none
    while begin < end:
        there = begin + lanes < end
        found = tl.load(data + begin + lanes, mask=there, other=0.0)
        exact = tl.load(golden + begin + lanes, mask=there, other=0.0)
        value = found.to(tl.float64)
        difference = value - exact
        error, size = tl.abs(difference), tl.abs(exact)
        ee += difference * difference
        eg += difference * exact
        gg += exact * exact
        scale = tl.maximum(size, normal)
        power = (scale.to(tl.int64, bitcast=True) & EXPONENT).to(tl.float64, bitcast=True)
        units = tl.maximum(units, error / scale)
        ulp = tl.maximum(ulp, error / power)
        near = exact.to(tl.float32).to(found.dtype).to(tl.float64)  # by way of float32, as PyTorch converts
        apart, length = tl.abs(value - near), tl.abs(near)
        different += tl.where(apart != 0, 1.0, 0.0)
        largest = tl.maximum(largest, apart)
        relative = tl.maximum(relative, tl.where(apart != 0, apart / length, 0.0))
        too_far += tl.where(apart - (atol + rtol * length) > 0, 1.0, 0.0)
        # without squares there is nothing at their address
        square = tl.load(squares + begin + lanes, mask=there & (of_squares > 0), other=0.0).to(tl.float64)
        variance = of_squares * square + of_result * size * size
        limit = tl.maximum(size * factor, lowest) + sigmas * tl.maximum(tl.sqrt(variance), size * least)
        worst = tl.maximum(worst, error / limit)
        strange += tl.where(error + size + limit <= 1.0e300, 0.0, 1.0)
        begin += BLOCK
    row = rows + program * 11
    tl.store(row, tl.sum(ee, axis=0))
    tl.store(row + 1, tl.sum(eg, axis=0))
    tl.store(row + 2, tl.sum(gg, axis=0))
    tl.store(row + 3, tl.sum(too_far, axis=0))
    tl.store(row + 4, tl.sum(different, axis=0))
    tl.store(row + 5, tl.sum(strange, axis=0))
    tl.store(row + 6, tl.max(units, axis=0))
    tl.store(row + 7, tl.max(ulp, axis=0))
    tl.store(row + 8, tl.max(largest, axis=0))
    tl.store(row + 9, tl.max(relative, axis=0))
    tl.store(row + 10, tl.max(worst, axis=0))


def compiled(dtype: torch.dtype, device: str) -> Any:
    """The kernel for one dtype, ready to be launched with addresses (`compiled(torch.float32, "cuda:0")`)."""
    data, wide = torch.empty(1, dtype=dtype, device=device), torch.empty(1, dtype=torch.float64, device=device)
    single = torch.empty(1, dtype=torch.float32, device=device)
    return _measure.warmup(data, wide, single, wide, *[_LARGE] * 11, grid=(1,), num_warps=8)
