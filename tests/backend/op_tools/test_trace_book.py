"""A trace is the same whether machine code or Python keeps its book."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import op_tools
from op_tools.compat import running_pass
from op_tools.native import book
from op_tools.trace.format import BACKWARD, GRADIENT, PHASES, TABLES, Trace, read
from op_tools.trace.graph import Graph
from op_tools.trace.memory import memory_of
from op_tools.trace.record import Recorder
from op_tools.watch import sums

_VARIES = {"time", "stream", "step"}


def _in_place(device: str) -> Callable[[], None]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(288, 4))
    model.to(device)
    x = torch.randn(2, 3, 8, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        y = model(x)
        y = (y + y.sin()).view(-1)
        y.mul_(2)
        y.sum().backward()
        optimizer.step()

    return step


def _recomputed(device: str) -> Callable[[], None]:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to(device)
    lstm = nn.LSTM(8, 8, batch_first=True).to(device)
    x = torch.randn(4, 8).to(device).requires_grad_()

    def step() -> None:
        y = checkpoint(model, x, use_reentrant=False)
        first, second = y.split(4, -1)
        (u, _) = lstm(torch.cat([second, first], -1)[None])
        with torch.autocast(device, torch.bfloat16):
            loss = torch.chunk(u, 2, -1)[0].max(dim=-1)[0].sum() + y.t().matmul(y).float().norm()
        loss.backward()
        with torch.no_grad():
            torch.add(y, 1, out=torch.zeros_like(y)).relu_()
        for _ in range(3):  # no tensor, but a device
            torch.cat([y, torch.tensor([], device=y.device)], -1)

    return step


def _shared(device: str) -> Callable[[], None]:
    x = torch.randn(6, 4).to(device).requires_grad_()
    z = torch.randn(6, 4).to(device).requires_grad_()

    def step() -> None:
        (x.view(-1) * x.view(-1)).sum().backward()  # each argument has a gradient of its own, not their sum
        torch.addcmul(z, z[:], z.view(6, 4)).sum().backward()

    return step


def _rows(trace: Trace, table: str) -> list[tuple[Any, ...]]:
    parts = [
        trace.words(table, name) if kind == "text" else trace[table][name].tolist()
        for name, kind in TABLES[table].items()
        if name not in _VARIES
    ]
    return list(zip(*parts))


def _blocks(trace: Trace) -> Counter[Any]:
    """What was taken and freed, but for gradients: Python does not see those between layers."""
    return Counter(
        (operator, size, kind, module)
        for operator, size, kind, module in zip(
            *(trace["memory"][c].tolist() for c in ("operator", "bytes", "kind", "module"))
        )
        if kind != GRADIENT
    )


@pytest.mark.parametrize("make", [_in_place, _recomputed, _shared])
def test_both_books_are_the_same(
    make: Callable[[str], Callable[[], None]], tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if book.LIBRARY.wait() is None:
        pytest.skip(f"no compiler here, or it failed: {book.LIBRARY.failure}")
    traces = []
    for name in ("native", "python"):
        if name == "python":
            monkeypatch.setattr(book.LIBRARY, "loaded", None)
        torch.manual_seed(0)
        step = make(device)
        with op_tools.OpTrace(to=tmp_path / name) as tool:
            tool._started()
            if name == "native":  # Python cannot ask for memory whose tensor has ended without holding it
                tool._recorder.native.remembered = 0  # type: ignore[union-attr]
            step()
            step()
        assert not tool.findings()
        assert (tool._recorder.native is not None) == (name == "native")  # type: ignore[union-attr]
        traces.append(read(tmp_path / name / "rank0.optrace"))
    native, python = traces
    for table in ("operators", "edges", "looks", "modules"):
        assert _rows(native, table) == _rows(python, table), table
    # Who made a gradient that autograd hands on is told by its address, which other memory may have had before: that
    # varies from run to run of either book.
    ours, theirs = (_rows(trace, "tensors") for trace in traces)
    assert len(ours) == len(theirs)
    apart = [(a, b) for a, b in zip(ours, theirs) if a != b]
    assert len(apart) <= len(ours) // 50, apart
    look = list(TABLES["tensors"]).index("look")
    assert all(a[look] == b[look] for a, b in apart), apart
    assert sorted(_rows(native, "prints")) == sorted(_rows(python, "prints")), "in whichever order"
    assert memory_of(Graph(native)).peak == memory_of(Graph(python)).peak
    assert _blocks(native) == _blocks(python)


def test_the_backward_says_who_made_each_gradient(tmp_path: Path, device: str) -> None:
    if book.LIBRARY.wait() is None or sums.LIBRARY.wait() is None:
        pytest.skip("no compiler here, or it failed")
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8)).to(device)
    x = torch.randn(3, 5, 8).to(device).requires_grad_()
    with op_tools.OpTrace(to=tmp_path) as tool:
        for _ in range(2):
            y = x * 2  # autograd adds up three gradients for it
            (y + model(y) + y.flip(0)).mean().backward()
    assert not tool.findings()
    graph = Graph(read(tmp_path / "rank0.optrace"))
    backward = np.flatnonzero(graph.operators["phase"] == BACKWARD)
    assert len(backward) >= 2 * 10
    producer = graph.tensors["producer"]
    unknown = [graph.titles[n] for n in backward for t in graph.inputs(n).tolist() if producer[t] < 0]
    assert unknown == [graph.titles[n] for n in backward if "mean" in graph.titles[n]]  # what the pass began with


def test_an_error_while_a_backward_is_recorded_is_said_once(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if book.LIBRARY.wait() is None:
        pytest.skip(f"no compiler here, or it failed: {book.LIBRARY.failure}")
    assert sums.LIBRARY.wait() is not None, sums.LIBRARY.failure
    layer = nn.Linear(4, 5).to(device)
    x = torch.randn(3, 4).to(device)
    look_of = Recorder._plain_look

    def broken(self: Recorder, tensor: torch.Tensor) -> int:
        if running_pass() != -1:
            raise ValueError("no look today")
        return look_of(self, tensor)

    monkeypatch.setattr(Recorder, "_plain_look", broken)
    with op_tools.OpTrace(to=tmp_path, prints=False) as tool:
        for _ in range(2):
            y = layer(x)
            (y * y.sin()).sum().backward()  # a sum of gradients as well
    assert layer.weight.grad is not None
    told = {found.op: found.message for found in tool.findings()}
    assert len(told) == len(tool.findings())  # each once
    assert told["torch.Tensor.sum"] == "its backward is not in the trace: ValueError: no look today"
    assert told["autograd.sum_of_gradients"] == "it is not in the trace: ValueError: no look today"
    assert "torch.nn.functional.linear" in told


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * 3 * x.square()


@pytest.mark.parametrize("name", ["native", "python"])
def test_what_a_function_of_the_users_own_does_backward_is_backward(
    name: str, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if book.LIBRARY.wait() is None:
        pytest.skip("no compiler here, or it failed")
    if name == "python":
        monkeypatch.setattr(book.LIBRARY, "loaded", None)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).to(device)
    x = torch.randn(3, 4).to(device)
    with op_tools.OpTrace(to=tmp_path):
        _Cubed.apply(checkpoint(model, x.requires_grad_(), use_reentrant=False)).sum().backward()
    graph = Graph(read(tmp_path / "rank0.optrace"))
    phases = {(graph.names[n].rpartition(".")[2], PHASES[p]) for n, p in enumerate(graph.operators["phase"].tolist())}
    assert {("square", "backward"), ("mul", "backward"), ("linear", "recomputed")} <= phases
    assert not {("square", "recomputed"), ("mul", "recomputed")} & phases


def test_memory_that_nobody_has_written_to_has_no_fingerprint(tmp_path: Path, device: str, keeps_book: str) -> None:
    ones, before = torch.ones(64).to(device), torch.UntypedStorage.resize_
    with op_tools.OpTrace(to=tmp_path) as tool:
        x = torch.empty(64, device=device)
        x.view(8, 8)
        x.copy_(ones)
        x.view(4, 16)
        memory = x.untyped_storage()
        memory.resize_(0)
        memory.resize_(256)
        x.view(2, 32)
        x.mul(2)
        x.copy_(ones)
        x.view(16, 4)
    assert not tool.findings()
    assert torch.UntypedStorage.resize_ is before
    graph = Graph(read(tmp_path / "rank0.optrace"))
    _, where = graph.prints()
    said = {}
    for operator, name in enumerate(graph.names):
        for side, tensors in (("in", graph.inputs(operator)), ("out", graph.outputs(operator))):
            for tensor in tensors.tolist()[:1]:
                key = f"{name.rpartition('.')[2]} {graph.look(tensor)['shape']} {side}"
                made = int(graph.tensors["producer"][tensor])
                said.setdefault(key, (where[tensor] >= 0, graph.titles[made] if made >= 0 else ""))
    assert {key: printed for key, (printed, _) in said.items()} == {
        "empty [64] out": False,
        "view [64] in": False,
        "view [8, 8] out": False,
        "copy_ [64] in": False,
        "copy_ [64] out": True,
        "view [4, 16] out": True,
        "view [2, 32] out": False,
        "mul [64] in": False,
        "mul [64] out": True,
        "view [16, 4] out": True,
    }
    assert said["mul [64] in"][1] == "", "no operator has made what lies there"


def test_who_writes_where_nobody_saw_it_is_believed(tmp_path: Path, device: str, keeps_book: str) -> None:
    with op_tools.OpTrace(to=tmp_path, disable="torch.Tensor.fill_"):
        x = torch.empty(64, device=device)
        x.fill_(3)  # not in this trace
        x.view(8, 8)
        x.add(1)
    graph = Graph(read(tmp_path / "rank0.optrace"))
    table, where = graph.prints()
    (view,) = (n for n, name in enumerate(graph.names) if name.endswith("view"))
    (tensor,) = graph.inputs(view).tolist()
    assert table[where[tensor]][8] == 3 * 64
