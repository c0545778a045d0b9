"""Traces on disk: one file per rank, tables as columns of numbers, written while the run goes on.

A file is a line that names format and version, then blocks. A block is a line of JSON and compressed bytes: the columns
of some rows of one table, or new texts. Rows are numbered in the order in which they were written; columns that hold a
text hold its number. The last block says that the trace is complete. Reading executes nothing.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from ..call.recent import Recent
from ..settings import SettingsError
from .rows import drop_loose, points_nowhere

VERSION: Final = 3  # 2: fingerprints by chunks; 3: parameters are in the table of memory
SUFFIX: Final = ".optrace"
NAMED: Final = b"op_tools trace "
PROJECTIONS: Final = 8
_ROWS: Final = 16_384  # of a table that wait to be written
_MAX_PASSING: Final = 1 << 20  # characters of texts that may never come again
_MAX_PACKING: Final = 8  # blocks
_MAX_LINE: Final = 1 << 20
_MAX_WORLD: Final = 1 << 24  # ranks
_MAX_RATIO: Final = 200  # of a file unpacked to the file: zlib packs rows of numbers to a fiftieth at best

TABLES: Final[dict[str, dict[str, str]]] = {
    "modules": {"id": "i4", "parent": "i4", "name": "text", "class": "text", "settings": "text"},
    "looks": {
        "shape": "text",
        "dtype": "text",
        "stride": "text",
        "device": "text",
        "requires_grad": "u1",
        "placements": "text",
        "mesh": "text",
        "bytes": "i8",
    },
    "tensors": {
        "kind": "u1",
        "name": "text",
        "look": "i4",
        "producer": "i4",
        "output": "i2",
        "base": "i4",
        "module": "i4",
    },
    "operators": {
        "step": "i4",
        "phase": "u1",
        "name": "text",
        "module": "i4",
        "location": "text",
        "stack": "text",
        "arguments": "text",
        "region": "text",
        "stream": "i8",
        "group": "text",
        "forward": "i4",
        "time": "f8",
        "title": "text",  # of an imported one; others are named by module and number
    },
    "edges": {"operator": "i4", "side": "u1", "place": "i2", "tensor": "i4"},
    "prints": {
        "tensor": "i4",
        **{f"p{k}": "f8" for k in range(PROJECTIONS)},
        "sum": "f8",
        "norm": "f8",
        "low": "f8",
        "high": "f8",
        "nan": "i8",
        "inf": "i8",
        "part": "i2",  # 0: of the tensor itself; 1: of this rank's part of a tensor that all ranks hold
    },
    "memory": {"operator": "i4", "block": "i4", "bytes": "i8", "kind": "u1", "module": "i4"},
    "levels": {"operator": "i4", "held": "i8", "top": "i8"},  # of the device's allocator, where they changed
    "plan": {"rank": "i4", "what": "text", "bytes": "i8", "blocks": "i4"},
}
FORWARD, BACKWARD, RECOMPUTED, OPTIMIZER = range(4)
PHASES: Final = ("forward", "backward", "recomputed", "optimizer")
INPUT, OUTPUT = 0, 1
KINDS: Final = ("activation", "parameter", "buffer", "gradient", "optimizer", "input", "temporary")
ACTIVATION, PARAMETER, BUFFER, GRADIENT, STATE, GIVEN, TEMPORARY = range(7)
PRINT_COLUMNS: Final = tuple(TABLES["prints"])[1:-1]
_NUMPY: Final = {"text": "i4"}
_LEVELS: Final = {"prints": 0}  # of zlib: their bits are as good as random, and to pack them takes longer than all else


_POINTERS: Final = {  # columns that hold numbers of rows, in tables of which the later ones point to the earlier ones
    "operators": {"forward": "operators"},
    "tensors": {"look": "looks", "producer": "operators"},
    "edges": {"operator": "operators", "tensor": "tensors"},
    "prints": {"tensor": "tensors"},
    "memory": {"operator": "operators"},
    "levels": {"operator": "operators"},
}


_LIMITS: Final = {("tensors", "kind"): len(KINDS), ("memory", "kind"): len(KINDS), ("operators", "phase"): len(PHASES)}


class TraceError(SettingsError):
    """A trace that cannot be read, told in one line."""


class TraceWriter:
    """Writes one trace; memory is bounded by the rows that wait.

    >>> with TraceWriter(path, {"rank": 0}) as trace:                   # doctest: +SKIP
    ...     trace.add("edges", (0, INPUT, 0, 5))
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path = path
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self.texts: dict[str, int] = {"": 0}  # their numbers
        self._new_texts: list[str] = [""]
        self._count = 1  # of texts
        self._passing = Recent[str, int](_MAX_PASSING)
        self._rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in TABLES}
        self._texts_at = {
            name: [i for i, kind in enumerate(columns.values()) if kind == "text"] for name, columns in TABLES.items()
        }
        self.counts = dict.fromkeys(TABLES, 0)
        self.take: Callable[[str], tuple[int, bytes]] | None = None  # rows that wait elsewhere, in columns
        self.bring: Callable[[], None] | None = None  # adds rows that would wait for more of them, and never waits
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO | None = path.open("wb")
        except OSError as error:
            raise TraceError(f"{path}: cannot be written ({error.strerror or error}); give another place") from None
        self._packing = ThreadPoolExecutor(1, "op_tools-trace")  # zlib hands over the GIL: the run goes on
        self._packed: deque[tuple[dict[str, Any], Future[bytes]]] = deque()  # blocks that are not in the file yet
        self._file.write(NAMED + f"{VERSION}\n".encode())
        self._block({"facts": facts}, b"")
        self._write_packed(0)

    def text(self, text: str) -> int:
        """The number of a text; each is written once."""
        number = self.texts.get(text)
        if number is None:
            with self._lock:
                number = self.texts.get(text)
                if number is None:
                    number = self.texts[text] = self._number(text)
        return number

    def passing_text(self, text: str) -> int:
        """The number of a text that may never come again: it is forgotten after a while, and written again then."""
        number: int | None = self.texts.get(text)
        if number is None:
            with self._lock:
                number = self._passing.get(text)
                if number is None:
                    number = self._number(text)
                    self._passing.keep(text, number, len(text))
        return number

    def _number(self, text: str) -> int:
        self._new_texts.append(text)
        self._count += 1
        return self._count - 1

    def add(self, table: str, row: tuple[Any, ...]) -> int:
        """Append one row, with numbers for texts (`trace.text`); returns its number."""
        rows = self._rows[table]
        rows.append(row)
        number = self.counts[table]
        self.counts[table] = number + 1
        if len(rows) >= _ROWS:
            self.flush(table)
        return number

    def extend(self, table: str, more: list[tuple[Any, ...]]) -> None:
        """Append some rows."""
        rows = self._rows[table]
        rows += more
        self.counts[table] += len(more)
        if len(rows) >= _ROWS:
            self.flush(table)

    def add_columns(self, table: str, columns: Sequence[Any]) -> None:
        """Append rows that are arrays already, one for each column; what waits is written first."""
        with self._lock:
            self.flush(table)
            rows = len(columns[0])
            self.counts[table] += rows
            kinds = [_NUMPY.get(kind, kind) for kind in TABLES[table].values()]
            body = b"".join([np.ascontiguousarray(part, kind).tobytes() for part, kind in zip(columns, kinds)])
            self._block({"table": table, "rows": rows}, body, _LEVELS.get(table, 1))

    def flush(self, *tables: str) -> None:
        """Have the rows that wait written, of all tables unless some are named; `settle` waits until they are."""
        if self._pid != os.getpid():  # a forked child: the file is its parent's
            return
        with self._lock:
            if self._new_texts:
                texts, self._new_texts = self._new_texts, []
                self._block({"texts": len(texts)}, json.dumps(texts).encode())
            for table in tables or TABLES:
                rows, self._rows[table] = self._rows[table], []
                if rows:
                    columns = [
                        np.array(values, dtype=_NUMPY.get(kind, kind)).tobytes()
                        for kind, values in zip(TABLES[table].values(), zip(*rows))
                    ]
                    self._block({"table": table, "rows": len(rows)}, b"".join(columns), _LEVELS.get(table, 1))
                if self.take is not None:
                    count, body = self.take(table)
                    if count:
                        self.counts[table] += count
                        self._block({"table": table, "rows": count}, body)
            self._write_packed(_MAX_PACKING)

    def settle(self) -> None:
        """Wait until all that was flushed is in the file, and outlives this process (`trace.settle()`)."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._write_packed(0)

    def _block(self, head: dict[str, Any], body: bytes, level: int = 1) -> None:
        if self._file is not None:
            self._packed.append((head, self._pack(body, level)))

    def _pack(self, body: bytes, level: int) -> Future[bytes]:
        try:
            return self._packing.submit(zlib.compress, body, level)
        except RuntimeError:  # the interpreter ends, or may start no more threads
            done = Future[bytes]()
            done.set_result(zlib.compress(body, level))
            return done

    def _write_packed(self, left: int) -> None:
        """Write the blocks that are packed, in order, and wait for all but so many."""
        while self._file is not None and self._packed and (len(self._packed) > left or self._packed[0][1].done()):
            head, packing = self._packed[0]
            packed = packing.result()  # Ctrl-C may come here: the block stays
            self._packed.popleft()
            try:
                self._file.write(json.dumps({**head, "bytes": len(packed)}).encode() + b"\n" + packed)
            except OSError:  # the disk is full: nothing piles up
                self._packed.clear()
                raise
        if self._file is not None:
            self._file.flush()

    def close(self, **facts: Any) -> None:
        """Write what waits, and that the trace is complete."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._file is not None:
                self.flush()
                self._block({"end": self.counts, "facts": facts}, b"")
                self._write_packed(0)
                self._file.close()
                self._file = None
                self._packing.shutdown(wait=False)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Trace:
    """A trace in memory: `trace["operators"]["name"]` is a column, `trace.texts` are its texts."""

    def __init__(self, tables: dict[str, dict[str, Any]], texts: list[str], facts: dict[str, Any], path: Path) -> None:
        self._tables, self.texts, self.facts, self.path = tables, texts, facts, path

    def __getitem__(self, table: str) -> dict[str, Any]:
        return self._tables[table]

    def count(self, table: str) -> int:
        """How many rows a table has."""
        return len(next(iter(self._tables[table].values())))

    def words(self, table: str, column: str) -> list[str]:
        """The texts of a column."""
        texts = self.texts
        return [texts[number] for number in self._tables[table][column].tolist()]

    @property
    def rank(self) -> int:
        """The rank that recorded it."""
        return int(self.facts.get("rank", 0))  # `read` has looked at it

    @property
    def world(self) -> int:
        """How many ranks the run had."""
        return int(self.facts.get("world", 1))


def files_of(run: Path) -> list[Path]:
    """The traces of a run, by rank: a file itself, or those in a folder (`files_of(Path("run"))`)."""
    if not run.exists():
        raise TraceError(f"{run}: no such file or folder")
    if run.is_file():
        return [run]
    return sorted(runs_in(run)[-1].glob(f"*{SUFFIX}"), key=lambda file: (rank_of(file), file.name))


def runs_in(folder: Path) -> list[Path]:
    """The runs in a folder, the newest one last: itself, or those right below it (`runs_in(Path("results"))`)."""
    found = sorted(folder.glob(f"*{SUFFIX}")) or sorted(folder.glob(f"*/*{SUFFIX}"))
    if not found:
        raise TraceError(f"{folder}: no trace (*{SUFFIX}) in it")
    newest: dict[Path, float] = {}
    for file in found:
        newest[file.parent] = max(newest.get(file.parent, 0.0), os.lstat(file).st_mtime)
    return sorted(newest, key=lambda run: newest[run])


def rank_of(file: Path) -> int:
    """The rank that wrote a file, by its name (`rank_of(Path("rank3.optrace")) == 3`)."""
    digits = "".join(c for c in file.stem if c.isdecimal() and c.isascii())
    return int(digits[:18]) if digits else 0


def read(path: Path, tables: Iterable[str] | None = None, partial: bool = False) -> Trace:
    """Read a trace; one clear line where that is not possible (`read(Path("rank0.optrace"))`).

    `partial` accepts one whose end is missing, as a run that was killed leaves it.
    """
    wanted = frozenset(TABLES if tables is None else tables)
    parts: dict[str, list[list[Any]]] = {name: [] for name in TABLES}
    texts: list[str] = []
    facts: dict[str, Any] = {}
    complete, written = False, dict[str, int]()
    try:
        if not path.is_file() and path.exists():  # opening a pipe would block
            raise TraceError(f"{path}: is not a regular file")
        with path.open("rb") as file:
            _check_head(path, file.readline(_MAX_LINE))
            file_size = os.fstat(file.fileno()).st_size
            budget = _MAX_RATIO * file_size + (1 << 20)
            while line := file.readline(_MAX_LINE):
                if not line.endswith(b"\n") and file.tell() == file_size:
                    break  # cut off in the middle of a line
                try:
                    head = json.loads(line)
                    size = int(head["bytes"])
                    if size < 0:
                        raise ValueError("a negative size")
                    if size > file_size - file.tell():
                        raise EOFError
                    if head.get("table") in TABLES and head["table"] not in wanted:
                        packed = b""
                        file.seek(size, os.SEEK_CUR)
                    else:
                        packed = file.read(size)
                    facts.update(head.get("facts", {}))
                    if "end" in head:
                        complete = True
                        written = {str(name): int(count) for name, count in head["end"].items()}
                    elif "texts" in head:
                        body = _unpacked(packed, budget)
                        budget -= len(body)
                        texts += [str(text) for text in json.loads(body)]
                    elif head.get("table") in wanted:
                        name = head["table"]
                        rows = int(head["rows"])
                        body = _unpacked(packed, min(budget, rows * _row_bytes(name)))
                        budget -= len(body)
                        parts[name].append(_columns(name, rows, body))
                    elif "table" in head and head["table"] not in TABLES:
                        raise ValueError("a table of another name")
                except EOFError:
                    break
                except (
                    ArithmeticError,
                    ValueError,
                    LookupError,
                    TypeError,
                    AttributeError,
                    RecursionError,
                    zlib.error,
                ) as error:
                    raise TraceError(f"{path}: damaged after byte {file.tell():,} ({type(error).__name__})") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not complete and not partial:
        rows = sum(len(part[0]) for part in parts["operators"])
        raise TraceError(
            f"{path}: its end is missing (the run was stopped, or the file is cut off); --partial reads the "
            f"{rows:,} operators that are there"
        )
    found = {name: _joined(name, parts[name]) for name in wanted}
    for name, columns in found.items():
        for column, kind in TABLES[name].items():
            if (
                kind == "text"
                and len(columns[column])
                and not 0 <= columns[column].min() <= columns[column].max() < len(texts)
            ):
                raise TraceError(f"{path}: damaged (a text that is not there)")
    if not complete:
        drop_loose(found, _POINTERS)
    elif any(len(next(iter(found[name].values()))) != count for name, count in written.items() if name in found):
        raise TraceError(f"{path}: damaged (rows are missing)")
    if wrong := points_nowhere(found, _POINTERS, _LIMITS):
        raise TraceError(f"{path}: damaged ({wrong} is not there)")
    for name, least in (("rank", 0), ("world", 1)):
        if type(facts.get(name, least)) is not int or not least <= facts.get(name, least) < _MAX_WORLD:
            raise TraceError(f"{path}: damaged ({name} {str(facts[name])[:40]!r} makes no sense)")
    return Trace(found, texts, facts, path)


def _check_head(path: Path, line: bytes) -> None:
    if not line.startswith(NAMED):
        raise TraceError(f"{path}: is not an op_tools trace")
    version = line[len(NAMED) :].strip().decode("ascii", "replace")
    if version != str(VERSION):
        raise TraceError(f"{path}: a trace of version {version[:20]}; this op_tools reads version {VERSION}")


def _unpacked(packed: bytes, limit: int) -> bytes:
    """A block unpacked, which may not be larger than it says: a small file must not cost gigabytes."""
    unpacking = zlib.decompressobj()
    body = unpacking.decompress(packed, max(0, limit) + 1)
    if len(body) > limit or not unpacking.eof:
        raise ValueError("a block of another size")
    return body


def _row_bytes(table: str) -> int:
    return sum(np.dtype(_NUMPY.get(kind, kind)).itemsize for kind in TABLES[table].values())


def _columns(table: str, rows: int, body: bytes) -> list[Any]:
    found, at = [], 0
    for kind in TABLES[table].values():
        dtype = np.dtype(_NUMPY.get(kind, kind))
        found.append(np.frombuffer(body, dtype, rows, at))
        at += rows * dtype.itemsize
    if at != len(body):
        raise ValueError("a block of another size")
    return found


def _joined(table: str, parts: Sequence[list[Any]]) -> dict[str, Any]:
    columns = TABLES[table]
    if not parts:
        return {name: np.empty(0, _NUMPY.get(kind, kind)) for name, kind in columns.items()}
    return {name: np.concatenate([part[i] for part in parts]) for i, name in enumerate(columns)}
