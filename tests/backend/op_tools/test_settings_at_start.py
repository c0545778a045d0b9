"""Settings are those of the start: a change of the environment has no effect before the next one."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import op_tools
from op_tools import settings
from op_tools.native import compiling, kernels

ROOT = Path(op_tools.__file__).parent


def test_casts_are_those_of_the_start(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_DTYPE_CAST_DICT", "torch.float16->torch.float32")
    x = torch.randn(3, 3, device=device, dtype=torch.float16)
    cast = op_tools.OpDtypeCast()
    for expected in ("torch.float16->torch.float32", "torch.float16->torch.float64"):
        with cast:
            monkeypatch.setenv("OP_DTYPE_CAST_DICT", "torch.float16->torch.float64")
            monkeypatch.setenv("EXP_OP_DTYPE_CAST_DICT", "torch.float16->torch.float64")
            x.exp()
            F.relu(x)
        assert {r["config"] for r in cast.records()} == {expected}


def test_golden_runs_are_cast_as_at_the_start(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "full")
    x = torch.randn(3, 3, device=device)
    for expected in (False, True):
        with op_tools.OpAutoCompare():
            monkeypatch.setenv("EXP_OP_DTYPE_CAST_DICT", "torch.float32->torch.bfloat16")
            x.exp()
        assert ("torch.float32:torch.bfloat16" in capsys.readouterr().out.replace(" ", "")) == expected


def test_a_wrong_cast_of_one_operator_is_an_error_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINEAR_OP_DTYPE_CAST_DICT", "torch.float15->torch.float32")
    with pytest.raises(op_tools.SettingsError, match="LINEAR_OP_DTYPE_CAST_DICT"):
        op_tools.OpAutoCompare().start()


@pytest.mark.parametrize("tool", ["OpAutoCompare", "OpTimeMeasure"])
def test_results_go_where_the_start_said(
    tool: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OP_TOOLS_RESULTS_DIR", str(tmp_path / "first"))
    x = torch.randn(3, 3, device=device)
    with getattr(op_tools, tool)() as running:
        monkeypatch.setenv("OP_TOOLS_RESULTS_DIR", str(tmp_path / "second"))
        x.exp()
    assert running.csv_path.is_relative_to(tmp_path / "first")
    assert not (tmp_path / "second").exists()


def test_what_is_compiled_follows_the_start(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DITORCH_CACHE_DIR", str(tmp_path / "first"))
    monkeypatch.setenv("OP_TOOLS_NATIVE", "0")
    with op_tools.OpObserve():
        monkeypatch.setenv("DITORCH_CACHE_DIR", str(tmp_path / "second"))
        monkeypatch.setenv("OP_TOOLS_NATIVE", "1")
        assert compiling.compiled(compiling.SOURCES / "measure.cpp") is None
        assert kernels._cache_path("triton_measures", torch.float32, 0) is None
        assert settings.environment()["DITORCH_CACHE_DIR"] == str(tmp_path / "first")
    with op_tools.OpObserve():
        assert settings.environment()["DITORCH_CACHE_DIR"] == str(tmp_path / "second")
        assert settings.native()


def test_a_tool_that_starts_later_changes_nothing_for_others(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 3, device=device, dtype=torch.float16)
    with op_tools.OpDtypeCast() as cast:
        monkeypatch.setenv("OP_DTYPE_CAST_DICT", "torch.float16->torch.float64")
        with op_tools.OpObserve():
            x.exp()
    assert {r["action"] for r in cast.records()} == {"torch.float16 -> torch.float32", "torch.float32 -> torch.float16"}


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("OP_TOOLS_NATIVE", "maybe", "OP_TOOLS_NATIVE='maybe' is neither yes nor no"),
        ("LINEAR_AUTOCOMPARE_ERROR_TOLERANCE_FLOAT16", "1e-3", "LINEAR_AUTOCOMPARE_ERROR_TOLERANCE_FLOAT16"),
    ],
)
def test_a_wrong_value_is_an_error_at_start(
    variable: str, value: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(op_tools.SettingsError, match=error):
        op_tools.OpAutoCompare().start()


def test_a_misspelt_variable_is_reported_at_the_first_start(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "summary")
    monkeypatch.setenv("OP_AUTOCOMPARE_BUGDET", "2x")
    monkeypatch.setattr(settings.SETTINGS, "_reported", set())
    for _ in range(2):
        with op_tools.OpObserve():
            pass
    line = "op_tools: OP_AUTOCOMPARE_BUGDET is not a setting of op_tools; did you mean OP_AUTOCOMPARE_BUDGET?\n"
    assert capsys.readouterr().err.count(line) == 1


def test_looking_for_misspelt_variables_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        monkeypatch.setenv(f"SOME_OTHER_{number}_VARIABLE_OF_A_CLUSTER", "1")
    began = time.perf_counter()
    settings.SETTINGS.misspelt(os.environ)
    assert time.perf_counter() - began < 1


def test_nothing_else_reads_the_environment() -> None:
    """What is read elsewhere is no setting of ours: ranks and threads, and a feature's casts (see the seeds)."""
    allowed = {
        "settings.py",
        "view/settings_table.py",
        "replay/pool.py",  # OMP_NUM_THREADS
        "compare/judges/workers.py",  # LOCAL_WORLD_SIZE
        "tools/dtype_cast.py",
        "launch.py",  # options of the command line become settings
    }
    readers = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if re.search(r"\bos\.(environ|getenv)\b", path.read_text())
    }
    assert readers <= allowed
