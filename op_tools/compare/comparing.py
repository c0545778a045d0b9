"""One call, as the device did it, against the golden run: all on the host, wherever that is done.

A `Comparer` remembers what it has learned of calls that look alike. Threads of the run share one; each of the
processes that help has its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch

from ..call import facts
from ..call.description import Tensor, map_tensors, tensors_in
from ..call.traits import OpTraits
from ..compat import conj_view, neg_view
from ..copies.operands import Ref, Whole, map_leaves
from ..judge import golden, verdict
from ..judge.golden import GoldenResult
from ..judge.verdict import NOT_COMPARABLE, RIGHT, Judgement, Row, Rules
from . import cores, pieces
from .precheck import Room, Taken, compared, gradient_labels

_MOST_KINDS: Final = 20_000
_LONGEST_WAIT: Final = 60.0  # seconds


class _Kept(NamedTuple):
    """A golden forward pass that waits for its backward, and the room it takes."""

    result: GoldenResult
    room: Taken


@dataclasses.dataclass
class Memory:
    """What the comparison of a call leaves for that of its backward."""

    kept: _Kept | None = None
    returned: Any = None  # what the device returned, where signs are free
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    lock: Any = dataclasses.field(default_factory=threading.Lock)

    def take(self) -> _Kept | None:
        """The golden forward pass, for one backward alone."""
        with self.lock:
            kept, self.kept = self.kept, None
        return kept


@dataclasses.dataclass
class Comparison:
    """A call on the host, and what comes out of comparing it."""

    phase: str
    op: str
    function: Callable[..., Any]
    traits: OpTraits
    device: str
    numbers: tuple[int, int]  # of the descriptions of arguments and results; zero where there is none
    args: tuple[Any, ...]  # as they were before the call
    kwargs: dict[str, Any]
    host: dict[str, Any]  # args, kwargs and result afterwards, or grad_outputs and grad_inputs
    nbytes: int
    rounded_to: torch.dtype | None = None
    autocast: torch.dtype | None = None
    grad_enabled: bool = True
    memory: Memory | None = None  # of a forward: None where no backward can follow
    piece: bool = False  # of a larger comparison
    # what came out
    judgement: Judgement | None = None
    result: GoldenResult | None = None
    moves: bool = False  # values, and does nothing else


@dataclasses.dataclass
class Comparer:
    """Compares calls; several threads may ask at once.

    >>> Comparer(Rules()).compare(comparison)  # doctest: +SKIP
    >>> comparison.judgement.verdict           # doctest: +SKIP
    'right'
    """

    rules: Rules
    room: Room = dataclasses.field(default_factory=lambda: Room(1 << 28))  # for golden runs that wait for a backward
    max_bytes: int = 8 * 2**30
    max_seconds: float = 10.0
    threads: int = 1  # for calls that are compared in pieces
    whole: bool = False  # every call is looked at in full: both sides are to be shown, or to be learned from

    def __post_init__(self) -> None:
        self._casts: dict[str, dict[torch.dtype, torch.dtype] | None] = {}
        self._moves: dict[Hashable, Judgement | None] = {}  # kinds of calls: what is found where they only move values
        self._unchanged_rows: dict[Hashable, tuple[Row, ...]] = {}

    def compare(self, call: Comparison, shown: bool = False) -> Judgement:
        """Fill in the judgement, and the golden result unless the call needed none; `shown` ones always have it."""
        try:
            return self._compare(call, shown)
        finally:
            if call.memory is not None:
                call.memory.done.set()

    def _compare(self, call: Comparison, shown: bool) -> Judgement:
        kind = None if shown else self._kind(call)
        known = self._moves.get(kind) if kind is not None else None
        if known is not None and self._moved_as_before(call):
            call.judgement, call.moves = known, True
            return known
        found = None if shown or self.whole else self._in_pieces(call)
        if found is not None:
            call.judgement = found
            return found
        call.result = result = self._golden(call, call.args, call.kwargs)
        if call.phase == "backward":
            found = self._judge_backward(call, result)
        else:
            if call.memory is not None and facts.has_free_vectors(call.op):
                call.memory.returned = map_tensors(call.host["result"], lambda t: t.clone())
            found = self._judge_forward(call, result)
        call.judgement = found
        if kind is not None:
            if kind not in self._moves and len(self._moves) < _MOST_KINDS:
                self._moves[kind] = found if _only_moves(call, result, found) else None
            call.moves = self._moves.get(kind) is not None
        return found

    def cast(self, op: str) -> dict[torch.dtype, torch.dtype] | None:
        """The dtypes that users want an operator's golden run to have (`comparer.cast("torch.add") is None`)."""
        if op not in self._casts:
            self._casts[op] = golden.casts_of(op)
        return self._casts[op]

    # -- the golden run -------------------------------------------------------------------------------

    def _golden(self, call: Comparison, args: Any, kwargs: Any) -> GoldenResult:
        """The golden run, or its backward alone where the forward pass was kept."""
        memory, backward = call.memory, call.phase == "backward"
        sent: Any = call.host["grad_outputs"] if backward else None
        returned = None
        if backward and memory is not None:
            if facts.has_free_vectors(call.op):
                memory.done.wait(_LONGEST_WAIT)  # another thread may still be at its forward
            returned = memory.returned
            kept = memory.take()
            if kept is not None:
                return golden.backward(kept.result, sent, returned)
        keeps = not backward and memory is not None and call.grad_enabled
        room = self.room.take(4 * call.nbytes) if keeps else None  # arguments and results in double precision
        result = golden.run(
            call.function,
            args,
            kwargs,
            dtype_cast=self.cast(call.op),
            grad_outputs=sent,
            name=call.op,
            traits=call.traits,
            device=call.device,
            rounded_to=call.rounded_to,
            autocast=call.autocast,
            max_bytes=self.max_bytes,
            keep_graph=room is not None,
            outputs=returned,
        )
        if room is not None and result.graph is not None and memory is not None:
            memory.kept = _Kept(dataclasses.replace(result), room)
            result.graph = None
        return result

    def _in_pieces(self, call: Comparison) -> Judgement | None:
        """What is found in a large call on lists, piece by piece; None where it must be looked at as a whole."""
        if call.phase != "forward" or call.nbytes < pieces.WORTH_IT:
            return None
        if call.memory is not None and call.grad_enabled:  # its backward needs the golden run of the whole
            return None
        host = call.host
        sides = pieces.Sides(tuple(call.args), tuple(host["args"]), host["result"])
        found = pieces.pieces(call.op, sides, call.kwargs)
        if not found:
            return None

        def judge(piece: pieces.Piece) -> Judgement:
            before, after, result = piece.sides
            part = dataclasses.replace(call, host={**host, "args": after, "result": result}, piece=True)
            return self._judge_forward(part, self._golden(part, before, call.kwargs))

        judged = cores.side_by_side(judge, found, self.threads)
        if any(judgement.verdict != RIGHT for judgement in judged):
            return None  # it is to be saved and shown with all that belongs to it
        return pieces.together(call.op, list(zip(found, judged)))

    # -- calls that only move values ------------------------------------------------------------------

    def _kind(self, call: Comparison) -> Hashable:
        """The same for comparisons that look the same; None where that cannot be said."""
        if not all(call.numbers) or call.piece or self.cast(call.op) is not None:
            return None
        key = (call.op, *call.numbers, call.autocast)
        if call.phase == "forward":
            return key
        grads = (*call.host["grad_outputs"], *call.host["grad_inputs"])
        return (*key, tuple([None if g is None else (g.shape, g.stride(), g.dtype) for g in grads]))

    def _moved_as_before(self, call: Comparison) -> bool:
        """Whether the device moved the same values to the same places as the CPU does, in its own dtype."""
        host, backward = call.host, call.phase == "backward"
        try:
            sent = host["grad_outputs"] if backward else None
            outputs, grads = golden.as_is(call.function, call.op, call.args, call.kwargs, sent)
        except Exception:  # then it is looked at closely
            return False
        if backward:
            return _same(host["grad_inputs"], grads)
        unchanged = _same(compared(host["args"], host["kwargs"]), compared(call.args, call.kwargs))
        return unchanged and _same(host["result"], outputs)

    # -- judging --------------------------------------------------------------------------------------

    def _judge_forward(self, call: Comparison, result: GoldenResult) -> Judgement:
        name, host = call.op, call.host
        if not result.comparable:
            return verdict.judge_call(name, result, outputs=host["result"], rules=self.rules)
        options: dict[str, Any] = {"result": result, "rules": self.rules, "max_seconds": self.max_seconds}
        inputs = self._judge_inputs(call, result, options)
        return inputs + verdict.judge(name, host["result"], result.outputs, part="output", **options)

    def _judge_inputs(self, call: Comparison, result: GoldenResult, options: dict[str, Any]) -> Judgement:
        """Arguments after the call: unchanged ones need no more than a look at their bits."""
        name, source = call.op, result.source
        ours, earlier = compared(call.host["args"], call.host["kwargs"]), compared(source.args, source.kwargs)
        theirs = compared(*result.inputs_after)
        if len(ours) != len(theirs) or not _unchanged(ours, earlier) or _wrote(result):
            return verdict.judge(name, ours, theirs, part="input", **options)
        key = self._kind(call)
        rows = self._unchanged_rows.get(key) if key is not None else None
        if rows is None:
            rows = self._rows_of_unchanged(name, list(verdict.leaves_of(ours)), list(verdict.leaves_of(theirs)))
            if key is not None and len(self._unchanged_rows) < _MOST_KINDS:
                self._unchanged_rows[key] = rows
        return Judgement(RIGHT, "", rows)

    def _rows_of_unchanged(self, name: str, leaves: list[Any], references: list[Any]) -> tuple[Row, ...]:
        rows = []
        for number, leaf in enumerate(leaves):
            label = f"{name} input" if len(leaves) == 1 else f"{name} input[{number}]"
            rows.append(self._same_row(name, label, leaf, references[number] if number < len(references) else None))
        return tuple(rows)

    def _same_row(self, name: str, label: str, leaf: Any, reference: Any) -> Row:
        dtype = leaf.dtype if isinstance(leaf, Tensor) else None
        number = isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)
        if dtype is None and not number:
            return Row(label, True, 0.0, 0.0, 0.0, 0.0, "", cosine=1.0)
        atol, rtol, _ = self.rules.tolerance(name, dtype)
        info = ""
        if dtype is not None and isinstance(reference, Tensor) and reference.dtype != dtype:
            info = f"Inconsistent dtypes: {dtype} {reference.dtype}"
        return Row(label, True, 0.0, 0.0, atol, rtol, info, cosine=1.0)

    def _judge_backward(self, call: Comparison, result: GoldenResult) -> Judgement:
        name = call.op
        if not result.comparable:
            return Judgement(NOT_COMPARABLE, result.reason)
        if facts.has_free_vectors(name) and result.source.outputs is None:
            return Judgement(NOT_COMPARABLE, "which signs the vectors had on the device is not known")
        expected = result.grad_inputs or []
        found = call.host["grad_inputs"]
        labels, present = gradient_labels(name, found, expected)
        judged = verdict.judge(
            name,
            found,
            expected,
            result=result,
            part="grad_input",
            rules=self.rules,
            max_seconds=self.max_seconds,
            labels=labels if len(found) == len(expected) else None,
        )
        rows = tuple(itertools.compress(judged.rows, present)) if len(judged.rows) == len(present) else judged.rows
        return Judgement(judged.verdict, judged.reason, rows, judged.probes)


def rebuilt(tree: Any, flats: Sequence[Tensor]) -> Any:
    """Tensors again, from a staged tree and the bytes of its storages, wherever these lie."""
    typed: dict[tuple[int, torch.dtype], Tensor] = {}

    def make(leaf: Any) -> Any:
        if type(leaf) is not Ref:
            return leaf.copy.cpu().requires_grad_(leaf.requires_grad) if isinstance(leaf, Whole) else leaf
        base = typed.get((leaf.storage, leaf.dtype))
        if base is None:
            flat = flats[leaf.storage]
            rest = flat.numel() % leaf.dtype.itemsize
            base = (flat[:-rest] if rest else flat).view(leaf.dtype)
            typed[(leaf.storage, leaf.dtype)] = base
        tensor = base.as_strided(leaf.shape, leaf.stride, base.storage_offset() + leaf.offset)
        if leaf.conjugated:
            tensor = conj_view(tensor)
        if leaf.negated:
            tensor = neg_view(tensor)
        return tensor.requires_grad_() if leaf.requires_grad else tensor

    return map_leaves(tree, make)


def _only_moves(call: Comparison, result: GoldenResult, judgement: Judgement) -> bool:
    """Whether a call like this one moves values about and nothing else, as its golden run has shown."""
    if judgement.verdict != RIGHT or not result.comparable or result.note or _wrote(result):
        return False
    if any(row.max_abs_diff or row.max_ulp for row in judgement.rows):
        return False
    part = "grad_input" if call.phase == "backward" else "output"
    return verdict.only_moves(result, part)


def _unchanged(after: Iterable[Any], before: Iterable[Any]) -> bool:
    ours, earlier = list(tensors_in(after)), list(tensors_in(before))
    return len(ours) == len(earlier) and all(map(_same_bits, ours, earlier))


def _same(ours: Any, theirs: Any) -> bool:
    """Whether two trees are the same in every shape, dtype and value."""
    left, right = list(verdict.leaves_of(ours)), list(verdict.leaves_of(theirs))
    return len(left) == len(right) and all(map(_same_leaf, left, right))


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _equal(a, b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return type(a) is type(b) and (a == b or not isinstance(a, (int, float, complex, str, tuple)))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != torch.strided or b.layout != torch.strided:
        return False
    if _equal(a, b):
        return True
    if a.dtype == torch.complex32:
        a, b = _as_real(a), _as_real(b)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.dtype == torch.complex32:  # for which the CPU has no such kernel
        a, b = _as_real(a), _as_real(b)
    return torch.equal(a, b)


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj().resolve_neg())


def _wrote(result: GoldenResult) -> bool:
    """Whether the golden run changed its arguments."""
    source = result.source
    return bool(source.traits.mutates) or facts.may_mutate(source.name, source.kwargs)
