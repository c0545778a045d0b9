"""Is the result of a collective right, given facts about what each rank sent?

Facts about a small tensor are all its elements. Those about a large one are a sample of its elements and, for each
stretch of it, one number to which every element contributes: a hash of the bits, a sum with random signs, the largest
or smallest element. Sums are linear: that number of a sum over ranks is the sum of the ranks' numbers, up to rounding.

The bound of an element is what rounding may do to a sum of that many terms in their dtype, in any order. Signs that do
not depend on the data make the errors of a stretch add up like a random walk (Hoeffding's inequality), whatever
these errors have in common.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from ..call.description import Tensor
from ..view.rows import RIGHT, WRONG, Row
from .rounding import precision_of
from .verdict import Rules

REDUCTIONS: Final = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")  # as c10d counts them
MOVE: Final = ""  # not a reduction: bits arrive as they were sent

_STRETCH: Final = 1 << 16  # elements that one number stands for
_MAX_STRETCHES: Final = 4096
_EDGE: Final = 64  # elements at each end that the sample has
_SAMPLE: Final = 2048  # further elements of the sample
_DEVIATIONS: Final = 8.5  # the chance that a correct sum is further off: 2 exp(-8.5²/2), 4e-16
_DOUBLE: Final = 2.0**-53
_WIDE: Final = 2.0**-8  # of a sum's size: a bound from which on a missing rank may hide in it
_MIN_ELEMENTS: Final = 100  # that tell together
_MISSING: Final = 0.75  # a share of what a rank sent that is no rounding if a healthy order loses less than the next
_PRESENT: Final = 0.1
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Array = np.ndarray[Any, Any]


class Facts(NamedTuple):
    """What one rank tells about one tensor: `values` are all its elements, or a sample and two numbers per stretch."""

    numel: int
    dtype: str  # "float32"
    whole: bool
    values: bytes
    sums: bytes = b""  # float64 or int64
    squares: bytes = b""  # float64: the sum of the squares of each stretch


def encode(header: dict[str, Any], facts: Sequence[Facts]) -> bytes:
    """A header and facts as bytes (`decode` is its inverse); nothing in them is ever executed."""
    shapes = [[f.numel, f.dtype, f.whole, len(f.values), len(f.sums), len(f.squares)] for f in facts]
    text = json.dumps({**header, "facts": shapes}).encode()
    return b"".join([text, b"\n", *[part for f in facts for part in f[3:]]])


def decode(message: bytes) -> tuple[dict[str, Any], list[Facts]]:
    """What `encode` made bytes of."""
    text, _, rest = message.partition(b"\n")
    header = json.loads(text)
    found, start = [], 0
    for numel, dtype, whole, *sizes in header.pop("facts"):
        parts = []
        for size in sizes:
            parts.append(rest[start : start + size])
            start += size
        found.append(Facts(numel, dtype, whole, *parts))
    return header, found


# -- facts about a tensor --------------------------------------------------------------------------------------


def facts_of(tensor: Tensor, reduction: str, max_bytes: int, seed: int) -> Facts:
    """Facts about a tensor on the host; all ranks must use the same reduction, limit and seed."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.detach().reshape(-1)
    if flat.dtype == torch.bool:
        flat = flat.view(torch.uint8)
    count, dtype = flat.numel(), str(flat.dtype).removeprefix("torch.")
    if count * flat.element_size() <= max_bytes:
        return Facts(count, dtype, True, _bytes(flat))
    values = _bytes(flat[torch.from_numpy(_sample(count, seed))])
    sums, squares = _stretches(flat, reduction, seed)
    return Facts(count, dtype, False, values, sums.tobytes(), squares.tobytes())


def _bytes(flat: Tensor) -> bytes:
    return bytes(flat.contiguous().view(torch.uint8).numpy().data) if flat.numel() else b""


@functools.lru_cache(maxsize=64)
def _sample(count: int, seed: int) -> _Array:
    """Places of elements: both ends, around powers of two where counters end, edges of tiles, and anywhere."""
    random = np.random.Generator(np.random.PCG64([count, seed]))
    tiles = 4096 * random.integers(0, count // 4096 + 1, 128)
    around = np.concatenate([1 << np.array([8, 10, 16, 20, 24, 31, 32]), tiles])
    strata = (np.arange(_SAMPLE) * (count / _SAMPLE) + random.random(_SAMPLE) * (count / _SAMPLE)).astype(np.int64)
    ends = np.arange(_EDGE)
    found = np.unique(np.concatenate([ends, count - 1 - ends, around - 1, around, strata]))
    return found[(found >= 0) & (found < count)]


def _length(count: int) -> int:
    return max(_STRETCH, -(-count // _MAX_STRETCHES))


@functools.lru_cache(maxsize=16)
def _weights(length: int, seed: int, bits: bool) -> _Array:
    random = np.random.Generator(np.random.PCG64([length, seed, 1]))
    if bits:
        return random.integers(-(1 << 63), 1 << 63, length, np.int64) | 1
    return (2 * random.integers(0, 2, length) - 1).astype(np.float64)


def _stretches(flat: Tensor, reduction: str, seed: int) -> tuple[_Array, _Array]:
    """The numbers that stand for the stretches of a tensor, and their sums of squares."""
    length, sums, squares = _length(flat.numel()), [], []
    for part in flat.split(length):
        if reduction == MOVE:
            words = part.contiguous().view(_WORDS[part.element_size()]).to(torch.int64).numpy()
            sums.append(np.sum(words * _weights(length, seed, True)[: len(words)]))  # wraps around
        elif reduction in ("min", "max"):
            sums.append(float(part.amax() if reduction == "max" else part.amin()))
        elif part.is_floating_point() and reduction in ("sum", "avg", "premul_sum"):
            wide = part.to(torch.float64).numpy()
            sums.append(float(wide @ _weights(length, seed, False)[: len(wide)]))
            squares.append(float(wide @ wide))
        elif reduction == "sum":
            words = part.to(torch.int64).numpy()
            sums.append(np.sum(words * _weights(length, seed, False)[: len(words)].astype(np.int64)))
    exact = sums and not isinstance(sums[0], float)
    return np.array(sums, np.int64 if exact else np.float64), np.array(squares, np.float64)


# -- verdicts --------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """One result of a collective: facts about it, and about what each rank sent for it, by rank."""

    op: str
    index: int | None  # type: ignore[assignment]  # among the results; None where there is only one
    found: Facts
    sent: dict[int, Facts]
    reduction: str
    size: int  # ranks in the group
    factor: float = 1.0  # of premul_sum
    others: Mapping[int, Facts] = MappingProxyType({})  # what further ranks sent, to say whose data arrived instead


class NotComparable(Exception):
    """Why nothing can be said."""


@np.errstate(all="ignore")  # infinity and NaN are results like others
def judge_part(part: Part, rules: Rules, seed: int) -> Row:
    """The row of one result; raises `NotComparable`."""
    for rank, facts in part.sent.items():
        if facts[:3] != part.found[:3]:
            here, there = (f"{f.numel:,} elements of {f.dtype}" for f in (part.found, facts))
            raise NotComparable(f"rank {rank} sent {there}, and the result has {here}")
    dtype = getattr(torch, part.found.dtype)
    atol, rtol, is_set = rules.tolerance(part.op, dtype)
    if not part.found.numel:
        return Row(part.op, "output", part.index, True, 0.0, 0.0, atol, rtol, "")
    judged = _judge_move(part, seed) if part.reduction == MOVE else _judge_reduction(part, dtype, seed)
    allclose = bool(np.all(judged.error <= atol + rtol * np.abs(judged.golden)) or not judged.text)
    largest = float(np.max(judged.error, initial=0.0))
    relative = float(np.max(judged.error / np.maximum(np.abs(judged.golden), 1e-300), initial=0.0))
    row = Row(part.op, "output", part.index, allclose, largest, relative, atol, rtol, "", max_ulp=judged.ulp)
    if not judged.text or (is_set and allclose):
        return row._replace(verdict=RIGHT, excess=judged.excess)
    return row._replace(verdict=WRONG, allclose=False, reason=judged.text, excess=judged.excess, where=judged.where)


class _Judged(NamedTuple):
    error: _Array
    golden: _Array
    excess: float
    text: str  # what is wrong; empty if nothing is
    ulp: float = 0.0
    where: tuple[int, ...] = ()


def _elements(facts: Facts) -> Tensor:
    dtype = getattr(torch, facts.dtype)
    return torch.frombuffer(bytearray(facts.values), dtype=dtype) if facts.values else torch.empty(0, dtype=dtype)


def _wide(facts: Facts) -> _Array:
    elements = _elements(facts)
    wide: _Array = elements.to(torch.float64 if elements.is_floating_point() else torch.int64).numpy()
    return wide


def _place(facts: Facts, index: int, seed: int) -> int:
    return index if facts.whole else int(_sample(facts.numel, seed)[index])


def _judge_move(part: Part, seed: int) -> _Judged:
    (source, sent), found = next(iter(part.sent.items())), part.found
    none = np.zeros(0)
    if found[3:] == sent[3:]:
        return _Judged(none, none, 0.0, "")
    size = getattr(torch, found.dtype).itemsize
    here, there = (np.frombuffer(f.values, np.uint8).reshape(-1, size) for f in (found, sent))
    wrong = np.flatnonzero((here != there).any(axis=1))
    for rank, facts in part.others.items():
        if facts == found and rank != source:
            return _Judged(none, none, math.inf, f"it has the data of rank {rank} where that of rank {source} belongs")
    if not len(wrong):
        sums = [np.frombuffer(f.sums, np.int64) for f in (found, sent)]
        return _Judged(none, none, math.inf, _in_stretches(found, np.flatnonzero(sums[0] != sums[1]), "other bits"))
    ours, theirs = _wide(found), _wide(sent)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.nan_to_num(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)), nan=math.inf)
    place = _place(found, wrong[0], seed)
    text = f"element {place:,} is {_number(ours[wrong[0]])}, and rank {source} sent {_number(theirs[wrong[0]])}"
    return _Judged(
        error, np.nan_to_num(theirs.astype(np.float64)), math.inf, text + _many(wrong, ours, found), math.inf, (place,)
    )


def _judge_reduction(part: Part, dtype: torch.dtype, seed: int) -> _Judged:
    terms, found = np.stack([_wide(f) for f in part.sent.values()]), _wide(part.found)
    with np.errstate(all="ignore"):
        judge = _float_bounds if dtype.is_floating_point else _integer_bounds
        golden, bound, known = judge(part, terms, dtype)
        error = np.abs(found.astype(np.float64) - golden.astype(np.float64))
        if not dtype.is_floating_point and golden.dtype == np.int64:
            error = np.where(found == golden, 0.0, np.maximum(error, 1.0))
        special = known & ~np.isfinite(golden)  # infinity or NaN: what it must be
        same = (found == golden) | (np.isnan(found) & np.isnan(golden))
        error, bound = np.where(special, np.where(same, 0.0, math.inf), error), np.where(special, 0.0, bound)
        error = np.where(known, np.nan_to_num(error, nan=math.inf), 0.0)
        wrong = np.flatnonzero(error > bound)
        excess = float(np.max(np.where(error > 0, error / np.maximum(bound, 1e-300), 0.0), initial=0.0))
        shown = np.nan_to_num(golden.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        ulp = 0.0
        if dtype.is_floating_point:
            spacing = np.maximum(np.abs(shown) * 2 * precision_of(dtype).stored, precision_of(dtype).smallest)
            ulp = float(np.max(np.where(special, 0.0, error) / spacing, initial=0.0))
    if not len(wrong):
        bad = _wrong_stretches(part, dtype)
        text = _in_stretches(part.found, bad, f"another {_WORD[part.reduction]} over the ranks") if len(bad) else ""
        text = text or _lacks_a_rank(part, terms, found, golden, known, dtype)
        return _Judged(error, shown, math.inf if text else excess, text, ulp)
    worst = wrong[np.argmax(error[wrong])]
    place = _place(part.found, int(worst), seed)
    over = f"the {_WORD[part.reduction]} over {part.size} ranks is {_number(golden[worst])}"
    text = f"element {place:,} is {_number(found[worst])}, and {over}" + _many(wrong, found, part.found)
    text += _explanation(part, terms, found, wrong, dtype)
    return _Judged(error, shown, max(excess, 1.0), text, ulp, (place,))


_WORD: Final = {
    "sum": "sum", "avg": "mean", "product": "product", "min": "minimum", "max": "maximum", "premul_sum": "scaled sum",
    "band": "bitwise and", "bor": "bitwise or", "bxor": "bitwise xor",
}  # fmt: skip


def _float_bounds(part: Part, terms: _Array, dtype: torch.dtype) -> tuple[_Array, _Array, _Array]:
    """The right results, how far each may be off, and for which elements that is known."""
    precision, size = precision_of(dtype), part.size
    unit = precision.stored
    golden: _Array
    if part.reduction in ("min", "max"):
        golden = terms.max(0) if part.reduction == "max" else terms.min(0)
        return golden, np.zeros_like(golden), np.logical_not(np.isnan(terms).any(0))
    if part.reduction == "product":
        golden = np.prod(terms, axis=0)
        powers = np.log2(np.maximum(np.abs(terms), 1e-300))
        highest, lowest = np.maximum(powers, 0).sum(0), np.minimum(powers, 0).sum(0)
        safe = (highest < math.log2(precision.largest) - 1) & (
            lowest > math.log2(torch.finfo(dtype).smallest_normal) + 1
        )
        return golden, np.abs(golden) * size * (unit + _DOUBLE), safe & np.isfinite(terms).all(0)
    factor, more = _scale(part)
    golden, magnitude = factor * terms.sum(0), abs(factor) * np.abs(terms).sum(0)
    bound = magnitude * ((size - 1 + more) * unit * (1 + size * unit) + size * _DOUBLE) + _least(dtype, size)
    finite = np.abs(np.where(np.isfinite(terms), terms, 0.0)).sum(0) * max(1.0, abs(factor))
    return golden, bound, finite < precision.largest * (1 - size * unit)  # else it may overflow in some order


def _scale(part: Part) -> tuple[float, int]:
    """What the sum is multiplied by, and how many roundings that adds: of the factor, each term or the sum."""
    if part.reduction == "avg":
        return 1.0 / part.size, 2
    return (part.factor, 2) if part.reduction == "premul_sum" else (1.0, 0)


def _least(dtype: torch.dtype, size: int) -> float:
    """What a sum may lose because numbers that small are flushed to zero, or are rounded to few bits."""
    info = torch.finfo(dtype)
    return size * float(info.smallest_normal * (info.eps if dtype == torch.float16 else 1.0))


def _integer_bounds(part: Part, terms: _Array, dtype: torch.dtype) -> tuple[_Array, _Array, _Array]:
    if part.reduction == "avg":
        golden = terms.sum(0) / part.size
        return golden, np.full(golden.shape, 1 - 0.5 / part.size), np.abs(golden) * part.size < torch.iinfo(dtype).max
    combine: Any = {
        "sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum,
        "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
    }.get(part.reduction)  # fmt: skip
    if combine is None:
        raise NotComparable(f"{_WORD[part.reduction]} of {part.found.dtype}")
    golden = (
        torch.from_numpy(combine.reduce(terms, axis=0)).to(dtype).to(torch.int64).numpy()
    )  # wraps as the dtype does
    return golden, np.zeros(golden.shape), np.ones(golden.shape, bool)


def _wrong_stretches(part: Part, dtype: torch.dtype) -> _Array:
    """Stretches whose number is not what the ranks' numbers give."""
    if part.found.whole or not part.found.sums:
        return np.zeros(0, np.int64)
    if part.reduction in ("min", "max"):
        terms, found = np.stack([np.frombuffer(f.sums) for f in part.sent.values()]), np.frombuffer(part.found.sums)
        golden = terms.max(0) if part.reduction == "max" else terms.min(0)
        return np.flatnonzero(~np.isnan(terms).any(0) & (found != golden))
    if not dtype.is_floating_point:
        total = np.sum([np.frombuffer(f.sums, np.int64) for f in part.sent.values()], axis=0)
        bits = 8 * dtype.itemsize
        apart = (np.frombuffer(part.found.sums, np.int64) - total).view(np.uint64)
        return np.flatnonzero(apart << np.uint64(64 - bits) if bits < 64 else apart)
    with np.errstate(all="ignore"):
        factor, more = _scale(part)
        golden = factor * np.sum([np.frombuffer(f.sums) for f in part.sent.values()], axis=0)
        norm = np.sum([np.sqrt(np.frombuffer(f.squares)) for f in part.sent.values()], axis=0)
        precision, length = precision_of(dtype), _length(part.found.numel)
        rounding = _DEVIATIONS * (part.size - 1 + more) * precision.stored * (1 + part.size * precision.stored)
        bound = abs(factor) * norm * (rounding + 2 * length**1.5 * _DOUBLE)
        bound += _DEVIATIONS * math.sqrt(length) * _least(dtype, part.size)
        known = np.isfinite(golden) & (norm * max(1.0, abs(factor)) < precision.largest)
        apart = np.abs(np.frombuffer(part.found.sums) - golden)
        return np.flatnonzero(known & ~(apart <= bound))


# -- one of many ranks -----------------------------------------------------------------------------------------


def _lacks_a_rank(part: Part, terms: _Array, found: _Array, golden: _Array, known: _Array, dtype: torch.dtype) -> str:
    """Whether all elements together show that a rank is missing, where the bound of each is too wide for that.

    The roundings of many additions in a half type may take as much from one element as a rank has sent. The share of a
    rank in the errors of all elements tells, unless it is also missing where the sum is really done in some order.
    """
    if not dtype.is_floating_point or part.reduction not in ("sum", "avg", "premul_sum"):
        return ""
    if part.size < 3 or (part.size - 1) * precision_of(dtype).stored < _WIDE:
        return ""
    usable = known & np.isfinite(golden) & np.isfinite(found)
    if np.count_nonzero(usable) < _MIN_ELEMENTS:
        return ""
    factor, _ = _scale(part)
    terms, exact = factor * terms[:, usable], golden[usable]
    squares = np.maximum((terms * terms).sum(1), 1e-300)
    shares = terms @ (exact - found[usable]) / squares
    if shares.max() < _MISSING:
        return ""
    lost = [np.abs(terms @ (exact - order) / squares) for order in _in_orders(terms, dtype)]
    suspects = np.where(np.max(lost, axis=0) < _PRESENT, shares, 0.0)
    if suspects.max() < _MISSING:
        return ""
    rank = list(part.sent)[int(suspects.argmax())]
    return f"the elements together lack {suspects.max():.0%} of what rank {rank} sent, as if it had sent nothing"


def _in_orders(terms: _Array, dtype: torch.dtype) -> list[_Array]:
    """Sums over ranks really done in a dtype: around rings that begin at several ranks, both ways, and as a tree."""
    given = list(torch.from_numpy(terms).to(dtype))
    steps = range(0, len(given), max(1, len(given) // 8))
    rings = [given[start:] + given[:start] for start in steps]
    sums = [functools.reduce(torch.add, ring) for ring in [*rings, *[ring[::-1] for ring in rings[:2]]]]
    while len(given) > 1:
        given = [a if b is None else a + b for a, b in itertools.zip_longest(given[::2], given[1::2])]
    return [total.to(torch.float64).numpy() for total in (*sums, given[0])]


# -- words -----------------------------------------------------------------------------------------------------


def _number(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, (float, np.floating)) else f"{value}"


def _many(wrong: _Array, all_of_them: _Array, facts: Facts) -> str:
    kind = "elements" if facts.whole else "sampled elements"
    return f" ({len(wrong):,} of {len(all_of_them):,} {kind} wrong)"


def _in_stretches(facts: Facts, bad: _Array, what: str) -> str:
    if not len(bad):
        return f"{what}, in no stretch that is known"
    length = _length(facts.numel)
    first = int(bad[0]) * length
    last = min(first + length, facts.numel) - 1
    more = f", and {len(bad) - 1:,} more such stretches" if len(bad) > 1 else ""
    return f"{what} among elements {first:,} to {last:,}{more}; the sampled elements are right"


def _explanation(part: Part, terms: _Array, found: _Array, wrong: _Array, dtype: torch.dtype) -> str:
    """What the wrong elements look like: a sum without one of the ranks, or one that was rounded to fewer bits."""
    if not dtype.is_floating_point or part.reduction not in ("sum", "avg", "premul_sum"):
        return ""
    factor, _ = _scale(part)
    close = np.abs(terms).sum(0) * abs(factor) * 4 * part.size * precision_of(dtype).stored + _least(dtype, part.size)
    for number, rank in enumerate(part.sent):
        apart = np.abs(found - factor * (terms.sum(0) - terms[number]))
        if (apart <= close)[wrong].all() and np.abs(terms[number][wrong]).any():
            return f"; the result is as if rank {rank} had sent nothing"
    values = torch.from_numpy(found[wrong])
    for low in (torch.bfloat16, torch.float16):
        if precision_of(low).stored > precision_of(dtype).stored and torch.equal(
            values.to(low).to(torch.float64), values
        ):
            return f"; the result was rounded to {str(low).removeprefix('torch.')}"
    return ""
