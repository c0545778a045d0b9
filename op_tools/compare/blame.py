"""Who is to blame: the lines at the end of a run that tell an error from its consequences."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .teller import Lineage

_CAUSE: Final = "with the same inputs the CPU computes a different result"


@dataclasses.dataclass(frozen=True)
class Blame:
    """One wrong event, with all that is needed to find it in the user's code.

    >>> Blame(7, 3, "torch.add", "forward", "out of bound", 9.0).where
    'call 3'
    """

    event: int
    call_id: int
    op: str
    phase: str
    reason: str
    excess: float
    location: str = ""
    module: str = ""
    step: int = 0
    folder: str = ""
    memory: bool = False  # it writes where it must not

    @property
    def where(self) -> str:
        """Call, step and module in words (`blame.where`)."""
        if not self.call_id:
            return "a copy that the tool made"
        parts = [f"call {self.call_id}"]
        if self.module:
            parts.insert(0, f"module {self.module}")
        if self.step:
            parts.append(f"step {self.step}")
        return ", ".join(parts)


def report(wrong: Sequence[Blame], lineage: Lineage, compared: Counter[str]) -> list[str]:
    """The lines at the end of a run: first wrong, largest error, causes (`report(blames, lineage, counts)`)."""
    if not wrong:
        return []
    ordered = sorted(wrong, key=lambda b: b.event)
    events = {b.event for b in ordered}
    first = ordered[0]
    lines = [f"first wrong: {first.op} ({first.phase}), {first.where}", *_details(first)]
    causes = lineage.ancestors_among(first.event, events)
    cause = "what the ranks sent gives another result" if first.op.startswith("torch.distributed.") else _CAUSE
    cause = "on the CPU it leaves that memory alone" if first.memory else cause
    lines.append(
        f"  root cause: {cause}"
        + ("; these inputs come from wrong results" if causes else "; nothing wrong went into them")
    )
    lines.append(f"  downstream calls affected: {lineage.reached_by(first.event)}")
    largest = max(ordered, key=lambda b: b.excess)
    if largest is not first:
        lines += [f"largest error: {largest.op} ({largest.phase}), {largest.where}", *_details(largest)]
        causes = lineage.ancestors_among(largest.event, events)
        if causes:
            origin = next(b for b in ordered if b.event == min(causes))
            if origin.call_id == largest.call_id:
                lines.append("  its own forward is wrong, and a backward may use what the forward left")
            else:
                lines.append(f"  wrong by itself, on inputs that come from {origin.op} (call {origin.call_id})")
    calls = Counter(b.op for b in ordered)
    shown = ", ".join(f"{op} {n} of {max(n, compared[op])}" for op, n in calls.most_common(5))
    lines.append(f"wrong by operator: {shown}")
    modules = Counter(b.module for b in ordered if b.module)
    if modules:
        lines.append("wrong by module: " + ", ".join(f"{m} {n}" for m, n in modules.most_common(8)))
    return lines


def _details(blame: Blame) -> list[str]:
    lines = [f"  {blame.location}"] if blame.location else []
    lines.append(f"  {blame.reason}")
    if blame.folder:
        lines.append(f"  reproduce it: python {blame.folder}/reproduce.py")
    return lines
