"""Tables as the browser takes them: columns of typed arrays, words as codes with a dictionary, packed into one stream.

A packed table is deflate-raw of: length of the header (uint32), the header (JSON), the columns one after the other; all
little-endian. Integers take the narrowest type that holds them. A column may be stored as differences ("delta"), and
those of several bytes have the first bytes of all values first ("shuffle"): both make deflate find more.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ditorch_common.page.blocks import Text

Array = npt.NDArray[Any]
KINDS: Final = ("text", "code", "verdict", "link")
_WHOLE: Final = ("uint8", "uint16", "int16", "uint32", "int32")
_TYPES: Final = (*_WHOLE, "float32", "float64")
_SAMPLE: Final = 1 << 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Column:
    """One column of a table; made by `numbers` and `words`.

    >>> Column.words("op", ["add", "mul", "add"]).dictionary
    ['add', 'mul']
    """

    name: str
    values: Array
    title: Text = ""
    kind: str = "number"
    unit: str = ""
    digits: int | None = None
    dictionary: list[str] = field(default_factory=list)

    @classmethod
    def numbers(
        cls, name: str, values: npt.ArrayLike, title: Text = "", unit: str = "", digits: int | None = None
    ) -> Column:
        """Numbers or truth values; not a number means that there is none. `digits`: those that count, not decimals.

        With at most 6 digits, float64 travels as float32, in half the space.
        """
        array = np.asarray(values)
        if array.ndim != 1:
            raise ValueError(f"column {name}: one dimension is needed, not {array.ndim}")
        if array.dtype == np.bool_:
            return cls(name, array.astype(np.uint8), title, "flag", unit, digits)
        if array.dtype.kind not in "iuf":
            raise TypeError(f"column {name}: numbers are needed, not {array.dtype}")
        if array.dtype == np.float64 and digits is not None and digits <= 6 and _fits_single(array):
            array = array.astype(np.float32)
        return cls(name, _narrow(array), title, "number", unit, digits)

    @classmethod
    def words(
        cls, name: str, values: Sequence[str] | tuple[Array, list[str]], title: Text = "", kind: str = "text"
    ) -> Column:
        """Texts, or codes with the list that they count in. `kind`: how they are shown (text, code, verdict, link).

        >>> Column.words("op", (np.array([1, 0]), ["add", "mul"])).texts()
        ['mul', 'add']
        """
        if kind not in KINDS:
            raise ValueError(f"column {name}: kind is one of {', '.join(KINDS)}, not {kind!r}")
        if isinstance(values, tuple) and len(values) == 2 and isinstance(values[0], np.ndarray):
            codes, dictionary = values[0], [str(word) for word in values[1]]
            if len(codes) and not (codes.min() >= 0 and codes.max() < len(dictionary)):
                raise ValueError(f"column {name}: a code has no word")
        else:
            places: dict[str, int] = {}
            codes = np.array([places.setdefault(str(value), len(places)) for value in values], np.int64)
            dictionary = list(places)
        return cls(name, _narrow(codes.astype(np.int64)), title, kind, "", None, dictionary)

    @property
    def is_words(self) -> bool:
        """Whether its values are codes of texts."""
        return self.kind in KINDS

    def about(self) -> dict[str, Any]:
        """Everything but its values, for the header of a table."""
        shown = {"name": self.name, "title": self.title, "kind": self.kind, "unit": self.unit, "digits": self.digits}
        return {**shown, "type": self.values.dtype.name, **({"words": self.dictionary} if self.is_words else {})}

    def texts(self) -> list[str]:
        """Its texts, one per row."""
        return [self.dictionary[code] for code in self.values.tolist()]

    def __len__(self) -> int:
        return len(self.values)


def check_name(name: str) -> None:
    """ValueError where a name cannot be part of an address."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot be an address: letters, digits, '_', '.' and '-' are allowed")


def _fits_single(array: Array) -> bool:
    sizes = np.abs(array[np.isfinite(array) & (array != 0)])
    return not len(sizes) or bool(sizes.min() > 1e-37 and sizes.max() < 1e38)


def _narrow(array: Array) -> Array:
    """The same values in the smallest type that the browser has; integers beyond 32 bits become float64."""
    if array.dtype.kind == "f":
        return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
    low, high = (int(array.min()), int(array.max())) if len(array) else (0, 0)
    for name in _WHOLE:
        limits = np.iinfo(name)
        if limits.min <= low and high <= limits.max:
            return array.astype(name)
    return array.astype(np.float64)


@dataclass(frozen=True)
class Table:
    """Columns of one length, under a name that blocks refer to."""

    name: str
    columns: Sequence[Column]

    def __post_init__(self) -> None:
        check_name(self.name)
        lengths = {len(column) for column in self.columns}
        if len(lengths) > 1:
            sizes = ", ".join(f"{column.name} has {len(column)}" for column in self.columns)
            raise ValueError(f"table {self.name}: its columns differ in length: {sizes}")
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names):
            raise ValueError(f"table {self.name}: two columns have one name: {', '.join(names)}")

    def __len__(self) -> int:
        return len(self.columns[0]) if self.columns else 0

    def __getitem__(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(f"table {self.name} has no column {name}")

    def pack(self, level: int = 6) -> bytes:
        """The table as the page takes it.

        >>> Table.unpack(Table("t", [Column.numbers("n", np.arange(5))]).pack())["n"].values.tolist()
        [0, 1, 2, 3, 4]
        """
        coded = [_code(column.values) for column in self.columns]
        header = {
            "name": self.name,
            "rows": len(self),
            "columns": [{**column.about(), "coding": coding} for column, (coding, _) in zip(self.columns, coded)],
        }
        text = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode()
        squeeze = zlib.compressobj(level, zlib.DEFLATED, -15)
        parts = [squeeze.compress(np.uint32(len(text)).tobytes() + text)]
        parts += [squeeze.compress(data) for _, data in coded]
        return b"".join((*parts, squeeze.flush()))

    @classmethod
    def unpack(cls, packed: bytes) -> Table:
        """A table from what `pack` made; ValueError where it is something else."""
        try:
            data = zlib.decompress(packed, -15)
            end = 4 + int(np.frombuffer(data, "<u4", 1)[0])
            header = json.loads(data[4:end])
            columns = []
            for about in header["columns"]:
                if about["type"] not in _TYPES:
                    raise ValueError(f"unknown type {about['type']}")
                size = header["rows"] * np.dtype(about["type"]).itemsize
                values = _decode(data[end : end + size], about["type"], about["coding"])
                end += size
                given = {key: about[key] for key in ("name", "title", "kind", "unit", "digits")}
                columns.append(Column(values=values, dictionary=about.get("words", []), **given))
            return cls(header["name"], columns)
        except (zlib.error, KeyError, TypeError, IndexError, UnicodeDecodeError) as error:
            raise ValueError(f"this is not a packed table: {error!r}") from None


def _code(values: Array) -> tuple[list[str], bytes]:
    """How a column is stored, by what makes a sample of it smallest, and its bytes."""
    values = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    ways: list[list[str]] = [[]] if values.itemsize == 1 else [[], ["shuffle"]]
    if values.dtype.kind in "iu" and len(values) > 1:
        ways += [["delta", *way] for way in ways]
    if len(ways) == 1:
        return [], values.tobytes()
    middle = max(0, len(values) // 2 - _SAMPLE // 2)
    sample = values[middle : middle + _SAMPLE]
    best = min(ways, key=lambda way: len(zlib.compress(_apply(sample, way), 1)))
    return best, _apply(values, best)


def _apply(values: Array, way: list[str]) -> bytes:
    if "delta" in way:
        with np.errstate(over="ignore"):
            values = np.concatenate([values[:1], np.diff(values)])  # wraps, as adding up does again
    if "shuffle" in way:
        values = values.view(np.uint8).reshape(-1, values.itemsize).T
    return values.tobytes()


def _decode(data: bytes, kind: str, way: list[str]) -> Array:
    size = np.dtype(kind).itemsize
    if "shuffle" in way:
        data = np.frombuffer(data, np.uint8).reshape(size, -1).T.tobytes()
    values = np.frombuffer(data, np.dtype(kind).newbyteorder("<")).astype(kind)
    return np.cumsum(values, dtype=kind) if "delta" in way else values
