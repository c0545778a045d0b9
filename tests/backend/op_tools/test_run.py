"""`op_tools run` in one process: modules, exit codes for CI, and the options that all tools share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ditorch
import op_tools
from op_tools import launch

SCRIPT = """
import sys
import torch
x = torch.ones(4, 4, device="cuda")
for _ in range(3):
    y = torch.mm(x, x)
print("given", sys.argv[1:], __name__)
if "fail" in sys.argv:
    sys.exit(5)
"""


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "__init__.py").write_text("")
    (tmp_path / "job" / "train.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*words: str) -> tuple[int, str]:
        code = launch.main(words)
        sys.modules.pop("job.train", None)
        return code, "".join(capsys.readouterr())

    return call


def test_a_module_is_run_as_python_does(run: Callable[..., tuple[int, str]], device: str) -> None:
    code, output = run("OpObserve", "--console", "summary", "--out", "elsewhere", "-m", "job.train", "--lr", "1")
    assert code == 0
    assert "given ['--lr', '1'] __main__" in output
    assert Path("elsewhere/op_tools_records").is_dir()
    assert "nothing found" not in output, "the tool looks for nothing"
    assert run("OpObserve", "-m", "job.train", "fail")[0] == 5


def test_calls_are_bounded(run: Callable[..., tuple[int, str]], device: str) -> None:
    output = run("OpObserve", "--console", "summary", "--max-calls", "2", "--ops", "torch.mm", "job/train.py")[1]
    assert "2 calls of 1 operator" in output


@pytest.mark.skipif(ditorch.backend.name != "soft", reason="faults are planted on soft")
def test_exit_code_for_ci(run: Callable[..., tuple[int, str]], device: str) -> None:
    from ditorch.soft import faults

    words = ("OpAutoCompare", "--ops", "torch.mm", "--max-calls", "1", "job/train.py")
    assert run("--fail-on", "wrong", *words)[0] == 0
    with faults.plant("mm: element=0.5"):
        assert run(*words)[0] == 0, "only on request"
        assert run("--fail-on", "wrong", *words)[0] == 1
        assert run("--fail-on", "any", *words)[0] == 1
        assert run("--fail-on", "overflow", *words)[0] == 0


def test_ranks_run_under_the_tool(run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.run as launcher

    started: list[list[str]] = []
    monkeypatch.setattr(launcher, "main", started.append)
    run("OpObserve", "--steps", "0:2", "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", "--lr", "1")
    run("OpObserve", "-m", "torch.distributed.run", "--standalone", "-m", "job.train", "x")
    assert started == [
        ["--nproc-per-node", "2", "-m", "op_tools.launch", "OpObserve", "--steps", "0:2", "train.py", "--lr", "1"],
        ["--standalone", "-m", "op_tools.launch", "OpObserve", "-m", "job.train", "x"],
    ]


def test_captures_end_at_their_bound(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_CAPTURE_MAX_GB", "0.0001")
    x = torch.ones(100, 100, device=device)
    with op_tools.OpCapture(ops=["torch.mul"]) as capture:
        for _ in range(10):
            torch.mul(x, x)
            capture.writer.drain()
    told = [finding.message for finding in capture.findings() if finding.kind == "dropped"]
    assert len(told) == 1
    assert "OP_CAPTURE_MAX_GB" in told[0]
    assert 1e5 <= capture.bytes_written < 3e5
