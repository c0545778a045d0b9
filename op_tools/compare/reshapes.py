"""Calls that give memory another shape: no kernel runs, so that there are no values to compare a second time.

One call of a kind is compared in full. A later one with the same arguments, down to every stride and number, whose
results lie at the same places of the same memory, is right by that alone; the same holds for its gradients.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

import torch

from ..call.description import Tensor
from ..copies.operands import Operands, is_plain
from ..judge.verdict import RIGHT, Judgement

_MOST_KINDS: Final = 20_000
Places = tuple[tuple[int, int, bool, bool], ...]


def places(given: Sequence[Tensor], results: Sequence[Tensor]) -> Places | None:
    """In which of the given tensors each result lies, and how far from its beginning; None where there is more to it:
    new memory, or given tensors that no result lies in, whose values may say where.

    >>> x = torch.ones(3, 4)
    >>> places([x], [x[1]]), places([x], [x + 1])
    (((0, 16, False, False),), None)
    """
    if not given or not results:
        return None
    try:
        storages = [t.untyped_storage().data_ptr() for t in given]
        found = []
        for result in results:
            index = storages.index(result.untyped_storage().data_ptr())
            source = given[index]
            if not storages[index] or not (is_plain(result) and is_plain(source)):
                return None
            bits = (source.is_conj() != result.is_conj(), source.is_neg() != result.is_neg())
            apart = result.data_ptr() - source.data_ptr() if result.numel() and source.numel() else 0
            found.append((index, apart, *bits))
        return tuple(found) if len({place[0] for place in found}) == len(given) else None
    except (ValueError, RuntimeError, NotImplementedError):  # other memory; tensors without any
        return None


class View(NamedTuple):
    """What was found when a call of this kind was compared, and what its arguments look like."""

    results: Hashable
    places: Places
    judgement: Judgement
    tree: Any
    sizes: tuple[int, ...]

    def arguments(self) -> Operands:
        """Arguments for a golden run of the backward, which does not ask for their values."""
        storages = tuple([torch.zeros(size, dtype=torch.uint8) for size in self.sizes])
        return Operands(self.tree, storages, None, sum(self.sizes))


class Views:
    """Kinds of calls that were seen to be views.

    >>> Views().get(("torch.t", 1))
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, View] = {}

    def get(self, kind: Hashable) -> View | None:
        """What is known of a kind of call."""
        return self._known.get(kind)

    def learn(self, kind: Hashable, results: Hashable, where: Places, judgement: Judgement, before: Operands) -> None:
        """A call was compared in full, and only moved values."""
        if judgement.verdict == RIGHT and len(self._known) < _MOST_KINDS:
            sizes = tuple([s.nbytes for s in before.storages])
            self._known[kind] = View(results, where, judgement, before.tree, sizes)
