"""How the slices of a sampled call were taken, for later calls that look alike: only addresses differ between them.

Working out slices takes longer than taking them. What depends on shapes, strides and places alone is worked out once.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

import torch

from ..call.description import Tensor
from ..copies.operands import Layout, Operands, mark_after, padded
from ..judge.sampling.reduction import Cut, Index
from ..native.gather import Gather, Origin, Table, dense_piece
from . import slices
from .ladder import BACKWARD, ComparedCall, Job, arguments_kind
from .sample import Kind
from .slices import Ready, Slice, Slices, cut_arguments, kept, operands_of, take

_FIRST_NUMBER: Final = 1 << 40  # of kinds of cut calls: none of the descriptions of a run
_MAX_RECIPES: Final = 256  # of one kind


class Draft(NamedTuple):
    """How slices are taken to the host: what does not depend on where the tensors lie."""

    table: Table
    gather: Gather
    nbytes: int
    pattern: tuple[int, ...]  # of each tensor: the first one at its address
    spans: tuple[tuple[tuple[int, int], ...], ...]  # of the storages of each side, in the memory of the job

    def fits(self, tensors: Sequence[Tensor]) -> list[int] | None:
        """The addresses of other tensors; None where these do not lie in memory as the first ones did."""
        addresses = [t.data_ptr() for t in tensors]
        if _pattern(addresses) != self.pattern or any(t.is_neg() for t in tensors):
            return None
        return addresses if slices.gather_for(tensors[0].device) is self.gather else None

    def take(self, tensors: Sequence[Tensor]) -> tuple[list[tuple[Tensor, ...]], Any] | None:
        """The storages of each side for other tensors, and an event after which they are there."""
        addresses = self.fits(tensors)
        if addresses is None:
            return None
        buffer, begin = slices.pinned_room(self.nbytes)
        if not self.gather.again(self.table, addresses, buffer.data_ptr() + begin):
            return None
        mark = mark_after((tensors[0],))
        return [tuple([buffer[begin + a : begin + b] for a, b in spans]) for spans in self.spans], mark


class Recipe(NamedTuple):
    """The slices of a job as they were taken once."""

    draft: Draft
    layouts: tuple[tuple[Layout, int], ...]  # of each side, with its bytes
    number: int  # of calls that are cut like this

    def take(self, tensors: Sequence[Tensor]) -> list[Operands] | None:
        """The same slices of other tensors; None where these do not lie in memory as the first ones did."""
        taken = self.draft.take(tensors)
        if taken is None:
            return None
        found, mark = taken
        return [Operands(layout.tree, s, mark, n, (), layout) for s, (layout, n) in zip(found, self.layouts)]


def _recipe(planned: Draft | None, operands: Sequence[Operands], number: int) -> Recipe | None:
    """The recipe, once the slices are operands; None where these lie otherwise."""
    if planned is None or not number:
        return None
    layouts = []
    for spans, each in zip(planned.spans, operands):
        if each.layout is None or [s.nbytes for s in each.storages] != [end - start for start, end in spans]:
            return None
        layouts.append((each.layout, each.nbytes))
    return Recipe(planned, tuple(layouts), number)


def draft(several: Sequence[Slices], tensors: Sequence[Tensor]) -> Draft | None:
    """How these slices of tensors are about to be taken; None where a kernel does not take all of them."""
    parts = [part for each in several for part in each.parts]
    if not tensors or any(each.flats is not None for each in several):
        return None
    gather = slices.gather_for(tensors[0].device)
    numbers: dict[int, int] = {}
    for number, tensor in enumerate(tensors):
        numbers.setdefault(id(tensor), number)
    pieces, origins = [], list[Origin | None]()
    for part in parts:
        if part.piece is None or gather is None:
            return None
        origin = None
        if part.tensor is not None:
            at = numbers.get(id(part.tensor))
            if at is None:
                return None
            origin = (at, part.piece.source - tensors[at].data_ptr())
        pieces.append(part.piece)
        origins.append(origin)
    assert gather is not None
    starts = list(itertools.accumulate([padded(p.nbytes) for p in parts], initial=0))
    spans: list[tuple[tuple[int, int], ...]] = []
    number = 0
    for each in several:
        end = number + len(each.parts)
        if each.packed:
            spans.append(((starts[number], starts[end]),))
        else:
            spans.append(tuple([(s, s + p.nbytes) for s, p in zip(starts[number:end], each.parts)]))
        number = end
    addresses = [t.data_ptr() for t in tensors]
    table = Table(pieces, starts[:-1], origins)
    return Draft(table, gather, starts[-1], _pattern(addresses), tuple(spans))


def _pattern(addresses: Sequence[int]) -> tuple[int, ...]:
    first: dict[int, int] = {}
    return tuple([first.setdefault(address, number) for number, address in enumerate(addresses)])


class KeptRecipe(NamedTuple):
    """Slices that were kept on the device for a backward."""

    draft: Draft
    ready: tuple[tuple[int, Slice, int], ...]  # of each argument: its position, slice, and where that lies

    def take(self, tensors: Sequence[Tensor]) -> Ready | None:
        """The same slices of other tensors; None where these do not lie in memory as the first ones did."""
        addresses = self.draft.fits(tensors)
        if addresses is None:
            return None
        buffer = torch.empty(self.draft.nbytes, dtype=torch.uint8, device=tensors[0].device)
        first = buffer.data_ptr()
        if not self.draft.gather.again(self.draft.table, addresses, first):
            return None
        found: Ready = {}
        for number, each, at in self.ready:
            size = each.dtype.itemsize
            piece = dense_piece(first + at, size, each.nbytes // size)
            found[number] = Slice(buffer, each.dtype, each.shape, each.stride, each.nbytes, piece)
        return found


class EarlyRecipe(NamedTuple):
    """Slices of arguments that a call is about to write to."""

    draft: Draft
    template: Slices

    def take(self, tensors: Sequence[Tensor]) -> Slices | None:
        """The same slices of other tensors; None where these do not lie in memory as the first ones did."""
        taken = self.draft.take(tensors)
        if taken is None:
            return None
        (flats,), mark = taken
        return dataclasses.replace(self.template, flats=list(flats), mark=mark)


class Known(NamedTuple):
    """Under which key of a kind slices are remembered, and the tensors that they are cut from."""

    key: Hashable
    tensors: Sequence[Tensor]


class PartMaker:
    """Makes jobs that judge cut calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[Hashable, int] = {}

    def number(self, key: Hashable) -> int:
        """A number for calls that look alike, other than those of the descriptions of a run."""
        with self._lock:
            return self._numbers.setdefault(key, _FIRST_NUMBER + len(self._numbers))

    def make(
        self,
        job: Job,
        kind: Kind,
        cut: Cut,
        sides: tuple[Slices, Slices],
        own: ComparedCall | None,
        known: Known | None,
    ) -> Job:
        """A job over the slices of arguments and values; how they are taken is remembered if a key is known."""
        call = job.call
        assert isinstance(call, ComparedCall)
        key = (job.phase, cut, job.grad_kind)
        remembers = known is not None and known.key not in kind.recipes and len(kind.recipes) < _MAX_RECIPES
        new = [side for side in sides if side.flats is None]  # arguments may have been taken before the call
        planned = draft(new, known.tensors) if known is not None and remembers else None
        mark = take(*sides)
        arguments = operands_of(kind.layouts, (*key, "before"), sides[0], mark)
        snapshot = operands_of(kind.layouts, (*key, "after"), sides[1], mark)
        number = 0
        if all(call.numbers):  # calls that are cut alike have the same layouts, which the kind holds
            alike = (id(arguments.layout), id(snapshot.layout))
            number = self.number((arguments_kind(call), call.numbers, key, alike))
        if known is not None and remembers:
            kind.recipes[known.key] = _recipe(planned, (arguments, snapshot)[-len(new) :], number)
        return _job(job, call, arguments, snapshot, number, own)

    def repeat(
        self, job: Job, kind: Kind, known: Known, own: ComparedCall | None, early: tuple[Cut, Slices] | None = None
    ) -> Job | None:
        """Such a job with slices that are taken as before; None where there is no recipe, or it does not fit.

        `early` are slices of the arguments that were taken before the call.
        """
        recipe: Recipe | None = kind.recipes.get(known.key)
        found = None if recipe is None else recipe.take(known.tensors)
        if recipe is None or found is None:
            return None
        assert isinstance(job.call, ComparedCall)
        if early is not None:
            key = (job.phase, early[0], job.grad_kind, "before")
            found.insert(0, operands_of(kind.layouts, key, early[1], found[0].event))
        return _job(job, job.call, found[0], found[1], recipe.number, own)

    def early(self, kind: Kind, known: Known, index: Index, tensors: Sequence[Tensor]) -> Slices:
        """Slices of arguments that a call is about to write to, taken as before where that is known."""
        recipe: EarlyRecipe | None = kind.recipes.get(known.key)
        found = None if recipe is None else recipe.take(known.tensors)
        if found is not None:
            return found
        made = slices.slices(kind, cut_arguments(kind, tensors, index), index)
        if known.key not in kind.recipes and len(kind.recipes) < _MAX_RECIPES:
            planned = draft([made], known.tensors)
            take(made)
            template = dataclasses.replace(made, flats=None, mark=None)  # no memory is held
            kind.recipes[known.key] = None if planned is None else EarlyRecipe(planned, template)
        else:
            take(made)
        return made

    def keep(
        self, kind: Kind, known: Known, index: Index, needed: Sequence[int], tensors: Sequence[Tensor | None]
    ) -> Ready:
        """Slices of arguments that are kept on the device for a backward, taken as before where that is known."""
        recipe: KeptRecipe | None = kind.recipes.get(known.key)
        found = None if recipe is None else recipe.take(known.tensors)
        if found is not None:
            return found
        ready = cut_arguments(kind, tensors, index, needed)
        if known.key not in kind.recipes and len(kind.recipes) < _MAX_RECIPES:
            kind.recipes[known.key] = _kept_recipe(ready, known.tensors)
        return kept(ready)


def _kept_recipe(ready: Ready, tensors: Sequence[Tensor]) -> KeptRecipe | None:
    some = list({id(each): each for each in ready.values()}.values())
    planned = draft([Slices(some, (), lambda refs: None, packed=True)], tensors)
    if planned is None:
        return None
    starts = itertools.accumulate([padded(each.nbytes) for each in some], initial=0)
    at = {id(each): start for each, start in zip(some, starts)}
    templates = [(number, each._replace(tensor=None, piece=None), at[id(each)]) for number, each in ready.items()]
    return KeptRecipe(planned, tuple(templates))


def _job(
    job: Job, call: ComparedCall, arguments: Operands, snapshot: Operands, number: int, own: ComparedCall | None
) -> Job:
    if own is None:
        own = call.cut_down(arguments, call.region._replace(grad_enabled=job.phase == BACKWARD), number)
    part = Job(own, job.phase, event=job.event, live=job.live, before=arguments, snapshot=snapshot)
    part.nbytes = arguments.nbytes + snapshot.nbytes
    return part
