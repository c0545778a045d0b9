"""The op_tools command: a script runs under a tool as if it were run by Python."""

from __future__ import annotations

import os
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
