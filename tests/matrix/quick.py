"""What every promised pair of PyTorch and Python must do, in one process: the device layer, every tool, a replay.

Not collected by itself: `python -m tests.matrix` names it. On releases that the software accelerator is not for, the
tools watch the CPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ditorch
import op_tools
from ditorch.soft import build
from op_tools.files import captures
from op_tools.native import front
from op_tools.replay import pool
from op_tools.replay.outcome import Options

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
HAS_SOFT = build.OLDEST_TORCH <= RELEASE
DEVICE = "cuda" if HAS_SOFT else "cpu"
TOOLS = (
    *("OpObserve", "OpTimeMeasure", "OpCapture", "OpOverflowCheck", "OpAutoCompare", "OpTrace", "OpFallback"),
    "OpDtypeCast",
)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OP_TOOLS_RESULTS_DIR", str(tmp_path))
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "off")
    monkeypatch.setenv("OP_TOOLS_INCLUDE_CPU", "0" if HAS_SOFT else "1")


def _losses(device: str, steps: int = 3) -> list[float]:
    torch.manual_seed(0)
    net: Any = torch.nn.Sequential(
        torch.nn.Conv1d(4, 8, 3, padding=1),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 16),
        torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0),
        torch.nn.LayerNorm(16),
    ).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    x, found = torch.randn(2, 4, 16).to(device), []
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(net(x), torch.ones_like(net(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_the_device_is_the_one_that_was_asked_for() -> None:
    assert ditorch.backend.name == ("soft" if HAS_SOFT else "cpu") == os.environ["DITORCH_DEVICE"]


def test_a_training_on_the_device_is_that_of_the_cpu() -> None:
    assert _losses(DEVICE) == _losses("cpu")


@pytest.mark.skipif(not HAS_SOFT, reason="the software accelerator is for newer releases")
def test_cuda_code_runs_unchanged() -> None:
    x = torch.randn(3, 3, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        (x.cuda() @ x).sum().backward()
    torch.cuda.synchronize()
    assert x.grad is not None
    assert x.grad.device.type == "cuda"
    assert torch.load(_saved(x), weights_only=True)["x"].equal(x)


@pytest.mark.skipif(HAS_SOFT, reason="the software accelerator is for this release")
def test_the_software_accelerator_is_refused_in_one_line() -> None:
    with pytest.raises(build.BuildError, match=r"^the software accelerator needs torch 2\.\d+ or newer, this is .*$"):
        build.library()


def _saved(x: torch.Tensor) -> str:
    torch.save({"x": x}, "x.pt")
    return "x.pt"


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_watches_and_changes_nothing(tool: str, tmp_path: Path) -> None:
    alone = _losses(DEVICE)
    with getattr(op_tools, tool)():
        watched = _losses(DEVICE)
    if tool != "OpDtypeCast":  # it computes in another dtype, which is its purpose
        assert watched == alone
    assert any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_capture_is_replayed_in_a_process_of_its_own(tmp_path: Path) -> None:
    with op_tools.OpCapture():
        x = torch.randn(4, 4, device=DEVICE, requires_grad=True)
        torch.nn.functional.gelu(x @ x).sum().backward()
    folders = list(captures.find(tmp_path))
    assert folders
    outcomes = list(pool.replay_all(folders, Options(device=DEVICE, acc_check=True, time_limit=100.0), jobs=1))
    assert len(outcomes) == len(folders)
    assert not [outcome.reason for outcome in outcomes if not outcome.passed]


@pytest.mark.skipif(not HAS_SOFT, reason="only the software accelerator can be made to fail on purpose")
def test_a_wrong_operator_is_named() -> None:
    from ditorch.soft import faults

    with op_tools.OpAutoCompare() as compared, faults.plant("_softmax: noise=5e-2"):
        torch.nn.functional.softmax(torch.randn(4, 8, device=DEVICE) + 1, dim=-1)
    assert ["softmax" in finding.op for finding in compared.findings() if finding.kind == "difference"] == [True]


def test_the_part_in_machine_code_is_there() -> None:
    assert front.LIBRARY.wait() is not None, front.LIBRARY.failure
