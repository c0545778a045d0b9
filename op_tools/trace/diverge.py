"""Where two aligned runs part: operators whose inputs agree to rounding and whose outputs do not.

The distance of two tensors is estimated from their fingerprints. What rounding may do to an output has two parts. The
operator's own: a unit of the dtype for each element that is stored, and of float32 for what is added up, whose size the
norms of the inputs bound. And what the inputs' own difference becomes, which the run says in three ways: the condition
of the operator (the norms of what went in, over that of what came out), the range of the arguments of functions that
are steep, and how much the other operators of its kind made of a difference in the same two runs. Where one run
computes in a lower precision than the other, what goes in is as far apart as that rounds it.

Nothing is said of an operator that was not judged: it drew random numbers, got what could not be compared or other
indices, or its inputs are too far apart for any output to be wrong.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import numpy as np

from ..call.graphs import OP as COMPILED
from . import format as columns
from .align import Alignment
from .behaviour import apart_in_arguments, behaviour, draws
from .edges import UNITS, Edges, Side, edges_of, share, sizes_of, steepest_other, terms
from .families import MOVES, family
from .fold import Folded
from .format import INPUT, OUTPUT
from .graph import Graph, short_name
from .origins import Origins
from .prints import smallest_step
from .reasons import shortened, strange
from .regions import COMPOSITE, FEW, SINGLE, Steps, unseen_rounding

_BRAIN_DIGITS: Final = 8  # binary, of a number in bfloat16
_TF32: Final = 2.0**-11
_ESTIMATE: Final = 2.0  # by how much eight projections may misjudge a distance
_ONCE: Final = 1.5  # units between two numbers that are rounded once, over the norm: 0.8 if both round as chance has it
_COMPUTED: Final = 1024.0  # by how much a number may be further off than what goes in beside it
_CLEARLY: Final = 0.25  # of the norm
_SMALL: Final = 0.1  # relative differences up to here show a slope
_UNBOUNDED: Final = 1e30
_ONE_ELEMENT: Final = 1.25  # steps of the dtype between two right roundings of one number, and what float32 sums add
_SURE_BITS: Final = 20  # of a difference that is read off fingerprints
_TERMS: Final = frozenset({"add", "mul", "mask", "view", "cast", "dropout", "cat"})
_MAX_TERMS: Final = 6
_LOW_INSIDE: Final = frozenset({"cross_entropy"})
_SYMMETRIC: Final = frozenset({"sin", "cos", "tan"})


@dataclasses.dataclass
class Numbers:
    """For each pair of operators: how far inputs and outputs are apart, and what rounding explains."""

    compared: Any  # whether both sides have fingerprints of an output
    judged: Any  # whether an error as large as an output would have shown
    inputs: Any  # the largest distance of an input, relative to its norm
    outputs: Any  # the same of the outputs
    allowed: Any  # of the output that is furthest beyond it, what rounding allows, relative to its norm
    parted: Any  # whether the outputs are further apart than that
    reason: dict[int, str]  # of pairs whose difference is no distance
    origins: Origins  # where they get other tensors
    unjudged: Any  # the largest distance of an output of which nothing can be said, relative to its norm


def numbers_of(alignment: Alignment) -> Numbers:
    """Measure every pair."""
    return _Measured(alignment).numbers()


class _Measured:
    """What is known of each pair, one array per question."""

    def __init__(self, alignment: Alignment) -> None:
        self.alignment = alignment
        self.first, self.second, self.pairs = alignment.first, alignment.second, alignment.pairs
        self.count = count = len(self.pairs)
        self.one, self.two = Side(self.first, 1), Side(self.second, self.second.trace.world)
        self.ins = ins = edges_of(alignment, self.one, self.two, INPUT)
        self.outs = edges_of(alignment, self.one, self.two, OUTPUT)
        names, self.kind = np.unique(self.first.operators["name"][self.pairs[:, 0]], return_inverse=True)
        self.names = [self.first.trace.texts[n] for n in names.tolist()]
        self._known = [behaviour(name) for name in self.names]
        phases = self.first.operators["phase"][self.pairs[:, 0]]
        self.backward = phases == columns.BACKWARD if count else np.zeros(0, bool)
        self.compiled = np.array([name == COMPILED for name in self.names] or [False])[self.kind]
        self.source = self._sources()
        drew = self._ask(draws)
        self.drew, self.one_drew = drew[0] | drew[1], drew[0] != drew[1]
        self.arguments = self._arguments_apart()
        self.contracts = self.known("contracts") | self.backward
        self.measured, self.total, self.product, self.least = sizes_of(ins, self.outs, count)
        self._other_arguments(ins)
        self.hidden = np.zeros(count)
        np.add.at(self.hidden, ins.owner, ins.hidden)
        self.unknown = self._unknown(ins)
        self._of_small_rows()
        self._of_forwards()
        self.unit, self.relative = self._rounded(ins)
        wide = self._wide(ins)
        self.gains = self._gains(wide)
        self.lists = self._lists(ins)

    def known(self, what: str) -> Any:
        """One of the questions of `Behaviour`, for each pair."""
        return np.array([getattr(one, what) for one in self._known] or [False])[self.kind]

    def _sources(self) -> Any:
        """For each backward the pair of its forwards, -1 for others."""
        place = np.full(self.first.count + 1, -1, np.int64)
        place[self.pairs[:, 0]] = np.arange(self.count)
        return place[self.first.operators["forward"][self.pairs[:, 0]]]  # -1 leads to the last, which is -1

    def _ask(self, question: Any) -> list[Any]:
        """A question about names and arguments, asked once for each, of either side."""
        found = []
        for graph, mine in ((self.first, self.pairs[:, 0]), (self.second, self.pairs[:, 1])):
            texts = graph.trace.texts
            asked = np.stack([graph.operators["name"][mine], graph.operators["arguments"][mine]], 1)
            which, back = np.unique(asked, axis=0, return_inverse=True)
            answers = np.array([question(texts[n], texts[a]) for n, a in which.tolist()] or [False])
            found.append(answers[back.reshape(-1)])
        return found

    def _arguments_apart(self) -> Any:
        asked = [g.operators["arguments"][self.pairs[:, n]] for n, g in enumerate((self.first, self.second))]
        which, back = np.unique(np.stack(asked, 1), axis=0, return_inverse=True)
        one, two = self.first.trace.texts, self.second.trace.texts
        found = np.array([apart_in_arguments(one[a], two[b]) for a, b in which.tolist()] or [0.0])[back.reshape(-1)]
        named = [
            np.array([text.startswith(COMPILED) for text in g.trace.texts], bool)[g.operators["name"][self.pairs[:, n]]]
            for n, g in enumerate((self.first, self.second))
        ]
        return np.where(named[0] | named[1], 0.0, found)  # of compiled code they name functions and nodes

    def _switched(self) -> Any:
        """Calls that drew random numbers in one run alone, since they were told to: a dropout that is on."""
        return self.one_drew & np.isinf(self.arguments) & ~self.compiled

    def _other_arguments(self, ins: Edges) -> None:
        """Numbers that are further apart than what the run computes them from are no results of it."""
        unit = np.zeros(self.count)
        np.maximum.at(unit, ins.owner, np.maximum(ins.first, ins.second))
        data = _COMPUTED * np.maximum(unit, self.measured)
        self.arguments = np.where((self.arguments > data) & (unit > 0), np.inf, self.arguments)

    def _unknown(self, ins: Edges) -> Any:
        """Pairs that got what cannot be compared, other indices or masks, or NaN that the other did not get."""
        starts = [g.side(INPUT)[0] for g in (self.first, self.second)]
        given = [(s[1:] > s[:-1])[self.pairs[:, n]] for n, s in enumerate(starts)]
        found = self.backward & ~(given[0] & given[1])  # nobody saw the gradient that came
        of_optimizer = self.first.operators["phase"][self.pairs[:, 0]] == columns.OPTIMIZER
        found |= of_optimizer & ~given[0]  # numbers that it makes: what it does with them is compared
        found |= (
            ins.others
            | self.known("free")
            | (self.drew & ~self.backward & ~self._switched())
            | np.isnan(self.arguments)
        )
        whole = (ins.first == 0) & (ins.second == 0) & (ins.apart > 0)
        np.logical_or.at(found, ins.owner, whole | ins.strange | ~np.isfinite(ins.apart))
        return found

    def _of_small_rows(self) -> None:
        """What makes small rows as large as others: these may be of one term of a sum alone, as far apart as that."""
        place = np.full(self.first.count + 1, -1, np.int64)
        place[self.pairs[:, 0]] = np.arange(self.count)
        producers = self.first.tensors["producer"]
        adds = np.array([family(name) in _TERMS for name in self.names] or [False])[self.kind]
        for pair in np.flatnonzero(self.known("normalizes") & ~self.backward).tolist():
            at = pair
            for _ in range(_MAX_TERMS):
                inputs = self.first.inputs(int(self.pairs[at, 0]))
                made = [int(place[producers[t]]) for t in inputs.tolist() if producers[t] >= 0]
                at = max((n for n in made if n >= 0 and adds[n]), default=-1)
                if at < 0:
                    break
                self.measured[pair] = max(self.measured[pair], self.measured[at])

    def _of_forwards(self) -> None:
        """A backward works on what its forward got and on what it made: those count among its inputs."""
        has = np.flatnonzero(self.source >= 0)
        source = self.source[has]
        made = np.zeros(self.count)
        np.maximum.at(made, self.outs.owner, share(self.outs))
        here = np.maximum(self.measured[has], self.measured[source])
        there = np.maximum(self.product[has] * np.maximum(self.product[source], 1.0), self.product[has])
        self.measured[has] = np.maximum(here, made[source])
        self.product[has] = np.minimum(there, 1e120)
        self.hidden[has] += self.hidden[source]
        self.unknown[has] |= self.unknown[source]
        self.arguments[has] = np.maximum(self.arguments[has], self.arguments[source])

    def _rounded(self, ins: Edges) -> tuple[Any, Any]:
        """The unit that a pair computes in, and how far apart its inputs are once they are rounded to it.

        The gradient of a weight has left the kernel in the dtype of the gradient that came in, and is converted then.
        `cross_entropy` has its inner `log_softmax` keep the dtype of its input, whatever autocast does with the rest.
        """
        inside = np.array([short_name(name) in _LOW_INSIDE for name in self.names] or [False])[self.kind]
        units, fine = [], np.full(self.count, np.inf)
        for graph, mine, there, came in (
            (self.first, self.pairs[:, 0], self.outs.first, ins.first),
            (self.second, self.pairs[:, 1], self.outs.second, ins.second),
        ):
            unit = np.zeros(self.count)
            np.maximum.at(unit, self.outs.owner, there)
            counts = ((self.backward | inside) & _under_autocast(graph)[mine])[ins.owner]
            np.maximum.at(unit, ins.owner[counts], came[counts])
            low = self.known("contracts") & (unit == SINGLE) & _in_tf32(graph)[mine]
            units.append(np.where(low, _TF32, unit))
            np.minimum.at(fine, ins.owner[came > 0], came[came > 0])
        unit = np.maximum(*units)
        arguments = np.where(np.isfinite(self.arguments), self.arguments, 0.0)
        relative = np.maximum(self.measured, arguments)
        relative = np.where((units[0] != units[1]) & (np.minimum(*units) > 0), np.maximum(relative, unit), relative)
        dithered = np.minimum(unit, np.sqrt(relative * unit))  # two numbers close together, rounded apart now and then
        return unit, np.where(unit > fine, np.maximum(relative, dithered), relative)

    def _wide(self, ins: Edges) -> Any:
        """How much of a small difference functions make that are steep near 0, or for large arguments."""
        wide = np.ones(self.count)
        if not len(ins.owner):
            return wide
        last = np.full(self.count, -1, np.int64)
        last[ins.owner] = np.arange(len(ins.owner))
        low, high, largest = (np.where(last >= 0, column[last], 0.0) for column in (ins.low, ins.high, ins.largest))
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ranges = np.where(low > 0, high / low, _UNBOUNDED)
        symmetric = np.array([short_name(name) in _SYMMETRIC for name in self.names] or [False])[self.kind]
        wide = np.where(self.known("exponential"), np.where(symmetric, largest, np.abs(high)), wide)
        longest = np.zeros(self.count)  # as many factors as a dimension has
        np.maximum.at(longest, ins.owner, ins.longest)
        wide = np.where(self.known("compounds"), longest, wide)
        return np.maximum(np.where(self.known("steep"), ranges, wide), 1.0)

    def _gains(self, wide: Any) -> Any:
        """For each pair, how much of its inputs' relative difference its outputs may have."""
        outs, count = self.outs, self.count
        norms = np.where(self.contracts, self.product, self.total)
        least, slope = np.full(count, np.inf), np.zeros(count)
        np.minimum.at(least, outs.owner, np.where(outs.size > 0, outs.size, np.inf))
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            condition = np.where(np.isfinite(least), norms / least, 1.0)
            small = (self.relative[outs.owner] > 0) & (self.relative[outs.owner] < _SMALL) & (outs.size > 0)
            np.maximum.at(slope, outs.owner[small], (share(outs) / self.relative[outs.owner])[small])
        families = np.array([hash(_kind(name)) for name in self.names] or [0])[self.kind]
        others = steepest_other(np.stack([families, self.backward.astype(np.int64)], 1), slope)
        return _ESTIMATE**2 * np.minimum(np.maximum(np.maximum(condition, others), 1.0) * wide, _UNBOUNDED)

    def _lists(self, ins: Edges) -> tuple[Any, Any, Any]:
        """Outputs of operators on lists: which they are, how far their own inputs are apart, and their gains.

        The tensors at one place of all lists belong together; those at other places do not matter to them.
        """
        outs, owner = self.outs, self.outs.owner
        lists = np.array([short_name(name).startswith("_foreach_") for name in self.names] or [False])
        made, given = (np.bincount(e.owner, minlength=self.count) for e in (outs, ins))
        sides = (self.first.side(OUTPUT)[0], self.first.side(INPUT)[0])
        counts = [np.diff(side)[self.pairs[:, 0]] for side in sides]
        whole = (made == counts[0]) & (given == counts[1]) & (made > 1) & (counts[1] % np.maximum(made, 1) == 0)
        whole &= lists[self.kind] & ~self.backward
        relative, total, wide = np.zeros(len(owner)), np.zeros(len(owner)), np.ones(len(owner))
        steep = self.known("steep")
        if whole.any():
            starts = np.searchsorted(owner, np.arange(self.count))
            mine = np.flatnonzero(whole[ins.owner])
            at = starts[ins.owner[mine]] + ins.place[mine] % made[ins.owner[mine]]
            np.maximum.at(relative, at, share(ins)[mine])
            np.add.at(total, at, ins.size[mine])
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                ranges = np.where(ins.low[mine] > 0, ins.high[mine] / ins.low[mine], _UNBOUNDED)
            np.maximum.at(wide, at[steep[ins.owner[mine]]], ranges[steep[ins.owner[mine]]])
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            condition = np.where(outs.size > 0, total / outs.size, 1.0)
            gains = _ESTIMATE**2 * np.minimum(np.maximum(condition, 1.0) * wide, _UNBOUNDED)
        return whole[owner], relative, gains

    # -- the verdict -----------------------------------------------------------------------------------

    def _bounds(self) -> Any:
        """For each output, how far apart rounding may make it."""
        outs, owner = self.outs, self.outs.owner
        once = np.where(self.unit == _TF32, _ESTIMATE, _ONCE)  # those that convert what they get round twice
        own = np.where(self.known("several"), _ESTIMATE * COMPOSITE, once)
        unit = np.where(self.known("matrices"), np.sqrt(self.unit), self.unit)
        roundings = np.maximum(np.sqrt(terms(self.first, self.pairs[:, 0])), FEW)
        sums = np.maximum(np.where(self.contracts, self.product, 0.0)[owner], roundings[owner] * outs.size)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            factor = np.where(self.contracts & (self.least > 0), np.maximum(self.product / self.least, 1.0), 1.0)
            bound = (own * unit)[owner] * outs.size + _ESTIMATE * (SINGLE * sums + (self.hidden * factor)[owner])
            chosen, relative, gains = self.lists
            relative = np.maximum(relative, np.where(np.isfinite(self.arguments), self.arguments, 0.0)[owner])
            bound += np.where(chosen, gains * relative, (self.gains * self.relative)[owner]) * outs.size
            jumps = self.known("jumps") | (self.known("jumps_backward") & self.backward)
            jumps &= self.relative > 0
            roots = np.sqrt(self.relative)[owner]
            bound += np.where(jumps[owner], _ESTIMATE * outs.largest + _ESTIMATE**2 * roots * outs.size, 0.0)
        return self._of_regions(bound)

    def _of_regions(self, bound: Any) -> Any:
        """Runs of compiled code: what the rounding of all that they do may become in the operator that made an output.

        Each step of them rounds; these roundings add up as random ones do. Which steps there are, the other run knows.
        """
        rows = self.compiled
        if not rows.any():
            return bound
        outs, owner = self.outs, self.outs.owner
        graphs = (self.first, self.second)
        parts = [Steps(g, _of_itself(g.whole)) if isinstance(g, Folded) else None for g in graphs]
        error, jumps = np.zeros(self.count), np.zeros(self.count, bool)
        for pair in np.flatnonzero(rows).tolist():
            for steps, graph, mine in zip(parts, graphs, self.pairs[pair].tolist()):
                if steps is not None and mine in steps.graph.inside:
                    found, jumped = steps.rounding(steps.graph.inside[mine])
                else:
                    found, jumped = unseen_rounding(graph, mine, float(self.unit[pair])), False
                error[pair], jumps[pair] = max(error[pair], found), jumps[pair] or jumped
        has = rows & (self.source >= 0)
        error[has] = np.hypot(error[has], error[self.source[has]])
        error = np.minimum(error + self.relative, 1.0)
        for edge in np.flatnonzero(rows[owner]).tolist():
            pair = int(owner[edge])
            own, condition = 0.0, 1.0
            for steps, tensors in zip(parts, outs.tensors):
                if steps is not None and (made := steps.maker(int(tensors[edge]))) is not None:
                    own, condition = max(own, made[0]), max(condition, made[1])
            more = _ESTIMATE**2 * math.sqrt(error[pair]) if jumps[pair] else 0.0
            size = float(outs.size[edge])
            bound[edge] = (own + _ESTIMATE**2 * condition * error[pair] + more) * size
            bound[edge] += _ESTIMATE * float(outs.hidden[edge])
        return bound

    def _parted_by_arguments(self) -> Any:
        """Calls that get the same and are told something else: a result that is clearly another one comes from that."""
        near = self.measured <= np.maximum(_CLEARLY / 8, 16.0 * self.unit)
        moves = np.array([family(name) in MOVES for name in self.names] or [False])[self.kind]
        return np.isinf(self.arguments) & ~self.unknown & ~self.backward & near & ~moves

    def _judged(self) -> Any:
        """For each output, whether anything can be said of it."""
        outs, owner = self.outs, self.outs.owner
        whole = (outs.first == 0) & (outs.second == 0)
        sorts = np.array([short_name(name) == "argsort" for name in self.names] or [False])[self.kind]
        chosen = self.known("chooses")[owner] & ((outs.place > 0) | sorts[owner])
        return ~self.unknown[owner] & ~(whole & ((self.relative > 0)[owner] | chosen)) & np.isfinite(outs.apart)

    def numbers(self) -> Numbers:
        """Compare every output with what rounding allows."""
        outs, owner, count = self.outs, self.outs.owner, self.count
        bound, judged = self._bounds(), self._judged()
        near = (self.gains * self.relative < 1.0)[owner]
        parted_by_arguments = self._parted_by_arguments()
        telling = judged & ((bound < outs.size) | ((outs.size == 0) & near))
        parted = judged & (outs.apart > bound) | (telling & outs.strange)
        reason: dict[int, str] = {}
        for edge in np.flatnonzero(parted & outs.strange)[::-1].tolist():
            left, right = outs.of(self.one, self.two, edge)
            reason[int(owner[edge])] = f"{strange(left)} against {strange(right)}"
        few = judged & ~parted & ~outs.strange & (outs.apart > 0) & ((self.relative == 0) & ~self.compiled)[owner]
        for edge in np.flatnonzero(few).tolist():
            told = self._few_elements(edge)
            if told:
                parted[edge] = True
                reason[int(owner[edge])] = told
        parted |= parted_by_arguments[owner] & (share(outs) > _CLEARLY)
        found = parted_by_arguments & (np.bincount(owner, minlength=count) == 0)  # results of other shapes
        np.logical_or.at(found, owner, parted)
        shares = share(outs)
        order = np.lexsort((shares, parted))  # of a pair, the last counts: one that parted, and the furthest of those
        relative, allowed, compared, sure = (
            np.zeros(count),
            np.zeros(count),
            np.zeros(count, bool),
            np.zeros(count, bool),
        )
        relative[owner[order]] = shares[order]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            allowed[owner[order]] = np.where(outs.size > 0, bound / outs.size, 0.0)[order]
        compared[owner] = True
        np.logical_or.at(sure, owner, telling)
        for pair in np.flatnonzero(found & np.isinf(self.arguments) & ~self.backward).tolist():
            texts = [g.trace.texts[int(g.operators["arguments"][n])] for g, n in zip(
                (self.first, self.second), self.pairs[pair].tolist())]  # fmt: skip
            reason[pair] = "called with other arguments: {} in A, {} in B".format(*shortened(texts[0], texts[1]))
        origins = Origins(self.alignment, self.one, self.two, self.ins, self.outs)
        unjudged = np.zeros(count)
        np.maximum.at(unjudged, owner[~judged], shares[~judged])
        return Numbers(compared, sure, self.measured, relative, allowed, found, reason, origins, unjudged)

    def _few_elements(self, edge: int) -> str:
        """What to say where few elements differ, by more than the rounding of one, and the norm hides it."""
        outs, pair = self.outs, int(self.outs.owner[edge])
        left, right = outs.of(self.one, self.two, edge)
        step, largest = smallest_step(left, right), float(outs.largest[edge])
        unit = float(self.unit[pair])
        digits = _BRAIN_DIGITS if unit == UNITS["bfloat16"] else round(-math.log2(unit)) if unit else 0
        parts = self.two.parts is not None
        it = largest if parts or not digits else min(largest, largest_with(step, digits))
        own = COMPOSITE if self._known[self.kind[pair]].several else 1.0
        single = _ONE_ELEMENT * own * it * 2.0 ** (1 - digits) if digits else 0.0
        if step <= max(single, 16.0 * SINGLE * largest, _ESTIMATE * float(self.hidden[pair])):
            return ""
        size_told = f"the largest is {largest:.3g}" if it == largest else f"they are no larger than {it:.3g}"
        return f"few elements differ, by {step:.3g} or more; {size_told}"


def _of_itself(graph: Graph) -> _Measured:
    """A run against itself: what rounding alone allows each operator."""
    same = np.arange(graph.count)
    return _Measured(Alignment(graph, graph, np.stack([same, same], 1), {}, [], ([], [])))


def largest_with(step: float, digits: int) -> float:
    """The largest that an element can be whose two values are `step` apart, if they are stored with so many digits.

    The smaller one has a digit as low as the last one of the difference.

    >>> largest_with(2.0**-7, 8), largest_with(183 * 2.0**-14, 8)
    (2.0078125, 0.02679443359375)
    """
    mantissa, exponent = math.frexp(step)
    bits = round(math.ldexp(mantissa, _SURE_BITS))
    last = exponent - _SURE_BITS + (bits & -bits).bit_length() - 1
    return math.ldexp(1.0, last + digits) + step


def _under_autocast(graph: Graph) -> Any:
    """Whether each operator, or the forward of a backward, was called under autocast."""
    texts = np.array(["autocast" in text for text in graph.trace.texts], bool)
    forward = graph.operators["forward"]
    on = texts[graph.operators["region"]]
    return on | ((forward >= 0) & on[forward])


def _in_tf32(graph: Graph) -> Any:
    """Whether the settings of the run allow that a product of float32 in this operator is computed in TF32."""
    allowed = graph.trace.facts.get("tf32", [])
    convolutions = np.array(["conv" in text for text in graph.trace.texts], bool)[graph.operators["name"]]
    return np.where(convolutions, "convolutions" in allowed, "products" in allowed)


def _kind(name: str) -> str:
    return short_name(name) if behaviour(name).steep else family(name)
