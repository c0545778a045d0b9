"""The page of real runs: what the tools leave behind is what the page shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import op_tools
from ditorch_common.page import Page, View, read_page
from op_tools import cli
from op_tools.report import Run, page_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))  # the line that is named


def train(device: str, steps: int = 2) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 16).to(device)).square().mean().backward()
        optimizer.step()


def view(page: Page, name: str) -> View:
    return next(view for view in page.views if view.id == name)


@pytest.mark.parametrize(
    ("fault", "phase"), [("addmm: element=0.5", "forward"), ("mm: noise=1, phase=backward", "backward")]
)
def test_the_wrong_call_has_its_line_and_its_picture(device: str, faults: Any, fault: str, phase: str) -> None:
    with faults.plant(fault), op_tools.OpAutoCompare() as compared:
        train(device)
    run = Run(Path("op_tools_results"))
    blocks = {block["kind"]: block for block in page_of(run).views[0].blocks}
    assert blocks["banner"]["state"] == "wrong"
    assert f"({phase})" in blocks["banner"]["headline"]["en"]
    first = compared.blames[0]
    assert first.module in blocks["banner"]["headline"]["en"]
    marked = [text for number, text in blocks["code"]["lines"] if number == blocks["code"]["mark"]]
    assert "the line that is named" in marked[0]
    picture = blocks["tensor_map"]
    assert len(picture["cells"]) == picture["rows"] * picture["columns"]
    beyond = sum(n for n, edge in zip(blocks["histogram"]["counts"], blocks["histogram"]["edges"]) if edge >= 1)
    assert beyond > 0
    if fault.startswith("addmm"):
        assert beyond == 1  # one element
        assert sum(cell > 0 for cell in picture["cells"]) == 1
        reached = next(row[1] for row in blocks["facts"]["rows"] if row[0]["en"] == "later calls that used it")
        assert int(reached) > 0
    assert "Wrong: " in compared._repr_html_()


def test_every_view_of_a_healthy_run(device: str, tmp_path: Path) -> None:
    tools = [op_tools.OpOverflowCheck(), op_tools.OpTimeMeasure(), op_tools.OpAutoCompare(), op_tools.OpTrace()]
    capture = op_tools.OpCapture(ops=["torch.relu"])
    for tool in (*tools, capture):
        tool.start()
    train(device)
    for tool in (capture, *reversed(tools)):
        tool.stop()
    assert cli.main(["report", "op_tools_results", "-o", "run.html"]) == 0
    head, tables = read_page(Path("run.html").read_text())
    shown = {one["id"]: one["blocks"] for one in head["views"]}
    for name in ("verdict", "graph", "time", "memory", "overflow", "captures", "settings", "records"):
        assert shown[name], name
    assert shown["verdict"][0]["state"] == "right"
    tree = shown["graph"][0]
    relu = [node for node in tree["nodes"] if node[1].startswith("relu") and node[2] == "forward"]
    assert len(relu) == 2  # of one step
    assert [node[3][0] for node in relu] == ["right", "right"]
    assert all(node[3][1] > 0 for node in relu)
    path = tree["details"][relu[0][4]][1]["items"]
    assert any(text.startswith("←") and "linear" in text for text in path)
    assert any(text.startswith("→") and "linear" in text for text in path)
    heat = next(block for block in shown["overflow"] if block["kind"] == "heat")
    assert len(heat["columns"]) == 2
    assert "0.up linear" in heat["rows"]
    assert "1.down linear" in heat["rows"]
    modules = next(c for c in tables["times"].columns if c.name == "module")
    steps = next(c for c in tables["times"].columns if c.name == "step").values.tolist()
    by_step = [[m for m, s in zip(modules.texts(), steps) if s == step and m] for step in sorted(set(steps))]
    assert by_step[0] == by_step[1]
    assert {"0.up", "1.down"} <= set(by_step[0])
    assert tools[1].records()[0]["start_us"] < 60e6  # since the start of the tool
    assert any(block["kind"] == "lines" for block in shown["memory"])


def test_two_runs_side_by_side(device: str, faults: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with op_tools.OpTrace(to="good"):
        train(device, 1)
    with faults.plant("relu: noise=1, nth=2"), op_tools.OpTrace(to="bad"):
        train(device, 1)
    assert cli.main(["diff", "good", "bad", "--html", "diff.html"]) == 1
    capsys.readouterr()
    head, _ = read_page(Path("diff.html").read_text())
    blocks = head["views"][0]["blocks"]
    assert "torch.relu" in blocks[0]["headline"]["en"]
    tree = next(block for block in blocks if block["kind"] == "pair_tree")
    far = [node for node in tree["nodes"] if node[3] is not None and node[3] != "inf" and node[3] > 1]
    assert any(node[1] is not None and node[1].startswith("relu") for node in far)
    assert cli.main(["diff", "good", "good", "--html", "same.html"]) == 0
    head, _ = read_page(Path("same.html").read_text())
    assert head["views"][0]["blocks"][0]["state"] == "right"
    assert cli.main(["diff", "good", "bad", "--html", "no/where.html"]) == 2


def test_the_run_of_a_tool_knows_its_settings(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_OBSERVE_LIST", "torch.relu")
    with op_tools.OpObserve():
        train(device, 1)
    run = Run(Path("op_tools_results"))
    assert run.state == "ended"
    shown = str(view(page_of(run), "settings").blocks)
    assert "OP_OBSERVE_LIST" in shown
    assert torch.__version__ in shown
