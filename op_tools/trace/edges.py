"""What went into matched operators of two runs and came out of them: how far the tensors are apart, by fingerprints."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

from .align import Alignment
from .format import INPUT, PROJECTIONS
from .graph import Graph
from .prints import distance

SUM: Final = PROJECTIONS
NORM, LOW, HIGH, NAN, INF = range(PROJECTIONS + 1, PROJECTIONS + 6)
UNITS: Final = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "bfloat16": 2.0**-9,
    "float16": 2.0**-11,
    "complex128": 2.0**-53,
    "complex64": 2.0**-24,
    "complex32": 2.0**-11,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3fnuz": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "float8_e5m2fnuz": 2.0**-3,
}
_GRID: Final = 2.0**-36  # of the largest element of a chunk: what is smaller does not show in a print
_COMPILED: Final = "torch.compile."


class Side:
    """One run: the fingerprints, shapes and dtypes of its tensors."""

    def __init__(self, graph: Graph, parts: int) -> None:
        self.graph = graph
        self.rows, self.where = graph.prints()
        self.parts = graph.prints(1) if parts > 1 else None
        texts = graph.trace.texts
        self.unit = np.array([UNITS.get(texts[n], 0.0) for n in graph.looks["dtype"].tolist()] or [0.0])
        self.shape = [texts[n] for n in graph.looks["shape"].tolist()]
        self.numel = np.array([numel(text) for text in self.shape] or [1.0])

    def row(self, tensor: int) -> Any:
        """The print of a tensor, None where it has none."""
        place = int(self.where[tensor]) if len(self.where) else -1
        return None if place < 0 else self.rows[place]


class Edges(NamedTuple):
    """Matched tensors on one side of matched operators, by column, and the pairs that have others as well."""

    owner: Any  # the pair of operators
    place: Any  # the number of the tensor there
    apart: Any  # estimated distance
    size: Any  # the larger norm
    first: Any  # units of rounding of the dtypes on both sides, 0 for whole numbers
    second: Any
    low: Any  # of both, the least element
    high: Any
    largest: Any  # and the largest by absolute value
    strange: Any  # whether NaN or Inf differ in number
    hidden: Any  # how far apart they may be without a difference of their prints
    rows: tuple[Any, Any]  # of prints: where they are, on both sides
    sums: dict[int, Any]  # of parts, by edge: their print together, instead of the second row
    others: Any  # for each pair, whether it has a tensor on this side that could not be compared

    def of(self, one: Side, two: Side, edge: int) -> tuple[Any, Any]:
        """Both prints of an edge."""
        mine, theirs = (int(rows[edge]) for rows in self.rows)
        return one.rows[mine], self.sums.get(edge, two.rows[theirs])


def edges_of(alignment: Alignment, one: Side, two: Side, side: int) -> Edges:
    """Compare what goes into the operators of each pair (`edges_of(alignment, one, two, INPUT).apart`)."""
    pairs = alignment.pairs
    if not len(one.rows) or not len(two.rows):
        none, whole, never = np.zeros(0), np.zeros(0, np.int64), np.zeros(0, bool)
        unknown = np.ones(len(pairs), bool)
        return Edges(whole, whole, none, none, none, none, none, none, none, never, none, (whole, whole), {}, unknown)
    starts_one, tensors_one = one.graph.side(side)
    starts_two, _ = two.graph.side(side)
    a, b = pairs[:, 0], pairs[:, 1]
    counts = starts_one[a + 1] - starts_one[a], starts_two[b + 1] - starts_two[b]
    lengths = np.minimum(*counts)
    others = counts[0] != counts[1]
    owner = np.repeat(np.arange(len(pairs)), lengths)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    tensors_two = _in_the_same_order(one, two, pairs, side)
    left, right = tensors_one[starts_one[a][owner] + place], tensors_two[starts_two[b][owner] + place]
    looks_one, looks_two = one.graph.tensors["look"][left], two.graph.tensors["look"][right]
    shapes = {text: n for n, text in enumerate(dict.fromkeys([*one.shape, *two.shape]))}
    same = (
        np.array([shapes[t] for t in one.shape] or [0])[looks_one]
        == np.array([shapes[t] for t in two.shape] or [0])[looks_two]
    )
    p, q = one.where[left], two.where[right]
    good, sums = same & (p >= 0) & (q >= 0), {}
    if two.parts is not None:  # this rank has a part of the batch: the prints of all parts add up
        part = ~same & (p >= 0) & (two.parts[1][right] >= 0)
        if part.any():
            rows = _of_parts(one.rows[p[part]], two.parts[0][two.parts[1][right[part]]], two.graph.trace.world)
            good, q = good | part, np.where(part, 0, q)
            within = (np.cumsum(good) - 1)[part]
            sums = dict(zip(within.tolist(), rows))
    np.logical_or.at(others, owner[~good], True)
    owner, place, p, q = owner[good], place[good], p[good], q[good]
    units = one.unit[looks_one[good]], two.unit[looks_two[good]]
    elements = one.numel[looks_one[good]]
    rows_one, rows_two = one.rows[p], two.rows[q]
    for edge, row in sums.items():
        rows_two[edge] = row
    apart = distance(rows_one, rows_two)
    single = elements == 1  # of one element the plain sum says all
    apart[single] = np.abs(rows_one[single, SUM] - rows_two[single, SUM])
    low, high = np.minimum(rows_one[:, LOW], rows_two[:, LOW]), np.maximum(rows_one[:, HIGH], rows_two[:, HIGH])
    largest = np.maximum(np.abs(low), np.abs(high))
    strange = (rows_one[:, NAN] != rows_two[:, NAN]) | (rows_one[:, INF] != rows_two[:, INF])
    size = np.maximum(rows_one[:, NORM], rows_two[:, NORM])
    hidden = _GRID * largest * np.sqrt(elements)
    return Edges(owner, place, apart, size, *units, low, high, largest, strange, hidden, (p, q), sums, others)


def _of_parts(wholes: Any, parts: Any, world: int) -> Any:
    """Prints of parts together; the gradient of a mean over a part is larger than that of a mean over the whole."""
    less = parts.copy()
    less[:, :NAN] /= world
    nearer = distance(wholes, less) < distance(wholes, parts)
    return np.where(nearer[:, None], less, parts)


def _in_the_same_order(one: Side, two: Side, pairs: Any, side: int) -> Any:
    """The tensors of the second run; those of compiled code, which has an order of its own, in that of the first."""
    graphs = (one.graph, two.graph)
    inside = [
        np.array([text.startswith(_COMPILED) for text in g.trace.texts], bool)[g.operators["name"]] for g in graphs
    ]
    (starts_one, tensors_one), (starts_two, tensors_two) = (g.side(side) for g in graphs)
    found = tensors_two.copy()
    for a, b in pairs[inside[0][pairs[:, 0]] | inside[1][pairs[:, 1]]].tolist():
        mine = tensors_one[starts_one[a] : starts_one[a + 1]].tolist()
        free = tensors_two[starts_two[b] : starts_two[b + 1]].tolist()
        order = []
        for tensor in mine[: len(free)]:
            best = min(free, key=lambda other: _unlike(one, two, tensor, other))
            free.remove(best)
            order.append(best)
        found[starts_two[b] : starts_two[b] + len(order)] = order
        found[starts_two[b] + len(order) : starts_two[b + 1]] = free
    return found


def _unlike(one: Side, two: Side, a: int, b: int) -> tuple[bool, float]:
    shapes = (side.shape[int(side.graph.tensors["look"][n])] for side, n in ((one, a), (two, b)))
    mine, theirs = one.row(a), two.row(b)
    apart = math.inf if mine is None or theirs is None else float(distance(mine, theirs))
    return len(set(shapes)) > 1, apart


def numel(shape: str) -> float:
    """How many elements a tensor has, from its shape as text (`numel("[2, 3]") == 6`)."""
    return math.prod([float(word) for word in shape[1:-1].split(",") if word.strip()])


def terms(graph: Graph, operators: Any) -> Any:
    """How many numbers an operator adds up for one element of its smallest output, at most; also of its forward."""
    texts = graph.trace.texts
    elements = np.array([numel(texts[n]) for n in graph.looks["shape"].tolist()] or [1.0])
    most, least = np.ones(graph.count), np.full(graph.count, np.inf)
    for side, found, pick in ((INPUT, most, np.maximum), (1 - INPUT, least, np.minimum)):
        starts, tensors = graph.side(side)
        owner = np.repeat(np.arange(graph.count), np.diff(starts))
        pick.at(found, owner, elements[graph.tensors["look"][tensors]])
    forward = graph.operators["forward"]
    most = np.maximum(most, np.where(forward >= 0, most[forward], 1.0))
    return np.maximum(most / np.maximum(least, 1.0), 1.0)[operators]
