"""Which calls are worth a comparison: all of them, each kind once, or as many as a time budget allows."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Final

import torch

from ..call.description import Tensor, tensors_in
from ..settings import SettingsError, options

MODES: Final = options("OP_AUTOCOMPARE_MODE")
_FIRST_DEBT: Final = 0.05  # seconds that calls of a new kind may overdraw in all
_FIRST_COST: Final = 0.01  # seconds that a comparison is thought to cost before any is done
_COSTS_TO_SPARE: Final = 20  # with so many times its cost left over, any call is compared
_FIRST_AGAIN: Final = 8  # calls of a kind before one is compared again in mode `once`
_MAX_KINDS: Final = 100_000


def parse_budget(text: str, source: str) -> float:
    """`2x` as a factor of the run's own time (`parse_budget("2x", "OP_AUTOCOMPARE_BUDGET") == 2.0`)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*[xX]?\s*", text)
    factor = float(match[1]) if match else 0.0
    if factor <= 1.0:
        raise SettingsError(f"{source}={text!r}: write a factor above 1, such as 2x (twice the time of the bare run)")
    return factor


def kind_of(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """What makes two calls the same for a comparison: operator, shapes, dtypes, layouts, other arguments."""
    parts: list[Any] = [op]
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            parts.append(_kind_of_tensor(value))
        elif isinstance(value, (int, float, bool, str, type(None))):
            parts.append(value if not isinstance(value, float) else "float")
        else:
            parts.append(tuple([_kind_of_tensor(t) for t in tensors_in(value)]))
    if kwargs:
        parts.append(tuple(kwargs))
    return tuple(parts)


def _kind_of_tensor(tensor: Tensor) -> Hashable:
    stride = tensor.stride() if tensor.layout is torch.strided else None
    return (tensor.shape, tensor.dtype, stride, tensor.requires_grad)


class Chooser:
    """Says of each call whether it is compared; `spend` tells what comparisons cost.

    >>> chooser = Chooser("once")
    >>> [chooser.take(("torch.add", 1)) for _ in range(2)]
    [True, False]
    """

    def __init__(self, mode: str = "every", factor: float | None = None, clock: Callable[[], float] | None = None):
        self.mode, self.factor = mode, factor
        self._clock = clock or time.perf_counter
        self._lock = threading.Lock()
        self._started = self._clock()
        self._spent = 0.0  # also on looking at calls that were left out
        self._paid_in_all = 0.0
        self._taken = 0
        self._done: Counter[Hashable] = Counter()
        self._paid: dict[Hashable, float] = {}
        self._under_way: dict[Hashable, list[float]] = {}  # what is still to be paid for calls that were taken
        self._reserved = 0.0
        self._least = 0
        self._passed_on: set[Hashable] = set()
        self._due: dict[Hashable, int] = {}  # in mode `once`: the next call of a kind that is compared
        self._random = random.Random(0)
        self.left_out: Counter[Hashable] = Counter()

    @property
    def looks_again(self) -> bool:
        """Whether calls that are left out are worth a second look: few of a kind are compared, however long the run."""
        return self.mode == "once" and self.factor is None

    @property
    def chooses(self) -> bool:
        """Whether any call may be left out."""
        return self.mode == "once" or self.factor is not None

    def take(self, kind: Hashable) -> bool:
        """Whether a call of this kind is compared now."""
        with self._lock:
            if not self.chooses or kind in self._passed_on:
                return True
            taken = self._is_due(kind) if self.factor is None else self._affordable(kind, self.factor)
            if taken:
                self._reserve(kind)
                self._done[kind] += 1
                self._taken += 1
            elif len(self.left_out) < _MAX_KINDS:
                self.left_out[kind] += 1
            return taken

    def _is_due(self, kind: Hashable) -> bool:
        """The first call of a kind, and one drawn from its calls 8 to 15, 16 to 31, and so on."""
        if self._done[kind] == 0:
            return True
        number = self._done[kind] + self.left_out[kind]
        if number & (number - 1) == 0 and number >= _FIRST_AGAIN and len(self._due) < _MAX_KINDS:
            self._due[kind] = number + self._random.randrange(number)
        return self._due.get(kind) == number

    def look_again(self, kind: Hashable) -> None:
        """A call that was left out is compared after all."""
        with self._lock:
            self._done[kind] += 1
            self.left_out[kind] -= 1

    def take_by_number(self, kind: Hashable) -> bool:
        """The same for a collective: its number alone decides, so that all ranks choose the same ones."""
        with self._lock:
            number = self._done[kind] + self.left_out[kind]
            taken = not self.chooses or number == 0 or (self.factor is not None and number & (number + 1) == 0)
            if taken:
                self._done[kind] += 1
            elif kind in self.left_out or len(self.left_out) < _MAX_KINDS:
                self.left_out[kind] += 1
            return taken

    def spend(self, kind: Hashable, seconds: float) -> None:
        """So much of the run's time went into a comparison of this kind; None for calls that were left out."""
        if not self.chooses:
            return
        with self._lock:
            self._spent += seconds
            if kind is not None and (kind in self._paid or len(self._paid) < _MAX_KINDS):
                self._paid[kind] = self._paid.get(kind, 0.0) + seconds
                self._paid_in_all += seconds
            waiting = self._under_way.get(kind)
            if waiting:  # it was set aside
                due = min(waiting[0], seconds)
                waiting[0] -= due
                self._reserved -= due

    def settle(self, kind: Hashable) -> None:
        """A comparison that was taken is done, and what it cost is known."""
        if not self.chooses:
            return
        with self._lock:
            waiting = self._under_way.get(kind)
            if waiting:
                self._reserved -= waiting.pop(0)
                if not waiting:
                    del self._under_way[kind]

    def pass_on(self, kind: Hashable) -> None:
        """Calls of this kind cost nothing themselves: calls inside them are compared, and each is asked about."""
        self.settle(kind)
        with self._lock:
            if self.chooses and kind not in self._passed_on and len(self._passed_on) < _MAX_KINDS:
                self._passed_on.add(kind)
                self._taken -= self._done.pop(kind, 0)

    def begin(self, kind: Hashable) -> None:
        """More is to be done for a call that was taken: its backward."""
        if self.chooses:
            with self._lock:
                self._reserve(kind)

    def _reserve(self, kind: Hashable) -> None:
        """Comparisons end long after they are begun: what they will cost is set aside."""
        expected = self._expected(kind)
        self._under_way.setdefault(kind, []).append(expected)
        self._reserved += expected

    def _expected(self, kind: Hashable) -> float:
        if self._done[kind] and kind in self._paid:
            return self._paid[kind] / self._done[kind]
        return self._paid_in_all / self._taken if self._paid_in_all else _FIRST_COST

    def _affordable(self, kind: Hashable, factor: float) -> bool:
        elapsed = self._clock() - self._started
        # what the run itself took, if comparisons had cost nothing
        allowed = (factor - 1.0) * max(elapsed - self._spent, 0.0)
        left = allowed - self._spent - self._reserved
        count, expected = self._done[kind], self._expected(kind)
        if count == 0:  # nothing is known of it yet: worth a small debt
            return left - expected > -_FIRST_DEBT
        if left < expected:
            return False
        # those that were looked at least come first; with much left over, anyone
        if count > self._least + 2:
            self._least = min(self._done.values())
        return count <= self._least + 2 or left > _COSTS_TO_SPARE * expected

    def describe(self) -> str:
        """What was left out, in one line; empty when nothing was."""
        skipped = sum(self.left_out.values())
        if not skipped:
            return ""
        never = [kind for kind in self.left_out if self._done[kind] == 0]
        why = f"the budget of {self.factor:g}x" if self.factor is not None else "each kind of call once"
        rest = "every kind of call was compared at least once"
        if never:
            names = Counter(str(kind[0]) if isinstance(kind, tuple) else str(kind) for kind in never)
            listed = ", ".join(f"{name} {n}" for name, n in names.most_common(5))
            rest = f"never compared: {len(never)} kinds of calls: {listed}"
        return f"{skipped} calls left out ({why}); {rest}"
