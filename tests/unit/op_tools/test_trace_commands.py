"""What `op_tools trace` and `op_tools diff` say of options that make no sense, and what a killed run leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import op_tools
from op_tools.cli import main
from op_tools.settings import SettingsError
from op_tools.trace import format as columns
from op_tools.trace import show
from op_tools.trace.format import SUFFIX, TraceError, TraceWriter, files_of, read
from op_tools.trace.graph import Graph
from op_tools.trace.merge import merged


def _run(folder: Path, rank: int = 0, ops: tuple[str, ...] = ("torch.add", "torch.mul", "torch.gelu")) -> Path:
    """A trace whose operators are in steps 3, 4, 5, …, all in one module."""
    with TraceWriter(folder / f"rank{rank}{SUFFIX}", {"rank": rank, "world": 1}) as writer:
        text = writer.text
        writer.add("modules", (0, -1, text("model"), text("Model"), 0))
        look = writer.add("looks", (text("[4]"), text("float32"), text("[1]"), text("cpu"), 1, 0, 0, 16))
        for number, name in enumerate(ops):
            writer.add("operators", (number + 3, columns.FORWARD, text(name), 0, 0, 0, 0, 0, 0, 0, -1, 0.0, 0))
            writer.add("tensors", (0, 0, look, number, 0, -1, 0))
            writer.add("edges", (number, columns.OUTPUT, 0, number))
            if number:
                writer.add("edges", (number, columns.INPUT, 0, number - 1))
    return folder


def _refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command with a mistake says."""
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert not said.out
    (line,) = said.err.splitlines()
    return line


@pytest.mark.parametrize("name", ["taken", "taken/below", "/proc/op_tools/x"])
def test_a_folder_that_cannot_be_made_is_one_line_before_the_script_runs(name: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    (tmp_path / "script.py").write_text("print('the script ran')")
    command = [sys.executable, "-m", "op_tools", "trace", "--to", name, "--no-ditorch", "script.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    assert name in line
    assert "cannot be written" in line
    assert "--to DIR" in line
    with pytest.raises(SettingsError, match="cannot be written"):
        op_tools.OpTrace(to=tmp_path / name).start()


def test_a_trace_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, taken, log = _run(tmp_path / "run"), tmp_path / "taken", tmp_path / "run.log"
    taken.write_text("")
    log.write_text("(GRAPH:GraphBase_0:GraphBase): (\n  (MODULE:model:GPT()): (\n  )\n)\n")
    merge = ["trace", "merge", str(run), "--to"]
    for where in (taken / f"all{SUFFIX}", run, "/proc/op_tools/all.optrace"):
        assert "cannot be written" in _refused([*merge, str(where)], capsys)
    assert "cannot be written" in _refused(["trace", "import", str(log), "--to", str(taken)], capsys)


@pytest.mark.parametrize("stacks", [0, -1, 1.5])
def test_a_number_of_stack_lines_is_at_least_one(
    stacks: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SettingsError, match=r"1 or more"):
        op_tools.OpTrace(stacks=stacks)  # type: ignore[arg-type]
    if stacks != 1.5:
        assert "--stacks" in _refused(["trace", "--stacks", str(stacks), "script.py"], capsys)


def test_ranks_that_are_no_numbers_or_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 2):
        _run(tmp_path, rank)
    show = ["trace", "show", str(tmp_path), "--ranks"]
    for wrong in ("x", "", "0,,2", "0-2", "1.5"):
        assert f"--ranks {wrong}: give numbers of ranks with commas, such as 0,2, or all" in _refused(
            [*show, wrong], capsys
        )
    assert f"{tmp_path} has no rank 1, 7; it has 0, 2" in _refused([*show, "0,7,1"], capsys)
    for right in ("2", "0, 2", "all"):
        assert main([*show, right]) == 0
        assert capsys.readouterr().out.count("(GRAPH:") == (1 if right == "2" else 2)


@pytest.mark.parametrize("form", [[], ["-v", "2"], ["--json"], ["--perfetto"], ["--model-explorer"]])
def test_what_matches_nothing_is_said(form: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show = ["trace", "show", str(_run(tmp_path)), *form]
    for step in ("99", "-1"):
        assert f"nothing in step {step}; the trace has steps 3 to 5" in _refused([*show, "--step", step], capsys)
    no = "no module and no operator"
    assert f"{no} has 'NOSUCH' in its name" in _refused([*show, "--only", "NOSUCH"], capsys)
    assert f"{no} of step 3 has 'gelu' in its name" in _refused([*show, "--step", "3", "--only", "gelu"], capsys)
    for choice in (["--step", "4"], ["--only", "model"]):
        assert main([*show, *choice]) == 0
        assert capsys.readouterr().out


def test_the_other_forms_show_what_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show = ["trace", "show", str(_run(tmp_path)), "--step", "4", "--only", "mul"]
    assert main([*show, "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["name"] for one in told if "operator" in one] == ["torch.mul"]
    assert main([*show, "--perfetto"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["traceEvents"]] == ["torch.mul"]
    assert main([*show, "--model-explorer"]) == 0
    (node,) = json.loads(capsys.readouterr().out)["graphs"][0]["nodes"]
    assert (node["label"], node["incomingEdges"]) == ("mul", [])


def test_an_operator_below_the_level_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show = ["trace", "show", str(_run(tmp_path)), "--only", "gelu"]
    assert "no module has 'gelu' in its name; an operator has: -v 2 shows it" in _refused(show, capsys)
    assert main([*show, "-v", "2"]) == 0
    assert "model-gelu-2" in capsys.readouterr().out


def test_a_rank_without_the_module_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path, 0)
    _run(tmp_path, 1, ("torch.sort",))
    assert main(["trace", "show", str(tmp_path), "--ranks", "all", "-v", "2", "--only", "sort"]) == 0
    assert "model-sort-0" in capsys.readouterr().out


def test_of_several_runs_the_newest_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for age, name in enumerate(("third", "first", "second")):
        (file,) = files_of(_run(tmp_path / name))
        os.utime(file, (1e9 - age, 1e9 - age))
    note = f"{tmp_path} has 3 runs; this is the newest, third\n"
    assert main(["trace", "show", str(tmp_path)]) == 0
    assert capsys.readouterr().err == note
    assert main(["diff", str(tmp_path), str(tmp_path / "first")]) == 0
    assert capsys.readouterr().err == note
    assert main(["trace", "show", str(tmp_path / "first")]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("lines", ["0", "-3"])
def test_lists_of_a_diff_have_lines(lines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(_run(tmp_path))
    assert "1 or more" in _refused(["diff", run, run, "--lines", lines], capsys)


def test_rows_whose_others_were_not_written_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows are flushed table by table while the run goes on: a kill may leave edges whose tensors are missing."""
    for run in ("a", "b"):
        writer = TraceWriter(tmp_path / run / f"rank0{SUFFIX}", {"rank": 0, "world": 1})
        text = writer.text
        look = writer.add("looks", (text("[4]"), text("float32"), text("[1]"), text("cpu"), 1, 0, 0, 16))
        for number, name in enumerate(("torch.add", "torch.mul")):
            writer.add("operators", (0, columns.FORWARD, text(name), -1, 0, 0, 0, 0, 0, 0, -1, 0.0, 0))
            writer.add("tensors", (0, 0, look, number, 0, -1, -1))
            writer.add("edges", (number, columns.OUTPUT, 0, number))
        writer.add("tensors", (0, 0, look, 7, 0, -1, -1))  # of an operator that is not there
        writer.add("tensors", (0, 0, look, 1, 0, -1, -1))
        for number in range(6):
            writer.add("edges", (number % 3, columns.INPUT, 0, number))
            writer.add("prints", (number, *[float(number)] * 9, 3.0, -1.0, 1.0, 0, 0, 0))
            writer.add("memory", (number, number, 16, 0, -1))
        writer.flush()
        writer.settle()
    for form in (["-v", "3"], ["--json"], ["--perfetto"], ["--model-explorer"]):
        assert main(["trace", "show", str(tmp_path / "a"), "--partial", *form]) == 0
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--partial"]) == 0
    graph = Graph(read(files_of(tmp_path / "a")[0], partial=True))
    assert [graph.trace.count(name) for name in ("operators", "tensors", "edges", "prints", "memory")] == [
        2,
        2,
        4,
        2,
        2,
    ]


_TRAINS = """
import sys, time
import torch, ditorch, op_tools
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.randn(24, 16).cuda()
with op_tools.OpTrace(to=sys.argv[1]):
    for step in range(10_000):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, flush=True)
        time.sleep(0.3)
"""


def test_a_run_that_is_killed_leaves_its_fingerprints(tmp_path: Path) -> None:
    """Few tensors a step: so few that no buffer is ever full."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OP_TOOLS_CONSOLE": "off"}
    environment["OP_TOOLS_RESULTS_DIR"] = str(tmp_path / "results")
    with subprocess.Popen(
        [sys.executable, "-c", _TRAINS, str(tmp_path / "run")], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        steps = [int(process.stdout.readline()) for _ in range(9)]
        time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    graph = Graph(read(files_of(tmp_path / "run")[0], partial=True))
    first = [n for n, step in enumerate(graph.operators["step"].tolist()) if step <= steps[-1] // 2]
    _, where = graph.prints()
    tensors = [t for n in first for t in (*graph.inputs(n).tolist(), *graph.outputs(n).tolist())]
    assert len(tensors) > 50
    printed = sum(where[t] >= 0 for t in tensors)
    assert printed > 0.9 * len(tensors), f"{printed} of {len(tensors)}"


def _rank(folder: Path, rank: int, world: int = 2, complete: bool = True) -> Path:
    path = folder / f"rank{rank}.optrace"
    writer = TraceWriter(path, {"rank": rank, "world": world})
    name, look = writer.text("torch.add"), [writer.text(word) for word in ("[2]", "float32", "[1]", "cpu", "")]
    writer.add("looks", (*look[:4], 0, look[4], look[4], 8))
    for number in range(3):
        writer.add("operators", (0, 0, name, -1, 0, 0, 0, 0, 0, 0, -1, 0.1 * number, 0))
        writer.add("tensors", (0, 0, 0, number, 0, -1, -1))
        writer.add("edges", (number, 1, 0, number))
        if number:
            writer.add("edges", (number, 0, 0, number - 1))
        writer.add("levels", (number, 100 * number, 100 * number))
    writer.flush()
    writer.settle()
    if complete:
        writer.close()
    return path


def test_several_ranks_are_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        _rank(tmp_path, rank)
    assert main(["trace", "show", str(tmp_path), "--ranks", "all", "--perfetto"]) == 0
    events = json.loads(capsys.readouterr().out)["traceEvents"]
    assert [e["pid"] for e in events if e["name"] == "torch.add"] == [0] * 3 + [1] * 3
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"rank 0", "rank 1"}
    assert [e["args"]["bytes"] for e in events if e["ph"] == "C"] == [0, 100, 200] * 2
    assert main(["trace", "show", str(tmp_path), "--ranks", "0,1", "--model-explorer"]) == 0
    graphs = json.loads(capsys.readouterr().out)["graphs"]
    assert len({graph["id"] for graph in graphs}) == 2
    for graph in graphs:
        ids = {node["id"]: {out["id"] for out in node["outputsMetadata"]} for node in graph["nodes"]}
        edges = [edge for node in graph["nodes"] for edge in node["incomingEdges"]]
        assert len(edges) == 2
        assert all(edge["sourceNodeOutputId"] in ids[edge["sourceNodeId"]] for edge in edges)


def test_ranks_that_left_nothing_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _rank(tmp_path / "one", 1, world=3)
    assert main(["trace", "merge", str(tmp_path / "one"), "--to", str(tmp_path / "x.optrace")]) == 2
    assert "of 3 ranks these have left no trace: 0, 2" in capsys.readouterr().err
    for rank in range(2):
        _rank(tmp_path / "cut", rank, complete=rank == 0)
    assert main(["trace", "merge", str(tmp_path / "cut"), "--to", str(tmp_path / "y.optrace")]) == 2
    assert "--partial reads" in capsys.readouterr().err
    assert main(["trace", "merge", str(tmp_path / "cut"), "--partial", "--to", str(tmp_path / "y.optrace")]) == 0


def test_any_changed_byte_and_any_cut_is_one_line(tmp_path: Path) -> None:
    whole = _rank(tmp_path, 0, world=1).read_bytes()
    path = tmp_path / "changed.optrace"
    broken = 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        told = ""
        try:
            list(show.lines(Graph(read(path)), 3))
        except TraceError as error:
            told = str(error)
        broken += bool(told)
        assert "\n" not in told
    assert broken > len(whole) // 2
    for length in range(len(b"op_tools trace 3\n"), len(whole)):
        path.write_bytes(whole[:length])
        assert Graph(read(path, partial=True)).count <= 3
        with pytest.raises(TraceError, match="its end is missing"):
            read(path)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 3, 2)])
def test_parts_add_up_only_where_ranks_have_as_much(sizes: tuple[int, ...], tmp_path: Path) -> None:
    traces = []
    for rank, size in enumerate(sizes):
        path = tmp_path / f"rank{rank}.optrace"
        with TraceWriter(path, {"rank": rank, "world": len(sizes)}) as writer:
            name, words = writer.text("torch.add"), [writer.text(w) for w in (f"[{size}, 4]", "float32", "", "cpu", "")]
            writer.add("looks", (*words[:4], 0, words[4], words[4], 16 * size))
            writer.add("operators", (0, 0, name, -1, 0, 0, 0, 0, 0, 0, -1, 0.1, 0))
            writer.add("tensors", (0, 0, 0, 0, 0, -1, -1))
            writer.add("edges", (0, 1, 0, 0))
            for part in (0, 1):
                writer.add("prints", (0, *[1.0 + rank] * columns.PROJECTIONS, 1.0, 1.0, 0.0, 1.0, 0, 0, part))
        traces.append(read(path))
    parts = merged(traces)["prints"]["part"].tolist()
    assert parts.count(1) == (1 if len(set(sizes)) == 1 else 0)
