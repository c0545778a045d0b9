"""The end of a process: callbacks run in their order, and what was recorded is written."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def _run(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OP_TOOLS_RESULTS_DIR": str(folder), **variables}
    return subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=200, check=False
    )


def test_callbacks_at_exit_have_an_order_and_do_not_depend_on_each_other(tmp_path: Path) -> None:
    script = """
from op_tools import lifecycle
def fail(): print("fails"); raise ValueError("told")
lifecycle.at_exit(lifecycle.Exit.STORE, lambda: print("store"))
lifecycle.at_exit(lifecycle.Exit.TOOLS, lambda: print("tools"))
lifecycle.at_exit(lifecycle.Exit.WORKERS, fail)
lifecycle.at_exit(lifecycle.Exit.WRITERS, lambda: print("writers"))
"""
    done = _run(script, tmp_path)
    assert done.stdout.split() == ["tools", "fails", "writers", "store"]
    assert "ValueError: told" in done.stderr


def test_one_registration_of_each_kind() -> None:
    sources = {path: path.read_text() for path in (ROOT / "op_tools").rglob("*.py")}
    for call in ("import atexit", "register_at_fork(", "signal.signal("):
        assert [path.name for path, text in sources.items() if call in text] == ["lifecycle.py"], call


def test_exit_without_stop_writes_what_was_recorded(tmp_path: Path) -> None:
    script = """
import torch, op_tools
op_tools.OpObserve().start()
torch.ones(2).add(1)
"""
    done = _run(script, tmp_path, OP_TOOLS_INCLUDE_CPU="1", OP_TOOLS_CONSOLE="off")
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.rglob("records_*.sqlite")
    with sqlite3.connect(file) as connection:
        ops = [row[0] for row in connection.execute("SELECT s.op FROM op_observe r JOIN sites s ON s.site = r.site")]
    assert ops == ["torch.ones", "torch.Tensor.add"]


def test_a_forked_child_is_silent_also_when_it_exits_by_itself(tmp_path: Path) -> None:
    script = """
import os, sys, torch, op_tools
tool = op_tools.OpObserve()
tool.start()
torch.ones(2).add(1)
sys.stdout.flush()
child = os.fork()
if child == 0:
    os.dup2(os.open(sys.argv[1] if len(sys.argv) > 1 else "child.txt", os.O_CREAT | os.O_WRONLY), 1)
    torch.ones(2).mul(2)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert open("child.txt").read() == "", open("child.txt").read()
tool.stop()
assert [row["op"] for row in tool.records()] == ["torch.ones", "torch.Tensor.add"], tool.records()
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OP_TOOLS_INCLUDE_CPU": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
