"""Runs on disk for the tests of the page: records as tools leave them, without a tool."""

from __future__ import annotations

import json
import os
import time
from array import array
from pathlib import Path
from typing import Any

import torch

from op_tools.compare import wrong_elements
from op_tools.tools.auto_compare import OpAutoCompare
from op_tools.tools.base import _FINDING_COLUMNS
from op_tools.tools.overflow_check import _PLACES, OpOverflowCheck
from op_tools.tools.time_measure import OpTimeMeasure
from op_tools.view import runs
from op_tools.view.store import Store

OP = "torch.nn.functional.linear"
LINE = "/home/me/model.py:27 forward: return self.down(x)"


class Written:
    """A records file that rows can be added to (`Written(folder).compared(1)`)."""

    def __init__(
        self, folder: Path, rank: int | None = None, world: int = 1, pid: int = 1, began: str = "10-00-00"
    ) -> None:
        label = f"{pid}" if rank is None else f"{pid}_rank{rank}"
        path = folder / "op_tools_records" / f"records_pid{label}_2026-11-16-{began}_000001.sqlite"
        self.path, self.store = path, Store(path)
        self.texts: dict[str, str] = {}
        facts = {
            "command": "train.py --steps 3",
            "device": "soft",
            "versions": {"torch": "2.13"},
            "settings": {"A": "1"},
        }
        row = (1, "OpAutoCompare", rank or 0, world, pid, time.time(), json.dumps(facts))
        self.store.table("runs", runs.RUNS).append(row)

    def compared(self, call: int, verdict: str = "right", step: int = 0, op: str = OP, module: str = "block.0",
                 line: str = LINE, excess: float = 0.5, reason: str = "") -> Written:  # fmt: skip
        """One compared output."""
        site = self.site(op, line)
        names = list(OpAutoCompare.columns)
        values: dict[str, Any] = dict.fromkeys(names, 0.0) | {
            "call_id": call, "site": site, "phase": "forward", "name": f"{op} output", "verdict": verdict,
            "module": module, "step": step, "excess": excess, "reason": reason, "error_info": "", "cosine": 1.0,
            "max_abs_diff": 1e-6 * excess, "max_ulp": 3 * excess,
        }  # fmt: skip
        table = self.store.table("op_autocompare", {"run": "INTEGER", **OpAutoCompare.columns})
        table.append((1, *[values[name] for name in names]))
        return self

    def site(self, op: str = OP, line: str = LINE) -> int:
        """The number of a site."""
        described = {"inputs": [["inputs[0]", {"dtype": "bfloat16"}]]}
        return self.store.site((op, line), op, line, lambda: json.dumps(described))

    def wrong(self, call: int, op: str = OP, module: str = "block.0", line: str = LINE, reason: str = "far off",
              step: int = 0, folder: str = "/tmp/saved one/28") -> Written:  # fmt: skip
        """A wrong call with its picture."""
        device, golden = torch.ones(4, 6), torch.ones(4, 6, dtype=torch.float64)
        device[3] = 2.0
        found = wrong_elements.picture(device, golden, 1e-3)
        assert found is not None
        source = json.dumps(
            {"file": "/home/me/model.py", "line": 27, "lines": [[26, "def f():"], [27, "    <b>x</b>"]]}
        )
        row = (1, call, call, op, "forward", f"{op} output", reason, 1000.0, line, module, step, folder, source)
        self.store.table("wrong", wrong_elements.COLUMNS).append((*row, found.as_json()))
        self.store.table("consequences", wrong_elements.CONSEQUENCES).append((1, call, 0, 7))
        return self

    def timed(
        self, call: int, phase: str = "forward", ms: float = 1.0, step: int = 0, op: str = OP, line: str = LINE
    ) -> Written:
        """One measured call."""
        table = self.store.table("op_time_measure", {"run": "INTEGER", **OpTimeMeasure.columns})
        table.append((1, call, self.site(op, line), phase, ms, call * 10.0, 7, step))
        return self

    def measured(self, call: int, largest: float, step: int = 0, op: str = OP, line: str = LINE) -> Written:
        """One output with statistics."""
        table = self.store.table("op_overflow_check", {"run": "INTEGER", **OpOverflowCheck.columns})
        numbers, statistics = array("q", [call]), array("d", [0.0, 0.0, -1.0, largest, 0.0, 1.0, 2.0])
        log, steps = array("q", [call, self.site(op, line), 0, 1, 1, 0, call]), array("q", [step])
        table.append((1, *[part.tobytes() for part in (numbers, statistics, log, steps)]))
        return self

    def placed(self, call: int, module: str, step: int = 0, op: str = OP, line: str = LINE) -> Written:
        """The module of a call."""
        self.store.table("places", _PLACES).append((1, call, self.site(op, line), step, module))
        return self

    def found(self, kind: str, message: str, op: str = OP, line: str = LINE) -> Written:
        """A finding."""
        row = ("OpOverflowCheck", 1, op, kind, message, 3, line, "forward", "", 1, 0.0)
        self.store.table("findings", _FINDING_COLUMNS).append(row)
        return self

    def end(self, *summary: str) -> Written:
        """The end of the run."""
        runs.end(self.store, 1, "OpAutoCompare", summary)
        return self

    def close(self) -> Path:
        """The folder of the run."""
        self.store.close()
        return self.path.parents[1]


def dead_pid() -> int:
    """The number of a process that is gone."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid
