"""OpAutoCompare on a device whose copies are wrong: the copies are blamed, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ditorch
import op_tools
from op_tools.copies.operands import Fetcher, bytes_of, stage
from op_tools.copies.routes import Routes


@pytest.fixture
def faults(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if getattr(ditorch.backend, "name", "") != "soft":
        pytest.skip("only the software accelerator can be made to fail on purpose")
    from ditorch.soft import faults as module

    monkeypatch.setenv("OP_TOOLS_CONSOLE", "off")
    yield module
    module.clear()


def step(device: str, width: int = 16) -> torch.Tensor:
    """A training step whose operators are right."""
    layer = torch.nn.Linear(8, width).to(device)
    result = torch.relu(layer(torch.ones(4, 8, device=device)))
    result.mean().backward()
    return result.detach()


@pytest.mark.parametrize(
    "fault",
    [
        "clone: noise=0.1",
        "clone: element",
        "clone: element, dtype=bfloat16",
        "clone: nan, layout=noncontiguous",
        "clone: element, min_numel=50000",  # found on suspicion: what is tried at first is smaller
    ],
)
def test_innocents_are_not_blamed_for_wrong_copies(fault: str, device: str, faults: Any) -> None:
    faults.plant(fault)
    with op_tools.OpAutoCompare() as tool:
        step(device, 20_000 if "min_numel" in fault else 16)
    assert {blame.op for blame in tool.blames} == {"torch.Tensor.clone"}
    assert tool.summary()[0].startswith("THE DEVICE'S COPIES ARE WRONG: torch.Tensor.clone: its copies change bits")
    assert {row["verdict"] for row in tool.records()} == {"right"}


def test_copies_that_the_run_makes_are_blamed_by_name(device: str, faults: Any) -> None:
    faults.plant("clone: noise=0.1")
    with op_tools.OpAutoCompare() as tool:
        x = step(device)
        x.clone()
        x.t().contiguous()
    assert [blame.op for blame in tool.blames] == ["torch.Tensor.clone"] * 2 + ["torch.Tensor.contiguous"]
    assert tool.summary()[0].startswith("THE DEVICE'S COPIES ARE WRONG")


def test_without_copies_to_the_host_nothing_is_judged(device: str, faults: Any) -> None:
    faults.plant("copy_: element")
    with op_tools.OpAutoCompare() as tool:
        step(device)
    assert {blame.op for blame in tool.blames} == {"torch.Tensor.copy_", "torch.Tensor.cpu"}
    text = "\n".join(tool.summary())
    assert text.startswith("THE DEVICE'S COPIES ARE WRONG: torch.Tensor.copy_: its copies to the host change bits")
    assert "not compared: the device's copies to the host are broken" in text


def test_a_healthy_device_copies_as_ever(device: str, faults: Any) -> None:
    told: list[str] = []
    routes = Routes(lambda *words: told.extend(words))
    usual = routes.on_device
    x = torch.arange(9.0, device=device)
    faults.plant("arange.start_out: element")  # neither what is made on the device nor what is sent there is copying
    routes.check(x.device)
    assert routes.doubt([(stage((x,)), [bytes_of(x).cpu()])]) == ""
    assert not told
    assert routes.on_device is usual
    assert routes.to_host is None
    assert not routes.broken


def test_other_ways_to_the_host_wait_for_the_copies(device: str) -> None:
    """Copies on the device are made on the run's stream; whoever fetches them is on another one."""

    class Event:
        waited = 0

        def synchronize(self) -> None:
            self.waited += 1

    event, fetcher, x = Event(), Fetcher(), torch.arange(5.0, device=device)
    fetcher.to_host = torch.Tensor.cpu
    assert torch.equal(fetcher.borrow([x], event)[0].view(torch.float32), torch.arange(5.0))
    fetcher.put([x], event, torch.empty(64, dtype=torch.uint8), [(0, 20)])
    assert event.waited == 2
