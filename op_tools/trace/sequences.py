"""Two sequences aligned: equal ends, what is unique in both, and dynamic programming in between."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

_MAX_CELLS: Final = 250_000  # of a table of dynamic programming
_BAND: Final = 64  # around the diagonal, in longer ones
_GAP: Final = -0.6
_NEVER: Final = -1e9


def split_aligned(one: Sequence[Any], two: Sequence[Any], score: Callable[[int, int], float]) -> list[tuple[int, int]]:
    """Align sequences of any length: equal ends, then what is unique on both sides, then dynamic programming."""
    found: list[tuple[int, int]] = []
    work = [(0, len(one), 0, len(two))]
    while work:
        a, b, c, d = work.pop()
        if (b - a) * (d - c) <= _MAX_CELLS:
            found += [(a + i, c + j) for i, j in aligned(b - a, d - c, _shifted(score, a, c))]
            continue
        anchors = _unique(one, two, (a, b, c, d))
        if not anchors:
            found += [(a + i, c + j) for i, j in aligned(b - a, d - c, _shifted(score, a, c), _BAND)]
            continue
        at = (a, c)
        for i, j in [*anchors, (b, d)]:
            work.append((at[0], i, at[1], j))
            if i < b:
                found.append((i, j))
            at = (i + 1, j + 1)
    return sorted(found)


def _shifted(score: Callable[[int, int], float], a: int, c: int) -> Callable[[int, int], float]:
    return lambda i, j: score(a + i, c + j)


def _unique(one: Sequence[Any], two: Sequence[Any], part: tuple[int, int, int, int]) -> list[tuple[int, int]]:
    """Places of keys that both sides have once, in the longest order that is common."""
    a, b, c, d = part
    where: dict[Any, list[int]] = defaultdict(list)
    for i in range(a, b):
        where[one[i]].append(i)
    there: dict[Any, list[int]] = defaultdict(list)
    for j in range(c, d):
        there[two[j]].append(j)
    candidates = [(i[0], there[k][0]) for k, i in where.items() if len(i) == 1 and len(there.get(k, ())) == 1]
    candidates.sort()
    best: list[int] = []  # ends of increasing sequences, by length
    back: list[int] = [-1] * len(candidates)
    ends: list[int] = []
    for n, (_, j) in enumerate(candidates):
        k = bisect.bisect_left(ends, j)
        back[n] = best[k - 1] if k else -1
        if k == len(ends):
            ends.append(j)
            best.append(n)
        else:
            ends[k], best[k] = j, n
    chain, n = [], best[-1] if best else -1
    while n >= 0:
        chain.append(candidates[n])
        n = back[n]
    return chain[::-1]


def aligned(n: int, m: int, score: Callable[[int, int], float], band: int = 0) -> list[tuple[int, int]]:
    """The best order-preserving pairs of two sequences (Needleman and Wunsch), near the diagonal if `band` is given.

    >>> aligned(2, 3, lambda i, j: 1.0 if "ab"[i] == "axb"[j] else -1e9)
    [(0, 0), (1, 2)]
    """
    if not n or not m:
        return []
    slope = m / n  # from the end to the beginning: of equal ones the first are matched
    previous = [_GAP * j for j in range(m + 1)]
    choices: list[list[int]] = []
    for i in range(1, n + 1):
        low, high = (1, m) if not band else (max(1, int(i * slope) - band), min(m, int(i * slope) + band))
        row = [_NEVER] * (m + 1)
        row[0] = _GAP * i
        choice = [1] * (m + 1)
        for j in range(low, high + 1):
            both = previous[j - 1] + score(n - i, m - j)
            up, left = previous[j] + _GAP, row[j - 1] + _GAP
            if both >= up and both >= left:
                row[j], choice[j] = both, 0
            elif up >= left:
                row[j], choice[j] = up, 1
            else:
                row[j], choice[j] = left, 2
        previous = row
        choices.append(choice)
    pairs, i, j = [], n, m
    while i and j:
        step = choices[i - 1][j]
        if step == 0:
            pairs.append((n - i, m - j))
            i, j = i - 1, j - 1
        elif step == 1:
            i -= 1
        else:
            j -= 1
    return pairs
