"""A first look on the device: the same call once more in float64, right where its tensors are.

Most calls of a training look like earlier ones. The first of each kind is compared with the CPU in full; later ones
are run again by the device itself in double precision, by other kernels, and nothing leaves it but a few numbers.
Whatever that does not settle as right goes to the CPU like the first one: this look never calls a result wrong. Calls
that take indices always go to the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final

import torch

from ..call import facts
from ..call.description import Tensor, map_tensors, tensors_in
from ..call.devices import module_of, quiet
from ..copies.operands import is_plain
from ..judge import golden, uncertainty, verdict
from ..judge.golden import AS_IS, DOUBLE, GoldenResult, Run, Source
from ..judge.verdict import RIGHT, Judgement, Rules
from ..watch.intercept import Call

_MOST_KINDS: Final = 20_000
_SHARE: Final = 8  # of the free memory of a device that is used to keep calls for their backward
_WHERE_UNKNOWN: Final = 1 << 28


@dataclasses.dataclass(frozen=True)
class Kind:
    """Calls that look alike, one of which was compared with the CPU and was right."""

    outputs: int  # number of the description of the results
    structures: tuple[uncertainty.Structure, ...] = ()  # of each part that is judged
    judgement: Judgement | None = None  # of calls that only move values: what is found each time
    writes: bool = False  # to its arguments


class Room:
    """Memory of a device that calls in float64 may take; what was taken is free again when it is let go."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self._lock = threading.RLock()  # letting go may happen at any time, also in between

    def take(self, nbytes: int) -> Taken | None:
        """Some of it, or None where it is not there (`Room(10).take(20) is None`)."""
        with self._lock:
            if nbytes > self.left:
                return None
            self.left -= nbytes
            return Taken(self, nbytes)

    def _give(self, nbytes: int) -> None:
        with self._lock:
            self.left += nbytes


class Taken:
    """Some room."""

    __slots__ = ("_nbytes", "_room")

    def __init__(self, room: Room, nbytes: int) -> None:
        self._room, self._nbytes = room, nbytes

    def __del__(self) -> None:
        self._room._give(self._nbytes)


@dataclasses.dataclass
class Question:
    """A call that is about to be looked at: what is known of its kind, and of the region it is in."""

    kind: Kind
    key: Hashable
    device: str
    room: Taken | None  # to keep it for its backward
    rounded_to: torch.dtype | None = None
    autocast: torch.dtype | None = None
    grad_enabled: bool = True


class Kept:
    """A call in float64 that waits for its backward."""

    def __init__(self, question: Question, source: Source, copies: _Copies, outputs: Any) -> None:
        self.question, self.source = question, source
        self.copies, self.outputs = copies, outputs
        self._versions = [t._version for t in source.tensors]

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments as they were; None where they are lost."""
        if self._versions == [t._version for t in self.source.tensors]:
            return self.source.args, self.source.kwargs
        narrow = self.copies.narrowed()
        if narrow is None:
            return None
        args, kwargs = map_tensors((self.source.args, self.source.kwargs), narrow)
        return args, kwargs


class FirstLook:
    """Answers for calls whose kind is known; None is "ask the CPU".

    >>> look = FirstLook(Rules())
    >>> look.question(call, None, True) is None  # nothing is known yet  # doctest: +SKIP
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._kinds: dict[Hashable, Kind] = {}
        self._needs: dict[tuple[str, int], set[int]] = {}
        self._moves_only_forward: set[Hashable] = set()  # and sums in its backward, as an embedding
        self._room: Room | None = None
        self._lock = threading.Lock()
        self.settled = self.passed_on = 0

    # -- what is known ------------------------------------------------------------------------------------

    def question(self, call: Call, autocast: torch.dtype | None, grad_enabled: bool) -> Question | None:
        """What to ask about a call that is to come; None where it must be asked of the CPU."""
        key = _key(call, autocast, grad_enabled)
        kind = self._kinds.get(key) if key is not None else None
        if kind is None:
            return None
        room = None
        if grad_enabled and not kind.writes:
            room = self._taken(call.device, 24 * sum([t.numel() for t in call.tensors]))
            if room is None:
                return None
        return Question(kind, key, call.device.type, room, None, autocast, grad_enabled)

    def learn(
        self, call: Call, result: GoldenResult, judgement: Judgement, grad_enabled: bool, moves: bool, looks: Any = None
    ) -> None:
        """A call was compared with the CPU: later ones like it may be looked at. `looks` are those of the gradients."""
        key = _key(call, result.source.autocast, grad_enabled)
        if key is None or judgement.verdict != RIGHT or len(self._kinds) >= _MOST_KINDS:
            return
        if looks is not None:
            key = (key, looks)
        if key in self._kinds or not _may_be_looked_at(call, result, grad_enabled) or not has_double(call.device):
            return
        if moves:
            self._kinds[key] = Kind(call.outputs.number, judgement=judgement)
            return
        writes = bool(call.traits.mutates)
        parts = ("grad_input",) if looks is not None else ("input", "output") if writes else ("output",)
        found = [verdict.structure_of(result, part) for part in parts]
        structures = tuple([s for s in found if s is not None])
        # where the structure depends on values, that of another call says nothing
        if len(structures) == len(parts) and all(uncertainty.remembers(result, part) for part in parts):
            self._kinds[key] = Kind(call.outputs.number, structures, writes=writes)

    # -- looking ------------------------------------------------------------------------------------------

    def forward(
        self, question: Question, call: Call, function: Callable[..., Any]
    ) -> tuple[Judgement, Kept | None] | None:
        """The judgement on a call that has just been made, and what its backward will need."""
        found = None
        if call.outputs.number == question.kind.outputs:
            with contextlib.suppress(Exception), quiet():
                found = self._forward(question, call, function)
        self._count(found)
        if found is None or found[1] is None:
            question.room = None
        return found

    def written(
        self, question: Question, call: Call, function: Callable[..., Any], arguments: tuple[Any, Any]
    ) -> Judgement | None:
        """The judgement on a call that wrote to its arguments; these are what they were before."""
        found = None
        if call.outputs.number == question.kind.outputs:
            with contextlib.suppress(Exception), quiet():
                found = self._written(question, call, function, *arguments)
        self._count(found)
        return found

    def _written(self, question: Question, call: Call, function: Any, args: Any, kwargs: Any) -> Judgement:
        copies = _Copies(DOUBLE, question.rounded_to)
        settings = (None, question.device, question.rounded_to, question.autocast)
        source = Source(function, call.op, call.traits, args, kwargs, *settings)
        with _plain_region(question, grad=False):
            wide_args, wide_kwargs = facts.adapt(call.op, *map_tensors((args, kwargs), copies.of))
            outputs = function(*wide_args, **wide_kwargs)
        result = GoldenResult(True, "", source, DOUBLE, Run(outputs, wide_args, wide_kwargs))
        after, expected = compared(call.args, call.kwargs), compared(wide_args, wide_kwargs)
        of_inputs, of_outputs = question.kind.structures
        judgement = self._judged(call.op, after, expected, result, "input", of_inputs)
        return judgement + self._judged(call.op, call.result, outputs, result, "output", of_outputs)

    def _forward(self, question: Question, call: Call, function: Any) -> tuple[Judgement, Kept | None]:
        kind = question.kind
        moves = kind.judgement is not None and question.key not in self._moves_only_forward
        copies = _Copies(AS_IS if moves else DOUBLE, question.rounded_to)
        source = _source(question, call, function)
        with _plain_region(question, question.grad_enabled):
            args, kwargs = facts.adapt(call.op, *map_tensors((source.args, source.kwargs), copies.of))
            outputs = function(*args, **kwargs)
        if kind.judgement is not None:
            if not _same(call.result, outputs):
                raise verdict.Unresolved
            judgement = kind.judgement
        else:
            exact = map_tensors(outputs, Tensor.detach)
            result = GoldenResult(True, "", source, DOUBLE, Run(exact, source.args, source.kwargs))
            judgement = self._judged(call.op, call.result, exact, result, "output", kind.structures[0])
        gradients = question.grad_enabled and any(t.requires_grad for t in tensors_in(outputs))
        return judgement, Kept(question, source, copies, outputs) if gradients else None

    def backward(
        self, kept: Kept, sent: Sequence[Tensor | None], found: Sequence[Tensor | None], looks: Any
    ) -> Judgement | None:
        """The judgement on the gradients of a call that was kept."""
        judged = None
        kind = self._kinds.get((kept.question.key, looks))
        if kind is not None:
            with contextlib.suppress(Exception), quiet():
                judged = self._backward(kept, kind, sent, found)
        self._count(judged)
        return judged

    def _backward(
        self, kept: Kept, kind: Kind, sent: Sequence[Tensor | None], found: Sequence[Tensor | None]
    ) -> Judgement:
        if kind.judgement is None and kept.copies.as_they_are:
            self._moves_only_forward.add(kept.question.key)  # later ones are kept in float64
            raise verdict.Unresolved
        source = dataclasses.replace(kept.source, grad_outputs=[None if g is None else g.detach() for g in sent])
        pairs = [
            (output, grad.detach().to(output.dtype))
            for output, grad in zip(tensors_in(kept.outputs), sent)
            if output.requires_grad and grad is not None
        ]
        leaves = kept.copies.leaves
        unique = list({id(leaf): leaf for leaf in leaves if leaf is not None}.values())
        with _plain_region(kept.question, grad=True):
            grads = golden.differentiated([p[0] for p in pairs], unique, [p[1] for p in pairs], keep=True)
        by_leaf = {id(leaf): grad for leaf, grad in zip(unique, grads)}
        expected = [None if leaf is None else by_leaf[id(leaf)] for leaf in leaves]
        if kind.judgement is not None:
            if not _same(list(found), expected):
                raise verdict.Unresolved
            return kind.judgement
        result = GoldenResult(True, "", source, DOUBLE, Run(None, source.args, source.kwargs, expected))
        indices, present = gradient_indices(found, expected)
        judged = self._judged(source.name, list(found), expected, result, "grad_input", kind.structures[0], indices)
        return Judgement(RIGHT, "", tuple(itertools.compress(judged.rows, present)))

    def _judged(
        self,
        name: str,
        ours: Any,
        theirs: Any,
        result: GoldenResult,
        part: str,
        structure: uncertainty.Structure,
        indices: Sequence[int | None] | None = None,
    ) -> Judgement:
        needs = self._needs.setdefault((part, id(structure)), set())  # which lives as long as its kind
        return verdict.judge_on_device(name, ours, theirs, result, part, self._rules, structure, needs, indices)

    def _count(self, found: Any) -> None:
        with self._lock:
            if found is None:
                self.passed_on += 1
            else:
                self.settled += 1

    def _taken(self, device: torch.device, nbytes: int) -> Taken | None:
        if self._room is None:
            self._room = Room(_free_memory(device) // _SHARE)
        return self._room.take(nbytes)


class _Copies:
    """Arguments in float64, on their device; the same tensor given twice is one copy."""

    def __init__(self, cast: dict[torch.dtype, torch.dtype], rounded_to: torch.dtype | None) -> None:
        self._cast, self._rounded_to = cast, rounded_to
        self.as_they_are = not cast
        self._made: dict[int, Tensor] = {}
        self.leaves: list[Tensor | None] = []

    def of(self, tensor: Tensor) -> Tensor:
        copy = self._made.get(id(tensor))
        if copy is None:
            copy = self._made[id(tensor)] = self._copied(tensor)
        self.leaves.append(copy if copy.requires_grad else None)
        return copy

    def _copied(self, tensor: Tensor) -> Tensor:
        target = self._cast.get(tensor.dtype)
        plain = tensor.detach()
        if target is not None:
            if self._rounded_to is not None and tensor.dtype == torch.float32:
                plain = plain.to(self._rounded_to)
            plain = _as_it_lies(plain, target)
        if tensor.requires_grad and torch.is_grad_enabled():
            plain.requires_grad_()
        return plain

    def narrowed(self) -> Callable[[Tensor], Tensor] | None:
        """Takes the tensors that were copied back to what they were then; None where a copy does not tell."""
        if self._rounded_to is not None or self.as_they_are:
            return None
        return lambda t: self._made[id(t)].detach().to(t.dtype).requires_grad_(t.requires_grad)


def _as_it_lies(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In another dtype, with the same strides; numbers that are shared by several elements are so no more."""
    copy = tensor.to(dtype)
    if copy.stride() == tensor.stride() or any(s == 0 for s in tensor.stride()) or not tensor.numel():
        return copy
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device).copy_(copy)


def _source(question: Question, call: Call, function: Any) -> Source:
    """The call as it was: tensors that do not change with those of the training, except in place."""
    made: dict[int, Tensor] = {}

    def hold(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    args, kwargs = map_tensors((call.args, call.kwargs), hold)
    rounded_to, autocast = question.rounded_to, question.autocast
    return Source(function, call.op, call.traits, args, kwargs, None, question.device, rounded_to, autocast)


def gradient_indices(found: Sequence[Any], expected: Sequence[Any]) -> tuple[list[int | None], list[bool]]:
    """Indices of the rows of gradients, and which there are: arguments without gradients have none."""
    present = [g is not None or e is not None for g, e in zip(found, expected)]
    single, numbers = sum(present) == 1, itertools.count()
    return [None if single or not there else next(numbers) for there in present], present


@contextlib.contextmanager
def _plain_region(question: Question, grad: bool) -> Any:
    with golden.neutral(grad):
        if question.autocast is None:
            yield
        else:
            with torch.autocast(question.device, enabled=False):
                yield


def _key(call: Call, autocast: torch.dtype | None, grad_enabled: bool) -> Hashable:
    number = call.inputs.number
    return (call.op, number, autocast, grad_enabled) if number else None


def _may_be_looked_at(call: Call, result: GoldenResult, grad_enabled: bool) -> bool:
    source, traits = result.source, call.traits
    if not call.outputs.number or not result.comparable or result.note or dict(result.cast) != DOUBLE:
        return False
    if traits.collective or traits.factory or source.kwargs.get("out") is not None:
        return False
    if traits.mutates:
        if not source.tensors or (grad_enabled and any(t.requires_grad for t in source.tensors)):
            return False
    elif facts.may_mutate(source.name, source.kwargs):
        return False
    if "as_strided" in source.name:  # looks at what lies between the elements
        return False
    if facts.has_free_vectors(source.name):
        return False
    if facts.on_cpu(source.name, source.function) is not source.function or _names_a_dtype(source):
        return False
    return all(_may_be_copied(t) for t in source.tensors)


def _may_be_copied(tensor: Tensor) -> bool:
    # where indices decide, another dtype takes the same way through the kernel: no second opinion
    return is_plain(tensor) and not tensor.is_complex() and tensor.dtype in DOUBLE


def _names_a_dtype(source: Source) -> bool:
    return any(isinstance(v, (torch.dtype, torch.device)) for v in (*source.args, *source.kwargs.values()))


def compared(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Any]:
    """What is compared of the arguments: all positional ones, and tensors given by keyword (`compared((x,), {})`)."""
    return [*args, *tensors_in(kwargs)]


def _same(ours: Any, theirs: Any) -> bool:
    left, right = list(verdict.leaves_of(ours)), list(verdict.leaves_of(theirs))
    return len(left) == len(right) and all(map(_same_leaf, left, right))


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
