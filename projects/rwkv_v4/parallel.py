"""The model on several ranks: data parallel (DDP, FSDP2) and tensor parallel (DTensor), on torch.distributed."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .config import ConfigError
from .model import GPT, Linear1D, RWKV_TimeMix, VocabEmbedding

STRATEGIES = ("ddp", "fsdp", "tensor")


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among all of them."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    def join(cls) -> Ranks:
        """Take part in the job that torchrun started, or be alone."""
        rank, world, local = (int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
        device = torch.device("cuda", local % max(torch.cuda.device_count(), 1))
        torch.cuda.set_device(device)
        if world > 1:
            dist.init_process_group("nccl")
        return cls(rank, world, device)

    def leave(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()

    def largest(self, value: float) -> float:
        """The largest value of all ranks: so that all decide alike."""
        if self.world == 1:
            return value
        told = torch.tensor(float(value), device=self.device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return told.item()

    def mean(self, values: Tensor) -> Tensor:
        if self.world > 1:
            values = values.clone()
            dist.all_reduce(values)
            values /= self.world
        return values


def share_of_batch(ranks: Ranks, strategy: str, batch: int) -> tuple[int, int]:
    """First sample and number of samples that this rank takes of a global batch."""
    if ranks.world == 1 or strategy == "tensor":
        return 0, batch
    if batch % ranks.world:
        raise ConfigError(f"train.global_batch_size={batch} does not divide among {ranks.world} ranks")
    return ranks.rank * batch // ranks.world, batch // ranks.world


def spread(model: GPT, strategy: str, ranks: Ranks) -> nn.Module:
    """The model as the strategy wants it: called like the model, on this rank's share of the work."""
    if strategy not in STRATEGIES:
        raise ConfigError(f"train.dist.strategy={strategy!r}: expected one of {', '.join(STRATEGIES)}")
    if ranks.world == 1:
        return model
    return {"ddp": _ddp, "fsdp": _fsdp, "tensor": _tensor_parallel}[strategy](model, ranks)


def _ddp(model: GPT, ranks: Ranks) -> nn.Module:
    # The buffers are constants: no need to send them around. torch 2.13 renamed the option that says so.
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    constant = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {"gradient_as_bucket_view": True, constant: False}
    return nn.parallel.DistributedDataParallel(model, device_ids=[ranks.device.index], **options)


def _fsdp(model: GPT, ranks: Ranks) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (ranks.world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class TensorParallel(nn.Module):
    """The model with every tensor distributed; batches come in, and the loss goes out, as plain tensors."""

    def __init__(self, model: GPT, mesh: Any) -> None:
        super().__init__()
        self.model, self.mesh = model, mesh

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate

        def same(x: Tensor) -> Tensor:
            return DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)

        out: DTensor = self.model(same(idx), None if targets is None else same(targets))
        return out.full_tensor()


def _tensor_parallel(model: GPT, ranks: Ranks) -> nn.Module:
    """Column-parallel layers split their outputs, row-parallel ones their inputs, wkv its channels, as in the log."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from .wkv import sharding

    sharding.register()
    mesh = init_device_mesh("cuda", (ranks.world,))

    def gathered(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output.redistribute(mesh, [Replicate()])

    for module in list(model.modules()):
        split: dict[str, int] = {}
        if isinstance(module, Linear1D):
            split = {"weight": 0 if module.parallel == "col" else 1}
        elif isinstance(module, VocabEmbedding):
            split = {"weight": 0}
        elif isinstance(module, RWKV_TimeMix):
            split = {"time_decay": 0, "time_first": 0}
        for name, parameter in list(module.named_parameters(recurse=False)):
            place = Shard(split[name]) if name in split else Replicate()
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [place])))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, distribute_tensor(buffer, mesh, [Replicate()]), persistent=False)
        if isinstance(module, VocabEmbedding) or (isinstance(module, Linear1D) and module.parallel == "row"):
            module.register_forward_hook(gathered)
    return TensorParallel(model, mesh)
