"""A few training steps under a tool of op_tools: ``python -m projects.rwkv_v4.watched --config configs/tiny.py``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import ditorch
import op_tools

from .config import load
from .events import start_log
from .parallel import Ranks
from .trainer import Trainer

TOOLS = ("OpAutoCompare", "OpObserve", "OpTimeMeasure", "OpCapture", "OpFallback", "OpDtypeCast", "OpOverflowCheck")


def main(arguments: list[str] | None = None) -> int:
    """Run and report; the exit status is 1 if the tool found a difference."""
    parser = argparse.ArgumentParser(description="Train for a few steps under a tool of op_tools.")
    parser.add_argument("--config", required=True)
    parser.add_argument("--tool", choices=TOOLS, default="OpAutoCompare")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the report to this file too")
    parser.add_argument("opts", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(arguments)
    config = load(args.config, ["train.compile=false", *args.opts])
    ranks = Ranks.join()
    start_log(1, Path())
    trainer = Trainer(config, ranks)
    trainer.build()
    trainer._data_seconds = 0.0
    tool = getattr(op_tools, args.tool)()
    started = time.perf_counter()
    losses = []
    with tool:
        for i in range(args.steps):
            trainer._step_started = time.perf_counter()
            losses.append(float(trainer.step(i)))
            tool.step()
    seconds = time.perf_counter() - started
    findings = tool.findings()
    wrong = [f for f in findings if f.kind == "difference"]
    lines = [
        f"{args.tool} over {args.steps} steps of {args.config} on {ditorch.backend.name}: {seconds:.1f} s, "
        f"losses {', '.join(f'{x:.4f}' for x in losses)}",
        *tool.summary(),
        f"{len(wrong)} differences",
        *(f"{f.kind}: {f.op} at {f.location}: {f.message}" for f in findings[:200]),
    ]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    ranks.leave()
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
