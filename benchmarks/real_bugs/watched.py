"""The programs of the bugs, run as a user runs them: under OpAutoCompare, and under PyTorch's DebugMode."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

import op_tools
from benchmarks.real_bugs import bugs
from benchmarks.real_bugs.answers import Answer
from benchmarks.real_bugs.bugs import Bug
from benchmarks.real_bugs.scripts import Scripts

STEPS: Final = 4
WAYS: Final[dict[str, dict[str, Any]]] = {
    "default": {},
    "`once`": {"mode": "once"},
    "`BUDGET=2x`": {"budget": "2x"},
    "`torch.testing`": {},
}
"""The ways of OpAutoCompare. The last one is its road through the calls with the tolerances of `torch.testing`."""
HASHES: Final = "DebugMode"
OTHER_ROUNDING: Final = "; ".join(
    f"{operator}: noise=5e-8"
    for operator in (
        *("mm", "mm.out", "addmm", "addmm.out", "bmm", "convolution", "sum", "mean", "exp", "tanh", "sqrt", "addcmul_"),
        *("native_layer_norm", "avg_pool2d_backward", bugs.ATTENTION, "index_add_", "addcdiv_"),
    )
)
"""A device that is right and rounds the last digit otherwise, as every real one does."""


@contextlib.contextmanager
def planted(text: str) -> Iterator[list[Any]]:
    """Faults in force, each with its number of hits."""
    from ditorch.soft import faults

    try:
        yield [faults.plant(fault) for fault in faults.parse(text)]
    finally:
        faults.clear()


def compared(bug: Bug, way: str, scripts: Scripts | None = None) -> Answer:
    """Run the program of a bug under OpAutoCompare; with `scripts`, the finding's script as well."""
    torch.manual_seed(0)
    step = bug.program()
    began = time.perf_counter()
    standard = "torch" if way == "`torch.testing`" else "ulp"
    os.environ["OP_AUTOCOMPARE_STANDARD"] = standard
    with planted(bug.fault) as all_planted, op_tools.OpAutoCompare(**WAYS[way]) as tool:
        for _ in range(STEPS):
            step()
        tool.stop()
        hits = sum(one.hits for one in all_planted)
    right = [b for b in tool.blames if bug.blamed in b.op and b.phase == bug.phase]
    calls = {b.call_id for b in right}  # a backward may be wrong because its forward is
    others = sorted({f"{b.op} {b.phase}" for b in tool.blames if b not in right and b.call_id not in calls})
    answer = Answer(hits, bool(tool.blames), bool(right), others=others)
    if not tool.blames and any("torch.compile" in line and "not compared" in line for line in tool.summary()):
        answer.note = "says: not compared"
    if right:
        answer.placed = (
            _line(right[0].location).find(bug.line) >= 0 and bug.module == right[0].module.rpartition(".")[2]
        )
        answer.note = f"{right[0].module or '-'} {Path(right[0].location).name}"
        if scripts is not None and right[0].folder:
            script = Path(right[0].folder) / "reproduce.py"
            with_it = scripts.run(script, DITORCH_SOFT_FAULTS=always(bug.fault))
            answer.reproduced = f"{with_it}/{scripts.run(script)}"
    answer.seconds = round(time.perf_counter() - began, 2)
    return answer


def always(fault: str) -> str:
    """The fault without the conditions that a call run alone cannot meet."""
    parts = [p.strip() for p in fault.split(",")]
    return ", ".join(p for p in parts if not p.startswith(("nth=", "phase=")))


def _line(location: str) -> str:
    """The source line that a location names."""
    found = re.match(r"(.*?\.py):(\d+)", location)
    return linecache.getline(found[1], int(found[2])) if found else ""


# --- DebugMode ---------------------------------------------------------------------------------------------


def hashed(bug: Bug) -> Answer:
    """Run the program with the bug and without under DebugMode, and compare the hashes of all results."""
    began = time.perf_counter()
    try:
        healthy, (broken, hits) = _logs(bug, "")[0], _logs(bug, bug.fault)
        other = _differing(healthy, _logs(bug, OTHER_ROUNDING)[0])
        found = _differing(healthy, broken)
    except Exception as error:
        return Answer(note=f"{type(error).__name__}")
    guilty = [re.split(r"[:.]", fault.split(":")[0].strip())[0] for fault in bug.fault.split(";")]
    guilty += ["real_bugs"] if "real_bugs" in bug.fault else []
    right = bool(found) and any(name in found[0] for name in guilty)
    note = f"{len(found)} results differ; {len(other)} where a right device rounds otherwise"
    return Answer(hits, bool(found), right, note=note, seconds=round(time.perf_counter() - began, 2))


def _logs(bug: Bug, fault: str) -> tuple[list[Any], int]:
    from torch.utils._debug_mode import DebugMode

    torch.manual_seed(0)
    step = bug.program()
    with planted(fault) as all_planted, DebugMode() as mode, DebugMode.log_tensor_hashes():
        for _ in range(STEPS):
            step()
        return list(mode.logs), sum(one.hits for one in all_planted)


def _differing(first: list[Any], second: list[Any]) -> list[str]:
    from torch.utils._debug_mode import DebugMode

    return [str(difference["call"]) for difference in DebugMode.check_hash_mismatches(first, second)]
