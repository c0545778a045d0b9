"""Pairs of operators whose inputs come from other pairs: where others of the same name fit better, these are taken.

Sequences of casts, views and copies look alike; what they work on tells them apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from .families import MOVES, family
from .format import BACKWARD, PROJECTIONS
from .graph import Graph

_ALIKE: Final = 0.05  # of the size of two prints, if they are of the same tensor in two dtypes


def settled(
    first: Graph, second: Graph, pairs: list[tuple[int, int]], modules: dict[int, int]
) -> list[tuple[int, int]]:
    """The pairs, with others in place of those whose producers do not correspond, in the same module.

    >>> settled(first, second, [(0, 0), (1, 2)], {-1: -1})             # doctest: +SKIP
    """
    there = dict(pairs)
    producers = [_producers(graph) for graph in (first, second)]
    led = first.operators["forward"].tolist()  # backwards go with their forwards
    doubtful = [(a, b) for a, b in pairs if led[a] < 0 and _apart(producers[0][a], producers[1][b], there)]
    if not doubtful:
        return pairs
    steps = [{step: n for n, step in enumerate(np.unique(g.operators["step"]).tolist())} for g in (first, second)]
    taken = set(there.values()) - {b for _, b in doubtful}
    waiting: dict[Any, list[int]] = defaultdict(list)
    for b in range(second.count):
        if b not in taken and producers[1][b]:
            waiting[_key(second, b, producers[1][b], steps[1], None)].append(b)
    used: set[int] = set()
    for a, _ in doubtful:
        made = [there.get(p, -1) for p in producers[0][a]]
        found = (
            [] if -1 in made else [n for n in waiting.get(_key(first, a, made, steps[0], modules), []) if n not in used]
        )
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
    """What gives the fingerprint of an operator's first result, or nothing."""
    rows, where = graph.prints()

    def found(operator: int) -> Any:
        made = graph.outputs(operator)
        return rows[where[made[0]]] if len(made) and where[made[0]] >= 0 else None

    return found


def _alike(one: Any, two: Any) -> bool:
    if one is None or two is None:
        return True
    apart, size = np.abs(one[:PROJECTIONS] - two[:PROJECTIONS]).max(), np.abs(one[:PROJECTIONS]).max()
    return bool(apart <= _ALIKE * (size + np.abs(two[:PROJECTIONS]).max()))


def _producers(graph: Graph) -> list[list[int]]:
    """For each operator, the operators that made what goes in; nothing where the trace does not say of all."""
    starts, tensors = graph.side(0)
    made = graph.tensors["producer"][tensors].tolist() if len(tensors) else []
    found = [made[a:b] for a, b in zip(starts[:-1].tolist(), starts[1:].tolist())]
    return [[] if not own or min(own) < 0 else own for own in found]


def _apart(mine: list[int], theirs: list[int], there: dict[int, int]) -> bool:
    return bool(mine) and len(mine) == len(theirs) and all(there.get(p, -1) != q for p, q in zip(mine, theirs))


def _key(graph: Graph, operator: int, made: list[int], steps: dict[int, int], modules: dict[int, int] | None) -> Any:
    """What two operators have in common that correspond: step, phase, module, family, and who made what they get."""
    step, phase, module = (int(graph.operators[column][operator]) for column in ("step", "phase", "module"))
    there = module if modules is None else modules.get(module, -2)
    return steps[step], phase, there, family(graph.names[operator]), tuple(made)
