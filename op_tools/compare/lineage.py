"""Blame: the first wrong operator, whether its inputs were right, and what its error reached.

Every comparison is an event; forward and backward of a call are two. An event knows which earlier events made
the values that it used, so that errors can be told from their consequences.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterable, Sequence

_MOST_EVENTS = 400_000


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

    @property
    def where(self) -> str:
        """Call, step and module in words (`blame.where`)."""
        parts = [f"call {self.call_id}"]
        if self.module:
            parts.insert(0, f"module {self.module}")
        if self.step:
            parts.append(f"step {self.step}")
        return ", ".join(parts)


class Lineage:
    """Which event made which value, for as many events as fit a fixed memory.

    >>> lineage = Lineage()
    >>> first = lineage.made_from([], [100])
    >>> second = lineage.made_from([100], [200])
    >>> lineage.ancestors_among(second, {first}) == {first}
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maker: dict[int, int] = {}  # address -> event
        self._parents: dict[int, tuple[int, ...]] = {}
        self._next = 0

    def made_from(self, inputs: Iterable[int], outputs: Iterable[int], also: Sequence[int] = ()) -> int:
        """Number a new event that read and wrote these addresses; `also` are events it follows from."""
        with self._lock:
            event = self._next
            self._next += 1
            maker = self._maker
            if len(self._parents) >= _MOST_EVENTS:  # a long run: what lies far back is forgotten
                self._parents.clear()
                maker.clear()
            parents = {maker[p] for p in inputs if p in maker}
            parents.update(also)
            self._parents[event] = tuple(parents)
            for pointer in outputs:
                if pointer:
                    maker[pointer] = event
        return event

    def parents(self, event: int) -> tuple[int, ...]:
        """The events whose values this one used directly (`lineage.parents(event)`)."""
        return self._parents.get(event, ())

    def ancestors_among(self, event: int, wanted: set[int]) -> set[int]:
        """Which of the wanted events had a part in this one's inputs (`lineage.ancestors_among(e, wrong)`)."""
        if not wanted:
            return set()
        oldest = min(wanted)
        seen, stack, found = {event}, list(self.parents(event)), set()
        while stack:
            one = stack.pop()
            if one in seen or one < oldest:
                continue
            seen.add(one)
            if one in wanted:
                found.add(one)
            stack.extend(self.parents(one))
        return found

    def reached_by(self, event: int) -> int:
        """How many later events used values that come from this one (`lineage.reached_by(event)`)."""
        reached = {event}
        for later, parents in self._parents.items():
            if later > event and any(p in reached for p in parents):
                reached.add(later)
        return len(reached) - 1


def report(wrong: Sequence[Blame], lineage: Lineage, compared: Counter[str]) -> list[str]:
    """The lines at the end of a run: first wrong, largest error, causes (`report(blames, lineage, counts)`)."""
    if not wrong:
        return []
    ordered = sorted(wrong, key=lambda b: b.event)
    events = {b.event for b in ordered}
    first = ordered[0]
    lines = [f"first wrong: {first.op} ({first.phase}), {first.where}", *_details(first)]
    causes = lineage.ancestors_among(first.event, events)
    lines.append(
        "  root cause: with the same inputs the CPU computes a different result"
        + ("; these inputs come from wrong results" if causes else "; nothing wrong went into them")
    )
    lines.append(f"  downstream calls affected: {lineage.reached_by(first.event)}")
    largest = max(ordered, key=lambda b: b.excess)
    if largest is not first:
        lines += [f"largest error: {largest.op} ({largest.phase}), {largest.where}", *_details(largest)]
        causes = lineage.ancestors_among(largest.event, events)
        if causes:
            origin = next(b for b in ordered if b.event == min(causes))
            lines.append(f"  wrong by itself, on inputs that come from {origin.op} (call {origin.call_id})")
    calls = Counter(b.op for b in ordered)
    shown = ", ".join(f"{op} {n} of {compared[op]}" for op, n in calls.most_common(5))
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
