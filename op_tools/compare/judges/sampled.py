"""Large calls are judged at some thousand places of their results.

A live judge: it takes the slices that those places depend on from the run's own tensors, instead of copies of all
operands. They are an ordinary call of the same operator (`judge/sampling`), which goes down the rest of the ladder;
a backward becomes several, one for gradients that need the same slices.
"""

from __future__ import annotations

import dataclasses
import math
import random
import threading
from collections.abc import Hashable, Sequence
from typing import Any, Final

from ... import settings
from ...call import facts
from ...call.description import Tensor, map_tensors, tensors_in
from ...call.traits import traits_of
from ...copies.invocation import Region
from ...copies.materialise import place_of
from ...copies.operands import Layout, Operands, Ref, is_plain, mark_after, stage
from ...judge.sampling.axes import Axes, Names, axes_of
from ...judge.sampling.reduction import Chosen, Cut, Index, cut_tensor
from ...judge.sampling.totals import Reduced, Total, total_of
from ...judge.verdict import NOT_COMPARABLE, RIGHT, WRONG, Judgement, Row
from ..ladder import BACKWARD, FORWARD, PENDING, ComparedCall, Job, Judge, Setup, arguments_kind

_MAX_KINDS: Final = 20_000
_MIN_ELEMENTS: Final = 1 << 20  # of arguments and results: below, all of them are compared
_MIN_WORK: Final = 1 << 31  # multiplications
_MAX_WHOLE: Final = 1 << 25  # elements of a call that cannot be cut and is compared in full all the same
_FIRST_NUMBER: Final = 1 << 40  # of kinds of cut calls: none of the descriptions of a run


class Kind:
    """What is known of calls that look alike: their axes, and how they are cut."""

    def __init__(self, axes: Axes, tensors: Sequence[Tensor], writes: bool) -> None:
        sizes = axes.sizes(tensors)
        assert sizes is not None
        self.axes, self.sizes, self.writes = axes, sizes, writes
        self.results = [math.prod([sizes[n] for n in names if n is not None]) for names in axes.results]
        self.elements = sum([t.numel() for t in tensors]) + sum(self.results)
        self.work = math.prod(sizes.values()) if axes.projected else 0
        like = [t.shape for t, names in zip(tensors, axes.tensors) if names]
        self.shape = like[0] if axes.flat and not axes.lists else None  # of results
        self._chosen: dict[Cut, Chosen] = {}
        self.layouts: dict[Hashable, Layout] = {}

    def chosen(self, cut: Cut, tensors: Sequence[Tensor]) -> Chosen:
        """The places for one way to cut such calls."""
        found = self._chosen.get(cut)
        if found is None:
            found = self._chosen[cut] = Chosen(self.axes, cut, tensors, self.sizes)
        return found

    def forward(self) -> Cut:
        """How to cut for the results; what a call on lists writes has the axes of its arguments."""
        return Cut(self.axes.cut_for_results(), self.axes.results)

    def backward(self, positions: Sequence[int]) -> dict[Cut, list[int]]:
        """How to cut for the gradients of these arguments; those that need the same slices together."""
        found: dict[Cut, list[int]] = {}
        for position in positions:
            leader = self.axes.beside.get(position, position)
            cut = Cut(self.axes.cut_for_gradient(position), (self.axes.tensors[leader],))
            same = next((c for c in found if c.axes == cut.axes), cut)
            found.setdefault(same, []).append(position)
        return found


@dataclasses.dataclass(eq=False)
class _Taken:
    """What is kept of a call until its backward."""

    kind: Kind | Total
    index: Index = dataclasses.field(default_factory=dict)
    before: tuple[Any, Sequence[Tensor]] | None = None  # slices of arguments that the call writes to
    held: tuple[Any, ...] | None = None  # (args, kwargs), aliases of the run's tensors
    versions: Sequence[int] = ()
    slices: dict[Cut, tuple[Index, Any, Sequence[Tensor]]] = dataclasses.field(default_factory=dict)


class Sample:
    """The parts of one job, and what they come to."""

    def __init__(self, judge: Sampled, job: Job, groups: Sequence[tuple[Kind | None, Cut | None, Index]]) -> None:
        self.judge, self.job, self.groups = judge, job, groups
        self.parts: list[Job] = []
        self.counted: int | None = None
        self._lock = threading.Lock()
        self._left = 0

    def begin(self) -> None:
        """All parts are there."""
        self._left = len(self.parts)

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
        job = self.job
        for part in self.parts:
            if part.error is not None:
                job.error = part.error
                return
        told = [part for part in self.parts if part.judgement is not None]
        known = [part for part in told if part.judgement.rows or part.judgement.verdict != NOT_COMPARABLE]  # type: ignore[union-attr]
        if not known:
            job.judgement = told[0].judgement if told else None
            return
        whole = Judgement(RIGHT, "")
        rows: list[Row] = []
        for number, part in enumerate(self.parts):
            found = part.judgement
            if found is None or part not in known:
                if found is not None:
                    self.judge.setup.skip(job.live, found.reason, job.phase)
                continue
            kind, _, index = self.groups[number]
            judged = found.rows
            if kind is None:  # by another call: its first result stands for that of this one
                judged = tuple([row._replace(op=job.call.op, index=None) for row in judged])
                if number and found.verdict == RIGHT:
                    continue
            if found.verdict == WRONG:
                judged = judged if kind is None else tuple([self._placed(row, kind, index, part) for row in judged])
                if whole.verdict != WRONG:  # what is saved and shown
                    job.golden, job.values, job.args, job.kwargs = part.golden, part.values, part.args, part.kwargs
                    job.unasked = part.unasked
            whole = whole + Judgement(found.verdict, found.reason, (), found.probes)
            rows = _merged(rows, judged) if rows and job.phase == BACKWARD else [*rows, *judged]
        self.judge.count(job, self.parts, self.groups)
        job.judgement = dataclasses.replace(whole, rows=tuple(rows))

    def _placed(self, row: Row, kind: Kind, index: Index, part: Job) -> Row:
        """A wrong row, with the place of its worst element in the whole result."""
        if row.verdict != WRONG or row.where is None:
            return row
        names, where = _names_of(row, kind, part), list(row.where)
        if names is None or len(names) != len(where):
            return row
        place = [int(index[n][w]) if n in index else w for n, w in zip(names, where)]
        text = f"at {place}" if not kind.axes.flat else f"at element {place[0]}"
        return row._replace(reason="in a sample, " + row.reason.replace(f"at {where}", text, 1))


def _names_of(row: Row, kind: Kind, part: Job) -> Names | None:
    """The names of the dimensions of the tensor that a row is about."""
    axes = kind.axes
    if row.part == "output" and axes.results:
        return axes.results[row.index or 0] if (row.index or 0) < len(axes.results) else None
    if row.part == "grad_input":
        found = [n for n, g in enumerate(part.values[1]) if g is not None] if part.values else []
        position = row.index if row.index is not None else found[0] if found else None
        return axes.tensors[position] if position is not None and position < len(axes.tensors) else None
    return None


def _merged(rows: Sequence[Row], more: Sequence[Row]) -> list[Row]:
    """Rows of the same gradients, each from the part that judged it."""
    if len(rows) != len(more):
        return [*rows, *more]
    return [b if _says_more(b, a) else a for a, b in zip(rows, more)]


def _says_more(row: Row, other: Row) -> bool:
    order = (row.verdict != RIGHT, row.atol > 0 or row.rtol > 0, row.excess)
    return order > (other.verdict != RIGHT, other.atol > 0 or other.rtol > 0, other.excess)


class Sampled(Judge):
    """Takes large calls over: they are judged by slices of them."""

    order = 15
    live = True

    @classmethod
    def make(cls, setup: Setup) -> Sampled | None:
        """None where every call is compared in full."""
        return None if settings.choice("OP_AUTOCOMPARE_COVERAGE") == "full" else cls(setup)

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._always = settings.choice("OP_AUTOCOMPARE_COVERAGE") == "sample"
        self._kinds: dict[Hashable, Kind | Total | None] = {}
        self._rng = random.Random(0)
        self._numbers: dict[Hashable, int] = {}
        self._lock = threading.Lock()
        self.calls = self.compared = self.elements = 0

    # -- what is sampled ----------------------------------------------------------------------------------

    def expects(self, call: ComparedCall) -> bool:
        live = call.live
        key = (arguments_kind(call), call.function)
        if not call.numbers[0] or key not in self._kinds:
            kind = self._find(call)
            if call.numbers[0] and len(self._kinds) < _MAX_KINDS:
                self._kinds[key] = kind
        else:
            kind = self._kinds[key]
        if kind is None:
            return False
        taken = call.notes[self] = _Taken(kind)
        if isinstance(kind, Total):
            return True
        if kind.writes:
            tensors = live.tensors
            cut = kind.forward()
            taken.index = kind.chosen(cut, tensors).index(live.device)
            taken.before = self._slices(kind, (live.args, live.kwargs), taken.index)
        return True

    def _is_large(self, elements: int | None, work: int = 0) -> bool:
        if self._always:
            return True
        if self.setup.shown:  # tables show both sides: only what could not be compared else
            return 8 * (elements or 0) > self.setup.max_bytes
        return (elements or 0) >= _MIN_ELEMENTS or work >= _MIN_WORK

    def _find(self, call: ComparedCall) -> Kind | Total | None:
        """The kind of a call that is to be sampled; None for all others."""
        live, traits = call.live, call.traits
        count = sum([t.numel() for t in live.tensors])
        if not count or traits.collective or traits.factory:
            return None
        if traits.random and not call.op.endswith("attention"):  # which has a rule only where it draws nothing
            return None
        if not self._always and count < _MIN_ELEMENTS >> 4:
            return None
        if not self.setup.is_stock(call.op, call.function) or facts.has_free_vectors(call.op):
            return None
        axes = axes_of(call.op, live.args, live.kwargs)
        if axes is None:
            total = total_of(call.op, call.function, live.args, live.kwargs)
            return total if total is not None and self._is_large(total.elements(live.args, live.kwargs)) else None
        device, tensors = live.device, live.tensors
        if axes.prepare is not None:
            tensors = list(tensors_in(axes.prepare(live.args, live.kwargs)))
        if not all(is_plain(t) and not t.is_complex() and (t.device == device or not t.dim()) for t in tensors):
            return None
        writes = bool(traits.mutates or facts.may_mutate(call.op, live.kwargs) or traits.facts.writes)
        if writes and not axes.lists and len({t.untyped_storage()._cdata for t in tensors}) != len(tensors):
            return None
        kind = Kind(axes, tensors, writes)
        chosen = kind.chosen(kind.forward(), tensors)
        if not self._is_large(kind.elements, kind.work) or not chosen.counts:
            return None
        if chosen.elements > max(kind.elements // 2, _MAX_WHOLE):
            return None
        return kind

    # -- slices ---------------------------------------------------------------------------------------------

    def _slices(self, kind: Kind, value: Any, index: Index) -> tuple[Any, list[Tensor]]:
        """The arguments cut to some places: the tree, in which tensors are numbers, and the slices."""
        axes = kind.axes
        if axes.prepare is not None:
            value = axes.prepare(*value)
        names, made, places = iter(axes.tensors), [], {}

        def cut(tensor: Tensor) -> Ref:
            key, own = place_of(tensor), next(names)
            if key not in places:
                places[key] = len(made)
                made.append(cut_tensor(tensor, own, index, axes.flat))
            number = places[key]
            copy = made[number]
            return Ref(number, copy.dtype, tuple(copy.shape), copy.stride(), 0, tensor.requires_grad, False, False)

        return map_tensors(value, cut), made

    def _operands(self, kind: Kind, key: Hashable, tree: Any, made: Sequence[Tensor], mark: Any) -> Operands:
        """Slices as operands; calls that look alike share the layout, and so the tree."""
        layout = kind.layouts.get(key)
        if layout is None or layout.tree != tree:
            layout = kind.layouts[key] = Layout(tree, ())
        return Operands(layout.tree, tuple(made), mark, sum([t.nbytes for t in made]), (), layout)

    def _part(
        self, job: Job, kind: Kind, cut: Cut, tree: Any, before: Sequence[Tensor], values: Any, made: Sequence[Tensor]
    ) -> Job:
        """A job that judges a cut call."""
        call = job.call
        assert isinstance(call, ComparedCall)
        mark = mark_after((*before, *made))
        key = (job.phase, cut, job.grad_kind)
        arguments = self._operands(kind, (*key, "before"), tree, before, mark)
        snapshot = self._operands(kind, (*key, "after"), values, made, mark)
        number = self._number((arguments_kind(call), call.numbers, key)) if all(call.numbers) else 0
        region: Region = call.region._replace(grad_enabled=job.phase == BACKWARD)
        own = dataclasses.replace(
            call, numbers=(number, number), before=arguments, notes={}, region=region, places=None, drawn=None
        )
        part = Job(own, job.phase, event=job.event, live=job.live, before=arguments, snapshot=snapshot)
        part.nbytes = arguments.nbytes + snapshot.nbytes
        return part

    def _number(self, key: Hashable) -> int:
        with self._lock:
            return self._numbers.setdefault(key, _FIRST_NUMBER + len(self._numbers))

    # -- judging --------------------------------------------------------------------------------------------

    def settle(self, job: Job) -> Judgement | None:
        call = job.call
        assert isinstance(call, ComparedCall)
        taken: _Taken | None = call.notes.get(self)
        if taken is None:
            return None
        try:
            found = self._forward(job, taken) if job.phase == FORWARD else self._backward(job, taken)
        except Exception as error:
            self.setup.report(f"sampling failed on {call.op}: {type(error).__name__}: {error}")
            found = None
        if found is None and job.phase == FORWARD:
            del call.notes[self]
            if taken.before is not None:  # what the call has overwritten is lost
                return Judgement(NOT_COMPARABLE, "its results do not have the shapes that its arguments say")
        return found

    def _forward(self, job: Job, taken: _Taken) -> Judgement | None:
        kind, live, call = taken.kind, job.live, job.call
        assert isinstance(call, ComparedCall)
        if isinstance(kind, Total):
            parts = kind.forward(live.args, live.kwargs, live.result, self._rng)
            self._keep(taken, live, call)
            return self._from_totals(job, kind, parts)
        results = live.results
        if not (kind.axes.lists and not results) and not _fit(kind.axes.results, results, kind):
            return None
        cut = kind.forward()
        value = (live.args, live.kwargs)
        made: list[Tensor] = []
        if taken.before is not None:
            index, (tree, before) = taken.index, taken.before
            after, made = self._slices(kind, value, index)
        else:
            index = kind.chosen(cut, live.tensors).index(live.device)
            tree, before = self._slices(kind, value, index)
            after = (None, None)
        names = iter(kind.axes.results)

        def cut_result(tensor: Tensor) -> Ref:
            copy = cut_tensor(tensor, next(names), index, kind.axes.flat)
            made.append(copy)
            number = len(made) - 1
            return Ref(number, copy.dtype, tuple(copy.shape), copy.stride(), 0, tensor.requires_grad, False, False)

        result = map_tensors(live.result, cut_result)
        sample = Sample(self, job, [(kind, cut, index)])
        sample.parts.append(self._part(job, kind, cut, tree, before, (*after, result), made))
        self._keep(taken, live, call)
        return self._pending(job, sample)

    def _from_totals(self, job: Job, total: Total, reduced: Sequence[Reduced]) -> Judgement | None:
        """The judgement on a call by other calls that stand for it."""
        if not reduced:
            return None
        call = job.call
        assert isinstance(call, ComparedCall)
        sample = Sample(self, job, [(None, None, {})] * len(reduced))
        for number, each in enumerate(reduced):
            backward = job.phase == BACKWARD
            value = (list(each.sent), list(each.found)) if backward else (None, None, each.result)
            before, after = stage((each.args, each.kwargs), event=False), stage(value, event=False)
            mark = mark_after((*before.storages, *after.storages))
            before, after = before._replace(event=mark), after._replace(event=mark)
            # inputs of partial results are in float64: what autocast rounds does not apply
            region = call.region._replace(grad_enabled=backward, rounded_to=None)
            own = dataclasses.replace(
                call,
                op=each.op,
                function=each.function,
                traits=traits_of(each.function),
                numbers=(0, 0),
                before=before,
                notes={},
                region=region,
                places=None,
                drawn=None,
            )
            part = Job(own, job.phase, event=job.event, live=job.live, before=before, snapshot=after)
            part.nbytes = before.nbytes + after.nbytes
            part.unasked = tuple([n for n, g in enumerate(each.found) if g is None])
            sample.parts.append(part)
        sample.counted = total.elements(*(job.live.args, job.live.kwargs)) if job.phase == FORWARD else None
        return self._pending(job, sample)

    def _pending(self, job: Job, sample: Sample) -> Judgement:
        sample.begin()
        for part in sample.parts:
            part.whole = sample
        job.parts = sample.parts
        return PENDING

    def _keep(self, taken: _Taken, live: Any, call: ComparedCall) -> None:
        """Keep what a backward will need."""
        if not call.region.grad_enabled or not any(t.requires_grad for t in live.tensors):
            return
        if taken.before is not None:
            return
        made: dict[int, Tensor] = {}

        def hold(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
            return made[id(tensor)]

        taken.held = map_tensors((live.args, live.kwargs), hold)
        taken.versions = [t._version for t in made.values()]

    def _backward(self, job: Job, taken: _Taken) -> Judgement | None:
        kind, call = taken.kind, job.call
        assert job.grads is not None
        sent, found = job.grads
        positions = [n for n, g in enumerate(found) if g is not None and n not in job.unasked]
        if not positions:
            return None
        if taken.held is None:
            if taken.before is None:
                return None
            return self._backward_from_slices(job, taken, positions)
        if [t._version for t in _unique(taken.held)] != list(taken.versions):
            return Judgement(NOT_COMPARABLE, "its arguments were changed before its backward")
        if isinstance(kind, Total):
            return self._from_totals(job, kind, kind.backward(*taken.held, sent, found, self._rng))
        if len([g for g in sent if g is not None]) and len(sent) != len(kind.axes.results):
            return None
        tensors = list(tensors_in(taken.held if kind.axes.prepare is None else kind.axes.prepare(*taken.held)))
        groups: list[tuple[Kind, Cut, Index]] = []
        parts: list[Job] = []
        for cut, some in kind.backward(positions).items():
            chosen = kind.chosen(cut, tensors)
            if chosen.elements > _MAX_WHOLE:
                text = f"a gradient that needs {chosen.elements:,} elements of its arguments"
                self.setup.skip(job.live, text, BACKWARD)
                continue
            index = chosen.index(tensors[0].device)
            tree, before = self._slices(kind, taken.held, index)
            parts.append(self._gradient_part(job, kind, cut, index, some, tree, before, len(tensors)))
            groups.append((kind, cut, index))
        if not parts:
            return Judgement(NOT_COMPARABLE, "its gradients need too much of its arguments")
        sample = Sample(self, job, groups)
        sample.parts.extend(parts)
        return self._pending(job, sample)

    def _gradient_part(
        self, job: Job, kind: Kind, cut: Cut, index: Index, some: Sequence[int], tree: Any, before: Any, count: int
    ) -> Job:
        assert job.grads is not None
        sent, found = job.grads
        made: list[Tensor] = []

        def taken(tensor: Tensor | None, names: Names) -> Ref | None:
            if tensor is None:
                return None
            copy = cut_tensor(tensor, names, index, kind.axes.flat)
            made.append(copy)
            return Ref(len(made) - 1, copy.dtype, tuple(copy.shape), copy.stride(), 0, False, False, False)

        ours = [taken(g, names) for g, names in zip(sent, kind.axes.results)]
        theirs = [taken(found[n], kind.axes.tensors[n]) if n in some and n < len(found) else None for n in range(count)]
        part = self._part(job, kind, cut, tree, before, (ours, theirs), made)
        part.unasked = tuple([n for n in range(count) if n not in some])
        return part

    def _backward_from_slices(self, job: Job, taken: _Taken, positions: Sequence[int]) -> Judgement | None:
        """The backward of a call that wrote to its arguments, at the places of its forward."""
        kind = taken.kind
        assert taken.before is not None
        cut = kind.forward()
        if kind.axes.lists or any(kind.axes.cut_for_gradient(n) != cut.axes for n in positions):
            return Judgement(NOT_COMPARABLE, "what its gradients need of its arguments was overwritten")
        tree, before = taken.before
        sample = Sample(self, job, [(kind, cut, taken.index)])
        count = len(kind.axes.tensors)
        sample.parts.append(self._gradient_part(job, kind, cut, taken.index, positions, tree, before, count))
        return self._pending(job, sample)

    def arguments(self, call: ComparedCall) -> Operands | str | None:
        taken: _Taken | None = call.notes.get(self)
        if taken is None:
            return None
        if taken.held is None:
            return "what its gradients need of its arguments was not kept"
        if [t._version for t in _unique(taken.held)] != list(taken.versions):
            return "its arguments were changed before its backward"
        return stage(taken.held)

    # -- telling --------------------------------------------------------------------------------------------

    def count(self, job: Job, parts: Sequence[Job], groups: Sequence[tuple[Kind | None, Cut | None, Index]]) -> None:
        """Count the elements that were judged, of all."""
        judged = whole = 0
        for part, (kind, _, _) in zip(parts, groups):
            if kind is None:
                continue
            values = part.snapshot.tree if part.snapshot is not None else ()
            refs = [r for r in _refs(values[2] if job.phase == FORWARD else values[1])]
            judged += sum([math.prod(ref.shape) for ref in refs])
            if job.phase == FORWARD:
                whole += sum(kind.results) or kind.elements
            else:
                asked = [n for n in range(len(kind.axes.tensors)) if n not in part.unasked]
                whole += sum([_size(kind, n) for n in asked])
        with self._lock:
            self.calls += 1
            self.compared += judged
            self.elements += whole

    def summary(self) -> list[str]:
        if not self.calls:
            return []
        return [
            f"{self.calls:,} comparisons of large calls by a sample: {self.compared:,} of {self.elements:,} elements "
            "(OP_AUTOCOMPARE_COVERAGE=full compares all)"
        ]


def _size(kind: Kind, position: int) -> int:
    return math.prod([kind.sizes[n] for n in kind.axes.tensors[position] if n is not None])


def _refs(tree: Any) -> Sequence[Ref]:
    if isinstance(tree, Ref):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [ref for member in tree for ref in _refs(member)]
    return []


def _unique(value: Any) -> Sequence[Tensor]:
    return list({id(t): t for t in tensors_in(value)}.values())


def _fit(names: tuple[Names, ...], results: Sequence[Tensor], kind: Kind) -> bool:
    """Whether results have the shapes that the axes say."""
    if len(names) != len(results):
        return False
    for own, tensor in zip(names, results):
        if not is_plain(tensor):
            return False
        shape = (tensor.numel(),) if kind.axes.flat and own else tensor.shape
        if len(shape) != len(own) or (kind.shape is not None and tensor.shape != kind.shape):
            return False
        if any(name is not None and kind.sizes[name] != size for name, size in zip(own, shape)):
            return False
    return True
