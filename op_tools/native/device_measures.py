"""What `measuring.py` measures, for tensors on a GPU: one kernel per pair, and a few numbers that are read back."""

from __future__ import annotations

import contextlib
import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from ..call.devices import accelerator_type, quiet
from . import measuring
from .kernels import Kernels
from .statistics import is_dense

Tensor = torch.Tensor
# a result, its reference, atol, rtol, the numbers of a bound, squares in float32 or nothing
Pair = tuple[Tensor, Tensor, float, float, Sequence[float], "Tensor | None"]

_DTYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
_NORMAL: Final = {dtype: torch.finfo(dtype).smallest_normal for dtype in _DTYPES}
_MIN_SHARE: Final = 4_096  # elements that one program of the kernel takes at least
_MAX_PROGRAMS: Final = 128
_WIDTH: Final = 11
_SUMS: Final = 6  # the first columns of a row are added up, of the others the largest counts
_bits: Final = struct.Struct("9d").pack
_read: Final = struct.Struct("9q").unpack


def prepare() -> None:
    """Have the kernels ready before the first pre-check: a machine compiles them once, which takes seconds."""
    if accelerator_type() == "cuda" and torch.cuda.is_initialized():
        kernels_of(torch.cuda.current_device())


def measure(pairs: Sequence[Pair]) -> list[tuple[measuring.Columns, float]] | None:
    """Columns and the largest error divided by its bound, of several pairs; None where PyTorch must find them."""
    device = pairs[0][0].device
    kernels = kernels_of(device.index) if device.type == "cuda" else None
    if kernels is None or not all(_fits(pair, device) for pair in pairs):
        return None
    return _run(kernels, pairs)


def _fits(pair: Pair, device: torch.device) -> bool:
    data, golden, squares = pair[0], pair[1], pair[5]
    if data.dtype not in _DTYPES or golden.dtype != torch.float64 or data.device != device or golden.device != device:
        return False
    return squares is None or (squares.dtype == torch.float32 and squares.device == device)


def _in_one_order(data: Tensor, golden: Tensor, squares: Tensor | None) -> list[Tensor]:
    """The same elements in one order, without gaps."""
    tensors = [data, golden] if squares is None else [data, golden, squares]
    stride = data.stride()
    if all(t.stride() == stride and not t.is_neg() for t in tensors) and is_dense(data):
        return tensors
    return [t.resolve_neg().contiguous() for t in tensors]


def _run(kernels: Kernels, pairs: Sequence[Pair]) -> list[tuple[measuring.Columns, float]]:
    """Launch one kernel for each pair, and wait for what they find."""
    shares = [min(-(-pair[0].numel() // _MIN_SHARE), _MAX_PROGRAMS) for pair in pairs]
    rows = torch.empty((sum(shares), _WIDTH), dtype=torch.float64, device=pairs[0][0].device)
    place, held = rows.data_ptr(), []
    with contextlib.nullcontext() if kernels.current() else torch.cuda.device(kernels.index):
        stream = kernels.stream()
        for (data, golden, atol, rtol, bound, squares), programs in zip(pairs, shares):
            tensors = _in_one_order(data, golden, squares)
            held.append(tensors)  # until their kernels are done
            given = [t.data_ptr() for t in tensors]
            numel = data.numel()
            if squares is None:
                given.append(0)
                bound = (*bound[:4], 0.0, bound[5])
            numbers = _read(_bits(atol, rtol, _NORMAL[data.dtype], *bound))
            kernels.launch(data.dtype, programs)(stream, *given, place, numel, -(-numel // programs), *numbers)
            place += programs * _WIDTH * 8
        found = rows.cpu().numpy()
    return list(_put_together(found, shares))


def _put_together(rows: Any, shares: list[int]) -> Any:
    start = 0
    for programs in shares:
        mine = rows[start : start + programs]
        start += programs
        if programs > 1:
            ee, eg, gg, too_far, different, strange = mine[:, :_SUMS].sum(0).tolist()
            units, ulp, largest, relative, worst = mine[:, _SUMS:].max(0).tolist()
        else:
            ee, eg, gg, too_far, different, strange, units, ulp, largest, relative, worst = mine[0].tolist()
        yield (
            measuring.Columns(largest, relative, ee, eg, gg, units, ulp, not too_far, not different, not strange),
            worst,
        )


@functools.cache
def kernels_of(index: int) -> Kernels | None:
    """The kernels of a GPU, or None where Triton is missing or its answer is not the right one."""
    with contextlib.suppress(Exception), quiet():
        kernels = Kernels(index, "triton_measures", arguments=15)
        if agrees(kernels, index):
            return kernels
    return None


def agrees(kernels: Kernels, index: int) -> bool:
    """Whether the kernels find in a trial what NumPy finds; another Triton may read its arguments differently."""
    exact = torch.linspace(-3.0, 5.0, 20_001, dtype=torch.float64)
    golden, bound = exact.to(f"cuda:{index}"), (1e-4, 1e-300, 2.0, 0.0, 1e-8, 0.0)
    squares = torch.full((len(exact),), 4.0, device=golden.device)
    for dtype in _DTYPES:
        data = (exact * 1.001).to(dtype)
        error, there, near = (data.double() - exact).numpy(), exact.numpy(), exact.float().to(dtype).double().numpy()
        apart = np.abs(data.double().numpy() - near)
        expected = [(error * error).sum(), (error * there).sum(), (there * there).sum(), apart.max()]
        here = data.to(golden.device)
        pairs: list[Pair] = [(here, golden, 1e-3, 1e-3, bound, some) for some in (squares, None)]
        for (columns, worst), square in zip(_run(kernels, pairs), (4.0, 0.0)):
            limit = np.maximum(np.abs(there) * 1e-4, 1e-300) + 2.0 * np.sqrt(1e-8 * square)
            close = bool((apart <= 1e-3 + 1e-3 * np.abs(near)).all())
            if not np.allclose([columns.ee, columns.eg, columns.gg, columns.largest], expected, rtol=1e-6):
                return False
            if bool(columns.close) != close or bool(columns.equal) or not columns.regular:
                return False
            if not math.isclose(worst, (np.abs(error) / limit).max(), rel_tol=1e-6):
                return False
        here[5] = math.nan
        if any(columns.regular for columns, _ in _run(kernels, pairs)):
            return False
    return True
