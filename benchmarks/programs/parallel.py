"""Programs that use torch.distributed, in a world of one, and torch.compile."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import Job, Step, program, trained
from .language import Block
from .methods import mlp


def world() -> None:
    """A world of this process alone."""
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


@program
def data_parallel(job: Job) -> Step:
    world()
    net = nn.parallel.DistributedDataParallel(job.to(mlp(8, 32, 4)))
    x = job.randn(16, 8)
    return trained(job, net, lambda: net(x).square().mean())


@program
def fully_sharded(job: Job) -> Step:
    from torch.distributed.fsdp import fully_shard

    world()
    net = job.to(nn.Sequential(Block(16), Block(16)))
    for block in net:
        fully_shard(block)
    fully_shard(net)
    x = job.randn(2, 8, 16)
    return trained(job, net, lambda: net(x).square().mean(), clip=1.0)


@program
def tensor_parallel(job: Job) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    world()
    net = job.to(mlp(8, 32, 4))
    mesh = init_device_mesh("cuda", (1,))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = job.randn(16, 8)
    return trained(job, net, lambda: net(x).square().mean())


def _compiled(job: Job, backend: str) -> Step:
    net = job.to(nn.Sequential(Block(16), nn.Linear(16, 4)))
    fast: Any = torch.compile(net, backend=backend)
    x = job.randn(2, 8, 16)
    return trained(job, net, lambda: fast(x).square().mean())


@program
def compiled_eager(job: Job) -> Step:
    return _compiled(job, "eager")


@program
def compiled_aot(job: Job) -> Step:
    return _compiled(job, "aot_eager")
