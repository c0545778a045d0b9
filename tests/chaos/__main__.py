"""`python -m tests.chaos --minutes 5 --seed 1`: everything, for so long, with a table of what was tried and lost."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from . import hostile, kills

BAD = (
    "unreadable",
    "partial",
    "lost too much",
    "missed",
    "raised",
    "unanswered",
    "code executed",
    "over the memory limit",
)


def main() -> int:
    """Run experiments in turn until the time is over; 1 if anything broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    choose, end = random.Random(given.seed), time.monotonic() + given.minutes * 60
    found: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        os.chdir(scratch)
        rounds = 0
        while time.monotonic() < end:
            for name, experiment in _experiments(choose).items():
                folder = Path(scratch) / f"{rounds}-{len(found)}-{choose.randrange(10**9)}"
                folder.mkdir()
                found.setdefault(name, Counter()).update(experiment(folder))
                if time.monotonic() > end:
                    break
            rounds += 1
    print(f"seed {given.seed}, {rounds} rounds\n\n| tried | what came of it |\n| --- | --- |")
    for name, counts in found.items():
        shown = {key: count for key, count in counts.items() if count or key in BAD}
        print(f"| {name} | " + ", ".join(f"{count:,} {key}" for key, count in shown.items()) + " |")
    return int(any(counts[key] for counts in found.values() for key in BAD))


def _experiments(choose: random.Random) -> dict[str, Callable[[Path], Counter[str]]]:
    made: dict[str, Callable[[Path], Counter[str]]] = {}
    for tool in kills.TOOLS:  # forks come first, while this process has no threads
        for number in kills.SIGNALS:
            made[f"{tool}, {signal.Signals(number).name} at a random moment"] = (
                lambda folder, tool=tool, number=number: kills.ended(tool, number, folder / "run", choose)
            )
        made[f"{tool}, no file may grow beyond 64 KiB"] = lambda folder, tool=tool: kills.ended(
            tool, 0, folder / "run", choose, disk=1 << 16
        )
    made["hostile captures, replayed"] = lambda folder: hostile.captured(200, folder, choose)
    made["a flipped bit in tensor data"] = lambda folder: hostile.flipped(200, folder, choose)
    made["damaged records files"] = lambda folder: hostile.recorded(50, folder, choose)
    made["fault strings"] = lambda folder: hostile.planted(500, choose)
    return made


if __name__ == "__main__":
    sys.exit(main())
