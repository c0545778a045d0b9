"""Results of the wrong shape, dtype or strides, or in the wrong memory: asked once for calls that look alike."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Final

from ..call import facts
from ..call.functions import function_of
from ..judge import kinds
from ..judge.verdict import WRONG, Judgement, Row
from .ladder import ComparedCall, Job

_MAX_KINDS: Final = 20_000
NOTE: Final = "look"  # among the notes of a call: what is wrong about its result, apart from values


class Looks:
    """Looks at the results of calls on the run's thread, where they lie in the run's own memory.

    >>> Looks().accuses(job, ("torch.add", 1, 2, None))  # doctest: +SKIP
    False
    """

    def __init__(self) -> None:
        self.fine: set[Hashable] = (
            set()
        )  # kinds of calls that need not be asked about, operator, looks of arguments and results, autocast
        self._wrong: dict[Hashable, str] = {}

    def accuses(self, job: Job, kind: Hashable) -> bool:
        """Whether something is wrong about the result of a forward; the reason is among the notes of its call."""
        call = job.call
        assert isinstance(call, ComparedCall)
        reason = self._wrong.get(kind)
        if reason is None:
            reason = self._problem(call, job)
            if len(self.fine) + len(self._wrong) < _MAX_KINDS and all(call.numbers):
                self._wrong.update({kind: reason} if reason else {})
                self.fine.update(() if reason else (kind,))
        if reason:
            call.notes[NOTE] = reason
        return bool(reason)

    def _problem(self, call: ComparedCall, job: Job) -> str:
        live, traits = job.live, call.traits
        if call.region.autocast is not None or traits.mutates or traits.random or traits.by_engine:
            return ""
        if facts.may_mutate(call.op, live.kwargs):
            return ""
        try:
            if not call.op.startswith("torch.") or function_of(call.op) != call.function:
                return ""  # one of the user's may do anything
            wanted = kinds.expected(call.function, live.args, live.kwargs)
            return kinds.problem(call.op, wanted, live.result, (live.args, live.kwargs)) if wanted else ""
        except Exception:  # tensors of an odd kind: their values are compared all the same
            return ""


def judgement(call: ComparedCall) -> Judgement:
    """What was found about the look of a result, where there is a note of it (`judgement(call)`)."""
    reason: str = call.notes.pop(NOTE)
    row = Row(call.op, "output", None, False, math.inf, math.inf, 0, 0, reason, verdict=WRONG, reason=reason)
    return Judgement(WRONG, f"{call.op} output: {reason}", (row,))
