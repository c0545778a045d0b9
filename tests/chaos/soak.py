"""A long training under each observing tool in turn: memory is flat, the losses are the same, nothing is lost.

python -m tests.chaos.soak --steps 20000                    # shared among the tools, on this machine's device
python -m tests.chaos.soak --model gpt2 --seconds 12        # GPT-2 (124M parameters), so long under each tool

GPUs get PyTorch's deterministic kernels: attention and embeddings add in any order otherwise, and no two runs agree.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional as F

import ditorch
import op_tools

TOOLS: Final = ("OpObserve", "OpTimeMeasure", "OpOverflowCheck", "OpTrace", "OpAutoCompare", "OpCapture")
_GPT2: Final = {"OpCapture": {"ops": ["torch.nn.functional.layer_norm"]}}  # all calls would be gigabytes a second


class Block(torch.nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attend, self.project = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.widen, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, c = x.shape
        parts = self.attend(self.before(x)).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(n, t, c))
        return x + self.narrow(F.gelu(self.widen(self.between(x)), approximate="tanh"))


class GPT(torch.nn.Module):
    """GPT-2 in its four sizes, or smaller."""

    def __init__(self, words: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.word, self.place = torch.nn.Embedding(words, width), torch.nn.Embedding(context, width)
        self.layers = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = torch.nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.word(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            y = layer(y)
        return self.last(y) @ self.word.weight.t()


def training(model: str) -> Iterator[float]:
    """Losses, step by step, without end; the same each time."""
    torch.manual_seed(0)
    torch.cuda.manual_seed(0)
    is_large = model == "gpt2"
    if is_large:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    words, context, batch = (50304, 512, 8) if is_large else (32, 8, 2)
    net = (GPT(words, context, 768, 12, 12) if is_large else GPT(words, context, 16, 1, 2)).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(1)
    while True:
        x = torch.randint(words, (batch, context + 1), generator=generator).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=is_large):
            loss = F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def under(tool: str, model: str, steps: int, seconds: float, folder: Path) -> tuple[list[float], dict[str, Any]]:
    """The losses under a tool, and what it did to memory: growth between a third of the run and its end."""
    os.environ.update(OP_TOOLS_RESULTS_DIR=str(folder), OP_TOOLS_CONSOLE="off")
    losses: list[float] = []
    host: list[int] = []
    device: list[int] = []
    began = time.monotonic()
    options = _GPT2.get(tool, {}) if model == "gpt2" else {}
    with getattr(op_tools, tool)(**options) as running:
        for loss in itertools.islice(training(model), steps or None):
            losses.append(loss)
            host.append(_resident())
            device.append(torch.cuda.memory_allocated())
            if seconds and time.monotonic() - began > seconds:
                break
        stopping = time.monotonic()
    ended = time.monotonic()
    third = len(host) // 3
    # the middle of several, since memory goes up and down with what waits
    first, last = (sorted(part)[len(part) // 2] for part in (host[third : third + 50], host[-50:]))
    first_on_device, last_on_device = max(device[third : third + 50]), max(device[-50:])
    store = running._store
    found = {
        "tool": tool,
        "steps": len(losses),
        "seconds": round(stopping - began, 1),
        "stop": round(ended - stopping, 1),
        "host MB": [first >> 20, last >> 20],
        "device MB": [round(first_on_device / 2**20, 1), round(last_on_device / 2**20, 1)],
        "dropped": store.dropped,
        "failure": store.failure,
        "findings": len([f for f in running.findings() if f.kind not in ("skipped",)]),
    }
    if tool in ("OpObserve", "OpTimeMeasure"):
        counts = [
            row[1]
            for row in store.tuples(f"SELECT step, count(*) FROM {running.table_name} GROUP BY step ORDER BY step")
        ]
        found["rows"] = sum(counts)
        found["steps with other counts"] = sum(count != counts[1] for count in counts[1:-1])
    return losses, found


def main() -> int:
    """Print a line for each tool; 1 if a loss differs or anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--model", choices=["small", "gpt2"], default="small")
    parser.add_argument("--steps", type=int, default=0, help="in all")
    parser.add_argument("--seconds", type=float, default=0.0, help="under each tool")
    parser.add_argument("--tools", default=",".join(TOOLS))
    given = parser.parse_args()
    tools = given.tools.split(",")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    print(f"{ditorch.backend.name}, torch {torch.__version__}, {sys.platform}", flush=True)
    bad = 0
    alone: list[float] = []
    for tool in tools:
        folder = Path(tempfile.mkdtemp(prefix="soak-"))
        try:
            losses, found = under(tool, given.model, given.steps // len(tools), given.seconds, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if len(alone) < len(losses):
            alone.extend(itertools.islice(training(given.model), len(alone), len(losses)))
        found["losses"] = "bit-identical" if losses == alone[: len(losses)] else "DIFFERENT"
        if found["losses"] == "DIFFERENT":
            again = list(itertools.islice(training(given.model), len(losses)))
            found["losses"] = "DIFFERENT" if again == alone[: len(losses)] else "differ without a tool as well"
        bad += found["losses"] == "DIFFERENT" or bool(
            found["dropped"] or found["failure"] or found.get("steps with other counts")
        )
        print(json.dumps(found), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
