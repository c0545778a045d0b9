"""The first place where two measured runs part, and how the difference grew from there."""

from __future__ import annotations

import dataclasses

import numpy as np

from . import format as columns
from .align import Alignment
from .behaviour import behaviour
from .diverge import Numbers
from .recomputed import other_repetitions


@dataclasses.dataclass
class Divergence:
    """The first operator that parts, or that gets other tensors than its counterpart."""

    pair: int
    reason: str
    inputs: float
    outputs: float
    allowed: float
    of_inputs: bool = False  # whether it is what goes in that is further apart than is allowed
    operators: tuple[int, int] | None = None  # that part, where these are no pair


def first_divergence(alignment: Alignment, numbers: Numbers) -> Divergence | None:
    """The first pair, in the order of the first run, that parts or gets other tensors; None where neither is found.

    A call that is repeated with other results comes before what the backward makes of these.
    """
    found = _first_pair(alignment, numbers)
    return _of_repetition(alignment, numbers, found) or found


def _of_repetition(alignment: Alignment, numbers: Numbers, found: Divergence | None) -> Divergence | None:
    """A call that checkpointing repeats in one run, with other results than in the forward, before where runs part."""
    sides, pairs = numbers.origins.sides, alignment.pairs
    repeated = [other_repetitions(side) for side in sides]
    if not repeated[0] and not repeated[1]:
        return None
    parted = None
    if found is not None:
        parted = found.operators or (int(pairs[found.pair, 0]), int(pairs[found.pair, 1]))
    for side in (1, 0):
        there = dict(zip(pairs[:, side].tolist(), pairs[:, 1 - side].tolist()))
        for key, one in repeated[side].items():
            other = there.get(one.original, -1)
            if key in repeated[1 - side] or other < 0 or (parted is not None and one.again >= parted[side]):
                continue
            operators = (other, one.again) if side else (one.again, other)
            told = f"recomputed in {'AB'[side]}, with the same inputs it makes something else than in the forward"
            pair = int(np.searchsorted(pairs[:, 0], operators[0], side="right")) - 1
            return Divergence(max(0, pair), told, 0.0, one.apart, one.allowed, operators=operators)
    return None


def _first_pair(alignment: Alignment, numbers: Numbers) -> Divergence | None:
    found = np.flatnonzero(numbers.parted)
    pair = int(found[0]) if len(found) else len(alignment.pairs)
    other = numbers.origins.first(pair) if len(alignment.pairs) else None
    if other is not None:
        return Divergence(*other)
    if not len(found):
        return None
    why = numbers.reason.get(pair, "the outputs are further apart than rounding explains")
    inputs, outputs, allowed = (float(x[pair]) for x in (numbers.inputs, numbers.outputs, numbers.allowed))
    return Divergence(pair, why, inputs, outputs, allowed)


def growth(alignment: Alignment, numbers: Numbers) -> list[tuple[str, str, float, float]]:
    """By module and phase, in order: the largest relative distance of inputs and of outputs."""
    graph = alignment.first
    found: dict[tuple[str, str], list[float]] = {}
    for n, a in enumerate(alignment.pairs[:, 0].tolist()):
        if numbers.compared[n] and not behaviour(graph.names[a]).free:  # such as what empty memory holds
            phase = columns.PHASES[int(graph.operators["phase"][a])]
            entry = found.setdefault((graph.paths.get(int(graph.operators["module"][a]), ""), phase), [0.0, 0.0])
            entry[0] = max(entry[0], float(numbers.inputs[n]))
            entry[1] = max(entry[1], float(numbers.outputs[n]))
    return [(module, phase, came, went) for (module, phase), (came, went) in found.items()]
