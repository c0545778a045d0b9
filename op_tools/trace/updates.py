"""What optimizers do to parameters: the difference of the prints before and after a step is the print of the update.

However an optimizer is written: where parameters, gradients and earlier updates agree, so should the next update, up to
what rounding makes of it.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any, Final, NamedTuple

import numpy as np

from . import format as columns
from .behaviour import behaviour
from .edges import NORM, Side
from .fold import member_name
from .format import INPUT, OUTPUT, PROJECTIONS
from .graph import Graph
from .prints import distance

_DIGITS: Final = 2.0  # square roots of the unit, as between results of other operators
_SEVERAL_TIMES: Final = 16.0  # what optimizers make of the square root of a difference: they divide by small numbers
_STORED: Final = 4.0  # units of the parameter, which is rounded when it is written
_GRID: Final = 2.0**-34  # of the parameter: what prints do not see
_ESTIMATE: Final = 0.35  # of the logarithm of the ratio of two distances, each right to 25 %
_LARGER: Final = math.log(1.25)
_LEAST: Final = 4  # parameters
_FEW: Final = 0.2  # of the parameters
_NEAR: Final = 0.1  # gradients that are further apart say nothing of updates
_DIVIDES: Final = re.compile(r"div|sqrt|pow|norm|fused|reciprocal|sign")


class Update(NamedTuple):
    """One parameter in one step of the optimizer."""

    first: int  # operators that get it and that write it last
    last: int
    before: int  # tensors
    after: int
    unit: float  # of the lowest precision that the optimizer works in
    divides: bool  # whether it divides, takes roots or signs: of small numbers these make large ones


class Other(NamedTuple):
    """An update that differs: in which step, of which parameter, who writes it, sizes relative to its norm."""

    step: int
    name: str
    operators: tuple[int, int]
    sizes: tuple[float, float]
    apart: float  # of the larger update
    allowed: float


def first_other_update(sides: tuple[Side, Side], gradients: Any, until: int) -> Other | None:
    """The first update before an operator of the first run that is another one.

    `gradients(step, name)` says how far apart the gradients are that led to it, NaN where that is not known.
    """
    updates = [updates_of(side) for side in sides]
    apart: dict[str, float] = {}  # by name, how far the gradients up to now were apart
    for _, keys in itertools.groupby(updates[0], key=lambda key: key[0]):
        others: list[Other] = []
        sizes: list[Other] = []  # of which only the size can be judged
        for key in keys:
            mine, theirs, name = updates[0][key], updates[1].get(key), key[1]
            far = apart[name] = float(np.maximum(apart.get(name, 0.0), gradients(*key)))  # NaN stays
            if theirs is None or mine.last >= until or not math.isfinite(far):
                continue
            other, exact = _compared(sides, (mine, theirs), key, far)
            if other is None:
                continue
            if not exact and (mine.divides or theirs.divides):
                if far <= _NEAR and sides[0].unit_of(mine.after) == sides[1].unit_of(theirs.after):
                    sizes.append(other)
            elif other.apart > other.allowed:
                others.append(other)
        of_size = _of_other_size(sizes)
        others += [] if of_size is None else [of_size]
        if others:
            return min(others, key=lambda other: other.operators[0])
    return None


def _compared(
    sides: tuple[Side, Side], both: tuple[Update, Update], key: tuple[int, str], far: float
) -> tuple[Other | None, bool]:
    """Two updates of a parameter, and whether all that led to them agrees bit for bit."""
    rows = [side.row_of(t) for side, one in zip(sides, both) for t in (one.before, one.after)]
    x, x_after, y, y_after = rows
    if not all(row is not None and np.isfinite(row[: NORM + 1]).all() for row in rows):
        return None, False
    if len({side.shape_of(one.before) for side, one in zip(sides, both)}) > 1:
        return None, False
    norm = max(float(row[NORM]) for row in (x, x_after, y, y_after))
    sizes = float(distance(x, x_after)), float(distance(y, y_after))
    size = max(sizes)
    stored = max(side.unit_of(one.after) for side, one in zip(sides, both))
    noise = _STORED * max(stored, _GRID) * norm
    if size <= noise:
        return None, False
    update = x_after[:PROJECTIONS] - x[:PROJECTIONS], y_after[:PROJECTIONS] - y[:PROJECTIONS]
    start = float(distance(x, y)) / norm
    allowed = _DIGITS * math.sqrt(max(one.unit for one in both)) + _SEVERAL_TIMES * math.sqrt(far + start)
    told = sizes[0] / norm, sizes[1] / norm
    operators = both[0].last, both[1].last
    other = Other(*key, operators, told, float(distance(*update)) / size, allowed + noise / size)
    return other, far == 0.0 and start == 0.0


def _of_other_size(updates: list[Other]) -> Other | None:
    """The first update of a step if most are larger in one run; where optimizers divide, noise decides on the rest."""
    both = [one for one in updates if min(one.sizes) > 0]
    if len(both) < _LEAST:
        return None
    logs = np.array([math.log(one.sizes[1] / one.sizes[0]) for one in both])
    middle = float(np.median(logs))
    least = float(np.quantile(logs * math.copysign(1.0, middle), _FEW))
    allowed = max(_LARGER, 4.0 * _ESTIMATE / math.sqrt(len(logs)))
    if abs(middle) <= allowed or least <= _LARGER / 2:
        return None
    first = int(np.flatnonzero(logs * math.copysign(1.0, middle) >= abs(middle))[0])
    return both[first]._replace(apart=math.expm1(abs(middle)), allowed=math.expm1(allowed))


def updates_of(side: Side) -> dict[tuple[int, str], Update]:
    """The updates of a run, by step and name of the parameter, in order.

    Those are left out that an optimizer works at in several passes, and those that depend on random numbers.
    """
    graph = side.graph
    table = graph.operators
    of_optimizer = table["phase"] == columns.OPTIMIZER
    if not of_optimizer.any():
        return {}
    drawn, divides = (_steps(graph, of_optimizer, asked) for asked in (_draws, _DIVIDES.search))
    units = _units(side, of_optimizer)
    passes = np.cumsum(table["phase"] == columns.BACKWARD)
    found: dict[tuple[int, str], Update] = {}
    names: dict[int, str] = {}
    for is_output, which in ((False, INPUT), (True, OUTPUT)):
        starts, tensors = graph.side(which)
        owner = np.repeat(np.arange(graph.count), np.diff(starts))
        chosen = of_optimizer[owner] & (graph.tensors["kind"][tensors] == columns.PARAMETER)
        for operator, tensor in zip(owner[chosen].tolist(), tensors[chosen].tolist()):
            text = int(graph.tensors["name"][tensor])
            name = names.get(text)
            if name is None:
                name = names[text] = member_name(graph, tensor)
            step = graph.step_order[int(table["step"][operator])]
            one = found.get((step, name))
            if one is None:
                if not is_output and step not in drawn:
                    found[step, name] = Update(operator, -1, tensor, -1, units.get(step, 0.0), step in divides)
            elif is_output and operator >= one.first:
                found[step, name] = one._replace(last=operator, after=tensor)
    whole = {key: one for key, one in found.items() if one.last >= 0 and passes[one.last] == passes[one.first]}
    return dict(sorted(whole.items(), key=lambda item: (item[0][0], item[1].last)))


def _draws(name: str) -> bool:
    return behaviour(name).may_draw


def _steps(graph: Graph, of_optimizer: Any, asked: Any) -> set[int]:
    """The steps in which an optimizer calls something of a kind."""
    names, which = np.unique(graph.operators["name"], return_inverse=True)
    chosen = np.array([bool(asked(graph.trace.texts[n])) for n in names.tolist()], bool)[which]
    return {graph.step_order[step] for step in np.unique(graph.operators["step"][of_optimizer & chosen]).tolist()}


def _units(side: Side, of_optimizer: Any) -> dict[int, float]:
    """By step, the unit of the lowest precision in which the optimizer makes something."""
    graph = side.graph
    starts, tensors = graph.side(OUTPUT)
    owner = np.repeat(np.arange(graph.count), np.diff(starts))
    chosen = of_optimizer[owner]
    found: dict[int, float] = {}
    steps = graph.operators["step"][owner[chosen]]
    units = side.unit[graph.tensors["look"][tensors[chosen]]]
    for step in np.unique(steps).tolist():
        found[graph.step_order[step]] = float(units[steps == step].max())
    return found
