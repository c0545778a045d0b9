"""Records of a run in one crash-safe sqlite file per process, written in batches.

The thread that fills a batch writes it: a second Python thread would make the training wait for the GIL far longer
than the write takes. A background thread only writes what is left when nothing happens any more, so that a run that
hangs leaves all its records behind.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import itertools
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

from ditorch_common.private import complete

from .. import lifecycle, settings
from ..call.description import TensorMeta
from ..call.recent import Recent

_BATCH_ROWS: Final = 4_000
ASK_EVERY: Final = 64  # rows: so often whoever adds them calls `flush_when_due`
_MAX_SITES: Final = 50_000  # parts of what tells them
_LINES_AT_ONCE: Final = 2_000  # of a file that is written, or of records that are read
_MAX_VARIABLES: Final = 999  # in a statement: what every SQLite takes
_FLUSH_SECONDS: Final = 0.2  # between two writes: what a killed process loses is not much older, also on busy cores

Rows = deque[tuple[Any, ...]]


class Store:
    """Append-only tables of one process; reading flushes first, so what was added is what is read.

    >>> store = Store(Path("/tmp/example.sqlite"))                   # doctest: +SKIP
    >>> store.table("ops", {"name": "TEXT"}).append(("torch.add",))  # doctest: +SKIP
    """

    def __init__(self, path: Path, max_rows: int = 5_000_000) -> None:
        self.path = path
        self.pid = os.getpid()
        self.failure: str | None = None
        self.dropped = 0
        self.sources: list[Callable[[], None]] = []  # called before the background thread writes: they add rows
        self._max_rows = max_rows
        self._rows_written = 0
        self._tables: dict[str, tuple[str, Rows]] = {}  # by name: how to insert, and the rows that wait
        self._sites = Recent[Hashable, int](_MAX_SITES)
        self._site_numbers = itertools.count()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._due = time.monotonic() + _FLUSH_SECONDS
        self._closed = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(str(path), check_same_thread=False, isolation_level=None)
        # A write-ahead log keeps what was committed readable after kill -9.
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=OFF")
        self._site = self.table(
            "sites", {"site": "INTEGER PRIMARY KEY", "op": "TEXT", "location": "TEXT", "described": "TEXT"}
        )
        self._thread = threading.Thread(target=self._write_forever, name="op_tools-store", daemon=True)
        self._thread.op_tools_internal = True  # type: ignore[attr-defined]
        self._thread.start()

    def table(self, name: str, columns: Mapping[str, str]) -> Rows:
        """Declare a table; rows that are appended to what this returns get into it (`.append((1, "a"))`)."""
        if name not in self._tables:
            declared = ", ".join(f"{column} {kind}" for column, kind in columns.items())
            with self._lock:
                self._connection.execute(f"CREATE TABLE IF NOT EXISTS {name} ({declared})")
                insert = f"INSERT OR IGNORE INTO {name} VALUES ({', '.join('?' * len(columns))})"
                self._tables[name] = (insert, deque())
        return self._tables[name][1]

    @property
    def tables(self) -> frozenset[str]:
        """The names of the tables that were declared (`"sites" in store.tables`)."""
        return frozenset(self._tables)

    def site(self, key: Hashable, op: str, location: str, describe: Callable[[], str]) -> int:
        """The number of a call site and signature; its description, as JSON, is written the first time only."""
        number = self._sites.get(key)
        if number is None:
            number = next(self._site_numbers)
            self._sites.keep(key, number, _size_of(key))
            self._site.append((number, op, location, describe()))
        return number

    def flush_when_due(self, rows: Rows) -> None:
        """Write everything if many of these rows wait, or if the last time was long ago."""
        if len(rows) >= _BATCH_ROWS or time.monotonic() > self._due:
            self.flush()

    def flush(self) -> None:
        """Write everything that was added so far (`store.flush()`)."""
        if self.pid != os.getpid():  # a forked child: the file is its parent's
            return
        with self._lock:
            for insert, rows in self._tables.values():
                self._write(insert, rows)
            self._due = time.monotonic() + _FLUSH_SECONDS

    def _write(self, insert: str, rows: Rows) -> None:
        while rows and self.failure is None:
            batch = [rows.popleft() for _ in range(min(len(rows), _BATCH_ROWS))]
            if self._rows_written + len(batch) > self._max_rows:
                self.dropped += len(batch)
                continue
            try:
                try:
                    self._insert(insert, batch)
                except (UnicodeEncodeError, OverflowError):  # names of files need not be text, numbers may be huge
                    batch = [tuple(map(_storable, row)) for row in batch]
                    self._insert(insert, batch)
                self._rows_written += len(batch)
            except (sqlite3.Error, ValueError, OverflowError) as error:
                self.failure = f"{type(error).__name__}: {error}"
                self.dropped += len(batch)
        if self.failure is not None:  # the disk is full or gone: keep memory flat and the run alive
            self.dropped += len(rows)
            rows.clear()

    def _insert(self, insert: str, batch: list[tuple[Any, ...]]) -> None:
        """Insert rows, many with a statement: for each one that runs, the GIL is handed over and taken back."""
        head, values = insert.split(" VALUES ")
        at_once = max(1, _MAX_VARIABLES // values.count("?"))
        most = len(batch) - len(batch) % at_once
        chunks = [list(itertools.chain.from_iterable(batch[i : i + at_once])) for i in range(0, most, at_once)]
        self._connection.execute("BEGIN")
        try:
            if chunks:
                self._connection.executemany(f"{head} VALUES {', '.join([values] * at_once)}", chunks)
            self._connection.executemany(insert, batch[most:])
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise

    @property
    def is_there(self) -> bool:
        """Whether the file still has its name; somebody may have removed the folder (`store.is_there`)."""
        return self.path.exists()

    def _write_forever(self) -> None:
        while not self._wake.wait(_FLUSH_SECONDS / 2):
            self._ask_sources()
            late = time.monotonic() > self._due + _FLUSH_SECONDS / 2  # whoever adds rows has had time to write them
            if late and any(rows for _, rows in self._tables.copy().values()):
                self.flush()

    def _ask_sources(self) -> None:
        for source in tuple(self.sources):
            with contextlib.suppress(Exception):  # whoever adds rows reports it at the end
                source()

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Run a query after a flush (`store.rows("SELECT * FROM findings")`)."""
        self.flush()
        with self._lock:
            cursor = self._connection.execute(query, parameters)
            names = [d[0] for d in cursor.description]
            return [dict(zip(names, row)) for row in cursor.fetchall()]

    def stream(self, query: str, parameters: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """The same one by one, for any number of rows: a connection of its own reads them (`store.stream("...")`)."""
        self.flush()
        if not self.is_there:  # somebody has removed it: only the open connection has it still
            yield from self.tuples(query, parameters)
            return
        with contextlib.closing(read_only(self.path)) as connection:
            cursor = connection.execute(query, parameters)
            while some := cursor.fetchmany(_LINES_AT_ONCE):
                yield from some

    def tuples(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The same without names, for many rows (`store.tuples("SELECT op FROM sites")`)."""
        self.flush()
        with self._lock:
            return self._connection.execute(query, parameters).fetchall()

    def close(self) -> None:
        """Write the rest and close the file (`store.close()`)."""
        if self._closed or self.pid != os.getpid():
            return
        self._ask_sources()
        self.flush()
        self._closed = True
        self._wake.set()
        self._thread.join(timeout=5)
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._connection.close()


def _size_of(key: Any) -> int:
    """How many parts a key has; what describes a tensor counts as twelve and is not looked into."""
    if type(key) is TensorMeta:
        return 12
    return 1 + sum([_size_of(part) for part in key]) if isinstance(key, tuple) else 1


def _storable(value: Any) -> Any:
    """What SQLite can keep of a value: text that is UTF-8, integers of 64 bits (`_storable(2**70) == 2.0**70`)."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if not isinstance(value, int) or -(2**63) <= value < 2**63:
        return value
    return float(value) if abs(value) < 2**1000 else str(value)


def read_only(path: Path) -> sqlite3.Connection:
    """A records file, whatever is in its name, opened so that nothing is written (`read_only(Path("a#b.sqlite"))`)."""
    if path.exists() and not path.is_file():  # opening a pipe would block
        raise sqlite3.OperationalError("is not a regular file")
    is_complete = not path.with_name(f"{path.name}-wal").exists()  # otherwise SQLite would make files beside it
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' * is_complete}", uri=True)


def tables_of(connection: sqlite3.Connection) -> list[str]:
    """The tables of a file that somebody else may have made; an error where reading them would compute something.

    Views, virtual tables and computed columns cost any time and memory, and no run writes them.
    """
    names = []
    for kind, name, declared in connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall():
        is_plain = kind == "index" or (kind == "table" and "virtual" not in str(declared).lower().split("(")[0].split())
        quoted = str(name).replace('"', '""')
        if not is_plain or any(row[6] > 1 for row in connection.execute(f'PRAGMA table_xinfo("{quoted}")')):
            raise sqlite3.DatabaseError(f"{str(name)!r} is computed: no run writes that")
        names += [str(name)] * (kind == "table")
    return names


_current: Store | None = None
_guard = threading.Lock()


def current() -> Store:
    """The store of this process under the results folder of now, opened on first use (`current().path`)."""
    global _current
    folder = settings.results_dir() / "op_tools_records"
    with _guard:
        store = _current
        is_mine = store is not None and store.pid == os.getpid() and store.path.parent == folder.absolute()
        if store is None or not is_mine or not store.is_there:
            if store is not None:
                store.close()
            name = f"records_pid{settings.process_label()}_{time_label()}_{time.monotonic_ns() % 10**6:06d}.sqlite"
            try:
                _current = Store(folder.absolute() / name, int(settings.number("OP_TOOLS_MAX_RECORDS")))
            except (OSError, sqlite3.Error) as error:
                raise settings.SettingsError(
                    f"OP_TOOLS_RESULTS_DIR: no records can be written under {folder} ({error}); "
                    "set OP_TOOLS_RESULTS_DIR to a folder you may write to"
                ) from None
        assert _current is not None
        return _current


def forget_in_child() -> None:
    """After a fork the child must neither write to nor close its parent's file."""
    global _current, _guard
    _current, _guard = None, threading.Lock()


def _close_at_exit() -> None:
    if _current is not None:
        _current.close()


lifecycle.at_exit(lifecycle.Exit.STORE, _close_at_exit)
lifecycle.after_fork_in_child(forget_in_child)


def time_label() -> str:
    """The time in file names (`"2024-10-09-11-42-15"`)."""
    return _label_of(int(time.time()))


@functools.lru_cache(maxsize=2)
def _label_of(second: int) -> str:
    return time.strftime("%Y-%m-%d-%H-%M-%S", time.localtime(second))


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text file that is there once it is complete; nothing is left of one that could not be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete(str(path)) as place, open(place, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        yield file


_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would take for a formula


def plain_cell(value: Any) -> Any:
    """A cell that no spreadsheet executes: text that looks like a formula gets a quote (`plain_cell("=cmd()")`)."""
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


@functools.lru_cache(maxsize=10_000)
def quoted_cell(text: str) -> str:
    """A cell as a CSV file has it, which no spreadsheet executes (`quoted_cell("a,b") == '"a,b"'`)."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([plain_cell(text)])
    return line.getvalue() if text else ""


def write_csv_lines(path: Path, columns: Sequence[str], lines: Iterable[str]) -> Path:
    """Write a CSV file from lines of quoted cells, whole or not at all (`write_csv_lines(path, ["a"], lines)`)."""
    with whole_file(path) as handle:
        handle.write(",".join(map(quoted_cell, columns)) + "\r\n")
        left = iter(lines)
        while some := list(itertools.islice(left, _LINES_AT_ONCE)):
            handle.write("".join(some))
    return path


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Write a CSV file with one header, whole or not at all (`write_csv(path, ["a"], [[1]])`)."""
    with whole_file(path) as handle:
        writer = csv.writer(handle)
        writer.writerow(columns)
        writer.writerows([plain_cell(cell) for cell in row] for row in rows)
    return path
