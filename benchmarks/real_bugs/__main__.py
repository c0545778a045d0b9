"""Ask for each bug in each way, keep the answers, print the table."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from pathlib import Path

import benchmarks.real_bugs as package
from benchmarks.real_bugs import answers, asked, watched
from benchmarks.real_bugs.answers import Answer
from benchmarks.real_bugs.bugs import BUGS, Bug
from benchmarks.real_bugs.scripts import Scripts

WAYS = (*watched.WAYS, watched.HASHES, asked.PLAIN, asked.HUNT)
_SHOWN = ("default", "`once`", "`BUDGET=2x`", asked.PLAIN, asked.HUNT, "`torch.testing`", watched.HASHES)


def ask(bug: Bug, way: str, scripts: Scripts, check: str = "round-1") -> Answer:
    """What one way says about one bug."""
    if way == watched.HASHES:
        return watched.hashed(bug)
    if way == asked.PLAIN:
        return asked.plain(bug)
    if way == asked.HUNT:
        return asked.hunted(bug, scripts, check)
    return watched.compared(bug, way, scripts if way == "default" else None)


def main() -> int:
    """The exit status is 1 if the default way misses a bug or blames something else."""
    parser = argparse.ArgumentParser(description=(package.__doc__ or "").split("\n", 1)[0])
    parser.add_argument("rows", type=Path, help="file of answers, one a line; those that it holds are not asked again")
    parser.add_argument("numbers", nargs="*", type=int, help="which bugs; all of them if none is named")
    names = {way.strip("`"): way for way in WAYS}
    parser.add_argument("--ways", nargs="+", choices=list(names), default=list(names))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after so long")
    parser.add_argument("--round", default="round-1", help="of the hunt: what it draws follows from this")
    parser.add_argument("--show", action="store_true", help="ask nothing, print the table of what is there")
    options = parser.parse_args()
    import ditorch

    if ditorch.backend is None or ditorch.backend.name != "soft":
        parser.error("faults can be planted in the software accelerator only: set DITORCH_DEVICE=soft")
    if not options.show:
        chosen = [bug for bug in BUGS if not options.numbers or bug.number in options.numbers]
        ends = time.monotonic() + options.seconds
        _ask_all(chosen, [names[way] for way in options.ways], options.rows, ends, options.round)
    found = answers.read(options.rows)
    print("\n".join(answers.table(BUGS, _SHOWN, found)))
    default = [found[bug.number, "default"] for bug in BUGS if (bug.number, "default") in found]
    return int(not all(answer.clean for answer in default))


def _ask_all(chosen: list[Bug], ways: list[str], rows: Path, ends: float, check: str) -> None:
    warnings.simplefilter("ignore")
    os.environ.setdefault("OP_TOOLS_CONSOLE", "off")
    if asked.PLAIN in ways or asked.HUNT in ways:
        asked.load()
    done, scripts = answers.read(rows), Scripts()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OP_TOOLS_RESULTS_DIR"] = folder
        for way in ways:
            for bug in chosen:
                if (bug.number, way) not in done and time.monotonic() < ends:
                    answers.add(rows, bug.number, way, ask(bug, way, scripts, check))
    scripts.close()


if __name__ == "__main__":
    raise SystemExit(main())
