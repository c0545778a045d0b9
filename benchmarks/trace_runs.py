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
from op_tools.native import compiling
from op_tools.tools.trace import OpTrace
from op_tools.trace.diff import load
from op_tools.trace.format import BACKWARD
from op_tools.trace.graph import Graph
from op_tools.watch.intercept import INTERCEPTOR
from op_tools.watch.sums import _Place


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


class Struck:
    """Notes which operator a planted fault struck first, without a part in the recording.

    A forward call is the next row of the trace. A backward is the next one of the call that made the running node.
    """

    def __init__(self, tool: OpTrace, planted: Any) -> None:
        self._tool, self._strikes = tool, planted.strikes
        self._at, self._made = -1, None
        planted.strikes = self._noted

    def _noted(self) -> int | None:
        number: int | None = self._strikes()
        if number is not None and self._at < 0:
            recorder = self._tool._recorder
            self._at = 0 if recorder is None else recorder.book.operators
            node = torch._C._current_autograd_node()
            if node is not None:
                self._made = next((m for m in map(_call_of(node), _threads()) if m is not None), None)
        return number

    def operator(self, graph: Graph) -> int:
        """The number of the operator in the trace, -1 where it is not known."""
        if self._made is None:
            return self._at
        table, texts = graph.operators, graph.trace.texts
        for row in range(self._at, graph.count):
            line = texts[int(table["location"][row])]
            if table["phase"][row] == BACKWARD and (graph.names[row], line) == (self._made.op, self._made.location):
                return row
        return -1


def _threads() -> list[int]:
    sums = INTERCEPTOR.sums
    return [*sums._by_number, *([] if sums._library is None else [_main_thread[0]])]


_main_thread: list[int] = []


def _call_of(node: Any) -> Any:
    return lambda thread: INTERCEPTOR.sums._call_at(_Place(thread, node._sequence_nr()))


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


def train(
    folder: Path, kind: str, model: nn.Module, planted: Any = None, **options: Any
) -> tuple[Graph, Struck | None]:
    """Train a model for some steps under OpTrace."""
    steps = prepared(kind, model, **options)
    shutil.rmtree(folder, ignore_errors=True)
    compiling.wait()
    tool = OpTrace(to=folder)
    struck = None if planted is None else Struck(tool, planted)
    with tool:
        if INTERCEPTOR.sums._library is not None:
            _main_thread[:] = [INTERCEPTOR.sums._library.op_tools_sums_thread()]
        steps()
    failures = [f for f in tool.findings() if f.kind != "skipped"]
    assert not failures, failures
    return Graph(load(folder)), struck


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
