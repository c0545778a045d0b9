"""Two runs of which one has another program: where they part is named, though no operator computes wrongly."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import op_tools
from op_tools.cli import main
from op_tools.trace.diff import Diff, load
from op_tools.trace.format import OPTIMIZER, RECOMPUTED
from op_tools.trace.graph import Graph
from tests.backend.op_tools.trace_net import Net


def _run(folder: Path, device: str, change: str = "", low: bool = False) -> Graph:
    torch.manual_seed(0)
    net = Net(change).to(device)
    if change == "weight":
        with torch.no_grad():
            net.a.weight[:, 0] += 0.01
    rate = 1e-2 if change == "rate" else 1e-3
    optimizer = torch.optim.AdamW(net.parameters(), rate, foreach=True, weight_decay=0.1 if change == "decay" else 0.01)
    torch.manual_seed(2 if change == "data" else 1)
    x = torch.randn(32, 16).to(device)
    with op_tools.OpTrace(to=folder) as tool:
        for _ in range(2):
            with torch.autocast(device, torch.bfloat16, enabled=low):
                loss = net(x).float().square().mean()
            (loss * 2 if change == "loss" else loss).backward()
            if change == "gradient":
                net.a.weight.grad.mul_(2)  # type: ignore[union-attr]
            optimizer.step()
            if change != "kept":
                optimizer.zero_grad()
    assert not tool.findings()
    return Graph(load(folder))


def _named(diff: Diff) -> str:
    assert diff.parted is not None, list(diff.lines())
    return diff.alignment.first.names[diff.parted[0]].rpartition(".")[2]


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(
    ("change", "operator", "said"),
    [
        ("swapped", "sigmoid", "they get other tensors: model-cat"),
        ("inserted", "view", "they get other tensors: model-mul"),
        ("nan", "view", "they get other tensors: model-mul"),
        ("transposed", "reshape", "what they make of them differs"),
        ("exchanged", "mul", "they get other tensors: model-chunk"),
        ("no bias", "linear", "they get other tensors: 3 in A, 2 in B"),
        ("other dim", "mean", "called with other arguments"),
        ("dropout", "dropout", "called with other arguments"),
        ("other order", "linear", "they get other tensors"),
        ("replaced", "float", "they get other tensors: model-gelu"),
        ("loss", "mean", "they get other tensors"),
        ("gradient", "_foreach_lerp_", "model.a.weight.grad"),
        ("kept", "_foreach_lerp_", ".grad/out in A"),
        ("rate", "_foreach_mul_", "called with other arguments"),
        ("decay", "_foreach_mul_", "0.99999) in A"),
    ],
)
def test_where_the_programs_differ_is_named(
    change: str, operator: str, said: str, low: bool, tmp_path: Path, device: str
) -> None:
    diff = Diff(_run(tmp_path / "a", device, low=low), _run(tmp_path / "b", device, change, low))
    assert not operator or _named(diff) == operator
    assert said in diff.divergence.reason  # type: ignore[union-attr]
    assert any(said in line for line in diff.lines())


@pytest.mark.parametrize(
    ("change", "names"),
    [("buffer", ["model.scale"]), ("weight", ["model.a.weight"]), ("data", ["input 0 of model.a-linear-0"])],
)
def test_other_values_from_the_start_are_named(change: str, names: list[str], tmp_path: Path, device: str) -> None:
    diff = Diff(_run(tmp_path / "a", device), _run(tmp_path / "b", device, change))
    assert diff.given() == names
    assert diff.divergence is None
    assert "No divergence beyond that" in "\n".join(diff.lines())
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1


_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "single": {"foreach": False},
    "fused": {"fused": True},
    "groups": {"foreach": True, "groups": True},
}


def _optimized(folder: Path, device: str, kind: str, change: str = "") -> Graph:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 4)).to(device)
    options = dict(_OPTIMIZERS[kind])
    parts: Any = net.parameters()
    if options.pop("groups", False):
        parts = [{"params": [p for p in net.parameters() if (p.ndim > 1) == weights]} for weights in (True, False)]
    rate = 1e-2 if change == "rate" else 1e-3
    optimizer = torch.optim.AdamW(parts, rate, eps=1e-3 if change == "eps" else 1e-8, **options)
    torch.manual_seed(1)
    x = torch.randn(32, 16).to(device)
    with op_tools.OpTrace(to=folder):
        for _ in range(3):
            net(x).square().mean().backward()
            if change == "gradient":
                net[2].weight.grad.mul_(2)  # type: ignore[union-attr,operator]
            optimizer.step()
            optimizer.zero_grad()
    return Graph(load(folder))


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(_OPTIMIZERS, 2)))
def test_optimizers_that_are_written_otherwise_are_told_from_others(
    first: str, second: str, tmp_path: Path, device: str
) -> None:
    one = _optimized(tmp_path / "a", device, first)
    same = Diff(one, _optimized(tmp_path / "b", device, second))
    assert same.divergence is None, list(same.lines())
    for change in ("rate", "eps"):
        diff = Diff(one, _optimized(tmp_path / change, device, second, change))
        assert diff.parted is not None, change
        assert int(one.operators["phase"][diff.parted[0]]) == OPTIMIZER
        assert "the optimizer changes model.0.weight otherwise" in diff.divergence.reason  # type: ignore[union-attr]
    diff = Diff(one, _optimized(tmp_path / "gradient", device, second, "gradient"))
    assert diff.parted is not None
    assert "model.2.weight.grad/out in A, model.2.weight.grad/out in B" in diff.divergence.reason  # type: ignore[union-attr]
    phases = [int(g.operators["phase"][n]) for g, n in zip((diff.alignment.first, diff.alignment.second), diff.parted)]
    assert phases == [OPTIMIZER, OPTIMIZER]


def _updated(folder: Path, device: str, kind: Any, low: bool = False, **options: Any) -> Graph:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(device)
    optimizer = kind(net.parameters(), **options)
    x = torch.randn(6, 8).to(device)
    with op_tools.OpTrace(to=folder):
        for _ in range(3):
            with torch.autocast(device, torch.bfloat16, enabled=low):
                loss = net(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return Graph(load(folder))


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(
    ("kind", "options", "changes"),
    [
        (torch.optim.AdamW, {"lr": 1e-3}, [{"lr": 2e-3}, {"lr": 1.1e-3}, {"maximize": True}]),
        (torch.optim.Adam, {"lr": 1e-3}, [{"weight_decay": 0.1}]),
        (torch.optim.ASGD, {"lr": 1e-2}, [{"lr": 5e-2}]),
        (
            torch.optim.SGD,
            {"lr": 1e-2},
            [{"momentum": 0.9}, {"weight_decay": 0.1}, {"momentum": 0.9, "nesterov": True}],
        ),
    ],
)
def test_what_optimizers_do_otherwise_is_named(
    kind: Any, options: dict[str, Any], changes: list[dict[str, Any]], foreach: bool, tmp_path: Path, device: str
) -> None:
    options = {**options, "foreach": foreach}
    one = _updated(tmp_path / "a", device, kind, **options)
    healthy = [{"foreach": not foreach}, {"low": True}]
    for number, more in enumerate(healthy):
        same = Diff(one, _updated(tmp_path / f"h{number}", device, kind, **{**options, **more}))
        assert same.divergence is None, list(same.lines())
    for number, more in enumerate(changes):
        diff = Diff(one, _updated(tmp_path / f"c{number}", device, kind, **{**options, **more}))
        assert diff.parted is not None, more
        assert int(one.operators["phase"][diff.parted[0]]) == OPTIMIZER, list(diff.lines())
    if "lr" in changes[0] and kind is torch.optim.AdamW:  # in another precision too, though its gradients are apart
        diff = Diff(one, _updated(tmp_path / "low", device, kind, low=True, **{**options, **changes[0]}))
        assert diff.parted is not None
        assert int(one.operators["phase"][diff.parted[0]]) == OPTIMIZER, list(diff.lines())


def test_what_changes_no_value_is_no_divergence(tmp_path: Path, device: str, capsys: Any) -> None:
    diff = Diff(_run(tmp_path / "a", device), _run(tmp_path / "b", device, "nothing"))
    assert diff.divergence is None
    assert not diff.given()
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "Only in B: 4 operators" in capsys.readouterr().out


def test_a_model_that_is_made_inside_of_the_trace_starts_from_its_first_values(tmp_path: Path, device: str) -> None:
    graphs = []
    for rate in (0.1, 0.2):
        with op_tools.OpTrace(to=tmp_path / str(rate)):
            torch.manual_seed(0)
            model = nn.Linear(8, 8, device=device)
            nn.init.zeros_(model.bias)
            optimizer = torch.optim.SGD(model.parameters(), rate)
            for _ in range(2):
                model(torch.ones(3, 8, device=device)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        graphs.append(Graph(load(tmp_path / str(rate))))
    diff = Diff(graphs[0], graphs[1])
    assert not diff.given()
    assert _named(diff) == "_foreach_add_" if device != "cpu" else diff.divergence is not None


def test_gradients_that_a_scaler_multiplies_are_no_divergence(tmp_path: Path, device: str) -> None:
    graphs = []
    for scaled in (False, True):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device), torch.randn(5, 8).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
        scaler = torch.amp.GradScaler(device, enabled=scaled)  # type: ignore[attr-defined]
        with op_tools.OpTrace(to=tmp_path / str(scaled)):
            with torch.autocast(device, torch.float16, enabled=scaled):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        graphs.append(Graph(load(tmp_path / str(scaled))))
    assert Diff(graphs[0], graphs[1]).divergence is None


def test_a_layer_more_is_where_two_versions_of_a_model_part(tmp_path: Path, device: str) -> None:
    def layers(count: int) -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(8, 8) for _ in range(count)]

    graphs = []
    for extra in (0, 1):
        first, *rest = layers(3)
        torch.manual_seed(5)
        model = nn.Sequential(first, *[nn.Linear(8, 8) for _ in range(extra)], *rest).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
        with op_tools.OpTrace(to=tmp_path / str(extra)):
            model(torch.ones(3, 8, device=device)).square().mean().backward()
            optimizer.step()
        graphs.append(Graph(load(tmp_path / str(extra))))
    diff = Diff(graphs[0], graphs[1])
    assert diff.divergence is not None
    pair = diff.alignment.pairs[diff.divergence.pair].tolist()
    titles = [graph.titles[n] for graph, n in zip(graphs, pair)]
    assert [title.rpartition("-")[0] for title in titles] == ["model.1-linear", "model.2-linear"]
    assert "they get other tensors: model.0-linear" in diff.divergence.reason


class _Attention(nn.Module):
    def __init__(self, written: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.written = written

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).view(4, 16, 4, 8).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.written:
            y = torch.matmul(F.softmax(torch.matmul(q, k.transpose(2, 3)) * 8**-0.5, dim=-1), v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, scale=8**-0.5).reshape(4, -1, 16, 8)
        out: torch.Tensor = self.o(y.transpose(1, 2).reshape(4, 16, 32))
        return out


def test_views_around_attention_that_is_written_out_are_no_divergence(tmp_path: Path, device: str) -> None:
    graphs = []
    for written in (False, True):
        torch.manual_seed(0)
        model, x = _Attention(written).to(device), torch.randn(4, 16, 32).to(device)
        with op_tools.OpTrace(to=tmp_path / str(written)):
            model(x).square().mean().backward()
        graphs.append(Graph(load(tmp_path / str(written))))
    assert Diff(graphs[0], graphs[1]).divergence is None
    assert Diff(graphs[1], graphs[0]).divergence is None


def test_tied_weights_that_are_clipped_start_from_the_same_values(tmp_path: Path, device: str) -> None:
    graphs = []
    for scale in (1.0, 1.0 + 2**-20):
        torch.manual_seed(0)
        table, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        head.weight = table.weight
        model = nn.Sequential(table, nn.Tanh(), head).to(device)
        x = torch.arange(20).to(device)
        with op_tools.OpTrace(to=tmp_path / str(scale)):
            (model(x) * scale).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        graphs.append(Graph(load(tmp_path / str(scale))))
    assert not Diff(graphs[0], graphs[1]).given()


def _recorded(folder: Path, step: Any) -> Graph:
    with op_tools.OpTrace(to=folder) as tool:
        step()
    assert not tool.findings()
    return Graph(load(folder))


def test_a_branch_without_gradient_is_named_where_it_joins(tmp_path: Path, device: str) -> None:
    class Residual(nn.Module):
        def __init__(self, detached: bool) -> None:
            super().__init__()
            self.i, self.a, self.b, self.o = (nn.Linear(8, 8) for _ in range(4))
            self.detached = detached

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.i(x)
            h = h + self.a(h)
            more = self.b(h)
            return self.o(h + (more.detach() if self.detached else more))

    graphs = []
    for detached in (False, True):
        torch.manual_seed(0)
        model, x = Residual(detached).to(device), torch.randn(6, 8).to(device)
        graphs.append(_recorded(tmp_path / str(detached), lambda: model(x).square().mean().backward()))  # noqa: B023
    diff = Diff(graphs[0], graphs[1])
    assert diff.parted is not None
    assert graphs[0].titles[diff.parted[0]].startswith("model-add_grad-")


def test_parts_of_other_sizes_are_named_where_they_are_used(tmp_path: Path, device: str) -> None:
    graphs = []
    for size in (2, 4):
        torch.manual_seed(0)
        first, x = nn.Linear(8, 8).to(device), torch.randn(6, 8).to(device)

        def step() -> None:
            h = first(x)  # noqa: B023
            torch.cat([h[..., :size].cos() * 2, h[..., size:]], -1).square().sum()  # noqa: B023

        graphs.append(_recorded(tmp_path / str(size), step))
    diff = Diff(graphs[0], graphs[1])
    assert _named(diff) == "cat"


@pytest.mark.parametrize("last", ["layer_norm", "cross_entropy", "max", "attention", "linear"])
@pytest.mark.parametrize("low", [False, True])
def test_code_of_aot_eager_returns_what_eager_does(last: str, low: bool, tmp_path: Path, device: str) -> None:
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.n = nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            if last == "layer_norm":
                return self.n(y)
            if last == "cross_entropy":
                return F.cross_entropy(y.flatten(0, 1).float(), torch.arange(12, device=y.device))
            if last == "max":
                return y.max(-1).values
            if last == "attention":
                return F.scaled_dot_product_attention(y[None], y[None], y[None])
            return y

    graphs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, x = Ends().to(device), torch.randn(2, 6, 16).to(device)
        run = torch.compile(model, backend="aot_eager") if compiled else model

        def step() -> None:
            with torch.autocast(device, torch.bfloat16, enabled=low):
                y = run(x)  # noqa: B023
            y.float().square().mean().backward()

        graphs.append(_recorded(tmp_path / str(compiled), step))
        torch._dynamo.reset()
    diff = Diff(graphs[0], graphs[1])
    assert diff.divergence is None, list(diff.lines())
    shapes = []
    for graph in graphs:
        forward = [
            n for n in range(graph.count) if graph.operators["phase"][n] == 0 and int(graph.operators["module"][n]) >= 0
        ]
        shapes.append(graph.look(int(graph.outputs(forward[-1])[0]))["shape"])
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("change", ["", "replaced", "forgotten"])
def test_operators_are_told_apart_in_code_of_aot_eager(change: str, tmp_path: Path, device: str) -> None:
    class Gated(nn.Module):
        def __init__(self, change: str) -> None:
            super().__init__()
            self.a, self.g, self.b = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
            self.change = change

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            u = F.relu(h) if self.change == "replaced" else h if self.change == "forgotten" else F.silu(h)
            y: torch.Tensor = self.b(u * self.g(x)) + x
            return y

    graphs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, x = Gated(change if compiled else "").to(device), torch.randn(8, 16).to(device)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        graphs.append(_recorded(tmp_path / str(compiled), lambda: run(x).square().mean().backward()))  # noqa: B023
        torch._dynamo.reset()
    diff = Diff(graphs[0], graphs[1])
    if not change:
        assert diff.divergence is None, list(diff.lines())
        return
    assert _named(diff) == "mul"
    assert "they get other tensors: model-silu" in diff.divergence.reason  # type: ignore[union-attr]


def test_a_repetition_that_makes_something_else_is_named(tmp_path: Path, device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    class Dropped(nn.Module):
        def __init__(self, kept: bool | None) -> None:
            super().__init__()
            self.a, self.kept = nn.Linear(16, 16), kept
            self.d = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 16))

        def forward(self, x: torch.Tensor) -> Any:
            x = self.a(x)
            if self.kept is None:
                return x + self.d(x)
            return x + checkpoint(self.d, x, use_reentrant=False, preserve_rng_state=self.kept)

    graphs = []
    for kept in (None, True, False):
        torch.manual_seed(0)
        model, x = Dropped(kept).to(device), torch.randn(8, 16).to(device)
        graphs.append(_recorded(tmp_path / str(kept), lambda: model(x).square().mean().backward()))  # noqa: B023
    assert Diff(graphs[0], graphs[1]).divergence is None
    diff = Diff(graphs[0], graphs[2])
    assert _named(diff) == "dropout"
    assert "recomputed in B" in diff.divergence.reason  # type: ignore[union-attr]
    assert diff.parted is not None
    assert int(graphs[2].operators["phase"][diff.parted[1]]) == RECOMPUTED
    assert "recomputed in A" in Diff(graphs[2], graphs[0]).divergence.reason  # type: ignore[union-attr]


def test_where_judging_ends_is_said(tmp_path: Path, device: str, faults: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16).to(device)

    def step() -> None:
        values, places = x.topk(2, -1)
        (values + places).sum()

    one = _recorded(tmp_path / "a", step)
    with faults.plant("topk: indices, nth=1") as planted:
        two = _recorded(tmp_path / "b", step)
    assert planted.hits == 1
    diff = Diff(one, two)
    assert [one.titles[n] for n, _ in diff.unjudged()] == ["topk-0"]
    assert any(line.startswith("Not judged, with inputs that agree and other results: topk-0") for line in diff.lines())
    assert not Diff(one, _recorded(tmp_path / "c", step)).unjudged()


def test_random_results_that_differ_among_others_that_agree_are_said(tmp_path: Path, device: str) -> None:
    graphs = {}
    for name, seed in (("good", 0), ("again", 0), ("other", 5), ("late", 0)):
        torch.manual_seed(0)
        x = torch.randn(16, 16).to(device)

        def step() -> None:
            torch.manual_seed(seed)  # noqa: B023
            F.dropout(x, 0.3)  # noqa: B023
            if name == "late":  # noqa: B023
                torch.manual_seed(7)
            F.dropout(x.mul(2), 0.3)  # noqa: B023

        graphs[name] = _recorded(tmp_path / name, step)
    found = {name: Diff(graphs["good"], graph).unjudged() for name, graph in graphs.items()}
    assert not found["again"]
    assert not found["other"], "other seeds from the start say nothing"
    assert [graphs["good"].titles[n] for n, _ in found["late"]] == ["dropout-2"]


def test_a_loss_that_rounds_inside_is_no_divergence(tmp_path: Path, device: str) -> None:
    graphs = []
    for low in (False, True):
        x = torch.zeros(4, 10, device=device, dtype=torch.bfloat16 if low else torch.float32)
        y = torch.arange(4, device=device)

        def step() -> None:
            with torch.autocast(device, torch.bfloat16, enabled=low):  # noqa: B023
                F.cross_entropy(x, y)  # noqa: B023

        graphs.append(_recorded(tmp_path / str(low), step))
    diff = Diff(graphs[0], graphs[1])
    assert diff.divergence is None, list(diff.lines())
