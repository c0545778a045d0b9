"""Every tool on compiled code: the training is bit for bit what it is without the tool, and compiles the same graphs.

    python -m tests.backend.op_tools.compiled_matrix [--device cuda] [--backends eager,aot_eager,inductor] [--cases ...]

prints a line for each combination and fails if one differs. `test_compiled.py` tries a sample of it in every run of
the tests. On soft Inductor is left out, since it does not know the device; `--device cpu` tries it there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import op_tools
from op_tools.call.devices import accelerator_type
from op_tools.tools import all_tools

CHANGING = ("OpFallback", "OpDtypeCast")  # what runs outside compiled code is not the same under these
STARTS = ("before", "after")  # the first compilation


class Doubled(torch.autograd.Function):
    """A custom function: its backward is Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 + (x - x)


def _near_first(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score - (query - key).abs() * 0.1


class Block(nn.Module):
    """A block of a small Llama."""

    def __init__(self, width: int, heads: int, flexible: bool) -> None:
        super().__init__()
        self.heads, self.flexible = heads, flexible
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = nn.Linear(width, 64), nn.Linear(width, 64), nn.Linear(64, width)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.flexible:
            out: Tensor = flex_attention(q, k, v, score_mod=_near_first)
            return out
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(*split).transpose(1, 2).reshape(batch, length, width))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Embedding, two blocks, and the loss; `between` says what happens between the blocks."""

    def __init__(self, between: str = "", width: int = 32, heads: int = 2, words: int = 64) -> None:
        super().__init__()
        self.between = between
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width, heads, "flex" in between) for _ in range(2)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embedding(tokens))
        if "break" in self.between:
            torch._dynamo.graph_break()
        if "custom" in self.between:
            x = Doubled.apply(x)  # type: ignore[no-untyped-call]
        if "hook" in self.between and x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
        if "dropout" in self.between:
            x = F.dropout(x, 0.1)
        if "glue" in self.between:
            x = uncompiled(self.blocks[1], x)
        elif "checkpoint" in self.between:
            x = checkpoint(self.blocks[1], x, use_reentrant=False)
        else:
            x = self.blocks[1](x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


@torch.compiler.disable
def uncompiled(block: nn.Module, x: Tensor) -> Tensor:
    """What Dynamo leaves to Python, recomputed in the backward pass."""
    y: Tensor = checkpoint(block, Doubled.apply(x), use_reentrant=False)  # type: ignore[no-untyped-call]
    return y


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to use torch.compile in a training."""

    between: str = ""
    fullgraph: bool = False
    dynamic: bool = False
    autocast: bool = True
    part: str = "model"  # what is compiled: the model, a function around it, the optimizer's step, or the whole step
    eager_around: bool = False  # operators outside compiled code, before and after it


CASES = {
    "fullgraph": Case(fullgraph=True),
    "graph_break": Case("break dropout"),
    "eager_around": Case("break", eager_around=True),
    "function": Case("dropout", fullgraph=True, part="function"),
    "float32": Case("break", autocast=False),
    "dynamic": Case("break", dynamic=True),
    "custom_function": Case("custom break"),
    "hook": Case("hook"),
    "checkpoint": Case("checkpoint"),
    "glue": Case("glue"),
    "flex_attention": Case("flex break"),
    "optimizer": Case(part="optimizer"),
    "whole_step": Case("break", part="whole"),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a training came to, and what Dynamo did for it."""

    losses: tuple[float, ...]
    parameters: str
    frames: tuple[int, int]
    graph_breaks: int
    graphs: int


def backends() -> tuple[str, ...]:
    """Backends that know the accelerator of this process."""
    return ("eager", "aot_eager", "inductor") if accelerator_type() in ("cuda", "cpu") else ("eager", "aot_eager")


def train(case: Case, device: str, backend: str, tool: Any = None, start: str = "before", steps: int = 4) -> Outcome:
    """Train a small Llama for some steps; the tool is started before the first one or after it.

    A tool that changes what runs outside compiled code is given none of it to change.
    """
    torch._dynamo.reset_code_caches()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = Llama(case.between).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    run, update, whole = _compiled(case, backend, model, optimizer, device)
    losses = []
    changes = tool is not None and type(tool).__name__ in CHANGING
    with contextlib.ExitStack() as watched:
        for step in range(steps):
            if tool is not None and not changes and step == (start == "after"):
                watched.enter_context(tool)
            tokens = torch.arange(2 * (16 + 4 * (step % 3) * case.dynamic), device=device).reshape(2, -1) * 7 % 64
            around = tool if changes and (step or start == "before") else contextlib.nullcontext()
            if whole is not None:
                with around:
                    losses.append(whole(tokens).item())
                continue
            with around, _autocast(case, device):
                if case.eager_around:
                    tokens = (tokens + 1) % 64
                loss = run(tokens)
                if case.eager_around:
                    loss = loss * 2
                loss.backward()
            with around if case.part == "optimizer" else contextlib.nullcontext():
                update()
            optimizer.zero_grad()
            losses.append(loss.item())
    counters = torch._dynamo.utils.counters
    bits = hashlib.sha256()
    for parameter in model.parameters():
        bits.update(parameter.detach().cpu().numpy().tobytes())
    return Outcome(
        tuple(losses),
        bits.hexdigest()[:16],
        (counters["frames"]["total"], counters["frames"]["ok"]),
        sum(counters["graph_break"].values()),
        counters["stats"]["unique_graphs"],
    )


def _compiled(
    case: Case, backend: str, model: Llama, optimizer: torch.optim.Optimizer, device: str
) -> tuple[Callable[[Tensor], Tensor], Callable[[], Any], Callable[[Tensor], Tensor] | None]:
    """What computes the loss, what updates the parameters, and what does both and the backward pass, if asked for."""
    options: dict[str, Any] = {"backend": backend, "fullgraph": case.fullgraph}
    if case.dynamic:
        options["dynamic"] = True

    def loss_of(tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens) + 0.0
        return loss

    def step(tokens: Tensor) -> Tensor:
        with _autocast(case, device):
            loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def update() -> None:
        optimizer.step()

    if case.part == "whole":
        return loss_of, update, torch.compile(step, **options)
    if case.part == "function":
        return torch.compile(loss_of, **options), update, None
    if case.part == "optimizer":
        return torch.compile(model, **options), torch.compile(update, **options), None
    return torch.compile(model, **options), update, None


def _autocast(case: Case, device: str) -> Any:
    return torch.autocast(device, torch.bfloat16, enabled=case.autocast)


def combinations(tools: list[str], cases: list[str], with_backends: list[str]) -> Iterator[tuple[str, str, str, str]]:
    """All of them, those that share an expected outcome together."""
    for backend in with_backends:
        for case in cases:
            for tool in tools:
                for start in STARTS:
                    yield backend, case, tool, start


def main() -> int:
    """Try all combinations, or those that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backends")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--tools", default=",".join(all_tools()))
    args = parser.parse_args()
    device = args.device
    if device == "cpu":
        os.environ["OP_TOOLS_INCLUDE_CPU"] = "1"
    else:
        importlib.import_module("ditorch")
    known = args.backends.split(",") if args.backends else list(backends())
    print(f"torch {torch.__version__}, {accelerator_type()}, backends {', '.join(known)}", flush=True)
    expected: dict[tuple[str, str], Outcome | str] = {}
    bad = 0
    for backend, name, tool, start in combinations(args.tools.split(","), args.cases.split(","), known):
        case = CASES[name]
        if case.eager_around and tool in CHANGING:
            continue  # it is there to change what is around
        if (backend, name) not in expected:
            _tried(case, device, backend)  # what PyTorch does only once in a process
            expected[backend, name] = _tried(case, device, backend)
            print(f"{backend} {name}: {expected[backend, name]}", flush=True)
        if isinstance(expected[backend, name], str):
            continue  # fails without a tool, too
        began = time.perf_counter()
        made = getattr(op_tools, tool)()
        found = _tried(case, device, backend, made, start)
        same = found == expected[backend, name]
        bad += not same
        findings = [f"{f.kind} {f.op} {f.message}"[:200] for f in made.findings() if f.kind != "skipped"]
        verdict = "same" if same else f"DIFFERS: {found}"
        if tool == "OpAutoCompare":
            compared = sum(row["op"] == "torch.compile" for row in made.records())
            findings += [f"{compared} results of compiled code compared"]
            findings += [line.strip() for line in made.summary() if line.strip().startswith("torch.compile:")]
        seconds = time.perf_counter() - began
        print(f"  {tool} {start}: {verdict}; {made.compiled}; {seconds:.1f} s {findings or ''}", flush=True)
    print(f"{bad} combinations differ", flush=True)
    return int(bad > 0)


def _tried(case: Case, device: str, backend: str, tool: Any = None, start: str = "before") -> Outcome | str:
    try:
        return train(case, device, backend, tool, start)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


if __name__ == "__main__":
    sys.exit(main())
