"""What OpAutoCompare costs over a whole run: every way to spend less on it, beside the bare step of the same process.

Each way runs in a process of its own, in which it is the first. "all" is from the start of the tool to the end of its
stop, all comparisons done; "late" is the second half of the steps, up to the last comparison of them. At the end the
losses, gradients and parameters of six steps of every way are compared with those of a bare run, bit by bit.

    python benchmarks/compare_overhead.py --device cuda --steps 100
    python benchmarks/compare_overhead.py --device cuda --steps 5 --only device,threads
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.tool_overhead import Bench

# what the tool is told, and the environment
WAYS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "processes": ({}, {}),
    "threads": ({}, {"OP_AUTOCOMPARE_PROCESSES": "0"}),
    "device": ({"look": "device"}, {}),
    "once": ({"mode": "once"}, {}),
    "budget 2x": ({"budget": "2x"}, {}),
}


def one(device: str, steps: int, way: str, tiny: bool) -> dict[str, Any]:
    """Run one way in this process: seconds per step, and what the tool says."""
    import op_tools
    from op_tools.native import compiling

    if not torch.cuda.is_available():
        import ditorch  # noqa: F401  makes "cuda" the software accelerator

    compiling.wait()
    bench = Bench(device, steps, tiny)
    for _ in range(5):
        bench.step()
    bare = min(bench.timed(contextlib.nullcontext, 20)[0] for _ in range(3))
    half = steps // 2
    began = time.perf_counter()
    tool = op_tools.OpAutoCompare(**WAYS[way][0])
    tool.start()
    for number in range(steps):
        if number == steps - half:
            tool.wait()
            middle = time.perf_counter()
        bench.step()
        bench.sync()
    tool.wait()
    late = (time.perf_counter() - middle) / half
    tool.stop()
    whole = (time.perf_counter() - began) / steps
    return {"bare": bare, "late": late, "whole": whole, "says": tool.summary()[:2], "state": _state(device, way, tiny)}


def _state(device: str, way: str, tiny: bool) -> bool:
    """Whether six steps under the tool leave the same bits as six bare ones."""
    import op_tools

    found = []
    for watched in (False, True):
        bench = Bench(device, 6, tiny)
        tool = op_tools.OpAutoCompare(**WAYS[way][0]) if watched else contextlib.nullcontext()
        with tool:
            losses = [bench.model(bench.tokens, bench.targets).detach()]
            for _ in range(6):
                bench.step()
            losses.append(bench.model(bench.tokens, bench.targets).detach())
        parameters = list(bench.model.parameters())
        found.append([*losses, *[p.detach() for p in parameters], *[p.grad for p in parameters]])
    return all(torch.equal(a, b) for a, b in zip(*found))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(WAYS)}")
    parser.add_argument("--tiny", action="store_true", help="a model so small that launching dominates its step")
    parser.add_argument("--way", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = [way for way in WAYS if not options.only or way in options.only.split(",")]
    if options.steps < 2 or not chosen:
        parser.error(f"--steps must be 2 or more, --only some of {', '.join(WAYS)}")
    if options.way:
        print(json.dumps(one(options.device, options.steps, options.way, options.tiny)))
        return
    gpu = torch.cuda.get_device_name() if options.device == "cuda" and torch.cuda.is_available() else options.device
    print(f"{gpu}, torch {torch.__version__}, Python {platform.python_version()}, {options.steps} steps")
    print(f"{'':12s} {'bare ms':>8s} {'all x':>8s} {'late x':>8s}  bits")
    for way in chosen:
        with tempfile.TemporaryDirectory() as folder:
            setting = {**os.environ, **WAYS[way][1], "OP_TOOLS_CONSOLE": "off", "OP_TOOLS_RESULTS_DIR": folder}
            words = [sys.executable, __file__, "--device", options.device, "--steps", str(options.steps), "--way", way]
            done = subprocess.run(
                words + ["--tiny"] * options.tiny, env=setting, capture_output=True, text=True, check=False
            )
        if done.returncode:
            print(f"{way:12s} failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        bits = "the same" if row["state"] else "OTHER"
        bare, whole, late = row["bare"], row["whole"], row["late"]
        print(f"{way:12s} {bare * 1e3:8.2f} {whole / bare:8.1f} {late / bare:8.1f}  {bits}; {'; '.join(row['says'])}")


if __name__ == "__main__":
    main()
