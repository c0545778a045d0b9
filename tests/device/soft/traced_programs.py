"""Checks of collective_worker.py under OpTrace: programs that differ are told apart, under DDP, FSDP2 and TP."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import op_tools
from op_tools.tools import trace
from op_tools.trace import record
from op_tools.trace.diff import Diff, compare
from tests.backend.op_tools.trace_net import Net

Wrap = Callable[[nn.Sequential], nn.Module]


def alone(model: nn.Sequential) -> nn.Module:
    return model


def replicated(model: nn.Sequential) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def sharded(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    mesh = init_device_mesh("soft", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def split(model: nn.Sequential) -> nn.Module:
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("soft", (2,))
    return parallelize_module(model, mesh, {"1": ColwiseParallel(), "2": RowwiseParallel()})


def traced(wrap: Wrap, device: torch.device, change: str = "") -> Path:
    """Two steps of a training; `change` says what is different."""
    folder = Path(sys.argv[1], f"program-{wrap.__name__}-{change}")
    torch.manual_seed(0)
    net = Net(change)
    if change == "weight":
        with torch.no_grad():
            net.a.weight[:, 0] += 0.01
    model = nn.Sequential(net, nn.Linear(16, 8), nn.Linear(8, 4)).to(device)
    run = wrap(model)
    plain = [p for p in run.parameters() if type(p) is nn.Parameter]  # foreach takes no mixture with DTensors
    spread = [p for p in run.parameters() if type(p) is not nn.Parameter]
    groups = [{"params": group} for group in (plain, spread) if group]
    optimizer = torch.optim.AdamW(groups, 1e-2 if change == "rate" else 1e-3, foreach=True)
    torch.manual_seed(1)
    x = torch.randn(32, 16).to(device)
    if wrap in (replicated, sharded):
        x = x.chunk(2)[dist.get_rank()]
    with op_tools.OpTrace(to=folder) as tool:
        for _ in range(2):
            run(x).square().mean().backward()
            if change == "gradient":
                net.b.weight.grad.mul_(2)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
    assert not tool.findings(), tool.findings()
    return folder


def traced_alone(device: torch.device) -> Path:
    """The same on one rank, as if there were no others."""
    worlds = trace.writer_world, record.writer_world
    trace.writer_world = record.writer_world = lambda: (0, 1)  # type: ignore[assignment]
    try:
        return traced(alone, device, f"of {dist.get_rank()}")
    finally:
        trace.writer_world, record.writer_world = worlds  # type: ignore[assignment]


def said(diff: Diff) -> str:
    if diff.parted is None or diff.divergence is None:
        return ", ".join(diff.given())
    return f"{diff.alignment.first.names[diff.parted[0]].rpartition('.')[2]}: {diff.divergence.reason}"


def programs(wrap: Wrap, device: torch.device, **expected: str) -> None:
    good, again = traced(wrap, device), traced(wrap, device, "again")
    bad = {change: traced(wrap, device, change) for change in expected}
    one = traced_alone(device)
    dist.barrier()
    for first in (good, one):
        found = compare(first, again)
        assert not said(found), (first.name, list(found.lines()))
        for change, words in expected.items():
            told = said(compare(first, bad[change]))
            assert all(word in told for word in words.split("|")), (first.name, change, told)
    dist.barrier()


EXPECTED: dict[str, str] = {
    "inserted": "view: they get other tensors",
    "exchanged": "mul: they get other tensors|chunk",
    "transposed": "reshape: they get other tensors",
    "gradient": "_foreach_lerp_: |b.weight.grad",
    "weight": "model.0.a.weight",
}


def changes_are_named_under_ddp(rank: int, device: torch.device) -> None:
    programs(replicated, device, **EXPECTED)


def changes_are_named_under_fsdp2(rank: int, device: torch.device) -> None:
    programs(sharded, device, **EXPECTED, buffer="model.0.scale")  # twice as large, on two ranks


def changes_are_named_under_tensor_parallel(rank: int, device: torch.device) -> None:
    programs(split, device, **EXPECTED)


CHECKS = (changes_are_named_under_ddp, changes_are_named_under_fsdp2, changes_are_named_under_tensor_parallel)
