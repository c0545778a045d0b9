"""Runs in which the world around a tool changes: folders that go, names that are no text, tools that cannot start."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

import op_tools
from op_tools.settings import SettingsError
from op_tools.watch.intercept import INTERCEPTOR

TOOLS = ("OpObserve", "OpTimeMeasure", "OpCapture", "OpOverflowCheck", "OpAutoCompare", "OpTrace", "OpFallback")


def _work(device: str) -> None:
    x = torch.ones(2, 2, device=device, requires_grad=True)
    (x @ x).sum().backward()


@pytest.mark.parametrize("tool", TOOLS)
def test_a_script_that_changes_its_folder_leaves_results_in_one_place(device: str, tool: str, tmp_path: Path) -> None:
    with getattr(op_tools, tool)() as running:
        _work(device)
        (tmp_path / "elsewhere").mkdir()
        os.chdir(tmp_path / "elsewhere")
        _work(device)
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "op_tools_results").is_dir()
    assert not [finding for finding in running.findings() if finding.kind == "tool-failure"]


@pytest.mark.parametrize("tool", TOOLS)
def test_results_that_are_removed_during_the_run_do_not_end_it(
    device: str, tool: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "summary")
    with getattr(op_tools, tool)():
        _work(device)
        shutil.rmtree("op_tools_results")
        _work(device)
    assert "was removed during the run" in capsys.readouterr().out
    with op_tools.OpObserve() as after:  # a new file
        _work(device)
    assert after.records()
    assert list(Path("op_tools_results").rglob("*.sqlite"))


def test_names_that_are_no_text_are_recorded(device: str) -> None:
    space = {"x": torch.ones(2, device=device)}
    with op_tools.OpObserve() as tool:
        exec(compile("x + 1", "b\udce4r\n.py", "exec"), space)
    assert tool._store is not None
    assert tool._store.failure is None
    assert "b\\udce4r" in tool.records()[-1]["location"]


def test_a_tool_whose_start_is_interrupted_watches_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = op_tools.OpObserve()
    monkeypatch.setattr(tool, "_compiled_runs", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tool.start()
    assert not tool.active
    assert not INTERCEPTOR.tools
    monkeypatch.undo()
    with tool:
        torch.ones(2, device=device)
    assert tool.calls


def test_a_tool_that_was_started_in_another_thread_says_whom_it_watches(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "summary")
    tool = op_tools.OpObserve()
    thread = threading.Thread(target=tool.start, name="helper")
    thread.start()
    thread.join()
    _work(device)
    tool.stop()
    assert "started in thread 'helper'" in capsys.readouterr().out


def test_a_folder_that_is_gone_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SettingsError, match=r"set OP_TOOLS_RESULTS_DIR"):
        op_tools.OpObserve().start()
    os.chdir(tmp_path)


def test_times_have_their_sums_in_the_records(device: str) -> None:
    with op_tools.OpTimeMeasure() as timing:
        for _ in range(3):
            _work(device)
    assert timing._store is not None
    kept = timing._store.tuples("SELECT op, phase, calls, total_ms FROM op_time_totals")
    assert kept == [(row["name"], row["phase"], row["calls"], row["total_ms"]) for row in timing.by_op()]
    assert kept
