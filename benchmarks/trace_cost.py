"""What OpTrace costs: GPT-2 124M (8 x 512 tokens, bfloat16 autocast, fused AdamW), all-in over some steps.

    python -m benchmarks.trace_cost --steps 10            # on the accelerator
    python -m benchmarks.trace_cost --tiny --steps 2      # a smoke test

All-in is from the start of the tool to the end of its stop, the first step included, divided by as many bare steps.
Each form runs twice: the second time the kernel is compiled and every kind of call has been seen.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("OP_TOOLS_CONSOLE", "off")

import torch

from benchmarks.real_models import GPT2, _trained, gpt2


def plain(tiny: bool) -> Any:
    """GPT-2 of this project: what transformers writes as eight operators is one here."""
    layers, width, heads, vocabulary, length, batch = (2, 64, 2, 512, 32, 2) if tiny else (12, 768, 12, 50257, 512, 8)
    tokens = torch.randint(vocabulary, (batch, length + 1)).cuda()
    model = GPT2(layers, width, heads, vocabulary, length).cuda()
    return _trained(model, lambda: model(tokens[:, :-1], tokens[:, 1:]))


def _wait() -> None:
    torch.cuda.synchronize()


def _timed(step: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        _wait()
        found.append(time.perf_counter() - began)
    return found


def measured(step: Any, steps: int, prints: bool, profile: bool = False) -> str:
    """One line: all-in, a later step, what was recorded."""
    import op_tools

    bare = sum(_timed(step, steps)) / steps
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        tool = op_tools.OpTrace(to=folder, prints=prints)
        tool.start()
        each = _timed(step, steps)
        if profile:
            watch = cProfile.Profile()
            watch.enable()
            _timed(step, 3)
            watch.disable()
            pstats.Stats(watch, stream=sys.stderr).sort_stats("tottime").print_stats(45)
        tool.stop()
        _wait()
        total = time.perf_counter() - began
        told = tool.summary()[0]
    later = statistics.median(each[1:] or each)
    return (
        f"prints {'on' if prints else 'off'}: bare {bare * 1e3:.1f} ms, all-in {total / (bare * steps):.2f} x, "
        f"a later step {later / bare:.2f} x, the first {each[0] * 1e3:.0f} ms, "
        f"stop {(total - sum(each)) * 1e3:.0f} ms; {told}"
    )


def main() -> None:
    """Measure without and with fingerprints, twice each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--plain", action="store_true", help="this project's GPT-2 instead of the one of transformers")
    parser.add_argument("--profile", action="store_true", help="where the time of three later steps goes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        import ditorch  # noqa: F401
    torch.manual_seed(0)
    step = (plain if options.plain else gpt2)(options.tiny)
    _timed(step, 3)
    for prints in (False, True, False, True):
        print(measured(step, options.steps, prints), flush=True)
    if options.profile:
        for prints in (False, True):
            print(measured(step, options.steps, prints, profile=True), flush=True)


if __name__ == "__main__":
    main()
