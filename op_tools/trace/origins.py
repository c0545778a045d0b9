"""Where two runs work on other tensors: an operator that only one of them has, swapped operands, other values.

Two operators that correspond should get what corresponding operators made. Where they do not, and what they get is
further apart than what went into the part in between explains, the runs part there, though no operator is wrong. The
part in between has operators of its own on either side (`scaled_dot_product_attention` and what it stands for): of its
result, half of the digits should agree.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import numpy as np

from ..call.functions import SUM
from ..call.graphs import OP as COMPILED
from . import format as columns
from .align import Alignment
from .behaviour import behaviour, draws
from .edges import NORM, Edges, Side, relative, share
from .fold import converted, member_name
from .format import INPUT, OUTPUT, PROJECTIONS
from .graph import Graph
from .updates import first_other_update

_MAX_BEHIND: Final = 64
_SEVERAL_TIMES: Final = 16.0  # what a part of a run makes of a difference
_DIGITS: Final = 2.0  # square roots of the unit between results of other operators
_LOSS_SCALE: Final = 8.0  # binary digits; scalers of gradients begin with 16
_DIFFERS: Final = "what they make of them differs"
_TF32: Final = 2.0**-11
_UNITS_GIVEN: Final = 4.0  # between values in two dtypes


# A pair, why, the distances of inputs and outputs, what is allowed, True, and the operators where these are no pair
Found = tuple[int, str, float, float, float, bool, tuple[int, int] | None]


class Origins:
    """For each tensor of either run how far it is from its counterpart, as far as corresponding operators say."""

    def __init__(self, alignment: Alignment, one: Side, two: Side, ins: Edges, outs: Edges) -> None:
        self._alignment, self._one, self._two, self._ins, self._outs = alignment, one, two, ins, outs
        self._graphs = (alignment.first, alignment.second)
        self._loose = self._written_otherwise()
        self._place = [_places(graph, alignment.pairs[:, n], ~self._loose) for n, graph in enumerate(self._graphs)]
        self._same = [converted(graph) for graph in self._graphs]
        self._unseen = [(g.tensors["kind"] == columns.GRADIENT) & ~_returned(g) for g in self._graphs]
        self._producers = [graph.tensors["producer"].copy() for graph in self._graphs]
        for producer, same in zip(self._producers, self._same):
            producer[list(same)] = producer[list(same.values())]
        self._spread = [self._spread_of(side, outs) for side in (0, 1)]
        in_tf32 = any(graph.trace.facts.get("tf32") for graph in self._graphs)
        self._least_unit = _TF32 if in_tf32 else 0.0

    def _written_otherwise(self) -> Any:
        """Pairs of operators of optimizers that are not the same function, or that get tensors of other parameters."""
        graphs, pairs = self._graphs, self._alignment.pairs
        texts = {text: n for n, text in enumerate(dict.fromkeys(t for g in graphs for t in g.trace.texts))}
        names = [
            np.array([texts[t] for t in g.trace.texts], np.int64)[g.operators["name"][pairs[:, n]]]
            for n, g in enumerate(graphs)
        ]
        others = self._ins.others | self._outs.others
        return (graphs[0].operators["phase"][pairs[:, 0]] == columns.OPTIMIZER) & ((names[0] != names[1]) | others)

    def _spread_of(self, side: int, outs: Edges) -> Any:
        """Distances from the counterparts; what only one run made is as far off as what it was made of."""
        graph, place = self._graphs[side], self._place[side]
        producer, texts = self._producers[side], graph.trace.texts
        shares, furthest = _shares(outs), np.full(len(self._alignment.pairs) + 1, -np.inf)
        np.maximum.at(furthest, outs.owner, shares)
        of_other_shape = self._of_other_shape(side, furthest[:-1] < 0)
        furthest = np.where(furthest < 0, np.inf, furthest)  # none of its outputs is comparable
        found = np.where(place[producer] >= 0, furthest[np.maximum(place[producer], -1)], 0.0)
        alike = ~self._loose[outs.owner]
        tensors, shares = outs.tensors[side][alike], shares[alike]
        found[tensors[::-1]] = shares[::-1]  # others may hand on a tensor: who made it counts
        made = [producer[t] for producer, t in zip(self._producers, self._ins.tensors)]
        alone = (made[0] < 0) & (made[1] < 0) & ~self._ins.others[self._ins.owner]
        least = np.full(len(found), np.inf)
        np.minimum.at(least, self._ins.tensors[side][alone], _shares(self._ins)[alone])
        given = np.zeros(len(found), bool)
        given[self._ins.tensors[side][alone]] = True
        found = np.where(given, least, found)
        self._leave_gradients(side, outs, found)
        copies: dict[int, list[int]] = {}
        for copy, tensor in self._same[side].items():
            copies.setdefault(tensor, []).append(copy)
            found[copy] = found[tensor]
        backward, begins = graph.operators["phase"] == columns.BACKWARD, _begins(graph)
        for operator in np.flatnonzero((place[:-1] < 0) | of_other_shape).tolist():
            came, went = graph.inputs(operator), graph.outputs(operator)
            far = float(found[came].max()) if len(came) else 0.0
            lost = backward[operator] and not begins[operator] and (not len(came) or bool((producer[came] < 0).any()))
            name, said = graph.names[operator], texts[int(graph.operators["arguments"][operator])]
            if lost or behaviour(name).free or draws(name, said):
                far = math.inf
            found[went] = np.where(producer[went] == operator, far, np.maximum(found[went], far))
            for tensor in went.tolist():
                for other in copies.get(tensor, ()):
                    found[other] = found[tensor]
        return found

    def _of_other_shape(self, side: int, asked: Any) -> Any:
        """Operators of pairs whose results all have other shapes: these are as far off as what they are made of."""
        graph, sides = self._graphs[side], (self._one, self._two)
        found = np.zeros(graph.count, bool)
        for pair in np.flatnonzero(asked).tolist():
            operators = self._alignment.pairs[pair].tolist()
            made = [g.outputs(n).tolist() for g, n in zip(self._graphs, operators)]
            shapes = [[one.shape_of(t) for t in some] for one, some in zip(sides, made)]
            printed = all(one.where[t] >= 0 for one, some in zip(sides, made) for t in some)
            found[operators[side]] = printed and all(map(len, made)) and shapes[0] != shapes[1]
        return found

    def _leave_gradients(self, side: int, outs: Edges, found: Any) -> None:
        """Distances of gradients of which nobody saw where they came from, as those that DDP reduces.

        They are no further off than what backward passes have made up to then, of the same shape.
        """
        graph, place = self._graphs[side], self._alignment.pairs[:, side]
        asked = np.flatnonzero(self._unseen[side])
        if not len(asked):
            return
        edges = graph.trace["edges"]
        first = np.full(len(found), graph.count, np.int64)
        used = edges["side"] == INPUT
        np.minimum.at(first, edges["tensor"][used], edges["operator"][used])
        made = (graph.operators["phase"] == columns.BACKWARD)[place[outs.owner]]
        operators, tensors, shares = place[outs.owner][made], outs.tensors[side][made], _shares(outs)[made]
        order = np.argsort(operators, kind="stable")
        shapes = graph.looks["shape"][graph.tensors["look"]]
        found[asked] = np.inf
        for shape in np.unique(shapes[asked]).tolist():
            mine = order[shapes[tensors[order]] == shape]
            furthest = np.maximum.accumulate(shares[mine])
            wanted = asked[shapes[asked] == shape]
            at = np.searchsorted(operators[mine], first[wanted]) - 1
            found[wanted[at >= 0]] = furthest[at[at >= 0]]

    def first(self, before: int) -> Found | None:
        """The first pair, up to one, that gets other tensors."""
        ins, place, spread = self._ins, self._place, self._spread
        made = [producer[t] for producer, t in zip(self._producers, ins.tensors)]
        at = [p[m] for p, m in zip(place, made)]
        shares = _shares(ins)
        output = [g.tensors["output"][t] for g, t in zip(self._graphs, ins.tensors)]
        same = (at[0] == at[1]) & ((at[0] == -1) | ((at[0] >= 0) & (output[0] == output[1])))
        same &= ~(self._unseen[0][ins.tensors[0]] & self._unseen[1][ins.tensors[1]])
        far = [np.where(a >= ins.owner, 0.0, one[t]) for a, one, t in zip(at, spread, ins.tensors)]  # later: no reason
        explained = np.maximum(*far)
        mine, theirs = (self._alignment.pairs[:, n][ins.owner] for n in (0, 1))
        phases = self._graphs[0].operators["phase"][mine]
        begins = np.where(at[0] == -1, _begins(self._graphs[0])[mine], _begins(self._graphs[1])[theirs])
        lost = (
            ((at[0] == -1) ^ (at[1] == -1)) & (phases == columns.BACKWARD) & ~begins
        )  # nobody saw who made one of them
        unit = np.maximum(np.maximum(ins.first, ins.second), self._least_unit)
        allowed = _SEVERAL_TIMES * explained + _DIGITS * np.sqrt(unit)
        odd = ~same & np.isfinite(explained) & ~lost & (ins.owner <= before) & ~self._without_order()[mine]
        named = [g.tensors["name"][t] > 0 for g, t in zip(self._graphs, ins.tensors)]
        named = named[0] & named[1] & ~ins.others[ins.owner]
        odd &= (phases != columns.OPTIMIZER) | named  # there are many ways to write an optimizer
        odd &= (shares > allowed) | (ins.strange & (explained < 1.0))
        found: Found | None = None
        for edge in np.flatnonzero(odd).tolist():
            if not scaled(*self._ins.of(self._one, self._two, edge)) and self._stands_there(edge):
                pair, apart = int(ins.owner[edge]), float(shares[edge])
                found = pair, self._told(edge), apart, apart, float(allowed[edge]), True, None
                break
        found = self._of_other_shapes(before if found is None else found[0] - 1) or found
        found = self._of_other_gradients(self._until(before, found)) or found
        return self._of_other_updates(self._until(before, found)) or found

    def _until(self, before: int, found: Found | None) -> int:
        """The operator of the first run where it is known already that the runs part."""
        if found is not None:
            return found[6][0] if found[6] is not None else int(self._alignment.pairs[found[0], 0])
        starts = self._alignment.pairs[:, 0]
        return int(starts[before]) + 1 if before < len(starts) else self._graphs[0].count

    def _of_other_updates(self, until: int) -> Found | None:
        """The first parameter that an optimizer changes otherwise, though gradients and parameters agree."""
        starts = self._alignment.pairs[:, 0]

        def gradients(step: int, name: str) -> float:
            tensors = [one.get((step, f"{name}.grad"), (-1, -1))[1] for one in self._gradients]
            x, y = (side.row_of(t) for side, t in zip(self.sides, tensors))
            return math.nan if x is None or y is None else relative(x, y)

        other = first_other_update(self.sides, gradients, until)
        if other is None:
            return None
        pair = max(0, int(np.searchsorted(starts, other.operators[0], side="right")) - 1)
        sizes = f"{other.sizes[0]:.3g} of its norm in A, {other.sizes[1]:.3g} in B"
        told = f"the optimizer changes {other.name} otherwise: by {sizes}"
        return pair, told, other.apart, other.apart, other.allowed, True, other.operators

    def _of_other_gradients(self, until: int) -> Found | None:
        """The first operators, before one, where an optimizer gets gradients that are others, however it is written."""
        given, sides, starts = self._gradients, self.sides, self._alignment.pairs[:, 0]
        for key, (operator, mine) in given[0].items():
            pair = max(0, int(np.searchsorted(starts, operator, side="right")) - 1)
            if key not in given[1] or operator >= until:
                continue
            other, theirs = given[1][key]
            tensors = (mine, theirs)
            x, y = (side.row_of(t) for side, t in zip(sides, tensors))
            if x is None or y is None or len({side.shape_of(t) for side, t in zip(sides, tensors)}) > 1:
                continue
            explained = max(float(spread[t]) for spread, t in zip(self._spread, tensors))
            if not math.isfinite(explained) or scaled(x, y):
                continue
            apart, unit = relative(x, y), max(side.unit_of(t) for side, t in zip(sides, tensors))
            allowed = _SEVERAL_TIMES * explained + _DIGITS * math.sqrt(max(unit, self._least_unit))
            if apart > allowed:
                titles = [g.tensor_title(t) for g, t in zip(self._graphs, tensors)]
                told = f"the optimizer gets other gradients: {titles[0]} in A, {titles[1]} in B"
                return pair, told, apart, apart, allowed, True, (operator, other)
        return None

    def _of_other_shapes(self, before: int) -> Found | None:
        """The first pair, up to one, whose inputs are others already by their shapes, and whose results differ."""
        outs, shares = self._outs, _shares(self._outs)
        unit = np.maximum(np.maximum(outs.first, outs.second), self._least_unit)
        chosen = self._ins.others[outs.owner] & (outs.owner <= before) & (shares > _DIGITS * np.sqrt(unit))
        for edge in np.flatnonzero(chosen).tolist():
            pair = int(outs.owner[edge])
            mine = self._alignment.pairs[pair].tolist()
            inputs = [g.inputs(n) for g, n in zip(self._graphs, mine)]
            shapes = [[side.shape_of(t) for t in given] for side, given in zip((self._one, self._two), inputs)]
            backward = int(self._graphs[0].operators["phase"][mine[0]]) != columns.FORWARD
            if backward or shapes[0] == shapes[1] or self._is_random(mine[0]):
                continue
            explained = max((float(spread[t].max()) for spread, t in zip(self._spread, inputs) if len(t)), default=0.0)
            allowed = _SEVERAL_TIMES * explained + _DIGITS * math.sqrt(float(unit[edge]))
            if float(shares[edge]) > allowed:
                if len(shapes[0]) != len(shapes[1]):
                    told = f"they get other tensors: {len(shapes[0])} in A, {len(shapes[1])} in B"
                    return pair, f"{told}; {_DIFFERS}", float(shares[edge]), float(shares[edge]), allowed, True, None
                place = next(n for n, (x, y) in enumerate(zip(*shapes)) if x != y)
                titles = [g.tensor_title(int(t[place])) for g, t in zip(self._graphs, inputs)]
                told = (
                    f"they get other tensors: {titles[0]} {shapes[0][place]} in A, {titles[1]} {shapes[1][place]} in B"
                )
                apart = float(shares[edge])
                return pair, f"{told}; {_DIFFERS}", apart, apart, allowed, True, None
        return None

    def _is_random(self, operator: int) -> bool:
        graph = self._graphs[0]
        said = graph.trace.texts[int(graph.operators["arguments"][operator])]
        return behaviour(graph.names[operator]).free or draws(graph.names[operator], said)

    def _without_order(self) -> Any:
        """Operators that order what they get themselves: sums of gradients."""
        found = np.zeros(self._graphs[0].count, bool)
        for side, one in enumerate(self._graphs):
            chosen = np.array([text.startswith(SUM) for text in one.trace.texts], bool)
            pairs = self._alignment.pairs
            found[pairs[:, 0][chosen[one.operators["name"]][pairs[:, side]]]] = True
        return found

    def _stands_there(self, edge: int) -> bool:
        """Whether an operator takes the place of another one, where a compiler may have taken calls together.

        It hands on tensors of other calls: then who made what goes in says little.
        """
        pair = int(self._ins.owner[edge])
        named = [g.names[n] for g, n in zip(self._graphs, self._alignment.pairs[pair].tolist())]
        if not any(name.startswith(f"{COMPILED}.") for name in named):
            return True
        if int(self._graphs[0].operators["phase"][self._alignment.pairs[pair, 0]]) == columns.BACKWARD:
            return False
        made = [int(producer[t[edge]]) for producer, t in zip(self._producers, self._ins.tensors)]
        at = [int(place[n]) for place, n in zip(self._place, made)]
        if max(at) == -2:
            return True
        for side in (0, 1):  # one of them has an operator more, right behind what both have
            if at[side] == -2 and at[1 - side] >= 0:
                return int(self._alignment.pairs[at[1 - side], side]) in self._behind(side, made[side])
        return False

    def _behind(self, side: int, operator: int) -> set[int]:
        """The operators of which one that only this run has is made, through others of that sort."""
        found, waiting = set[int](), [operator]
        while waiting and len(found) < _MAX_BEHIND:
            for made in self._producers[side][self._graphs[side].inputs(waiting.pop())].tolist():
                if made >= 0 and made not in found:
                    found.add(made)
                    waiting += [made] if self._place[side][made] == -2 else []
        return found

    def _told(self, edge: int) -> str:
        titles = [g.tensor_title(int(t[edge])) for g, t in zip(self._graphs, self._ins.tensors)]
        return f"they get other tensors: {titles[0]} in A, {titles[1]} in B"

    @functools.cached_property
    def _gradients(self) -> list[dict[tuple[int, str], tuple[int, int]]]:
        return [_gradients(graph) for graph in self._graphs]

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both runs."""
        return self._one, self._two

    def given(self) -> list[str]:
        """Names of parameters, buffers and inputs whose first values differ by more than rounding to their dtypes."""
        found: dict[str, bool] = {}
        ins, graph = self._ins, self._graphs[0]
        shares, producers = _shares(ins), [g.tensors["producer"] for g in self._graphs]
        kinds, members = graph.tensors["kind"], (columns.PARAMETER, columns.BUFFER)
        phases = graph.operators["phase"]
        forward = (phases == columns.FORWARD)[self._alignment.pairs[:, 0]]
        seen: set[int] = set()
        for edge in np.flatnonzero(forward[ins.owner]).tolist():
            mine, theirs = int(ins.tensors[0][edge]), int(ins.tensors[1][edge])
            if mine in seen:
                continue
            seen.add(mine)
            name = member_name(graph, mine) if kinds[mine] in members else ""
            if bool(name) != (self._graphs[1].tensors["kind"][theirs] in members) or kinds[mine] == columns.GRADIENT:
                continue
            if name and producers[0][mine] >= 0 and phases[producers[0][mine]] != columns.FORWARD:
                continue  # an optimizer, say, has written to it
            if not name:
                if producers[0][mine] >= 0 or producers[1][theirs] >= 0 or graph.tensors["base"][mine] >= 0:
                    continue
                pair = int(ins.owner[edge])
                operator = int(self._alignment.pairs[pair, 0])
                if graph.operators["group"][operator]:
                    continue  # C++ code puts together what DDP sends
                name = f"input {int(ins.place[edge])} of {graph.titles[operator]}"
                step = int(graph.operators["step"][operator] - graph.operators["step"].min())
                name += f" in step {step}" if step else ""
            if name not in found:
                limit = _UNITS_GIVEN * max(float(ins.first[edge]), float(ins.second[edge]))
                found[name] = bool(shares[edge] > limit or ins.strange[edge])
        return [name for name, differs in (self._members_given(found) | found).items() if differs]

    def _members_given(self, known: dict[str, bool]) -> dict[str, bool]:
        """Whether members of the model differ that no corresponding operators get, as where FSDP gathers them."""
        sides, found = self.sides, dict[str, bool]()
        first = [_first_members(graph) for graph in self._graphs]
        for name, mine in first[0].items():
            tensors = (mine, first[1].get(name, -1))
            x, y = (side.row_of(t) for side, t in zip(sides, tensors))
            if name in known or x is None or y is None or len({s.shape_of(t) for s, t in zip(sides, tensors)}) > 1:
                continue
            found[name] = relative(x, y) > _UNITS_GIVEN * max(s.unit_of(t) for s, t in zip(sides, tensors))
        return found


def scaled(x: Any, y: Any) -> bool:
    """Whether one of two prints is the other times a large power of two, as scalers of gradients multiply by."""
    size = float(np.dot(x[:PROJECTIONS], x[:PROJECTIONS]))
    if not size or not np.isfinite(y[:NORM]).all() or not np.isfinite(size):
        return False
    factor = float(np.dot(x[:PROJECTIONS], y[:PROJECTIONS])) / size
    rest = float(np.abs(y[:PROJECTIONS] - factor * x[:PROJECTIONS]).max())
    if not factor or rest > 0.05 * float(np.abs(y[:PROJECTIONS]).max()):
        return False
    digits = math.log2(abs(factor))
    return abs(digits) >= _LOSS_SCALE - 0.1 and abs(digits - round(digits)) < 0.1


def _gradients(graph: Graph) -> dict[tuple[int, str], tuple[int, int]]:
    """The gradients that an optimizer gets, by step and name: the first operator that gets one, and the tensor."""
    found: dict[tuple[int, str], tuple[int, int]] = {}
    starts, tensors = graph.side(INPUT)
    steps = graph.operators["step"]
    owner = np.repeat(np.arange(graph.count), np.diff(starts))
    gradients = graph.tensors["kind"][tensors] == columns.GRADIENT
    chosen = (graph.operators["phase"][owner] == columns.OPTIMIZER) & gradients
    for operator, tensor in zip(owner[chosen].tolist(), tensors[chosen].tolist()):
        key = graph.step_order[int(steps[operator])], member_name(graph, tensor)
        found.setdefault(key, (operator, tensor))
    return found


def _first_members(graph: Graph) -> dict[str, int]:
    """The first tensor of each parameter and buffer, if no operator of the trace has made it."""
    found: dict[str, int] = {}
    for tensor in np.flatnonzero(np.isin(graph.tensors["kind"], (columns.PARAMETER, columns.BUFFER))).tolist():
        found.setdefault(member_name(graph, tensor), tensor)
    return {name: tensor for name, tensor in found.items() if graph.tensors["producer"][tensor] < 0}


def _shares(edges: Edges) -> Any:
    """Distances relative to the norm; infinite where NaN or Inf differ."""
    found = share(edges)
    return np.where(np.isfinite(found) & ~edges.strange, found, np.inf)


def _returned(graph: Graph) -> Any:
    """For each tensor whether an operator returned it, or wrote to it."""
    found = np.zeros(graph.trace.count("tensors"), bool)
    edges = graph.trace["edges"]
    found[edges["tensor"][edges["side"] == OUTPUT]] = True
    return found


def _begins(graph: Graph) -> Any:
    """Whether a backward pass begins with an operator; nobody in the trace makes the gradient that it gets."""
    backward = graph.operators["phase"] == columns.BACKWARD
    return backward & ~np.append(False, backward[:-1])


def _places(graph: Graph, operators: Any, chosen: Any) -> Any:
    """For each operator its pair if that is chosen, -2 else; the last is for tensors that nobody made: -1."""
    place = np.full(graph.count + 1, -2, np.int64)
    place[operators[chosen]] = np.flatnonzero(chosen)
    place[-1] = -1
    return place
