"""What went into matched operators of two runs and came out of them: how far the tensors are apart, by fingerprints."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

from ..call.graphs import OP as COMPILED
from . import format as columns
from .align import Alignment
from .fold import member_name
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
        self.longest = np.array([max(sizes(text), default=1.0) for text in self.shape] or [1.0])

    def shape_of(self, tensor: int) -> str:
        """The shape of a tensor, as text."""
        shape: str = self.shape[int(self.graph.tensors["look"][tensor])]
        return shape

    def unit_of(self, tensor: int) -> float:
        """The unit of rounding of a tensor's dtype, 0 for whole numbers."""
        return float(self.unit[int(self.graph.tensors["look"][tensor])])

    def row_of(self, tensor: int) -> Any:
        """The print of a tensor; None where it has none, or where the number is negative."""
        row = int(self.where[tensor]) if tensor >= 0 else -1
        return None if row < 0 else self.rows[row]

    def is_member(self, tensor: int) -> bool:
        """Whether it is a parameter or a buffer."""
        return int(self.graph.tensors["kind"][tensor]) in (columns.PARAMETER, columns.BUFFER)


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
    elements: Any  # how many the tensor has
    longest: Any  # its longest dimension
    rows: tuple[Any, Any]  # of prints: where they are, on both sides
    tensors: tuple[Any, Any]
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
        unknown, both = np.ones(len(pairs), bool), (whole, whole)
        empty = (none,) * 7
        return Edges(whole, whole, *empty, never, none, none, none, both, both, {}, unknown)
    owner, place, left, right, others = _together(one, two, pairs, side)
    looks_one, looks_two = one.graph.tensors["look"][left], two.graph.tensors["look"][right]
    shapes = {text: n for n, text in enumerate(dict.fromkeys([*one.shape, *two.shape]))}
    same = (
        np.array([shapes[t] for t in one.shape] or [0])[looks_one]
        == np.array([shapes[t] for t in two.shape] or [0])[looks_two]
    )
    p, q = one.where[left], two.where[right]
    good, sums = same & (p >= 0) & (q >= 0), {}
    if two.parts is not None:  # this rank has a part of the batch: the prints of all parts add up
        part = ~same & (p >= 0) & (two.parts[1][right] >= 0) & _split(one, two, looks_one, looks_two)
        if part.any():
            backward = one.graph.operators["phase"][pairs[owner[part], 0]] != columns.FORWARD
            of_parts = two.parts[0][two.parts[1][right[part]]]
            rows = _of_parts(one.rows[p[part]], of_parts, two.graph.trace.world, backward)
            good, q = good | part, np.where(part, 0, q)
            within = (np.cumsum(good) - 1)[part]
            sums = dict(zip(within.tolist(), rows))
    np.logical_or.at(others, owner[~good], True)
    owner, place, p, q = owner[good], place[good], p[good], q[good]
    tensors = left[good], right[good]
    units = one.unit[looks_one[good]], two.unit[looks_two[good]]
    elements, longest = one.numel[looks_one[good]], one.longest[looks_one[good]]
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
    ranges, dims = (low, high, largest), (elements, longest)
    return Edges(owner, place, apart, size, *units, *ranges, strange, hidden, *dims, (p, q), tensors, sums, others)


def _split(one: Side, two: Side, looks_one: Any, looks_two: Any) -> Any:
    """Whether tensors of the second run have the shape of a rank's part of a batch: less of the first dimension."""
    world = two.graph.trace.world
    which, back = np.unique(np.stack([looks_one, looks_two], 1), axis=0, return_inverse=True)
    found = []
    for mine, theirs in which.tolist():
        whole, part = sizes(one.shape[mine]), sizes(two.shape[theirs])
        others = len(whole) == len(part) > 0 and whole[1:] == part[1:]
        found.append(others and whole[0] / world <= part[0] < whole[0])
    return np.array(found or [False])[back.reshape(-1)]


def _of_parts(wholes: Any, parts: Any, world: int, backward: Any) -> Any:
    """Prints of parts together; the gradient of a mean over a part is larger than that of a mean over the whole."""
    less = parts.copy()
    less[:, :NAN] /= world
    nearer = backward & (distance(wholes, less) < distance(wholes, parts))
    return np.where(nearer[:, None], less, parts)


def _together(one: Side, two: Side, pairs: Any, side: int) -> tuple[Any, Any, Any, Any, Any]:
    """The tensors of matched operators place by place: pairs, places, both sides; and which pairs have others as well.

    Compiled code has an order of its own: there the tensors that are alike belong together.
    """
    (starts_one, tensors_one), (starts_two, tensors_two) = one.graph.side(side), two.graph.side(side)
    a, b = pairs[:, 0], pairs[:, 1]
    counts = starts_one[a + 1] - starts_one[a], starts_two[b + 1] - starts_two[b]
    lengths, others = np.minimum(*counts), counts[0] != counts[1]
    inside = _of_compiled(one.graph)[a] | _of_compiled(two.graph)[b]
    lengths[inside] = 0
    owner = np.repeat(np.arange(len(pairs)), lengths)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    left, right = tensors_one[starts_one[a][owner] + place], tensors_two[starts_two[b][owner] + place]
    found = []
    for pair in np.flatnonzero(inside).tolist():
        m, n = int(a[pair]), int(b[pair])
        mine, theirs = tensors_one[starts_one[m] : starts_one[m + 1]], tensors_two[starts_two[n] : starts_two[n + 1]]
        alike, others[pair] = _alike(one, two, mine.tolist(), theirs.tolist())
        found += [(pair, at, x, y) for at, (x, y) in enumerate(alike)]
    if not found:
        return owner, place, left, right, others
    added = np.array(found, np.int64)
    joined = [np.concatenate([old, added[:, n]]) for n, old in enumerate((owner, place, left, right))]
    order = np.lexsort((joined[1], joined[0]))
    owner, place, left, right = (column[order] for column in joined)
    return owner, place, left, right, others


def _of_compiled(graph: Graph) -> Any:
    named = np.array([text == COMPILED or text.startswith(f"{COMPILED}.") for text in graph.trace.texts], bool)
    return named[graph.operators["name"]]


def _alike(one: Side, two: Side, mine: list[int], theirs: list[int]) -> tuple[list[tuple[int, int]], bool]:
    """Tensors of two lists that belong together, in the order of the first; whether either has others as well.

    What has a name in the model goes by that, all else by shape and fingerprint, the closest first. Compiled code
    gets all that a module has; what it does not use is no other tensor.
    """
    found: dict[int, int] = {}
    names = {member_name(two.graph, t): t for t in reversed(theirs)}
    for tensor in mine:
        name = member_name(one.graph, tensor)
        if name and name in names and one.shape_of(tensor) == two.shape_of(names[name]):
            found.setdefault(tensor, names.pop(name))
    taken = set(found.values())
    shapes: dict[str, tuple[list[int], list[int]]] = {}
    for at, (view, tensors) in enumerate(((one, mine), (two, theirs))):
        for tensor in dict.fromkeys(tensors):
            if tensor not in (found, taken)[at]:
                shapes.setdefault(view.shape_of(tensor), ([], []))[at].append(tensor)
    for left, right in shapes.values():
        found.update(_closest(one, two, left, right))
    taken = set(found.values())
    left_over = [t for t in mine if t not in found and not one.is_member(t)]
    left_over += [t for t in theirs if t not in taken and not two.is_member(t)]
    return [(t, found[t]) for t in dict.fromkeys(mine) if t in found], bool(left_over)


def _closest(one: Side, two: Side, left: list[int], right: list[int]) -> dict[int, int]:
    """Which tensors of one shape belong together: those whose fingerprints are closest, relative to their norms."""
    if len(left) == len(right) == 1:
        return {left[0]: right[0]}
    far = np.full((len(left), len(right)), np.inf)
    p, q = one.where[left], two.where[right]
    if len(one.rows) and len(two.rows):
        for i in np.flatnonzero(p >= 0).tolist():
            rows = two.rows[np.maximum(q, 0)]
            with np.errstate(divide="ignore", invalid="ignore"):
                apart = distance(np.broadcast_to(one.rows[p[i]], rows.shape), rows)
                size = np.maximum(rows[:, NORM], one.rows[p[i], NORM])
                far[i] = np.where(q >= 0, np.where(size > 0, apart / size, 0.0), np.inf)
    far = np.nan_to_num(far, nan=np.inf)
    found, seen = dict[int, int](), set[int]()
    for cell in np.argsort(far, axis=None, kind="stable").tolist():
        i, j = divmod(cell, len(right))
        if left[i] not in found and j not in seen:
            found[left[i]] = right[j]
            seen.add(j)
    return found


def relative(x: Any, y: Any) -> float:
    """The distance of two tensors, by their prints, over the larger norm; 0 where both are 0."""
    size = max(float(x[NORM]), float(y[NORM]))
    return float(distance(x, y)) / size if size else 0.0


def numel(shape: str) -> float:
    """How many elements a tensor has, from its shape as text (`numel("[2, 3]") == 6`)."""
    return math.prod(sizes(shape))


def sizes(shape: str) -> list[float]:
    """The dimensions of a tensor, from its shape as text (`sizes("[2, 3]") == [2, 3]`)."""
    return [float(word) for word in shape[1:-1].split(",") if word.strip()]


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


def sizes_of(ins: Edges, outs: Edges, count: int) -> tuple[Any, Any, Any, Any]:
    """Of each pair: the largest relative distance of an input; of the norms of inputs the sum, product and least.

    In the sum an input counts that is broadcast as often as its elements are used.
    """
    relative, total, product, least = np.zeros(count), np.zeros(count), np.ones(count), np.full(count, np.inf)
    np.maximum.at(relative, ins.owner, share(ins))
    made = np.zeros(count)
    np.maximum.at(made, outs.owner, outs.elements)
    repeated = np.maximum(made[ins.owner] / np.maximum(ins.elements, 1.0), 1.0)
    np.add.at(total, ins.owner, ins.size * np.sqrt(repeated))
    some = ins.size > 0
    np.multiply.at(product, ins.owner, np.where(some, np.minimum(ins.size, 1e60), 1.0))
    np.minimum.at(least, ins.owner[some], ins.size[some])
    product[~np.isin(np.arange(count), ins.owner)] = 0.0
    return relative, total, np.minimum(product, 1e120), np.where(np.isfinite(least), least, 0.0)


def share(edges: Edges) -> Any:
    """Distances relative to the norm."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(edges.size > 0, edges.apart / edges.size, 0.0)


def steepest_other(kinds: Any, slopes: Any) -> Any:
    """For each pair, the largest slope among the others of its kind."""
    if not len(slopes):
        return slopes
    which, back = np.unique(kinds, axis=0, return_inverse=True)
    back = back.reshape(-1)
    order = np.lexsort((slopes, back))
    ends = np.searchsorted(back[order], np.arange(len(which)), side="right") - 1
    last = order[ends]  # the steepest of each kind
    starts = np.searchsorted(back[order], np.arange(len(which)))
    second = np.where(ends > starts, slopes[order[np.maximum(ends - 1, 0)]], 0.0)
    found = slopes[last][back]
    found[last] = second
    return found
