"""Which tensors have been measured in their present version, and the log of calls; `csrc/ledger.cpp` does the same.

It is compiled against PyTorch's headers in the background on first use. It also logs most calls and their backwards
by itself (`begin` and `end`, which `csrc/front_light.h` calls), and measures tensors on a GPU of NVIDIA (`use`).
"""

from __future__ import annotations

import itertools
import weakref
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch

from ..call.facts import NODES_WITHOUT_KERNEL
from ..compat import TensorBase
from ..view import console
from . import compiling
from .layout import is_dense

Tensor = torch.Tensor
Measure = Callable[[list[Tensor], list[int]], list[bool]]
Pairs = tuple[int, ...]  # the place of a tensor and its number, in turns

MAX_WAITING: Final = 1_024  # calls of the log
PASSES_ON: Final = (*sorted(NODES_WITHOUT_KERNEL), "ToCopyBackward0")  # nodes that move or convert a gradient
_SOURCE: Final = compiling.SOURCES / "ledger.cpp"
_LEDGERS: Final = itertools.count()


def _build(include: str, key: str) -> Path | None:
    said = "compiling what logs calls in the background (once); until then, Python does it"
    return compiling.against_torch(_SOURCE, lambda: console.note(said), (include, "-O1"), key)


def _load() -> Any:
    module = compiling.extension("op_tools_ledger", _build)
    if module is None or not module.set_types(TensorBase, torch.Tensor, torch.nn.Parameter):
        return None
    module.set_up(PASSES_ON)
    return module


LIBRARY: Final = compiling.Library("ledger", _load)


def new_ledger(
    measure: Measure, due: Callable[[], None], failed: Callable[[int, BaseException], None]
) -> tuple[Any, bool]:
    """An empty ledger, and whether it is the compiled one.

    `measure` gets tensors and their numbers, and says which of them can be measured. `due` is called when the log is
    long, or what tensors are measured into is full; `failed` gets the site of a call whose backward was not logged.
    """
    library = LIBRARY.get()
    first = next(_LEDGERS) << 40  # a number is that of one tensor in all records of this process
    if library is None:
        return Ledger(measure, due, first), False
    return library.Ledger(measure, due, failed, first), True


class _Measured(weakref.ref):  # type: ignore[type-arg]
    """A tensor whose present version has been measured; one object per tensor keeps the garbage collector idle."""

    __slots__ = ("key", "number", "version")

    key: int
    version: int
    number: int  # -1 while nobody has written to it


class Ledger:
    """Remembers the numbers of tensors until these are written to, and which of them each call got and made.

    >>> ledger = Ledger(lambda tensors, numbers: [True for _ in tensors], lambda: None)
    >>> ledger.look([torch.ones(2)])
    (0, 0)
    """

    def __init__(self, measure: Measure, due: Callable[[], None], first: int = 0) -> None:
        known = self._known = dict[int, _Measured]()
        self.reused = 0  # how often a tensor was seen again unchanged
        self._measure, self._due = measure, due
        self._numbers = first  # the next one
        self._log, self._steps = array("q"), array("q")
        self._calls: list[Any] = []

        def forget(seen: _Measured) -> None:
            if known.get(seen.key) is seen:
                known.pop(seen.key, None)

        self._forget = forget

    # -- tensors --------------------------------------------------------------------------------------

    def look(self, tensors: list[Tensor | None]) -> Pairs:
        """Places of the tensors and their numbers, in turns.

        What has none in its present version gets one and is measured. Integers and empty tensors have none, nor have
        those that cannot be measured.
        """
        found: list[int] = []
        fresh: dict[int, Tensor] = {}  # by number
        for index, tensor in enumerate(tensors):
            if tensor is None:
                continue
            seen = self._known.get(id(tensor))
            if seen is not None and seen() is tensor and seen.version == tensor._version:  # type: ignore[union-attr]
                if seen.number >= 0:
                    self.reused += 1
                    found += (index, seen.number)
            elif (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel():
                number = self._of_base(tensor) if tensor._is_view() else -1
                if number < 0:
                    number, self._numbers = self._numbers, self._numbers + 1
                    self._remember(tensor, number)
                    fresh[number] = tensor
                found += (index, number)
        lost = self._measure_all(fresh)
        return tuple([part for pair in zip(found[::2], found[1::2]) if pair[1] not in lost for part in pair])

    def _measure_all(self, fresh: dict[int, Tensor]) -> set[int]:
        """Measure tensors; the numbers of those that cannot be measured."""
        lost = set(fresh)
        try:
            if fresh:
                measured = self._measure(list(fresh.values()), list(fresh))
                lost -= {number for number, done in zip(fresh, measured) if done}
        finally:
            for number in lost:
                seen = self._known.get(id(fresh[number]))
                if seen is not None and seen.number == number:
                    del self._known[seen.key]
        return lost

    def _of_base(self, view: Tensor) -> int:
        """The number of what a view looks at, where that is all of it in another order; -1 for others."""
        base = view._base
        seen = self._known.get(id(base))
        if seen is None or seen() is not base or base is None or seen.version != view._version:
            return -1
        same = view.numel() == base.numel() and view.data_ptr() == base.data_ptr() and view.dtype == base.dtype
        if seen.number < 0 or not (same and is_dense(view) and is_dense(base)):
            return -1
        self.reused += 1
        return seen.number

    def _remember(self, tensor: Tensor, number: int) -> None:
        if not tensor.is_inference():  # those count no versions
            seen = _Measured(tensor, self._forget)
            seen.key, seen.version, seen.number = id(tensor), tensor._version, number
            self._known[seen.key] = seen

    def leave_alone(self, tensors: Iterable[Tensor]) -> None:
        """Memory that nobody has written to yet may hold anything."""
        for tensor in tensors:
            self._remember(tensor, -1)

    def clear(self) -> None:
        """Any tensor may have been written to, uncounted."""
        self._known.clear()

    # -- the log --------------------------------------------------------------------------------------

    def enter(
        self, id: int, site: int, backward: bool, step: int, arriving: Pairs, leaving: Pairs, call: Any, /
    ) -> None:
        """A call has run, or its backward: what went into it and what came out of it."""
        if not arriving and not leaving:
            return
        self._steps.append(step)
        self._calls.append(call)
        self._log.extend((id, site, backward, (len(arriving) + len(leaving)) // 2))
        for side, pairs in enumerate((arriving, leaving)):
            for index, number in zip(pairs[::2], pairs[1::2]):
                self._log.extend((side, index, number))
        if len(self._calls) >= MAX_WAITING:
            self._due()

    def take(self) -> tuple[bytes, bytes, list[Any]]:
        """The log, the step of each of its calls, and what was given as `call`; the log is empty then.

        The log has of each call its id, site, whether it is the backward, and how many tensors follow; of each tensor
        its side (0 went into the call), its place and its number.
        """
        taken = self._log.tobytes(), self._steps.tobytes(), self._calls
        self._log, self._steps, self._calls = array("q"), array("q"), []
        return taken

    def close(self) -> None:
        """Nothing more is logged."""
        self._known.clear()
