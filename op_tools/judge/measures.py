"""How far a result is from its reference: the columns of a comparison, and the elements beyond a bound.

The quick way is one pass in machine code (`native/measuring.py`, on a GPU `native/device_measures.py`), or without a
compiler a few in float32, on differences that were taken in float64: enough for what is shown, and for saying "within
so many units of rounding". Whatever is not finite, tiny, huge or complex is measured in float64 throughout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from ..call.description import Tensor
from ..native import device_measures, measuring
from ..native.device_measures import DeviceQuery
from ..native.measuring import Beyond, Bound, Columns, Sums

_EXPONENT: Final = 0x7FF0000000000000  # of a float64
_EXPONENT_OF_SINGLE: Final = 0x7F800000
_QUICK_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_PIECE_SIZE: Final = 1 << 15


class Sides:
    """A result and its reference, widened once."""

    def __init__(self, device: Tensor, golden: Tensor) -> None:
        self.device, self.golden = device.detach(), golden.detach()

    @functools.cached_property
    def left(self) -> Tensor:
        """The result in float64 (or complex128)."""
        return wide(self.device)

    @functools.cached_property
    def right(self) -> Tensor:
        """The reference in float64 (or complex128)."""
        return wide(self.golden)


def wide(tensor: Tensor) -> Tensor:
    """Dense, in the widest dtype, without lazy signs (`wide(torch.ones(2)).dtype == torch.float64`)."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).resolve_conj().resolve_neg()


def measure(sides: Sides, atol: float, rtol: float, quick: bool = True) -> Columns:
    """The columns of one pair of at least one element.

    >>> measure(Sides(torch.ones(2), torch.ones(2, dtype=torch.float64)), 1e-5, 1e-5).max_abs_diff
    0.0
    """
    found = _quickly(sides.device, sides.golden, atol, rtol) if quick else None
    return found or _fully(sides, atol, rtol)


def ulps(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of a dtype at these float64 magnitudes (`ulps(x, torch.half)`)."""
    info = torch.finfo(dtype)
    power = exact.to(torch.float64).contiguous().view(torch.int64).bitwise_and(_EXPONENT).view(torch.float64)
    return (power * info.eps).clamp_(min=info.smallest_normal * info.eps)


# --- the quick way ------------------------------------------------------------------------------------------


def _quick(device: Tensor, golden: Tensor) -> bool:
    plain = device.layout == golden.layout == torch.strided
    return plain and device.dtype in _QUICK_DTYPES and golden.dtype == torch.float64


def _quickly(device: Tensor, golden: Tensor, atol: float, rtol: float) -> Columns | None:
    if not _quick(device, golden):
        return None
    sums = measuring.measure(device, golden, atol, rtol)
    if sums is None:
        sums = Sums(close=True, equal=True, regular=True)
        if not all(_add(sums, ours, exact, atol, rtol) for ours, exact in pieces_of(device, golden)):
            return None
    return sums.columns(device.dtype)


def pieces_of(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape cut into pieces whose temporaries stay in the cache (`pieces_of(x, y)`)."""
    flat = [t.resolve_neg().reshape(-1) for t in tensors]
    size = _PIECE_SIZE if flat[0].is_cpu else max(1, flat[0].numel())  # a device would be asked again for each piece
    for start in range(0, flat[0].numel(), size):
        yield tuple([t[start : start + size] for t in flat])


def _add(sums: Sums, device: Tensor, exact: Tensor, atol: float, rtol: float) -> bool:
    """Measure one more piece; False where it must be measured in float64 throughout."""
    error = torch.sub(device.to(torch.float64), exact).to(torch.float32)
    near = exact.to(torch.float32)
    ee, gg = float(torch.dot(error, error)), float(torch.dot(near, near))
    if not math.isfinite(ee + gg):
        return False
    sums.ee, sums.eg, sums.gg = sums.ee + ee, sums.eg + float(torch.dot(error, near)), sums.gg + gg
    rounded = near if device.dtype == torch.float32 else exact.to(device.dtype)
    scale = near.abs().clamp_(min=torch.finfo(device.dtype).smallest_normal)
    sums.units = max(sums.units, _largest_magnitude(error / scale))
    power = scale.view(torch.int32).bitwise_and_(_EXPONENT_OF_SINGLE).view(torch.float32)
    sums.ulp = max(sums.ulp, _largest_magnitude(error.div_(power)))
    if torch.equal(device, rounded):
        return True
    sums.equal = False
    rounded = rounded.to(torch.float32)
    difference = device.to(torch.float32) - rounded
    largest = _largest_magnitude(difference)
    sums.largest = max(sums.largest, largest)
    if sums.close and not largest <= atol:
        sums.close = float(difference.abs().sub_(rounded.abs(), alpha=rtol).max()) <= atol
    relative = difference.div_(rounded)
    most = _largest_magnitude(relative)
    if math.isnan(most):  # zero instead of zero
        most = _largest_magnitude(relative.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf))
    sums.relative = max(sums.relative, most)
    return True


def _largest_magnitude(values: Tensor) -> float:
    """The largest magnitude, NaN if there is one."""
    low, high = torch.aminmax(values)
    return max(abs(float(low)), abs(float(high)))


# --- bounds ---------------------------------------------------------------------------------------------------


def beyond(sides: Sides, bound: Bound, squares: Tensor | None = None, most: int = 0) -> Beyond | None:
    """Which elements are further off than their bound; None where not all numbers are finite, or of another kind.

    >>> beyond(Sides(torch.ones(2), torch.ones(2, dtype=torch.float64)), Bound(1e-7, 1e-45, 6.0, 0.0)).exceeding
    0
    """
    device, golden = sides.device, sides.golden
    if not _quick(device, golden) or device.shape != golden.shape or not device.numel():
        return None
    found = measuring.beyond(device, golden, bound, squares, most)
    if found is None:
        return _beyond(device, golden, bound, squares, most)
    return found if found.regular else None


def _beyond(device: Tensor, golden: Tensor, bound: Bound, squares: Tensor | None, most: int) -> Beyond | None:
    worst, count, start = 0.0, 0, 0
    places: list[Tensor] = []
    for pieces in pieces_of(device, golden, *(() if squares is None else (squares,))):
        exact = pieces[1]
        size = exact.abs()
        variance = exact.square().mul_(bound.of_result)
        if squares is not None:
            variance.add_(pieces[2].to(torch.float64), alpha=bound.of_squares)
        sigma = torch.maximum(variance.sqrt_(), size * bound.least)
        limit = (size * bound.factor).clamp_(min=bound.lowest).add_(sigma, alpha=bound.sigmas)
        error = torch.sub(pieces[0].to(torch.float64), exact).abs_()
        if not math.isfinite(float((error + limit).sum())):
            return None
        ratio = error.div_(limit)
        most_here = float(ratio.max())
        if most_here > 1:
            over = (ratio > 1).nonzero().reshape(-1)
            places.append(over + start)
            count += over.numel()
        worst = max(worst, most_here)
        start += exact.numel()
    found = torch.cat(places)[:most] if places else torch.empty(0, dtype=torch.int64)
    return Beyond(worst, count, found)


# --- on a device ----------------------------------------------------------------------------------------------


def measure_on_device(queries: Sequence[DeviceQuery]) -> list[tuple[Columns | None, float]]:
    """Columns (None where it takes float64 throughout) and the largest error divided by its bound, of several pairs."""
    found = device_measures.measure(queries) if queries else []
    if found is not None:
        return found
    answers = []
    for device, golden, atol, rtol, bound, squares in queries:
        over = beyond(Sides(device, golden), bound, squares)
        answers.append((_quickly(device, golden, atol, rtol), math.inf if over is None else over.worst))
    return answers


# --- the full way -------------------------------------------------------------------------------------------


def _fully(sides: Sides, atol: float, rtol: float) -> Columns:
    """The seeds' columns (golden rounded to the device's dtype, as they do it), cosine and the error in ulp."""
    device, left, exact = sides.device, sides.left, sides.right
    rounded = exact
    if device.is_floating_point() or device.is_complex():
        rounded = wide(exact.to(device.dtype))
    cosine, ulp = _cosine(left, exact), _largest_ulp(left, exact, device.dtype)
    if torch.equal(left, rounded):  # nothing to measure but the rounding of the reference
        return Columns(True, 0.0, 0.0, cosine if bool(left.any()) else 1.0, ulp)  # nothing instead of next to nothing
    close = torch.isclose(left, rounded, atol=atol, rtol=rtol, equal_nan=True)
    same = (left == rounded) | (left.isnan() & rounded.isnan())
    difference = (left - rounded).abs().masked_fill(same, 0.0)
    relative = (difference / rounded.abs()).masked_fill(difference == 0, 0.0)
    return Columns(bool(close.all()), _largest(difference), _largest(relative), cosine, ulp)


def _largest(values: Tensor) -> float:
    return float(values.nan_to_num(nan=math.inf, posinf=math.inf).max()) if values.numel() else 0.0


def _cosine(left: Tensor, right: Tensor) -> float:
    a, b = left.reshape(-1), right.reshape(-1)
    size = float(torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b))
    if size == 0:
        return 1.0 if bool((a == b).all()) else 0.0
    return float(torch.vdot(b, a).real) / size


def _largest_ulp(left: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    ratio = (left - exact).abs().div_(ulps(exact.abs(), dtype))
    return float(ratio.nan_to_num_(nan=0.0, posinf=0.0).max()) if ratio.numel() else 0.0
