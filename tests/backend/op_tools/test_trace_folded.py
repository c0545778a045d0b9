"""Runs with compiled code against runs without: the operators of the other run are folded into the same pieces."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import op_tools
from op_tools.call.graphs import OP
from op_tools.trace.diff import Diff, load
from op_tools.trace.fold import Folded
from op_tools.trace.graph import Graph
from op_tools.watch.compiled import CompiledRun

pytest.importorskip("torch._dynamo.backends.common")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.ln(x))))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.h, self.head = nn.Embedding(20, 16), nn.ModuleList(Block() for _ in range(3)), nn.Linear(16, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.emb(x)
        for block in self.h:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def _opaque(wrong: Callable[[int], bool] = lambda graph: False) -> Any:
    """A backend whose code nobody sees inside of, as Inductor's; `wrong` says which of its graphs are wrong."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    numbers = itertools.count()

    def forward(graph: Any, _: Any) -> Any:
        scale = 1.1 if wrong(next(numbers)) else 1.0

        def run(*args: Any) -> Any:
            first, *rest = graph.forward(*args)
            return [first * scale, *rest]

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=forward, bw_compiler=lambda graph, _: make_boxed_func(graph.forward))


def _trained(folder: Path, device: str, compiled: str, low: bool = False, **more: Any) -> Graph:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    x, y = torch.randint(20, (2, 8)).to(device), torch.randint(20, (16,)).to(device)
    run: Any = net
    if compiled == "whole":
        run = torch.compile(net, backend=_opaque(**more))
    elif compiled == "blocks":
        for block in net.h:
            block.compile(backend=_opaque(**more))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(run(x).view(16, 20).float(), y)

    loss: Any = torch.compile(loss_of, backend=_opaque(**more)) if compiled == "function" else loss_of
    with op_tools.OpTrace(to=folder) as tool:
        for _ in range(2):
            with torch.autocast(device, torch.bfloat16, enabled=low):
                value = loss(x, y)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not [found for found in tool.findings() if found.kind == "tool-failure"]
    return Graph(load(folder))


def _runs(diff: Diff) -> list[int]:
    return [n for n, a in enumerate(diff.alignment.pairs[:, 0]) if diff.alignment.first.names[a] == OP]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("compiled", "low", "runs"),
    [("whole", False, 4), ("blocks", False, 12), ("function", False, 4), ("blocks", True, 12)],
)
def test_compiled_code_is_compared_with_what_it_takes_the_place_of(
    compiled: str, low: bool, runs: int, turned: bool, tmp_path: Path, device: str
) -> None:
    eager, other = _trained(tmp_path / "a", device, "", low), _trained(tmp_path / "b", device, compiled, low)
    diff = Diff(*((other, eager) if turned else (eager, other)))
    assert diff.divergence is None, next(diff._first())
    folded = diff.alignment.second if turned else diff.alignment.first
    assert isinstance(folded, Folded)
    assert len(_runs(diff)) == len(folded.inside) == runs
    assert diff.numbers.compared[_runs(diff)].all()
    assert len(diff.alignment.pairs) == other.count
    told = list(diff.lines())
    assert told[int(turned)].endswith(f"({eager.count:,} operators)")
    assert f"operators of {'AB'[turned]} are compared as the {runs} runs of compiled code" in "\n".join(told)


def test_compiled_modules_are_folded_into_a_larger_one(tmp_path: Path, device: str) -> None:
    diff = Diff(_trained(tmp_path / "a", device, "blocks"), _trained(tmp_path / "b", device, "whole"))
    assert diff.divergence is None
    assert isinstance(diff.alignment.first, Folded)
    assert len(_runs(diff)) == 4


@pytest.mark.parametrize(("compiled", "runs"), [("blocks", 12), ("function", 4)])
def test_results_that_pytorch_keeps_to_itself_are_known_when_they_are_used(
    compiled: str, runs: int, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompiledRun, "end", lambda self, frame: None)  # as before PyTorch 2.12
    eager, other = _trained(tmp_path / "a", device, ""), _trained(tmp_path / "b", device, compiled)
    diff = Diff(eager, other)
    assert diff.divergence is None
    assert len(_runs(diff)) == runs
    assert diff.numbers.compared[_runs(diff)].all()
    assert len(diff.alignment.pairs) == other.count


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_compiled_module_that_is_wrong_is_named(number: int, tmp_path: Path, device: str) -> None:
    eager, graphs = _trained(tmp_path / "a", device, ""), itertools.count()
    bad = _trained(tmp_path / "b", device, "blocks", wrong=lambda _: next(graphs) == number)
    diff = Diff(eager, bad)
    assert diff.divergence is not None
    one = diff.alignment.first
    assert one.titles[int(diff.alignment.pairs[diff.divergence.pair][0])] == f"model.h.{number} (5 operators)"
    found = diff.as_dict()["divergence"]
    assert found["B"]["title"].startswith(f"model.h.{number}-compile-")
    assert found["phase"] == "forward"
