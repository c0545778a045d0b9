"""Trainings under each tool, ended at random moments: is every file readable, and how much is lost?"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import sqlite3
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import op_tools
from op_tools import lifecycle
from op_tools.files import captures
from op_tools.files.archive import ArchiveError

TOOLS = ("OpObserve", "OpTimeMeasure", "OpCapture", "OpOverflowCheck", "OpAutoCompare", "OpDtypeCast")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MAX_LOST = 1.0  # seconds of records


def _train(tool: str, folder: Path, seconds: float, disk: int) -> None:
    """In a child: train under a tool until somebody ends it; each step is noted in a file, with its time."""
    os.environ.update(OP_TOOLS_RESULTS_DIR=str(folder), OP_TOOLS_CONSOLE="off", OP_TOOLS_INCLUDE_CPU="1")
    if disk:  # as a quota, or a full disk: no file grows beyond it
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (disk, disk))
    steps = os.open(folder.with_suffix(".steps"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    end = time.monotonic() + seconds
    with getattr(op_tools, tool)():
        number = 0
        while time.monotonic() < end:
            net(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if not disk:
                os.write(steps, f"{number} {time.monotonic()}\n".encode())
            number += 1
            time.sleep(0.01)


def ended(tool: str, number: int, folder: Path, choose: random.Random, disk: int = 0) -> Counter[str]:
    """One run that a signal ends at a random moment; what of it is broken or lost."""
    folder.mkdir(parents=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            _train(tool, folder, 20.0 if number else 1.0, disk)
            code = 0
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            lifecycle._exit()  # what a process of its own does at its end
            os._exit(code)
    killed = 0.0
    if number:
        notes, deadline = folder.with_suffix(".steps"), time.monotonic() + 120
        while time.monotonic() < deadline and not (notes.exists() and notes.stat().st_size):
            time.sleep(0.02)  # its first step
        time.sleep(choose.uniform(0.0, 2.5))
        killed = time.monotonic()
        os.kill(child, number)
    os.waitpid(child, 0)
    return looked_at(folder, killed)


def looked_at(folder: Path, killed: float) -> Counter[str]:
    """Count files, those that cannot be read, those that are partial, and runs that lost more than a second."""
    found: Counter[str] = Counter(runs=1)
    for path in folder.rglob("*"):
        if path.is_dir():
            continue
        found["files"] += 1
        found["partial"] += ".partial" in path.name
        if path.suffix == ".sqlite":
            found["unreadable"] += not _is_sound(path)
    for capture in captures.find(folder):
        for part in captures.PARTS:
            if captures.has_part(capture / f"{part}.pth"):
                found["captures"] += 1
                try:
                    captures.read(capture / f"{part}.pth")
                except ArchiveError:
                    found["unreadable"] += 1
    found["lost too much"] += killed > 0 and _lost(folder, killed) > MAX_LOST
    return found


def _is_sound(path: Path) -> bool:
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            return bool(connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok")
    except sqlite3.Error:
        return False


def _lost(folder: Path, killed: float) -> float:
    """Seconds before the kill whose steps are not in the records; 0 for tools that do not record each call."""
    notes = folder.with_suffix(".steps")
    steps = [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []
    if not steps:
        return 0.0
    last = -1
    for path in folder.rglob("records_*.sqlite"):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            for table in ("op_time_measure", "op_observe"):
                with contextlib.suppress(sqlite3.Error):
                    row: Any = connection.execute(f"SELECT max(step) FROM {table}").fetchone()
                    last = max(last, -1 if row[0] is None else int(row[0]))
    tables = {path.name for path in folder.rglob("*")}
    if last < 0 and not any("op_time" in name for name in tables):
        return 0.0
    missing = [float(at) for number, at in steps if int(number) > last]
    return killed - missing[0] if missing else 0.0
