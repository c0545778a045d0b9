"""Backward times heard in C++ are told of the same calls as those of hooks."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import op_tools
from op_tools.native import compiling
from op_tools.watch import backward_clock

pytestmark = pytest.mark.skipif(compiling.find_compiler() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    assert backward_clock.LIBRARIES.wait() is not None


@pytest.fixture(params=["clock", "hooks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "hooks":
        monkeypatch.setattr(backward_clock.BackwardClock, "listening", lambda device_type: None)
    return str(request.param)


def told(timing: op_tools.OpTimeMeasure) -> list[tuple[str, str]]:
    return sorted((r["op"], r["phase"]) for r in timing.records())


def train(device: str) -> op_tools.OpTimeMeasure:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(8, 16).to(device), torch.nn.Linear(16, 4).to(device)
    x = torch.randn(5, 8, device=device)
    with op_tools.OpTimeMeasure() as timing:
        loss = F.gelu(first(x)).tanh_().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        hidden = checkpoint(lambda y: F.softmax(first(y), -1), x, use_reentrant=False)
        torch.autograd.grad(second(hidden).split(2, -1)[0].sum(), second.weight)
        with torch.no_grad():
            second(first(x))
        first(x)  # never run backward
    return timing


def test_the_same_calls_in_both_ways(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = train(device)
    monkeypatch.setattr(backward_clock.BackwardClock, "listening", lambda device_type: None)
    hooks = train(device)
    assert told(clock) == told(hooks)
    backward = [r for r in told(clock) if r[1] == "backward"]
    assert backward.count(("torch.nn.functional.gelu", "backward")) == 2, "one row per backward pass"


def test_nodes_without_a_kernel_take_no_time(device: str) -> None:
    x = torch.ones(3, 4, device=device, requires_grad=True)
    with op_tools.OpTimeMeasure() as timing:
        x.t().cos().sum().backward()
    times = {r["op"]: r["elapsed_ms"] for r in timing.records() if r["phase"] == "backward"}
    assert times["torch.Tensor.t"] == 0, "two events next to each other are some microseconds apart"
    assert times["torch.Tensor.cos"] > 0


def test_the_clock_is_what_runs_here(device: str) -> None:
    with op_tools.OpTimeMeasure() as timing:
        assert timing._clock is not None
        with op_tools.OpTimeMeasure() as second:
            assert second._clock is None, "one listens, the other has hooks"
            torch.ones(3, device=device, requires_grad=True).exp().sum().backward()
    assert told(timing) == told(second)


def test_times_are_those_of_the_work(device: str, way: str) -> None:
    small = torch.randn(8, 8, device=device, requires_grad=True)
    large = torch.randn(1024, 1024, device=device, requires_grad=True)
    (torch.mm(large, large).sum() + small.exp().sum()).backward()  # kernels are loaded at the first use
    with op_tools.OpTimeMeasure(ops=["torch.mm", "torch.Tensor.exp"]) as timing:
        for _ in range(9):
            (torch.mm(large, large).sum() + small.exp().sum()).backward()
    rows = [r for r in timing.records() if r["phase"] == "backward"]
    # the shortest of some: other processes may be using the device
    product, small_one = (
        min(r["elapsed_ms"] for r in rows if r["op"] == op) for op in ("torch.mm", "torch.Tensor.exp")
    )
    assert product > 2 * small_one > 0


def test_calls_that_were_run_backward_are_forgotten(device: str) -> None:
    x = torch.randn(4, device=device, requires_grad=True)
    with op_tools.OpTimeMeasure() as timing:
        for _ in range(20):
            x.exp().sum().backward()
        clock = timing._clock
        assert clock is not None
        assert clock.counts().calls == 0


def test_many_calls_that_are_never_run_backward_are_bounded(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_clock, "_MAX_CALLS", 10)
    x = torch.randn(4, device=device, requires_grad=True)
    with op_tools.OpTimeMeasure() as timing:
        for _ in range(50):
            last = x.exp()
        clock = timing._clock
        assert clock is not None
        assert 0 < clock.counts().calls <= 10
        last.sum().backward()
    assert ("torch.Tensor.exp", "backward") in told(timing), "the newest are kept"


def test_a_tool_that_cannot_start_leaves_the_clock_to_others(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("OP_TIME_MEASURE_LIST", "[")
    with pytest.raises(op_tools.SettingsError):
        op_tools.OpTimeMeasure().start()
    monkeypatch.delenv("OP_TIME_MEASURE_LIST")
    with op_tools.OpTimeMeasure() as timing:
        assert timing._clock is not None


def test_events_around_nodes_of_the_cpu_are_given_back(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_INCLUDE_CPU", "1")
    with op_tools.OpTimeMeasure() as timing:
        torch.ones(3, requires_grad=True).exp().backward(torch.ones(3))
        clock = timing._clock
        assert clock is not None
        assert clock.counts().events == 2
    assert ("torch.Tensor.exp", "backward") in told(timing), "by the host's clock"


def test_views_take_no_time(device: str) -> None:
    x = torch.ones(3, 4, device=device)
    with op_tools.OpTimeMeasure() as timing:
        for _ in range(3):  # the first in Python, later ones in machine code
            x.t().reshape(12).view(4, 3)
    times = {op: [r["elapsed_ms"] for r in timing.records() if r["op"] == f"torch.Tensor.{op}"] for op in ("t", "view")}
    assert times == {"t": [0] * 3, "view": [0] * 3}
    assert min(r["elapsed_ms"] for r in timing.records() if r["op"] == "torch.Tensor.reshape") > 0, "it copies"


def test_two_lines_with_one_operator_are_one_row_of_the_sums(device: str) -> None:
    x = torch.ones(64, 64, device=device, requires_grad=True)
    with op_tools.OpTimeMeasure() as timing:
        for _ in range(5):
            (x.exp() * 2).sum().backward()
            x[:32].exp().sum().backward()
    rows = timing.records()
    for row in timing.by_op():
        own = [r["elapsed_ms"] for r in rows if (r["op"], r["phase"]) == (row["name"], row["phase"])]
        assert (row["calls"], row["total_ms"]) == (len(own), pytest.approx(sum(own)))
    assert {(r["name"], r["phase"]): r["calls"] for r in timing.by_op()}["torch.Tensor.exp", "backward"] == 10


def test_many_threads_are_told_apart(device: str) -> None:
    """Each thread counts its own nodes, and each has a backward pass of its own under way."""

    def work(number: int) -> None:
        x = torch.ones(number + 1, device=device, requires_grad=True)
        for _ in range(50):
            x.exp().sum().backward()

    def counted() -> dict[tuple[str, str], int]:
        with op_tools.OpTimeMeasure() as timing:
            threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return {(row["name"], row["phase"]): row["calls"] for row in timing.by_op()}

    found = counted()
    assert found["torch.Tensor.exp", "forward"] == found["torch.Tensor.sum", "forward"] == 200
    assert found["torch.Tensor.exp", "backward"] == 200
