"""Data-parallel training with NCCL, as people write it for CUDA.

ditorch run -m torch.distributed.run --nproc-per-node 2 examples/train_ddp.py --steps 5
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    dist.init_process_group(backend="nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device(f"cuda:{local_rank}")
    assert dist.get_backend() == "nccl"

    torch.manual_seed(0)
    x = torch.randn(args.steps * 16 * world_size, 10)
    data = TensorDataset(x, x @ torch.randn(10, 1))
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler, pin_memory=True)

    model = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if os.environ.get("SYNC_BN") else model
    model = DDP(model.to(device), device_ids=[local_rank], output_device=local_rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sampler.set_epoch(0)
    for step, (inputs, targets) in enumerate(loader):
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step}: loss {mean.item():.4f}", flush=True)

    first = next(model.parameters()).detach().clone()
    copies = [torch.empty_like(first) for _ in range(world_size)]
    dist.all_gather(copies, first)
    assert all(torch.equal(copies[0], other) for other in copies), "ranks have drifted apart"
    dist.barrier(device_ids=[local_rank])
    if rank == 0:
        torch.save(model.module.state_dict(), os.devnull)
        print(f"trained on {world_size} x {first.device.type}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
