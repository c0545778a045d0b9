"""Runs of compiled code in a comparison: how far their steps round, and what the last of them makes of that."""

from __future__ import annotations

import itertools
import math
from typing import Any, Final

import numpy as np

from .edges import NORM, UNITS, terms
from .fold import Folded, compiled_runs
from .format import BACKWARD
from .graph import Graph

SINGLE: Final = 2.0**-24
COMPOSITE: Final = 4.0  # roundings inside functions of several steps
FEW: Final = 8.0  # roundings to float32 that a function of one element may have inside
_STEPS_PER_INPUT: Final = 4.0


class Steps:
    """The operators that were folded, of a run that was also measured against itself (`Steps(folded, measured)`)."""

    def __init__(self, graph: Folded, itself: Any) -> None:
        self.graph, self._whole = graph, graph.whole
        own = np.where(itself.known("several"), COMPOSITE, 1.0) * itself.unit
        for run in compiled_runs(graph.whole):
            own[run] *= math.sqrt(_steps_inside(graph.whole, run))
        self._own = own + SINGLE * np.maximum(np.sqrt(terms(graph.whole, np.arange(graph.whole.count))), FEW)
        self._jumps = itself.known("jumps") | (itself.known("jumps_backward") & itself.backward)
        self._contracts, self._normalizes = itself.contracts, itself.known("normalizes") & itself.backward
        self._side = itself.one
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            bounds = np.where(itself.outs.size > 0, itself._bounds() / itself.outs.size, 0.0)
        places = zip(itself.outs.tensors[0].tolist(), itself.outs.owner.tolist(), bounds.tolist())
        self._makers = {tensor: (bound, operator) for tensor, operator, bound in places}

    def rounding(self, operators: list[int]) -> tuple[float, bool]:
        """What the roundings of operators come to, relatively, and whether one of them jumps.

        What a normalisation takes out of a gradient may be most of it: rounding stays, relative to what is left.
        """
        cancelled = max((self._taken_out(n) for n in operators if self._normalizes[n]), default=1.0)
        rounded = float(np.sqrt(np.square(self._own[operators]).sum()))
        return rounded * cancelled, bool(self._jumps[operators].any())

    def _taken_out(self, operator: int) -> float:
        graph = self._whole
        came, went = (
            [self._size(t)[0] for t in side.tolist()] for side in (graph.inputs(operator), graph.outputs(operator))
        )
        return max(1.0, max(came, default=0.0) / went[0]) if went and went[0] else 1.0

    def maker(self, tensor: int) -> tuple[float, float] | None:
        """Of the operator that made a tensor: how far it rounds it, and how much it makes of random differences."""
        found = self._makers.get(tensor)
        return None if found is None else (found[0], self._condition(found[1], tensor))

    def _condition(self, operator: int, tensor: int) -> float:
        """Random differences of what goes in, as far apart as its norm, over the norm of what comes out.

        A product adds up as many numbers as two operands have in common; random ones cancel there.
        """
        graph = self._whole
        size, elements = self._size(tensor)
        given = [self._size(t) for t in graph.inputs(operator).tolist()]
        if not size or not given:
            return 1.0
        total = sum(norm for norm, _ in given)
        products = [0.0]
        if int(graph.operators["phase"][operator]) == BACKWARD:
            forward = int(graph.operators["forward"][operator])
            others = [self._size(t) for t in graph.inputs(forward).tolist() if not self._alike(t, tensor)]
            products += [_product(one, other, elements) for one in given for other in others]
        elif self._contracts[operator]:
            products += [_product(one, other, elements) for one, other in itertools.combinations(given, 2)]
            total = 0.0
        return max(1.0, total / size, max(products) / size)

    def _size(self, tensor: int) -> tuple[float, float]:
        """The norm of a tensor and how many elements it has; no norm where that is not known."""
        look = self._whole.tensors["look"][tensor]
        row = int(self._side.where[tensor]) if len(self._side.where) and self._side.unit[look] else -1
        return (float(self._side.rows[row, NORM]) if row >= 0 else 0.0), float(self._side.numel[look])

    def _alike(self, one: int, other: int) -> bool:
        return bool(self._side.shape_of(one) == self._side.shape_of(other))


def _product(one: tuple[float, float], other: tuple[float, float], elements: float) -> float:
    common = math.sqrt(max(one[1] * other[1] / max(elements, 1.0), 1.0))
    return one[0] * other[0] / math.sqrt(common)


def unseen_rounding(graph: Graph, operator: int, unit: float) -> float:
    """What the roundings inside compiled code come to, where no other run says what it does."""
    region = graph.trace.texts[int(graph.operators["region"][operator])]
    lower = max((size for dtype, size in UNITS.items() if f", {dtype})" in region), default=0.0)  # of autocast
    return COMPOSITE * max(unit, lower) * math.sqrt(_steps_inside(graph, operator))


def _steps_inside(graph: Graph, operator: int) -> float:
    """How many operators compiled code may have in place of its own: a guess from the parameters that it gets."""
    return _STEPS_PER_INPUT * len(graph.inputs(operator)) + 1.0
