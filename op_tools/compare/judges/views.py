"""Calls that return views: no kernel runs, so there are no values to compare a second time.

One call of a kind is compared in full. A later one with the same arguments, down to every stride and number, whose
results lie at the same places of the same memory, is right by that alone; the same holds for its gradients.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

import torch

from ...call.description import Tensor
from ...copies.operands import Operands, is_plain, start_of_storage
from ...judge.verdict import RIGHT, Judgement
from ..ladder import FORWARD, ComparedCall, Job, Judge, Places, Setup, arguments_kind

_MAX_KINDS: Final = 20_000


def places(given: Sequence[Tensor], results: Sequence[Tensor]) -> Places | None:
    """In which of the given tensors each result lies, and how far from its beginning.

    None where that does not tell all: new memory, or given tensors that no result lies in, whose values may decide.

    >>> x = torch.ones(3, 4)
    >>> places([x], [x[1]]), places([x], [x + 1])
    (((0, 16, False, False),), None)
    """
    if not given or not results:
        return None
    try:
        storages = list(map(start_of_storage, given))
        found = []
        for result in results:
            index = storages.index(start_of_storage(result))
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
        """Arguments for a golden run of the backward, which does not depend on their values."""
        storages = tuple([torch.zeros(size, dtype=torch.uint8) for size in self.sizes])
        return Operands(self.tree, storages, None, sum(self.sizes))


class Views(Judge):
    """Settles calls of kinds that were seen to return views, by where their results lie."""

    order = 10
    live = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.known: dict[Hashable, View] = {}

    def expects(self, call: ComparedCall) -> bool:
        view = self.known.get(arguments_kind(call))
        if view is None:
            return False
        call.notes[self] = view
        return True

    def settle(self, job: Job) -> Judgement | None:
        call = job.call
        assert isinstance(call, ComparedCall)
        if job.phase == FORWARD:
            live = job.live
            certain = not (self.setup.shown or call.traits.mutates or "as_strided" in call.op)
            if certain and self.setup.is_stock(call.op, call.function):
                call.places = job.places = places(live.tensors, live.results)
            if call.places is None and all(call.numbers) and len(self.never_settles) < _MAX_KINDS:
                self.never_settles.add((call.op, call.numbers[0]))
            view: View | None = call.notes.get(self)
            results: Hashable = live.outputs.number
        else:
            if call.places is None or job.grads is None:  # only of views
                return None
            sent, found = job.grads
            job.places = places([g for g in sent if g is not None], [g for g in found if g is not None])
            view, results = self.known.get((arguments_kind(call), "backward")), job.grad_kind
        if view is not None and view.results == results and view.places == job.places:
            return view.judgement
        if job.phase == FORWARD:
            call.notes.pop(self, None)
        return None

    def arguments(self, call: ComparedCall) -> Operands | None:
        view: View | None = call.notes.get(self)
        return None if view is None else view.arguments()

    def learn(self, job: Job) -> None:
        call, found = job.call, job.judgement
        if not job.moves_only or job.places is None or found is None or found.verdict != RIGHT:
            return
        if len(self.known) < _MAX_KINDS:
            assert job.before is not None
            forward = job.phase == FORWARD
            kind = arguments_kind(call) if forward else (arguments_kind(call), "backward")
            sizes = tuple([s.nbytes for s in job.before.storages])
            results = call.numbers[1] if forward else job.grad_kind
            self.known[kind] = View(results, job.places, found, job.before.tree, sizes)
