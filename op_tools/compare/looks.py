"""Results of the wrong shape, dtype or strides, or in the wrong memory: asked once for calls that look alike."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Any, Final

from ..call import facts
from ..call.functions import function_of
from ..copies.operands import Operands, Ref
from ..judge import golden, kinds
from ..judge.verdict import WRONG, Judgement, Row
from .ladder import Job

_MAX_KINDS: Final = 20_000
_MAX_UNNAMED: Final = 16
_MAX_BYTES: Final = 1 << 26  # of arguments and results: the CPU does such a call once more


class Looks:
    """Looks at the results of forward calls, apart from their values.

    >>> Looks().judge(job, ("torch.add", 1, 2, None))  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.fine: set[Hashable] = set()  # kinds of calls that need not be asked about
        self._unnamed: dict[str, int] = {}  # calls without a kind (their result is a named tuple) by operator

    def wanted(self, op: str) -> bool:
        """Whether to look at a call that has no kind: the first few of an operator."""
        self._unnamed[op] = self._unnamed.get(op, 0) + 1
        return self._unnamed[op] <= _MAX_UNNAMED

    def judge(self, job: Job, kind: Hashable) -> Judgement | None:
        """What is wrong about the result, if something is."""
        reason = self._problem(job)
        if not reason:
            if kind is not None and len(self.fine) < _MAX_KINDS:
                self.fine.add(kind)
            return None
        op = job.call.op
        row = Row(op, "output", None, False, math.inf, math.inf, 0, 0, reason, verdict=WRONG, reason=reason)
        return Judgement(WRONG, f"{op} output: {reason}", (row,))

    def _problem(self, job: Job) -> str:
        call, traits = job.call, job.call.traits
        if call.region.autocast is not None or traits.mutates or traits.random is not False or traits.by_engine:
            return ""
        if job.nbytes > _MAX_BYTES or job.values[0] is None or facts.may_mutate(call.op, job.kwargs):
            return ""
        try:
            if not call.op.startswith("torch.") or function_of(call.op) != call.function:
                return ""  # one of the user's may do anything
            expected, _ = golden.run_as_is(call.function, call.op, job.args, job.kwargs)
            wanted = kinds.kinds_of(expected, kinds.borrowed((job.args, job.kwargs), expected))
            problem = kinds.problem(call.op, kinds.kinds_of(job.values[2], _borrowed(job.snapshot)), wanted)
            return problem or kinds.shared(_places(job.snapshot), kinds.places(expected))
        except Exception:  # the CPU refuses it, or tensors of an odd kind: their values are compared all the same
            return ""


def _borrowed(snapshot: Operands | None) -> Iterator[bool | None]:
    """Of each result in a snapshot, whether it lies in the storage of an argument; None, without end, if unknown."""
    if snapshot is not None:
        given, named, result = snapshot.tree
        owners = {ref.storage for ref in _refs((given, named))}
        for ref in _refs(result):
            yield ref.storage in owners if math.prod(ref.shape) else None
    while True:
        yield None


def _places(snapshot: Operands | None) -> list[Hashable]:
    """Where the first element of each result in a snapshot lies; nothing if unknown."""
    refs = _refs(snapshot.tree[2]) if snapshot is not None else ()
    return [(ref.storage, ref.offset) if math.prod(ref.shape) else None for ref in refs]


def _refs(tree: Any) -> Iterator[Ref]:
    if isinstance(tree, Ref):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for member in tree:
            yield from _refs(member)
    elif isinstance(tree, dict):
        yield from _refs(list(tree.values()))
