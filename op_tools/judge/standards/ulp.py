"""The default standard: can rounding alone explain the difference? Whole numbers must be equal.

First with the rounding of the result itself, which nearly every correct element passes; where that is not enough, with
how far the roundings inside the call can move this element (`uncertainty.py`): by a formula, or by repeating the golden
run with random roundings.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, Final

import torch

from ...call import facts
from ...call.description import Tensor
from ...call.equality import same_values
from ...native.measuring import Bound
from ...view.rows import RIGHT, WRONG, Row
from .. import allowances, ties
from ..measures import beyond
from ..noise import PROBES
from ..orders import DRIFTS
from ..pair import Pair, first_place, joined
from ..rounding import Precision, unit
from ..uncertainty import Uncertainty

# bound = STORED · u|y| + SIGMAS · sigma: u is the dtype's unit of rounding (half an ulp), sigma how far the
# roundings inside the call move the element on average (root mean square of the probes).
STORED: Final = 2.0
SIGMAS: Final = 6.0
_MIN_TF32_SHARE: Final = 1 / 64  # of the largest error that TF32 can make: the worst element has at least that
_TRUST_IN_ONE_PROBE: Final = 0.5  # its sigma counts by half; that of n probes by the square root of n times as much
_LOST: Final = 1e4  # times the size of arguments and results: a bound beyond that bounds nothing
_MAX_NARROWED_SHARE: Final = 1 / 16  # share of elements in doubt above which a probe of the whole call is cheaper


def judge(row: Row, pair: Pair) -> Row:
    """By rounding, or by equality for whole numbers."""
    if pair.device.is_floating_point() or pair.device.is_complex():
        return _judge_rounding(row, pair)
    return _judge_whole_numbers(row, pair)


def _judge_whole_numbers(row: Row, pair: Pair) -> Row:
    differs = different = pair.device != pair.golden
    if not bool(different.any()):
        return row
    uncertainty, chosen = pair.uncertainty, None
    if uncertainty is not None:
        chosen = facts.differing_choices(pair.op, uncertainty.result.source, pair.device, pair.golden, pair.position)
        if chosen is not None and not bool(chosen.any()):
            return row._replace(error_info=joined(row.error_info, "tie broken differently"))
        different = different & ~uncertainty.unsettled(pair.position, different) if chosen is None else chosen
    count = int(different.sum())
    if count == 0:
        return row._replace(error_info=joined(row.error_info, "within rounding uncertainty"))
    where = first_place(different)
    values = (pair.device[where].item(), pair.golden[where].item())
    found = f"{values[0]} instead of {values[1]}" if values[0] != values[1] else f"{values[0]}, which was chosen before"
    reason = f"{count} of {different.numel()} differ, first at {list(where)}: {found}"
    # which of several choices are right cannot be told from the reference alone
    bound = torch.zeros(differs.shape).masked_fill_(differs & ~different, math.inf) if chosen is None else None
    return row._replace(verdict=WRONG, reason=reason, excess=math.inf, where=where, bound=bound)


def _judge_rounding(row: Row, pair: Pair) -> Row:
    precision = pair.precision
    units = None if pair.units is None else pair.units * pair.unit_ratio
    if units is not None and units <= 1:  # as good as rounding the reference
        return row._replace(excess=units) if units else row
    known = pair.uncertainty
    uncertainty = known if known is not None and known.usable else None
    if units is not None and uncertainty is not None and not uncertainty.structure.exact:
        least = least_units(pair, uncertainty)
        if units <= least:  # what any probes would allow
            return row._replace(excess=units / least)
        worst = _worst_by_formula(pair, uncertainty)
        if worst <= 1:
            return row._replace(excess=worst)
        allowed = _allowed_by_formula(row, pair, uncertainty) if pair.allowances else None
        if allowed is not None:
            return allowed
    elements = _Elements(pair.sides.left, pair.sides.right, precision, pair.golden.dtype)
    if units is None and elements.unexplained() is None:
        return row._replace(excess=elements.excess())
    if uncertainty is None or not uncertainty.structure.exact:
        elements.stored = STORED
    if known is None:
        return _concluded(row, elements, elements.unexplained())
    if uncertainty is None:
        # sparse and the like: the only measure is the size of the whole result
        flat = torch.full_like(elements.size, float(elements.size.nan_to_num(posinf=0.0).max()) * precision.stored)
        return _concluded(row, elements, elements.unexplained(flat), flat)
    if elements.stored == STORED:
        elements.floor = _lowest_of_sums(precision, uncertainty)
        elements.least = uncertainty.least_error(pair.position)
        elements.sums = uncertainty.structure.longest_sum > 1
    sigma, suspects = _movement(pair, uncertainty, elements)
    if suspects is not None and uncertainty.part == "grad_input" and uncertainty.structure.selects:
        suspects = _mask_or_none(suspects & ~_shared_among_ties(pair, uncertainty, elements, sigma))
    if suspects is not None and elements.regular:
        elements.drift = uncertainty.drift(pair.position)
        if elements.drift is not None:
            left = elements.unexplained(sigma)
            suspects = None if left is None else _mask_or_none(suspects & left)
    if suspects is not None and elements.regular and sigma is not None:
        lost = suspects & _without_digits(uncertainty, elements, sigma)
        if bool(lost.any()):
            note = f"{int(lost.sum())} elements not compared: roundings of the arguments decide every digit"
            row, suspects = row._replace(error_info=joined(row.error_info, note)), _mask_or_none(suspects & ~lost)
    if suspects is None and uncertainty.not_settled(pair.position) is not None:
        left = elements.unexplained(sigma)
        if left is not None:
            note = f"{int(left.sum())} elements not compared: rounding, or the device, decides whether they are numbers"
            row = row._replace(error_info=joined(row.error_info, note))
    if suspects is None:
        return _concluded(row, elements, None, sigma)
    allowed = _allowed(row, pair, uncertainty) if pair.allowances else None
    hint = "" if allowed is not None else _pattern_of_errors(pair, elements, suspects, sigma)
    return allowed or _concluded(row, elements, suspects, sigma, hint)


def _without_digits(uncertainty: Uncertainty, elements: _Elements, sigma: Tensor) -> Tensor:
    """Where a rounding moves a result far beyond its own size and what its arguments are large enough for.

    An inverse next to a singular matrix is like that. How far it moves has no usual size, which probes could find out.
    """
    source, largest = uncertainty.result.source, max(elements.largest, 1.0)
    for tensor in [*source.tensors, *[g for g in source.grad_outputs or () if g is not None]]:
        if tensor.numel() and tensor.is_floating_point():
            largest *= max(1.0, float(tensor.detach().abs().max()))
    return elements.bound(sigma) > _LOST * largest


def _allowances(pair: Pair, uncertainty: Uncertainty) -> Iterator[tuple[Uncertainty, str, str]]:
    """The call in each other precision that the settings or the ledger of the device name, the verdict, and why."""
    source, structure = uncertainty.result.source, uncertainty.structure
    tensors = [pair.device, *source.tensors, *[g for g in source.grad_outputs or () if g is not None]]
    dtypes = [t.dtype for t in tensors if t.is_floating_point()]
    phase = "backward" if uncertainty.backward else "forward"
    result, part, seconds = uncertainty.result, uncertainty.part, uncertainty.max_seconds
    summed = max([g.numel() for g in source.grad_outputs or () if g is not None], default=0) // pair.device.numel()
    for precision, verdict, note in allowances.of(pair.op, phase, source.device, dtypes, structure, summed):
        yield Uncertainty(result, part, precision, seconds, structure), verdict, note


def _allowed(row: Row, pair: Pair, uncertainty: Uncertainty) -> Row | None:
    """The row of a result that another precision explains, which the settings or the ledger of the device name."""
    for wider, verdict, note in _allowances(pair, uncertainty):
        elements = _Elements(pair.sides.left, pair.sides.right, wider.precision, pair.golden.dtype, STORED)
        elements.floor, elements.least = _lowest_of_sums(wider.precision, wider), wider.least_error(pair.position)
        sigma, left = _movement(pair, wider, elements)
        if left is None:
            return _as_allowed(row, verdict, note, elements.excess(sigma))
    return None


def _allowed_by_formula(row: Row, pair: Pair, uncertainty: Uncertainty) -> Row | None:
    """The same without probes: a formula does not explain the result in its own precision, but in another one.

    Probes of its own precision might explain a little more than the formula; products have all of their terms later.
    """
    if uncertainty.structure.contracts or uncertainty.terms(pair.position, pair.golden) is None:
        return None
    for wider, verdict, note in _allowances(pair, uncertainty):
        known = wider.terms(pair.position, pair.golden)
        bound = _bound(wider.precision, wider, pair.position)
        found = None if known is None else beyond(pair.sides, *known.added_to(bound))
        if found is not None and found.regular and found.worst <= 1:
            return _as_allowed(row, verdict, note, found.worst)
    return None


def _as_allowed(row: Row, verdict: str, note: str, excess: float) -> Row:
    reason, info = "" if verdict == RIGHT else note, joined(row.error_info, note)
    return row._replace(verdict=verdict, reason=reason, error_info=info, excess=min(1.0, excess))


def _lowest_of_sums(precision: Precision, uncertainty: Uncertainty) -> float:
    """Below the normal numbers, each term of a sum may be off by a whole step."""
    return precision.smallest * SIGMAS * math.sqrt(uncertainty.structure.longest_sum)


def least_units(pair: Pair, uncertainty: Uncertainty) -> float:
    """How many units of rounding every correct result may be off that is not tiny."""
    return STORED + SIGMAS * uncertainty.least_error(pair.position) / pair.precision.stored


def bound_without_probes(pair: Pair, uncertainty: Uncertainty) -> Bound:
    """What every correct result may be off, whatever goes on inside the call."""
    return _bound(pair.precision, uncertainty, pair.position)


def _bound(precision: Precision, uncertainty: Uncertainty, position: int) -> Bound:
    lowest = max(precision.smallest * (0.5 * STORED), _lowest_of_sums(precision, uncertainty))
    return Bound(STORED * precision.stored, lowest, SIGMAS, uncertainty.least_error(position))


def _worst_by_formula(pair: Pair, uncertainty: Uncertainty) -> float:
    """Largest error beside its bound, without a probe; more than 1 if that does not explain it."""
    bound = bound_without_probes(pair, uncertainty)
    for terms in (uncertainty.terms, functools.partial(uncertainty.terms_of_products, dtype=torch.float32)):
        known = terms(pair.position, pair.golden)
        found = None if known is None else beyond(pair.sides, *known.added_to(bound))
        if found is not None and found.worst <= 1:
            return found.worst
    return _by_elements_in_doubt(pair, uncertainty, bound)


def _by_elements_in_doubt(pair: Pair, uncertainty: Uncertainty, bound: Bound) -> float:
    """Of an elementwise call, by probes of the few elements in doubt."""
    if not uncertainty.structure.elementwise:
        return math.inf
    found = beyond(pair.sides, bound, most=max(1, int(pair.device.numel() * _MAX_NARROWED_SHARE)))
    if found is None or found.exceeding > found.places.numel():
        return math.inf
    if not found.exceeding:  # tiny results, whose rounding is as coarse as that of the smallest numbers
        return found.worst
    places = found.places
    device = pair.sides.device.reshape(-1)[places].to(torch.float64)
    golden, floor = pair.sides.golden.reshape(-1)[places], _lowest_of_sums(pair.precision, uncertainty)
    elements = _Elements(device, golden, pair.precision, pair.golden.dtype, STORED, floor, bound.least)
    probed = _probed_at(pair, uncertainty, elements, places)
    if probed is None or probed[1] is not None:
        return math.inf
    return min(1.0, elements.excess(probed[0]))


_Explained = tuple[Tensor | None, Tensor | None]  # sigma, and the elements that it does not explain


def _movement(pair: Pair, uncertainty: Uncertainty, elements: _Elements) -> _Explained:
    """By formula, on the elements in doubt alone, or by as many probes of the whole call as it takes."""
    for dtype in (torch.float32, torch.float64):
        terms = uncertainty.terms_of_products(pair.position, elements.golden, dtype)
        if terms is None:
            break
        sigma = terms.sigma(elements.golden)
        suspects = elements.unexplained(sigma.to(torch.float64))
        if dtype == torch.float64 or (suspects is None and bool(sigma.sum().isfinite())):
            return sigma.to(torch.float64), suspects
    if uncertainty.structure.elementwise:
        found = _narrowed(pair, uncertainty, elements)
        if found is not None:
            return found
    return _probed(pair.position, uncertainty, elements)


def _probed(position: int, uncertainty: Uncertainty, elements: _Elements, most: int = PROBES) -> _Explained:
    """After as many probes as it takes to clear the elements in doubt."""
    more = True
    while True:
        sigma = uncertainty.sigma(position)
        if sigma is not None:
            sigma.mul_(min(1.0, _TRUST_IN_ONE_PROBE * math.sqrt(uncertainty.probes)))
        suspects = elements.unexplained(sigma, uncertainty.not_settled(position))
        if suspects is None or uncertainty.probes >= most or not more:
            return sigma, suspects
        more = uncertainty.grow()  # without more, sigma makes up for the probes that are missing


def _narrowed(pair: Pair, uncertainty: Uncertainty, elements: _Elements) -> _Explained | None:
    """The same for an elementwise call, on the elements in doubt alone; None where that cannot be done."""
    sigma: Tensor | None = None
    suspects = elements.unexplained()
    whole = not uncertainty.on_lists  # of a list, one tensor is much less than all of them

    def too_many(mask: Tensor) -> bool:
        return whole and int(mask.sum()) / mask.numel() > _MAX_NARROWED_SHARE

    if suspects is not None and too_many(suspects):
        # one probe of the whole call clears most of them
        sigma, suspects = _probed(pair.position, uncertainty, elements, most=1)
    if suspects is None:
        return sigma, None
    if too_many(suspects):
        return None
    places = suspects.reshape(-1).nonzero().reshape(-1)
    few = _Elements(elements.device[suspects], elements.golden[suspects], elements.precision, pair.golden.dtype)
    few.stored, few.floor, few.least = elements.stored, elements.floor, elements.least
    probed = _probed_at(pair, uncertainty, few, places)
    if probed is None:
        return None
    there, left = probed
    if sigma is None:
        sigma = torch.zeros(elements.golden.shape, dtype=torch.float64)
    if there is not None:
        sigma = sigma.masked_scatter(suspects, there)
    return sigma, None if left is None else suspects.masked_scatter(suspects, left)


def _probed_at(pair: Pair, uncertainty: Uncertainty, elements: _Elements, places: Tensor) -> _Explained | None:
    """Probes of an elementwise call at these places alone; None where it turns out not to be elementwise."""
    narrow = uncertainty.at(pair.position, tuple(pair.golden.shape), places)
    if narrow is None or not same_values(narrow.exact[0], elements.golden):
        return None
    at_once = narrow.probed_at_once()
    if at_once is None:
        found = _probed(narrow.position, narrow.uncertainty, elements)
    else:
        found = at_once[0], elements.unexplained(*at_once)
    uncertainty.narrow_probes += narrow.uncertainty.probes
    return found


def _shared_among_ties(pair: Pair, uncertainty: Uncertainty, elements: _Elements, sigma: Tensor | None) -> Tensor:
    """Where an input has equal values and only the shares of the gradient among them differ.

    Which of several equal values is the largest is free, and so is the one that gets the gradient. Of a call that
    does more than to select, it is not known which of them compete: all that are equal.
    """
    keys = ties.groups(uncertainty.result, pair.position, elements.error > elements.bound(sigma))
    if keys is None:
        keys = uncertainty.result.source.tensors[pair.position].detach()
    _, group, count = torch.unique(keys.reshape(-1), return_inverse=True, return_counts=True)

    def summed(x: Tensor) -> Tensor:
        return torch.zeros(count.numel(), dtype=x.dtype).index_add_(0, group, x.reshape(-1))

    slack = summed(elements.bound(sigma)) + summed(elements.size) * elements.precision.stored
    agree: Tensor = (summed(elements.device - elements.golden).abs() <= slack) & (count > 1)
    return agree[group].reshape(elements.device.shape)


def _mask_or_none(mask: Tensor) -> Tensor | None:
    """The mask, if any element is in it."""
    return mask if bool(mask.any()) else None


class _Elements:
    """One result against its reference, element by element, in float64."""

    def __init__(
        self,
        device: Tensor,
        golden: Tensor,
        precision: Precision,
        golden_dtype: torch.dtype,
        stored: float = 1.0,  # how many units of rounding the result itself may be off
        floor: float = 0.0,  # of the bound
        least: float = 0.0,  # of sigma, relative to the result
    ) -> None:
        self.device, self.golden, self.precision = device, golden, precision
        self.stored, self.floor, self.least = stored, floor, least
        self.sums = False  # of many terms
        self.drift: Tensor | None = None  # what sums in some order are off, whose roundings all go one way
        self.error = (device - golden).abs()
        self.size = golden.abs()
        self.regular = math.isfinite(float(self.error.sum()))  # then all numbers are
        # a reference in the same precision has an error of its own
        self.reference = 2.0 if unit(golden_dtype) >= precision.stored else 0.0

    @functools.cached_property
    def largest(self) -> float:
        """Of the reference."""
        return float(self.size.max()) if self.size.numel() else 0.0

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

    def bound(self, sigma: Tensor | None) -> Tensor:
        """The largest error that is explained."""
        factor = (self.stored + self.reference) * self.precision.stored
        lowest = max(self.precision.smallest * (0.5 * self.stored), self.floor)
        if sigma is None:
            return (self.size * (factor + SIGMAS * self.least)).clamp_(min=lowest)
        if self.least:
            sigma = torch.maximum(sigma, self.size * self.least)
        found = (self.size * factor).clamp_(min=lowest).add_(sigma, alpha=SIGMAS)
        return found if self.drift is None else found.add_(self.drift, alpha=DRIFTS)

    def unexplained(self, sigma: Tensor | None = None, unsettled: Tensor | None = None) -> Tensor | None:
        """The elements that are not explained; None if all are."""
        if not self.error.numel():
            return None
        bound = self.bound(sigma)
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
        elif self.sums:  # of infinite terms with other signs, in some order
            unexplained &= ~(beyond & (~self.device.isfinite() | (self.device.abs() == self.precision.largest)))
        else:
            signs = self.device.sgn() == self.golden.sgn()
            unexplained &= ~(beyond & signs & (self.device.isinf() | (self.device.abs() == self.precision.largest)))
        if unsettled is not None:
            unexplained &= ~unsettled
        return _mask_or_none(unexplained)

    def excess(self, sigma: Tensor | None = None) -> float:
        """The largest error divided by its bound."""
        ratio = self.error / self.bound(sigma)
        if not self.regular:
            ratio = ratio.masked_fill(self.same | ~self.finite, 0.0)
        return float(ratio.nan_to_num(nan=0.0).max()) if ratio.numel() else 0.0


def _concluded(
    row: Row, elements: _Elements, suspects: Tensor | None, sigma: Tensor | None = None, hint: str = ""
) -> Row:
    """The row with its verdict: wrong if there are suspects, with the worst of them in the reason."""
    if suspects is None:
        return row._replace(excess=min(1.0, elements.excess(sigma)))
    count = int(suspects.sum())
    strange = suspects & ~elements.finite
    if bool(strange.any()):
        where, excess, size = first_place(strange), math.inf, ""
    else:
        ratio = (elements.error / elements.bound(sigma)).masked_fill(~suspects, 0.0).nan_to_num(nan=math.inf)
        where, excess = first_place(ratio == ratio.max()), float(ratio.max())
        size = f", {excess:.3g} times the rounding bound"
    device, golden = _as_texts(elements.device[where].item(), elements.golden[where].item())
    share = f"{count} of {suspects.numel()} elements, worst at {list(where)}"
    reason = f"{share}: {device} instead of {golden}{size}"
    bound = elements.bound(sigma)
    otherwise = ~(suspects | elements.same | (elements.error <= bound))  # explained by more than the bound
    bound.masked_fill_(otherwise, math.inf)
    return row._replace(verdict=WRONG, reason=joined(reason, hint), excess=excess, where=where, bound=bound)


def _as_texts(left: Any, right: Any) -> tuple[str, str]:
    """Two numbers with as many digits as it takes to tell them apart, nine at least."""
    texts = [(f"{left:.{digits}g}", f"{right:.{digits}g}") for digits in (9, 13, 17)]
    return next((pair for pair in texts if pair[0] != pair[1]), texts[0])


def _pattern_of_errors(pair: Pair, elements: _Elements, suspects: Tensor, sigma: Tensor | None) -> str:
    """What the errors look like, to be added to the reason."""
    wrong_device, wrong_golden = elements.device[suspects], elements.golden[suspects]
    if bool(wrong_device.isnan().any()):
        return "NaN where a number should be"
    structure = pair.uncertainty.structure if pair.uncertainty is not None else None
    multiplies = structure is not None and structure.contracts and pair.device.dtype == torch.float32
    if structure is not None and multiplies and sigma is not None and pair.has_tf32:
        # the sums' share of sigma, if every product had the ten bits of TF32
        grown = allowances.TF32 / (elements.precision.stored * math.sqrt(structure.longest_sum))
        limit = elements.bound(None) + sigma * (SIGMAS * max(grown, 1.0))
        share = (elements.error / limit)[suspects]
        if _MIN_TF32_SHARE < float(share.max()) < 4 and float((share > 1).double().mean()) < 0.05:
            allowed = allowances.tf32_allowed(pair.op)
            return f"as large as products in TF32 make it ({'allow_tf32' if allowed else 'but allow_tf32 is off'})"
    tiny = torch.finfo(elements.precision.dtype).smallest_normal
    if bool((wrong_device == 0).all()) and bool((wrong_golden.abs() < tiny).all()):
        return "subnormal numbers are flushed to zero"
    return ""
