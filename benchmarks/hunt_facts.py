"""Tries the scripts of a hunt again on the device while the hunt goes on, and keeps what each of them says.

    python -m benchmarks.hunt_facts conformance_results/cuda-hunt facts --device cuda:0 --seconds 540

For each finding there is `facts/NAME.txt`: the call, the device's result beside that of the CPU and of float64, how far
both are off, and whether the result repeats, so that a person can judge it without the device. The scripts run in one
process, since starting PyTorch takes longer than they do; a script that loses the device costs that process. It ends
when the hunt has written its findings.txt, or after so many seconds. `--seconds 0` tries what is there.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import runpy
import select
import subprocess
import sys
import time
from pathlib import Path

from ditorch.conformance import findings, store
from ditorch.conformance.cases import Result

STATUS = {0: "gone", 1: "still there", 2: "could not be tried"}
_LINE = 400
_LIMIT = 60.0


def found(folder: Path, begun: int) -> tuple[list[findings.Found], int]:
    """The findings after so many lines of a hunt's results, and how many lines there are now."""
    path = folder / store.FILE
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    new = [json.loads(line) for line in lines[begun:]]
    results = [Result.from_dict(data) for data in new if "case" in data]
    return [one for result in results for one in findings.of(result)], len(lines)


def serve(device: str) -> None:
    """Run the scripts whose paths come in, line by line; their words go out as one line of JSON each."""
    import torch

    torch.ones(1, device=device).cpu()
    out = sys.stdout
    out.write("ready\n")
    out.flush()
    for path in map(str.strip, sys.stdin):
        said, status = io.StringIO(), 0
        sys.argv = [path, device]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                runpy.run_path(path, run_name="__main__")
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}")
                status = 2
        lost = False
        try:
            torch.ones(1, device=device).cpu()
        except Exception as error:
            lost = True
            said.write(f"the device is lost: {error}\n")
        out.write(json.dumps({"status": status, "said": said.getvalue(), "lost": lost}) + "\n")
        out.flush()
        if lost:
            return


class Trier:
    """A process that tries scripts, and the next one where that is lost."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._process: subprocess.Popen[str] | None = None

    def tried(self, script: Path) -> tuple[str, str]:
        """What became of a script, and what it said."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "benchmarks.hunt_facts", "-", "-", "--device", self.device, "--serve"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._process.stdout is not None
            self._process.stdout.readline()  # its start is not part of a script's time
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{script}\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], _LIMIT)
        line = process.stdout.readline() if ready else ""
        if not line:
            self.close()
            return "lost the process" if ready else f"took longer than {_LIMIT:g} s", ""
        answer = json.loads(line)
        if answer["lost"]:
            self.close()
        return STATUS.get(answer["status"], str(answer["status"])), answer["said"]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def source(script: str) -> str:
    """The lines of a script that say what is called, each cut short."""
    lines = script.splitlines()
    begin = next((n for n, line in enumerate(lines) if line.startswith("TENSORS")), 0)
    end = next((n for n, line in enumerate(lines) if line.startswith("def exact")), len(lines))
    return "\n".join(line if len(line) <= _LINE else f"{line[:_LINE]} ..." for line in lines[begin:end] if line)


def main() -> None:
    """Follow a hunt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("hunt", type=Path, help="folder of the hunt")
    parser.add_argument("facts", type=Path, help="folder for what is found out")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.device)
        return
    ends, begun, counts = time.monotonic() + options.seconds, 0, collections.Counter[str]()
    options.facts.mkdir(parents=True, exist_ok=True)
    trier = Trier(options.device)
    while True:
        last = (options.hunt / findings.FILE).exists() or time.monotonic() > ends
        new, begun = found(options.hunt, begun)
        for one in new:
            status, said = "has no script", ""
            path = options.facts / one.file
            if one.script:
                path.write_text(one.script, encoding="utf-8")
                status, said = trier.tried(path.resolve())
            counts[status] += 1
            head = f"{one.operator} | {one.case.check} | {status}\n{one.message}\n{one.off}"
            path.with_suffix(".txt").write_text(f"{head}\n\n{said}\n{source(one.script)}\n", encoding="utf-8")
            print(f"{status}: {one.operator} {one.message[:150]}", flush=True)
        if last:
            break
        time.sleep(2)
    trier.close()
    print(", ".join(f"{number} {status}" for status, number in counts.most_common()) or "no finding")


if __name__ == "__main__":
    main()
