"""What a person sees of a run: the verdict with its coverage, findings in groups, names instead of numbers."""

from __future__ import annotations

import csv
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import op_tools
from op_tools import cli
from op_tools.compare.choose import kind_of
from op_tools.view import console

library = torch.library.Library("op_tools_summary_test", "FRAGMENT")
library.define("twice(Tensor x) -> Tensor")
for _key in ("CUDA", "PrivateUse1"):
    library.impl("twice", lambda x: x * 2, _key)
library.define("off(Tensor x) -> Tensor")
library.impl("off", lambda x: x.clone(), "CPU")
for _key in ("CUDA", "PrivateUse1"):
    library.impl("off", lambda x: x * 1.01, _key)
library.define("forget(Tensor x, Tensor(a!) running_var) -> Tensor")
library.impl("forget", lambda x, running_var: (running_var.add_(1), x.clone())[1], "CPU")
for _key in ("CUDA", "PrivateUse1"):
    library.impl("forget", lambda x, running_var: (running_var.add_(1 + 2**-20), x.clone())[1], _key)
TOOLS = (op_tools.OpAutoCompare, op_tools.OpCapture, op_tools.OpOverflowCheck, op_tools.OpTimeMeasure)


@pytest.fixture(autouse=True)
def _summary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "summary")


def summary_of(text: str, tool: str = "OpAutoCompare") -> list[str]:
    lines = text.splitlines()
    return lines[lines.index(f"{tool} summary") + 1 :]


def test_the_first_line_says_how_much_was_compared(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(64, 64, device=device)
    with op_tools.OpAutoCompare():
        torch.matmul(x, x)
        for _ in range(3):
            torch.randint(10, (1000,), device=device)
    first, second, *_ = summary_of(capsys.readouterr().out)
    assert first.startswith("  4 comparisons, 0 wrong; ") or "25.0 % of the calls that compute compared" in first
    if "25.0 %" in first:  # as long as integers drawn at random cannot be judged
        assert "torch.randint: 3 forward calls" in second
        assert "not compared: random" in second


def test_what_computes_nothing_does_not_count(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(6, 4, device=device)
    with op_tools.OpAutoCompare():
        torch.empty(3, device=device)
        x.view(-1)
        x[1:]
        x.contiguous()
        x.t().contiguous()  # a copy
        x.mul_(2)
    first = summary_of(capsys.readouterr().out)[0]
    assert first.endswith("0 wrong; every call that computes was compared")


def test_nothing_compared_does_not_read_like_a_success(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(6, 4, device=device)
    with op_tools.OpAutoCompare():
        torch.ones(3).add(1)  # on the CPU
    with op_tools.OpAutoCompare():
        torch.ops.op_tools_summary_test.twice(x)
    shown = capsys.readouterr().out
    cpu, alone = (part.splitlines()[1:] for part in shown.split("OpAutoCompare summary")[1:])
    assert cpu[0].startswith("  NOTHING WAS COMPARED: no call on the device was seen")
    assert alone[0].startswith("  1 operator was NOT JUDGED")
    assert alone[0].endswith(": op_tools_summary_test.twice")
    assert alone[1].startswith("  NOTHING THAT COMPUTES WAS COMPARED")
    assert "op_tools_summary_test.twice: 1 forward call, 100 % of the work" in alone[2]
    assert "not compared: it has no CPU kernel" in alone[2]
    assert not any("0 wrong" in line or "nothing found" in line for line in (*cpu, *alone))


def test_calls_of_a_kind_that_was_compared_are_told_apart(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(8, 8, device=device)
    with op_tools.OpAutoCompare(mode="once"):
        for _ in range(10):
            torch.mm(x, x)
    first = summary_of(capsys.readouterr().out)[0]
    assert "10.0 % of the calls that compute compared, 10.0 % of the estimated work" in first
    assert first.endswith("with calls of the same kinds 100 % and 100 %")


def test_kinds_that_were_left_out_are_listed(device: str) -> None:
    x = torch.ones(8, device=device)
    with op_tools.OpAutoCompare() as comparison:
        x.add(1)
    left_out = {kind_of("torch.Tensor.mul", (x, 2), {}): 3}
    first, second = comparison._teller.coverage.describe(0, left_out)
    assert "25.0 % of the calls that compute compared" in first
    assert second.startswith("  torch.Tensor.mul: 3 forward calls, ")
    assert second.endswith("not compared: left out, and no call of its kind was compared")


def test_large_products_count_more_than_small_calls(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(256, 256, device=device)
    with op_tools.OpAutoCompare():
        torch.mm(x, x)
        torch.ops.op_tools_summary_test.twice(x[:4])
    _, first, second, *_ = summary_of(capsys.readouterr().out)
    assert "50.0 % of the calls" in first
    assert float(second.split(" % of the work")[0].rsplit(" ", 1)[1]) < 5


def test_findings_come_in_groups(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    values = [torch.full((8,), float(n + 1), device=device) for n in range(20)]
    with op_tools.OpAutoCompare() as comparison:
        for x in values:
            torch.ops.op_tools_summary_test.off(x)
    out = capsys.readouterr().out
    assert len(comparison.findings()) == 20
    assert out.count("[OpAutoCompare]") == 1, "the first one is told at once"
    grouped = [line for line in summary_of(out) if "20 times, first at call" in line]
    assert len(grouped) == 1
    assert "worst at call" in grouped[0]
    assert len(out.splitlines()) < 25


def test_arguments_have_their_names(device: str) -> None:
    x, running = torch.randn(8, device=device), torch.full((8,), 2.0, device=device)
    with op_tools.OpAutoCompare() as comparison:
        torch.ops.op_tools_summary_test.forget(x, running)
    blame = comparison.blames[0]
    assert blame.reason.startswith("op_tools_summary_test.forget running_var: 8 of 8 elements")
    assert "3.00000095 instead of 3," in blame.reason
    assert comparison.csv_path is not None
    with comparison.csv_path.open() as file:
        rows = list(csv.DictReader(file))
    wrong = [row for row in rows if row["verdict"] == "wrong"]
    assert [(row["phase"], row["step"]) for row in wrong] == [("forward", str(blame.step))]
    assert float(wrong[0]["excess"]) == pytest.approx(blame.excess)
    assert list(rows[0])[-6:] == ["module", "location", "phase", "step", "excess", "parameter"]


def test_the_parameters_of_rows_in_the_csv_file(device: str) -> None:
    x = torch.randn(2, 3, 4, device=device, requires_grad=True)
    mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
    weight = torch.ones(3, device=device, requires_grad=True)
    with op_tools.OpAutoCompare() as comparison:
        F.batch_norm(x, mean, var, weight, training=True).sum().backward()
    assert comparison.csv_path is not None
    with comparison.csv_path.open() as file:
        found = {row["name"]: row["parameter"] for row in csv.DictReader(file) if "batch_norm" in row["name"]}
    assert found["torch.nn.functional.batch_norm input[2]"] == "running_var"
    assert found["torch.nn.functional.batch_norm output"] == ""
    assert {name for row, name in found.items() if " grad" in row} == {"input", "running_mean", "running_var", "weight"}


@pytest.mark.parametrize("kind", TOOLS)
def test_transforms_are_not_failures(device: str, kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    net = torch.nn.Linear(4, 1).to(device)
    weights = {name: p.detach() for name, p in net.named_parameters()}
    x = torch.randn(8, 4, device=device)

    def loss(p: Any, row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, p, (row[None],)).square().sum()

    expected = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    with kind() as tool:
        found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    assert [f for f in tool.findings() if f.kind == "tool-failure"] == []
    assert torch.equal(found["weight"].cpu(), expected["weight"].cpu())
    if kind is op_tools.OpAutoCompare:
        assert "not compared: inside torch.func transforms" in capsys.readouterr().out


def test_tensors_without_values_are_not_watched(device: str) -> None:
    x = torch.ones(3, device=device)
    with warnings.catch_warnings(record=True) as warned, op_tools.OpAutoCompare() as comparison:
        warnings.simplefilter("always")
        with FakeTensorMode() as mode:
            mode.from_tensor(x).add(1)
    assert [str(warning.message) for warning in warned] == []
    assert comparison.findings() == []


def test_a_script_shows_the_summary_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OP_TOOLS_CONSOLE")
    monkeypatch.setattr(sys, "argv", ["op_tools"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("OP_TOOLS_RESULTS_DIR", str(tmp_path / "results"))
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "job.py"
    script.write_text("import torch\nx = torch.ones(3, device='cuda')\nfor _ in range(30): x = x + 1\n")
    shown = {}
    for words in ([], ["--console", "full"], ["--console", "off"]):
        for tool in ("OpAutoCompare", "OpTimeMeasure"):
            assert cli.main(["run", tool, *words, str(script)]) == 0
            shown[(tool, *words)] = capsys.readouterr()
    for tool in ("OpAutoCompare", "OpTimeMeasure"):
        assert f"{tool} summary" in shown[(tool,)].out
        assert len(shown[(tool,)].out.splitlines()) < 25
        assert len(shown[tool, "--console", "full"].out.splitlines()) > 200
        assert shown[tool, "--console", "off"].out == ""
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "off")
    assert cli.main(["run", "OpAutoCompare", str(script)]) == 0
    assert capsys.readouterr().out == ""
    assert cli.main(["records", str(tmp_path / "results")]) == 0
    listed = capsys.readouterr().out
    assert "op_autocompare" in listed
    assert cli.main(["records", str(tmp_path / "none")]) == 2
    assert cli.main(["records", "--all", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= len(listed.splitlines())


def test_a_full_console_says_once_how_to_get_less(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OP_TOOLS_CONSOLE")
    monkeypatch.setattr(console.View, "_hinted", False)
    for _ in range(2):
        with op_tools.OpObserve():
            torch.ones(3, device=device).add(1)
    shown = capsys.readouterr()
    assert shown.err.count("OP_TOOLS_CONSOLE=summary") == 1
    assert "OP_TOOLS_CONSOLE" not in shown.out


def test_progress_is_one_line(device: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_PROGRESS_SECONDS", 0.05)
    with op_tools.OpAutoCompare() as comparison:
        torch.ones(3, device=device).add(1)
        comparison.wait()
        with console.ProgressLine(comparison.progress):
            time.sleep(0.3)
    assert re.search(r"OpAutoCompare: step \d+, 2 calls, 2 comparisons, 0 wrong", capsys.readouterr().err)
