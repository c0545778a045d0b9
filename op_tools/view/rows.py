"""The rows of a comparison. Each column is declared once, in `Row`, with how it is stored and shown.

The sqlite columns, the CSV files, the console tables and what worker processes send all follow from that declaration.
A new column is one line here and one where it is measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, NamedTuple, get_type_hints

from .store import quoted_cell

RIGHT: Final = "right"
WRONG: Final = "wrong"
WEAK: Final = "known weakness"  # of a kernel of this device, as its ledger says; within what that explains
NOT_COMPARABLE: Final = "not comparable"


class Column(NamedTuple):
    """How one column is stored and shown; `show` makes the text of a cell, in which None is a NaN read from sqlite."""

    sql: str
    show: Callable[[Any], str] = str
    show_replayed: Callable[[Any], str] | None = None  # where the tables of a replay have another text
    console: bool = True  # the columns that only files have come last
    replay_csv: bool = True  # whether the CSV file of a replay has it for the worst tensor of a capture
    form: str = ""  # of a number, which `show` follows


def _as(form: str) -> Callable[[float | None], str]:
    return lambda value: format(math.nan if value is None else value, form)


def _number(form: str, replayed: str = "") -> Column:
    return Column("REAL", _as(form), _as(replayed) if replayed else None, form=form)


def _name(op: str, part: str, index: int | None) -> str:
    return f"{op} {part}" if index is None else f"{op} {part}[{index}]"


@functools.lru_cache(maxsize=100_000)
def label_of(op: str, part: str, index: int | None) -> str:
    """A tensor, as the console and the records name it (`label_of("torch.mul", "grad_input", 0)`)."""
    return _name(op, "grad" if part == "grad_input" else part, index)


def _cosine(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.6f}"


_MAX_ULP: Final = 1e6  # more of them are not told apart


class Row(NamedTuple):
    """One compared tensor or number: which one it is, the columns, and what the verdict rests on.

    `excess` is the largest error divided by its bound; `where` is the place of that element.

    >>> Row("torch.sort", "output", 1, True, 0.0, 0.0, 1e-5, 1e-5, "").label
    'torch.sort output[1]'
    """

    op: str
    part: str  # output, input (an argument after the call) or grad_input
    index: int | None  # type: ignore[assignment]  # of the tensor; None where there is only one
    allclose: Annotated[bool, Column("INTEGER", lambda value: str(bool(value)))]
    max_abs_diff: Annotated[float, _number(".9f")]
    max_relative_diff: Annotated[float, _number(".9f")]
    atol: Annotated[float, _number(".9f")]
    rtol: Annotated[float, _number(".9f")]
    error_info: Annotated[str, Column("TEXT")]
    cosine: Annotated[float, Column("REAL", _cosine)] = math.nan
    max_ulp: Annotated[float, _number(".3g", ".2f")] = 0.0
    verdict: Annotated[str, Column("TEXT", replay_csv=False)] = RIGHT
    reason: Annotated[str, Column("TEXT", console=False, replay_csv=False)] = ""
    excess: float = 0.0
    where: tuple[int, ...] = ()
    bound: Any = None  # of a wrong row: the largest error allowed, a number or one per element; None where unknown

    @property
    def name(self) -> str:
        """The tensor, as reasons and reports name it (`torch.mul grad_input[0]`)."""
        return _name(self.op, self.part, self.index)

    @property
    def label(self) -> str:
        """The tensor, as the console and the records name it (`torch.mul grad[0]`)."""
        return label_of(self.op, self.part, self.index)

    @property
    def size(self) -> str:
        """The error in numbers, where it has any: of whole numbers and draws there are no ulp.

        >>> Row("torch.mul", "output", None, False, 0.5, 1.0, 0.0, 0.0, "", max_ulp=3e7).size
        ' (max_abs_diff 0.5, > 1e6 ulp)'
        """
        ulp = f"{self.max_ulp:.3g} ulp" if self.max_ulp <= _MAX_ULP else f"> {_MAX_ULP:.0e} ulp".replace("+0", "")
        found = [ulp] if self.max_ulp else []
        if 0 < self.max_abs_diff < math.inf or found:
            found.insert(0, f"max_abs_diff {self.max_abs_diff:.6g}")
        return f" ({', '.join(found)})" if found else ""

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of `COLUMNS`."""
        return tuple(self)[FIRST:END]

    def stored(self) -> tuple[Any, ...]:
        """The values for `SQL`; sqlite stores NaN as NULL."""
        return (self.label, *self.values)

    def cells(self, replayed: bool = False) -> list[str]:
        """The texts for `CONSOLE`."""
        if replayed:
            info = "; ".join(dict.fromkeys(text for text in (self.error_info, self.reason) if text))
            shown = self._replace(error_info=info).values
            texts = [(column.show_replayed or column.show)(value) for column, value in zip(_CONSOLE, shown)]
            return [f"{self.label:<30}", *texts]
        return console_cells(self.stored())

    def replay_csv(self) -> list[Any]:
        """The values for `REPLAY_CSV`."""
        return [getattr(self, name) for name in ("name", *REPLAY_CSV[1:])]

    def as_dict(self) -> dict[str, Any]:
        """Everything by name, for JSON."""
        return {"name": self.name, **dict(zip(COLUMNS, self.values)), "excess": self.excess, "where": self.where}


COLUMNS: Final[dict[str, Column]] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Row, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
FIRST: Final = Row._fields.index(next(iter(COLUMNS)))
END: Final = FIRST + len(COLUMNS)
_CONSOLE: Final = [column for column in COLUMNS.values() if column.console]

SQL: Final = {"name": "TEXT", **{name: column.sql for name, column in COLUMNS.items()}}
CSV: Final = list(SQL)
CONSOLE: Final = CSV[: 1 + len(_CONSOLE)]
REPLAY_CSV: Final = ["worst", *[name for name, column in COLUMNS.items() if column.replay_csv]]


class _Quoted(dict[Any, str]):
    """Cells of a CSV file by the values that they show, each made once; for columns with few of them."""

    def __init__(self, show: Callable[[Any], str]) -> None:
        self._show = show

    def __missing__(self, value: Any) -> str:
        if len(self) > _MAX_QUOTED:
            self.clear()
        self[value] = text = quoted_cell(self._show(value))
        return text


_MAX_QUOTED: Final = 10_000
_LINE: Final = ",".join(["%s", *[f"%{column.form or 's'}" for column in COLUMNS.values()]])
_NUMBERS: Final = [place for place, column in enumerate(COLUMNS.values(), 1) if column.form]
_OTHERS: Final = [(place, column) for place, column in enumerate(COLUMNS.values(), 1) if not column.form]
_FEW: Final = [(0, _Quoted(str)), *[(n, _Quoted(column.show)) for n, column in _OTHERS if column.sql != "REAL"]]
_MANY: Final = [(place, column.show) for place, column in _OTHERS if column.sql == "REAL"]


def csv_line(stored: Sequence[Any]) -> str:
    """The cells for `CSV` from what sqlite gives back, quoted and joined (`csv_line(row.stored())`)."""
    cells = list(stored)
    if None in cells:
        for place in _NUMBERS:
            if cells[place] is None:
                cells[place] = math.nan
    for place, texts in _FEW:
        cells[place] = texts[cells[place]]
    for place, show in _MANY:
        cells[place] = show(cells[place])
    return _LINE % tuple(cells)


def console_cells(stored: Sequence[Any]) -> list[str]:
    """The texts for `CONSOLE` from what sqlite gives back (`console_cells(row.stored())`)."""
    return [f"{stored[0]:<30}", *[column.show(value) for column, value in zip(_CONSOLE, stored[1:])]]
