"""Runs the quick benchmarks one after the other: ``make bench``."""

from __future__ import annotations

import subprocess
import sys

COMMANDS = (
    ["-m", "benchmarks.soft_overhead"],
    ["benchmarks/redirect_cost.py", "--device", "soft"],
    ["benchmarks/tool_overhead.py", "--device", "soft"],
)

if __name__ == "__main__":
    failed = 0
    for command in COMMANDS:
        print(f"==> python {' '.join(command)}", flush=True)
        failed |= subprocess.call([sys.executable, *command])
    sys.exit(failed)
