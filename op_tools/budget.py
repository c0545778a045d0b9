"""Which calls are worth a comparison: all of them, each kind once, or as many as a time budget allows."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Final

import torch

from .opcall import Tensor, tensors_in
from .settings import SettingsError

MODES: Final = ("every", "once")
_FIRST_DEBT: Final = 0.5  # seconds that calls of a new kind may overdraw in all
_PLENTY: Final = 20
_MOST_KINDS: Final = 100_000


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
        self._spent = 0.0
        self._done: Counter[Hashable] = Counter()
        self._cost: dict[Hashable, float] = {}
        self._mean_cost = 0.0
        self._least = 0
        self.left_out: Counter[Hashable] = Counter()

    @property
    def chooses(self) -> bool:
        """Whether any call may be left out."""
        return self.mode == "once" or self.factor is not None

    def take(self, kind: Hashable) -> bool:
        """Whether a call of this kind is compared now."""
        with self._lock:
            if not self.chooses:
                return True
            taken = self._once(kind) if self.factor is None else self._affordable(kind)
            if taken:
                self._done[kind] += 1
            elif len(self.left_out) < _MOST_KINDS:
                self.left_out[kind] += 1
            return taken

    def spend(self, kind: Hashable, seconds: float) -> None:
        """A comparison of this kind took so much of the run's time."""
        if not self.chooses:
            return
        with self._lock:
            self._spent += seconds
            known = self._cost.get(kind)
            if known is None and len(self._cost) >= _MOST_KINDS:
                return
            self._cost[kind] = seconds if known is None else 0.7 * known + 0.3 * seconds
            self._mean_cost += 0.1 * (seconds - self._mean_cost)

    @property
    def overhead(self) -> float:
        """Seconds that were spent so far."""
        return self._spent

    def _once(self, kind: Hashable) -> bool:
        return self._done[kind] == 0

    def _affordable(self, kind: Hashable) -> bool:
        assert self.factor is not None
        elapsed = self._clock() - self._started
        # what the run itself took, if comparisons had cost nothing
        allowed = (self.factor - 1.0) * max(elapsed - self._spent, 0.0)
        left = allowed - self._spent
        count = self._done[kind]
        if count == 0:  # nothing is known of it yet: worth a small debt
            return left > -_FIRST_DEBT
        if left < self._cost.get(kind, self._mean_cost):
            return False
        # those that were looked at least come first; with much left over, anyone
        if count > self._least + 2:
            self._least = min(self._done.values())
        return count <= self._least + 2 or left > _PLENTY * self._cost.get(kind, self._mean_cost)

    def describe(self) -> str:
        """What was left out, in one line; empty when nothing was."""
        skipped = sum(self.left_out.values())
        if not skipped:
            return ""
        never = [kind for kind in self.left_out if self._done[kind] == 0]
        why = f"the budget of {self.factor:g}x" if self.factor is not None else "each kind of call once"
        text = f"{skipped} calls left out ({why})"
        if never:
            names = Counter(str(kind[0]) if isinstance(kind, tuple) else str(kind) for kind in never)
            listed = ", ".join(f"{name} {n}" for name, n in names.most_common(5))
            text += f"; never compared: {len(never)} kinds of calls: {listed}"
        else:
            text += "; every kind of call was compared at least once"
        return text
