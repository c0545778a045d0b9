"""Large calls are judged at some thousand places of their results.

A live judge: it takes the slices that those places depend on from the run's own tensors, instead of copies of all
operands. They are an ordinary call of the same operator (`judge/sampling`), which goes down the rest of the ladder;
a backward becomes several, one for gradients that need the same slices. All elements take part on the device, which
adds the places that stand out (`judge/sampling/suspects`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final

import torch

from ... import settings
from ...call import facts
from ...call.description import Tensor, map_tensors, tensors_in
from ...call.devices import module_of, quiet
from ...call.traits import traits_of
from ...copies.invocation import Region
from ...copies.materialise import place_of
from ...copies.operands import Layout, Operands, is_plain, mark_after, stage
from ...copies.queue import MemoryBudget, Reservation
from ...judge import golden
from ...judge.sampling import suspects
from ...judge.sampling.axes import Names, axes_of
from ...judge.sampling.reduction import Chosen, Cut, Index, cut_tensor
from ...judge.sampling.totals import Reduced, Total, total_of
from ...judge.verdict import NOT_COMPARABLE, Judgement
from ..ladder import BACKWARD, FORWARD, PENDING, ComparedCall, Job, Judge, Setup, arguments_kind
from ..sample import Group, Kind, Sample, ref_of, with_more

_MAX_KINDS: Final = 20_000
_MIN_ELEMENTS: Final = 1 << 20  # of arguments and results: below, all of them are compared
_MIN_WORK: Final = 1 << 31  # multiplications
_MAX_WHOLE: Final = 1 << 25  # elements of a call that cannot be cut and is compared in full all the same
_FIRST_NUMBER: Final = 1 << 40  # of kinds of cut calls: none of the descriptions of a run
_SHARE: Final = 20  # of the memory of a device that arguments may take which wait for their backward
_WHERE_UNKNOWN: Final = 1 << 28
_MAX_COPIED: Final = 1 << 30  # bytes of arguments that are copied on the device before a call that writes to them
_CHANGED: Final = "its arguments were changed before its backward"
_DRAWS_NOTHING: Final = "attention"  # its rule knows only calls without dropout

Slices = tuple[Any, Sequence[Tensor]]  # a tree of staged leaves, and the tensors


@dataclasses.dataclass(eq=False)
class _Taken:
    """What is kept of a call until its backward."""

    kind: Kind | Total
    index: Index = dataclasses.field(default_factory=dict)
    copies: Any = None  # of (args, kwargs) that the call writes to
    before: Slices | None = None  # of arguments that the call writes to, or that its backward needs as they were
    part: ComparedCall | None = None  # of a random call: what its forward has found belongs to its backward
    held: tuple[Any, Any] | None = None  # (args, kwargs), aliases of the run's tensors
    versions: Sequence[int] = ()
    reservation: Reservation | None = None
    slices: dict[Cut, tuple[Index, Slices]] = dataclasses.field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether something was written to the arguments since."""
        return [t._version for t in tensors_in(self.held)] != list(self.versions)


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
        self._numbers: dict[Hashable, int] = {}
        self._rng = random.Random(0)
        self._budget: MemoryBudget | None = None
        self._lock = threading.Lock()
        self.calls = self.compared = self.elements = self.ranked = 0

    # -- what is sampled ----------------------------------------------------------------------------------

    def expects(self, call: ComparedCall) -> bool:
        live = call.live
        key = (arguments_kind(call), call.function)
        if call.numbers[0] and key in self._kinds:
            kind = self._kinds[key]
        else:
            kind = self._find(call)
            if call.numbers[0] and len(self._kinds) < _MAX_KINDS:
                self._kinds[key] = kind
        if kind is None:
            if call.numbers[0] and len(self.never_settles) < _MAX_KINDS:
                self.never_settles.add((call.op, call.numbers[0]))
            return False
        taken = call.notes[self] = _Taken(kind)
        if isinstance(kind, Total) or not (kind.writes or kind.random):
            return True
        affordable = sum([t.nbytes for t in live.tensors]) <= _MAX_COPIED
        if affordable and not kind.axes.lists and not kind.random:
            taken.copies = _copies((live.args, live.kwargs))
        else:
            taken.index = kind.chosen(kind.forward(), live.tensors).index(live.device)
            taken.before = self._slices(kind, (live.args, live.kwargs), taken.index)
        return True

    def _find(self, call: ComparedCall) -> Kind | Total | None:
        """The kind of a call that is to be sampled; None for all others."""
        live, traits = call.live, call.traits
        count = sum([t.numel() for t in live.tensors])
        if not count or traits.collective or traits.factory or not (self._always or count >= _MIN_ELEMENTS >> 4):
            return None
        if not self.setup.is_stock(call.op, call.function) or facts.has_free_vectors(call.op):
            return None
        draws = bool(traits.random) and not call.op.endswith(_DRAWS_NOTHING)
        if draws and not call.op.endswith(".dropout"):
            return None
        plain = [is_plain(t) and not t.is_complex() for t in live.tensors]
        if not all(plain) or any(t.device != live.device and t.dim() for t in live.tensors):
            return None
        axes = axes_of(call.op, live.args, live.kwargs)
        if axes is None:
            total = total_of(call.op, call.function, live.args, live.kwargs)
            return total if total is not None and self._is_large(total.elements(live.args, live.kwargs)) else None
        tensors = live.tensors
        if axes.prepare is not None:
            tensors = list(tensors_in(axes.prepare(live.args, live.kwargs)))
        writes = bool(traits.mutates or facts.may_mutate(call.op, live.kwargs) or traits.facts.writes or axes.writes)
        if writes and not axes.lists and len({t.untyped_storage()._cdata for t in tensors}) != len(tensors):
            return None
        kind = Kind(axes, tensors, writes, draws)
        chosen = kind.chosen(kind.forward(), tensors)
        if not self._is_large(kind.elements, kind.work) or not chosen.counts:
            return None
        return None if chosen.elements > max(kind.elements // 2, _MAX_WHOLE) else kind

    def _is_large(self, elements: int | None, work: int = 0) -> bool:
        if self._always or elements is None:
            return self._always
        if self.setup.shown:  # tables show both sides: only what could not be compared otherwise
            return 8 * elements > self.setup.max_bytes
        return elements >= _MIN_ELEMENTS or work >= _MIN_WORK

    # -- slices ---------------------------------------------------------------------------------------------

    def _slices(self, kind: Kind, value: Any, index: Index) -> Slices:
        """The arguments cut to some places."""
        axes = kind.axes
        if axes.prepare is not None:
            value = axes.prepare(*value)
        names, places = iter(axes.tensors), {}  # type: Any, dict[Any, int]
        made: list[Tensor] = []

        def cut(tensor: Tensor) -> Any:
            key, own = place_of(tensor), next(names)
            if key not in places:
                places[key] = len(made)
                made.append(cut_tensor(tensor, own, index, axes.flat))
            return ref_of(made[places[key]], places[key], tensor.requires_grad)

        return map_tensors(value, cut), made

    def _part(self, job: Job, kind: Kind, cut: Cut, before: Slices, after: Slices, own: ComparedCall | None) -> Job:
        """A job that judges a cut call."""
        call = job.call
        assert isinstance(call, ComparedCall)
        mark = mark_after((*before[1], *after[1]))
        key = (job.phase, cut, job.grad_kind)
        arguments = _operands(kind, (*key, "before"), before, mark)
        snapshot = _operands(kind, (*key, "after"), after, mark)
        if own is None:
            number = self._number((arguments_kind(call), call.numbers, key)) if all(call.numbers) else 0
            region: Region = call.region._replace(grad_enabled=job.phase == BACKWARD)
            changes: dict[str, Any] = {"numbers": (number, number), "notes": {}, "places": None, "drawn": None}
            own = dataclasses.replace(call, before=arguments, region=region, **changes)
        part = Job(own, job.phase, event=job.event, live=job.live, before=arguments, snapshot=snapshot)
        part.nbytes = arguments.nbytes + snapshot.nbytes
        return part

    def _number(self, key: Hashable) -> int:
        with self._lock:
            return self._numbers.setdefault(key, _FIRST_NUMBER + len(self._numbers))

    def _suspects(self, kind: Kind, chosen: Chosen, job: Job, call: suspects.Call, device: torch.device) -> Index:
        """The places for the next call, with those that stand out on the device."""
        index, cut = chosen.index(device), chosen.cut
        if not chosen.some:
            return index
        call = call._replace(each=chosen.more)
        try:
            with quiet(), golden.neutral(bool(call.found)), _no_autocast(job.call.region.device):
                more = suspects.find(kind.axes, cut.axes, call, self._rng)
        except (RuntimeError, NotImplementedError):  # no kernel for a wider dtype, no memory
            return index
        self.ranked += bool(more)
        return with_more(index, more, chosen.some)

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
            if taken.before is not None or taken.copies is not None:  # what the call has overwritten is lost
                return Judgement(NOT_COMPARABLE, "its results do not have the shapes that its arguments say")
        return found

    def _forward(self, job: Job, taken: _Taken) -> Judgement | None:
        kind, live, call = taken.kind, job.live, job.call
        assert isinstance(call, ComparedCall)
        if isinstance(kind, Total):
            parts = kind.forward(live.args, live.kwargs, live.result, self._rng)
            self._keep(taken, live, call)
            return self._from_totals(job, parts)
        if not kind.fits(live.results):
            return None
        cut, value = kind.forward(), (live.args, live.kwargs)
        after: Slices = ((None, None), [])
        if taken.before is not None:
            index, before = taken.index, taken.before
        else:
            earlier: tuple[Any, Any] = value if taken.copies is None else taken.copies
            whole = suspects.Call(call.function, *earlier, call.region.rounded_to, live.results)
            index = self._suspects(kind, kind.chosen(cut, live.tensors), job, whole, live.device)
            before = self._slices(kind, earlier, index)
            if taken.copies is not None:
                taken.index, taken.before, taken.copies = index, before, None
        if kind.writes:
            after = self._slices(kind, value, index)
        names, made = iter(kind.axes.results), list(after[1])

        def cut_result(tensor: Tensor) -> Any:
            made.append(cut_tensor(tensor, next(names), index, kind.axes.flat))
            return ref_of(made[-1], len(made) - 1, tensor.requires_grad)

        values = (*after[0], map_tensors(live.result, cut_result))
        part = self._part(job, kind, cut, before, (values, made), None)
        if kind.random:
            assert isinstance(part.call, ComparedCall)
            taken.part = part.call
        sample = self._sample(job)
        sample.take(part, Group(kind, index))
        self._keep(taken, live, call)
        return _pending(job, sample)

    def _keep(self, taken: _Taken, live: Any, call: ComparedCall) -> None:
        """Keep what a backward will need: the arguments themselves while there is memory for them, else slices."""
        if not call.region.grad_enabled or not any(t.requires_grad for t in live.tensors) or taken.before is not None:
            return
        kind = taken.kind
        others = sum([t.nbytes for t in live.tensors if not (t.is_leaf and t.requires_grad)])
        if self._budget is None:
            self._budget = MemoryBudget(_free_memory(live.device) // _SHARE)
        taken.reservation = self._budget.reserve(others)
        value = (live.args, live.kwargs)
        if taken.reservation is None and isinstance(kind, Kind):
            positions = [n for n, t in enumerate(live.tensors) if t.requires_grad]
            for cut in kind.backward(positions):
                chosen = kind.chosen(cut, live.tensors)
                if chosen.elements <= _MAX_WHOLE:
                    index = chosen.index(live.device)
                    taken.slices[cut] = index, self._slices(kind, value, index)
            return
        made: dict[int, Tensor] = {}

        def hold(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
            return made[id(tensor)]

        taken.held = map_tensors(value, hold)
        taken.versions = [t._version for t in tensors_in(taken.held)]

    def _backward(self, job: Job, taken: _Taken) -> Judgement | None:
        kind = taken.kind
        assert job.grads is not None
        sent, found = job.grads
        positions = [n for n, g in enumerate(found) if g is not None and n not in job.unasked]
        if not positions:
            return None
        if taken.held is not None and taken.changed:
            return Judgement(NOT_COMPARABLE, _CHANGED)
        if isinstance(kind, Total):
            return (
                None
                if taken.held is None
                else self._from_totals(job, kind.backward(*taken.held, sent, found, self._rng))
            )
        if len(sent) != len(kind.axes.results) or not kind.fits([g for g in sent if g is not None]):
            return None
        if taken.before is not None:
            cut = kind.forward()
            if kind.axes.lists or any(kind.axes.cut_for_gradient(n) != cut.axes for n in positions):
                return Judgement(NOT_COMPARABLE, "what its gradients need of its arguments was not kept")
            ways: dict[Cut, tuple[Index, Slices]] = {cut: (taken.index, taken.before)}
            groups = {cut: positions}
        else:
            groups, ways = kind.backward(positions), taken.slices
            if taken.held is not None:
                ways = self._ways(job, kind, taken.held, groups)
        sample = self._sample(job)
        for cut, some in groups.items():
            if cut not in ways:
                self.setup.skip(job.live, "a gradient that needs nearly all of its arguments", BACKWARD)
                continue
            index, before = ways[cut]
            part = self._part(job, kind, cut, before, _gradients(job, kind, index, some), taken.part)
            part.unasked = tuple([n for n in range(len(kind.axes.tensors)) if n not in some])
            sample.take(part, Group(kind, index))
        return _pending(job, sample) if sample.parts else Judgement(NOT_COMPARABLE, "it is too large to be compared")

    def _ways(
        self, job: Job, kind: Kind, held: tuple[Any, Any], groups: dict[Cut, list[int]]
    ) -> dict[Cut, tuple[Index, Slices]]:
        """Slices of the arguments for each way to cut; none where that is too much."""
        assert job.grads is not None
        sent, found = job.grads
        prepare = kind.axes.prepare
        tensors = list(tensors_in(held if prepare is None else prepare(*held)))
        ways = {}
        for cut, some in groups.items():
            chosen = kind.chosen(cut, tensors)
            if chosen.elements > _MAX_WHOLE:
                continue
            gradients = {n: g for n in some if (g := found[n]) is not None}
            whole = suspects.Call(job.call.function, *held, job.call.region.rounded_to, (), sent, gradients)
            index = self._suspects(kind, chosen, job, whole, tensors[0].device)
            ways[cut] = index, self._slices(kind, held, index)
        return ways

    def _from_totals(self, job: Job, reduced: Sequence[Reduced]) -> Judgement | None:
        """Calls that stand for the whole one."""
        call, backward = job.call, job.phase == BACKWARD
        assert isinstance(call, ComparedCall)
        if not reduced:
            return None
        sample = self._sample(job)
        for each in reduced:
            value = (list(each.sent), list(each.found)) if backward else (None, None, each.result)
            before, after = (stage(v, event=False) for v in ((each.args, each.kwargs), value))
            mark = mark_after((*before.storages, *after.storages))
            before, after = before._replace(event=mark), after._replace(event=mark)
            own = dataclasses.replace(
                call,
                op=each.op,
                function=each.function,
                traits=traits_of(each.function),
                numbers=(0, 0),
                before=before,
                notes={},
                region=call.region._replace(grad_enabled=backward),
                places=None,
                drawn=None,
            )
            part = Job(own, job.phase, event=job.event, live=job.live, before=before, snapshot=after)
            part.nbytes = before.nbytes + after.nbytes
            part.unasked = tuple([n for n, g in enumerate(each.found) if g is None])
            sample.take(part, Group())
        return _pending(job, sample)

    def arguments(self, call: ComparedCall) -> Operands | str | None:
        taken: _Taken | None = call.notes.get(self)
        if taken is None:
            return None
        if taken.held is None:
            return "what its gradients need of its arguments was not kept"
        return _CHANGED if taken.changed else stage(taken.held)

    # -- telling --------------------------------------------------------------------------------------------

    def _sample(self, job: Job) -> Sample:
        return Sample(job, self.setup.skip, self._count)

    def _count(self, sample: Sample) -> None:
        judged, whole = sample.elements()
        with self._lock:
            self.calls += 1
            self.compared += judged
            self.elements += whole

    def summary(self) -> list[str]:
        if not self.calls:
            return []
        return [
            f"{self.calls:,} comparisons of large calls by a sample: {self.compared:,} of {self.elements:,} elements; "
            f"of {self.ranked:,}, all elements took part on the device (OP_AUTOCOMPARE_COVERAGE=full compares all)"
        ]


@contextlib.contextmanager
def _no_autocast(device: str) -> Iterator[None]:
    """No autocast; `torch.autocast` itself would forget the run's cached weights on leaving."""
    enabled = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, enabled)


def _copies(value: Any) -> Any:
    """Copies of all tensors on the device; those at the same place in memory are one."""
    made: dict[Any, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        key = place_of(tensor)
        if key not in made:
            made[key] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return made[key]

    return map_tensors(value, copy)


def _pending(job: Job, sample: Sample) -> Judgement:
    job.parts = sample.parts
    return PENDING


def _operands(kind: Kind, key: Hashable, slices: Slices, mark: Any) -> Operands:
    """Slices as operands; calls that look alike share the layout, and so the tree."""
    tree, made = slices
    layout = kind.layouts.get(key)
    if layout is None or layout.tree != tree:
        layout = kind.layouts[key] = Layout(tree, ())
    return Operands(layout.tree, tuple(made), mark, sum([t.nbytes for t in made]), (), layout)


def _gradients(job: Job, kind: Kind, index: Index, some: Sequence[int]) -> Slices:
    """The gradients that came in and those that are judged, cut to some places."""
    assert job.grads is not None
    sent, found = job.grads
    made: list[Tensor] = []

    def cut(tensor: Tensor | None, names: Names) -> Any:
        if tensor is None:
            return None
        made.append(cut_tensor(tensor, names, index, kind.axes.flat))
        return ref_of(made[-1], len(made) - 1)

    ours = [cut(g, names) for g, names in zip(sent, kind.axes.results)]
    theirs = [cut(found[n], names) if n in some else None for n, names in enumerate(kind.axes.tensors)]
    return (ours, theirs), made


def _free_memory(device: torch.device) -> int:
    try:
        return int(module_of(device.type).mem_get_info(device)[0])
    except Exception:
        return _SHARE * _WHERE_UNKNOWN
