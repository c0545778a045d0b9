"""Times of operators as files: a CSV file and a Chrome trace, written from the records row by row."""

from __future__ import annotations

import csv
import functools
import io
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .console import TIME_COLUMNS
from .store import Store, plain_cell, whole_file

MAX_TRACED: Final = 1_000_000  # events of a trace: no viewer opens more
_AT_ONCE: Final = 10_000  # rows

# One row for each call: the last time of each phase, as text. SQLite sorts on disk and formats, far faster than Python.
_CALLS: Final = """
SELECT r.site, r.call_id,
  substr(max(CASE WHEN r.phase = 'forward' THEN printf('%012d%.8f', r.rowid, r.elapsed_ms) END), 13),
  substr(max(CASE WHEN r.phase = 'backward' THEN printf('%012d%.8f', r.rowid, r.elapsed_ms) END), 13)
FROM op_time_measure r WHERE r.run = ? GROUP BY r.call_id
"""
_EVENTS: Final = """
SELECT r.call_id, s.op, r.phase, r.elapsed_ms, r.start_us, r.thread, r.step, s.location
FROM op_time_measure r JOIN sites s ON s.site = r.site WHERE r.run = ? LIMIT ?
"""


# Sums, so that a question about operators need not read every row again.
TOTALS: Final = {
    "run": "INTEGER",
    "op": "TEXT",
    "phase": "TEXT",
    "calls": "INTEGER",
    "total_ms": "REAL",
    "mean_ms": "REAL",
    "p50_ms": "REAL",
    "p99_ms": "REAL",
    "share": "REAL",
}


def write_totals(store: Store, run: Any, by_op: list[dict[str, Any]]) -> None:
    """Put the sums of a run into the records (`write_totals(store, run, tool.by_op())`)."""
    store.table("op_time_totals", TOTALS).extend((run, *row.values()) for row in by_op)


def calls(store: Store, run: Any) -> Iterator[list[str]]:
    """Operator, id, forward and backward time of each call of a run, and the unit."""
    names = dict(store.tuples("SELECT site, op FROM sites"))
    for site, number, forward, backward in store.stream(_CALLS, (run,)):
        yield [names.get(site, ""), str(number), forward or "", backward or "", "ms"]


def write_csv(path: Path, store: Store, run: Any) -> None:
    """Write the times of a run (`write_csv(path, store, run)`)."""
    names = {site: _cell(op) for site, op in store.tuples("SELECT site, op FROM sites")}
    with whole_file(path) as handle:
        handle.write(",".join(TIME_COLUMNS) + "\r\n")
        rows = store.stream(_CALLS, (run,))
        while some := list(itertools.islice(rows, _AT_ONCE)):
            handle.writelines(
                [f"{names.get(site, '')},{number},{to or ''},{back or ''},ms\r\n" for site, number, to, back in some]
            )


def _cell(text: str) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([plain_cell(text)])
    return line.getvalue()


def write_trace(path: Path, store: Store, run: Any) -> None:
    """Write a Chrome trace of the first calls of a run: launch times of the host, lengths of the device."""
    pid, text = os.getpid(), functools.cache(json.dumps)
    with whole_file(path) as handle:
        handle.write('{"traceEvents": [')
        between = ""
        for call_id, op, phase, elapsed, start, thread, step, location in store.stream(_EVENTS, (run, MAX_TRACED)):
            handle.write(
                f'{between}{{"name": {text(op)}, "cat": "{phase}", "ph": "X", "ts": {start!r}, '
                f'"dur": {elapsed * 1e3!r}, "pid": {pid}, "tid": {thread}, '
                f'"args": {{"forward_id": {call_id}, "step": {step}, "location": {text(location)}}}}}'
            )
            between = ", "
        handle.write('], "displayTimeUnit": "ms"}')
