"""Large calls are judged at some thousand places of their results.

A live judge: it takes the slices that those places depend on from the run's own tensors, instead of copies of all
operands. They are an ordinary call of the same operator (`judge/sampling`), which goes down the rest of the ladder;
a backward becomes several, one for gradients that need the same slices. All elements take part on the device, which
adds the places that stand out (`judge/sampling/suspects`).
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.utils.weak import TensorWeakRef

from ... import settings
from ...call import facts
from ...call.description import Tensor, map_tensors, tensors_in
from ...call.devices import module_of, quiet
from ...compat import count_dispatch_modes, no_dispatch_modes
from ...copies.operands import Operands, is_plain, stage, start_of_storage
from ...copies.queue import MemoryBudget
from ...judge import golden
from ...judge.sampling import suspects
from ...judge.sampling.axes import axes_of
from ...judge.sampling.reduction import FIRST_CALLS, Chosen, Cut, Index
from ...judge.sampling.totals import Reduced, Total, columns_backward, columns_of, total_of
from ...judge.verdict import NOT_COMPARABLE, Judgement
from ..ladder import BACKWARD, FORWARD, PENDING, ComparedCall, Job, Judge, Setup, arguments_kind
from ..recipes import Known, PartMaker
from ..sample import Group, Kind, Sample, tried, with_more, with_other
from ..slices import (
    Layouts,
    Taken,
    copies,
    cut_arguments,
    cut_gradients,
    cut_results,
    reduced_job,
    slices,
)
from .views import MODEL, without_memory

_MAX_KINDS: Final = 20_000
_MIN_ELEMENTS: Final = 1 << 20  # of arguments and results: below, all of them are compared
_MIN_WORK: Final = 1 << 31  # multiplications
_MAX_WHOLE: Final = 1 << 25  # elements of a call that cannot be cut and is compared in full all the same
_SHARE: Final = 20  # of the memory that a run uses: what arguments may take that wait for their backward
_MIN_HELD: Final = 1 << 26  # bytes of them in any case
_MAX_COPIED: Final = 1 << 28  # bytes of arguments that are copied on the device before a call that writes to them
_RANKED_OF: Final = 16  # later calls than the first of a kind, in one of which all elements take part on the device
_CHANGED: Final = "its arguments were changed before its backward"
_DRAWS_NOTHING: Final = "attention"  # its rule knows only calls without dropout


class _Counts:
    """How much was judged by samples."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls = self.compared = self.elements = self.ranked = 0

    def count(self, sample: Sample) -> None:
        """A sample has been judged."""
        judged, whole = sample.elements()
        with self._lock:
            self.calls += 1
            self.compared += judged
            self.elements += whole

    def summary(self) -> list[str]:
        """What the summary of a run says of it."""
        if not self.calls:
            return []
        return [
            f"{self.calls:,} comparisons of large calls by a sample: {self.compared:,} of {self.elements:,} elements; "
            f"of {self.ranked:,}, all elements took part on the device (OP_AUTOCOMPARE_COVERAGE=full compares all)"
        ]


class _Ranking(_Counts):
    """In which calls all elements take part on the device, and which places stand out there."""

    def __init__(self) -> None:
        super().__init__()
        self._rng = random.Random(0)

    def _ranks(self, chosen: Chosen) -> bool:
        """Whether all elements of the next call take part on the device."""
        chosen.ranked += 1
        return chosen.ranked <= FIRST_CALLS or not self._rng.randrange(_RANKED_OF)

    def _suspects(
        self, kind: Kind, chosen: Chosen, job: Job, call: suspects.Call, index: Index, fixed: Iterable[str | None] = ()
    ) -> Index:
        """These places, with those that stand out on the device."""
        some = chosen.some.difference(fixed)
        if not some or kind.axes.by_trial:
            return index
        call = call._replace(each=chosen.more or 1)
        try:
            with quiet(), golden.neutral(bool(call.found)), _no_autocast(job.call.region.device):
                more = suspects.find(kind.axes, chosen.cut.axes, call, self._rng)
        except (RuntimeError, NotImplementedError):  # no kernel for a wider dtype, no memory
            return index
        self.ranked += bool(more)
        return with_more(index, more, some) if chosen.more else with_other(index, self._rng.choice(more or [{}]), some)


class Sampled(_Ranking, Judge):
    """Takes large calls over: they are judged by slices of them."""

    order = 15
    live = True

    @classmethod
    def make(cls, setup: Setup) -> Sampled | None:
        """None where every call is compared in full."""
        return None if settings.choice("OP_AUTOCOMPARE_COVERAGE") == "full" else cls(setup)

    def __init__(self, setup: Setup) -> None:
        Judge.__init__(self, setup)
        _Ranking.__init__(self)
        self._always = settings.choice("OP_AUTOCOMPARE_COVERAGE") == "sample"
        self._kinds: dict[Hashable, Kind | Total | None] = {}
        self._parts = PartMaker()
        self._layouts: Layouts = {}  # of calls that stand for others
        self._budget: MemoryBudget | None = None

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
        taken = call.notes[self] = Taken(kind)
        if isinstance(kind, Total) or not (kind.writes or kind.random):
            return True
        with _unseen():
            self._take(taken, kind, live, call)
        return True

    def _take(self, taken: Taken, kind: Kind, live: Any, call: ComparedCall) -> None:
        """Copy arguments that a call is about to write to, or slices of them."""
        chosen = kind.chosen(kind.forward(), kind.tensors)
        whole = not kind.axes.lists and not kind.random and sum([t.nbytes for t in live.tensors]) <= _MAX_COPIED
        if whole and self._ranks(chosen):
            taken.copies = copies(live.tensors)
        else:
            taken.index = chosen.index(live.device)
            known = Known(("early", id(taken.index), call.numbers[0]), live.tensors)
            taken.before = self._parts.early(kind, known, taken.index, live.tensors)

    def _find(self, call: ComparedCall) -> Kind | Total | None:
        """The kind of a call that is to be sampled; None for all others."""
        live, traits = call.live, call.traits
        count = sum([t.numel() for t in live.tensors])
        if not count or traits.collective or traits.factory or not (self._always or count >= _MIN_ELEMENTS >> 4):
            return None
        stock = bool(traits.by_engine) or self.setup.is_stock(call.op, call.function)
        if not stock and (traits.random or call.op.startswith("torch.")):
            return None
        if facts.has_free_vectors(call.op):
            return None
        draws = bool(traits.random) and not call.op.endswith(_DRAWS_NOTHING)
        if draws and not call.op.endswith(".dropout"):
            return None
        plain = [is_plain(t) and not t.is_complex() for t in live.tensors]
        if not all(plain) or any(t.device != live.device and t.dim() for t in live.tensors):
            return None
        axes = axes_of(call.op, live.args, live.kwargs) if stock else tried(call, self.setup.max_bytes, self._is_large)
        if axes is None and not stock:
            return None
        if axes is None:
            total = total_of(call.op, call.function, live.args, live.kwargs)
            return total if total is not None and self._is_large(total.elements(live.args, live.kwargs)) else None
        tensors = live.tensors
        writes = bool(traits.mutates or facts.may_mutate(call.op, live.kwargs) or traits.facts.writes or axes.writes)
        if writes and not axes.lists and len(set(map(start_of_storage, tensors))) != len(tensors):
            return None
        kind = Kind(axes, map_tensors((live.args, live.kwargs), without_memory), writes, draws)
        if not all(kind.sizes.values()):  # nothing to sample; an empty tensor beside others, as in `cat`, is no reason
            return None
        chosen = kind.chosen(kind.forward(), kind.tensors)
        if not self._is_large(kind.elements, kind.work) or not chosen.counts:
            return None
        return None if chosen.elements > max(kind.elements // 2, _MAX_WHOLE) else kind

    def _is_large(self, elements: int | None, work: int = 0) -> bool:
        if self._always or elements is None:
            return self._always
        if self.setup.shown:  # tables show both sides: only what could not be compared otherwise
            return 8 * elements > self.setup.max_bytes
        return elements >= _MIN_ELEMENTS or work >= _MIN_WORK

    # -- judging --------------------------------------------------------------------------------------------

    def settle(self, job: Job) -> Judgement | None:
        call = job.call
        assert isinstance(call, ComparedCall)
        taken: Taken | None = call.notes.get(self) or self._moved(job, call)
        if taken is None:
            return None
        try:
            with _unseen():
                found = self._forward(job, taken) if job.phase == FORWARD else self._backward(job, taken)
        except Exception as error:
            self.setup.report(f"sampling failed on {call.op}: {type(error).__name__}: {error}")
            found = None
        if found is PENDING:
            job.grads = None  # slices of them are enough
        if found is None and job.phase == FORWARD:
            del call.notes[self]
            if taken.before is not None or taken.copies:  # what the call has overwritten is lost
                return Judgement(NOT_COMPARABLE, "its results do not have the shapes that its arguments say")
        return found

    def _moved(self, job: Job, call: ComparedCall) -> Taken | None:
        """What is known of a large view in its backward; nothing of its arguments is needed."""
        model = call.notes.get(MODEL)
        if job.phase == FORWARD or model is None or not call.numbers[0]:
            return None
        key = (arguments_kind(call), call.function, MODEL)
        if key not in self._kinds and len(self._kinds) < _MAX_KINDS:
            axes, count = axes_of(call.op, *model), sum([t.numel() for t in tensors_in(model)])
            found: Kind | Total | None = total_of(call.op, call.function, *model)
            if axes is not None and axes.fixed_gradient:
                found = Kind(axes, model, writes=False, random=False)
            self._kinds[key] = found if self._is_large(2 * count) else None
        kind = self._kinds.get(key)
        return None if kind is None else Taken(kind)

    def _forward(self, job: Job, taken: Taken) -> Judgement | None:
        kind, live, call = taken.kind, job.live, job.call
        assert isinstance(call, ComparedCall)
        if isinstance(kind, Total):
            parts = kind.forward(live.args, live.kwargs, live.result, self._rng)
            if call.region.grad_enabled and any(t.requires_grad for t in live.tensors):
                taken.kept = kind.keep(live.args, live.kwargs, self._rng)
            return self._from_totals(job, parts)
        if not kind.fits(live.results, (FORWARD, call.numbers[1]) if call.numbers[1] else None):
            return None
        part, index = self._forward_part(job, kind, taken, live, call)
        if kind.random:
            assert isinstance(part.call, ComparedCall)
            taken.part = part.call
        sample = self._sample(job)
        sample.take(part, Group(kind, index))
        self._keep(taken, live, call, sample)
        return _pending(job, sample)

    def _forward_part(self, job: Job, kind: Kind, taken: Taken, live: Any, call: ComparedCall) -> tuple[Job, Index]:
        """A job for some places of the results, and these places."""
        cut, known, after = kind.forward(), None, None
        if taken.before is not None:
            index, before = taken.index, taken.before
            if kind.writes and not kind.random:
                known = Known(("late", id(index), call.numbers), [*live.tensors, *live.results])
                part = self._parts.repeat(job, kind, known, None, (cut, before))
                if part is not None:
                    return part, index
        else:
            earlier: Sequence[Any] = taken.copies or live.tensors
            chosen = kind.chosen(cut, kind.tensors)
            index = chosen.index(live.device)
            if taken.copies or self._ranks(chosen):
                rounded = call.region.rounded_to
                whole = suspects.Call(call.function, kind.value(earlier), earlier, rounded, live.results)
                index = self._suspects(kind, chosen, job, whole, index)
            elif not (kind.writes or kind.random):
                earlier = [t for t in kind.prepare(earlier) if t is not None]
                known = Known((id(index), call.numbers), [*earlier, *live.results])
                part = self._parts.repeat(job, kind, known, None)
                if part is not None:
                    return part, index
            before = slices(kind, cut_arguments(kind, earlier, index), index)
            if taken.copies:
                taken.index, taken.before, taken.copies = index, before, ()
        if kind.writes:
            after = slices(kind, cut_arguments(kind, live.tensors, index), index)
        found = cut_results(kind, after, live.results, live.result, index)
        return self._parts.make(job, kind, cut, (before, found), None, known), index

    def _keep(self, taken: Taken, live: Any, call: ComparedCall, sample: Sample) -> None:
        """Keep what a backward will need: arguments that somebody else holds anyway, and slices of all others."""
        kind, tensors = taken.kind, live.tensors
        assert isinstance(kind, Kind)
        wanted = [n for n, t in enumerate(tensors) if t.requires_grad] if call.region.grad_enabled else []
        if not wanted or taken.before is not None or kind.axes.fixed_gradient:
            return
        holds = [t.is_leaf and t.requires_grad for t in tensors]
        if kind.survives:
            if self._budget is None:
                self._budget = MemoryBudget(max(_used_memory(live.device) // _SHARE, _MIN_HELD))
            # what others hold anyway costs nothing; that is known only of earlier calls, so the sum is bounded
            taken.reservation = self._budget.reserve(sum([t.nbytes for t, h in zip(tensors, holds) if not h]) // _SHARE)
            if taken.reservation is not None:
                holds = [True] * len(tensors)
        elif kind.survives is None:
            taken.observed = [TensorWeakRef(t) for t in tensors]
        made: dict[int, Tensor] = {}
        for tensor, hold in zip(tensors, holds):
            if hold and id(tensor) not in made:
                made[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
        taken.held = [made.get(id(t)) for t in tensors]
        taken.versions = [t._version for t in taken.held if t is not None]
        for cut, positions in kind.backward(wanted).items():
            needed = kind.needs(positions)
            affine = kind.affine(positions)
            if affine is not None:
                x, named = tensors[affine.positions[0]], (call.op, call.function)
                taken.kept, check = columns_of(affine, named, x, self._rng)
                sample.take(self._stand_in(sample.job, check), Group())
                continue
            if all(n >= len(holds) or holds[n] for n in needed):
                continue
            chosen = kind.chosen(cut, kind.tensors)
            if chosen.elements <= _MAX_WHOLE:
                index = chosen.index(live.device)
                every = kind.prepare(tensors)
                known = Known(
                    ("kept", cut, id(index), call.numbers[0]), [t for n in needed if (t := every[n]) is not None]
                )
                taken.slices[cut] = index, self._parts.keep(kind, known, index, needed, every)
            found = suspects.project(kind.axes, positions, tensors, call.region.rounded_to, self._rng)
            if found is not None:
                taken.projected[positions[0]] = found

    def _backward(self, job: Job, taken: Taken) -> Judgement | None:
        kind, call = taken.kind, job.call
        assert isinstance(call, ComparedCall)
        assert job.grads is not None
        sent, found = job.grads
        positions = [n for n, g in enumerate(found) if g is not None and n not in job.unasked]
        if not positions:
            return None
        if isinstance(kind, Total):
            return self._from_totals(job, kind.backward(taken.kept, sent, found, self._rng))
        if taken.held and taken.changed:
            return Judgement(NOT_COMPARABLE, _CHANGED)
        if taken.observed:
            kind.survives = kind.survives is not False and all(ref() is not None for ref in taken.observed)
        if not kind.fits(sent, job.grad_kind):
            return None
        of_affine: list[int] = []
        sample = self._sample(job)
        if taken.before is not None:
            cut = kind.forward()
            if kind.axes.lists or any(kind.axes.cut_for_gradient(n) != cut.axes for n in positions):
                return Judgement(NOT_COMPARABLE, "what its gradients need of its arguments was not kept")
            sides = taken.before, cut_gradients(job, kind, taken.index, positions)
            part = self._parts.make(job, kind, cut, sides, taken.part, None)
            self._take_part(sample, part, kind, taken.index, positions)
        else:
            for cut, some in kind.backward(positions).items():
                if taken.kept is not None and kind.affine(some):
                    of_affine = some
                    continue
                made = self._backward_part(job, kind, taken, cut, some)
                if made is None:
                    self.setup.skip(job.live, "a gradient that needs nearly all of its arguments", BACKWARD)
                else:
                    self._take_part(sample, *made, some)
        affine = kind.affine(of_affine) if of_affine else None
        if affine is not None and sent[0] is not None:
            stand_in = columns_backward(affine, taken.kept, sent[0], found, of_affine)
            _, weight, bias = affine.positions
            rows = (None, weight) if len(stand_in.args) == 2 else (bias, None, weight)
            sample.take(self._stand_in(job, stand_in), Group(rows=rows))
        taken.held = taken.versions = ()
        taken.reservation = None
        return _pending(job, sample) if sample.parts else Judgement(NOT_COMPARABLE, "it is too large to be compared")

    def _take_part(self, sample: Sample, part: Job, kind: Kind, index: Index, some: Sequence[int]) -> None:
        part.unasked = tuple([n for n in range(len(kind.axes.tensors)) if n not in some])
        sample.take(part, Group(kind, index))

    def _backward_part(
        self, job: Job, kind: Kind, taken: Taken, cut: Cut, some: Sequence[int]
    ) -> tuple[Job, Kind, Index] | None:
        """A job for the gradients of some arguments, at places some of which stand out; None where there is no way."""
        assert job.grads is not None
        sent, found = job.grads
        device = next(g.device for g in sent if g is not None)
        chosen, needed = kind.chosen(cut, kind.tensors), kind.needs(some)
        index, ready = taken.slices.get(cut) or (chosen.index(device), None)
        tensors = taken.held or [None] * len(kind.tensors)
        lost = [n for n in needed if n < len(tensors) and tensors[n] is None]
        if ready is None and (lost or chosen.elements > _MAX_WHOLE):
            return None
        projected, known = taken.projected.get(some[0]), None
        ranks = (ready is None or projected is not None) and not kind.axes.fixed_gradient
        if ranks and self._ranks(chosen):
            gradients = {n: g for n in some if (g := found[n]) is not None}
            region, value = job.call.region, kind.value(tensors)
            whole = suspects.Call(job.call.function, value, tensors, region.rounded_to, (), sent, gradients, projected)
            # of slices that were taken before, there are no others
            fixed = [name for n in needed for name in kind.axes.tensors[n]] if ready is not None else ()
            index = self._suspects(kind, chosen, job, whole, index, fixed)
        elif taken.part is None:
            if ready is None:
                tensors = kind.prepare(tensors)
                given = [tensors[n] for n in needed]
            else:
                given = list({id(each.tensor): each.tensor for each in ready.values()}.values())
            there = [t for t in (*given, *sent, *[found[n] for n in some]) if t is not None]
            known = Known((cut, id(index), ready is None, job.call.numbers, job.grad_kind), there)
            part = self._parts.repeat(job, kind, known, None)
            if part is not None:
                return part, kind, index
        if ready is None:
            ready = cut_arguments(kind, tensors, index, needed)
        sides = slices(kind, ready, index), cut_gradients(job, kind, index, some)
        return self._parts.make(job, kind, cut, sides, taken.part, known), kind, index

    def _from_totals(self, job: Job, reduced: Sequence[Reduced]) -> Judgement | None:
        """Calls that stand for the whole one."""
        if not reduced:
            return None
        sample = self._sample(job)
        for place, each in enumerate(reduced):
            sample.take(self._stand_in(job, each, place), Group())
        return _pending(job, sample)

    def _stand_in(self, job: Job, each: Reduced, place: int = 0) -> Job:
        call = job.call
        key = (arguments_kind(call), call.numbers, job.phase, job.grad_kind, each.op, place)
        return reduced_job(job, each, self._parts.number(key) if all(call.numbers) else 0, self._layouts)

    def arguments(self, call: ComparedCall) -> Operands | str | None:
        taken: Taken | None = call.notes.get(self)
        if taken is None:
            return None
        tensors = [t for t in taken.held if t is not None]
        if isinstance(taken.kind, Total) or len(tensors) < len(taken.held) or not tensors:
            return "what its gradients need of its arguments was not kept"
        return _CHANGED if taken.changed else stage(taken.kind.value(tensors))

    def _sample(self, job: Job) -> Sample:
        return Sample(job, self.setup.skip, self.count)


def _used_memory(device: torch.device) -> int:
    """Bytes that the run has used at most so far."""
    try:
        return int(module_of(device.type).max_memory_allocated(device))
    except Exception:
        return 0


def _unseen() -> contextlib.AbstractContextManager[Any]:
    """The user's dispatch modes do not see what is done for the tool."""
    return no_dispatch_modes() if count_dispatch_modes() else contextlib.nullcontext()


@contextlib.contextmanager
def _no_autocast(device: str) -> Iterator[None]:
    """No autocast; `torch.autocast` itself would forget the run's cached weights on leaving."""
    enabled = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, enabled)


def _pending(job: Job, sample: Sample) -> Judgement:
    job.parts = sample.parts
    return PENDING
