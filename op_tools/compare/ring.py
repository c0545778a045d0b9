"""Room in memory that is shared with a worker process."""

from __future__ import annotations

from collections import deque


class Ring:
    """A ring buffer: spans are taken in order, and given back in almost the same order.

    >>> ring = Ring(100)
    >>> ring.take(60), ring.take(60)
    (0, None)
    >>> ring.give(0)
    >>> ring.take(60)
    0
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: deque[list[int]] = deque()  # [start, end, whether it is free again]

    def take(self, nbytes: int) -> int | None:
        """Where a span of so many bytes begins, or None while there is no room."""
        nbytes = max(nbytes, 1)  # a place of its own
        start, limit = 0, self.size
        if self._taken:
            (first, _, _), (last, start, _) = self._taken[0], self._taken[-1]
            if last < first:  # around the end already
                limit = first
            elif start + nbytes > self.size:
                start, limit = 0, first
        if start + nbytes > limit:
            return None
        self._taken.append([start, start + nbytes, 0])
        return start

    def give(self, start: int) -> None:
        """Give a span back."""
        for place in self._taken:
            if place[0] == start and not place[2]:
                place[2] = 1
                break
        while self._taken and self._taken[0][2]:
            self._taken.popleft()
