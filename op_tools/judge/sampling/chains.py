"""Totals of millions of terms, really added up in float32, one after the other.

Roundings of terms that are equal, or all positive, go one way: a long chain of them drifts far from the exact total,
and partial results do not show it. A result that is as far off as such a chain is rounded by a correct kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from ...call.description import Tensor
from ..orders import DRIFTS, LANES, added, dealt_out

_AT_ONCE: Final = 1 << 23  # terms, a multiple of every number of lanes
_UNITS: Final = 2  # of the last place: a total this close needs no explanation


def as_rounded_in_order(
    results: Sequence[Tensor],
    partial: Sequence[Tensor],
    terms: Sequence[Tensor],
    finish: Callable[[float], float],
    squares: bool,
) -> list[Tensor]:
    """Copies of the results of a reduction; those that some order of adding explains are the exact ones instead.

    Each result is `finish` of a sum: of its terms, or of their `squares`. `partial` holds float64 sums of parts of it.
    """
    found = [r.detach().clone() for r in results]
    exact = [finish(total) for total in torch.stack([p.sum() for p in partial]).tolist()]
    sizes = torch.stack([p.abs().sum() for p in partial]).tolist()
    values = torch.stack([r.double() for r in found]).tolist()
    for number, (here, there) in enumerate(zip(values, exact)):
        unit = _UNITS * torch.finfo(found[number].dtype).eps
        if not abs(here - there) > unit * finish(sizes[number]):
            continue  # NaN and infinity are for the judge
        drift = max(abs(finish(total) - there) for total in _totals(terms[number].detach(), squares))
        if abs(here - there) <= DRIFTS * drift + unit * abs(there):
            found[number].fill_(there)
    return found


def _totals(terms: Tensor, squares: bool) -> Iterator[float]:
    """Sums in float32, in one chain and in several side by side."""
    running: dict[int, Any] = {}
    for part in terms.reshape(-1).split(_AT_ONCE):
        host = part.to("cpu", torch.float32).unsqueeze(1).numpy()
        host = host * host if squares else host
        running = {lanes: dealt_out(running.get(lanes), host, lanes) for lanes in LANES}
    for sums in running.values():
        yield float(added(sums)[0])
