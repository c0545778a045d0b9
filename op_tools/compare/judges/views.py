"""Calls that return views: no kernel runs, so there are no values to compare a second time.

One call of a kind is compared in full. A later one with the same arguments, down to every stride and number, whose
results lie at the same places of the same memory, is right by that alone; the same holds for its gradients. Of large
calls none is compared in full: PyTorch says on tensors without memory (`meta`) where their results must lie.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

import torch

from ... import settings
from ...call.arguments import Numbering, compared_arguments
from ...call.description import Tensor, map_tensors, tensors_in
from ...call.devices import quiet
from ...call.operators.registry import last_name
from ...copies.materialise import span_of
from ...copies.operands import Operands, is_plain, lay_out, start_of_storage
from ...judge import golden, verdict
from ...judge.verdict import RIGHT, Judgement, Row
from ..ladder import FORWARD, ComparedCall, Job, Judge, Places, Setup, arguments_kind

_MAX_KINDS: Final = 20_000
_MAY_COPY: Final = frozenset({"reshape", "flatten", "ravel", "contiguous", "reshape_as", "to"})
MODEL: Final = "model"  # among the notes of a large view: its arguments on `meta`
_LARGE: Final = 1 << 18  # elements of arguments that are not worth a comparison in full


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


def expected_layouts(function: Any, value: Any, sent: Sequence[Tensor | None] | None = None) -> list[Any]:
    """Where results must lie, from a run without memory: (which argument, first byte in its storage, shape, stride).

    With the gradients that came in, where those of the arguments must lie in them. Raises where that cannot be said:
    a call that writes to its arguments is no view, though its result may lie in one of them.

    >>> x = torch.ones(3, 4)
    >>> expected_layouts(torch.Tensor.t, ((x,), {}))
    [(0, 0, torch.Size([4, 3]), (1, 4))]
    """
    storages: list[Any] = []
    leaves: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        made = without_memory(tensor)
        storages.append(made.untyped_storage()._cdata)
        return made

    def leaf(tensor: Tensor) -> Tensor:
        leaves.append(without_memory(tensor).detach().requires_grad_(tensor.requires_grad))
        return leaves[-1]

    with quiet(), golden.neutral(sent is not None):
        args, kwargs = map_tensors(value, note if sent is None else leaf)
        given = list(tensors_in((args, kwargs)))
        versions = [t._version for t in given]
        found = list(tensors_in(function(*args, **kwargs)))
        if versions != [t._version for t in given]:
            raise ValueError("it writes to its arguments")
        if sent is not None:
            pairs = [(o, note(g)) for o, g in zip(found, sent) if g is not None]
            wanted = [each for each in leaves if each.requires_grad]
            found = list(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs]))
        places = [(storages.index(t.untyped_storage()._cdata), t.storage_offset() * t.element_size()) for t in found]
        return [(*place, t.shape, t.stride()) for place, t in zip(places, found)]


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor that lies in its storage as this one does, on `meta`."""
    length = start = int(tensor.storage_offset())
    if tensor.numel():
        length = span_of(tensor)[1]
    flat = torch.empty(length, dtype=tensor.dtype, device="meta")
    return flat.as_strided(tensor.shape, tensor.stride(), start).requires_grad_(tensor.requires_grad)


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
        self._samples = settings.choice("OP_AUTOCOMPARE_COVERAGE") != "full"
        self._models: dict[Hashable, Any] = {}  # of large calls: their arguments on `meta`
        self._numbering = Numbering()

    def expects(self, call: ComparedCall) -> bool:
        view = self.known.get(arguments_kind(call))
        if view is None:
            sure = self._samples and call.traits.view and last_name(call.op) not in _MAY_COPY
            return sure and sum([t.numel() for t in call.live.tensors]) >= _LARGE
        call.notes[self] = view
        call.notes[MODEL] = self._models.get(arguments_kind(call))
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
        if view is None and job.places is not None and self._samples and len(self.known) < _MAX_KINDS:
            view = self._proved(job, call, results)
        if view is not None and view.results == results and view.places == job.places:
            return view.judgement
        if job.phase == FORWARD:
            call.notes.pop(self, None)
        return None

    def _proved(self, job: Job, call: ComparedCall, results: Hashable) -> View | None:
        """A large call whose results lie where they must: there is nothing else to compare."""
        kind, forward = arguments_kind(call), job.phase == FORWARD
        if forward:
            given, found, sent = job.live.tensors, job.live.results, None
        else:
            assert job.grads is not None
            sent, (given, found) = job.grads[0], [[g for g in some if g is not None] for some in job.grads]
        if sum([t.numel() for t in given]) < _LARGE or job.unasked or not all(call.numbers):
            return None
        try:
            if forward:
                model = map_tensors((job.live.args, job.live.kwargs), without_memory)
                call.notes[MODEL] = self._models[kind] = model
            expected = expected_layouts(call.function, self._models[kind], sent)
        except Exception:  # no such kernel: it is compared like any other call
            return None
        if len(expected) != len(found):
            return None
        for tensor, (index, start, shape, stride) in zip(found, expected):
            there = tensor.data_ptr() - start_of_storage(given[index])
            if tensor.is_conj() or tensor.is_neg() or tensor.dtype != given[index].dtype:
                return None
            if (there, tensor.shape, tensor.stride()) != (start, shape, stride):
                return None
        tree, sizes = None, ()  # type: Any, tuple[int, ...]
        if forward:
            layout = lay_out((job.live.args, job.live.kwargs), given, [])
            tree, sizes = layout.tree, tuple([end - first for _, first, end in layout.parts])
        assert job.places is not None
        view = View(results, job.places, Judgement(RIGHT, "", self._rows(job, call, kind)), tree, sizes)
        self.known[kind if forward else (kind, "backward")] = view
        if forward:
            call.notes[self] = view
        return view

    def _rows(self, job: Job, call: ComparedCall, kind: Hashable) -> tuple[Row, ...]:
        """The rows of a comparison that found everything equal."""
        rules, given = self.setup.rules, self._models[kind]
        if job.phase == FORWARD:
            arguments = compared_arguments(*given)
            inputs = verdict.unchanged_rows(call.op, arguments, arguments, rules)
            outputs = verdict.unchanged_rows(call.op, job.live.result, job.live.result, rules)
            return (*inputs, *[row._replace(part="output") for row in outputs])
        assert job.grads is not None
        numbers = self._numbering.of(call.op, call.numbers[0], *given)
        rows = verdict.unchanged_rows(call.op, job.grads[1], job.grads[1], rules)
        rows = tuple([row._replace(part="grad_input", index=n) for row, n in zip(rows, numbers.indices)])
        return verdict.gradient_rows(call.op, rows, numbers)

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
