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
_MAX_ELEMENTS: Final = 3 << 17  # of all slices of a call together
_MIN_ALONG_AXIS: Final = 2


def choose(size: int, inner: int, count: int, rng: random.Random) -> list[int]:
    """At most `count` places along an axis, in order; a step along it is `inner` elements.

    >>> choose(10, 1, 3, random.Random(0))[0]
    0
    """
    if size <= count:
        return list(range(size))
    if count == 1:
        return [rng.choice((0, size - 1, rng.randrange(size)))]
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
        found.update(dict.fromkeys(rng.choices(range(size), k=count - len(found))))
    return sorted(found)


def counts(
    sizes: Mapping[str, int],
    cut: Sequence[str],
    tensors: Sequence[Sequence[str | None]],
    rest: Sequence[int],
    flat: bool,
    slow: bool = False,
) -> tuple[dict[str, int], int]:
    """How many places to take along each axis that is cut, and how many more may come from one ranking.

    `tensors` are the names of the dimensions of all tensors that are needed, those that are judged last; `rest` are the
    products of their dimensions that have no name. Of a call that is slow on the CPU, a quarter is taken.
    """
    most = _MAX_ALONG_FLAT if flat else _MAX_ALONG_AXIS
    limit = (_MAX_RESULTS if rest[-1] == 1 else _MAX_IN_ROWS) >> (2 * slow)
    most_elements = _MAX_ELEMENTS >> (2 * slow)

    def elements(names: Sequence[str | None], other: int, taken: Mapping[str, int], more: int) -> int:
        for name in names:
            if name is not None:
                count = taken.get(name, sizes[name])
                other *= count if count == sizes[name] else count + 2 * more
        return other

    def excess(taken: Mapping[str, int], more: int) -> tuple[float, int]:
        """By how much there are too many, and how many there are."""
        every = [elements(names, other, taken, more) for names, other in zip(tensors, rest)]
        return max(sum(every) / most_elements, every[-1] / limit), sum(every)

    # where even a few are too many, those that stand out take the place of others
    for more, least in ((8 if flat else 2, _MIN_ALONG_AXIS), (0, 1)):
        taken = {name: min(sizes[name], most) for name in sorted(cut)}
        while excess(taken, more)[0] > 1:
            fewer = [taken | {name: max(least, count * 3 // 4)} for name, count in taken.items() if count > least]
            if not fewer:
                break
            taken = min(fewer, key=lambda some: excess(some, more))
        else:
            return taken, more
    return taken, 0
