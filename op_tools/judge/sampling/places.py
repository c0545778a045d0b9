"""Which places along the axes of a call are judged: ends, both sides of edges where kernels change, and random ones."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final

_TILES: Final = (16, 32, 64, 128, 256)
_LIMITS: Final = (1 << 16, 1 << 24, 1 << 31, 1 << 32)  # elements where an index may wrap around
_MAX_ALONG_AXIS: Final = 48
_MAX_ALONG_FLAT: Final = 2048
_MAX_RESULTS: Final = 1 << 12
_MAX_IN_ROWS: Final = 1 << 15  # of results that are whole rows
_MAX_ELEMENTS: Final = 1 << 18  # of all slices of a call together
_MIN_ALONG_AXIS: Final = 2
_MIN_OF_ROWS: Final = 1
_LONG_ROW: Final = 4096


def choose(size: int, inner: int, count: int, rng: random.Random) -> list[int]:
    """At most `count` places along an axis, in order; a step along it is `inner` elements.

    >>> choose(10, 1, 3, random.Random(0))[0]
    0
    """
    if size <= count:
        return list(range(size))
    wanted = [0, size - 1]
    for limit in _LIMITS:
        for edge in (limit // inner, limit):
            wanted += [place for place in (edge, edge - 1) if 0 <= place < size]
    # where the last tile of each width begins, and one tile edge somewhere; in another order each time
    edges = [(size - 1) // tile * tile for tile in _TILES] + [
        tile * rng.randrange(1, max(2, (size - 1) // tile + 1)) for tile in _TILES
    ]
    rng.shuffle(edges)
    wanted += [place for edge in edges for place in (edge, edge - 1) if 0 <= place < size]
    found = dict.fromkeys(wanted[: max(2, 3 * count // 4)])
    while len(found) < count:
        found[rng.randrange(size)] = None
    return sorted(found)


def counts(
    sizes: Mapping[str, int],
    cut: Sequence[str],
    tensors: Sequence[Sequence[str | None]],
    rest: Sequence[int],
    flat: bool,
) -> tuple[dict[str, int], int]:
    """How many places to take along each axis that is cut, and how many more may come from one ranking.

    `tensors` are the names of the dimensions of all tensors that are needed, those that are judged last; `rest` are the
    products of their dimensions that have no name.
    """
    most, least = (_MAX_ALONG_FLAT, _MIN_ALONG_AXIS) if flat else (_MAX_ALONG_AXIS, _MIN_ALONG_AXIS)
    more = 8 if flat else 2
    if rest[-1] >= _LONG_ROW:
        more, least = 0, _MIN_OF_ROWS  # a row that stands out takes the place of others
    taken = {name: min(sizes[name], most) for name in sorted(cut)}

    def elements(names: Sequence[str | None], other: int) -> int:
        for name in names:
            if name is not None:
                count = taken.get(name, sizes[name])
                other *= count if count == sizes[name] else count + 2 * more
        return other

    limit = _MAX_RESULTS if rest[-1] == 1 else _MAX_IN_ROWS
    while True:
        widest = max(taken, key=lambda name: taken[name], default=None)
        if widest is None or taken[widest] <= least:
            return taken, more
        total = sum([elements(names, other) for names, other in zip(tensors, rest)])
        if total <= _MAX_ELEMENTS and elements(tensors[-1], rest[-1]) <= limit:
            return taken, more
        taken[widest] = max(least, taken[widest] * 3 // 4)
