"""The page of a run: what it says first, every view, hostile records, several ranks, and what is no run at all."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ditorch_common.page import Page, View, read_page
from op_tools import cli, losscmp
from op_tools.report import ReportError, Run, page_of
from op_tools.report.columns import REAL, WHOLE, Words, groups, numbers, occurrences, short_floats
from op_tools.report.places import Places
from op_tools.report.small import html_of_tool
from op_tools.report.words import line_of, reason, size_of, source_of, times_bound
from op_tools.trace.format import TraceWriter

from .report_runs import LINE, OP, Written, dead_pid

EVIL = "</script><script>alert(1)</script>\" onload='x' \u202e {{7*7}} \x00 ''--"


def view(page: Page, name: str) -> View:
    return next(view for view in page.views if view.id == name)


def kinds(page: Page, name: str) -> list[str]:
    return [block["kind"] for block in view(page, name).blocks]


def texts(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def table(page: Page, name: str) -> dict[str, list[Any]]:
    found = next(table for table in page.tables if table.name == name)
    return {c.name: c.texts() if c.is_words else c.values.tolist() for c in found.columns}


def test_the_reason_of_a_wrong_call_is_said_in_both_languages() -> None:
    told = reason("8 of 9 elements, worst at [3, 60]: 2.5 instead of 0.8, 2.54e+05 times the rounding bound")
    assert told["zh"] == "9 个元素中有 8 个错误，最差处 [3, 60]：得到 2.5，应为 0.8，是舍入界的 2.54e+05 倍"
    assert "舍入界" not in reason("1 of 1 elements, worst at []: nan instead of 0.8")["zh"]
    assert reason(EVIL) == EVIL


# -- the verdict -------------------------------------------------------------------------------------------


def test_the_first_wrong_operator_comes_first(tmp_path: Path) -> None:
    written = Written(tmp_path).compared(1).compared(2, "wrong", excess=1000.0)
    folder = written.wrong(2).wrong(9, op="torch.add", step=1).end("70 comparisons, 2 wrong", "first wrong: x").close()
    page = page_of(Run(folder))
    banner = page.views[0].blocks[0]
    assert page.views[0].id == "verdict"
    assert banner["state"] == "wrong"
    assert banner["headline"]["en"] == f"Wrong: {OP} (forward) in block.0"
    assert banner["lines"][0] == "/home/me/model.py:27   return self.down(x)"
    assert f"op_tools run OpFallback --ops {OP} train.py --steps 3" in banner["lines"][2]["en"]
    shown = kinds(page, "verdict")
    assert shown[1:4] == ["code", "facts", "group"]
    assert {"histogram", "tensor_map", "table"} <= set(shown)
    commands = texts(page.views[0].blocks[3])
    assert "python '/tmp/saved one/28/reproduce.py'" in commands
    assert "OpDtypeCast" in commands  # its arguments are of few bits
    assert "70 comparisons, 2 wrong" in texts(page.views[0].blocks)
    assert table(page, "wrong")["operator"] == [OP, "torch.add"]
    facts = {row[0]["en"]: row[1] for row in page.views[0].blocks[2]["rows"]}
    assert facts["later calls that used it"] == "7"
    assert facts["largest error"]["en"].startswith("1,000 ")
    assert facts["largest error"]["zh"] == "舍入界的 1,000 倍"


def test_the_map_shows_the_wrong_row(tmp_path: Path) -> None:
    page = page_of(Run(Written(tmp_path).compared(2, "wrong").wrong(2).close()))
    found = {block["kind"]: block for block in page.views[0].blocks}
    assert found["tensor_map"]["cells"] == [0.0] * 18 + [1.0] * 6
    assert found["histogram"]["mark"] == 1.0
    assert sum(found["histogram"]["counts"]) == 24


@pytest.mark.parametrize(("case", "state"), [("right", "right"), ("nothing", "unknown"), ("overflow", "wrong")])
def test_other_answers(case: str, state: str, tmp_path: Path) -> None:
    written = Written(tmp_path)
    if case == "right":
        written.compared(1).end("1 comparison, 0 wrong; every call that computes was compared")
    elif case == "overflow":
        written.compared(1).found("overflow", "made inf").end()
    else:
        written.timed(1).end()
    banner = page_of(Run(written.close())).views[0].blocks[0]
    assert banner["state"] == state
    if case == "nothing":
        assert "op_tools run OpAutoCompare train.py --steps 3" in banner["lines"]


def test_wrong_rows_without_a_finding_are_wrong(tmp_path: Path) -> None:
    page = page_of(Run(Written(tmp_path).compared(1).compared(5, "wrong", step=3).close()))
    assert page.views[0].blocks[0]["state"] == "wrong"


def test_a_run_that_goes_on_and_one_that_was_killed(tmp_path: Path) -> None:
    going = Written(tmp_path / "a", pid=os.getpid()).compared(1)
    killed = Written(tmp_path / "b", pid=dead_pid()).compared(1)
    for written in (going, killed):
        written.store.flush()  # nobody closes it
    assert Run(tmp_path / "a").state == "running"
    run = Run(tmp_path / "b")
    assert run.state == "stopped"
    banner = page_of(run).views[0].blocks[0]
    assert "stopped before its end" in texts(banner)
    assert "1 calls compared so far" in texts(page_of(run).views[0].blocks)


def test_records_are_read_on_where_they_grew(tmp_path: Path) -> None:
    written = Written(tmp_path).compared(1)
    written.store.flush()
    run = Run(tmp_path)
    assert run.count("op_autocompare") == 1
    assert not run.refresh()
    written.compared(2, op="torch.add", line="b.py:1 f: x").store.flush()
    assert run.refresh()
    assert table(page_of(run), "comparisons")["operator"] == [OP, "torch.add"]
    assert table(page_of(run), "comparisons")["line"] == ["/home/me/model.py:27", "b.py:1"]


# -- other views -------------------------------------------------------------------------------------------


def test_times_by_operator_module_and_step(tmp_path: Path) -> None:
    written = Written(tmp_path)
    for step in range(3):
        for layer in range(2):
            call = 10 * step + layer + 1
            written.timed(call, ms=1.0 + layer, step=step).timed(call, "backward", 2.0, step)
            if step == 0:
                written.placed(call, f"layers.{layer}")
    page = page_of(Run(written.close()))
    rows = table(page, "times_by_op")
    assert dict(zip(rows["phase"], rows["total"])) == {"forward": 9.0, "backward": 12.0}
    assert sum(rows["share"]) == pytest.approx(100)
    flame = next(b for b in view(page, "time").blocks if b["kind"] == "flame")
    values = {name: value for _, name, value in flame["nodes"]}
    assert values["forward"] == 9.0
    assert table(page, "times")["module"] == [f"layers.{n % 4 // 2}" for n in range(12)]  # later steps by their order
    assert next(b for b in view(page, "time").blocks if b["kind"] == "lines")["x"] == [0, 1, 2]
    assert next(b for b in view(page, "time").blocks if b["kind"] == "timeline")["rows"] == ["forward", "backward"]


def test_times_open_in_perfetto_where_they_are_served(tmp_path: Path) -> None:
    run = Run(Written(tmp_path).timed(1).close())
    served = page_of(run, perfetto="http://127.0.0.1:9001/trace.json?token=a&b")
    last = view(served, "time").blocks[-1]
    assert last["text"].startswith(
        "https://ui.perfetto.dev/#!/?url=http%3A%2F%2F127.0.0.1%3A9001%2Ftrace.json%3Ftoken%3Da%26b"
    )
    assert "perfetto" not in texts(view(page_of(run), "time").blocks)


def test_overflow_is_layer_by_step(tmp_path: Path) -> None:
    written = Written(tmp_path).found("overflow", "made inf")
    for step in range(3):
        for layer in range(2):
            call = 10 * step + layer + 1
            written.measured(call, largest=10.0 ** (step + layer), step=step)
            if step == 0:
                written.placed(call, f"layers.{layer}")
    page = page_of(Run(written.close()))
    heat = next(b for b in view(page, "overflow").blocks if b["kind"] == "heat")
    assert heat["rows"] == ["layers.0 linear", "layers.1 linear"]
    assert heat["columns"] == ["0", "1", "2"]
    assert heat["values"] == [1.0, 10.0, 100.0, 10.0, 100.0, 1000.0]
    assert view(page, "overflow").blocks[0]["state"] == "wrong"
    assert table(page, "statistics")["role"] == ["output"] * 6


def test_two_ranks_are_side_by_side_and_an_earlier_run_is_not(tmp_path: Path) -> None:
    Written(tmp_path, rank=0, world=2, pid=1, began="08-00-00").compared(1, "wrong").close()
    Written(tmp_path, rank=0, world=2, pid=2).compared(1).timed(1, ms=3.0).end().close()
    Written(tmp_path, rank=1, world=2, pid=3, began="10-00-02").compared(1).compared(4, "wrong").timed(1).close()
    run = Run(tmp_path)
    assert run.ranks == [0, 1]
    assert run.earlier == 1
    page = page_of(run)
    assert table(page, "ranks")["compared"] == [1, 2]
    assert table(page, "ranks")["wrong"] == [0, 1]
    assert table(page, "comparisons")["rank"] == [0, 1, 1]
    assert view(page, "ranks").blocks[1]["values"] == [3.0, 1.0]
    assert "4, step 0, rank 1" in texts(page.views[0].blocks)


def test_views_without_data_say_what_to_run(tmp_path: Path) -> None:
    page = page_of(Run(Written(tmp_path).compared(1).end().close()))
    for name in ("diff", "time", "memory", "overflow", "loss", "captures", "ranks"):
        empty = view(page, name)
        assert not empty.blocks
        assert isinstance(empty.empty, dict)
        assert all("op_tools" in text for text in empty.empty.values())
        assert set(empty.empty) == {"en", "zh"}


def _metrics(path: Path, losses: list[float]) -> Path:
    path.write_text(
        "\n".join(json.dumps({"iteration": n, "total_loss": x, "losses": [x]}) for n, x in enumerate(losses))
    )
    return path


def test_losses_have_a_band_and_marks(tmp_path: Path) -> None:
    folder = Written(tmp_path / "run").compared(2, "wrong").wrong(2, step=3).close()
    noise = np.random.default_rng(0).standard_normal(60) * 0.01
    healthy, faulty = (5 - np.arange(60) / 40 + noise).tolist(), (5 - np.arange(60) / 90 + noise).tolist()
    files = [_metrics(tmp_path / "a.metrics.json", faulty), _metrics(tmp_path / "b.metrics.json", healthy)]
    found = view(page_of(Run(folder, files)), "loss").blocks
    assert found[0]["state"] == "wrong"  # it leaves the reference
    assert found[1]["series"][0]["band"] is None
    low, high = found[1]["series"][1]["band"]
    assert all(a <= x <= b for a, x, b in zip(low, healthy, high))
    assert found[1]["marks"][0]["x"] == 3.0


def test_a_band_holds_what_scatters_alike() -> None:
    losses = np.sin(np.arange(200.0))
    curve = losscmp.Curve("a", np.arange(200), losses, True)
    low, high = losscmp.band(curve, losscmp.Curve("b", np.arange(200), np.cos(np.arange(200.0)), True))
    assert ((low < losses) & (losses < high)).all()


def test_a_band_of_the_same_data_is_as_narrow_as_the_difference() -> None:
    noise = np.random.default_rng(0).standard_normal(200)
    one, two = (losscmp.Curve("a", np.arange(200), 5 + noise + more, True) for more in (0.0, 0.001 * noise[::-1]))
    low, high = losscmp.band(one, two)
    assert ((low <= two.losses) & (two.losses <= high)).all()
    assert (high - low).max() < 0.05
    assert ((two.losses + 0.1 < low) | (two.losses + 0.1 > high)).all()


# -- hostile and damaged records ---------------------------------------------------------------------------


def test_hostile_texts_are_shown_and_not_run(tmp_path: Path) -> None:
    written = Written(tmp_path).compared(2, "wrong", op=EVIL, module=EVIL, line=f"{EVIL}:3 f: {EVIL}", reason=EVIL)
    written.wrong(2, op=EVIL, module=EVIL, line=f"{EVIL}:3 f: {EVIL}", reason=EVIL, folder=EVIL)
    folder = written.timed(1, op=EVIL).found(EVIL, EVIL, op=EVIL).end(EVIL).close()
    html = page_of(Run(folder)).html()
    assert "could not be made" not in html
    plain = page_of(Run(Written(tmp_path / "plain").compared(1).close())).html()
    assert html.count("<script>") == plain.count("<script>")
    assert "<script>alert" not in html
    head, tables = read_page(html)
    assert head["views"][0]["blocks"][0]["headline"]["en"].startswith(f"Wrong: {EVIL}")
    assert EVIL in next(c for c in tables["comparisons"].columns if c.name == "operator").dictionary


def test_values_of_other_types_do_no_harm(tmp_path: Path) -> None:
    written = Written(tmp_path).compared(1).timed(1)
    written.store.flush()
    written.close()
    with sqlite3.connect(written.path) as connection:
        connection.execute("UPDATE op_autocompare SET call_id = 'x', excess = x'00ff', step = 1e300, module = 7")
        connection.execute("UPDATE op_time_measure SET elapsed_ms = 'soon', site = 99999999999999")
        connection.execute("UPDATE runs SET facts = '[1', rank = 'first', pid = -5")
        connection.execute("CREATE TABLE wrong (op TEXT, picture TEXT, source TEXT, step TEXT)")
        connection.execute("INSERT INTO wrong VALUES ('a', '{\"edges\": 3}', '{\"lines\": [[1]]}', 'x')")
        connection.execute('CREATE TABLE doctor (found TEXT, "a""; DROP TABLE runs" TEXT)')
        connection.execute("INSERT INTO doctor VALUES ('{\"gaps\": 3}', '')")
    page = page_of(Run(tmp_path))
    assert page.views[0].blocks[0]["state"] == "wrong"
    assert "could not be made" not in page.html()


def test_a_damaged_trace_does_not_hide_the_verdict(tmp_path: Path) -> None:
    Written(tmp_path).compared(2, "wrong").wrong(2).close()
    with TraceWriter(tmp_path / "rank0.optrace", {"rank": 0}) as trace:
        name = trace.text("torch.add")
        trace.add("operators", (0, 0, name, 7, 0, 0, 0, 0, 0, 0, -1, 0.0, 0))
        trace.add("edges", (0, 1, 0, 99))  # a tensor that is not there
    page = page_of(Run(tmp_path))
    assert page.views[0].blocks[0]["state"] == "wrong"
    assert "could not be made" in texts(view(page, "graph").blocks)
    assert [one.id for one in page.views if "could not be made" in texts(one.blocks)] == ["graph"]


def test_records_of_earlier_versions_have_fewer_tables(tmp_path: Path) -> None:
    path = tmp_path / "records_pid1_x.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE sites (site INTEGER PRIMARY KEY, op TEXT, location TEXT, described TEXT)")
        connection.execute("INSERT INTO sites VALUES (0, 'torch.add', 'a.py:1 f: x', '{}')")
        connection.execute("CREATE TABLE op_autocompare (call_id INTEGER, site INTEGER, verdict TEXT)")
        connection.execute("INSERT INTO op_autocompare VALUES (1, 0, 'right')")
        connection.execute("CREATE TABLE findings (tool TEXT, op TEXT, kind TEXT, message TEXT)")
        connection.execute("INSERT INTO findings VALUES ('OpAutoCompare', 'torch.add', 'difference', 'wrong')")
    page = page_of(Run(path))
    assert page.views[0].blocks[0]["headline"]["en"] == "Wrong: torch.add (forward)"
    assert table(page, "comparisons")["operator"] == ["torch.add"]


@pytest.mark.parametrize("case", ["missing", "empty", "other files", "damaged", "text"])
def test_what_is_no_run_is_one_clear_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    if case != "missing":
        folder.mkdir()
    if case == "other files":
        (folder / "notes.txt").write_text("x")
    if case == "damaged":
        (folder / "records_pid1.sqlite").write_bytes(b"SQLite format 3\x00" + b"\xff" * 5000)
    if case == "text":
        folder = folder / "a.txt"
        folder.write_text("x")
    with pytest.raises(ReportError):
        Run(folder)
    assert cli.main(["report", str(folder), "-o", str(tmp_path / "x.html")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(folder) in said or "records_pid1" in said
    assert not (tmp_path / "x.html").exists()


def test_the_command_writes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Written(tmp_path / "run").compared(2, "wrong").wrong(2).close()
    assert cli.main(["report", str(folder)]) == 0
    assert f"first wrong: linear (forward) in block.0, {line_of(LINE)}" in capsys.readouterr().out
    head, tables = read_page((tmp_path / "run.html").read_text())
    assert head["title"] == "op_tools: run"
    assert "comparisons" in tables
    assert cli.main(["report", str(folder), "-o", str(tmp_path)]) == 2
    assert cli.main(["report", str(folder), "-o", str(tmp_path / "no" / "x.html")]) == 2
    assert cli.main(["report", str(folder), "--loss", str(tmp_path / "none.json")]) == 2
    assert cli.main(["report", str(folder), "--against", str(folder)]) == 2  # there is no trace
    assert capsys.readouterr().err.count("\n") == 4


def test_a_notebook_shows_the_answer_without_scripts(tmp_path: Path) -> None:
    written = Written(tmp_path).compared(2, "wrong", op=EVIL).wrong(2, op=EVIL, module=EVIL).timed(1, op=EVIL)
    written.close()
    shown = html_of_tool(written.path, 1, "OpAutoCompare")
    assert "Wrong: " in shown
    assert "<script" not in shown
    assert "alert(1)" in shown
    assert html_of_tool(written.path, 7, "OpTimeMeasure") == ""  # another run of the same process
    assert "1 ms" in html_of_tool(written.path, 1, "OpTimeMeasure")


# -- parts ---------------------------------------------------------------------------------------------------


def test_places_by_order_need_the_same_line_and_operator(tmp_path: Path) -> None:
    written = Written(tmp_path).placed(1, "a").placed(2, "b").placed(3, "c", op="torch.add")
    run = Run(written.compared(9, module="").close())
    op, line = run.words["op"].codes([OP, OP, "torch.add", OP]), run.words["location"].codes([LINE] * 4)
    step = np.array([5, 5, 5, 5])
    found = Places(run).of(np.zeros(4, np.int64), np.array([11, 12, 13, 14]), step, op, line)
    assert [run.words["module"].known[code] for code in found] == ["a", "b", "c", ""]


def test_columns() -> None:
    assert occurrences(np.array([7, 7, 3, 7]), np.array([1, 1, 1, 2])).tolist() == [0, 1, 0, 0]
    assert occurrences(np.empty(0)).tolist() == []
    first, back = groups(np.array([2**40, 5, 2**40]), np.array([-3, 2**50, -3]), np.array([1, 1, 1]))
    assert first.tolist() == [1, 0]
    assert back.tolist() == [1, 0, 1]
    assert groups(np.empty(0, np.int64))[0].tolist() == []
    assert np.isnan(numbers(["x", None, b"1"], REAL)).all()
    assert numbers(["x", 3.0, 10**40], WHOLE).tolist() == [0, 3, 0]
    assert Words().codes([None, b"a", 3, "a"]).tolist() == [0, 1, 2, 1]
    kept = short_floats(np.array([1 / 3, -2.0, np.inf, np.nan, 0.0, 1e300]), 4)
    assert kept[0] == pytest.approx(1 / 3, rel=1e-4)
    assert kept[1] == -2.0
    assert np.isinf(kept[[2, 5]]).all()
    assert np.isnan(kept[3])


def test_words() -> None:
    assert line_of("a b/c.py:7 f: x: y = 3") == "a b/c.py:7"
    assert source_of("a b/c.py:7 f: x: y = 3") == "x: y = 3"
    assert source_of("c.py:7 <module>:") == ""
    assert line_of("nowhere") == "nowhere"
    assert size_of(3 * 2**30) == "3.0 GiB"
    assert times_bound(248_556.2) == "249,000"
    assert times_bound(float("inf")) == "∞"
