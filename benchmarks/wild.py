"""Public projects' training scripts, unmodified, through `ditorch run` on soft: which work, and why others do not.

    python -m benchmarks.wild DIR [--only NAME] [--json FILE] [--resume]

DIR holds one checkout per project, in a folder with the repository's name; `wild.toml` beside this file lists the
commands and the tiny data that they get. Each command runs twice in a copy of its checkout: on `soft`, and with `cuda`
meaning the CPU, whose losses it must repeat. `ditorch scan` is asked before, and its answer held against what happened.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tomllib

from benchmarks.wild_data import RECIPES, WORDS

HERE = Path(__file__).parent
LOSS = r"loss[^0-9\n]{0,20}?(-?\d+\.\d+(?:e[-+]?\d+)?)"
# Reasons that lie outside of the device layer, by what the last lines of the output say.
REASONS = {
    "Triton": r"No module named 'triton|[Tt]riton (?:is|was) not|needs? Triton",
    "no package": r"ModuleNotFoundError: No module named|PackageNotFoundError|ImportError: .*(?:requires|install)",
    "a download": r"URLError|ConnectionError|Temporary failure in name|HTTPError|Name or service not known|"
    r"MaxRetryError|ProxyError|Couldn't connect|LocalEntryNotFoundError|OfflineModeIsEnabled|couldn't connect to|"
    r"FileNotFoundError: https?://",
    "too slow for its time limit": r"TimeoutError: not done after",
    "CUDA source": r"of CUDA source|nvcc|NVRTC|CUDA_HOME|selective_scan_cuda|causal_conv1d_cuda",
}
UNEXPLAINED, OWN = "device layer?", "its own: the same error where cuda means the CPU"
MEMORY = "killed by the system: no memory left"
ELSEWHERE = ("CUDA source", "Triton", "a download", "no package", "no checkout", MEMORY)
"""Reasons for which a command says nothing about the device layer."""
SEED = """
import importlib.util, os, random
spec = importlib.util.spec_from_file_location("_wild_imports", os.environ["WILD_IMPORTS"])
imports = importlib.util.module_from_spec(spec)
spec.loader.exec_module(imports)
random.seed(0)
imports.AfterImport("numpy", lambda numpy: importlib.import_module("numpy.random").seed(0)).install()
imports.AfterImport("ditorch", lambda ditorch: __import__("torch").manual_seed(0)).install()
made = lambda module: setattr(module, "check_integrity", lambda *file: True)
imports.AfterImport("torchvision.datasets.cifar", made).install()
"""
"""In every process: seeds, and checksums of CIFAR, which pictures that were drawn here cannot have."""


@dataclass
class Command:
    """One command of one project."""

    project: str
    """Owner and name on GitHub."""
    run: list[str]
    """Script (or -m module) and its arguments."""
    cwd: str = "."
    prepare: list[list[str]] = field(default_factory=list)
    """Tiny data: a recipe of `RECIPES` and its arguments."""
    until: int = 0
    """Stop after so many losses: the script would train for days."""
    loss: str = LOSS
    ranks: int = 0
    """Processes that torchrun starts."""
    timeout: float = 300
    environment: dict[str, str] = field(default_factory=dict)
    packages: list[str] = field(default_factory=list)
    """Versions that the project was written for, where today's do not do: installed beside the others."""
    terminal: bool = False
    """Its input is a terminal of 80 columns: the script asks for its width."""

    @property
    def name(self) -> str:
        where = self.project.split("/")[1] + ("" if self.cwd == "." else f"/{self.cwd}")
        return f"{where}: {' '.join(self.run)}"

    @property
    def script(self) -> str:
        return self.run[1].replace(".", "/") + ".py" if self.run[0] == "-m" else self.run[0]


@dataclass
class Outcome:
    """What became of a command."""

    name: str
    project: str
    works: bool = False
    losses: str = ""
    """How they stand to the CPU's."""
    mine: list[float] = field(default_factory=list)
    reason: str = ""
    last: str = ""
    predicted: list[str] = field(default_factory=list)
    seconds: float = 0.0


# --- running ---------------------------------------------------------------------------------------


def environment(command: Command, device: str, seeds: str) -> dict[str, str]:
    known = {**os.environ, "DITORCH_DEVICE": device, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    known |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1", "MPLBACKEND": "Agg"}
    known |= {
        "DITORCH_SOFT_SHARED_RANDOM": "1",
        "DITORCH_SOFT_DEVICES": str(command.ranks or 1),
        "WILD_IMPORTS": str(HERE.parent / "ditorch/imports.py"),
    }
    own = dict(command.environment)
    paths = [installed(tuple(command.packages))] if command.packages else []
    paths += [seeds, own.pop("PYTHONPATH", ""), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    known["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return {**known, **own}


@functools.cache
def installed(packages: tuple[str, ...]) -> str:
    """A folder with these packages, and without what they depend on."""
    folder = Path(tempfile.gettempdir()) / ("wild-packages-" + re.sub(r"[^\w.]+", "-", " ".join(packages)))
    if not folder.is_dir():
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *packages]
        subprocess.run(install, check=True)
    return str(folder)


def execute(command: Command, folder: Path, device: str, seeds: str) -> tuple[int, str]:
    """Exit code and output; a script that is stopped after enough losses has done well."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={command.ranks}"]
    line = [sys.executable, "-m", "ditorch", "run", *(torchrun if command.ranks else []), *command.run]
    screen, keyboard = pty.openpty() if command.terminal else (-1, -1)
    if command.terminal:
        termios.tcsetwinsize(keyboard, (24, 80))
    process = subprocess.Popen(
        line,
        cwd=folder / command.cwd,
        env=environment(command, device, seeds),
        stdin=keyboard if command.terminal else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    kept: list[str] = []
    enough = threading.Event()
    killer = threading.Timer(command.timeout, _stop, [process])
    killer.start()
    assert process.stdout is not None
    seen = 0
    for row in process.stdout:
        kept.append(row)
        seen += len(re.findall(command.loss, row, re.IGNORECASE))
        if command.until and seen >= command.until:
            enough.set()
            _stop(process)
            break
    process.wait()
    for end in {screen, keyboard} - {-1}:
        os.close(end)
    late = not killer.is_alive()
    killer.cancel()
    if late and not enough.is_set():
        kept.append(f"TimeoutError: not done after {command.timeout:.0f} s\n")
    return 0 if enough.is_set() else (124 if late else process.returncode), "".join(kept)


def _stop(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def losses(command: Command, output: str) -> list[float]:
    found = [float(number) for number in re.findall(command.loss, output, re.IGNORECASE)]
    return found[: command.until or None]


def compared(mine: list[float], theirs: list[float]) -> str:
    """How the losses stand to those of the CPU."""
    if not mine or not theirs:
        return "none printed"
    if mine == theirs:
        return "as on the CPU"
    count = min(len(mine), len(theirs))
    worst = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(mine[:count], theirs[:count]))
    return f"within {worst:.1e}"


def why(output: str) -> tuple[str, str]:
    """Reason and last line of a failure."""
    rows = [row.strip() for row in output.splitlines() if row.strip()]
    rows = [re.sub(r"^\[rank\d+\]:\s*", "", row) for row in rows]
    errors = [row for row in rows if re.match(r"[\w.]*(?:Error|Exception|Interrupt)\b", row)]
    errors = [row for row in errors if "ChildFailedError" not in row] or errors  # torchrun's, after those of its ranks
    tail = "\n".join(rows[-60:])
    last = errors[-1] if errors else rows[-1] if rows else ""
    for reason, pattern in REASONS.items():
        if re.search(pattern, tail):
            return reason, last[:200]
    return UNEXPLAINED, last[:200]


def kind_of(error: str) -> str:
    """An error without its numbers and addresses, to recognise it again."""
    return re.sub(r"0x[0-9a-f]+|[\d.]+", "#", error)


def attempt(command: Command, checkouts: Path, seeds: str, outcome: Outcome | None, compare: bool) -> Outcome:
    """Run on soft, unless that is done, and on the CPU where its losses are wanted."""
    source = checkouts / command.project.split("/")[1]
    if outcome is None:
        outcome = Outcome(command.name, command.project)
        if not (source / command.cwd).is_dir():
            outcome.reason = "no checkout"
            return outcome
        outcome.predicted = predicted(source / command.cwd / command.script)
        started = time.monotonic()
        code, output = copied(command, source, "soft", seeds)
        outcome.seconds = round(time.monotonic() - started, 1)
        outcome.works = code == 0
        outcome.mine = losses(command, output)
        if code:
            outcome.reason, outcome.last = why(output)
            if code == -signal.SIGKILL:
                outcome.reason = MEMORY
            if outcome.reason == UNEXPLAINED:
                code, output = copied(command, source, "cpu", seeds)
                if code and kind_of(why(output)[1]) == kind_of(outcome.last):
                    outcome.reason = OWN
    if compare and outcome.works and not outcome.losses:
        theirs = losses(command, copied(command, source, "cpu", seeds)[1]) if outcome.mine else []
        outcome.losses = compared(outcome.mine, theirs)
    return outcome


def copied(command: Command, source: Path, device: str, seeds: str) -> tuple[int, str]:
    """Run in a fresh copy of the checkout, with its data."""
    with tempfile.TemporaryDirectory(prefix="wild-") as scratch:
        folder = Path(scratch) / source.name
        shutil.copytree(source, folder, symlinks=True, ignore=shutil.ignore_patterns(".git", "*.png", "*.gif"))
        for recipe, *arguments in command.prepare:
            try:
                RECIPES[recipe](folder, *arguments)
            except Exception:
                return 1, traceback.format_exc()
        return execute(command, folder, device, seeds)


def predicted(script: Path) -> list[str]:
    """What `ditorch scan` says will fail."""
    if not script.is_file():
        return []
    from ditorch.backends import soft
    from ditorch.scan import scan

    return [f"{use.name} ({use.status})" for use in scan(script, soft.BACKEND).failing()]


# --- the report ------------------------------------------------------------------------------------


def judged(outcomes: list[Outcome]) -> dict[str, float]:
    """Scan's prediction against what happened, where the device decided (no download, no missing package)."""
    seen = [o for o in outcomes if o.works or o.reason in ("CUDA source", "Triton", UNEXPLAINED)]
    hits = sum(bool(o.predicted) and not o.works for o in seen)
    said = sum(bool(o.predicted) for o in seen)
    failed = sum(not o.works for o in seen)
    return {
        "judged": len(seen),
        "predicted to fail": said,
        "failed": failed,
        "precision": hits / said if said else 1.0,
        "recall": hits / failed if failed else 1.0,
    }


def report(outcomes: list[Outcome]) -> str:
    rows = ["| command | result | losses or reason | scan |", "| --- | --- | --- | --- |"]
    for o in outcomes:
        shown = o.name if len(o.name) <= 110 else o.name[:107] + "..."
        said = "fails: " + o.predicted[0] if o.predicted else "runs"
        rows.append(f"| `{shown}` | {'works' if o.works else 'fails'} | {o.losses or o.reason} | {said} |")
    works = sum(o.works for o in outcomes)
    could = [o for o in outcomes if o.reason not in ELSEWHERE]
    alone = [o for o in could if o.reason != OWN]
    projects = len({o.project for o in outcomes})
    working = len({o.project for o in outcomes if o.works})
    free = [o for o in outcomes if o.reason not in ("CUDA source", "Triton")]
    rows.append(
        f"\n{len(outcomes)} commands of {projects} projects: {works} work, of {working} projects. Of the {len(free)} "
        f"that need neither CUDA source nor Triton {works / len(free):.1%} work. {len(could)} need no download and no "
        f"package that is not here either: {works / len(could):.1%} of them work, "
        f"{works / len(alone):.1%} without those that end alike on the CPU."
    )
    same = sum(o.losses == "as on the CPU" for o in outcomes)
    near = sum(o.losses.startswith("within") for o in outcomes)
    rows.append(
        f"Losses: {same} as on the CPU to the digit, {near} near them; the others print none or were not compared."
    )
    rows.append("scan: " + ", ".join(f"{key} {value:.3g}" for key, value in judged(outcomes).items()))
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", type=Path, metavar="DIR")
    parser.add_argument("--list", type=Path, default=HERE / "wild.toml", help="the commands")
    parser.add_argument("--only", help="commands whose name contains this")
    parser.add_argument("--json", type=Path, help="keep the outcomes here, after each command")
    parser.add_argument("--resume", action="store_true", help="leave out what that file has")
    parser.add_argument("--no-cpu", dest="compare", action="store_false", help="do not run it on the CPU, too")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no command after this; go on with --resume")
    parser.add_argument("--part", default="0/1", help="I/N: only every Nth command, from I on")
    options = parser.parse_args()
    WORDS[0] = str(options.checkouts)
    entries: list[dict[str, Any]] = tomllib.loads(options.list.read_text())["command"]
    first, step = map(int, options.part.split("/"))
    commands = [Command(**entry) for entry in entries][first::step]
    done: dict[str, Outcome] = {}
    end = time.monotonic() + options.minutes * 60
    if options.resume and options.json and options.json.is_file():
        done = {o["name"]: Outcome(**o) for o in json.loads(options.json.read_text())}
    with tempfile.TemporaryDirectory(prefix="wild-seed-") as seeds:
        (Path(seeds) / "sitecustomize.py").write_text(SEED)
        for command in commands:
            before = done.get(command.name)
            if options.only and options.only not in command.name:
                continue
            if before and (not options.compare or not before.works or before.losses):
                continue
            if time.monotonic() > end:
                break
            outcome = done[command.name] = attempt(command, options.checkouts, seeds, before, options.compare)
            state = "works" if outcome.works else f"fails ({outcome.reason}) {outcome.last}"
            print(f"{outcome.name}: {state} {outcome.losses} {outcome.seconds:.0f} s", file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(o) for o in done.values()], indent=1))
    listed = [done[command.name] for command in commands if command.name in done]
    print(report(listed))


if __name__ == "__main__":
    main()
