"""Run by torchrun on two ranks: collectives, DDP, FSDP and tensor parallel as CUDA code writes them."""

import os

import torch
import torch.distributed as dist
from torch import nn
from training import trained

import ditorch


def averages(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        value = torch.full((4,), 2 * rank + 2, device="cuda", dtype=dtype)
        work = dist.all_reduce(value, op=dist.ReduceOp.AVG, async_op=True)
        assert work is not None
        work.wait()
        assert value.tolist() == [3] * 4, (dtype, value)
    out = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(out, torch.arange(4.0, device="cuda") * (rank + 1), op=dist.ReduceOp.AVG)
    assert out.tolist() == ([0.0, 1.5] if rank == 0 else [3.0, 4.5])
    parts = [torch.full((2,), float(rank + i), device="cuda") for i in range(2)]
    dist.reduce_scatter(out, parts, op=dist.ReduceOp.AVG)
    assert out.tolist() == [rank + 0.5] * 2


def destinations_and_groups(rank: int) -> None:
    value = torch.full((4,), rank + 1.0, device="cuda")
    dist.reduce(value, dst=1, op=dist.ReduceOp.AVG)
    assert value.tolist() == ([1.5] * 4 if rank == 1 else [1.0] * 4), "only dst receives, others keep theirs"
    pair, alone = dist.new_group([0, 1], backend="nccl"), dist.new_group([1])
    assert dist.get_backend(pair) == "nccl"
    value = torch.full((2,), rank + 1.0, device="cuda")
    dist.all_reduce(value, op=dist.ReduceOp.AVG, group=pair)
    assert value.tolist() == [1.5, 1.5]
    if rank == 1:
        dist.all_reduce(value, op=dist.ReduceOp.AVG, group=alone)
        assert value.tolist() == [1.5, 1.5]
    box = [None, None]
    dist.all_gather_object(box, {"rank": rank})
    assert [entry["rank"] for entry in box] == [0, 1]


def data_parallel(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Linear(4, 2).cuda()
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=[rank], output_device=torch.device("cuda", rank))
    ddp(torch.randn(3, 4, device="cuda")).sum().backward()
    grads = [torch.empty_like(model.weight.grad) for _ in range(2)]
    dist.all_gather(grads, model.weight.grad)
    assert torch.equal(*grads)
    assert ddp(torch.ones(3, 4, device="cuda")).device == torch.device("cuda", rank)


def sharded(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
    assert mesh.device_type == "cuda"

    def losses(shard: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
        if shard:
            for layer in (model[0], model[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return trained(model, optimizer)

    plain, split = losses(False), losses(True)
    assert max(abs(a - b) for a, b in zip(plain, split)) < 1e-5, (plain, split)
    old = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cuda", rank))
    old(torch.ones(2, 8, device="cuda")).sum().backward()


def tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).cuda()
    x = torch.randn(2, 8, device="cuda")
    expected = model(x).detach()
    model = parallelize_module(model, init_device_mesh("cuda", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    result = model(x)
    assert torch.allclose(result, expected, atol=1e-5)
    result.sum().backward()
    assert model[0].weight.grad.to_local().shape == (8, 8)


def reduced_in_float32(rank: int) -> None:
    # 1 + 2**-8 is not a bfloat16: summing in bfloat16 and in float32 round differently only for long sums,
    # so what is checked is that the result is the rounded exact sum and the handle stays asynchronous.
    value = torch.full((3,), 1.0 + rank, device="cuda", dtype=torch.bfloat16)
    work = dist.all_reduce(value, async_op=True)
    work.wait()
    assert value.dtype == torch.bfloat16
    assert value.tolist() == [3.0] * 3


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    assert dist.get_backend() == "nccl"
    if os.environ.get("DITORCH_REDUCE_FP32"):
        reduced_in_float32(rank)
        assert any(p.why.endswith("DITORCH_REDUCE_FP32=1") for p in ditorch.patches())
    averages(rank)
    destinations_and_groups(rank)
    data_parallel(rank)
    sharded(rank)
    tensor_parallel()
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()
    print(f"rank {rank} done")


main()
