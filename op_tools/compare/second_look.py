"""Calls that `mode="once"` leaves out, made again now and then: a kernel that fails now and then gives other bits.

What is wrong in every n-th call alone is not wrong in the first one. A second call with the same arguments costs the
device as much as the first and the host next to nothing; only if the bits differ is the call compared in full. So
kernels that are not repeatable by nature (atomic additions) raise no alarm.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, Final

from ..call import facts
from .ladder import ComparedCall
from .repeat import OTHER_BITS, again

_SHARE: Final = 1 / 16  # of the calls that are left out
_MAX_DIFFERENT: Final = 8  # calls of an operator with other bits; one that has more is not repeatable by nature


class SecondLooks:
    """Chooses calls to make again, and counts what came of it.

    >>> SecondLooks().describe()
    ''
    """

    def __init__(self, share: float = _SHARE) -> None:
        self._share = share
        self._random = random.Random(0)
        self._different: Counter[str] = Counter()
        self.made = 0

    def wants(self, call: Any) -> bool:
        """Whether this call is made again afterwards: by chance, and only where that changes nothing."""
        if self._random.random() >= self._share or self._different[call.op] >= _MAX_DIFFERENT:
            return False
        traits = call.traits
        plain = call.inside is None and not (traits.mutates or traits.view or traits.by_engine or traits.random)
        return plain and call.op.startswith("torch.") and not facts.may_mutate(call.op, call.kwargs)

    def differs(self, call: Any, compared: ComparedCall) -> bool:
        """Make the call again, on the run's thread: whether other bits came out."""
        self.made += 1
        found = again(call, compared) == OTHER_BITS
        self._different[call.op] += found
        return found

    def describe(self) -> str:
        """What was made again, in one line; empty when nothing was."""
        if not self.made:
            return ""
        different = sum(self._different.values())
        tail = f"{different} gave other bits and were compared in full" if different else "all gave the same bits"
        return f"{self.made} of the calls left out were made a second time: {tail}"
