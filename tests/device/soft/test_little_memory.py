"""Tools on a device with little free memory: they give back what they hold there, and the training goes on."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import op_tools


def _train(steps: int = 3) -> list[float]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.LayerNorm(256)] * 2
    model = torch.nn.Sequential(*layers).to("soft")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(512, 256).to("soft")
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("tool", ["OpCapture", "OpAutoCompare", "OpOverflowCheck", "OpTrace"])
def test_a_tool_leaves_the_memory_to_the_training(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    gc.collect()
    torch.soft.reset_peak_memory_stats()
    expected = _train()
    gc.collect()
    peak = torch.soft.max_memory_allocated()
    torch.soft.set_memory_limit(int(1.1 * peak))
    try:
        with getattr(op_tools, tool)():
            assert _train() == expected
    finally:
        torch.soft.set_memory_limit(None)


def test_a_copy_to_the_host_takes_no_device_memory() -> None:
    x, target = torch.ones(1000, device="soft"), torch.zeros(1 << 20)
    before = torch.soft.memory_allocated()
    torch.soft.reset_peak_memory_stats()
    target[:1000].copy_(x)
    assert torch.soft.max_memory_allocated() == before
    assert target.sum() == 1000


def test_a_thread_of_the_queue_does_not_wait_for_itself() -> None:
    from op_tools.copies.queue import Writer

    writer, freed = Writer(max_bytes=1 << 20), []
    writer.reserve(10)
    writer.submit(10, lambda: freed.append(writer.shrink()))
    writer.drain()
    assert freed == [False]
    assert writer.max_bytes == 1
    writer.close()
