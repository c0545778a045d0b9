"""One result against its reference, element by element: which errors a bound explains, what the others look like."""

from __future__ import annotations

import functools
import math
from typing import Final

import torch

from ..call import facts
from ..call.description import Tensor
from ..view.rows import WRONG, Row
from .pair import Pair, first_place, joined
from .rounding import Precision, unit

# bound = STORED · u|y| + SIGMAS · sigma: u is the dtype's unit of rounding (half an ulp), sigma how far the
# roundings inside the call move the element on average (root mean square of the probes).
STORED: Final = 2.0
SIGMAS: Final = 6.0
_TF32: Final = 2.0**-11
_MIN_TF32_SHARE: Final = 1 / 64  # of the largest error that TF32 can make: the worst element has at least that
_OF_CUDNN: Final = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


def mask_or_none(mask: Tensor) -> Tensor | None:
    """The mask, if any element is in it."""
    return mask if bool(mask.any()) else None


class Elements:
    """One result against its reference, element by element, in float64."""

    def __init__(self, device: Tensor, golden: Tensor, precision: Precision, golden_dtype: torch.dtype) -> None:
        self.device, self.golden, self.precision = device, golden, precision
        self.floor = 0.0  # of the bound
        self.least = 0.0  # of sigma, relative to the result
        self.error = (device - golden).abs()
        self.size = golden.abs()
        self.regular = math.isfinite(float(self.error.sum()))  # then all numbers are
        # a reference in the same precision has an error of its own
        self.reference = 2.0 if unit(golden_dtype) >= precision.stored else 0.0

    @functools.cached_property
    def largest(self) -> float:
        """Of the reference."""
        return float(self.size.max())

    @functools.cached_property
    def finite(self) -> Tensor:
        """Where both are."""
        return self.device.isfinite() & self.golden.isfinite()

    @functools.cached_property
    def same(self) -> Tensor:
        """Where both are equal, or neither is a number."""
        same = (self.device == self.golden) | (self.device.isnan() & self.golden.isnan())
        if self.device.is_complex():
            # which part of a complex number becomes NaN is left open by IEEE arithmetic
            same |= ~self.device.isfinite() & ~self.golden.isfinite()
        return same

    def bound(self, stored: float, sigma: Tensor | None) -> Tensor:
        """The largest error that is explained; `stored` is how many units of rounding the result itself may be off."""
        precision = self.precision
        factor = (stored + self.reference) * precision.stored
        lowest = max(precision.smallest * (0.5 * stored), self.floor)
        if sigma is None:
            return (self.size * (factor + SIGMAS * self.least)).clamp_(min=lowest)
        if self.least:
            sigma = torch.maximum(sigma, self.size * self.least)
        return (self.size * factor).clamp_(min=lowest).add_(sigma, alpha=SIGMAS)

    def unexplained(self, stored: float, sigma: Tensor | None = None, unsettled: Tensor | None = None) -> Tensor | None:
        """The elements that are not explained; None if all are."""
        bound = self.bound(stored, sigma)
        if self.regular:
            over = self.error - bound
            if float(over.max()) <= 0:  # false for NaN
                return None
            unexplained = over > 0
            if unsettled is None and self.largest + float(bound.max()) < self.precision.largest:
                return unexplained
        else:
            unexplained = ~(self.same | (self.finite & (self.error <= bound)))
        # too large for the dtype: infinity, or the largest number
        beyond = self.golden.isfinite() & (self.size + bound >= self.precision.largest)
        if self.device.is_complex():  # arithmetic with an infinite part makes NaN of the other, or of both
            unexplained &= ~(beyond & ~self.device.isfinite())
        else:
            signs = self.device.sgn() == self.golden.sgn()
            unexplained &= ~(beyond & signs & (self.device.isinf() | (self.device.abs() == self.precision.largest)))
        if unsettled is not None:
            unexplained &= ~unsettled
        return mask_or_none(unexplained)

    def excess(self, stored: float, sigma: Tensor | None = None) -> float:
        """The largest error divided by its bound."""
        ratio = self.error / self.bound(stored, sigma)
        if not self.regular:
            ratio = ratio.masked_fill(self.same | ~self.finite, 0.0)
        return float(ratio.nan_to_num(nan=0.0).max()) if ratio.numel() else 0.0


def concluded(
    row: Row,
    elements: Elements,
    suspects: Tensor | None,
    stored: float,
    sigma: Tensor | None = None,
    hint: str = "",
) -> Row:
    """The row with its verdict: wrong if there are suspects, with the worst of them in the reason."""
    if suspects is None:
        return row._replace(excess=min(1.0, elements.excess(stored, sigma)))
    count = int(suspects.sum())
    strange = suspects & ~elements.finite
    ratio = (elements.error / elements.bound(stored, sigma)).masked_fill(~suspects, 0.0).nan_to_num(nan=math.inf)
    where = first_place(strange) if bool(strange.any()) else first_place(ratio == ratio.max())
    device, golden = elements.device[where].item(), elements.golden[where].item()
    excess = math.inf if bool(strange.any()) else float(ratio.max())
    size = "" if bool(strange.any()) else f", {excess:.3g} times the rounding bound"
    share = f"{count} of {suspects.numel()} elements, worst at {list(where)}"
    reason = f"{share}: {device:.9g} instead of {golden:.9g}{size}"
    return row._replace(verdict=WRONG, reason=joined(reason, hint), excess=excess, where=where)


def _tf32_allowed(name: str) -> bool:
    """Whether this process lets CUDA multiply float32 in TF32 for an operator."""
    last = facts.last_name(name)
    flags = torch.backends.cudnn if last.startswith("conv") or last in _OF_CUDNN else torch.backends.cuda.matmul
    try:
        return bool(flags.allow_tf32)
    except RuntimeError:  # set in the old way and in the new one
        return True


def pattern_of_errors(pair: Pair, elements: Elements, suspects: Tensor, sigma: Tensor | None) -> str:
    """What the errors look like, to be added to the reason."""
    wrong_device, wrong_golden = elements.device[suspects], elements.golden[suspects]
    if bool(wrong_device.isnan().any()):
        return "NaN where a number should be"
    structure = pair.uncertainty.structure if pair.uncertainty is not None else None
    if structure is not None and structure.contracts and pair.device.dtype == torch.float32 and sigma is not None:
        # the sums' share of sigma, if every product had the ten bits of TF32
        grown = _TF32 / (elements.precision.stored * math.sqrt(structure.longest_sum))
        limit = elements.bound(STORED, None) + sigma * (SIGMAS * max(grown, 1.0))
        share = (elements.error / limit)[suspects]
        if _MIN_TF32_SHARE < float(share.max()) < 4 and float((share > 1).double().mean()) < 0.05:
            allowed = _tf32_allowed(pair.op)
            return f"as large as products in TF32 make it ({'allow_tf32' if allowed else 'but allow_tf32 is off'})"
    tiny = torch.finfo(elements.precision.dtype).smallest_normal
    if bool((wrong_device == 0).all()) and bool((wrong_golden.abs() < tiny).all()):
        return "subnormal numbers are flushed to zero"
    return ""
