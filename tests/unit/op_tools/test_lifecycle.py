"""The end of a process: callbacks run in their order, and what was recorded is written."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

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


_TIMED = """
import os, signal, time, torch, op_tools
tool = op_tools.OpTimeMeasure()
def work():
    for _ in range(20):
        torch.ones(2).add(1)
"""


def _rows(folder: Path) -> int:
    (file,) = folder.rglob("records_*.sqlite")
    with contextlib.closing(sqlite3.connect(file)) as connection:
        return int(connection.execute("SELECT count(*) FROM op_time_measure").fetchone()[0])


@pytest.mark.parametrize(
    "body",
    [
        "tool.start(); work(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
        "with tool:\n    work()\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(60)",
        "tool.start(); work(); Dying()\nfor _ in range(600): time.sleep(0.1)",
        "tool.start(); work(); tool.finish = Late(tool.finish); tool.stop(); time.sleep(60)",
    ],
    ids=["started", "with", "in a destructor", "while it stops"],
)
def test_sigterm_ends_a_run_with_everything_written(tmp_path: Path, body: str) -> None:
    dying = "class Dying:\n    def __del__(self): signal.raise_signal(signal.SIGTERM)"  # Python ignores errors there
    dying += "\nclass Late:\n    def __init__(self, after): self.after = after\n"
    dying += "    def __call__(self): signal.raise_signal(signal.SIGTERM); time.sleep(0.7); self.after()"
    script = f"{_TIMED}\n{dying}\ntry:\n    {body.replace(chr(10), chr(10) + '    ')}\nfinally:\n    print('finally')"
    done = _run(script, tmp_path, OP_TOOLS_INCLUDE_CPU="1", OP_TOOLS_CONSOLE="summary")
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert "finally" in done.stdout  # as after Ctrl-C
    assert "Traceback" not in done.stderr
    assert _rows(tmp_path) == 40
    (table,) = tmp_path.rglob("op_elasped_info*.csv")
    assert len(table.read_text().splitlines()) == 41
    assert "OpTimeMeasure summary" in done.stdout


def test_sigterm_is_left_to_a_handler_of_the_program_and_to_its_children(tmp_path: Path) -> None:
    script = """
import os, signal, sys, torch, op_tools
pid = os.fork() if op_tools.OpObserve().start() else 0
if pid == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
print("child", os.waitpid(pid, 0)[1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
op_tools.OpTimeMeasure().start()
os.kill(os.getpid(), signal.SIGTERM)
"""
    done = _run(script, tmp_path, OP_TOOLS_CONSOLE="off")
    assert (done.returncode, done.stdout.split()) == (7, ["child", "15"]), done.stderr


def test_a_killed_run_loses_less_than_a_second_of_times(tmp_path: Path) -> None:
    script = f"{_TIMED}\ntool.start(); work(); time.sleep(1.0); os.kill(os.getpid(), signal.SIGKILL)"
    done = _run(script, tmp_path, OP_TOOLS_INCLUDE_CPU="1")
    assert done.returncode == -signal.SIGKILL
    assert _rows(tmp_path) == 40
    assert "op_elasped" not in done.stdout


@pytest.mark.parametrize("handled", [False, True])
def test_a_sigterm_that_a_destructor_drops_ends_the_process_all_the_same(tmp_path: Path, handled: bool) -> None:
    """Slurm sends it once. An orderly end, which may take its time, is not disturbed."""
    script = f"""
import importlib.util, os, signal, time
found = importlib.util.spec_from_file_location("lifecycle", {str(ROOT / "op_tools/lifecycle.py")!r})  # without PyTorch
lifecycle = importlib.util.module_from_spec(found)
found.loader.exec_module(lifecycle)
lifecycle.finish_on_sigterm()
class Closing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
try:
    if {handled}:
        os.kill(os.getpid(), signal.SIGTERM)
    Closing()
    for _ in range(1000):
        time.sleep(0.01)
    print("not ended")
finally:
    for _ in range(150):
        time.sleep(0.01)
    print("in order")
"""
    done = _run(script, tmp_path)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "in order\n"), done.stderr
