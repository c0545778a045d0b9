"""Calls that activation checkpointing repeats: with the same inputs they should make what the forward made."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

from .edges import Side, relative
from .format import FORWARD, RECOMPUTED
from .graph import Graph

_DIGITS: Final = 2.0  # square roots of the unit: half of the digits should agree


class Repeated(NamedTuple):
    """A call whose repetition makes something else."""

    original: int
    again: int
    apart: float  # relative to the norm
    allowed: float


def other_repetitions(side: Side) -> dict[tuple[int, str, str], Repeated]:
    """The first for each step, module and name, in order: calls with the same inputs and other results."""
    graph = side.graph
    phase = graph.operators["phase"]
    if not (phase == RECOMPUTED).any() or not len(side.rows):
        return {}
    originals: dict[Any, list[int]] = {}
    for operator in np.flatnonzero(phase == FORWARD).tolist():
        given = _given(side, operator)
        if given is not None:
            originals.setdefault((*_place(graph, operator), given), []).append(operator)
    found: dict[tuple[int, str, str], Repeated] = {}
    forward = graph.operators["forward"]
    for operator in np.flatnonzero(phase == RECOMPUTED).tolist():
        given, place = _given(side, operator), _place(graph, operator)
        known = [] if given is None else originals.get((*place, given), [])
        key = (graph.step_order[place[0]], graph.paths.get(place[1], ""), graph.names[operator])
        # The last call of a region is stopped in its middle, and its backward comes next.
        stopped = operator + 1 < graph.count and int(forward[operator + 1]) in (operator, *known)
        if not known or key in found or stopped:
            continue
        others = [_compared(side, original, operator) for original in known]
        if all(one is not None for one in others) and others[0] is not None:  # none of those with the same inputs
            found[key] = others[0]
    return found


def _compared(side: Side, original: int, operator: int) -> Repeated | None:
    """A repetition whose first result that can be compared is another one; None where all agree."""
    graph = side.graph
    for mine, again in zip(*(graph.outputs(n).tolist() for n in (original, operator))):
        x, y = side.row_of(mine), side.row_of(again)
        if x is None or y is None or side.shape_of(mine) != side.shape_of(again):
            continue
        apart, allowed = relative(x, y), _DIGITS * math.sqrt(side.unit_of(again))
        if apart > allowed > 0:
            return Repeated(original, operator, apart, allowed)
    return None


def _place(graph: Graph, operator: int) -> tuple[int, int, int, int]:
    step, module, name, arguments = (int(graph.operators[c][operator]) for c in ("step", "module", "name", "arguments"))
    return step, module, name, arguments


def _given(side: Side, operator: int) -> bytes | None:
    """The prints of all that goes in; None where one has none."""
    rows = [int(side.where[t]) for t in side.graph.inputs(operator).tolist()]
    return None if not rows or min(rows) < 0 else side.rows[rows].tobytes()
