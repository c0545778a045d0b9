"""OpTrace on a device: edges, phases, names, and what `op_tools diff` says of two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ditorch
import op_tools
from op_tools.cli import main
from op_tools.trace import format as columns
from op_tools.trace.diff import Diff, load
from op_tools.trace.graph import Graph
from op_tools.trace.memory import BEFORE, memory_of


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))


def _traced(folder: Path, device: str, layout: bool = False, low: bool = False, **options: Any) -> Graph:
    model = _model().to(device)
    if layout:
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.data.t().contiguous().t()
    x = torch.randn(24, 16, generator=torch.Generator().manual_seed(1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
    with op_tools.OpTrace(to=folder, **options), torch.autocast(device, torch.bfloat16, enabled=low):
        model(x).square().mean().backward()
        optimizer.step()
    return Graph(load(folder))


def test_edges_phases_and_names(tmp_path: Path, device: str) -> None:
    graph = _traced(tmp_path / "run", device)
    phases = [columns.PHASES[p] for p in graph.operators["phase"].tolist()]
    linear = [i for i, name in enumerate(graph.names) if name.endswith("linear")]
    forward = [i for i in linear if phases[i] == "forward"]
    assert [graph.titles[i].partition("-")[0] for i in forward] == ["model.0", "model.3"]
    gelu = next(i for i, name in enumerate(graph.names) if name.endswith("gelu"))
    assert graph.inputs(gelu).tolist() == graph.outputs(forward[0]).tolist()
    weights = [graph.tensor_title(t) for t in graph.inputs(forward[0]).tolist()]
    assert weights[1:] == ["model.0.weight/out", "model.0.bias/out"]
    step = next(i for i in range(graph.count) if phases[i] == "optimizer")
    used = {graph.tensor_title(t) for t in graph.inputs(step).tolist()}
    assert "model.3.weight.grad/out" in used
    written = graph.outputs(step).tolist()
    assert {int(graph.tensors["producer"][t]) for t in written} == {step}
    made = [t for t in graph.inputs(step).tolist() if graph.tensor_title(t) == "model.3.weight.grad/out"]
    assert phases[int(graph.tensors["producer"][made[0]])] == "backward"


def test_edges_go_through_views_and_writes(tmp_path: Path, device: str) -> None:
    x = torch.ones(4, 4, device=device)
    with op_tools.OpTrace(to=tmp_path):
        x[0].mul_(3)
        x.add(1)
    graph = Graph(load(tmp_path))
    (add,) = (i for i, name in enumerate(graph.names) if name.endswith(".add"))
    producer = int(graph.tensors["producer"][int(graph.inputs(add)[0])])
    assert graph.names[producer].endswith("mul_")


def test_a_parameter_that_moves_is_another_tensor(tmp_path: Path, device: str, keeps_book: str) -> None:
    x = torch.randn(3, 16).to(device)
    with op_tools.OpTrace(to=tmp_path):
        model = _model()
        model(x.cpu())
        model.to(device)  # new memory for the same parameters, whose versions stay
        model(x)
    graph = Graph(load(tmp_path))
    linear = [i for i, name in enumerate(graph.names) if name.endswith("linear")]
    for op in linear[-2:]:
        weights = graph.inputs(op).tolist()[1:]
        assert {graph.look(t)["device"] for t in weights} == {graph.look(int(graph.inputs(op)[0]))["device"]}
        assert all(graph.tensor_title(t).startswith("model.") for t in weights)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    kinds = memory_of(graph).kinds
    assert kinds["parameter"] == parameters
    assert sum(size for kind, size in kinds.items() if kind not in ("parameter", BEFORE)) < parameters  # once


def test_writes_that_no_version_counts_make_another_tensor(tmp_path: Path, device: str, keeps_book: str) -> None:
    norm, layer = nn.BatchNorm1d(16).to(device), nn.Linear(16, 4).to(device)
    x = torch.randn(8, 16).to(device)
    with op_tools.OpTrace(to=tmp_path):
        layer(norm(x))
        layer.weight.data.mul_(2)
        layer(norm(x))
        norm.eval()
        norm(x)
    graph = Graph(load(tmp_path))
    first, second, third = (i for i, name in enumerate(graph.names) if name.endswith(".batch_norm"))
    for statistics in (1, 2):
        came = [int(graph.inputs(op)[statistics]) for op in (second, third)]
        assert [int(graph.tensors["producer"][tensor]) for tensor in came] == [first, second]
    assert len(graph.outputs(first)) == len(graph.outputs(second)) == 3
    assert len(graph.outputs(third)) == 1  # in evaluation it writes to none
    before, after = (int(graph.inputs(i)[1]) for i, name in enumerate(graph.names) if name.endswith(".linear"))
    assert graph.names[int(graph.tensors["producer"][after])].endswith(".mul_")
    prints, where = graph.prints()
    norms = [float(prints[where[tensor], 9]) for tensor in (before, after)]
    assert norms[1] == pytest.approx(2 * norms[0])


def test_two_layouts_part_nowhere_and_values_stay(tmp_path: Path, device: str) -> None:
    one = _traced(tmp_path / "a", device)
    for low in (False, True):
        first = _traced(tmp_path / f"c{low}", device, low=low)
        second = _traced(tmp_path / f"b{low}", device, layout=True, low=low)
        diff = Diff(first, second)
        assert diff.valued
        assert diff.divergence is None
        assert len(diff.alignment.pairs) == one.count


@pytest.mark.skipif(ditorch.backend.name != "soft", reason="faults are planted on soft")
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("gelu: noise=1e-2", "gelu"),
        ("addmm: element=0.5", "linear"),
        ("native_layer_norm_backward: nan, phase=backward", "layer_norm"),
        ("mm: element=0.5, phase=backward", "linear"),
    ],
)
@pytest.mark.parametrize("low", [False, True])
def test_the_faulty_operator_is_named(tmp_path: Path, device: str, fault: str, name: str, low: bool) -> None:
    from ditorch.soft import faults

    good = _traced(tmp_path / "good", device, low=low)
    with faults.plant(fault) as planted:
        bad = _traced(tmp_path / "bad", device, low=low)
    assert planted.hits
    found = Diff(good, bad).divergence
    assert found is not None
    diff = Diff(good, bad)
    operator = int(diff.alignment.pairs[found.pair][0])
    assert good.names[operator].endswith(name)
    assert (good.operators["phase"][operator] == columns.BACKWARD) == ("phase=backward" in fault)


def test_the_commands_show_and_compare(tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    _traced(tmp_path / "a", device, stacks=3)
    assert main(["trace", "show", str(tmp_path / "a"), "-v", "3"]) == 0
    shown = capsys.readouterr().out
    assert "(MODULE:model.3:Linear(in_features=32, out_features=8, bias=True)): (" in shown
    assert "(PARAMETER:model.3.weight:tensor(..., placement=" in shown
    assert "(OPERATOR: model.1-gelu-" in shown
    assert "Python Stack[-2]" in shown
    for form in ("--json", "--perfetto", "--model-explorer"):
        assert main(["trace", "show", str(tmp_path / "a"), form]) == 0
        assert capsys.readouterr().out.strip()
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert "No divergence" in capsys.readouterr().out


def test_operators_of_aot_eager_are_those_of_the_eager_run(tmp_path: Path, device: str) -> None:
    eager = _traced(tmp_path / "eager", device)
    model = _model().to(device)
    x = torch.randn(24, 16, generator=torch.Generator().manual_seed(1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
    with op_tools.OpTrace(to=tmp_path / "compiled") as tool:
        torch.compile(model, backend="aot_eager")(x).square().mean().backward()
        optimizer.step()
    assert not tool.findings()  # it is not said that this code was left alone
    compiled = Graph(load(tmp_path / "compiled"))
    diff = Diff(eager, compiled)
    inside = [n for n in range(eager.count) if int(eager.operators["module"][n]) >= 0]
    found = dict(diff.alignment.pairs.tolist())
    names = [(eager.names[n].rpartition(".")[2], compiled.names[found[n]].rpartition(".")[2]) for n in inside]
    assert len(inside) == 8  # forward and backward of four layers
    assert all(one == two for one, two in names)
    assert diff.divergence is None


def test_a_write_below_autograd_makes_a_new_tensor(tmp_path: Path, device: str) -> None:
    x = torch.ones(8, device=device)
    with op_tools.OpTrace(to=tmp_path), torch._C._AutoDispatchBelowADInplaceOrView():  # type: ignore[attr-defined]
        torch._foreach_mul_([x], 3.0)
    graph = Graph(load(tmp_path))
    rows, where = graph.prints()
    before, after = (int(graph_side(0)[0]) for graph_side in (graph.inputs, graph.outputs))
    assert [rows[where[t]][11] for t in (before, after)] == [1.0, 3.0]


def test_the_run_stays_bit_identical(tmp_path: Path, device: str) -> None:
    def weights(traced: bool) -> list[torch.Tensor]:
        model = _model().to(device)
        x = torch.randn(24, 16, generator=torch.Generator().manual_seed(1)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        tool = op_tools.OpTrace(to=tmp_path / "run") if traced else op_tools.OpObserve(max_calls=0)
        with tool:
            for _ in range(2):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(True), weights(False)))
