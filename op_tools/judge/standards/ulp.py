"""The default standard: can rounding alone explain the difference? Whole numbers must be equal.

First with the rounding of the result itself, which nearly every correct element passes; where that is not enough, with
how far the roundings inside the call can move this element (`uncertainty.py`): by a formula, or by repeating the golden
run with random roundings.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from ...call import facts
from ...call.description import Tensor
from ...call.equality import same_values
from ...view.rows import WRONG, Row
from .. import formulas
from ..elements import SIGMAS, STORED, Elements, concluded, mask_or_none, pattern_of_errors
from ..measures import Bound, beyond
from ..pair import Pair, first_place, joined, precision_of_row
from ..rounding import Precision, precision_of
from ..signs import PROBES
from ..uncertainty import Uncertainty

_TRUST_IN_ONE_PROBE: Final = 0.5  # its sigma counts by half; that of n probes by the square root of n times as much
_MAX_NARROWED_SHARE: Final = 1 / 16  # share of elements in doubt above which a probe of the whole call is cheaper


def judge(row: Row, pair: Pair) -> Row:
    """By rounding, or by equality for whole numbers."""
    if pair.device.is_floating_point() or pair.device.is_complex():
        return _judge_rounding(row, pair)
    return _judge_whole_numbers(row, pair)


def _judge_whole_numbers(row: Row, pair: Pair) -> Row:
    different = pair.device != pair.golden
    if not bool(different.any()):
        return row
    uncertainty = pair.uncertainty
    if uncertainty is not None:
        chosen = facts.chosen_values(pair.op, uncertainty.result.source, pair.device, pair.golden, pair.position)
        if chosen is not None and not bool(chosen.any()):
            return row._replace(error_info=joined(row.error_info, "tie broken differently"))
        if chosen is None:
            different = different & ~uncertainty.unsettled(pair.position, different)
        else:
            different = chosen
    count = int(different.sum())
    if count == 0:
        return row._replace(error_info=joined(row.error_info, "within rounding uncertainty"))
    where = first_place(different)
    values = (pair.device[where].item(), pair.golden[where].item())
    reason = f"{count} of {different.numel()} differ, first at {list(where)}: {values[0]} instead of {values[1]}"
    return row._replace(verdict=WRONG, reason=reason, excess=math.inf, where=where)


def _judge_rounding(row: Row, pair: Pair) -> Row:
    dtype, call = pair.device.dtype, pair.of_call
    precision = precision_of(dtype) if call is None else precision_of_row(dtype, call.result, call.part)
    units = None if pair.units is None else pair.units * precision_of(dtype).stored / precision.stored
    if units is not None and units <= 1:  # as good as rounding the reference
        return row._replace(excess=units) if units else row
    known = pair.uncertainty
    uncertainty = known if known is not None and known.usable else None
    if units is not None and uncertainty is not None and not uncertainty.structure.exact:
        least = STORED + SIGMAS * uncertainty.least_error(pair.position) / precision.stored
        if units <= least:  # what any probes would allow
            return row._replace(excess=units / least)
        worst = _worst_by_formula(pair, uncertainty, precision)
        if worst <= 1:
            return row._replace(excess=worst)
    elements = Elements(pair.sides.left, pair.sides.right, precision, pair.golden.dtype)
    if units is None and elements.unexplained(1.0) is None:
        return row._replace(excess=elements.excess(1.0))
    if known is None:
        return concluded(row, elements, elements.unexplained(STORED), STORED)
    if uncertainty is None:
        # sparse and the like: the only measure is the size of the whole result
        flat = torch.full_like(elements.size, float(elements.size.nan_to_num(posinf=0.0).max()) * precision.stored)
        return concluded(row, elements, elements.unexplained(STORED, flat), STORED, flat)
    stored = 1.0 if uncertainty.structure.exact else STORED
    if stored == STORED:
        elements.floor = _lowest_of_sums(precision, uncertainty)
        elements.least = uncertainty.least_error(pair.position)
    sigma, suspects = _movement(pair, uncertainty, elements, stored)
    if suspects is not None and uncertainty.part == "grad_input" and uncertainty.structure.selects:
        values = uncertainty.result.source.tensors[pair.position]
        suspects = mask_or_none(suspects & ~_shared_among_ties(values, elements, stored, sigma))
    hint = "" if suspects is None else pattern_of_errors(pair, elements, suspects, sigma)
    return concluded(row, elements, suspects, stored, sigma, hint)


def _lowest_of_sums(precision: Precision, uncertainty: Uncertainty) -> float:
    """Below the normal numbers, each term of a sum may be off by a whole step."""
    return precision.smallest * SIGMAS * math.sqrt(uncertainty.structure.longest_sum)


def bound_without_probes(precision: Precision, uncertainty: Uncertainty, position: int) -> Bound:
    """What every correct result may be off, whatever goes on inside the call."""
    return Bound(
        STORED * precision.stored,
        max(precision.smallest * (0.5 * STORED), _lowest_of_sums(precision, uncertainty)),
        SIGMAS,
        uncertainty.least_error(position),
    )


def _worst_by_formula(pair: Pair, uncertainty: Uncertainty, precision: Precision) -> float:
    """Largest error beside its bound, without a probe; more than 1 if that does not explain it."""
    bound = bound_without_probes(precision, uncertainty, pair.position)
    worst = math.inf
    for find in (_by_some_roundings, _by_all_products):
        found = find(pair, uncertainty, bound)
        worst = math.inf if found is None else found
        if worst <= 1:
            return worst
    return _by_elements_in_doubt(pair, uncertainty, bound, precision)


def _by_some_roundings(pair: Pair, uncertainty: Uncertainty, bound: Bound) -> float | None:
    """By the formulas that count less than the probes do."""
    found = bound_by_formula(bound, uncertainty, pair.position, pair.golden)
    left = None if found is None else beyond(pair.sides, *found)
    return None if left is None else left.worst


def bound_by_formula(
    bound: Bound, uncertainty: Uncertainty, position: int, golden: Tensor
) -> tuple[Bound, Tensor | None] | None:
    """The bound with what a formula adds to it, and the squares that belong to it; None where there is no formula."""
    source, precision, structure = uncertainty.result.source, uncertainty.precision, uncertainty.structure
    terms = formulas.terms(formulas.Asked(source, position, uncertainty.backward, golden, precision, structure))
    if terms is None:
        return None
    return bound._replace(of_squares=terms.of_squares, of_result=terms.of_result), terms.squares


def _by_all_products(pair: Pair, uncertainty: Uncertainty, bound: Bound) -> float | None:
    """By all squared terms of sums of products."""
    squares = uncertainty.squares(pair.position, torch.float32)
    if squares is None or squares.shape != pair.golden.shape:
        return None
    of_squares, of_result = uncertainty.weights_of_squares()
    found = beyond(pair.sides, bound._replace(of_squares=of_squares, of_result=of_result), squares)
    return None if found is None else found.worst


def _by_elements_in_doubt(pair: Pair, uncertainty: Uncertainty, bound: Bound, precision: Precision) -> float:
    """Of an elementwise call, by probes of the few elements in doubt."""
    if not uncertainty.structure.elementwise:
        return math.inf
    found = beyond(pair.sides, bound, most=max(1, int(pair.device.numel() * _MAX_NARROWED_SHARE)))
    if found is None or found.exceeding > found.places.numel():
        return math.inf
    places = found.places
    device = pair.sides.device.reshape(-1)[places].to(torch.float64)
    elements = Elements(device, pair.sides.golden.reshape(-1)[places], precision, pair.golden.dtype)
    elements.floor, elements.least = _lowest_of_sums(precision, uncertainty), bound.least
    probed = _probed_at(pair, uncertainty, elements, tuple(pair.golden.shape), places, STORED)
    if probed is None or probed[1] is not None:
        return math.inf
    return min(1.0, elements.excess(STORED, probed[0]))


_Explained = tuple[Tensor | None, Tensor | None]  # sigma, and the elements that it does not explain


def _movement(pair: Pair, uncertainty: Uncertainty, elements: Elements, stored: float) -> _Explained:
    """By formula, on the elements in doubt alone, or by as many probes of the whole call as it takes."""
    for dtype in (torch.float32, torch.float64):
        sigma = uncertainty.by_formula(pair.position, elements.golden, dtype)
        if sigma is None:
            break
        suspects = elements.unexplained(stored, sigma.to(torch.float64))
        if dtype == torch.float64 or (suspects is None and bool(sigma.sum().isfinite())):
            return sigma.to(torch.float64), suspects
    if uncertainty.structure.elementwise:
        found = _narrowed(pair, uncertainty, elements, stored)
        if found is not None:
            return found
    return _probed(pair.position, uncertainty, elements, stored)


def _share(mask: Tensor) -> float:
    return int(mask.sum()) / mask.numel()


def _probed(
    position: int, uncertainty: Uncertainty, elements: Elements, stored: float, most: int = PROBES
) -> _Explained:
    """After as many probes as it takes to clear the elements in doubt."""
    while True:
        sigma = uncertainty.sigma(position)
        if sigma is not None:
            sigma.mul_(min(1.0, _TRUST_IN_ONE_PROBE * math.sqrt(uncertainty.probes)))
        suspects = elements.unexplained(stored, sigma, uncertainty.not_settled(position))
        if suspects is None or uncertainty.probes >= most or not uncertainty.grow():
            return sigma, suspects


def _narrowed(pair: Pair, uncertainty: Uncertainty, elements: Elements, stored: float) -> _Explained | None:
    """The same for an elementwise call, on the elements in doubt alone; None where that cannot be done."""
    sigma: Tensor | None = None
    suspects = elements.unexplained(stored)
    whole = not uncertainty.on_lists  # of a list, one tensor is much less than all of them
    if whole and suspects is not None and _share(suspects) > _MAX_NARROWED_SHARE:
        # one probe of the whole call clears most of them
        sigma, suspects = _probed(pair.position, uncertainty, elements, stored, most=1)
    if suspects is None:
        return sigma, None
    if whole and _share(suspects) > _MAX_NARROWED_SHARE:
        return None
    places = suspects.reshape(-1).nonzero().reshape(-1)
    golden = elements.golden.reshape(-1)[places]
    small = Elements(elements.device.reshape(-1)[places], golden, elements.precision, pair.golden.dtype)
    small.floor, small.least = elements.floor, elements.least
    probed = _probed_at(pair, uncertainty, small, tuple(elements.golden.shape), places, stored)
    if probed is None:
        return None
    there, left = probed
    everywhere = torch.zeros(elements.golden.shape, dtype=torch.float64) if sigma is None else sigma.contiguous()
    if there is not None:
        everywhere.view(-1)[places] = there
    if left is None:
        return everywhere, None
    remaining = torch.zeros(elements.golden.shape, dtype=torch.bool)
    remaining.view(-1)[places] = left
    return everywhere, remaining


def _probed_at(
    pair: Pair, uncertainty: Uncertainty, elements: Elements, shape: tuple[int, ...], places: Tensor, stored: float
) -> _Explained | None:
    """Probes of an elementwise call at these places alone; None where it turns out not to be elementwise."""
    narrow = uncertainty.at(pair.position, shape, places)
    if narrow is None or not same_values(narrow.exact, elements.golden):
        return None
    at_once = narrow.probed_at_once()
    if at_once is None:
        found = _probed(narrow.position, narrow.uncertainty, elements, stored)
    else:
        found = at_once[0], elements.unexplained(stored, *at_once)
    uncertainty.narrow_probes += narrow.uncertainty.probes
    return found


def _shared_among_ties(values: Tensor, elements: Elements, stored: float, sigma: Tensor | None) -> Tensor:
    """Where an input has equal values and only the shares of the gradient among them differ.

    Which of several equal values is the largest is free, and so is the one that gets the gradient.
    """
    _, group, count = torch.unique(values.detach().reshape(-1), return_inverse=True, return_counts=True)

    def summed(x: Tensor) -> Tensor:
        return torch.zeros(count.numel(), dtype=x.dtype).index_add_(0, group, x.reshape(-1))

    slack = summed(elements.bound(stored, sigma)) + summed(elements.size) * elements.precision.stored
    agree: Tensor = (summed(elements.device - elements.golden).abs() <= slack) & (count > 1)
    return agree[group].reshape(elements.device.shape)
