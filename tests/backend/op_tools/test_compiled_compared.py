"""OpAutoCompare on code made by torch.compile: each run of a graph is one call, judged forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

import op_tools
from op_tools.call.graphs import graph_of
from op_tools.judge.graphs import Runner

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Mlp(nn.Module):
    """Running statistics are buffers that the graph writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class Attention(nn.Module):
    """One head of a small GPT, with a mask that is made inside."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.breaks, self.embedded = breaks, nn.Embedding(20, 8)
        self.norm, self.mixed, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        query, key, value = self.mixed(self.norm(x)).split(8, -1)
        if self.breaks:
            torch._dynamo.graph_break()
        length = tokens.shape[1]
        seen = torch.tril(torch.ones(length, length, device=x.device)) > 0
        scores = (query @ key.transpose(-2, -1) / 8**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        return self.out(x + F.gelu(scores.to(value.dtype) @ value))


class Pixels(nn.Module):
    """A small convolutional net."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.max_pool2d(F.relu(self.norm(self.first(x))), 3).flatten(1))


def _tokens(step: int, length: int = 5) -> Tensor:
    return (torch.arange(2 * length).view(2, length) * 7 + step) % 20


_PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], torch.dtype | None]] = {
    "mlp": (Mlp, lambda step: torch.linspace(-1, 1, 24).view(4, 6) * (step + 1), None),
    "attention": (Attention, _tokens, None),
    "graph breaks": (lambda: Attention(breaks=True), _tokens, None),
    "dynamic shapes": (Attention, lambda step: _tokens(step, 5 + step), None),
    "pixels": (Pixels, lambda step: torch.linspace(-1, 1, 256).view(2, 2, 8, 8).cos() * (step + 1), None),
    "half autocast": (Attention, _tokens, torch.bfloat16),
}


def _train(program: str, device: str, backend: Any, tool: Any = None) -> tuple[list[float], int]:
    """Losses and parameters after three steps, and how many frames Dynamo compiled."""
    made, batch, low = _PROGRAMS[program]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = made().to(device)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[float] = []
    with tool or contextlib.nullcontext():
        for step in range(3):
            with torch.autocast(torch.device(device).type, low, enabled=low is not None):
                loss = compiled(batch(step).to(device)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    found += [float(p.detach().double().sum()) for p in model.parameters()]
    return found, torch._dynamo.utils.counters["frames"]["total"]


def _phases(tool: Any) -> set[str]:
    return {row["phase"] for row in tool.records() if row["op"] == "torch.compile"}


_SLOW = ("graph breaks", "dynamic shapes", "pixels")  # Dynamo takes its time


@pytest.mark.parametrize("program", [pytest.param(p, marks=[pytest.mark.slow] * (p in _SLOW)) for p in _PROGRAMS])
def test_programs_that_are_right(device: str, program: str) -> None:
    expected = _train(program, device, "aot_eager")
    tool = op_tools.OpAutoCompare()
    assert _train(program, device, "aot_eager", tool) == expected, "bits or graphs are others under the tool"
    assert not tool.blames
    assert _phases(tool) == {"forward", "backward"}
    assert tool.compiled == "", "some of it was left alone"
    assert not [f for f in tool.findings() if f.kind in ("tool-failure", "skipped")]


def in_double(module: Any, inputs: Any) -> Callable[..., Any]:
    """A backend that is right and rounds otherwise: everything in float64, results in the dtype that is expected."""
    run = Runner(graph_of(module), wide=True)
    dtypes = [n.meta["example_value"].dtype for n in next(iter(reversed(module.graph.nodes))).args[0]]

    def compiled(*args: Any) -> Any:
        wide = [a.double().cpu() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        wide = [a.cpu() if isinstance(a, Tensor) else a for a in wide]
        where = next(a.device for a in args if isinstance(a, Tensor))
        return tuple([r.to(where, dtype) for r, dtype in zip(run(*wide), dtypes)])

    return compiled


@pytest.mark.parametrize("program", ["mlp", "attention", "half autocast"])
def test_a_backend_that_rounds_otherwise_is_right(device: str, program: str) -> None:
    made, batch, low = _PROGRAMS[program]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = made().to(device).eval()
    compiled = torch.compile(model, backend=in_double)
    with op_tools.OpAutoCompare() as tool, torch.no_grad():
        for step in range(2):
            with torch.autocast(torch.device(device).type, low, enabled=low is not None):
                compiled(batch(step).to(device))
    rows = [row for row in tool.records() if row["op"] == "torch.compile" and " output" in row["name"]]
    assert [row["verdict"] for row in rows] == ["right"] * 2
    assert any(row["excess"] > 0 for row in rows), "it has the very bits of the CPU's own run"
    assert not tool.blames


# --- backends that are wrong -----------------------------------------------------------------------------


def last_element(module: Any, inputs: Any) -> Callable[..., Any]:
    """The last element of the first result is another one."""

    def compiled(*args: Any) -> Any:
        first, *rest = module.forward(*args)
        first = first.clone()
        first.view(-1)[-1] += 1
        return (first, *rest)

    return compiled


def lost_write(module: Any, inputs: Any) -> Callable[..., Any]:
    """What it should write to stays as it is."""
    return lambda *args: module.forward(*[a.clone() if isinstance(a, Tensor) else a for a in args])


def test_a_wrong_result_is_blamed_on_the_compiled_function(device: str) -> None:
    torch._dynamo.reset()

    def nearest(x: Tensor) -> Tensor:
        return (x * 2).t().argmin(dim=1)

    step = torch.compile(nearest, backend=last_element)
    x = torch.linspace(0, 5, 64).cos().view(8, 8).to(device)
    with op_tools.OpAutoCompare() as tool:
        for _ in range(2):
            step(x)
    assert [(b.op, b.phase) for b in tool.blames] == [("torch.compile", "forward")] * 2
    assert "def nearest(x: Tensor)" in tool.blames[0].location
    assert "12.5 % of its elements" in tool.blames[0].reason
    assert "every call of its graph is right on the device without the compiler" in tool.blames[0].reason


def test_an_operator_that_is_wrong_without_the_compiler_is_named(device: str, faults: Any) -> None:
    torch._dynamo.reset()
    model = Mlp().to(device)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad(), op_tools.OpAutoCompare() as tool:
        model.eval()
        faults.plant(faults.parse("relu: scale=1.5")[0])
        compiled(torch.ones(4, 6, device=device))
        tool.wait()
    (blame,) = tool.blames
    assert blame.module == "Mlp"
    assert "its call torch.relu at" in blame.reason
    assert "self.last(torch.relu(" in blame.reason


def test_a_lost_write_to_a_buffer_is_found(device: str) -> None:
    torch._dynamo.reset()
    model = Mlp().to(device)
    compiled = torch.compile(model, backend=lost_write)
    with torch.no_grad(), op_tools.OpAutoCompare() as tool:
        compiled(torch.ones(4, 6, device=device).cumsum(0))
    (blame,) = tool.blames
    wrong = [row["name"] for row in tool.records() if row["verdict"] == "wrong"]
    assert len(wrong) == 3
    assert all(" input" in name for name in wrong)
    assert "norm" in blame.reason


@pytest.mark.parametrize("right", [True, False])
def test_a_compiled_optimizer(device: str, right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)  # Dynamo asks CUDA about parameters
    torch._dynamo.reset()
    parameter = nn.Parameter(torch.ones(3, device=device))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, foreach=False)

    def broken(module: Any, inputs: Any) -> Callable[..., Any]:
        def compiled(*args: Any) -> Any:
            result = module.forward(*args)
            with torch.no_grad():
                parameter[1] = 0.0
            return result

        return compiled

    update = torch.compile(lambda: optimizer.step(), backend="aot_eager" if right else broken)
    with op_tools.OpAutoCompare() as tool:
        parameter.grad = torch.full_like(parameter, 0.5)
        update()
    verdicts = [row["verdict"] for row in tool.records() if row["op"] == "torch.compile"]
    assert len(verdicts) >= 3, "the parameter and its state"
    assert verdicts.count("wrong") == (not right)


def test_wrong_gradients_are_found(device: str) -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def halved(module: Any, inputs: Any) -> Any:
        return make_boxed_func(lambda *args: [g if g is None else g * 0.5 for g in module.forward(*args)])

    backend = aot_autograd(fw_compiler=lambda m, _: make_boxed_func(m.forward), bw_compiler=halved)
    torch._dynamo.reset()
    weight = torch.ones(3, 3, device=device, requires_grad=True)
    compiled = torch.compile(lambda w, x: (x @ w).sin(), backend=backend)
    with op_tools.OpAutoCompare() as tool:
        compiled(weight, torch.ones(2, 3, device=device)).sum().backward()
    (blame,) = tool.blames
    assert (blame.op, blame.phase) == ("torch.compile", "backward")
    assert "autograd's gradients of its graph are right on the device without the compiler" in blame.reason


# --- what is not compared, and why -------------------------------------------------------------------------


def _told(tool: Any) -> str:
    return "\n".join(tool.summary())


def test_what_is_not_compared_is_said(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    x = torch.ones(4, 4, device=device)
    dropout = torch.compile(lambda x: F.dropout(x, 0.5), backend="aot_eager")
    with op_tools.OpAutoCompare() as tool:
        dropout(x)
    assert "torch.compile: 1 forward call" in _told(tool)
    assert "random numbers" in _told(tool)
    with op_tools.OpAutoCompare(disable=["torch.compile"]) as tool:
        dropout(x)
    assert "1 forward run" in tool.compiled
    monkeypatch.setenv("OP_AUTOCOMPARE_MAX_BYTES", "100")
    squared = torch.compile(lambda x: x @ x, backend="aot_eager")
    with op_tools.OpAutoCompare() as tool:
        squared(x)
    assert "MiB in double precision; the limit is" in _told(tool)


def test_what_was_compiled_before_is_left_alone(device: str) -> None:
    torch._dynamo.reset()
    x = torch.ones(4, device=device)
    doubled = torch.compile(lambda x: x * 2, backend="aot_eager")
    doubled(x)
    with op_tools.OpAutoCompare() as tool:
        doubled(x)
    assert "not compared: compiled before the tool was started" in _told(tool)
    assert not tool.calls


def test_modes_choose_among_runs_of_compiled_code(device: str) -> None:
    torch._dynamo.reset()
    x = torch.ones(4, device=device)
    doubled = torch.compile(lambda x: x * 2, backend="aot_eager")
    with op_tools.OpAutoCompare(mode="once") as tool:
        for _ in range(5):
            doubled(x)
    assert tool.calls["torch.compile"] == 1


def test_an_error_of_compiled_code_is_the_users(device: str) -> None:
    torch._dynamo.reset()

    def raises(module: Any, inputs: Any) -> Any:
        def compiled(*args: Any) -> Any:
            raise ValueError("as it is")

        return compiled

    step = torch.compile(lambda x: x * 2, backend=raises)
    with op_tools.OpAutoCompare() as tool, pytest.raises(ValueError, match="as it is"):
        step(torch.ones(2, device=device))
    assert not tool.blames
    assert not tool.findings() or {f.kind for f in tool.findings()} == {"skipped"}
