"""The judgement of calls like earlier ones on the device itself: what it cannot say is right goes to the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..call.description import Tensor
from ..native.device_measures import DeviceQuery
from .golden import GoldenResult
from .measures import measure_on_device
from .pair import CallUncertainty, Pair, explained
from .standards import ulp
from .uncertainty import Structure, Uncertainty
from .verdict import RIGHT, Judgement, Row, Rules, difference_of_kind, indices_of, judge_plain, pairs_of, with_columns


class Unresolved(Exception):
    """Tensors on a device that cannot be judged there: their copies on the CPU are to be."""


def judge_on_device(
    name: str,
    device: Any,
    golden: Any,
    result: GoldenResult,
    part: str,
    rules: Rules,
    structure: Structure,
    needs: set[int],
    indices: Sequence[int | None] | None = None,
) -> Judgement:
    """`judge` for tensors that are still on the device, both sides; raises `Unresolved` unless all is right at once.

    `structure` is that of the call; `needs` are the positions of results that took a formula in such calls, and grows.
    """
    pairs, mismatch = pairs_of(name, part, device, golden)
    if mismatch:
        raise Unresolved
    of_call = CallUncertainty(result, part, [d for d, _ in pairs], None, structure)
    rows: list[Row] = []
    undecided: list[Pair] = []
    indices = indices or indices_of(pairs)
    for n, (left, right) in enumerate(pairs):
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            rows.append(judge_plain(Pair(name, part, indices[n], n, left, right, None), rules))
            continue
        problem, info = difference_of_kind(left, right)
        if problem:
            raise Unresolved
        atol, rtol, _ = rules.tolerance(name, left.dtype)
        rows.append(Row(name, part, indices[n], True, 0.0, 0.0, atol, rtol, info, 1.0))
        if left.is_floating_point() and left.numel():
            undecided.append(Pair(name, part, indices[n], n, left.detach(), right.detach(), of_call))
        elif not torch.equal(left, right):
            raise Unresolved
    if any(row.verdict != RIGHT for row in rows):
        raise Unresolved
    _settle(rows, undecided, of_call, needs)
    return Judgement(RIGHT, "", tuple(rows))


def _settle(rows: list[Row], pairs: list[Pair], of_call: CallUncertainty, needs: set[int]) -> None:
    """Fill in the rows of numbers; in two rounds at most, the second one for what takes a formula."""
    uncertainty = of_call.whole
    while pairs:
        queries = [_query(rows[p.position], p, of_call.of(p.device), p.position in needs) for p in pairs]
        again = []
        for pair, (columns, worst) in zip(pairs, measure_on_device(queries)):
            if columns is None or columns.units is None:
                raise Unresolved
            if columns.units * pair.unit_ratio <= 1 or (worst <= 1 and not uncertainty.structure.exact):
                row = with_columns(rows[pair.position], columns)
                rows[pair.position] = row if row.allclose else explained(row)
            elif pair.position in needs or uncertainty.structure.exact:
                raise Unresolved
            else:
                again.append(pair)
        needs.update([pair.position for pair in again])
        pairs = again


def _query(row: Row, pair: Pair, uncertainty: Uncertainty, by_formula: bool) -> DeviceQuery:
    bound = ulp.bound_without_probes(pair, uncertainty)
    terms = uncertainty.terms(pair.position, pair.golden) if by_formula else None
    if by_formula and terms is None:
        raise Unresolved
    known = (bound, None) if terms is None else terms.added_to(bound)
    return DeviceQuery(pair.device, pair.golden, row.atol, row.rtol, *known)
