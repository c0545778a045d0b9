"""Which tensors have been measured in their present version; `csrc/front_ledger.h` does the same in machine code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import front
from .statistics import Measure, is_dense

Tensor = torch.Tensor
MeasureAll = Callable[[list[Tensor]], list[Measure | None]]


def new_ledger() -> Any:
    """An empty ledger, in machine code where that is compiled."""
    library = front.LIBRARY.get()
    return Ledger() if library is None else library.Ledger()


class _Measured(weakref.ref):  # type: ignore[type-arg]
    """A tensor whose present version has been measured; one object per tensor keeps the garbage collector idle."""

    __slots__ = ("key", "measure", "version")

    key: int
    version: int
    measure: Measure | None  # None while nobody has written to it


class Ledger:
    """Remembers the measures of tensors until these are written to.

    >>> Ledger().look([torch.ones(2)], lambda tensors: [Measure(t.numel()) for t in tensors])  # doctest: +ELLIPSIS
    (0, <...Measure object at ...>)
    """

    def __init__(self) -> None:
        known = self._known = dict[int, _Measured]()
        self.reused = 0  # how often a measure was found

        def forget(seen: _Measured) -> None:
            if known.get(seen.key) is seen:
                known.pop(seen.key, None)

        self._forget = forget

    def look(self, tensors: list[Tensor | None], measure: MeasureAll) -> tuple[Any, ...]:
        """Numbers of the tensors and their measures, in turns.

        What has none in its present version is given to `measure`, which returns as many measures, None for tensors
        that cannot be measured. Integers and empty tensors have none.
        """
        found: list[Any] = []
        for index, tensor in enumerate(tensors):
            if tensor is None:
                continue
            seen = self._known.get(id(tensor))
            if seen is not None and seen() is tensor and seen.version == tensor._version:  # type: ignore[union-attr]
                if seen.measure is not None:
                    self.reused += 1
                    found += (index, seen.measure)
            elif (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel():
                one = self._of_base(tensor) if tensor._is_view() else None
                if one is None:
                    one = measure([tensor])[0]
                    if one is not None:
                        self._remember(tensor, one)
                if one is not None:
                    found += (index, one)
        return tuple(found)

    def _of_base(self, view: Tensor) -> Measure | None:
        """The measure of what a view looks at, where that is all of it in another order."""
        base = view._base
        seen = self._known.get(id(base))
        if seen is None or seen() is not base or base is None or seen.version != view._version:
            return None
        same = view.numel() == base.numel() and view.data_ptr() == base.data_ptr() and view.dtype == base.dtype
        if seen.measure is None or not (same and is_dense(view) and is_dense(base)):
            return None
        self.reused += 1
        return seen.measure

    def _remember(self, tensor: Tensor, measure: Measure | None) -> None:
        if not tensor.is_inference():  # those count no versions
            seen = _Measured(tensor, self._forget)
            seen.key, seen.version, seen.measure = id(tensor), tensor._version, measure
            self._known[seen.key] = seen

    def leave_alone(self, tensors: Iterable[Tensor]) -> None:
        """Memory that nobody has written to yet may hold anything."""
        for tensor in tensors:
            self._remember(tensor, None)

    def clear(self) -> None:
        """Any tensor may have been written to, uncounted."""
        self._known.clear()
