"""What is remembered of things that look alike: as much as has room, and what is used stays."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
_NOTHING: Final[Any] = object()


class Recent(Generic[K, V]):
    """A dict of bounded size. When it is full, what was not used since the last time is forgotten.

    A training that gives other numbers to a call in every step makes new entries without end; each of them is used
    once. They must neither pile up nor drive out what every step uses.

    >>> few = Recent(2)
    >>> few["a"] = 1
    >>> for number in range(9):
    ...     few[number] = few.get("a")
    >>> few.get("a"), few.get(0), len(few)
    (1, None, 3)
    """

    __slots__ = ("_limit", "_older", "_weight", "young")

    def __init__(self, limit: int) -> None:
        self._limit, self._weight = limit, 0
        self._older: dict[K, V] = {}
        self.young: dict[K, V] = {}  # always the same object, which machine code may read; what is not there, ask `get`

    def get(self, key: K) -> V | None:
        """What is known under a key, as of a dict (`recent.get(key)`)."""
        found = self._find(key)
        return None if found is _NOTHING else found

    def keep(self, key: K, value: V, weight: int = 1) -> None:
        """Remember something that takes so much of the room; an older entry that is used again takes 1."""
        self._weight += weight
        if self._weight > self._limit and self.young:
            self._older = self.young.copy()  # several threads may do this at once: then more is forgotten
            self.young.clear()
            self._weight = weight
        self.young[key] = value

    def __setitem__(self, key: K, value: V) -> None:
        self.keep(key, value)

    def __contains__(self, key: K) -> bool:
        return self._find(key) is not _NOTHING

    def _find(self, key: K) -> V | Any:
        found = self.young.get(key, _NOTHING)
        if found is _NOTHING and self._older:
            found = self._older.pop(key, _NOTHING)
            if found is not _NOTHING:
                self.keep(key, found)
        return found

    def clear(self) -> None:
        """Forget everything (`recent.clear()`)."""
        self._older = {}
        self.young.clear()
        self._weight = 0

    def __len__(self) -> int:
        return len(self.young) + len(self._older)
