"""Times of operators as files: a CSV file and a Chrome trace, put together from columns of numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from .console import TIME_COLUMNS
from .store import Store, quoted_cell, whole_file, write_csv_lines

MAX_TRACED: Final = 1_000_000  # events of a trace: no viewer opens more
_MAX_HELD: Final = 100_000  # rows at hand; of a longer run, all are read from the records
_AT_ONCE: Final = 2_000  # of these
PHASES: Final = ("forward", "backward")
# A time: the id of its call, where that was made, whether it is of its backward, the thread, the step, milliseconds,
# and when it began, in microseconds.
ROW: Final = np.dtype(
    [(name, "i8") for name in ("id", "site", "backward", "thread", "step")] + [("elapsed", "f8"), ("start", "f8")]
)

_ROWS: Final = """
SELECT call_id, site, phase = 'backward', thread, step, elapsed_ms, start_us FROM op_time_measure WHERE run = ?
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


class Times:
    """The times of a run: all are in the records, and those of a short run are at hand as well.

    >>> times = Times(store, 7)                    # doctest: +SKIP
    >>> times.add(rows)
    >>> times.write_csv(Path("times.csv"))
    """

    def __init__(self, store: Store, run: Any) -> None:
        self._store, self._run = store, run
        self._held: list[Any] | None = []
        self._count = 0

    def add(self, rows: Any) -> None:
        """Rows (an array of ROW) that are put into the records as well."""
        self._count += len(rows)
        if self._count > _MAX_HELD:
            self._held = None
        if self._held is not None:
            self._held.append(rows)

    def _parts(self, by_call: bool) -> Iterator[Any]:
        """All rows in parts: as they came, or by calls, each of which is in one part."""
        if self._held is not None:
            rows = np.concatenate([np.empty(0, ROW), *self._held])
            yield rows[np.argsort(rows["id"], kind="stable")] if by_call else rows
            return
        # SQLite sorts on disk, so that any number of rows can be put together call by call
        order, parameters = (" ORDER BY call_id, rowid", ()) if by_call else (" LIMIT ?", (MAX_TRACED,))
        left, some = np.empty(0, ROW), list[tuple[Any, ...]]()
        for row in self._store.stream(_ROWS + order, (self._run, *parameters)):
            some.append(row)
            if len(some) == _AT_ONCE:
                left, some = np.concatenate([left, np.array(some, ROW)]), []
                end = int(np.searchsorted(left["id"], left["id"][-1])) if by_call else len(left)
                yield left[:end]
                left = left[end:]
        yield np.concatenate([left, np.array(some, ROW)])

    def calls(self) -> Iterator[tuple[int, int, str, str]]:
        """Site, id, forward and backward time of each call, the last of each; "" where there is none."""
        for rows in self._parts(by_call=True):
            ids, firsts = np.unique(rows["id"], return_index=True)
            texts = []
            for backward in (0, 1):
                own = rows[rows["backward"] == backward]
                is_last = np.append(own["id"][1:] != own["id"][:-1], True)[: len(own)]
                own = own[is_last]
                column = np.full(len(ids), "", dtype=object)
                column[np.searchsorted(ids, own["id"])] = list(map("%.8f".__mod__, own["elapsed"].tolist()))
                texts.append(column.tolist())
            yield from zip(rows["site"][firsts].tolist(), ids.tolist(), *texts)

    def table(self) -> Iterator[list[str]]:
        """Operator, id, forward and backward time of each call, and the unit."""
        names = {site: op for site, op, _ in self._store.tuples(_SITES)}
        for site, number, forward, backward in self.calls():
            yield [names.get(site, ""), str(number), forward, backward, "ms"]

    def write_csv(self, path: Path) -> None:
        """Write forward and backward time of each call (`times.write_csv(path)`)."""
        names = {site: quoted_cell(op) for site, op, _ in self._store.tuples(_SITES)}
        lines = (f"{names.get(site, '')},{number},{to},{back},ms\r\n" for site, number, to, back in self.calls())
        write_csv_lines(path, TIME_COLUMNS, lines)

    def write_trace(self, path: Path) -> None:
        """Write a Chrome trace of the first times: when the host launched, how long it took on the device."""
        ends: dict[tuple[int, int], tuple[str, str]] = {}  # the beginning and the end of an event, by site and phase
        for site, op, location in self._store.tuples(_SITES):
            for backward, phase in enumerate(PHASES):
                head = f'{{"name": {json.dumps(op)}, "cat": "{phase}", "ph": "X", "ts": '
                ends[site, backward] = head, f'"location": {json.dumps(location)}}}}}'
        lost = '{"name": "", "ph": "X", "ts": ', '"location": ""}}'  # the description of the site could not be kept
        event = f'%s%.3f, "dur": %.3f, "pid": {os.getpid()}, "tid": %d, "args": {{"forward_id": %d, "step": %d, %s'
        with whole_file(path) as handle:
            handle.write('{"traceEvents": [')
            between = ""
            for rows in self._parts(by_call=False):
                if not len(rows):
                    continue
                found = [ends.get(key, lost) for key in zip(rows["site"].tolist(), rows["backward"].tolist())]
                numbers = (rows["start"], rows["elapsed"] * 1e3, rows["thread"], rows["id"], rows["step"])
                columns = [[head for head, _ in found], *[one.tolist() for one in numbers], [end for _, end in found]]
                handle.write(between + ", ".join(map(event.__mod__, zip(*columns))))
                between = ", "
            handle.write('], "displayTimeUnit": "ms"}')
