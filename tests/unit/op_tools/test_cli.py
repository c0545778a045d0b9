"""The op_tools command: a script runs under a tool as if it were run by Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from op_tools import cli

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import sys
import helper_beside_it
if __name__ == "__main__":
    print("given", sys.argv[1:])
    sys.exit(7)
"""


@pytest.mark.parametrize("command", [["-m", "op_tools.cli", "run"], ["-m", "op_tools.launch"]])
def test_what_follows_the_script_is_the_scripts(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    (tmp_path / "helper_beside_it.py").write_text("")
    words = ["OpObserve", "--no-ditorch", str(tmp_path / "job.py"), "--acc_check", "false", "replay", "--help"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OP_TOOLS_CONSOLE": "off", "OP_TOOLS_RESULTS_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, *command, *words], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 7, done.stderr
    assert done.stdout == "given ['--acc_check', 'false', 'replay', '--help']\n"


def test_run_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--help"])
    assert ended.value.code == 0
    assert "usage: op_tools run" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("run", "replay", "records", "losscmp"))
    assert cli.main(["run", "OpNothing", "job.py"]) == 2
    assert "there is no tool 'OpNothing'" in capsys.readouterr().err


def test_settings_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OP_CAPTURE_LIST", "torch.[a-z]+")
    monkeypatch.setenv("LINEAR_OP_DTYPE_CAST_DICT", "torch.half->torch.float")
    monkeypatch.setenv("OP_CAPTURE_LSIT", "x")
    assert cli.main(["settings"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"OP_CAPTURE_LIST +torch\.\[a-z\]\+ +\(none\) +environment +only these operators", out)
    assert re.search(r"OP_CAPTURE_WRITERS +2 +2 +default +threads that write", out)
    assert re.search(r"LINEAR_OP_DTYPE_CAST_DICT +torch.half->torch.float .* environment", out)
    assert re.search(r"DITORCH_DEVICE +\(the only accelerator\)", out)
    assert "OP_CAPTURE_LSIT is not a setting of op_tools; did you mean OP_CAPTURE_LIST?" in out
    assert "DITORCH_CONFORMANCE" not in out
    assert cli.main(["settings", "--json", "--all"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {row["name"]: row for row in found["settings"]}
    assert by_name["OP_CAPTURE_LIST"]["source"] == "environment"
    assert by_name["OP_CAPTURE_WRITERS"]["value"] == by_name["OP_CAPTURE_WRITERS"]["default"] == "2"
    assert by_name["DITORCH_CONFORMANCE_DIARY"]["internal"]
    assert "<OP>_OP_DTYPE_CAST_DICT" not in by_name
    assert len(found["misspelt"]) == 1


def test_listing_settings_does_not_activate_ditorch() -> None:
    code = "import sys, op_tools.cli; op_tools.cli.main(['settings']); assert 'ditorch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "DITORCH_DEVICE" in done.stdout
