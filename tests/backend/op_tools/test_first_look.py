"""A first look on the device settles what is right; whatever is not goes to the CPU, and nothing wrong is missed."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import ditorch
import op_tools
from op_tools.compare.judges import device as precheck
from op_tools.compare.judges.device import DevicePrecheck
from op_tools.judge import measures
from op_tools.settings import SettingsError
from tests.backend.op_tools.test_auto_compare import train


@pytest.fixture
def faults(device: str) -> Iterator[Any]:
    if ditorch.backend.name != "soft":
        pytest.skip("only the software accelerator can be made to fail on purpose")
    from ditorch.soft import faults as module

    yield module
    module.clear()


def looked_at(comparison: Any) -> tuple[int, int]:
    """Comparisons that were settled on the device, and that were passed on."""
    return comparison.judge(DevicePrecheck).settled, comparison.judge(DevicePrecheck).passed_on


@pytest.mark.parametrize("save_memory", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("low", [None, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
def test_a_healthy_training_is_settled_mostly_on_the_device(
    device: str, low: torch.dtype | None, save_memory: bool
) -> None:
    bare = train(device, steps=4, low=low, save_memory=save_memory)
    with op_tools.OpAutoCompare(look="device") as compared:
        # later calls are settled once the CPU has found the first of their kind right
        watched = train(device, steps=4, low=low, save_memory=save_memory, after_step=compared.wait)
    assert watched == bare, "losses are the same to the last bit"
    assert [f for f in compared.findings() if f.kind != "skipped"] == []
    rows = compared.records()
    assert {row["verdict"] for row in rows} == {"right"}
    with op_tools.OpAutoCompare() as on_cpu:
        train(device, steps=4, low=low, save_memory=save_memory)

    def results(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        # the engine adds in place or not, as memory is held by others or not
        names = [(r["phase"], r["name"].replace("gradients.add_", "gradients.add")) for r in records]
        return [pair for pair in names if " input" not in pair[1]]

    assert results(rows) == results(on_cpu.records()), "every call is compared, forward and backward"
    settled, _ = looked_at(compared)
    assert settled > len({(r["call_id"], r["phase"]) for r in rows}) / 3
    assert any("settled on the device in float64" in line for line in compared.summary())


def test_the_columns_are_those_of_the_cpu(device: str) -> None:
    x, w = torch.randn(33, 70).to(device), torch.randn(20, 70).to(device)
    rows = []
    for look in ("cpu", "device"):
        with op_tools.OpAutoCompare(look=look) as compared:
            for _ in range(2):
                F.linear(x, w)
                compared.wait()
        rows.append([row for row in compared.records() if row["name"].endswith("output")][-1])
    assert looked_at(compared) == (1, 0)
    for name in ("allclose", "atol", "rtol", "error_info", "verdict"):
        assert rows[0][name] == rows[1][name], name
    for name in ("max_abs_diff", "max_relative_diff", "max_ulp"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-3), name
    assert rows[0]["cosine"] == pytest.approx(rows[1]["cosine"], abs=1e-9)


def linear_step(x: torch.Tensor, layer: torch.nn.Module) -> None:
    layer(x).square().sum().backward()


@pytest.mark.parametrize("fault", ["addmm: noise=1e-2, dtype=float32", "mm: noise=1e-2, dtype=float32, phase=backward"])
def test_a_fault_that_comes_later_is_found(device: str, faults: Any, fault: str) -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(16, 8).to(device), torch.randn(4, 16).to(device)
    with op_tools.OpAutoCompare(look="device") as compared:
        for _ in range(2):
            linear_step(x, layer)
            compared.wait()
        assert looked_at(compared)[0] > 0
        assert compared.findings() == []
        with faults.plant(fault):
            linear_step(x, layer)
    found = compared.findings()
    assert {f.op for f in found} == {"torch.nn.functional.linear"}
    assert {f.kind for f in found} == {"difference"}


def test_a_fault_in_a_call_that_writes_to_its_arguments_is_found(device: str, faults: Any) -> None:
    values, steps = [torch.randn(5).to(device) for _ in range(3)], [torch.randn(5).to(device) for _ in range(3)]
    with op_tools.OpAutoCompare(look="device") as compared:
        for _ in range(2):
            torch._foreach_add_(values, steps, alpha=-0.1)
            compared.wait()
        assert looked_at(compared) == (1, 0)
        with faults.plant("add_: noise=1e-2, dtype=float32"):
            torch._foreach_add_(values, steps, alpha=-0.1)
    assert [f.op for f in compared.findings()] == ["torch._foreach_add_"]


def test_arguments_that_change_before_the_backward_are_compared_as_they_were(device: str, faults: Any) -> None:
    def step(fault: str | None) -> None:
        x = torch.full((6,), 3.0).to(device).requires_grad_()
        y = x.view(2, 3).exp().mul(1.0).add(torch.ones(3).to(device))
        with torch.no_grad():
            x.zero_()
        if fault is None:
            y.sum().backward()
        else:
            with faults.plant(fault):
                y.sum().backward()

    with op_tools.OpAutoCompare(look="device") as compared:
        for _ in range(2):
            step(None)
            compared.wait()
        before = looked_at(compared)
        step("mul: noise=1e-2, dtype=float32, phase=backward")
    assert before[0] > 0
    assert {f.op for f in compared.findings()} <= {"torch.Tensor.exp", "torch.Tensor.mul"}
    assert compared.findings(), "the gradients are wrong"


def test_calls_that_take_indices_go_to_the_cpu(device: str) -> None:
    table, index = torch.randn(9, 4).to(device), torch.tensor([3, 1, 3]).to(device)
    with op_tools.OpAutoCompare(look="device") as compared:
        for _ in range(3):
            F.embedding(index, table)
            table[index]
            compared.wait()
    assert looked_at(compared) == (0, 0)
    assert len({row["call_id"] for row in compared.records()}) == 6


def test_without_room_calls_go_to_the_cpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precheck, "_free_memory", lambda device: 0)
    layer, x = torch.nn.Linear(16, 8).to(device), torch.randn(4, 16).to(device)
    with op_tools.OpAutoCompare(look="device") as compared:
        for _ in range(3):
            layer.zero_grad()
            linear_step(x, layer)
            compared.wait()
    assert looked_at(compared) == (0, 0)
    assert {row["verdict"] for row in compared.records()} == {"right"}


def test_room_is_given_back(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precheck, "_free_memory", lambda device: 8 << 20)
    layer, x = torch.nn.Linear(16, 8).to(device), torch.randn(4, 16).to(device)
    with op_tools.OpAutoCompare(look="device") as compared:
        for _ in range(6):
            linear_step(x, layer)
            compared.wait()
        room, end = compared.judge(DevicePrecheck)._budget, time.monotonic() + 10
        while room.left < 1 << 20 and time.monotonic() < end:
            gc.collect()  # the engine's thread may not be through with its last node
            time.sleep(0.01)
        assert room.left == 1 << 20
    assert looked_at(compared)[0]


def allocated() -> int:
    """Memory of the device that is held, but for the workspaces of its libraries, one for each thread and stream."""
    gc.collect()
    if ditorch.backend.name == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("save_memory", [False, True], ids=["plain", "checkpointed"])
def test_no_memory_of_the_device_is_held_afterwards(device: str, save_memory: bool) -> None:
    train(device, steps=2, save_memory=save_memory)
    before = allocated()
    with op_tools.OpAutoCompare(look="device") as compared:
        train(device, steps=4, save_memory=save_memory)
    assert looked_at(compared)[0] > 0
    assert allocated() <= before + 4096


def test_a_device_without_float64_is_left_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precheck, "has_double", lambda device: False)
    x = torch.randn(5).to(device)
    with op_tools.OpAutoCompare(look="device") as compared:
        for _ in range(3):
            torch.exp(x)
            compared.wait()
    assert looked_at(compared) == (0, 0)
    assert {row["verdict"] for row in compared.records()} == {"right"}


def test_what_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"look='gpu'.*cpu, device"), op_tools.OpAutoCompare(look="gpu"):
        pass
    monkeypatch.setenv("OP_AUTOCOMPARE_FIRST_LOOK", "gpu")
    with pytest.raises(SettingsError, match=r"OP_AUTOCOMPARE_FIRST_LOOK='gpu'"), op_tools.OpAutoCompare():
        pass
    monkeypatch.setenv("OP_AUTOCOMPARE_FIRST_LOOK", "device")
    with op_tools.OpAutoCompare() as compared:
        pass
    assert compared.judge(DevicePrecheck) is not None
    monkeypatch.setenv("OP_AUTOCOMPARE_STANDARD", "torch")  # which needs both sides on the CPU
    with op_tools.OpAutoCompare() as compared:
        pass
    assert compared.judge(DevicePrecheck) is None


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_what_is_measured_on_the_device_is_what_is_measured_on_the_cpu(
    shape: list[int], dtype: torch.dtype, transposed: bool, with_squares: bool, seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    golden = torch.randn(shape, generator=made, dtype=torch.float64) * 10.0 ** (seed % 7 - 3)
    noise = torch.randn(shape, generator=made, dtype=torch.float64) * torch.finfo(dtype).eps
    result = (golden * (1 + noise)).to(dtype)
    squares = torch.rand(shape, generator=made) if with_squares else None
    bound = measures.Bound(1e-3, 1e-30, 6.0, 1e-5, 1e-6, 1e-8)
    moved = result.to("cuda")
    if transposed:
        moved = moved.transpose(0, -1).contiguous().transpose(0, -1)
    far = measures.measure_on_device(
        [
            measures.DeviceQuery(
                moved, golden.to("cuda"), 1e-3, 1e-3, bound, None if squares is None else squares.to("cuda")
            )
        ]
    )
    [(columns, worst)] = far
    here = measures.Sides(result, golden)
    expected = measures.measure(here, 1e-3, 1e-3)
    excess = measures.beyond(here, bound, squares)
    assert columns is not None
    assert excess is not None
    assert columns.allclose == expected.allclose
    for a, b in zip(columns[1:], expected[1:]):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-12)
    assert worst == pytest.approx(excess.worst, rel=1e-4)


def test_what_is_not_finite_is_not_measured_on_the_device() -> None:
    golden = torch.ones(5000, dtype=torch.float64, device="cuda")
    result = torch.ones(5000, device="cuda")
    result[4999] = math.nan
    bound = measures.Bound(1e-3, 1e-30, 6.0, 0.0)
    [(columns, worst)] = measures.measure_on_device([measures.DeviceQuery(result, golden, 1e-3, 1e-3, bound, None)])
    assert columns is None
    assert worst == math.inf
