"""`python -m tests.chaos [--kills 2] [--captures 1000] [--seed 1]`: a table of what was tried and lost.

`--kills 100 --captures 10000` is what docs/reliability.md reports; it takes an hour on two free cores.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from . import hostile, kills

BAD = (*kills.BAD, "missed", "raised", "unanswered", "code executed", "over the memory limit")


def main() -> int:
    """Run the experiments in turn; 1 if anything broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=2, help="for each tool and signal, with one rank and with two")
    parser.add_argument("--captures", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=60.0, help="no further experiment is begun after them")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    end = time.monotonic() + given.minutes * 60
    found: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        os.chdir(scratch)
        for name, counts in _experiments(given.kills, given.captures, random.Random(given.seed), Path(scratch)):
            found.setdefault(name, Counter()).update(counts)
            if time.monotonic() > end:
                break
        os.chdir("/")
    print(f"seed {given.seed}\n\n| tried | what came of it |\n| --- | --- |")
    for name, counts in found.items():
        shown = {key: count for key, count in counts.items() if count or key in BAD}
        print(f"| {name} | " + ", ".join(f"{count:,} {key}" for key, count in shown.items()) + " |")
    return int(any(counts[key] for counts in found.values() for key in BAD))


def _experiments(
    count: int, hostile_captures: int, choose: random.Random, scratch: Path
) -> Iterator[tuple[str, Counter[str]]]:
    import ditorch  # noqa: F401  # the device, before the processes are forked
    from op_tools.native import front

    front.LIBRARY.wait()
    kills.warm_up()  # forks come first, while this process has no threads
    for world in (1, 2):
        for repetition in range(count):
            folder = scratch / f"kills-{world}-{repetition}"
            yield from kills.all_of(kills.some(kills.TOOLS, kills.SIGNALS, 1, folder, choose, world)).items()
    yield from kills.troubled(kills.TOOLS, scratch / "troubles").items()
    for name in ("captures", "bits", "records", "traces"):
        (scratch / name).mkdir()
    for block in range(max(1, hostile_captures // 250)):
        folder = scratch / "captures" / str(block)
        folder.mkdir()
        yield "hostile captures, replayed", hostile.captured(min(250, hostile_captures), folder, choose)
    yield "a flipped bit in tensor data", hostile.flipped(hostile_captures, scratch / "bits", choose)
    yield "damaged records files", hostile.recorded(hostile_captures // 10, scratch / "records", choose)
    yield "hostile traces, shown and compared", hostile.traced(hostile_captures // 10, scratch / "traces", choose)
    yield "fault strings", hostile.planted(hostile_captures, choose)
    yield "lists of operators and dtypes", hostile.listed(hostile_captures, choose)


if __name__ == "__main__":
    sys.exit(main())
