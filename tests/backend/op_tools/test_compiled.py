"""Code made by torch.compile: tools leave it alone, forward and backward, and say how much of the run it is.

What OpAutoCompare does with graphs that are compiled while it watches is in `test_compiled_compared.py`.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import op_tools
from op_tools.call.devices import accelerator_type
from op_tools.compat import compilations
from op_tools.tools import all_tools
from op_tools.watch import patches
from op_tools.watch.compiled import Tally, WhenImported
from op_tools.watch.intercept import INTERCEPTOR

from .compiled_matrix import CASES, CHANGING, STARTS, Doubled, backends, train

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
_TOOLS = [name for name in all_tools() if name.startswith("Op")]  # other tests register tools of their own
_OBSERVING = [name for name in _TOOLS if name not in CHANGING]


class Small(nn.Module):
    """Two layers, with a graph break and a custom function between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(Doubled.apply(x).sin()).square().mean()  # type: ignore[no-untyped-call]


class Trained:
    """A compiled model whose training can be repeated from the same beginning."""

    def __init__(self, device: str, backend: str) -> None:
        torch.manual_seed(0)
        self.device, self.model = device, Small().to(device)
        self.beginning = copy.deepcopy(self.model.state_dict())
        self.compiled = torch.compile(self.model, backend=backend)
        self.expected = self.run()

    def run(self, tool: Any = None) -> list[Any]:
        """Losses and gradients of two steps, under a tool."""
        self.model.load_state_dict(self.beginning)
        found: list[Any] = []
        x = torch.ones(3, 4, device=self.device)
        for _ in range(2):
            self.model.zero_grad()
            with tool or contextlib.nullcontext(), torch.autocast(self.device, torch.bfloat16):
                loss = self.compiled(x)
                loss.backward()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    assert parameter.grad is not None
                    found += parameter.grad.flatten().tolist()
                    parameter -= 0.1 * parameter.grad
            found.append(loss.item())
        return found


@pytest.fixture(scope="module", params=["eager", "aot_eager"])
def trained(request: pytest.FixtureRequest, device: str) -> Trained:
    return Trained(device, request.param)


@pytest.fixture(scope="module")
def device() -> str:
    return "cpu" if accelerator_type() == "cpu" else "cuda"


@pytest.mark.parametrize("name", _TOOLS)
def test_compiled_code_is_left_alone_forward_and_backward(trained: Trained, name: str) -> None:
    before = compilations()
    tool = getattr(op_tools, name)()
    assert trained.run(tool) == trained.expected
    assert compilations() == before, "the tool made Dynamo compile again"
    assert set(tool.calls) == set(), "inside of compiled code"
    assert "1 forward" in tool.compiled
    assert "% of the run's time" in tool.compiled
    assert [f.kind for f in tool.findings()] == ["skipped"]


def test_tools_that_start_before_the_first_compilation(
    device: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "summary")

    def graphs() -> tuple[int, int]:
        counters = torch._dynamo.utils.counters
        found = counters["frames"]["total"], sum(counters["graph_break"].values())
        counters.clear()
        return found

    graphs()
    torch._dynamo.reset_code_caches()
    expected = Trained(device, "aot_eager").expected
    before = graphs()
    torch._dynamo.reset_code_caches()
    with contextlib.ExitStack() as started:
        tools = [started.enter_context(getattr(op_tools, name)()) for name in _OBSERVING]
        assert Trained(device, "aot_eager").expected == expected
    assert graphs() == before
    comparing = next(tool for tool in tools if tool.name == "OpAutoCompare")
    said = {tool.name: tool.compiled for tool in tools if tool is not comparing}
    assert said.pop("OpTrace") == "", "the graphs of aot_eager are in the trace"
    assert all(text.startswith("2 forward and 4 backward runs") for text in said.values()), said
    assert comparing.compiled == "", "what is compiled while it watches is compared, or it says why not"
    assert "the higher-order operator autograd_function_apply" in "\n".join(comparing.summary())
    assert comparing.calls["torch.compile"] == 2
    assert not comparing.blames
    assert capfd.readouterr().err.count("made by torch.compile is not watched") == 1
    assert not [op for tool in tools for op in tool.calls if "aten" in op]


def test_the_summary_names_compiled_code(
    trained: Trained, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "summary")
    x = torch.ones(3, 4, device=trained.device)
    trained.compiled(x)
    with op_tools.OpAutoCompare() as comparison, op_tools.OpObserve() as observe:
        trained.compiled(x).exp()
    told = capfd.readouterr().out
    assert "1 comparison, 0 wrong; every call outside compiled code that computes was compared" in told
    assert f"torch.compile: {comparison.compiled}, not compared: compiled before the tool was started" in told
    assert f"not watched, made by torch.compile: {observe.compiled}" in told
    with op_tools.OpAutoCompare():
        trained.compiled(x)
    assert "NOTHING WAS COMPARED: no call outside compiled code was seen" in capfd.readouterr().out


@torch.compiler.disable
def _recomputed(x: Tensor) -> Tensor:
    y: Tensor = checkpoint(lambda x: (x @ x).sin(), x, use_reentrant=False)
    return y


def test_what_dynamo_leaves_to_python_is_left_alone_in_the_backward_pass(device: str) -> None:
    compiled = torch.compile(lambda x: _recomputed(x * 2) + 1, backend="eager")
    x = torch.full((4, 4), 0.3, device=device, requires_grad=True)
    grads = []
    for name in (None, "OpObserve", "OpDtypeCast"):
        tool = None if name is None else getattr(op_tools, name)()
        with tool or contextlib.nullcontext(), torch.autocast(device, torch.bfloat16):
            grads.append(torch.autograd.grad(compiled(x).float().sum(), x)[0].tolist())
        if name == "OpObserve":
            assert set(tool.calls) == {f"torch.Tensor.{name}" for name in ("float", "sum", "tolist")}
    assert grads[0] == grads[1] == grads[2]


def test_a_compiled_optimizer_step_compiles_as_without_the_tool_and_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OP_TOOLS_INCLUDE_CPU", "1")
    if accelerator_type() == "soft":  # Dynamo asks CUDA about parameters of optimizers
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def update() -> None:
        optimizer.step()

    compiled = torch.compile(update, backend="eager")
    frames = torch._dynamo.utils.counters["frames"]

    def steps(tool: Any) -> tuple[int, list[float]]:
        torch._dynamo.reset_code_caches()
        before = frames["total"]
        with torch.no_grad():
            parameter.fill_(1.0)
        with tool or contextlib.nullcontext():
            for _ in range(3):
                parameter.grad = torch.ones(3)
                compiled()
        return frames["total"] - before, parameter.tolist()

    expected = steps(None)
    counted = INTERCEPTOR.step
    assert steps(op_tools.OpObserve()) == expected
    assert INTERCEPTOR.step == counted + 3


@pytest.mark.parametrize("name", ["OpFallback", "OpOverflowCheck"])
def test_what_compiled_code_writes_is_noticed(device: str, name: str) -> None:
    @torch.compile(backend="eager")
    def write(x: Tensor, value: float) -> None:
        x.data.fill_(value)  # PyTorch does not count this

    x = torch.zeros(3, device=device)
    with getattr(op_tools, name)() as tool:
        assert (x * 2).tolist() == [0.0] * 3
        write(x, 1.0)
        assert (x * 2).tolist() == [2.0] * 3
        write(x, float("inf"))
        assert (x * 2).tolist() == [float("inf")] * 3
    if name == "OpOverflowCheck":
        rows = [row for row in tool.records() if row["role"] == "inputs" and "tolist" not in row["op"]]
        assert [row["max"] for row in rows][:2] == [0.0, 1.0]


def test_a_tool_that_starts_inside_a_compiled_function_leaves_it_alone_to_its_end(device: str) -> None:
    tool = op_tools.OpObserve()

    @torch.compiler.disable
    def begin(x: Tensor) -> Tensor:
        tool.start()
        return x.cos()

    @torch.compile(backend="eager")
    def run(x: Tensor) -> Tensor:
        return begin(x.exp()).sin()

    x = torch.ones(3, device=device)
    y = run(x)
    y.tan()
    tool.stop()
    assert set(tool.calls) == {"torch.Tensor.tan"}
    assert not INTERCEPTOR.is_on()
    assert patches.listed() == []


@pytest.mark.slow  # Dynamo traces the hooks on nodes
def test_a_backward_pass_that_is_compiled_as_a_whole(device: str) -> None:
    weight = nn.Parameter(torch.full((3, 3), 0.5, device=device))
    enabled = torch._dynamo.compiled_autograd._enable
    grads = []
    for name in (None, "OpFallback", "OpAutoCompare"):
        weight.grad = None
        tool = None if name is None else getattr(op_tools, name)()
        with tool or contextlib.nullcontext(), enabled(torch.compile(backend="eager")):
            (weight @ weight).sin().sum().backward()
        assert weight.grad is not None
        grads.append(weight.grad.tolist())
        assert tool is None or tool.compiled.startswith("1 backward run")
    assert grads[0] == grads[1] == grads[2]


# -- features -----------------------------------------------------------------------------------------


def helper(x: Tensor) -> Tensor:
    return x * 3


@torch.compile(backend="eager", fullgraph=True)
def calls_helper(x: Tensor) -> Tensor:
    return helper(x) + 1


def has_compiled_code(x: Tensor) -> Tensor:
    return calls_helper(x.exp()).sin()


def test_a_feature_on_a_function_that_compiled_code_calls(device: str) -> None:
    x = torch.ones(3, device=device)
    expected = calls_helper(x).tolist()
    before = compilations()
    with op_tools.apply_feature(helper, "dump_op_args") as handle:
        assert calls_helper(x).tolist() == expected
        assert compilations() == before
        assert set(handle.tool.calls) == set()
        helper(x)
        assert sum(handle.tool.calls.values()) == 1


def test_fallback_of_a_function_with_compiled_code_in_it(device: str) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    with op_tools.apply_feature(has_compiled_code, "fallback") as handle:
        y = has_compiled_code(x)
        y.sum().backward()
        refused = [f.message for f in handle.tool.findings() if f.kind == "refused"]
    assert refused == ["compiled code inside of it ran on the device"]
    assert y.tolist() == pytest.approx(torch.sin(torch.exp(torch.ones(3)) * 3 + 1).tolist())
    assert x.grad is not None


# -- kernels that the CPU lacks -----------------------------------------------------------------------


@pytest.fixture
def lacking() -> Iterator[Any]:
    """Operators of the device: one that the CPU lacks, and one that it has, whose backward calls the other."""
    here = accelerator_type()
    if here == "cpu":
        pytest.skip("the CPU is the device")
    key = {"soft": "PrivateUse1"}.get(here, here.upper())
    with torch.library._scoped_library("lacking", "FRAGMENT") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.define("tripled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: x + x, key)
        for each in (key, "CPU"):
            library.impl("tripled", lambda x: x + x + x, each)

        def backward(ctx: Any, grad: Tensor) -> Tensor:
            out: Tensor = torch.ops.lacking.doubled(grad)
            return out + grad

        torch.library.register_autograd("lacking::tripled", backward, lib=library)
        yield torch.ops.lacking


def test_an_operator_that_the_cpu_lacks_runs_on_the_device(device: str, lacking: Any) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    with op_tools.OpFallback() as fallback:
        assert lacking.doubled(x.detach()).tolist() == [2.0] * 3
        lacking.tripled(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 3
    refused = [f.message for f in fallback.findings() if f.kind == "refused"]
    assert refused
    assert all("the CPU has no kernel for lacking.doubled" in message for message in refused)


# -- parts --------------------------------------------------------------------------------------------


def test_the_share_leaves_out_what_compiling_took() -> None:
    tally = Tally(forward=3, backward=2, timed=4, seconds=2.0, compiling=1, compile_seconds=60.0)
    assert tally.share(64.5) == pytest.approx(0.5)
    assert tally.describe(64.5) == "3 forward and 2 backward runs, at least 50.0 % of the run's time"
    assert (
        Tally(forward=1, compiling=1, compile_seconds=3.0).describe(4.0) == "1 forward run, share of the time unknown"
    )
    assert tally.since(tally).describe(1.0) == ""


def test_a_module_is_noticed_whoever_imports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "op_tools_imported_late.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    finder = WhenImported("op_tools_imported_late", lambda: seen.append(sys.modules["op_tools_imported_late"].value))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    import op_tools_imported_late

    assert seen == [op_tools_imported_late.value] == [3]
    monkeypatch.delitem(sys.modules, "op_tools_imported_late")


@pytest.mark.slow
@pytest.mark.timeout(1200)  # some twenty trainings, each compiled anew
@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("case", CASES)
def test_the_whole_matrix(device: str, backend: str, case: str) -> None:
    try:
        train(CASES[case], device, backend)
        expected = train(CASES[case], device, backend)
    except Exception as error:
        pytest.skip(f"fails without a tool: {error}"[:200])
    for name in _TOOLS:
        for start in STARTS:
            assert train(CASES[case], device, backend, getattr(op_tools, name)(), start) == expected, (name, start)
