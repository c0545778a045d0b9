"""Columns that grow: rows of sqlite tables as arrays of numbers and of codes, to which later rows are added."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
WORD, WHOLE, REAL = "word", "whole", "real"
_LARGEST: Final = 2.0**53  # what a double holds exactly, and what the browser counts with


class Words:
    """Texts with numbers, in the order in which they came (`Words().code("torch.add")`)."""

    def __init__(self) -> None:
        self.known: list[str] = []
        self._codes: dict[str, int] = {}

    def code(self, text: str) -> int:
        """The number of a text."""
        code = self._codes.get(text)
        if code is None:
            code = self._codes[text] = len(self.known)
            self.known.append(text)
        return code

    def codes(self, texts: Iterable[Any]) -> Array:
        """The numbers of some texts; what is no text is shown as one, and None is empty."""
        code = self.code
        return np.array([code(t if isinstance(t, str) else _as_text(t)) for t in texts], np.int32)


def _as_text(value: Any) -> str:
    return "" if value is None else value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class Growing:
    """Some columns of a table, by name; rows are added in chunks.

    >>> rows = Growing({"op": WORD, "ms": REAL}, {"op": Words()})
    >>> rows.add([("add", 1.5), ("mul", None)]); rows["ms"].tolist()
    [1.5, nan]
    """

    def __init__(self, kinds: dict[str, str], words: dict[str, Words]) -> None:
        self.kinds, self.words = kinds, words
        self._parts: dict[str, list[Array]] = {name: [] for name in kinds}
        self._size = 0

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        """Append rows, whose values are in the order of the columns."""
        if not rows:
            return
        for (name, kind), values in zip(self.kinds.items(), zip(*rows)):
            self._parts[name].append(self.words[name].codes(values) if kind == WORD else numbers(values, kind))
        self._size += len(rows)

    def add_arrays(self, arrays: dict[str, Array]) -> None:
        """Append columns as they are."""
        self._size += len(next(iter(arrays.values())))
        for name, values in arrays.items():
            self._parts[name].append(values)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, name: str) -> Array:
        parts = self._parts[name]
        if len(parts) != 1:
            dtype = np.float64 if self.kinds[name] == REAL else np.int64 if self.kinds[name] == WHOLE else np.int32
            parts[:] = [np.concatenate(parts) if parts else np.empty(0, dtype)]
        return parts[0]


def numbers(values: Sequence[Any], kind: str) -> Array:
    """Numbers of a column; what is none becomes NaN, or 0 among whole numbers (`numbers([1, None], REAL)`)."""
    dtype: Any = np.float64 if kind == REAL else np.int64
    if all(type(v) in _PLAIN[kind] for v in values):
        try:
            return np.array(values, dtype)
        except (TypeError, ValueError, OverflowError):
            pass
    if kind == REAL:
        return np.array([float(v) if isinstance(v, (int, float)) else np.nan for v in values], dtype)
    return np.array([int(v) if isinstance(v, (int, float)) and abs(v) < _LARGEST else 0 for v in values], dtype)


_PLAIN: Final = {REAL: (float, int, type(None)), WHOLE: (int,)}


def occurrences(*keys: Array) -> Array:
    """For each row how many earlier ones have the same keys (`occurrences(np.array([7, 7, 3]))` is [0, 1, 0])."""
    count = len(keys[0])
    if not count:
        return np.empty(0, np.int64)
    order = np.lexsort(keys[::-1])
    changed = np.zeros(count, bool)
    changed[0] = True
    for key in keys:
        ordered = key[order]
        changed[1:] |= ordered[1:] != ordered[:-1]
    starts = np.maximum.accumulate(np.where(changed, np.arange(count), 0))
    found = np.empty(count, np.int64)
    found[order] = np.arange(count) - starts
    return found


def groups(*keys: Array) -> tuple[Array, Array]:
    """Rows with equal keys are a group: the first row of each, and for each row the number of its group.

    >>> [part.tolist() for part in groups(np.array([5, 3, 5]), np.array([1, 1, 1]))]
    [[1, 0], [1, 0, 1]]
    """
    whole = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        low, high = (int(key.min()), int(key.max())) if len(key) else (0, 0)
        width = high - low + 1
        if int(whole.max(initial=0)) >= 2**62 // width:  # too many to count: by their order
            whole = np.unique(whole, return_inverse=True)[1]
        whole = whole * width + (key - low)
    _, first, back = np.unique(whole, return_index=True, return_inverse=True)
    return first, back.reshape(-1)


def short_floats(values: Array, digits: int = 4) -> Array:
    """Single precision with so many digits that count, which packs well (`short_floats(np.array([1 / 3]))`)."""
    bits = int(np.ceil(digits * 3.3219)) + 1
    with np.errstate(over="ignore", invalid="ignore"):
        whole = np.asarray(values, np.float32).view(np.uint32)
    keep = np.uint32(0xFFFFFFFF << max(0, 23 - bits) & 0xFFFFFFFF)
    half = np.uint32((1 << max(0, 23 - bits)) >> 1)
    finite = (whole & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
    return np.asarray(np.where(finite, (whole + half) & keep, whole).view(np.float32))
