"""Where two aligned runs part: operators whose inputs agree to rounding and whose outputs do not.

The distance of two tensors is estimated from their fingerprints. What rounding may do to an output has two parts. The
operator's own: a unit of the dtype for each element that is stored, and of float32 for what is added up, whose size the
norms of the inputs bound. And what the inputs' own difference becomes, which the run says in three ways: the condition
of the operator (the norms of what went in, over that of what came out), the range of the arguments of functions that
are steep near 0, and how much the other operators of its kind made of a difference in the same two runs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import numpy as np

from . import format as columns
from .align import Alignment
from .families import family
from .format import INPUT, OUTPUT, PROJECTIONS
from .graph import Graph, short_name
from .prints import distance, smallest_step

_UNITS: Final = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-11}
_DIGITS: Final = {"float64": 53, "float32": 24, "bfloat16": 8, "float16": 11}  # binary, of a number
_SINGLE: Final = 2.0**-24
_COMPILED: Final = "torch.compile."
_ESTIMATE: Final = 2.0  # by how much eight projections may misjudge a distance
_SMALL: Final = 0.1  # relative differences up to here show a slope
_UNBOUNDED: Final = 1e30
_FEW: Final = 8.0  # roundings to float32 that a function of one element may have inside
_ONE_ELEMENT: Final = 1.25  # steps of the dtype between two right roundings of one number, and what float32 sums add
_SURE_BITS: Final = 20  # of a difference that is read off fingerprints
_COMPOSITE: Final = 4.0  # roundings inside functions of several steps
_NORM, _LOW, _HIGH, _NAN, _INF = range(PROJECTIONS + 1, PROJECTIONS + 6)
_PRODUCTS: Final = frozenset(
    {"matmul", "attention", "conv1d", "conv2d", "conv3d", "conv_transpose2d", "wkv", "bilinear"}
)
_SEVERAL: Final = frozenset({"attention", "update", "wkv"})  # may store what is between their steps
_STEEP: Final = frozenset({"div", "_foreach_div", "_foreach_addcdiv", "addcdiv", "rsqrt", "reciprocal", "log", "update",
                           "_foreach_sqrt", "sqrt", "norm", "truediv", "rtruediv"})  # fmt: skip
_RANDOM: Final = frozenset({"rand", "randn", "randint", "dropout", "multinomial", "bernoulli", "normal", "uniform"})


@dataclasses.dataclass
class Numbers:
    """For each pair of operators: how far inputs and outputs are apart, and what rounding explains."""

    compared: Any  # whether both sides have fingerprints of an output
    inputs: Any  # the largest distance of an input, relative to its norm
    outputs: Any  # the same of the outputs
    allowed: Any  # of the output that is furthest beyond it, what rounding allows, relative to its norm
    parted: Any  # whether the outputs are further apart than that
    reason: dict[int, str]  # of pairs whose difference is no distance


@dataclasses.dataclass
class Divergence:
    """The first operator that parts, or what both runs were given that differs already."""

    pair: int
    reason: str
    inputs: float
    outputs: float
    allowed: float


class _Side:
    def __init__(self, graph: Graph, parts: int) -> None:
        self.graph = graph
        self.rows, self.where = graph.prints()
        self.parts = graph.prints(1) if parts > 1 else None
        texts = graph.trace.texts
        self.unit = np.array([_UNITS.get(texts[n], 0.0) for n in graph.looks["dtype"].tolist()])
        self.digits = np.array([_DIGITS.get(texts[n], 0) for n in graph.looks["dtype"].tolist()])
        self.shape = [texts[n] for n in graph.looks["shape"].tolist()]


def numbers_of(alignment: Alignment) -> Numbers:
    """Measure every pair."""
    first, second, pairs = alignment.first, alignment.second, alignment.pairs
    one, two = _Side(first, 1), _Side(second, second.trace.world)
    count = len(pairs)
    ins = _edges(one, two, pairs, INPUT)
    outs = _edges(one, two, pairs, OUTPUT)
    families = np.array([_kind(first.names[a]) for a in pairs[:, 0].tolist()], dtype=object)
    backward = first.operators["phase"][pairs[:, 0]] == columns.BACKWARD if count else np.zeros(0, bool)
    relative_in, total, product, wide = _inputs(ins, families, count)
    _add_forward_inputs(alignment, relative_in, product)
    allowed, relative_out, parted = np.zeros(count), np.zeros(count), np.zeros(count, bool)
    compared = np.zeros(count, bool)
    reason: dict[int, str] = {}
    several = np.isin(families, list(_SEVERAL))
    contracts = np.isin(families, list(_PRODUCTS)) | backward
    own = np.where(several, _COMPOSITE, 1.0)
    roundings = np.maximum(np.sqrt(_terms(first, pairs[:, 0])), _FEW)
    gains = _gains(outs, relative_in, np.where(contracts, product, total), wide, families, backward)
    for pair, apart, size, unit, digits, left, right in zip(*outs):
        compared[pair] = True
        if left[_NAN] != right[_NAN] or left[_INF] != right[_INF]:
            parted[pair] = True
            reason[pair] = f"{_strange(left)} against {_strange(right)}"
            continue
        sums = _SINGLE * max(product[pair] if contracts[pair] else 0.0, roundings[pair] * size)
        bound = _ESTIMATE * (own[pair] * unit * size + sums) + gains[pair] * relative_in[pair] * size
        ratio = apart / size if size else 0.0
        if apart > bound:
            parted[pair] = True
        elif apart and not relative_in[pair]:
            step = smallest_step(left, right)
            largest = max(abs(left[_LOW]), abs(left[_HIGH]), abs(right[_LOW]), abs(right[_HIGH]))
            it = largest if two.parts is not None or not digits else min(largest, largest_with(step, int(digits)))
            single = _ONE_ELEMENT * own[pair] * it * 2.0 ** (1 - int(digits)) if digits else 0.0
            if step > max(single, 16.0 * _SINGLE * largest):
                parted[pair] = True
                size_told = f"the largest is {largest:.3g}" if it == largest else f"they are no larger than {it:.3g}"
                reason[pair] = f"few elements differ, by {step:.3g} or more; {size_told}"
        if ratio >= relative_out[pair]:
            relative_out[pair], allowed[pair] = ratio, bound / size if size else 0.0
    random = np.isin(families, list(_RANDOM))
    return Numbers(compared, relative_in, relative_out, allowed, parted & ~random, reason)


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


def _terms(graph: Graph, operators: Any) -> Any:
    """How many numbers an operator adds up for one element of its smallest output, at most; also of its forward."""
    texts = graph.trace.texts
    numel = np.array([_numel(texts[n]) for n in graph.looks["shape"].tolist()] or [1.0])
    most, least = np.ones(graph.count), np.full(graph.count, np.inf)
    for side, found, pick in ((INPUT, most, np.maximum), (OUTPUT, least, np.minimum)):
        starts, tensors = graph.side(side)
        owner = np.repeat(np.arange(graph.count), np.diff(starts))
        pick.at(found, owner, numel[graph.tensors["look"][tensors]])
    forward = graph.operators["forward"]
    most = np.maximum(most, np.where(forward >= 0, most[forward], 1.0))
    return np.maximum(most / np.maximum(least, 1.0), 1.0)[operators]


def _numel(shape: str) -> float:
    return math.prod([float(word) for word in shape[1:-1].split(",") if word.strip()])


def _kind(name: str) -> str:
    last = short_name(name)
    return last if last in _STEEP else family(name)


def _strange(row: Any) -> str:
    words = [f"{int(row[k])} {name}" for k, name in ((_NAN, "NaN"), (_INF, "Inf")) if row[k]]
    return " and ".join(words) or "all finite"


def _edges(one: _Side, two: _Side, pairs: Any, side: int) -> tuple[Any, ...]:
    """Of matched tensors on one side: the pair, distance, norm, unit of rounding, digits, and both rows of prints."""
    if not len(one.rows) or not len(two.rows):
        none = np.zeros(0)
        return none.astype(np.int64), none, none, none, none, none.reshape(0, 14), none.reshape(0, 14)
    starts_one, tensors_one = one.graph.side(side)
    starts_two, tensors_two = two.graph.side(side)
    a, b = pairs[:, 0], pairs[:, 1]
    lengths = np.minimum(starts_one[a + 1] - starts_one[a], starts_two[b + 1] - starts_two[b])
    owner = np.repeat(np.arange(len(pairs)), lengths)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    tensors_two = _in_the_same_order(one, two, pairs, side)
    left, right = tensors_one[starts_one[a][owner] + within], tensors_two[starts_two[b][owner] + within]
    looks_one, looks_two = one.graph.tensors["look"][left], two.graph.tensors["look"][right]
    shapes = {text: n for n, text in enumerate(dict.fromkeys([*one.shape, *two.shape]))}
    shape_one = np.array([shapes[t] for t in one.shape] or [0])[looks_one]
    shape_two = np.array([shapes[t] for t in two.shape] or [0])[looks_two]
    same = shape_one == shape_two
    p, q = one.where[left], two.where[right]
    good = same & (p >= 0) & (q >= 0)
    rows_one, rows_two = one.rows[np.where(good, p, 0)], two.rows[np.where(good, q, 0)]
    if two.parts is not None:  # this rank has a part of the batch: the prints of all parts add up
        rows, where = two.parts
        r = where[right]
        part = ~same & (p >= 0) & (r >= 0)
        if part.any():
            rows_one = one.rows[np.where(good | part, p, 0)]
            sums = rows[np.where(part, r, 0)].copy()
            # the gradient of a mean over this part is larger than that of a mean over the whole batch
            less = sums.copy()
            less[:, :_NAN] /= two.graph.trace.world
            nearer = distance(rows_one, less) < distance(rows_one, sums)
            sums = np.where(nearer[:, None], less, sums)
            rows_two = np.where(part[:, None], sums, rows_two)
            good = good | part
    owner, rows_one, rows_two = owner[good], rows_one[good], rows_two[good]
    unit = np.maximum(one.unit[looks_one[good]], two.unit[looks_two[good]])
    digits = np.maximum(one.digits[looks_one[good]], two.digits[looks_two[good]])
    apart = distance(rows_one, rows_two)
    size = np.maximum(rows_one[:, _NORM], rows_two[:, _NORM])
    return owner, apart, size, unit, digits, rows_one, rows_two


def _in_the_same_order(one: _Side, two: _Side, pairs: Any, side: int) -> Any:
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


def _unlike(one: _Side, two: _Side, a: int, b: int) -> tuple[bool, float]:
    shapes = (side.shape[int(side.graph.tensors["look"][n])] for side, n in ((one, a), (two, b)))
    p, q = int(one.where[a]), int(two.where[b])
    apart = float(distance(one.rows[p], two.rows[q])) if p >= 0 and q >= 0 else float("inf")
    return len(set(shapes)) > 1, apart


def _inputs(ins: tuple[Any, ...], families: Any, count: int) -> tuple[Any, Any, Any, Any]:
    """Of each pair: the largest relative distance of an input, sum and product of the norms, and their range."""
    owner, apart, size = ins[:3]
    relative, total, product, wide = np.zeros(count), np.zeros(count), np.ones(count), np.ones(count)
    if not len(owner):
        return relative, total, np.zeros(count), wide
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(size > 0, apart / size, 0.0)
    np.maximum.at(relative, owner, share)
    np.add.at(total, owner, size)
    np.multiply.at(product, owner, np.where(size > 0, np.minimum(size, 1e60), 1.0))
    steep = np.isin(families, list(_STEEP))
    if steep.any():  # near 0 they make much of little: how much, the smallest of the arguments says
        last = np.full(count, -1, np.int64)
        last[owner] = np.arange(len(owner))
        rows = ins[5][np.maximum(last, 0)]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ranges = np.where(rows[:, _LOW] > 0, rows[:, _HIGH] / rows[:, _LOW], _UNBOUNDED)
        wide = np.where(steep, np.maximum(ranges, 1.0), 1.0)
    return relative, total, np.minimum(product, 1e120), wide


def _gains(outs: tuple[Any, ...], relative: Any, norms: Any, wide: Any, families: Any, backward: Any) -> Any:
    """For each pair, how much of its inputs' relative difference its outputs may have."""
    owner, apart, size = outs[0], outs[1], outs[2]
    count = len(relative)
    least, slope = np.full(count, np.inf), np.zeros(count)
    np.minimum.at(least, owner, np.where(size > 0, size, np.inf))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        condition = np.where(np.isfinite(least), norms / least, 1.0)
        small = (relative[owner] > 0) & (relative[owner] < _SMALL) & (size > 0)
        np.maximum.at(slope, owner[small], (apart[small] / size[small]) / relative[owner][small])
    largest: dict[
        Any, list[float]
    ] = {}  # of each kind of operator the two steepest: the other one counts for the first
    kinds = list(zip(families.tolist(), backward.tolist()))
    for kind, one in zip(kinds, slope.tolist()):
        top = largest.setdefault(kind, [0.0, 0.0])
        if one > top[0]:
            top[:] = [one, top[0]]
        elif one > top[1]:
            top[1] = one
    others = np.array([largest[k][one >= largest[k][0]] for k, one in zip(kinds, slope.tolist())] or [0.0])[:count]
    return _ESTIMATE**2 * np.minimum(np.maximum(np.maximum(condition, others), 1.0) * wide, _UNBOUNDED)


def _add_forward_inputs(alignment: Alignment, relative: Any, product: Any) -> None:
    """A backward works on what its forward got: that counts among its inputs."""
    forward_one = alignment.first.operators["forward"]
    place = {int(a): n for n, a in enumerate(alignment.pairs[:, 0].tolist())}
    for n, a in enumerate(alignment.pairs[:, 0].tolist()):
        source = place.get(int(forward_one[a]), -1) if forward_one[a] >= 0 else -1
        if source >= 0:
            relative[n] = max(relative[n], relative[source])
            product[n] = max(product[n] * max(product[source], 1.0), product[n])


def first_divergence(alignment: Alignment, numbers: Numbers) -> Divergence | None:
    """The first pair, in the order of the first run, that parts; None where rounding explains every difference."""
    found = np.flatnonzero(numbers.parted)
    if not len(found):
        return None
    pair = int(found[0])
    why = numbers.reason.get(pair, "the outputs are further apart than rounding explains")
    return Divergence(pair, why, *(float(x[pair]) for x in (numbers.inputs, numbers.outputs, numbers.allowed)))


def growth(alignment: Alignment, numbers: Numbers) -> list[tuple[str, str, float, float]]:
    """By module and phase, in order: the largest relative distance of inputs and of outputs."""
    graph = alignment.first
    found: dict[tuple[str, str], list[float]] = {}
    for n, a in enumerate(alignment.pairs[:, 0].tolist()):
        if numbers.compared[n]:
            phase = columns.PHASES[int(graph.operators["phase"][a])]
            entry = found.setdefault((graph.paths.get(int(graph.operators["module"][a]), ""), phase), [0.0, 0.0])
            entry[0] = max(entry[0], float(numbers.inputs[n]))
            entry[1] = max(entry[1], float(numbers.outputs[n]))
    return [(module, phase, came, went) for (module, phase), (came, went) in found.items()]
