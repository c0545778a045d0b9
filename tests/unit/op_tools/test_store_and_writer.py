"""Records and background writing: bounded, batched, readable at any time."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import sqlite3
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_tools import OpObserve, OpTimeMeasure, cli
from op_tools.copies import queue
from op_tools.copies.queue import Writer
from op_tools.report.records import Records
from op_tools.settings import SettingsError, results_dir
from op_tools.view import store, timings
from op_tools.view.store import Store, write_csv


def test_rows_are_readable_while_the_store_is_open() -> None:
    records = Store(Path("r.sqlite").absolute())
    rows = records.table("ops", {"name": "TEXT", "n": "INTEGER"})
    for n in range(10):
        rows.append(("torch.add", n))
    records.flush()
    with sqlite3.connect("r.sqlite") as other:
        assert other.execute("SELECT count(*) FROM ops").fetchone() == (10,)
    assert records.rows("SELECT max(n) AS top FROM ops") == [{"top": 9}]
    records.close()


def test_many_rows_are_added_at_once() -> None:
    tool = OpObserve()
    with tool:
        tool.record_all((n, None, n, b"") for n in range(3))
    assert [row["step"] for row in tool.records()] == [0, 1, 2]


def test_an_idle_run_is_written_without_being_asked() -> None:
    records = Store(Path("r.sqlite").absolute())
    records.table("ops", {"name": "TEXT"}).append(("torch.add",))
    end = time.monotonic() + 20
    count = 0
    while not count and time.monotonic() < end:
        time.sleep(0.2)
        with sqlite3.connect("r.sqlite") as other:
            (count,) = other.execute("SELECT count(*) FROM ops").fetchone()
    assert count == 1
    records.close()


def test_the_number_of_rows_is_bounded() -> None:
    records = Store(Path("r.sqlite").absolute(), max_rows=100)
    rows = records.table("ops", {"n": "INTEGER"})
    for n in range(20_000):
        rows.append((n,))
        records.flush_when_due(rows)
        assert len(rows) < 4000
    records.flush()
    (row,) = records.rows("SELECT count(*) AS n FROM ops")
    assert row["n"] <= 4000
    assert records.dropped >= 16_000
    assert not rows
    records.close()


def test_a_site_is_described_once() -> None:
    records = Store(Path("r.sqlite").absolute())
    calls = []
    for _ in range(3):
        assert records.site("key", "torch.add", "here", lambda: calls.append(1)) == 0
    assert records.site("other", "torch.add", "there", str) == 1
    assert calls == [1]
    assert len(records.rows("SELECT * FROM sites")) == 2
    records.close()


def test_a_forked_child_does_not_write_to_its_parents_file() -> None:
    records = Store(Path("r.sqlite").absolute())
    rows = records.table("ops", {"n": "INTEGER"})
    rows.append((1,))
    child = os.fork()
    if child == 0:
        try:
            store.forget_in_child()
            rows.append((2,))
            records.flush()
            records.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert records.rows("SELECT n FROM ops") == [{"n": 1}]
    records.close()


def test_csv_has_one_header_and_appears_whole() -> None:
    path = write_csv(Path("a/b.csv"), ["x", "y"], [[1, 2], [3, 4]])
    assert path.read_text().split() == ["x,y", "1,2", "3,4"]
    assert [p.name for p in Path("a").iterdir()] == ["b.csv"]


def test_the_queue_never_holds_more_than_it_may() -> None:
    writer = Writer(max_bytes=100, threads=2)
    done: list[int] = []

    def slowly(n: int) -> None:
        time.sleep(0.001)
        done.append(n)

    for n in range(50):
        assert writer.reserve(30)
        writer.submit(30, lambda n=n: slowly(n))
    writer.drain()
    assert sorted(done) == list(range(50))
    assert writer.peak_bytes <= 100
    assert writer.waited > 0
    writer.close()


def test_a_job_larger_than_the_queue_still_gets_through() -> None:
    writer = Writer(max_bytes=10)
    assert writer.reserve(1000)
    done = threading.Event()
    writer.submit(1000, done.set)
    writer.drain()
    assert done.is_set()
    writer.close()


def test_a_job_that_is_claimed_in_two_parts_does_not_wait_for_itself() -> None:
    writer = Writer(max_bytes=10)
    done: list[bool] = []

    def claim() -> None:
        done.extend((writer.reserve(1000), writer.reserve(5), writer.reserve(0)))

    thread = threading.Thread(target=claim, daemon=True)
    thread.start()
    thread.join(5)
    assert done == [True, True, True]
    writer.submit(1005, lambda: None)
    writer.close()


def test_many_small_jobs_are_bounded_by_their_number() -> None:
    writer = Writer(max_bytes=1 << 30, max_jobs=3)
    go = threading.Event()
    for _ in range(3):
        assert writer.reserve(1)
        writer.submit(1, lambda: bool(go.wait(10)))
    threading.Timer(0.2, go.set).start()
    assert writer.reserve(1)  # waits
    assert go.is_set()
    writer.submit(1, lambda: None)
    assert writer.waited >= 1
    writer.close()


def _with_an_old_job(go: threading.Event, **options: bool) -> Writer:
    writer = Writer(max_bytes=1 << 30, max_age=0.02, **options)
    for _ in range(2):  # the thread is busy with the first, so the second waits
        writer.submit(0, lambda: bool(go.wait(30)))
    time.sleep(0.05)
    return writer


def test_a_run_waits_while_jobs_are_old() -> None:
    go = threading.Event()
    writer = _with_an_old_job(go)
    threading.Timer(0.2, go.set).start()
    assert writer.reserve(1)
    assert go.is_set()
    assert writer.paused_seconds > 0
    assert not writer.waited  # there was room
    writer.submit(1, lambda: None)
    writer.drain()
    began = writer.paused_seconds
    assert writer.reserve(1)
    assert writer.paused_seconds - began < 0.02  # nothing is old
    writer.release(1)
    writer.close()


def test_a_run_does_not_wait_for_old_jobs_that_wait_for_it() -> None:
    go = threading.Event()
    writer = _with_an_old_job(go)
    assert writer.reserve(1)  # after a second
    writer.release(1)
    dropping = _with_an_old_job(go, drop_when_full=True)
    assert dropping.reserve(1)
    dropping.release(1)
    assert not dropping.paused_seconds
    go.set()
    writer.close()
    dropping.close()


def test_dropping_instead_of_waiting() -> None:
    writer = Writer(max_bytes=10, drop_when_full=True)
    gate = threading.Event()
    assert writer.reserve(10)
    writer.submit(10, lambda: bool(gate.wait(10)) or None)
    assert not writer.reserve(5)
    gate.set()
    writer.drain()
    assert writer.reserve(5)
    assert writer.dropped == 1
    writer.release(5)
    writer.close()


def test_a_job_that_fails_frees_its_room_and_the_next_one_runs() -> None:
    writer = Writer(max_bytes=10)
    done = threading.Event()

    def fail() -> None:
        raise ValueError("no")

    for job in (fail, done.set):
        assert writer.reserve(10)
        writer.submit(10, job)
    writer.drain()
    assert done.is_set()
    assert writer._bytes == 0
    assert str(writer.last_error) == "no"
    writer.close()


def test_a_patient_writer_leaves_a_burst_alone_then_works() -> None:
    writer = Writer(max_bytes=100, patience=0.3)
    done: list[int] = []
    for n in range(4):
        assert writer.reserve(10)
        writer.submit(10, lambda n=n: done.append(n))
    assert done == []
    end = time.monotonic() + 10
    while len(done) < 4 and time.monotonic() < end:
        time.sleep(0.05)
    assert done == [0, 1, 2, 3]
    for n in range(8):  # more than half full: no patience
        assert writer.reserve(10)
        writer.submit(10, lambda n=n: done.append(n))
    writer.drain()
    assert len(done) == 12
    writer.close()


def test_cells_that_a_spreadsheet_would_execute_are_quoted(tmp_path: Path) -> None:
    write_csv(tmp_path / "x.csv", ["=head"], [["=cmd|' /C calc'!A0", "+1", "-inf", "@sum", "plain", -2.5]])
    assert (tmp_path / "x.csv").read_text().splitlines()[1] == "'=cmd|' /C calc'!A0,+1,-inf,'@sum,plain,-2.5"


def test_rows_of_a_file_that_was_removed_are_still_read(tmp_path: Path) -> None:
    records = Store(tmp_path / "x.sqlite")
    records.table("numbers", {"n": "INTEGER"}).extend([(1,), (2,)])
    records.flush()
    for path in tmp_path.iterdir():
        path.unlink()
    assert list(records.stream("SELECT n FROM numbers ORDER BY n")) == [(1,), (2,)]
    records.close()


def test_many_times_are_written_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, records = 10_000, Store(tmp_path / "x.sqlite")
    columns = {"run": "INTEGER", **OpTimeMeasure.columns}
    waiting = records.table("op_time_measure", columns)
    for site, op in enumerate(("torch.add", '=evil,"op"')):
        records.site(site, op, "a.py:1", str)
    for phase in ("forward", "backward"):
        for number in range(rows):
            waiting.append((7, number, number % 2, phase, number / 8, float(number), 1, 0))
    records.flush()
    monkeypatch.setattr(timings, "_MAX_HELD", rows)
    times = timings.Times(records, 7)
    times.add(np.zeros(2 * rows, timings.ROW))  # too many to be at hand
    tracemalloc.start()
    times.write_csv(tmp_path / "x.csv")
    times.write_trace(tmp_path / "x.json")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 << 20  # all rows together take three times that
    with (tmp_path / "x.csv").open(newline="") as file:
        found = list(csv.reader(file))
    assert found[1:3] == [
        ["torch.add", "0", "0.00000000", "0.00000000", "ms"],
        ['\'=evil,"op"', "1", *["0.12500000"] * 2, "ms"],
    ]
    assert len(found) == rows + 1
    assert len(json.loads((tmp_path / "x.json").read_text())["traceEvents"]) == 2 * rows
    records.close()


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 1), st.floats(0, 1e4)), max_size=12), st.integers(1, 4))
def test_times_at_hand_and_in_the_records_are_the_same_files(given_rows: list[Any], at_once: int) -> None:
    """Some calls were not run backward, some twice, some only backward; parts may end within a call."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        records = Store(folder / "x.sqlite")
        waiting = records.table("op_time_measure", {"run": "INTEGER", **OpTimeMeasure.columns})
        for site in range(7):
            records.site(site, f"op{site}", "a.py:1", str)
        rows = np.zeros(len(given_rows), timings.ROW)
        for place, (number, backward, elapsed) in enumerate(given_rows):
            rows[place] = (number, number % 7, backward, 5, 3, elapsed, place / 8)
            waiting.append((7, number, number % 7, timings.PHASES[backward], elapsed, place / 8, 5, 3))
        records.flush()
        patch.setattr(timings, "_AT_ONCE", at_once)
        found = []
        for most in (100, -1):
            patch.setattr(timings, "_MAX_HELD", most)
            times = timings.Times(records, 7)
            times.add(rows)
            times.write_csv(folder / "x.csv")
            times.write_trace(folder / "x.json")
            found.append([(folder / one).read_text() for one in ("x.csv", "x.json")])
        records.close()
    assert found[0] == found[1]
    lines = list(csv.reader(found[0][0].splitlines()))[1:]
    expected = {
        number: [
            next((f"{e:.8f}" for n, b, e in reversed(given_rows) if (n, b) == (number, phase)), "") for phase in (0, 1)
        ]
        for number, _, _ in given_rows
    }
    assert {int(line[1]): line[2:4] for line in lines} == expected
    assert [line[0] for line in lines] == [f"op{number % 7}" for number in sorted(expected)]
    assert len(json.loads(found[0][1])["traceEvents"]) == len(given_rows)


@pytest.mark.parametrize("name", ["a#b", "a?b", "a%20b", "a b"])
def test_records_are_shown_whatever_the_path_is(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / name
    records = Store(folder / "x.sqlite")
    records.table("findings", {"tool": "TEXT", "op": "TEXT"})
    waiting = records.table("op_observe", {"run": "INTEGER"})
    waiting.extend([(n,) for n in range(12)])
    records.close()
    before = sorted(tmp_path.rglob("*"))
    assert cli.show_records(folder) == 0
    shown = capsys.readouterr().out
    assert re.search(r"op_observe\W+12\b", shown)
    assert sorted(tmp_path.rglob("*")) == before


def test_text_that_is_no_utf8_and_huge_numbers_cost_no_records(tmp_path: Path) -> None:
    records = Store(tmp_path / "x.sqlite")
    waiting = records.table("found", {"place": "TEXT", "n": "INTEGER"})
    waiting.extend([("plain", 1), ("b\udce4r.py", 2**70), ("after", 3)])
    records.flush()
    waiting.append(("later", 4))
    assert records.failure is None
    assert records.tuples("SELECT * FROM found") == [
        ("plain", 1),
        ("b\\udce4r.py", 2.0**70),
        ("after", 3),
        ("later", 4),
    ]
    records.close()


def test_a_file_that_was_removed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_RESULTS_DIR", str(tmp_path / "results"))
    first = store.current()
    assert store.current() is first
    shutil.rmtree(tmp_path / "results")
    assert not first.is_there
    second = store.current()
    assert second is not first
    assert second.is_there


@pytest.mark.parametrize(
    "declared",
    [
        "CREATE VIEW findings AS WITH RECURSIVE c(x) AS (VALUES (1) UNION ALL SELECT x FROM c) SELECT * FROM c WHERE 0",
        "CREATE TABLE findings (tool, op TEXT GENERATED ALWAYS AS (printf('%.*c', 900000000, 'x')))",
        "CREATE TABLE findings (tool, op TEXT AS (hex(zeroblob(400000000))) STORED)",
        "CREATE VIRTUAL TABLE findings USING fts5(op)",
    ],
)
def test_a_records_file_that_computes_is_refused(
    tmp_path: Path, declared: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "x.sqlite")) as connection:
        connection.execute(declared)
        connection.commit()
    assert cli.show_records(tmp_path) == 2
    assert "is computed: no run writes that" in capsys.readouterr().err
    records = Records(tmp_path / "x.sqlite", {})
    records.refresh()
    assert "is computed" in records.problem


def test_what_is_no_file_is_no_records_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.sqlite")
    (tmp_path / "folder.sqlite").mkdir()
    (tmp_path / "loop.sqlite").symlink_to("loop.sqlite")
    assert cli.show_records(tmp_path) == 2
    assert "no records" in capsys.readouterr().err
    assert cli.show_records(tmp_path / "pipe.sqlite") == 2  # it would wait for somebody to write
    assert "is not a regular file" in capsys.readouterr().err


def test_a_results_folder_too_deep_to_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_RESULTS_DIR", str(tmp_path / ("y/" * 1990)))
    with pytest.raises(SettingsError, match=r"^OP_TOOLS_RESULTS_DIR=.{,300} cannot be written"):
        results_dir()


def test_a_device_is_asked_more_often_the_fuller_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    free, asked = [1000], list[int]()

    def tell() -> int:
        asked.append(free[0])
        return free[0]

    monkeypatch.setattr(queue, "_free_memory", tell)
    memory = queue.FreeMemory(10)
    assert not any(memory.is_low() for _ in range(33))
    assert len(asked) == 1, "much is free: once in 33 calls"
    free[0] = 100
    assert not any(memory.is_low() for _ in range(9))
    assert len(asked) == 2
    free[0] = 19
    assert memory.is_low()
    assert memory.is_low(), "little is free: at every call"
    assert len(asked) == 4


def test_a_device_that_does_not_tell_is_never_low(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("no such device")

    monkeypatch.setattr(queue, "_free_memory", broken)
    assert not any(queue.FreeMemory(10).is_low() for _ in range(3))
