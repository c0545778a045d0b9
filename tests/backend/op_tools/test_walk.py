"""How far one call walks through op_tools; rooms that have nothing to do for a call are not entered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ditorch

LIMITS = {"OpAutoCompare": (15, 100), "OpCapture": (15, 100), "OpOverflowCheck": (10, 60), "OpTimeMeasure": (8, 20)}
ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(ditorch.backend.name != "soft", reason="the limits are those of soft; other devices copy otherwise")
def test_a_call_like_an_earlier_one_walks_through_few_modules() -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.walk", *LIMITS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = {tool: tuple(map(int, counts)) for tool, *counts in map(str.split, done.stdout.splitlines()[1:])}
    assert found.keys() == LIMITS.keys(), done.stdout
    for tool, (calls, modules, changes) in found.items():
        most_modules, most_changes = LIMITS[tool]
        assert 0 < modules <= most_modules, f"{tool}: {modules} modules; see python -m benchmarks.walk {tool} --list"
        assert 0 < changes <= most_changes, f"{tool}: {changes} changes of module in {calls} calls"
