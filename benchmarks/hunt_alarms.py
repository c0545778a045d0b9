"""The hunt on a device without faults, with a verdict on every call: whatever it finds is the device's error or ours.

On `soft` the kernels are the CPU's, so a finding is an error of CPU PyTorch, or a false alarm.

    python -m benchmarks.hunt_alarms rows.jsonl --seconds 280     # goes on where the file ends, round by round
    python -m benchmarks.hunt_alarms rows.jsonl --seconds 0       # what was tried and found
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ditorch
from benchmarks.real_bugs import asked
from ditorch.conformance import hunt_checks
from ditorch.conformance.cases import WRONG, Limits, Unit


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file; none where there is no file."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def hunt(path: Path, device: str, seconds: float, share: float, first: str = "") -> None:
    """Hunt through all operators, round after round, until the time is up."""
    ends = time.monotonic() + seconds
    asked.load()
    done = {(row["name"], row["round"]) for row in read(path)}  # also one that took the process down
    units = hunt_checks.units(device.partition(":")[0])
    if first:
        units = units[next(number for number, unit in enumerate(units) if unit.name == first) :]
    with path.open("a", encoding="utf-8") as file:

        def write(**row: Any) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        for number in range(1, hunt_checks.ROUNDS + 1):
            for unit in units:
                if time.monotonic() > ends:
                    return
                if (unit.name, number) in done:
                    continue
                write(name=unit.name, round=number, status="begun", calls=0)
                limits = Limits(timeout=600, hunt_seconds=share)
                checks = hunt_checks.HuntChecks(
                    Unit("hunt", unit.name, "-", ()), device, limits, clock=time.process_time, judges_all=True
                )
                try:
                    result = checks.run(f"round-{number}")
                except Exception as error:
                    write(name=unit.name, round=number, status=f"{type(error).__name__}: {error}"[:200], calls=0)
                    continue
                row: dict[str, Any] = {"calls": result.samples - result.not_comparable, "tried": result.samples}
                if result.status == WRONG:
                    row |= {"message": result.message, "note": result.note, "details": result.details}
                write(name=unit.name, round=number, status=result.status, **row)


def main() -> None:
    """Hunt for so long, then say what was tried and found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("rows", type=Path, help="file of results, one operator and round a line")
    parser.add_argument("--seconds", type=float, default=280.0)
    parser.add_argument("--share", type=float, default=0.3, help="seconds for one operator in one round")
    parser.add_argument("--first", default="", help="operator to begin with; those before it are left out")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    assert ditorch.backend is not None
    if options.seconds > 0:
        hunt(options.rows, f"{ditorch.backend.device_type}:0", options.seconds, options.share, options.first)
    rows = list(read(options.rows))
    ended = [row for row in rows if row["status"] != "begun"]
    names, calls = {row["name"] for row in ended}, sum(row["calls"] for row in ended)
    tried = sum(row.get("tried", 0) for row in ended)
    print(f"{tried:,} calls of {len(names)} operators tried in {len(ended)} rounds; {calls:,} of them were judged")
    for row in rows:
        lost = row["status"] == "begun" and (row["name"], row["round"]) not in {(r["name"], r["round"]) for r in ended}
        if lost or row["status"] not in ("begun", "pass", "not comparable"):
            print(f"{row['name']} round {row['round']}: {'lost' if lost else row['status']}: {row.get('message', '')}")


if __name__ == "__main__":
    main()
