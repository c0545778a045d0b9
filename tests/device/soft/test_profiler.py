"""torch.profiler sees soft: operators, user ranges, shapes, and device time."""

from __future__ import annotations

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(32, 32, device="soft")


def test_operators_and_ranges_are_recorded(x):
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded, record_function("my range"):
        (x @ x).relu_().sum().item()
    names = [event.key for event in recorded.key_averages()]
    assert {"my range", "aten::mm", "aten::relu_", "aten::sum", "aten::item"} <= set(names)
    (mm,) = [event for event in recorded.events() if event.name == "aten::mm"]
    assert mm.input_shapes[:2] == [[32, 32], [32, 32]]
    assert mm.cpu_time_total > 0
    # One event per operator: what the host's kernel does inside is not recorded a second time.
    assert names.count("aten::mm") == 1


def test_backward_is_recorded(x):
    x.requires_grad_()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        (x @ x).sum().backward()
    assert any("MmBackward0" in event.key for event in recorded.key_averages())


def test_the_device_activity_is_supported(x):
    assert ProfilerActivity.PrivateUse1 in torch.profiler.supported_activities()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as recorded:
        x @ x
    assert "aten::mm" in [event.key for event in recorded.key_averages()]


def test_device_time_of_the_autograd_profiler(x):
    from ditorch.soft import faults

    with (
        faults.plant("sin: slow=20ms"),
        torch.autograd.profiler.profile(use_device="soft") as recorded,
    ):
        x.sin()
        x.cos()
    times = {event.key: event.device_time for event in recorded.key_averages()}
    assert times["aten::sin"] >= 20_000  # microseconds
    assert times["aten::cos"] < times["aten::sin"]
    assert "SOFT" in recorded.key_averages().table()


def test_traces_are_written(x, tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as recorded, record_function("written"):
        x + x
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    names = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"written", "aten::add"} <= names


def test_schedule(x):
    steps = []
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=1),
        on_trace_ready=lambda p: steps.append([event.key for event in p.key_averages()]),
    ) as recorded:
        for _ in range(3):
            x.exp()
            recorded.step()
    assert len(steps) == 1
    assert "aten::exp" in steps[0]


def test_memory_is_attributed(x):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        y = x + 1
    assert y.numel() == 1024
    assert "aten::add" in recorded.key_averages().table()
