"""Times the training step and says where it goes: ``python -m projects.rwkv_v4.bench_step --config FILE``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import ditorch

from .config import load
from .events import start_log
from .parallel import Ranks
from .trainer import Trainer

WKV_KERNELS = ("chunk_forward_sums", "walk_forward", "chunk_backward_sums", "walk_backward", "tile_", "wkv")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the training step, and name the kernels it consists of.")
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("opts", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(arguments)
    config = load(args.config, args.opts)
    ranks = Ranks.join()
    start_log(1, Path())
    trainer = Trainer(config, ranks)
    trainer.build()
    trainer._data_seconds = 0.0
    started = time.perf_counter()
    _steps(trainer, 0, 10)
    print(f"first 10 steps (compiling included): {time.perf_counter() - started:.1f} s", flush=True)
    rounds = []
    for i in range(5):
        started = time.perf_counter()
        _steps(trainer, 10 + i * args.steps, args.steps)
        rounds.append((time.perf_counter() - started) / args.steps)
    step, batch = sorted(rounds)[len(rounds) // 2], config.train.global_batch_size
    print(f"step {step * 1e3:.3f} ms, {batch / step:.1f} samples/s; rounds {[round(r * 1e3, 3) for r in rounds]}")
    result: dict[str, Any] = {"step_seconds": step, "samples_per_second": batch / step, "rounds": rounds}
    if ditorch.backend.name == "cuda":
        result |= _kernels(trainer, step)
        result["peak_memory"] = torch.cuda.max_memory_allocated()
        print(f"peak memory {result['peak_memory'] / 2**30:.2f} GiB")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    ranks.leave()
    return 0


def _steps(trainer: Trainer, first: int, count: int) -> None:
    for i in range(first, first + count):
        trainer._step_started = time.perf_counter()
        trainer.step(i)
    torch.cuda.synchronize()


def _kernels(trainer: Trainer, step: float, count: int = 5) -> dict[str, Any]:
    """Time per kernel and step; what wkv takes of it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        _steps(trainer, 10_000, count)
    rows = sorted(
        ((e.key, e.self_device_time_total / count / 1e6, e.count / count) for e in seen.key_averages()),
        key=lambda r: -r[1],
    )
    busy = sum(seconds for _, seconds, _ in rows)
    wkv = sum(seconds for name, seconds, _ in rows if any(k in name for k in WKV_KERNELS))
    print(f"kernels {busy * 1e3:.3f} ms of {step * 1e3:.3f} ms; wkv {wkv * 1e3:.3f} ms = {wkv / step:.1%} of the step")
    for name, seconds, times in rows[:30]:
        print(f"{seconds * 1e3:8.3f} ms {times:6.1f}x  {name[:110]}")
    return {
        "kernel_seconds": busy,
        "wkv_seconds": wkv,
        "wkv_share": wkv / step,
        "kernels": [{"name": n[:200], "seconds": s, "count": c} for n, s, c in rows[:60]],
    }


if __name__ == "__main__":
    sys.exit(main())
