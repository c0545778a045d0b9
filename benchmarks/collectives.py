"""Collectives under OpAutoCompare: alarms, what was not compared, and what a comparison costs.

torchrun --standalone --nproc-per-node=2 -m benchmarks.collectives [nccl|gloo]

On one GPU: one rank with nccl, or two with gloo, which takes CUDA tensors for all_reduce and broadcast.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ditorch  # noqa: F401
import op_tools

Program = Callable[[], Any]


def ddp(**options: Any) -> Program:
    def train() -> None:
        net = DistributedDataParallel(nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 8)).cuda(), **options)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            net(torch.randn(16, 256, device="cuda")).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()

    return train


def fully_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 8)).cuda()
    fully_shard(net)
    for _ in range(3):
        net(torch.randn(16, 256, device="cuda")).square().mean().backward()


def plain() -> None:
    works = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32):
        for count in (7, 1_000_003):
            for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
                x = (10 * torch.randn(count, device="cuda")).to(dtype)
                works.append((dist.all_reduce(x, operation, async_op=True), x))
            dist.broadcast(x.clone(), 0)
    for work, x in works:
        work.wait()
        x.zero_()  # at once: the copy must have been taken before


def cost(count: int, calls: int) -> list[str]:
    x, seconds = torch.zeros(count, device="cuda"), []
    for tool in (contextlib.nullcontext(), op_tools.OpAutoCompare()):
        with tool:
            dist.all_reduce(x)
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(calls):
                dist.all_reduce(x)
            torch.cuda.synchronize()
            seconds.append((time.perf_counter() - started) / calls)
    return [f"{1e6 * s:,.0f} us" for s in seconds]


def main() -> None:
    backend = sys.argv[1] if len(sys.argv) > 1 else "nccl"
    os.environ.update(OP_TOOLS_CONSOLE="off", OP_TOOLS_RESULTS_DIR=tempfile.mkdtemp())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    programs = {"plain": plain, "ddp": ddp(), "ddp, views": ddp(gradient_as_bucket_view=True)}
    if backend == "nccl":
        programs["fully_sharded"] = fully_sharded
    for name, program in programs.items():
        with op_tools.OpAutoCompare() as tool:
            program()
        rows = Counter(row["verdict"] for row in tool.records() if "distributed" in row["op"])
        missed = {f"{op[0]}: {why}" for op, why in tool._teller.coverage.missed if "distributed." in op[0]}
        wrong = [blame.reason for blame in tool.blames if "distributed" in blame.op]
        print(f"rank {rank} {name}: {dict(rows)}, wrong: {wrong}, not compared: {sorted(missed)}", flush=True)
    for count, calls in ((1_000, 100), (1 << 22, 10)):
        found = cost(count, calls)
        if rank == 0:
            print(f"all_reduce of {count:,} float32: {found[0]} bare, {found[1]} compared", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
