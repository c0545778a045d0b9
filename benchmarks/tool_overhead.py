"""Cost of each op_tools tool on one training step, as a ratio to the bare step of the same run.

The step is that of a small GPT (4 layers, width 256, 4 x 128 tokens) with SGD. Rows: the bare step, a no-op
TorchFunctionMode (the floor of anything that sees Python-level operators), an active tool that matches no
operator, and every tool on all operators. OpCapture runs in both formats and is timed while its queue has room; how
fast it drains is compared with plain files of as many bytes, written by as many threads. A remark has bytes and seconds
per step until everything is on disk. The bare step and the tools are the best of three runs each, except OpCapture and
OpAutoCompare, which run once.

    python benchmarks/tool_overhead.py --device cuda              # the console is off
    python benchmarks/tool_overhead.py --device cuda --console full
    python benchmarks/tool_overhead.py --device cpu --tiny        # launching dominates, as on a GPU
    python benchmarks/tool_overhead.py --device cuda --only OpCapture,OpCapture-store
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ONCE = {"OpCapture", "OpCapture-store", "OpAutoCompare"}  # which fill their queues first, and the disk
TOOLS = [
    *("OpObserve", "OpTimeMeasure", "OpDtypeCast", "OpOverflowCheck", "OpFallback"),
    *("OpCapture", "OpCapture-store", "OpAutoCompare"),
]


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time_, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=-1)
        q, k, v = (p.view(batch, time_, self.heads, width // self.heads).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).contiguous().view(batch, time_, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A small GPT that returns its loss."""

    def __init__(self, vocabulary: int = 256, width: int = 256, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(128, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class NoOp(TorchFunctionMode):
    """Sees every call and does nothing."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        NoOp.calls += 1
        return func(*args, **(kwargs or {}))


class Bench:
    """The model, its step, and the clock."""

    def __init__(self, device: str, steps: int, tiny: bool = False) -> None:
        self.device, self.steps = torch.device(device), steps
        torch.manual_seed(0)
        self.model = (GPT(width=32) if tiny else GPT()).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        shape = (2, 8) if tiny else (4, 128)
        self.tokens = torch.randint(0, 256, shape, device=self.device)
        self.targets = torch.randint(0, 256, shape, device=self.device)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(self.tokens, self.targets).backward()
        self.optimizer.step()

    def sync(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def timed(self, context: Callable[[], Any], steps: int) -> tuple[float, float, int, Any]:
        """Seconds per step inside the context, seconds to leave it, characters printed, the context."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            manager = context()
            with contextlib.ExitStack() as stack:
                entered = stack.enter_context(manager)
                self.step()  # the first step under a tool decides what later ones look up
                self.sync()
                began = time.perf_counter()
                for _ in range(steps):
                    self.step()
                self.sync()
                inside = time.perf_counter() - began
                leaving = time.perf_counter()
            left = time.perf_counter() - leaving
        return inside / steps, left, len(printed.getvalue()) // (steps + 1), entered


def raw_write_speed(folder: Path, nbytes: int, threads: int = 1) -> float:
    """Bytes per second of plain writes to the same disk, a file for each thread."""
    block = os.urandom(1 << 20) * 8
    count = max(1, nbytes // len(block) // threads)
    paths = [folder / f"raw-{number}.bin" for number in range(threads)]

    def write(path: Path) -> None:
        with path.open("wb", buffering=0) as handle:
            for _ in range(count):
                handle.write(block)

    writers = [threading.Thread(target=write, args=(path,)) for path in paths]
    began = time.perf_counter()
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    speed = threads * count * len(block) / (time.perf_counter() - began)
    for path in paths:
        path.unlink()
    return speed


def measure(bench: Bench, only: list[str]) -> tuple[list[dict[str, Any]], int, list[str]]:
    """One row per mode, the number of Python-level calls per step, and remarks."""
    import op_tools
    from op_tools.native import compiling

    compiling.wait()  # a first run on a machine has the compiler beside it otherwise
    for _ in range(5):
        bench.step()
    base = min(bench.timed(contextlib.nullcontext, 20)[0] for _ in range(3))
    NoOp.calls = 0
    floor = min(bench.timed(NoOp, 20)[0] for _ in range(3))
    calls = NoOp.calls // 63
    rows: list[dict[str, Any]] = [
        {"mode": "bare", "seconds": base, "printed": 0},
        {"mode": "no-op mode", "seconds": floor, "printed": 0},
    ]
    remarks = []
    if not only or "idle" in only:
        idle = min(bench.timed(lambda: op_tools.OpObserve(ops=["no.such.operator"]), 20)[0] for _ in range(3))
        rows.append({"mode": "idle (no operator matched)", "seconds": idle, "printed": 0})
    for name in TOOLS:
        if only and name not in only:
            continue
        base_name, _, kept_as = name.partition("-")
        kind = functools.partial(getattr(op_tools, base_name), **({"format": kept_as} if kept_as else {}))
        runs = [bench.timed(kind, bench.steps) for _ in range(1 if name in ONCE else 3)]
        seconds, left, printed, tool = min(runs, key=lambda run: run[0])  # as the bare step is taken
        rows.append({"mode": name, "seconds": seconds, "printed": printed, "leaving": left})
        if base_name == "OpCapture":
            whole = (seconds * (bench.steps + 1) + left) / (bench.steps + 1)
            remarks.append(_drain_remark(name, tool, bench, whole, base))
            shutil.rmtree(tool.folder, ignore_errors=True)
    for row in rows:
        row["ratio"] = row["seconds"] / base
        row["us_per_op"] = (row["seconds"] - base) / max(calls, 1) * 1e6
    return rows, calls, remarks


def _drain_remark(name: str, tool: Any, bench: Bench, whole: float, base: float) -> str:
    written, steps = tool.bytes_written, bench.steps + 1
    threads = tool.writer._wanted_threads
    raw = raw_write_speed(Path(os.environ["OP_TOOLS_RESULTS_DIR"]), min(written, 1 << 32), threads)
    speed = written / max(tool.writer.busy_seconds, 1e-9)
    room = "had room" if not tool.writer.waited else "was full at times"
    return (
        f"{name}: {written / 1e6 / steps:.0f} MB per step ({tool.bytes_captured / 1e6 / steps:.0f} MB of tensors) in "
        f"{tool.files_written} files, {whole:.3f} s per step until they are written ({whole / base:.0f} x bare); "
        f"queue of {tool.writer.max_bytes / 1e6:.0f} MB {room} (peak {tool.writer.peak_bytes / 1e6:.0f} MB); "
        f"drains {speed / 1e6:.0f} MB/s, {threads} plain files take {raw / 1e6:.0f} MB/s: {speed / raw:.0%}"
    )


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a model so small that launching dominates its step")
    parser.add_argument("--only", default="", help="comma-separated tools")
    parser.add_argument("--console", default="off", choices=["off", "summary", "full"])
    parser.add_argument("--json", default="", help="also write the rows to this file")
    options = parser.parse_args()
    os.environ["OP_TOOLS_CONSOLE"] = options.console
    if options.device == "cpu":
        os.environ["OP_TOOLS_INCLUDE_CPU"] = "1"
    elif not torch.cuda.is_available():
        import ditorch  # noqa: F401  makes "cuda" this machine's accelerator
    folder = tempfile.mkdtemp(prefix="tool_overhead_")
    os.environ["OP_TOOLS_RESULTS_DIR"] = folder
    try:
        bench = Bench(options.device, options.steps, options.tiny)
        rows, calls, remarks = measure(bench, [n for n in options.only.split(",") if n])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"torch {torch.__version__} on {_machine(options.device)}; console {options.console}; ", end="")
    print(f"{calls} Python-level calls per step")
    print(f"| {'mode':27s} | ms/step | x bare | us/call | printed/step |")
    print("| :-- | --: | --: | --: | --: |")
    for row in rows:
        print(
            f"| {row['mode']:27s} | {row['seconds'] * 1e3:7.2f} | {row['ratio']:6.2f} | {row['us_per_op']:7.1f} "
            f"| {row['printed'] / 1e3:.0f} kB |"
        )
    for remark in remarks:
        print(remark)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


def _machine(device: str) -> str:
    if device != "cpu" and torch.cuda.is_available():
        with contextlib.suppress(Exception):
            return torch.cuda.get_device_name()
    return f"{device} ({platform.processor() or platform.machine()}, {os.cpu_count()} cores)"


if __name__ == "__main__":
    main()
