"""One job that is judged by parts: calls that are cut down to some places of its results, or that stand for it."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..call import facts
from ..call.description import Tensor, map_tensors, tensors_in
from ..call.devices import quiet
from ..copies.operands import Layout, Ref, is_plain
from ..judge import golden
from ..judge.sampling.axes import Affine, Axes, Names
from ..judge.sampling.reduction import Chosen, Cut, Index
from ..judge.sampling.trial import axes_by_trial
from ..judge.verdict import NOT_COMPARABLE, RIGHT, WRONG, Judgement, Row
from .ladder import BACKWARD, FORWARD, ComparedCall, Job


class Kind:
    """Calls that look alike and are sampled: their axes, and how they are cut."""

    def __init__(self, axes: Axes, model: tuple[Any, Any], writes: bool, random: bool) -> None:
        self._model = self.prepared = model  # (args, kwargs) without memory
        if axes.prepare is not None:
            self.prepared = axes.prepare(*model)
        self.tensors = list(tensors_in(self.prepared))
        sizes = axes.sizes(self.tensors)
        assert sizes is not None
        self.axes, self.sizes, self.writes, self.random = axes, sizes, writes, random
        self.survives: bool | None = None  # whether arguments were still there in the backward of earlier calls
        self.arguments = [t.numel() for t in self.tensors]
        self.elements = sum(self.arguments) + sum([_product(names, sizes) for names in axes.results])
        if axes.fixed_gradient:
            self.elements = max(self.elements, 2 * sum(self.arguments))
        self.work = math.prod(sizes.values()) if axes.product is not None else 0
        like = [t.shape for t, names in zip(self.tensors, axes.tensors) if names]
        self._shape = like[0] if axes.flat and not axes.lists else None  # of results
        self._chosen: dict[Cut, Chosen] = {}
        self._forward = Cut(axes.cut_for_results(), axes.results)
        self._backward: dict[tuple[int, ...], dict[Cut, list[int]]] = {}
        self._fitting: set[Hashable] = set()
        self.layouts: dict[Hashable, Layout] = {}
        self.recipes: dict[Hashable, Any] = {}  # how slices were taken; None where that cannot be repeated

    def value(self, tensors: Sequence[Tensor | None]) -> tuple[Any, Any]:
        """(args, kwargs) with these tensors; without memory where there is none."""
        given = iter(tensors)

        def fill(model: Tensor) -> Tensor:
            found = next(given)
            return model if found is None else found

        args, kwargs = map_tensors(self._model, fill)
        return args, kwargs

    def prepare(self, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The tensors that are cut, where these are not the arguments themselves."""
        if self.axes.prepare is None or len(tensors) == len(self.tensors):
            return tensors
        return list(tensors_in(self.axes.prepare(*self.value(tensors))))

    def needs(self, positions: Sequence[int]) -> list[int]:
        """The arguments whose values the gradients of some depend on."""
        axes = self.axes
        if axes.fixed_gradient:
            return []
        if axes.product is not None and not {*positions} - {*axes.product.operands, axes.product.added}:
            left, right = axes.product.operands
            return [{left: right, right: left}[n] for n in positions if n in (left, right)]
        return list(range(len(self.tensors)))

    def affine(self, positions: Sequence[int]) -> Affine | None:
        """How the gradients of these are judged if they are the weight and the bias of a norm."""
        found = self.axes.affine
        return found if found is not None and {*positions} <= {*found.positions[1:]} else None

    def cut_shape(self, model: Tensor, names: Names, index: Index) -> list[int]:
        """The shape of an argument that is cut to some places."""
        sizes = [model.numel()] if self.axes.flat and names else model.shape
        return [len(index[n]) if n is not None and n in index else size for n, size in zip(names, sizes)]

    def chosen(self, cut: Cut, tensors: Sequence[Tensor]) -> Chosen:
        """The places for one way to cut such calls."""
        found = self._chosen.get(cut)
        if found is None:
            found = self._chosen[cut] = Chosen(self.axes, cut, tensors, self.sizes)
        return found

    def forward(self) -> Cut:
        """How to cut for the results; what a call on lists writes has the axes of its arguments."""
        return self._forward

    def backward(self, positions: Sequence[int]) -> dict[Cut, list[int]]:
        """How to cut for the gradients of these arguments; those that need the same slices together."""
        known = self._backward.get(tuple(positions))
        if known is None:
            known = self._backward[tuple(positions)] = self._find_cuts(positions)
        return dict(known)

    def _find_cuts(self, positions: Sequence[int]) -> dict[Cut, list[int]]:
        found: dict[Cut, list[int]] = {}
        for position in positions:
            leader = self.axes.beside.get(position, position)
            cut = Cut(self.axes.cut_for_gradient(position), (self.axes.tensors[leader],))
            same = next((c for c in found if c.axes == cut.axes), cut)
            found.setdefault(same, []).append(position)
        return found

    def fits(self, results: Sequence[Tensor | None], look: Hashable = None) -> bool:
        """Whether results, or the gradients of some of them, have the shapes that the axes say.

        Those with the same `look` need not be asked about again.
        """
        if look is not None and look in self._fitting:
            return True
        if not self._fits(results):
            return False
        if look is not None:
            self._fitting.add(look)
        return True

    def _fits(self, results: Sequence[Tensor | None]) -> bool:
        axes = self.axes
        if axes.lists and not results:  # written to the arguments
            return True
        if len(axes.results) != len(results):
            return False
        for names, tensor in zip(axes.results, results):
            if tensor is None or (axes.flat and not names):  # no gradient, or of one element
                continue
            if not is_plain(tensor) or (self._shape is not None and tensor.shape != self._shape):
                return False
            shape = (tensor.numel(),) if axes.flat and names else tensor.shape
            if len(shape) != len(names):
                return False
            if any(name is not None and self.sizes[name] != size for name, size in zip(names, shape)):
                return False
        return True


class Group(NamedTuple):
    """How a part is cut; nothing is known for one that stands for a whole call."""

    kind: Kind | None = None
    places: Index = {}  # noqa: RUF012
    rows: Sequence[int | None] = ()  # which row of the job each row of the part is


class Sample:
    """The parts of one job, and what they come to."""

    def __init__(self, job: Job, skip: Callable[[Any, str, str], None], count: Callable[[Sample], None]) -> None:
        self.job, self.parts, self.groups = job, [], []  # type: tuple[Job, list[Job], list[Group]]
        self._skip, self._count = skip, count
        self._lock = threading.Lock()
        self._left = 0

    def take(self, part: Job, group: Group) -> None:
        """One more part."""
        part.whole = self
        self.parts.append(part)
        self.groups.append(group)
        self._left += 1

    def add(self, part: Job) -> bool:
        """A part is judged; whether that was the last."""
        with self._lock:
            self._left -= 1
            if self._left:
                return False
        try:
            self._conclude()
        except Exception as error:
            self.job.error = error
        for each in self.parts:
            each.before = each.snapshot = each.fetcher = None
            each.done.set()
        return True

    def _conclude(self) -> None:
        job, told = self.job, [(p, p.judgement, g) for p, g in zip(self.parts, self.groups) if p.judgement is not None]
        job.error = next((part.error for part in self.parts if part.error is not None), None)
        if job.error is not None or not told:
            return
        failed = [found for _, found, _ in told if found is not None and _says_nothing(found)]
        if len(failed) == len(told):
            job.judgement = failed[0]
            return
        for found in failed:
            self._skip(job.live, found.reason, job.phase)
        whole = Judgement(RIGHT, "")
        rows: list[Row] = []
        for number, (part, found, group) in enumerate(told):
            assert found is not None
            if _says_nothing(found):
                continue
            judged = list(self._rows(part, found, group, number))
            stands_in = part.call.op != self.job.call.op  # there is no call of this operator to save
            if found.verdict == WRONG and whole.verdict != WRONG and not stands_in:  # what is saved and shown
                job.golden, job.values, job.args, job.kwargs = part.golden, part.values, part.args, part.kwargs
                job.unasked = part.unasked
            whole = whole + Judgement(found.verdict, found.reason, (), found.probes)
            if rows and group.rows and len(group.rows) == len(judged):
                for place, row in zip(group.rows, judged):
                    if place is not None and place < len(rows):
                        rows[place] = row._replace(index=rows[place].index)
            else:
                rows = _merged(rows, judged) if rows and job.phase == BACKWARD else [*rows, *judged]
        self._count(self)
        job.judgement = dataclasses.replace(whole, rows=tuple(rows))

    def _rows(self, part: Job, found: Judgement, group: Group, number: int) -> Iterator[Row]:
        """The rows of a part as rows of the job."""
        for row in found.rows:
            if group.kind is not None:
                yield _placed(row, group.kind, group.places, part) if row.verdict == WRONG else row
            elif number == 0 or group.rows or row.verdict != RIGHT:  # partial results have no row of their own
                same = part.call.op == self.job.call.op
                yield row if same else row._replace(op=self.job.call.op, index=None)

    def elements(self) -> tuple[int, int]:
        """How many elements of results or gradients were judged, and how many there are."""
        judged = whole = 0
        for part, (kind, _, _) in zip(self.parts, self.groups):
            if part.snapshot is None:
                continue
            tree = part.snapshot.tree
            values = tree[1] if part.phase == BACKWARD else tree[2] if tree[2] is not None else tree[0]
            there = sum([math.prod(ref.shape) for ref in _refs(values)])
            judged += there
            if kind is None:  # what stands for a call is all judged
                whole += there
            elif part.phase == FORWARD:
                whole += sum([_product(names, kind.sizes) for names in kind.axes.results])
            else:
                whole += sum([n for place, n in enumerate(kind.arguments) if place not in part.unasked])
        return judged, whole


def _says_nothing(found: Judgement) -> bool:
    return found.verdict == NOT_COMPARABLE and not found.rows


def _placed(row: Row, kind: Kind, index: Index, part: Job) -> Row:
    """A wrong row, with the place of its worst element in the whole result."""
    names = _names_of(row, kind, part)
    reason = f"in a sample, {row.reason}"
    if row.where is None or names is None or len(names) != len(row.where):
        return row._replace(reason=reason)
    where = list(row.where)
    place = [int(index[n][w]) if n is not None and n in index else w for n, w in zip(names, where)]
    text = f"at {place}" if not kind.axes.flat else f"at element {place[0]}"
    return row._replace(reason=reason.replace(f"at {where}", text, 1))


def _names_of(row: Row, kind: Kind, part: Job) -> Names | None:
    """The names of the dimensions of the tensor that a row is about."""
    axes, place = kind.axes, row.index or 0
    if row.part == "output":
        return axes.results[place] if place < len(axes.results) else None
    if row.part != "grad_input" or not part.values:
        return None
    found = [n for n, g in enumerate(part.values[1]) if g is not None]
    place = row.index if row.index is not None else found[0] if found else len(axes.tensors)
    return axes.tensors[place] if place < len(axes.tensors) else None


def _merged(rows: Sequence[Row], more: Sequence[Row]) -> list[Row]:
    """Rows of the same gradients, each from the part that judged it."""
    if len(rows) != len(more):
        return [*rows, *more]
    return [b if _weight(b) > _weight(a) else a for a, b in zip(rows, more)]


def _weight(row: Row) -> tuple[bool, bool, float]:
    return (row.verdict != RIGHT, row.atol > 0 or row.rtol > 0, row.excess)


def _product(names: Names, sizes: dict[str, int]) -> int:
    return math.prod([sizes[n] for n in names if n is not None])


def _refs(tree: Any) -> Sequence[Ref]:
    if isinstance(tree, Ref):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [ref for member in tree for ref in _refs(member)]
    return []


def with_more(index: Index, more: Sequence[Index], some: frozenset[str]) -> Index:
    """The places, and along axes of which there are only some those that stand out."""
    found = dict(index)
    for name in some:
        added = [m[name] for m in more if name in m]
        if added:
            found[name] = torch.cat([index[name], *added])
    return found


def with_other(index: Index, worst: Index, some: frozenset[str]) -> Index:
    """The places, with one that stands out in place of the last."""
    found = dict(index)
    for name in some.intersection(worst):
        found[name] = torch.cat((index[name][: -len(worst[name])], worst[name]))
    return found


def tried(call: ComparedCall, max_bytes: int, is_large: Callable[[int], bool]) -> Axes | None:
    """The axes of an operator of the user's own, found by golden runs."""
    live, traits = call.live, call.traits
    if traits.mutates or facts.may_mutate(call.op, live.kwargs) or traits.facts.writes:
        return None
    if not is_large(2 * sum([t.numel() for t in live.tensors])):
        return None
    options: dict[str, Any] = {
        "name": call.op,
        "traits": traits,
        "device": call.region.device,
        "max_bytes": max_bytes,
    }

    def run(value: tuple[Any, Any]) -> list[Tensor] | None:
        found = golden.run(call.function, *value, **options)
        return list(tensors_in(found.outputs)) if found.comparable and not found.random else None

    with quiet():
        return axes_by_trial((live.args, live.kwargs), run)
