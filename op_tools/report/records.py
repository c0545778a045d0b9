"""One records file as columns, read without writing, and read on where it has grown."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..native.statistics import NAMES as STATISTICS
from ..view.store import read_only, tables_of
from .columns import REAL, WHOLE, WORD, Array, Growing, Words

COMPARED: Final = {
    "call_id": WHOLE,
    "site": WHOLE,
    "phase": WORD,
    "name": WORD,
    "verdict": WORD,
    "max_abs_diff": REAL,
    "max_relative_diff": REAL,
    "cosine": REAL,
    "max_ulp": REAL,
    "excess": REAL,
    "module": WORD,
    "step": WHOLE,
    "reason": WORD,
}
TIMED: Final = {
    "call_id": WHOLE,
    "site": WHOLE,
    "phase": WORD,
    "elapsed_ms": REAL,
    "start_us": REAL,
    "thread": WHOLE,
    "step": WHOLE,
}
CAPTURED: Final = {"call_id": WHOLE, "site": WHOLE, "part": WORD, "path": WORD, "bytes": WHOLE}
OBSERVED: Final = {"call_id": WHOLE, "site": WHOLE, "step": WHOLE}
MEASURED: Final = {
    "call_id": WHOLE,
    "site": WHOLE,
    "backward": WHOLE,
    "side": WHOLE,  # 0: went in, 1: came out
    "place": WHOLE,
    "number": WHOLE,  # row of `statistics`
    "step": WHOLE,
}
SITES: Final = {"op": WORD, "location": WORD, "described": WORD}
_GROWING: Final = {
    "op_autocompare": COMPARED,
    "op_time_measure": TIMED,
    "op_capture": CAPTURED,
    "op_observe": OBSERVED,
}
_SMALL: Final = ("findings", "runs", "ends", "doctor", "wrong", "consequences", "places")
_AT_ONCE: Final = 20_000
_MAX_SMALL: Final = 50_000  # rows of tables that are kept as dicts
_MAX_FLIGHT: Final = 1 << 24  # integers in one record of statistics


class Records:
    """The records of one process. `refresh()` reads what is new; what is damaged ends the reading, with `problem` set.

    `only` is the number of one run of one tool, where others in the file are not wanted.

    >>> records = Records(Path("records_pid1_x.sqlite"), {}); records.refresh()  # doctest: +SKIP
    """

    def __init__(self, path: Path, words: dict[str, Words], only: int | None = None) -> None:
        self.path, self.problem, self._only = path, "", only
        self._words = words
        self.growing = {table: self._new(table, kinds) for table, kinds in _GROWING.items()}
        self.small: dict[str, list[dict[str, Any]]] = {table: [] for table in _SMALL}
        self.sites = self._new("sites", SITES)
        self.site_places: dict[int, int] = {}  # number of a site to its row
        self.measured = self._new("measured", MEASURED)
        self._statistics: list[Array] = []
        self._measure_rows: dict[int, int] = {}
        self._seen: dict[str, int] = {}

    def _new(self, table: str, kinds: dict[str, str]) -> Growing:
        own = {"described": "described", "path": f"{table}.path", "name": "name", "reason": "reason"}
        words = {n: self._words.setdefault(own.get(n, n), Words()) for n, kind in kinds.items() if kind == WORD}
        return Growing(kinds, words)

    @property
    def statistics(self) -> Array:
        """Rows of measured tensors, with the columns of `native.statistics.NAMES`."""
        if len(self._statistics) != 1:
            empty = np.empty((0, len(STATISTICS)))
            self._statistics[:] = [np.concatenate(self._statistics) if self._statistics else empty]
        return self._statistics[0]

    @property
    def rank(self) -> int:
        """The rank of the process, 0 where its file does not say."""
        found = self.small["runs"][0].get("rank") if self.small["runs"] else _rank_in(self.path.name)
        return found if isinstance(found, int) else 0

    def refresh(self) -> bool:
        """Read rows that were added since the last time; whether there were any."""
        if self.problem:
            return False
        before = dict(self._seen)
        try:
            with contextlib.closing(_open(self.path)) as connection:
                connection.text_factory = lambda text: text.decode(errors="replace")
                tables = set(tables_of(connection))
                self._read_sites(connection, tables)
                for table, kinds in _GROWING.items():
                    for rows in self._rows(connection, tables, table, list(kinds)):
                        self.growing[table].add(rows)
                for table in _SMALL:
                    self._read_small(connection, tables, table)
                flights = ["numbers", "statistics", "calls", "steps"]
                for rows in self._rows(connection, tables, "op_overflow_check", flights, 64):
                    for row in rows:
                        self._land(row)
        except (sqlite3.Error, ValueError, TypeError, LookupError, OverflowError) as error:
            self.problem = f"{self.path.name}: is not an op_tools records file, or damaged ({error})"
        return self._seen != before

    def _rows(
        self, connection: sqlite3.Connection, tables: set[str], table: str, columns: list[str], at_once: int = _AT_ONCE
    ) -> Iterator[list[tuple[Any, ...]]]:
        """New rows of a table in chunks; columns that the file lacks are None."""
        if table not in tables:
            return
        there = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        chosen = ", ".join(_quoted(column) if column in there else "NULL" for column in columns)
        mine = f" AND run = {int(self._only)}" if self._only is not None and "run" in there else ""
        query = f"SELECT {chosen}, rowid FROM {table} WHERE rowid > ?{mine} ORDER BY rowid"
        cursor = connection.execute(query, (self._seen.get(table, -1),))
        while some := cursor.fetchmany(at_once):
            self._seen[table] = some[-1][-1]
            yield [row[:-1] for row in some]

    def _read_sites(self, connection: sqlite3.Connection, tables: set[str]) -> None:
        for rows in self._rows(connection, tables, "sites", ["site", *SITES]):
            for row in rows:
                self.site_places[int(row[0])] = len(self.site_places)
            self.sites.add([row[1:] for row in rows])

    def _read_small(self, connection: sqlite3.Connection, tables: set[str], table: str) -> None:
        kept = self.small[table]
        if table not in tables or len(kept) >= _MAX_SMALL:
            return
        names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        for rows in self._rows(connection, tables, table, names):  # the names are the file's own
            kept += [dict(zip(names, row)) for row in rows[: _MAX_SMALL - len(kept)]]

    def _land(self, flight: tuple[Any, ...]) -> None:
        """One record of OpOverflowCheck: statistics of some tensors, and calls that had tensors measured so far."""
        packed = [part if isinstance(part, bytes) else b"" for part in flight]
        if max(map(len, packed)) > 8 * _MAX_FLIGHT:
            raise ValueError("a record of statistics that is too large")
        numbers, statistics, log, steps = (array(kind, part) for kind, part in zip("qdqq", packed))
        rows = np.array(statistics).reshape(len(numbers), len(STATISTICS))
        base = sum(len(part) for part in self._statistics)
        self._statistics.append(rows)
        self._measure_rows.update((number, base + place) for place, number in enumerate(numbers))
        found: list[tuple[int, ...]] = []
        at = call = 0
        while at + 4 <= len(log):
            call_id, site, backward, tensors = log[at : at + 4]
            at += 4
            step = steps[call] if call < len(steps) else 0
            call += 1
            for _ in range(min(tensors, (len(log) - at) // 3)):
                side, place, number = log[at : at + 3]
                at += 3
                row = self._measure_rows.get(number)
                if row is not None:
                    found.append((call_id, site, backward, side, place, row, step))
        self.measured.add(found)

    # -- what rows are about ---------------------------------------------------------------------------

    def of_site(self, sites: Array, column: str) -> Array:
        """The code of a text of each row's site; what is not there has that of the empty text."""
        empty = self.sites.words[column].code("")
        unique, back = np.unique(sites, return_inverse=True)
        places = np.array([self.site_places.get(site, -1) for site in unique.tolist()], np.int64)
        known = np.append(self.sites[column], np.int32(empty))
        return np.asarray(known[places[back]])

    def doctor(self) -> dict[str, Any] | None:
        """What ditorch's doctor said of the process."""
        return next((read_json(row.get("found")) for row in self.small["doctor"]), None) or None


def read_json(text: Any) -> dict[str, Any]:
    """A JSON object in a record; empty where it is none (`read_json('{"a": 1}')`)."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        found = json.loads(text)
        return found if isinstance(found, dict) else {}
    return {}


def _quoted(name: str) -> str:
    """A name for SQL, whatever is in it (`_quoted('a"b')`)."""
    return '"' + name.replace('"', '""') + '"'


def _open(path: Path) -> sqlite3.Connection:
    connection = read_only(path)
    try:
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
        return connection
    except sqlite3.OperationalError:  # a log beside it in a folder that may not be written to
        connection.close()
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)


def _rank_in(name: str) -> int:
    digits = name.partition("_rank")[2].partition("_")[0]
    return int(digits) if digits.isdigit() and len(digits) < 7 else 0
