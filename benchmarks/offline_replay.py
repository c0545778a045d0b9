"""Offline checking of a captured training step: is every operator the same again, and how fast is the check?

One training step of the small GPT of `tool_overhead.py`, deep enough for more than 400 operator calls, is captured
forward and backward. Then, in one run, on the same captures:

- old, one by one: a process for each capture, as a single-operator script is used: `torch.load`, run on the device
  and on the CPU in double precision, forward and backward, `allclose`. Timed on some captures, spread evenly.
- old loop alone: the same script going through all captures in one process, its start not counted.
- ours: `run_op_from_data.py DIR --acc_check`, its start counted and not counted, in one process and with `--jobs`.

The loops run in turns, `--rounds` times, and the fastest of each counts. The old loop reads half of the files and asks
`allclose`; ours compares with the captured results bit by bit, and judges every element by its rounding.

    python benchmarks/offline_replay.py                 # on this machine's device
    python benchmarks/offline_replay.py --width 256 --sample 40 --jobs 8
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


# --- the old way: one operator, nothing of op_tools ----------------------------------------------------------


def check_one(folder: Path, device: str) -> bool:
    """Load a capture, run it on the device and on the CPU, compare with allclose."""
    import torch

    def load(part: str) -> Any:
        path = folder / f"{part}.pth"
        return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else {}

    def plain(value: Any, where: str, wide: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(plain(v, where, wide) for v in value)
        if isinstance(value, dict) and "__op_tools__" in value:
            kind, text = value["__op_tools__"], value["value"]
            if kind == "device":
                return torch.device(where)
            if kind == "size":
                return torch.Size(text)
            if kind == "group":
                return tuple(plain(v, where, wide) for v in text)
            dtype = getattr(torch, text.removeprefix("torch."))
            return torch.float64 if wide and dtype == torch.float32 else dtype
        if isinstance(value, dict):
            return {k: plain(v, where, wide) for k, v in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        moved = value.detach().to(where)
        moved = moved.double() if wide and moved.is_floating_point() else moved
        return moved.requires_grad_(value.requires_grad)

    def tensors(value: Any) -> list[Any]:
        if isinstance(value, torch.Tensor):
            return [value]
        members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return [t for member in members for t in tensors(member)]

    call, sent = load("input"), load("grad_outputs").get("grad_outputs")
    function: Any = torch
    for name in call["name"].split(".")[1:]:
        function = getattr(function, name)

    def run(where: str, wide: bool) -> list[Any]:
        args, kwargs = plain(call["args"], where, wide), plain(call["kwargs"], where, wide)
        with torch.set_grad_enabled(call["grad_enabled"]):
            result = function(*args, **kwargs)
        outputs = tensors(result)
        found = list(outputs)
        if sent is not None:
            pairs = [(o, plain(g, where, wide)) for o, g in zip(outputs, sent) if g is not None and o.requires_grad]
            leaves = [t for t in tensors((args, kwargs)) if t.requires_grad]
            grads = torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
            found += [g for g in grads if g is not None]
        return found

    ours, theirs = run(device, False), run("cpu", True)
    return all(torch.allclose(a.detach().cpu().double(), b.detach().double(), 1e-5, 1e-5) for a, b in zip(ours, theirs))


def old(folders: list[Path], device: str) -> None:
    """The single-operator script, on one capture or, to see what its loop alone costs, on many."""
    import ditorch  # noqa: F401

    began = time.perf_counter()
    right = sum(check_one(folder, device) for folder in folders)
    print(json.dumps({"right": right, "seconds": time.perf_counter() - began}))


# --- the comparison ------------------------------------------------------------------------------------------


def capture(folder: Path, device: str, layers: int, width: int) -> int:
    """Capture one training step; the number of operator calls."""
    import torch

    import ditorch  # noqa: F401
    import op_tools
    from benchmarks.tool_overhead import GPT

    os.environ.update(OP_TOOLS_RESULTS_DIR=str(folder), OP_TOOLS_CONSOLE="off")
    torch.manual_seed(0)
    model = GPT(width=width, layers=layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens, targets = (torch.randint(0, 256, (4, 128), device=device) for _ in range(2))
    with op_tools.OpCapture() as captured:
        model(tokens, targets).backward()
        optimizer.step()
    return sum(row["part"] == "input" for row in captured.records())


def command(*arguments: str) -> tuple[float, str]:
    """Seconds of a process of its own, and what it printed."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(arguments[:3])} failed:\n{done.stderr[-2000:]}")
    return time.perf_counter() - began, done.stdout


def one_by_one(folders: list[Path], device: str, sample: int) -> tuple[int, float]:
    chosen = folders[:: max(1, len(folders) // sample)][:sample]
    return len(chosen), sum(command(__file__, "--old", str(f), "--device", device)[0] for f in chosen)


def ours(folder: Path, options: list[str]) -> tuple[float, dict[str, Any]]:
    report = folder / "report.json"
    seconds, _ = command("op_tools/run_op_from_data.py", str(folder), "--acc_check", "--json", str(report), *options)
    return seconds, json.loads(report.read_text())


def main() -> None:
    """Capture, check both ways, print the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--sample", type=int, default=16, help="captures that the old way is timed on")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=2, help="how often the loops run")
    parser.add_argument("--json", default="", help="also write the numbers to this file")
    parser.add_argument("--old", nargs="+", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.old:
        old(options.old, options.device)
        return
    folder = Path(tempfile.mkdtemp(prefix="offline_replay_"))
    try:
        report(folder, options)
    finally:
        shutil.rmtree(folder)


def report(folder: Path, options: argparse.Namespace) -> None:
    """Everything on one set of captures."""
    import torch

    from op_tools.files.captures import find

    calls = capture(folder, options.device, options.layers, options.width)
    os.environ["OP_TOOLS_CONSOLE"] = "summary"
    folders = find(folder)
    size = sum(p.stat().st_size for p in folder.rglob("*.pth"))
    print(f"{calls} operator calls captured, {size / 1e6:.0f} MB; torch {torch.__version__}, {platform.processor()}")

    # the old way before and after ours, the loops in turns: what else the machine does falls on both
    first_count, first = one_by_one(folders, options.device, options.sample // 2)
    loops, runs, shared_runs = [], [], []
    for _ in range(options.rounds):
        _, text = command(__file__, "--device", options.device, "--old", *map(str, folders))
        loops.append(json.loads(text.splitlines()[-1]))
        runs.append(ours(folder, []))
        shared_runs.append(ours(folder, ["--jobs", str(options.jobs)]))
    second_count, second = one_by_one(folders, options.device, options.sample - options.sample // 2)
    found, found_shared = runs[0][1], shared_runs[0][1]

    base = (first_count + second_count) / (first + second)
    count = len(folders)
    loop = count / min(run["seconds"] for run in loops)
    rows = [
        (f"old, one by one ({first_count + second_count} timed)", base),
        ("old loop alone, without starting", loop),
        ("ours, without starting", count / min(report["seconds"] for _, report in runs)),
        ("ours", count / min(seconds for seconds, _ in runs)),
        (f"ours, --jobs {options.jobs}, without starting", count / min(r["seconds"] for _, r in shared_runs)),
        (f"ours, --jobs {options.jobs}", count / min(seconds for seconds, _ in shared_runs)),
    ]
    for name, rate in rows:
        print(f"{name:40s} {rate:9.2f} captures/s   x{rate / base:8.1f} one by one   x{rate / loop:6.2f} the old loop")
    print(f"old: {loops[0]['right']} of {count} allclose")
    print(f"ours: {found['counts']}, {sum(o['went_backward'] for o in found['outcomes'])} of them also backward")
    print(f"ours, --jobs {options.jobs}: {found_shared['counts']}")
    if options.json:
        Path(options.json).write_text(json.dumps({"rates": dict(rows), "counts": found["counts"], "calls": calls}))


if __name__ == "__main__":
    main()
