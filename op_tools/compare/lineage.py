"""Which comparison made the inputs of which: so an error is told from its consequences."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

_MAX_EVENTS: Final = 200_000
_MAX_ADDRESSES: Final = 50_000


class Lineage:
    """Which event made which value, for as many events as fit a fixed memory.

    >>> lineage = Lineage()
    >>> first = lineage.made_from([], [100])
    >>> second = lineage.made_from([100], [200])
    >>> lineage.ancestors_among(second, {first}) == {first}
    True
    """

    def __init__(self, most: int = _MAX_EVENTS) -> None:
        self._lock = threading.Lock()
        self._most = most
        self._maker: dict[int, int] = {}  # address -> event
        self._parents = array("i")  # of all events that are known, one after the other, counted from the first
        self._ends = array("i")  # of each event: where its parents end
        self._first = 0  # the first event that is known

    def made_from(self, inputs: Iterable[int], outputs: Iterable[int], also: Sequence[int] = ()) -> int:
        """Number a new event that read and wrote these addresses; `also` are events it follows from."""
        with self._lock:
            maker = self._maker
            if len(self._ends) >= self._most:  # a long run: what lies far back is forgotten
                self._forget(self._most // 2)
            event = self._first + len(self._ends)
            parents = {maker[p] for p in inputs if p in maker}.union(also)
            self._parents.extend([parent - self._first for parent in parents if parent >= self._first])
            self._ends.append(len(self._parents))
            for pointer in outputs:
                if pointer:
                    maker[pointer] = event
            if len(maker) > _MAX_ADDRESSES:  # those that were written to longest ago are free by now, most likely
                self._maker = dict(sorted(maker.items(), key=lambda item: item[1])[_MAX_ADDRESSES // 2 :])
        return event

    def _forget(self, count: int) -> None:
        start = self._ends[count - 1]
        self._parents = array("i", [parent - count for parent in self._parents[start:]])
        self._ends = array("i", [end - start for end in self._ends[count:]])
        self._first += count
        self._maker = {address: event for address, event in self._maker.items() if event >= self._first}

    def _parents_of(self, event: int) -> Sequence[int]:
        at = event - self._first
        if not 0 <= at < len(self._ends):
            return ()
        return [self._first + parent for parent in self._parents[self._ends[at - 1] if at else 0 : self._ends[at]]]

    def ancestors_among(self, event: int, wanted: set[int]) -> set[int]:
        """Which of the wanted events had a part in this one's inputs (`lineage.ancestors_among(e, wrong)`)."""
        if not wanted:
            return set()
        oldest, seen, stack = min(wanted), {event}, [event]
        with self._lock:
            while stack:
                new = [p for p in self._parents_of(stack.pop()) if p >= oldest and p not in seen]
                seen.update(new)
                stack += new
        return (seen - {event}) & wanted

    def reached_by(self, event: int) -> int:
        """How many later events used values that come from this one (`lineage.reached_by(event)`)."""
        reached = {event}
        with self._lock:
            for later in range(max(event + 1, self._first), self._first + len(self._ends)):
                if not reached.isdisjoint(self._parents_of(later)):
                    reached.add(later)
        return len(reached) - 1
