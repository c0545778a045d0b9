"""Pairs of operators whose inputs come from other pairs: where others of the same name fit better, these are taken.

Sequences of casts, views and copies look alike; what they work on tells them apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from .families import MOVES, family
from .format import BACKWARD, INPUT, PROJECTIONS
from .graph import Graph

_ALIKE: Final = 0.05  # of the size of two prints, if they are of the same tensor in two dtypes


def settled(
    first: Graph, second: Graph, pairs: list[tuple[int, int]], modules: dict[int, int]
) -> list[tuple[int, int]]:
    """The pairs, with others in place of those whose producers do not correspond, in the same module.

    >>> settled(first, second, [(0, 0), (1, 2)], {-1: -1})             # doctest: +SKIP
    """
    doubtful = _doubtful(first, second, pairs)
    if not doubtful:
        return pairs
    there = dict(pairs)
    taken = set(there.values()) - {b for _, b in doubtful}
    waiting: dict[Any, list[int]] = defaultdict(list)
    for b in range(second.count):
        if b not in taken and (made := _producers(second, b)):
            waiting[_key(second, b, made, None)].append(b)
    used: set[int] = set()
    for a, _ in doubtful:
        made = [there.get(p, -1) for p in _producers(first, a)]
        others = [] if -1 in made else waiting.get(_key(first, a, made, modules), [])
        found = [n for n in others if n not in used]
        if found:
            there[a] = found[0]
            used.add(found[0])
    values = [_values(graph) for graph in (first, second)]
    for a, b in doubtful:  # those for which nothing better was found keep theirs if nobody else has it
        other = _said(first, a) != _said(second, b)
        moves = other and family(first.names[a]) in MOVES and not _alike(values[0](a), values[1](b))
        if there[a] == b and (b in used or moves):
            del there[a]
    links = [graph.operators["forward"].tolist() for graph in (first, second)]
    phases = first.operators["phase"].tolist()
    return sorted(
        (a, b)
        for a, b in there.items()
        if phases[a] != BACKWARD or links[0][a] < 0 or there.get(links[0][a], -1) == links[1][b]
    )


def _said(graph: Graph, operator: int) -> tuple[str, str]:
    return graph.names[operator], graph.trace.texts[int(graph.operators["arguments"][operator])]


def _values(graph: Graph) -> Callable[[int], Any]:
    """What gives the projections of an operator's first result, or nothing."""
    table = graph.trace["prints"]
    own = np.flatnonzero(table["part"] == 0)
    where = np.full(graph.trace.count("tensors"), -1, np.int32)
    where[table["tensor"][own]] = own

    def found(operator: int) -> Any:
        made = graph.outputs(operator)
        row = int(where[made[0]]) if len(made) else -1
        return None if row < 0 else np.array([table[f"p{k}"][row] for k in range(PROJECTIONS)])

    return found


def _alike(one: Any, two: Any) -> bool:
    if one is None or two is None:
        return True
    apart, size = np.abs(one - two).max(), np.abs(one).max()
    return bool(apart <= _ALIKE * (size + np.abs(two).max()))


def _producers(graph: Graph, operator: int) -> list[int]:
    """The operators that made what goes in; nothing where the trace does not say of all."""
    made: list[int] = graph.tensors["producer"][graph.inputs(operator)].tolist()
    return [] if not made or min(made) < 0 else made


def _doubtful(first: Graph, second: Graph, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pairs of which no input is made by operators that are a pair; backwards go with their forwards."""
    both = np.array(pairs, np.int32).reshape(-1, 2)
    there = np.full(first.count + 1, -1, np.int32)
    there[both[:, 0]] = both[:, 1]
    starts = [graph.side(INPUT)[0] for graph in (first, second)]
    counts = [(s[1:] - s[:-1])[both[:, n]] for n, s in enumerate(starts)]
    asked = both[(counts[0] == counts[1]) & (counts[0] > 0) & (first.operators["forward"][both[:, 0]] < 0)]
    if not len(asked):
        return []
    lengths = (starts[0][1:] - starts[0][:-1])[asked[:, 0]]
    begins = np.cumsum(lengths) - lengths
    at = np.arange(int(lengths.sum())) - np.repeat(begins, lengths)
    made = []
    for graph, side in ((first, 0), (second, 1)):
        tensors = graph.side(INPUT)[1][np.repeat(starts[side][asked[:, side]], lengths) + at]
        made.append(graph.tensors["producer"][tensors])
    known = np.minimum.reduceat(np.minimum(*made), begins) >= 0
    apart = np.logical_and.reduceat(there[made[0]] != made[1], begins)
    chosen: list[tuple[int, int]] = [(a, b) for a, b in asked[known & apart].tolist()]
    return chosen


def _key(graph: Graph, operator: int, made: list[int], modules: dict[int, int] | None) -> Any:
    """What two operators have in common that correspond: step, phase, module, family, and who made what they get."""
    step, phase, module = (int(graph.operators[column][operator]) for column in ("step", "phase", "module"))
    there = module if modules is None else modules.get(module, -2)
    return graph.step_order[step], phase, there, family(graph.names[operator]), tuple(made)
