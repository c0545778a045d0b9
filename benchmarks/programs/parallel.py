"""Programs that use torch.distributed, in a world of one or under torchrun, and torch.compile."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import Job, Step, program, trained
from .language import Block
from .methods import mlp


def world() -> int:
    """How many processes there are: this one alone, or those that torchrun has started."""
    if not dist.is_initialized():
        if dist.is_torchelastic_launched():
            dist.init_process_group("nccl")
            torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        else:
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_world_size()


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
def fully_sharded_fused(job: Job) -> Step:
    """Parameters in a lower precision while they are used, blocks that are computed again, one kernel per update."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.utils.checkpoint import checkpoint

    world()
    net = job.to(nn.Sequential(Block(16), Block(16)))
    for block in net:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=job.low, reduce_dtype=torch.float32))
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    x = job.randn(2, 8, 16)

    def step() -> None:
        h: Any = x.to(job.low or x.dtype)  # before 2.13, blocks that are computed again get it as it is
        for block in net:
            h = checkpoint(block, h, use_reentrant=False)
        h.float().square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def sequence_parallel(job: Job) -> Step:
    """Norms on parts of the sequence, linear layers on parts of the features, a loss on parts of the classes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    size = world()
    net = job.to(nn.Sequential(nn.LayerNorm(16), mlp(16, 32, 16), nn.Linear(16, 12)))
    styles = {
        "0": SequenceParallel(),
        "1": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "1.0": ColwiseParallel(),
        "1.2": RowwiseParallel(output_layouts=Shard(1)),
        "2": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(net, init_device_mesh("cuda", (size,)), styles)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, labels = job.randn(2, 8 // size, 16), job.put(torch.randint(0, 12, (16,)))

    def step() -> None:
        with loss_parallel():
            with job.autocast():
                logits = net(x)
            nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def jagged(job: Job) -> Step:
    """Sequences of several lengths in one tensor, without padding."""
    lengths = (2, 5, 3)
    net = job.to(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)))
    parts = [job.randn(length, 8) for length in lengths]

    def loss() -> torch.Tensor:
        x = torch.nested.nested_tensor(parts, layout=torch.jagged)
        return net(x).values().square().mean()

    return trained(job, net, loss)


@program
def tensor_parallel(job: Job) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    size = world()
    net = job.to(mlp(8, 32, 4))
    mesh = init_device_mesh("cuda", (size,))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = job.randn(16, 8)
    return trained(job, net, lambda: net(x).square().mean())


def _compiled(job: Job, backend: str, dropout: bool = True) -> Step:
    net = job.to(nn.Sequential(Block(16), nn.Linear(16, 4))).train(dropout)
    fast: Any = torch.compile(net, backend=backend)
    x = job.randn(2, 8, 16)
    return trained(job, net, lambda: fast(x).square().mean())


@program
def compiled_eager(job: Job) -> Step:
    return _compiled(job, "eager")


@program
def compiled_aot(job: Job) -> Step:
    return _compiled(job, "aot_eager")


@program
def compiled_without_dropout(job: Job) -> Step:
    return _compiled(job, "aot_eager", dropout=False)
