"""What `measuring.py` measures, for tensors on a GPU: one kernel per pair, and a few numbers that are read back."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from ..call.devices import accelerator_type, quiet
from .kernels import Kernels
from .layout import is_dense
from .measuring import Bound, Columns, Sums

Tensor = torch.Tensor

_DTYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
_NORMAL: Final = {dtype: torch.finfo(dtype).smallest_normal for dtype in _DTYPES}
_MIN_SHARE: Final = 4_096  # elements that one program of the kernel takes at least
_MAX_PROGRAMS: Final = 128
_WIDTH: Final = 11
_SUMS: Final = 6  # the first columns of a row are added up, of the others the largest counts
_bits: Final = struct.Struct("9d").pack
_read: Final = struct.Struct("9q").unpack


class DeviceQuery(NamedTuple):
    """A result and its reference on a device, whose columns are asked for, and how far they are beyond a bound."""

    device: Tensor
    golden: Tensor
    atol: float
    rtol: float
    bound: Bound
    squares: Tensor | None = None  # in float32


def prepare() -> None:
    """Have the kernels ready before the first pre-check: a machine compiles them once, which takes seconds."""
    if accelerator_type() == "cuda" and torch.cuda.is_initialized():
        kernels_of(torch.cuda.current_device())


def measure(queries: Sequence[DeviceQuery]) -> list[tuple[Columns | None, float]] | None:
    """Columns and the largest error divided by its bound, of several pairs; None where PyTorch must find them."""
    device = queries[0].device.device
    kernels = kernels_of(device.index) if device.type == "cuda" else None
    if kernels is None or not all(_fits(query, device) for query in queries):
        return None
    found = zip(queries, _run(kernels, queries))
    return [(s.columns(q.device.dtype), worst if s.regular else math.inf) for q, (s, worst) in found]


def _fits(query: DeviceQuery, device: torch.device) -> bool:
    data, golden, squares = query.device, query.golden, query.squares
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


def _run(kernels: Kernels, queries: Sequence[DeviceQuery]) -> list[tuple[Sums, float]]:
    """Launch one kernel for each pair, and wait for what they find."""
    shares = [min(-(-query.device.numel() // _MIN_SHARE), _MAX_PROGRAMS) for query in queries]
    rows = torch.empty((sum(shares), _WIDTH), dtype=torch.float64, device=queries[0].device.device)
    place, held = rows.data_ptr(), []
    with contextlib.nullcontext() if kernels.current() else torch.cuda.device(kernels.index):
        stream = kernels.stream()
        for (data, golden, atol, rtol, bound, squares), programs in zip(queries, shares):
            tensors = _in_one_order(data, golden, squares)
            held.append(tensors)  # until their kernels are done
            given = [t.data_ptr() for t in tensors]
            numel = data.numel()
            if squares is None:
                given.append(0)
                bound = bound._replace(of_squares=0.0)
            numbers = _read(_bits(atol, rtol, _NORMAL[data.dtype], *bound))
            kernels.launch(data.dtype, programs)(stream, *given, place, numel, -(-numel // programs), *numbers)
            place += programs * _WIDTH * 8
        found = rows.cpu().numpy()
    starts = list(itertools.accumulate(shares[:-1], initial=0))
    added, maxima = np.add.reduceat(found[:, :_SUMS], starts), np.maximum.reduceat(found[:, _SUMS:], starts)
    answers = []
    for one, other in zip(added.tolist(), maxima.tolist()):
        ee, eg, gg, too_far, different, strange = one
        units, ulp, largest, relative, worst = other
        sums = Sums(largest, relative, ee, eg, gg, units, ulp, not too_far, not different, not strange)
        answers.append((sums, worst))
    return answers


@functools.cache
def kernels_of(index: int) -> Kernels | None:
    """The kernels of a GPU, or None where Triton is missing or its answer is not the right one."""
    with contextlib.suppress(Exception), quiet():
        kernels = Kernels(index, "measures", arguments=15)
        if agrees(kernels, index):
            return kernels
    return None


def agrees(kernels: Kernels, index: int) -> bool:
    """Whether the kernels find in a trial what PyTorch finds; another Triton may read its arguments differently."""
    exact = torch.linspace(-3.0, 5.0, 20_001, dtype=torch.float64)
    golden, bound = exact.to(f"cuda:{index}"), Bound(1e-4, 1e-300, 2.0, 0.0, 1e-8, 0.0)
    squares = torch.full((len(exact),), 4.0, device=golden.device)
    for dtype in _DTYPES:
        data, near = (exact * 1.001).to(dtype), exact.float().to(dtype).double()
        error, apart = data.double() - exact, (data.double() - near).abs()
        close = (apart <= 1e-3 + 1e-3 * near.abs()).all()
        same: list[Any] = [error @ error, error @ exact, exact @ exact, apart.max(), close, False, True]
        here = data.to(golden.device)
        queries = [DeviceQuery(here, golden, 1e-3, 1e-3, bound, some) for some in (squares, None)]
        for (sums, worst), sigma in zip(_run(kernels, queries), (2e-4, 0.0)):
            limit = (exact.abs() * 1e-4).clamp(min=1e-300) + 2.0 * sigma
            found = [sums.ee, sums.eg, sums.gg, sums.largest, sums.close, sums.equal, sums.regular, worst]
            expected = [*same, (error.abs() / limit).max()]
            if not all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(found, expected)):
                return False
        here[5] = math.nan
        if any(sums.regular for sums, _ in _run(kernels, queries)):
            return False
    return True
