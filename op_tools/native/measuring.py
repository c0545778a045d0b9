"""Measuring in machine code: one pass over a result and its reference, without the GIL.

A small library of plain functions, compiled once with the compiler of the machine and kept in the build cache. Where
there is no compiler, `judge/measures.py` does the same in PyTorch: slower, with the same verdicts.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, Final, NamedTuple

import torch

from . import compiling

Tensor = torch.Tensor

_SOURCE: Final = compiling.SOURCES / "measure.cpp"
_FLAGS: Final = (
    *("-std=c++17", "-O3", "-fopenmp-simd"),
    *("-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fno-trapping-math"),
)
_LIBRARIES: Final = ("-nodefaultlibs", "-lc", "-lm", "-lgcc")  # no C++ runtime: some machines have only a static one
_KINDS: Final = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_EPS: Final = {dtype: torch.finfo(dtype).eps for dtype in _KINDS}
_NORMAL: Final = {dtype: torch.finfo(dtype).smallest_normal for dtype in _KINDS}
_MAX_DIMS: Final = 64
_MIN_SQUARE_RATIO: Final = 1e-3  # of a result to its reference; a smaller one leaves no digits for the cosine


class Columns(NamedTuple):
    """What is measured of one pair; `units` is its largest error in units of rounding, None if that is not known."""

    allclose: bool
    max_abs_diff: float
    max_relative_diff: float
    cosine: float
    max_ulp: float
    units: float | None = None


class Sums(ctypes.Structure):
    """Sums and maxima over one pair, as the C++ code fills them in; e is the error, g the reference."""

    _fields_ = (
        *[(name, ctypes.c_double) for name in ("largest", "relative", "ee", "eg", "gg", "units", "ulp")],
        *[(name, ctypes.c_int32) for name in ("close", "equal", "regular")],
    )

    def columns(self, dtype: torch.dtype) -> Columns | None:
        """The columns that follow; None where it takes float64 throughout to find them."""
        cosine = self._cosine() if self.regular else None
        if cosine is None:
            return None
        eps = _EPS[dtype]
        return Columns(bool(self.close), self.largest, self.relative, cosine, self.ulp / eps, self.units / (eps / 2))

    def _cosine(self) -> float | None:
        """Of the reference and itself plus the error, to all digits; None where too few are left."""
        ee, eg, gg = float(self.ee), float(self.eg), float(self.gg)
        if gg == 0:
            return 1.0 if self.equal else None
        square = gg + 2 * eg + ee
        if square < _MIN_SQUARE_RATIO * gg:
            return None
        apart = (2 * eg + ee) / (math.sqrt(square) + math.sqrt(gg))
        return 1.0 - max(0.0, ee - apart * apart) / (2 * math.sqrt(square) * math.sqrt(gg))


class Bound(NamedTuple):
    """How far each element may be off: `max(|y| factor, lowest) + sigmas · max(sigma, |y| least)`.

    Sigma, if there are squares, is the root of `of_squares · squares + of_result · y²`.
    """

    factor: float
    lowest: float
    sigmas: float
    least: float
    of_squares: float = 0.0
    of_result: float = 0.0


class Beyond(NamedTuple):
    """What a bound does not explain: the largest error divided by it, how many exceed it, and where the first are.

    Not `regular` where some number is not finite: then the rest means nothing.
    """

    worst: float
    exceeding: int
    places: Tensor
    regular: bool = True


class _Found(ctypes.Structure):
    _fields_ = (("worst", ctypes.c_double), ("count", ctypes.c_int64), ("regular", ctypes.c_int32))


def available() -> bool:
    """Whether there is machine code to call (`available()`); where it is not built yet, this waits for it."""
    return _built.wait() is not None


def prepare() -> None:
    """Have the library built in the background, if it is not yet: until it is there, Python measures (`prepare()`)."""
    _built.get()


def measure(device: Tensor, golden: Tensor, atol: float, rtol: float) -> Sums | None:
    """The sums and maxima behind the columns of one pair; None where Python must do it."""
    library = _built.loaded or _built.get()
    if library is None or not _plain(device) or not _plain(golden) or golden.dtype != torch.float64:
        return None
    pair, _ = _laid_out(device, golden)
    sums = Sums()
    library.op_tools_measure(*pair, atol, rtol, _NORMAL[device.dtype], ctypes.byref(sums))
    return sums


def beyond(device: Tensor, golden: Tensor, bound: Bound, squares: Tensor | None = None, most: int = 0) -> Beyond | None:
    """Elements further off than their bound, the places of `most` of them; None where Python must do it."""
    library = _built.loaded or _built.get()
    if library is None or not _plain(device) or not _plain(golden) or golden.dtype != torch.float64:
        return None
    if squares is not None and (not _plain(squares) or squares.shape != golden.shape):
        return None
    pair, of_squares = _laid_out(device, golden, squares)
    places = torch.empty(most, dtype=torch.int64)
    found = _Found()
    bounds = (ctypes.c_double * 6)(*bound)
    library.op_tools_beyond(*pair, *of_squares, bounds, places.data_ptr(), most, ctypes.byref(found))
    count = int(found.count)
    return Beyond(found.worst, count, places[: min(count, most)], bool(found.regular))


def _plain(tensor: Tensor) -> bool:
    return (
        tensor.dtype in _KINDS
        and tensor.layout == torch.strided
        and tensor.is_cpu
        and not tensor.is_neg()
        and not tensor.is_quantized
        and not tensor._is_zerotensor()  # which has no memory
        and tensor.numel() > 0
        and tensor.dim() <= _MAX_DIMS
    )


def _laid_out(device: Tensor, golden: Tensor, squares: Tensor | None = None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Dimensions, sizes, memory and strides of a pair, and those of the squares; tensors in order are one long row."""
    tensors = (device, golden) if squares is None else (device, golden, squares)
    if all(t.is_contiguous() for t in tensors):
        dims, shape, strides = 1, (ctypes.c_int64 * 1)(device.numel()), [_ONE] * 3
    else:
        dims = device.dim()
        array = ctypes.c_int64 * dims
        shape, strides = array(*device.shape), [array(*t.stride()) for t in tensors]
    pair = (dims, shape, device.data_ptr(), strides[0], _KINDS[device.dtype], golden.data_ptr(), strides[1])
    return pair, (None, None, 0) if squares is None else (squares.data_ptr(), strides[2], _KINDS[squares.dtype])


_ONE: Final = (ctypes.c_int64 * 1)(1)


# --- building it ----------------------------------------------------------------------------------------------


def _load() -> Any:
    path = compiling.compiled(_SOURCE, _FLAGS, _LIBRARIES)
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    number, size, address = ctypes.c_double, ctypes.c_int64, ctypes.c_void_p
    pair: list[Any] = [ctypes.c_int32, address, address, address, ctypes.c_int32, address, address]
    library.op_tools_measure.argtypes = [*pair, number, number, number, address]
    library.op_tools_beyond.argtypes = [*pair, address, address, ctypes.c_int32, address, address, size, address]
    library.op_tools_measure.restype = library.op_tools_beyond.restype = None
    return library


_built: Final = compiling.Library("native", _load)
