"""Memory stays flat, however long a tool is on."""

from __future__ import annotations

import gc
import itertools
import resource
import sys
from typing import Any

import pytest
import torch

import op_tools
from op_tools.call import description
from op_tools.call.recent import Recent
from op_tools.compare import teller
from op_tools.judge import uncertainty
from op_tools.view import store
from op_tools.watch import sums
from op_tools.watch.intercept import INTERCEPTOR

TOOLS = ["OpObserve", "OpTimeMeasure", "OpCapture", "OpOverflowCheck", "OpFallback", "OpDtypeCast", "OpAutoCompare"]
LOOKING = "OpAutoCompare with a look on the device"


def resident() -> int:
    with open("/proc/self/statm") as handle:
        return int(handle.read().split()[1]) * resource.getpagesize()


def device_memory(device: str) -> int:
    return torch.cuda.memory_allocated() if torch.empty(0, device=device).device.type != "cpu" else 0


def grow(name: str, device: str, steps: int) -> tuple[int, int]:
    """Growth of host and device memory over the second half of a run."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(4, 8, device=device)
    more: dict[str, dict[str, Any]] = {"OpCapture": {"max_calls": 2 * steps}, LOOKING: {"look": "device"}}
    tool = getattr(op_tools, name.split()[0])(**more.get(name, {}))
    marks = []
    with tool:
        for step in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step in (steps // 2, steps - 1):
                gc.collect()
                marks.append((resident(), device_memory(device)))
            if name == "OpCapture" and step % 200 == 199:  # the files themselves are not under test
                tool.writer.drain()
                _remove_files(tool)
    (host_a, device_a), (host_b, device_b) = marks
    return host_b - host_a, device_b - device_a


def _remove_files(tool: Any) -> None:
    import shutil

    shutil.rmtree(tool.folder, ignore_errors=True)


@pytest.mark.parametrize("name", [*TOOLS, pytest.param(LOOKING, marks=pytest.mark.slow)])
def test_memory_is_flat(device: str, name: str) -> None:
    host, on_device = grow(name, device, 300)
    assert host < 24 << 20
    assert on_device <= 8 << 20  # after so few steps OpOverflowCheck may have three batches of 2 MiB more under way


@pytest.mark.parametrize("name", [name for name in [*TOOLS, "OpTrace"] if name != "OpOverflowCheck"])  # it has batches
def test_an_optimizer_with_new_numbers_in_every_step_leaves_nothing_behind(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(description, "_AT_ONCE", 2_000)  # what is bounded is full soon
    monkeypatch.setattr(sums, "_FEW_CALLS", 50)
    monkeypatch.setattr(store, "_MAX_SITES", 2_000)
    monkeypatch.setattr(teller, "_MAX_EVENTS", 200)
    monkeypatch.setattr(teller, "_MAX_ADDRESSES", 100)
    monkeypatch.setattr(INTERCEPTOR, "descriptions", description.Descriptions())
    monkeypatch.setattr(uncertainty, "_structures", Recent(200))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).to(device)
    others = [torch.ones(2, device=device, requires_grad=True) for _ in range(50)]
    for each in others:
        each.grad = torch.ones_like(each)
    optimizer = torch.optim.AdamW([*model.parameters(), *others], foreach=True)  # two calls have new numbers
    x, marks, steps = torch.randn(4, 4, device=device), [], 20
    with getattr(op_tools, name)() as tool:
        for step in range(4 * steps):
            model(x).square().mean().backward()
            optimizer.step()
            model.zero_grad()
            if step % steps == steps - 1:
                if name == "OpAutoCompare":
                    tool._judging.wait()
                elif name == "OpCapture":
                    tool.writer.drain()
                store.current().flush()  # rows that wait are not kept
                gc.collect()
                marks.append(sys.getallocatedblocks())
    grown = min([later - earlier for earlier, later in itertools.pairwise(marks)])
    assert grown < 60 * steps, f"{grown / steps:.0f} objects a step"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*TOOLS, LOOKING])
def test_memory_is_flat_over_ten_thousand_steps(device: str, name: str) -> None:
    host, on_device = grow(name, device, 10_000)
    assert host < 48 << 20
    assert on_device <= 4 << 20
