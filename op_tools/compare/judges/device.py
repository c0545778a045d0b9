"""The device pre-check: the same call once more in float64, on the device where its tensors are.

Most calls of a training look like earlier ones. The first of each kind is compared with the CPU in full; later ones
are run again by the device itself in double precision, by other kernels, and only a few numbers leave it.
What that does not settle as right goes to the CPU like the first one: this judge never calls a result wrong. Calls
that take indices always go to the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import torch

from ...call import facts
from ...call.arguments import Numbering, compared_arguments
from ...call.description import Tensor, map_tensors, tensors_in
from ...call.devices import module_of, quiet
from ...call.equality import same_leaves
from ...copies.invocation import Region
from ...copies.materialise import Copier
from ...copies.operands import Operands, is_plain, stage
from ...copies.queue import MemoryBudget, Reservation
from ...judge import golden, on_device, uncertainty, verdict
from ...judge.golden import DOUBLE, GoldenResult, Run, Source
from ...judge.verdict import RIGHT, Judgement
from ...native import device_measures
from ..ladder import BACKWARD, FORWARD, ComparedCall, Job, Judge, Setup, arguments_kind, asked

_MAX_KINDS: Final = 20_000
_SHARE: Final = 8  # of the free memory of a device that is used to keep calls for their backward
_WHERE_UNKNOWN: Final = 1 << 28


@dataclasses.dataclass(frozen=True)
class Kind:
    """Calls that look alike, one of which was compared with the CPU and was right."""

    outputs: int  # number of the description of the results
    structures: tuple[uncertainty.Structure, ...] = ()  # of each part that is judged
    judgement: Judgement | None = None  # of calls that only move values: what is found each time
    writes: bool = False  # to its arguments


@dataclasses.dataclass(eq=False)
class _Checked:
    """What is known of a call that is checked on the device, until its backward."""

    kind: Kind
    key: Hashable
    reservation: Reservation | None  # of memory to keep it for its backward
    source: Source | None = None  # of a call in float64 that waits for its backward
    copier: Copier | None = None  # None where the call only moves values, and was run as it is
    leaves: Sequence[Tensor | None] = ()
    outputs: Any = None
    versions: Sequence[int] = ()

    def keep(self, source: Source, copier: Copier | None, outputs: Any) -> None:
        """Keep the call in float64 for its backward."""
        self.source, self.copier, self.outputs = source, copier, outputs
        self.leaves = [t if t.requires_grad else None for t in source.tensors] if copier is None else copier.leaves
        self.versions = [t._version for t in source.tensors]

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments as they were; None where they are lost."""
        assert self.source is not None
        if self.versions == [t._version for t in self.source.tensors]:
            return self.source.args, self.source.kwargs
        copier = self.copier
        if copier is None or copier.rounded_to is not None:
            return None

        def narrow(tensor: Tensor) -> Tensor:
            return copier.copy_of(tensor).detach().to(tensor.dtype).requires_grad_(tensor.requires_grad)

        args, kwargs = map_tensors((self.source.args, self.source.kwargs), narrow)
        return args, kwargs


class DevicePrecheck(Judge):
    """Settles calls like earlier ones on the device itself, where the user asked for that."""

    order = 20
    live = True

    @classmethod
    def make(cls, setup: Setup) -> DevicePrecheck | None:
        """None unless the user asked for it."""
        if setup.precheck == "cpu":
            return None
        device_measures.prepare()
        return cls(setup)

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._kinds: dict[Hashable, Kind] = {}
        self._needs: dict[tuple[str, int], set[int]] = {}
        self._moves_only_forward: set[Hashable] = set()  # and sums in its backward, as an embedding
        self._budget: MemoryBudget | None = None
        self._numbering = Numbering()
        self._lock = threading.Lock()
        self.settled = self.passed_on = 0

    # -- what is known ------------------------------------------------------------------------------------

    def expects(self, call: ComparedCall) -> bool:
        key = arguments_kind(call)
        kind = self._kinds.get(key)
        if kind is None:
            return False
        reservation = None
        if call.region.grad_enabled and not kind.writes:
            reservation = self._reserve(call.live.device, 24 * sum([t.numel() for t in call.live.tensors]))
            if reservation is None:
                return False
        call.notes[self] = _Checked(kind, key, reservation)
        return not kind.writes

    def learn(self, job: Job) -> None:
        call, result, judgement = job.call, job.golden, job.judgement
        if result is None or judgement is None or judgement.verdict != RIGHT or len(self._kinds) >= _MAX_KINDS:
            return
        key = arguments_kind(call) if job.phase == FORWARD else (arguments_kind(call), job.grad_kind)
        if key in self._kinds or not _may_be_checked(call, result) or not has_double(job.live.device):
            return
        if job.moves_only:
            self._kinds[key] = Kind(call.numbers[1], judgement=judgement)
            return
        writes = bool(call.traits.mutates)
        parts = ("grad_input",) if job.phase == BACKWARD else ("input", "output") if writes else ("output",)
        found = [verdict.structure_of(result, part) for part in parts]
        structures = tuple([s for s in found if s is not None])
        # where the structure depends on values, that of another call says nothing
        if len(structures) == len(parts) and all(uncertainty.remembers(result, part) for part in parts):
            self._kinds[key] = Kind(call.numbers[1], structures, writes=writes)

    # -- judging ------------------------------------------------------------------------------------------

    def settle(self, job: Job) -> Judgement | None:
        call = job.call
        assert isinstance(call, ComparedCall)
        checked: _Checked | None = call.notes.get(self)
        if checked is None or (job.phase == BACKWARD and checked.source is None):
            return None
        judge = self._forward if job.phase == FORWARD else self._backward
        found = None
        if job.phase == BACKWARD or call.numbers[1] == checked.kind.outputs:
            try:
                with quiet():
                    found = judge(job, call, checked)
            except (on_device.Unresolved, RuntimeError):  # not settled; no kernel for float64, no memory
                pass
            except Exception as error:
                self.setup.report(f"the device pre-check failed on {call.op}: {type(error).__name__}: {error}")
        with self._lock:
            if found is None:
                self.passed_on += 1
            else:
                self.settled += 1
        if found is None and job.phase == FORWARD:
            del call.notes[self]
        elif checked.source is None:
            checked.reservation = None
        return found

    def arguments(self, call: ComparedCall) -> Operands | str | None:
        checked: _Checked | None = call.notes.pop(self, None)
        if checked is None or checked.source is None:
            return None
        arguments = checked.arguments()
        if arguments is None:
            return "its arguments were changed before its backward"
        with quiet():
            return stage(arguments)

    def _forward(self, job: Job, call: ComparedCall, checked: _Checked) -> Judgement:
        if checked.kind.writes:
            return self._written(job, call, checked.kind)
        kind, region, live = checked.kind, call.region, job.live
        moves = kind.judgement is not None and checked.key not in self._moves_only_forward
        copier = None if moves else _copier(region, region.grad_enabled)
        source = _source(call, *map_tensors((live.args, live.kwargs), _held()))
        with _plain_region(region, region.grad_enabled):
            copied = (source.args, source.kwargs)
            if copier is not None:
                copied = copier.copy(copied, source.tensors)
            args, kwargs = facts.adapt(call.op, *copied)
            outputs = call.function(*args, **kwargs)
        if kind.judgement is not None:
            if not same_leaves(live.result, outputs, _same_leaf):
                raise on_device.Unresolved
            judgement = kind.judgement
        else:
            exact = map_tensors(outputs, Tensor.detach)
            result = GoldenResult(True, "", source, DOUBLE, Run(exact, source.args, source.kwargs))
            judgement = self._judged(live.result, exact, result, "output", kind.structures[0])
        if region.grad_enabled and any(t.requires_grad for t in tensors_in(outputs)):
            checked.keep(source, copier, outputs)
        return judgement

    def _written(self, job: Job, call: ComparedCall, kind: Kind) -> Judgement:
        """The judgement on a call that wrote to its arguments, of which there is a snapshot."""
        assert call.before is not None
        args, kwargs = call.before.tensors()
        live = job.live
        with _plain_region(call.region, grad=False):
            wide_args, wide_kwargs = facts.adapt(call.op, *_copier(call.region, False).copy((args, kwargs)))
            outputs = call.function(*wide_args, **wide_kwargs)
        result = GoldenResult(True, "", _source(call, args, kwargs), DOUBLE, Run(outputs, wide_args, wide_kwargs))
        after, expected = compared_arguments(live.args, live.kwargs), compared_arguments(wide_args, wide_kwargs)
        of_inputs, of_outputs = kind.structures
        judgement = self._judged(after, expected, result, "input", of_inputs)
        return judgement + self._judged(live.result, outputs, result, "output", of_outputs)

    def _backward(self, job: Job, call: ComparedCall, checked: _Checked) -> Judgement | None:
        kind = self._kinds.get((checked.key, job.grad_kind))
        source = checked.source
        assert job.grads is not None
        assert source is not None
        if kind is None:
            return None
        if kind.judgement is None and checked.copier is None:
            self._moves_only_forward.add(checked.key)  # later ones are kept in float64
            return None
        sent, found = job.grads
        source = dataclasses.replace(source, grad_outputs=[None if g is None else g.detach() for g in sent])
        pairs = [
            (output, grad.detach().to(output.dtype))
            for output, grad in zip(tensors_in(checked.outputs), sent)
            if output.requires_grad and grad is not None
        ]
        leaves = checked.leaves
        unique = list({id(leaf): leaf for leaf in leaves if leaf is not None}.values())
        with _plain_region(call.region, grad=True):
            grads = golden.differentiated([p[0] for p in pairs], unique, [p[1] for p in pairs], keep=True)
        by_leaf = {id(leaf): grad for leaf, grad in zip(unique, grads)}
        expected = asked([None if leaf is None else by_leaf[id(leaf)] for leaf in leaves], job.unasked)
        if kind.judgement is not None:
            return kind.judgement if same_leaves(found, expected, _same_leaf) else None
        result = GoldenResult(True, "", source, DOUBLE, Run(None, source.args, source.kwargs, expected))
        numbers = self._numbering.of(call.op, call.numbers[0], source.args, source.kwargs)
        judged = self._judged(list(found), expected, result, "grad_input", kind.structures[0], numbers.indices)
        return Judgement(RIGHT, "", verdict.gradient_rows(call.op, judged.rows, numbers))

    def _judged(
        self,
        ours: Any,
        theirs: Any,
        result: GoldenResult,
        part: str,
        structure: uncertainty.Structure,
        indices: Sequence[int | None] | None = None,
    ) -> Judgement:
        needs = self._needs.setdefault((part, id(structure)), set())  # which lives as long as its kind
        name, rules = result.source.name, self.setup.rules
        return on_device.judge_on_device(name, ours, theirs, result, part, rules, structure, needs, indices)

    def _reserve(self, device: torch.device, nbytes: int) -> Reservation | None:
        if self._budget is None:
            self._budget = MemoryBudget(_free_memory(device) // _SHARE)
        return self._budget.reserve(nbytes)

    def summary(self) -> list[str]:
        if not self.settled and not self.passed_on:
            return []
        return [
            f"{self.settled} settled on the device in float64, as calls like them were right on the CPU; "
            f"{self.passed_on} more were passed on to the CPU"
        ]


def _copier(region: Region, grad: bool) -> Copier:
    """For copies in float64 where the tensors are."""
    return Copier(None, DOUBLE, rounded_to=region.rounded_to, grad=grad, own_memory=True)


def _source(call: ComparedCall, args: Any, kwargs: Any) -> Source:
    region = call.region
    numerics = (region.device, region.rounded_to, region.autocast)
    return Source(call.function, call.op, call.traits, args, kwargs, None, *numerics)


def _held() -> Callable[[Tensor], Tensor]:
    """Tensors that do not change with those of the training, except in place."""
    made: dict[int, Tensor] = {}

    def hold(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    return hold


@contextlib.contextmanager
def _plain_region(region: Region, grad: bool) -> Any:
    autocast = region.autocast is not None
    with golden.neutral(grad), torch.autocast(region.device, enabled=False) if autocast else contextlib.nullcontext():
        yield


def _may_be_checked(call: Any, result: GoldenResult) -> bool:
    source, traits, grad_enabled = result.source, call.traits, call.region.grad_enabled
    if not all(call.numbers) or not result.comparable or result.note or dict(result.cast) != DOUBLE:
        return False
    if source.draws is not None or traits.collective or traits.factory or source.kwargs.get("out") is not None:
        return False
    if traits.mutates:
        if not source.tensors or (grad_enabled and any(t.requires_grad for t in source.tensors)):
            return False
    elif source.may_mutate:
        return False
    if "as_strided" in source.name:  # looks at what lies between the elements
        return False
    if facts.has_free_vectors(source.name) or facts.on_cpu(source.name, source.function) is not source.function:
        return False
    if any(isinstance(v, (torch.dtype, torch.device)) for v in (*source.args, *source.kwargs.values())):
        return False
    # where indices decide, another dtype takes the same way through the kernel: no second opinion
    return all(is_plain(t) and not t.is_complex() and t.dtype in DOUBLE for t in source.tensors)


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or (a.dtype != b.dtype and b.dtype != torch.float64):
            return False
        if a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
            return True  # a view: there is one set of values
        return torch.equal(a.to(b.dtype), b)
    return a is None and b is None


@functools.cache
def has_double(device: torch.device) -> bool:
    """Whether a device computes in float64 (`has_double(torch.device("cuda", 0))`)."""
    try:
        with quiet():
            x = torch.ones(2, 2, dtype=torch.float64, device=device)
            return float((x @ x + 2.0**-40).sum().cpu()) == 8.0 + 2.0**-38
    except Exception:
        return False


def _free_memory(device: torch.device) -> int:
    try:
        return int(module_of(device.type).mem_get_info(device)[0])
    except Exception:
        return _SHARE * _WHERE_UNKNOWN
