"""A long training under each observing tool in turn: memory is flat, the losses are the same, nothing is lost.

python -m tests.chaos.soak --steps 20000                    # shared among the tools, on this machine's device
python -m tests.chaos.soak --model gpt2 --seconds 25        # GPT-2 (124M parameters), so long under each tool
python -m tests.chaos.soak --model tiny --seconds 5         # the same training, small

The losses without a tool come first. All runs are in one process: what a tool leaves behind is seen by the next. Every
result is added to `--results` as a line of JSON as soon as it is there. After `--limit` seconds the process ends
wherever it is, and says so in that file. GPUs get PyTorch's deterministic kernels: attention and embeddings add in any
order otherwise, and no two runs agree. Captures are removed while the run goes on: they would fill the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional as F

import ditorch
import op_tools
from op_tools.trace import format as trace_format
from op_tools.watch.intercept import ids

TOOLS: Final = ("OpObserve", "OpTimeMeasure", "OpOverflowCheck", "OpTrace", "OpAutoCompare", "OpCapture")
_CAPTURED: Final = {"OpCapture": {"ops": ["torch.nn.functional.layer_norm"]}}  # all calls would be gigabytes a second
_LARGE: Final = ("gpt2", "tiny")  # with autocast and deterministic kernels
_SIZES: Final = {  # words, context, batch, width, layers, heads
    "gpt2": (50304, 512, 8, 768, 12, 12),
    "tiny": (512, 32, 2, 32, 2, 2),
    "small": (32, 8, 2, 16, 1, 2),
}
_WINDOW: Final = 50  # steps over which memory is looked at
_KEPT: Final = 2.0  # seconds that a capture stays on the disk
_KEPT_EMPTY: Final = 20.0  # seconds that its folder does after that: gradients of the call may follow


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
    words, context, batch, *size = _SIZES[model]
    net = GPT(words, context, *size).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(1)
    while True:
        x = torch.randint(words, (batch, context + 1), generator=generator).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=model in _LARGE):
            loss = F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def make_deterministic(model: str) -> str:
    """Ask for kernels that repeat their bits, and see that two runs do; in words, what was needed."""
    if model not in _LARGE:
        return "as it is"
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        torch.use_deterministic_algorithms(True)  # asked for with `warn_only`, attention's backward does not repeat
        first = list(itertools.islice(training(model), 3))
    except RuntimeError as error:
        print(f"without deterministic kernels for all: {str(error).splitlines()[0]}", flush=True)
    else:
        if first == list(itertools.islice(training(model), 3)):
            return "deterministic kernels"
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)
    return "deterministic kernels where there are, attention by products"


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Course:
    """What is noted of a run, step by step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.first_ids: list[int] = []  # of the calls of each step
        self._host, self._device = array("q"), array("q")

    def follow(self, model: str, steps: int, seconds: float) -> None:
        """Train for so many steps or seconds, whatever is over first; 0 stands for no limit."""
        began = time.monotonic()
        losses = training(model)
        while not steps or len(self.losses) < steps:
            self.first_ids.append(next(ids))
            self.losses.append(next(losses))
            self._host.append(_resident())
            self._device.append(torch.cuda.memory_allocated())
            if seconds and time.monotonic() - began > seconds:
                break

    def memory(self) -> dict[str, list[float]]:
        """MB on host and device after a third of the run and at its end, and the most of all."""
        third = len(self._host) // 3
        width = max(1, min(_WINDOW, third))
        found = {}
        for name, noted in (("host MB", self._host), ("device MB", self._device)):
            # the middle of several, since memory goes up and down with what waits
            parts = [sorted(part)[len(part) // 2] for part in (noted[third : third + width], noted[-width:])]
            found[name] = [round(value / 2**20, 1) for value in (*parts, max(noted))]
        return found


class Sweeper:
    """Removes captures that were written some seconds ago, counts them, and removes the folders that they leave."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._over = folder, threading.Event()
        self.files = self.bytes = 0
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._over.wait(0.5):
            self._sweep(time.time())

    def _sweep(self, now: float) -> None:
        for folder, _, names in os.walk(self._folder / "op_capture_results", topdown=False):
            for name in names:
                if name.endswith((".pth", ".json")):
                    self._remove(Path(folder, name), now - _KEPT)
            # a folder that stays is listed in every sweep: with their number, the memory for that would grow
            with contextlib.suppress(OSError):  # not empty
                if os.stat(folder).st_mtime < now - _KEPT_EMPTY:
                    os.rmdir(folder)

    def _remove(self, path: Path, before: float) -> None:
        found = path.stat()
        if found.st_mtime < before:
            path.unlink()
            if path.suffix == ".pth":
                self.files += 1
                self.bytes += found.st_size

    def end(self) -> None:
        """Remove the rest."""
        self._over.set()
        self._thread.join()
        self._sweep(float("inf"))


def _by_step(tool: str, running: Any, folder: Path, first_ids: list[int]) -> Counter[int]:
    """How many records there are of each step."""
    store, found = running._store, Counter[int]()
    if tool == "OpTrace":
        for path in folder.rglob(f"*{trace_format.SUFFIX}"):
            found.update(map(int, trace_format.read(path)["operators"]["step"]))
    elif tool == "OpOverflowCheck":
        for (steps,) in store.tuples(f"SELECT steps FROM {running.table_name}"):
            found.update(array("q", steps))
    elif tool == "OpCapture":
        for call_id, number in store.tuples(f"SELECT call_id, count(*) FROM {running.table_name} GROUP BY call_id"):
            found[bisect_right(first_ids, call_id)] += number
    else:
        found.update(dict(store.tuples(f"SELECT step, count(*) FROM {running.table_name} GROUP BY step")))
    return found


def under(tool: str, model: str, steps: int, seconds: float, folder: Path) -> tuple[list[float], dict[str, Any]]:
    """The losses under a tool, and what it did to memory."""
    os.environ.update(OP_TOOLS_RESULTS_DIR=str(folder), OP_TOOLS_CONSOLE="off")
    began = time.monotonic()
    course = Course()
    sweeper = Sweeper(folder) if tool == "OpCapture" else None
    with getattr(op_tools, tool)(**(_CAPTURED.get(tool, {}) if model in _LARGE else {})) as running:
        course.follow(model, steps, seconds)
        stopping = time.monotonic()
    ended = time.monotonic()
    counts = [count for _, count in sorted(_by_step(tool, running, folder, course.first_ids).items())]
    inner = counts[1 : len(course.losses) - 1]  # of the first and the last step, parts are not the training's
    found = {
        "tool": tool,
        "steps": len(course.losses),
        "seconds": round(stopping - began, 1),
        "stop": round(ended - stopping, 1),
        **course.memory(),
        "records": sum(counts),
        "steps with other counts": sum(count != Counter(inner).most_common(1)[0][0] for count in inner),
        "steps without records": len(course.losses) - len(counts[: len(course.losses)]),
        "dropped": running._store.dropped,
        "failure": running._store.failure,
        "findings": Counter(finding.kind for finding in running.findings()),
    }
    if sweeper is not None:
        sweeper.end()
        found["files"], found["files missing"] = sweeper.files, sum(counts) - sweeper.files
        found["GB"] = round(sweeper.bytes / 1e9, 2)
    return course.losses, found


def _end_after(seconds: float, results: Path | None) -> None:
    def end() -> None:
        _tell(results, {"ended": f"by the limit of {seconds:.0f} s, before everything was done"})
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _tell(results: Path | None, found: dict[str, Any]) -> None:
    line = json.dumps(found)
    print(line, flush=True)
    if results is not None:
        with results.open("a") as file:
            file.write(line + "\n")


def main() -> int:
    """Print a line for each tool; 1 if a loss differs or anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--model", choices=_SIZES, default="small")
    parser.add_argument("--steps", type=int, default=0, help="in all")
    parser.add_argument("--seconds", type=float, default=0.0, help="under each tool")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--results", type=Path, help="a file to which each result is added")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds after which the process ends in any case")
    given = parser.parse_args()
    if not given.steps and not given.seconds:
        parser.error("say how long: --steps or --seconds")
    tools = given.tools.split(",")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    if given.limit:
        _end_after(given.limit, given.results)
    began = time.monotonic()
    steps = -(-given.steps // len(tools))
    about = {"device": ditorch.backend.name, "torch": torch.__version__, "model": given.model}
    _tell(given.results, {**about, "kernels": make_deterministic(given.model)})
    bare = Course()
    bare.follow(given.model, steps, given.seconds)
    alone, bad = bare.losses, 0
    _tell(given.results, {"tool": "none", "steps": len(alone), "loss": alone[-1], **bare.memory()})
    for tool in tools:
        folder = Path(tempfile.mkdtemp(prefix="soak-"))
        try:
            losses, found = under(tool, given.model, steps, given.seconds, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        common = min(len(losses), len(alone))
        found["losses"] = "bit-identical" if losses[:common] == alone[:common] else "DIFFERENT"
        if found["losses"] == "DIFFERENT":
            again = list(itertools.islice(training(given.model), common))
            found["losses"] = "DIFFERENT" if again == alone[:common] else "differ without a tool as well"
        bad += found["losses"] == "DIFFERENT" or any(found.get(key) for key in _BAD)
        _tell(given.results, found)
    _tell(given.results, {"ended": "by itself", "seconds": round(time.monotonic() - began, 1), "bad": bad})
    return int(bad > 0)


_BAD: Final = ("dropped", "failure", "steps with other counts", "steps without records", "files missing")


if __name__ == "__main__":
    sys.exit(main())
