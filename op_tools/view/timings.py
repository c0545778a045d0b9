"""Times of operators as files: a CSV file and a Chrome trace, written from the records row by row."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .console import TIME_COLUMNS
from .store import Store, quoted_cell, whole_file, write_csv_lines

MAX_TRACED: Final = 1_000_000  # events of a trace: no viewer opens more
_AT_ONCE: Final = 2_000  # rows

# SQLite sorts on disk, so that any number of rows can be put together call by call.
_CALLS: Final = """
SELECT call_id, site, phase, elapsed_ms FROM op_time_measure WHERE run = ? ORDER BY call_id, rowid
"""
_EVENTS: Final = """
SELECT call_id, site, phase, elapsed_ms, start_us, thread, step FROM op_time_measure WHERE run = ? LIMIT ?
"""
_SITES: Final = "SELECT site, op, location FROM sites"


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
    names = {site: op for site, op, _ in store.tuples(_SITES)}
    for site, number, forward, backward in _by_call(store, run):
        yield [names.get(site, ""), str(number), forward, backward, "ms"]


def _by_call(store: Store, run: Any) -> Iterator[tuple[int, int, str, str]]:
    """Site, id, forward and backward time of each call, the last of each; "" where there is none."""
    number, where, forward, backward = None, 0, "", ""
    for call_id, site, phase, elapsed in store.stream(_CALLS, (run,)):
        if call_id != number:
            if number is not None:
                yield where, number, forward, backward
            number, where, forward, backward = call_id, site, "", ""
        if phase == "forward":
            forward = f"{elapsed:.8f}"
        else:
            backward = f"{elapsed:.8f}"
    if number is not None:
        yield where, number, forward, backward


def write_csv(path: Path, store: Store, run: Any) -> None:
    """Write the times of a run (`write_csv(path, store, run)`)."""
    names = {site: quoted_cell(op) for site, op, _ in store.tuples(_SITES)}
    rows = _by_call(store, run)
    lines = (f"{names.get(site, '')},{number},{to},{back},ms\r\n" for site, number, to, back in rows)
    write_csv_lines(path, TIME_COLUMNS, lines)


def write_trace(path: Path, store: Store, run: Any) -> None:
    """Write a Chrome trace of the first calls of a run: launch times of the host, lengths of the device."""
    pid = os.getpid()
    sites = {site: (json.dumps(op), json.dumps(location)) for site, op, location in store.tuples(_SITES)}
    known: dict[tuple[int, str], tuple[str, str]] = {}  # the beginning and the end of an event
    with whole_file(path) as handle:
        handle.write('{"traceEvents": [')
        rows, between = store.stream(_EVENTS, (run, MAX_TRACED)), ""
        while some := list(itertools.islice(rows, _AT_ONCE)):
            events = []
            for call_id, site, phase, elapsed, start, thread, step in some:
                parts = known.get((site, phase))
                if parts is None:
                    op, location = sites[site]
                    first = f'{{"name": {op}, "cat": "{phase}", "ph": "X", "ts": '
                    parts = known[site, phase] = first, f'"location": {location}}}}}'
                events.append(
                    f'{parts[0]}{start:.3f}, "dur": {elapsed * 1e3:.3f}, "pid": {pid}, "tid": {thread}, '
                    f'"args": {{"forward_id": {call_id}, "step": {step}, {parts[1]}'
                )
            handle.write(between + ", ".join(events))
            between = ", "
        handle.write('], "displayTimeUnit": "ms"}')
