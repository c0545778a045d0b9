"""Short trainings under OpTrace, or under PyTorch's DebugMode, for `benchmarks.trace_truth`."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OP_TOOLS_CONSOLE", "off")

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.trace_models import VOCAB, batch
from op_tools.tools.trace import OpTrace
from op_tools.trace.diff import load
from op_tools.trace.graph import Graph


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


class Tracing(OpTrace):
    """Also notes which operator a planted fault struck first."""

    name = "OpTraceOfBenchmark"
    planted: Any = None
    culprit = -1

    def _look(self) -> None:
        if self.planted is not None and self.culprit < 0 and self.planted.hits and self._recorder is not None:
            self.culprit = self._recorder.operators - 1

    def after(self, call: Any) -> None:
        struck = self.planted is not None and self.culprit < 0 and self.planted.hits
        super().after(call)
        if struck:
            self._look()

    def after_backward(self, call: Any, grad_outputs: Any, grad_inputs: Any) -> None:
        struck = self.planted is not None and self.culprit < 0 and self.planted.hits
        super().after_backward(call, grad_outputs, grad_inputs)
        if struck:
            self._look()


def one_step(run: Any, x: Tensor, y: Tensor, optimizer: Any, device: str, low: bool) -> None:
    with torch.autocast(device, torch.bfloat16, enabled=low):
        out = run(x).float()
    loss = F.cross_entropy(out.view(-1, VOCAB), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def prepared(
    kind: str, model: nn.Module, *, device: str = "cuda", low: bool = False, steps: int = 2, layout: int = 0,
    compiled: str = "", fused: bool | None = None, size: int = 4,
) -> Any:  # fmt: skip
    """A function that trains a model for some steps."""
    model = model.to(device)
    if layout:
        other_layout(model)
    x, y = batch(kind, device, size)
    if layout and kind == "ResNet":
        x = x.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=None if fused else True, fused=fused)
    run: Any = torch.compile(model, backend=compiled) if compiled else model
    os.environ["OP_TOOLS_INCLUDE_CPU"] = "1" if device == "cpu" else "0"
    kind_of = "cuda" if device != "cpu" else "cpu"

    def steps_of_it() -> None:
        for _ in range(steps):
            one_step(run, x, y, optimizer, kind_of, low)

    return steps_of_it


def train(folder: Path, kind: str, model: nn.Module, planted: Any = None, **options: Any) -> tuple[Graph, Tracing]:
    """Train a model for some steps under OpTrace."""
    steps = prepared(kind, model, **options)
    shutil.rmtree(folder, ignore_errors=True)
    tool = Tracing(to=folder)
    tool.planted = planted
    with tool:
        steps()
    return Graph(load(folder)), tool


def debug_logs(steps: Any) -> Any:
    """What PyTorch's DebugMode logs of the same steps, with its hashes; an error where it cannot."""
    try:
        from torch.utils._debug_mode import DebugMode

        with DebugMode() as mode, DebugMode.log_tensor_hashes(hash_fn="norm"):
            steps()
        return mode.logs
    except Exception as error:
        return error


def debug_verdict(one: Any, two: Any) -> str:
    """What DebugMode's own comparison says of two logs."""
    for logs in (one, two):
        if isinstance(logs, Exception):
            return f"fails: {type(logs).__name__}"
    from torch.utils._debug_mode import DebugMode

    try:
        found = DebugMode.check_hash_mismatches(one, two)
    except ValueError as error:
        return "raises: " + ("lengths" if "lengths" in str(error) else "operators")
    return f"100 %, {len(found)} of {len(one)} differ"


def other_layout(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
        elif parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
