"""Memory budgets: how many bytes may be held at once, and who holds some of them."""

from __future__ import annotations

import threading


class MemoryBudget:
    """So many bytes; a reservation is returned when its holder lets go of it.

    >>> budget = MemoryBudget(10)
    >>> budget.reserve(20) is None
    True
    """

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self._lock = threading.RLock()  # a reservation may be collected while this thread holds the lock

    def reserve(self, nbytes: int) -> Reservation | None:
        """A reservation of so many bytes, or None where fewer are left."""
        with self._lock:
            if nbytes > self.left:
                return None
            self.left -= nbytes
            return Reservation(self, nbytes)

    def _return(self, nbytes: int) -> None:
        with self._lock:
            self.left += nbytes


class Reservation:
    """Some bytes of a budget, held while this object lives."""

    __slots__ = ("_budget", "_nbytes")

    def __init__(self, budget: MemoryBudget, nbytes: int) -> None:
        self._budget, self._nbytes = budget, nbytes

    def __del__(self) -> None:
        self._budget._return(self._nbytes)
