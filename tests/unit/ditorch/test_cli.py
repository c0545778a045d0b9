"""The command line: its surface is frozen here, and each command does what it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ditorch.cli import make_parser

PROJECT = Path(__file__).resolve().parents[3]


def command(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    import os

    clean = {k: v for k, v in os.environ.items() if not k.startswith("DITORCH_")}
    return subprocess.run(
        [sys.executable, "-m", "ditorch", *arguments],
        cwd=folder or PROJECT,
        env={**clean, "PYTHONPATH": str(PROJECT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_command_line_surface() -> None:
    parser = make_parser()
    run = parser.parse_args(["run", "--device", "soft", "train.py", "--device", "cuda", "-m", "x"])
    assert (run.device, run.module, run.target, run.arguments) == (
        "soft",
        False,
        "train.py",
        ["--device", "cuda", "-m", "x"],
    )
    run = parser.parse_args(["run", "-m", "package.module", "-v"])
    assert (run.module, run.target, run.arguments) == (True, "package.module", ["-v"])
    assert parser.parse_args(["doctor", "--json"]).json is True
    scan = parser.parse_args(["scan", "src", "--device", "ascend", "--json"])
    assert (scan.path, scan.device, scan.json, scan.all) == ("src", "ascend", True, False)


def test_run_leaves_the_script_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("value = 41\n")
    (tmp_path / "script.py").write_text(
        "import os, subprocess, sys\n"
        "import helper, torch\n"
        "assert __name__ == '__main__' and __file__.endswith('script.py')\n"
        "assert torch.cuda.is_available() and torch.zeros(2, device='cuda').sum() == 0\n"
        "child = 'import torch; print(torch.cuda.is_available())'\n"
        "answer = subprocess.run([sys.executable, '-c', child], capture_output=True, text=True).stdout\n"
        "print(sys.argv[1:], helper.value, answer.strip())\n"
        "sys.exit(7)\n"
    )
    result = command("run", "--device", "cpu", str(tmp_path / "script.py"), "a", "--b", folder=tmp_path)
    assert result.returncode == 7, result.stderr
    assert result.stdout.strip() == "['a', '--b'] 41 True"


def test_run_does_not_load_torch_into_scripts_without_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nprint('torch' in sys.modules, 'ditorch' in sys.modules)\n")
    result = command("run", "--device", "cpu", str(tmp_path / "script.py"))
    assert result.stdout.strip() == "False False", result.stderr


def test_run_keeps_the_machines_own_sitecustomize(tmp_path: Path) -> None:
    import os

    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.machine_was_here = True\n")
    (tmp_path / "script.py").write_text("print(machine_was_here)\n")
    result = subprocess.run(
        [sys.executable, "-m", "ditorch", "run", "--device", "cpu", str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": f"{PROJECT}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout.strip() == "True", result.stderr


def test_run_of_nothing_is_a_clear_error() -> None:
    result = command("run", "nothing.py")
    assert result.returncode == 2
    assert "ditorch run: nothing.py is not a file" in result.stderr


def test_doctor_as_json() -> None:
    result = command("doctor", "--json", "--device", "cpu")
    found = json.loads(result.stdout)
    assert found["backend"]["name"] == "cpu"
    assert found["versions"]["torch"]
    assert found["devices"][0]["device"] == "cpu:0"
    assert found["collectives"]["nccl means"] == "gloo"
    assert found["patched"]["mapped"] > 100
    assert "torch.cuda.power_draw" in found["missing"]
    assert {c["name"] for c in found["candidates"]} >= {"ascend", "cuda", "soft"}


def test_doctor_shows_the_head_for_people() -> None:
    shown = command("doctor", "--device", "cpu").stdout
    assert len(shown.splitlines()) < 60
    assert re.search(r"cpu:0: .*, [\d.]+ [GMT]iB of [\d.]+ [GMT]iB free", shown)
    assert "torch.cuda.power_draw" not in shown
    assert "doctor --verbose lists" in shown


def test_scan_prints_one_line_per_use_and_fails_on_unsupported_calls(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import torch\ntorch.cuda.synchronize()\ntorch.cuda.power_draw()\n")
    result = command("scan", str(tmp_path), "--device", "ascend")
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path}/a.py:2: torch.cuda.synchronize: mapped")
    assert lines[1].startswith(f"{tmp_path}/a.py:3: torch.cuda.power_draw: unsupported")
    assert "1 mapped, 1 unsupported; 1 will fail on ascend. Not looked at:" in result.stderr
    as_json = json.loads(command("scan", str(tmp_path), "--device", "ascend", "--json").stdout)
    assert as_json["counts"] == {"mapped": 1, "unsupported": 1}
    assert as_json["fails"] is True


@pytest.mark.parametrize("arguments", [["scan", "nowhere"], ["scan", ".", "--device", "nothing"]])
def test_wrong_input_is_a_clear_error(arguments: list[str]) -> None:
    result = command(*arguments) if "--device" in arguments else command(*arguments, "--device", "cpu")
    assert result.returncode == 2
    assert result.stderr.startswith("ditorch")
    assert "Traceback" not in result.stderr
