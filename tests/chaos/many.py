"""`python -m tests.chaos.many [--rows 10000000]`: what the end of a long run costs, and questions to its records.

The rows are put into the records by SQLite itself, which is quicker than computing for a day; the tool that is stopped
afterwards, its files and `op_tools records` are the real ones. Times are processor times and wall times.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import resource
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

import op_tools
from op_tools import cli
from op_tools.view.store import read_only

OPERATORS: Final = 300
CALLS_OF_A_STEP: Final = 1_000
_FILL: Final = f"""
WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n LIMIT :rows)
INSERT INTO op_time_measure
SELECT :run, i / 2, (i / 2) % {OPERATORS}, CASE i % 2 WHEN 0 THEN 'forward' ELSE 'backward' END,
       (i % 977) / 1000.0, i * 1.5, 1, i / {2 * CALLS_OF_A_STEP} FROM n
"""
_SITES: Final = f"""
WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n LIMIT {OPERATORS})
INSERT OR IGNORE INTO sites SELECT i, 'torch.op' || i, 'train.py:' || i, '[]' FROM n
"""
QUESTIONS: Final = {
    "a sum for each operator": "SELECT op, phase, calls, total_ms FROM op_time_totals ORDER BY total_ms DESC",
    "the number of rows": "SELECT max(rowid) FROM op_time_measure",
    "the last rows": "SELECT * FROM op_time_measure ORDER BY rowid DESC LIMIT 10",
    "the rows of a step": "SELECT * FROM op_time_measure WHERE step = 1234",
    "the rows of a call": "SELECT * FROM op_time_measure WHERE call_id = 1234567",
    "a sum for each operator, from the rows": "SELECT site, sum(elapsed_ms) FROM op_time_measure GROUP BY site",
}


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long something took."""
    wall, processor = time.monotonic(), time.process_time()
    yield
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    shown = f"{time.process_time() - processor:.2f} s of processor time, {time.monotonic() - wall:.2f} s"
    print(f"{what}: {shown}; at most {peak:.0f} MB so far", flush=True)


def stopped(rows: int, folder: Path) -> Path:
    """Stop OpTimeMeasure after so many rows; its records file."""
    os.environ.update(OP_TOOLS_RESULTS_DIR=str(folder), OP_TOOLS_CONSOLE="off", OP_TOOLS_INCLUDE_CPU="1")
    tool = op_tools.OpTimeMeasure().start()
    for _ in range(3):
        torch.ones(3) + 1
    store: Any = tool._store
    store.flush()
    with contextlib.closing(sqlite3.connect(store.path)) as connection:
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute(_SITES)
        with timed(f"{rows:,} rows made"):
            connection.execute(_FILL, {"rows": rows, "run": tool._run_key})
            connection.commit()
    with timed("stop(), with CSV file and trace"):
        tool.stop()
    return Path(store.path)


def ask(path: Path) -> dict[str, float]:
    """Processor seconds of each question."""
    took: dict[str, float] = {}

    def measure(name: str, answer: Callable[[], object]) -> None:
        with timed(name):
            began = time.process_time()
            answer()
            took[name] = time.process_time() - began

    with contextlib.redirect_stdout(io.StringIO()) as shown:
        began = time.process_time()
        assert cli.show_records(path) == 0
        took["op_tools records"] = time.process_time() - began
    assert "op_time_measure" in shown.getvalue()
    print(f"op_tools records: {took['op_tools records']:.3f} s of processor time", flush=True)
    with contextlib.closing(read_only(path)) as connection:
        for name, query in QUESTIONS.items():
            measure(name, lambda query=query: connection.execute(query).fetchall())  # type: ignore[misc]
    return took


def main() -> int:
    """Print what each thing took."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.many", description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="many-") as folder:
        path = stopped(given.rows, Path(folder))
        print(f"{path.stat().st_size / 1e6:.0f} MB of records")
        ask(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
