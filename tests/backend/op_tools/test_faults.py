"""Whatever goes wrong in a tool or around it, the training is unchanged and what was recorded is readable."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import op_tools
from op_tools.files import archive, captures
from op_tools.tools.base import Tool
from op_tools.watch.intercept import Call

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ["OpObserve", "OpTimeMeasure", "OpCapture", "OpOverflowCheck", "OpAutoCompare", "OpFallback", "OpDtypeCast"]


def small_step(device: str) -> list[float]:
    torch.manual_seed(0)
    x = torch.randn(4, 3, device=device, requires_grad=True)
    loss = torch.nn.functional.linear(x, x).exp().mean()
    loss.backward()
    return [loss.item(), *x.grad.flatten().tolist()]


class Broken(Tool):
    name = "Broken"
    prefix = "OP_BROKEN"
    wants_backward = True
    wants_backward_start = True
    columns: ClassVar[dict[str, str]] = {"call_id": "INTEGER"}

    def before(self, call: Call) -> None:
        raise ValueError("before")

    def after(self, call: Call) -> None:
        raise KeyError("after")

    def before_node(self, call: Call, node: int) -> None:
        raise TypeError("before_node")

    def after_node(self, call: Call, node: int) -> None:
        raise LookupError("after_node")

    def after_backward(self, call: Call, grad_outputs: Any, grad_inputs: Any) -> None:
        raise OSError("after_backward")


def test_a_tool_that_raises_changes_nothing_and_says_so_once_per_operator(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = small_step(device)
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "summary")
    with Broken() as tool:
        for _ in range(3):
            assert small_step(device) == bare
    kinds = [(f.op, f.message.split(":")[1].strip()) for f in tool.findings()]
    assert len(kinds) == len(set(kinds))
    assert {kind for _, kind in kinds} >= {"ValueError", "KeyError", "TypeError"}
    assert capsys.readouterr().out.count("ValueError: before") <= 2 * len({op for op, _ in kinds})


def test_unpicklable_arguments_are_named_and_the_rest_is_captured(device: str) -> None:
    class Odd:
        def __reduce__(self) -> Any:
            raise TypeError("no")

        def __str__(self) -> str:
            raise ValueError("no")

    def operator(x: torch.Tensor, odd: Any) -> torch.Tensor:
        return x * 2

    globals()["odd_operator"] = operator
    operator.__module__, operator.__qualname__ = __name__, "odd_operator"
    x = torch.randn(3, device=device)
    with op_tools.apply_feature(f"{__name__}.odd_operator", "op_capture") as handle:
        result = globals()["odd_operator"](x, Odd())
        paths = [Path(row["path"]) for row in handle.tool.records()]
    assert torch.equal(result, x * 2)
    payload = captures.read(next(p for p in paths if p.name == "input.pth"))
    assert torch.equal(payload["args"][0], x.cpu())
    assert archive.unknown_in(payload["args"]) == [f"{__name__}.{Odd.__qualname__}"]


def test_a_full_disk_ends_the_capture_not_the_training(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = small_step(device)

    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with op_tools.OpCapture() as capture:
        assert small_step(device) == bare
        capture.writer.drain()
        written = capture.files_written
        monkeypatch.setattr(archive, "write_archive", no_space)
        for _ in range(5):
            assert small_step(device) == bare
    failures = [f for f in capture.findings() if f.kind == "tool-failure"]
    assert failures
    assert all("No space left on device" in f.message for f in failures)
    assert len(failures) == len({f.op for f in failures}), "one message per operator"
    assert any("captures were dropped" in fact for fact in capture.summary())
    assert capture.files_written == written > 0
    for row in capture.records():
        captures.read(Path(row["path"]))


def test_records_that_cannot_be_written_are_dropped_and_said(device: str) -> None:
    bare = small_step(device)
    with op_tools.OpObserve() as seen:
        small_step(device)
        seen.records()
        seen._store._connection.execute("PRAGMA query_only=ON")
        try:
            for _ in range(10):
                assert small_step(device) == bare
            seen._store.flush()
            assert seen._store.failure is not None
            assert not any(rows for _, rows in seen._store._tables.values())
        finally:
            seen._store._connection.execute("PRAGMA query_only=OFF")
            seen._store.failure = None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.setenv("OP_TOOLS_RESULTS_DIR", str(tmp_path / "results"))
    with pytest.raises(op_tools.SettingsError, match="OP_TOOLS_RESULTS_DIR"):
        op_tools.OpObserve().start()


def test_a_folder_that_is_a_file_is_named_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results").write_text("in the way")
    monkeypatch.setenv("OP_TOOLS_RESULTS_DIR", str(tmp_path / "results"))
    for name in TOOLS:
        with pytest.raises(op_tools.SettingsError, match="OP_TOOLS_RESULTS_DIR"):
            getattr(op_tools, name)().start()


def test_results_folder_removed_in_the_middle(device: str, tmp_path: Path) -> None:
    import shutil

    bare = small_step(device)
    with op_tools.OpCapture() as capture:
        small_step(device)
        capture.writer.drain()
        shutil.rmtree(capture.folder)
        assert small_step(device) == bare
    assert small_step(device) == bare


def script(body: str, folder: Path) -> list[str]:
    path = folder / "job.py"
    path.write_text(
        textwrap.dedent(
            """
            import os, sys, time
            import torch, ditorch, op_tools
            def step():
                x = torch.randn(8, 8, device="cuda", requires_grad=True)
                torch.nn.functional.linear(x, x).relu().sum().backward()
            """
        )
        + textwrap.dedent(body)
    )
    return [sys.executable, str(path)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OP_TOOLS_CONSOLE": "summary", "OMP_NUM_THREADS": "2"}


def wait_for(path: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, "the job did not come so far"
        time.sleep(0.1)


def test_kill_minus_9_leaves_readable_records_and_captures(tmp_path: Path) -> None:
    job = subprocess.Popen(
        script(
            """
            with op_tools.OpCapture(), op_tools.OpObserve():
                n = 0
                while True:
                    step()
                    n += 1
                    if n == 20:
                        time.sleep(1.5)
                        open("ready", "w").close()
            """,
            tmp_path,
        ),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for(tmp_path / "ready")
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    (records,) = (tmp_path / "op_tools_results/op_tools_records").glob("*.sqlite")
    with sqlite3.connect(records) as connection:
        (count,) = connection.execute("SELECT count(*) FROM op_observe").fetchone()
    assert count >= 20
    loaded = 0
    for path in (tmp_path / "op_tools_results/op_capture_results").rglob("[!.]*.pth"):
        captures.read(path)
        loaded += 1
    assert loaded >= 20


def test_ctrl_c_ends_cleanly(tmp_path: Path) -> None:
    job = subprocess.Popen(
        script(
            """
            try:
                with op_tools.OpCapture(), op_tools.OpTimeMeasure():
                    n = 0
                    while True:
                        step()
                        n += 1
                        if n == 5:
                            open("ready", "w").close()
            except KeyboardInterrupt:
                print("interrupted")
            """,
            tmp_path,
        ),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(tmp_path / "ready")
        job.send_signal(signal.SIGINT)
        out, err = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == 0, err
    assert "interrupted" in out
    assert "OpCapture summary" in out
    assert "Traceback" not in err
    for path in (tmp_path / "op_tools_results/op_capture_results").rglob("[!.]*.pth"):
        captures.read(path)


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index)) * torch.full((2,), float(index))


def test_forked_workers_are_silent(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_INCLUDE_CPU", "1")
    with op_tools.OpObserve(ops=["torch.Tensor.mul"]) as seen, op_tools.OpCapture(ops=["torch.full"]) as capture:
        loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context="fork")
        batches = [batch.tolist() for batch in loader]
        torch.full((2,), 1.0) * 2
    assert [b[0][0] for b in batches] == [0.0, 4.0, 16.0, 36.0]
    assert [row["op"] for row in seen.records()] == ["torch.Tensor.mul"], "only the parent is recorded"
    assert capture.files_written == 2
