"""What each of two ranks does for test_collectives.py: run every check, write down what failed.

torchrun --standalone --nproc-per-node=2 -m tests.device.soft.collective_worker RESULTS [CHECK ...]
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.device.soft import compared_collectives, traced_collectives, traced_programs

CHECKS: dict[str, Callable[[int, torch.device], None]] = {}


def check(function: Callable[[int, torch.device], None]) -> Callable[[int, torch.device], None]:
    CHECKS[function.__name__] = function
    return function


def of_rank(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that differ per rank and element, exact in every type."""
    count = int(torch.tensor(shape).prod())
    return (torch.arange(count) % 5 + 1 + rank).to(dtype).view(shape)


def equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.cpu(), expected.cpu()), f"{found} is not {expected}"


OPERATIONS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8)


def same_as_gloo(operate: Callable[[torch.Tensor], None], host: torch.Tensor, device: torch.device) -> None:
    """Whatever gloo does to a CPU tensor, an error too, must happen to a soft one."""
    there = host.to(device)
    try:
        operate(host)
    except (RuntimeError, ValueError) as error:
        try:
            operate(there)
        except type(error):
            return
        raise AssertionError(f"gloo refuses, soft does not: {error}") from None
    operate(there)
    equal(there, host)


def make_all_reduce(name: str) -> None:
    def run(rank: int, device: torch.device) -> None:
        for dtype in TYPES:
            same_as_gloo(
                lambda t: dist.all_reduce(t, op=getattr(dist.ReduceOp, name)), of_rank(rank, 3, 4, dtype=dtype), device
            )

    run.__name__ = f"all_reduce_{name.lower()}"
    check(run)


for operation in OPERATIONS:
    make_all_reduce(operation)


@check
def all_reduce_gives_the_sum_in_place(rank, device):
    x = of_rank(rank, 4).to(device)
    address = x.data_ptr()
    assert dist.all_reduce(x) is None
    equal(x, of_rank(0, 4) + of_rank(1, 4))
    assert x.data_ptr() == address
    whole = torch.zeros(8, device=device)
    whole[2:6] = rank + 1.0
    dist.all_reduce(whole[2:6])
    assert whole.tolist() == [0, 0, 3, 3, 3, 3, 0, 0]


@check
def reduce(rank, device):
    x = of_rank(rank, 4).to(device)
    dist.reduce(x, dst=1)
    if rank == 1:
        equal(x, of_rank(0, 4) + of_rank(1, 4))


@check
def broadcast(rank, device):
    for dtype in (*TYPES, torch.bool):
        x = of_rank(rank, 3, 2).to(dtype).to(device)
        dist.broadcast(x, src=1)
        equal(x, of_rank(1, 3, 2).to(dtype))


@check
def all_gather(rank, device):
    out = [torch.zeros(2, 3, device=device) for _ in range(2)]
    dist.all_gather(out, of_rank(rank, 2, 3).to(device))
    for index, part in enumerate(out):
        equal(part, of_rank(index, 2, 3))


@check
def all_gather_into_tensor(rank, device):
    for shape in ((4, 3), (2, 2, 3)):
        out = torch.zeros(shape, device=device)
        dist.all_gather_into_tensor(out, of_rank(rank, 2, 3).to(device))
        equal(out, torch.stack([of_rank(0, 2, 3), of_rank(1, 2, 3)]).view(shape))


@check
def reduce_scatter(rank, device):
    out = torch.zeros(3, device=device)
    dist.reduce_scatter(out, [(of_rank(rank, 3) + 10 * index).to(device) for index in range(2)])
    equal(out, of_rank(0, 3) + of_rank(1, 3) + 20 * rank)


@check
def reduce_scatter_tensor(rank, device):
    out = torch.zeros(2, 3, device=device)
    given = of_rank(rank, 4, 3).to(device)
    dist.reduce_scatter_tensor(out, given)
    equal(out, (of_rank(0, 4, 3) + of_rank(1, 4, 3))[2 * rank : 2 * rank + 2])
    equal(given, of_rank(rank, 4, 3))  # the input stays as it was
    dist.reduce_scatter_tensor(out, given, op=dist.ReduceOp.MAX)
    equal(out, of_rank(1, 4, 3)[2 * rank : 2 * rank + 2])
    with pytest.raises(ValueError, match="2 times the output's 5 elements"):
        dist.reduce_scatter_tensor(torch.zeros(5, device=device), given)


@check
def all_to_all(rank, device):
    sent = [of_rank(rank, index + 1).to(device) for index in range(2)]
    out = [torch.zeros(rank + 1, device=device) for _ in range(2)]
    dist.all_to_all(out, sent)
    for index, part in enumerate(out):
        equal(part, of_rank(index, rank + 1))


@check
def all_to_all_single(rank, device):
    out = torch.zeros(4, device=device)
    dist.all_to_all_single(out, (torch.arange(4.0) + 10 * rank).to(device))
    equal(out, torch.tensor([[0.0, 1, 10, 11], [2, 3, 12, 13]][rank]))
    splits = [[1, 3], [2, 2]][rank], [[1, 2], [3, 2]][rank]
    out = torch.zeros(sum(splits[1]), device=device)
    dist.all_to_all_single(out, (torch.arange(4.0) + 10 * rank).to(device), splits[1], splits[0])
    equal(out, torch.tensor([[0.0, 10, 11], [1, 2, 3, 12, 13]][rank]))


@check
def gather(rank, device):
    out = [torch.zeros(3, device=device) for _ in range(2)] if rank == 0 else None
    dist.gather(of_rank(rank, 3).to(device), out, dst=0)
    for index, part in enumerate(out or ()):
        equal(part, of_rank(index, 3))


@check
def scatter(rank, device):
    out = torch.zeros(3, device=device)
    dist.scatter(out, [of_rank(index, 3).to(device) for index in range(2)] if rank == 1 else None, src=1)
    equal(out, of_rank(rank, 3))


@check
def send_and_recv(rank, device):
    x = of_rank(rank, 4).to(device)
    if rank == 0:
        dist.send(x, dst=1)
        dist.recv(x, src=1)
    else:
        out = torch.zeros(4, device=device)
        assert dist.recv(out) == 0  # from anyone
        equal(out, of_rank(0, 4))
        dist.send(x, dst=0)
    equal(x, of_rank(1, 4))


@check
def isend_and_irecv(rank, device):
    out = torch.zeros(4, device=device)
    works = [dist.isend(of_rank(rank, 4).to(device), 1 - rank, tag=7), dist.irecv(out, 1 - rank, tag=7)]
    for work in works:
        work.wait()
    equal(out, of_rank(1 - rank, 4))


@check
def batch_isend_irecv(rank, device):
    out = torch.zeros(4, device=device)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, of_rank(rank, 4).to(device), 1 - rank),
            dist.P2POp(dist.irecv, out, 1 - rank),
        ]
    )
    for work in works:
        work.wait()
    equal(out, of_rank(1 - rank, 4))


@check
def barrier(rank, device):
    dist.barrier()
    dist.barrier(device_ids=[rank])
    assert dist.barrier(async_op=True).wait()


@check
def async_op(rank, device):
    x = of_rank(rank, 4).to(device)
    work = dist.all_reduce(x, async_op=True)
    assert work.wait()
    assert work.is_completed()
    equal(x, of_rank(0, 4) + of_rank(1, 4))
    out = torch.zeros(2, device=device)
    future = dist.reduce_scatter_tensor(out, of_rank(rank, 4).to(device), async_op=True).get_future()
    (value,) = future.wait()
    equal(value, (of_rank(0, 4) + of_rank(1, 4))[2 * rank : 2 * rank + 2])
    assert value.device == device
    chained = dist.all_reduce(torch.ones(2, device=device), async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    assert chained.wait().tolist() == [4, 4]


@check
def new_group(rank, device):
    both, alone = dist.new_group([0, 1]), [dist.new_group([index]) for index in range(2)][rank]
    x = of_rank(rank, 3).to(device)
    dist.all_reduce(x, group=alone)
    equal(x, of_rank(rank, 3))
    dist.all_reduce(x, group=both)
    equal(x, of_rank(0, 3) + of_rank(1, 3))
    other = dist.new_group([0, 1], backend="softccl")
    assert dist.get_backend(other) == "softccl"
    dist.all_reduce(x, group=other)
    equal(x, 2 * (of_rank(0, 3) + of_rank(1, 3)))


@check
def objects(rank, device):
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"rank": rank, "x": [rank] * (rank + 1)})
    assert found == [{"rank": 0, "x": [0]}, {"rank": 1, "x": [1, 1]}]
    values = ["a", 3] if rank == 0 else [None, None]
    dist.broadcast_object_list(values, src=0)
    assert values == ["a", 3]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, ["zero", "one"] if rank == 0 else None, src=0)
    assert mine == [["zero", "one"][rank]]
    gathered: list[Any] | None = [None, None] if rank == 0 else None
    dist.gather_object(rank, gathered, dst=0)
    assert gathered == ([0, 1] if rank == 0 else None)


@check
def functional_collectives(rank, device):
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    x = of_rank(rank, 4).to(device)
    equal(functional.all_reduce(x, "sum", group) + 0, of_rank(0, 4) + of_rank(1, 4))
    equal(functional.all_gather_tensor(x, 0, group) + 0, torch.cat([of_rank(0, 4), of_rank(1, 4)]))
    equal(
        functional.reduce_scatter_tensor(x, "sum", 0, group) + 0,
        (of_rank(0, 4) + of_rank(1, 4))[2 * rank : 2 * rank + 2],
    )
    equal(functional.broadcast(x, 0, group) + 0, of_rank(0, 4))
    equal(
        functional.all_to_all_single(x, None, None, group) + 0,
        torch.cat([of_rank(index, 4)[2 * rank : 2 * rank + 2] for index in range(2)]),
    )
    sums = functional.all_reduce_coalesced([x, x * 2], "sum", group)
    equal(sums[1] + 0, 2 * (of_rank(0, 4) + of_rank(1, 4)))
    gathered = functional.all_gather_into_tensor_coalesced([x, x * 2], group)
    equal(gathered[1] + 0, 2 * torch.cat([of_rank(0, 4), of_rank(1, 4)]))
    parts = functional.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 0], group)
    equal(parts[1] + 0, 2 * (of_rank(0, 4) + of_rank(1, 4))[2 * rank : 2 * rank + 2])
    equal(x, of_rank(rank, 4))  # none of them writes its input


@check
def cpu_tensors_in_the_same_group(rank, device):
    x = of_rank(rank, 3)
    dist.all_reduce(x)
    equal(x, of_rank(0, 3) + of_rank(1, 3))
    assert dist.get_default_backend_for_device("soft") == "softccl"


@check
def non_contiguous_tensors_fare_as_with_gloo(rank, device):
    same_as_gloo(dist.all_reduce, of_rank(rank, 3, 4).t(), device)
    same_as_gloo(lambda t: dist.broadcast(t, src=1), of_rank(rank, 3, 4).t(), device)


@check
def device_mesh_and_dtensor(rank, device):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("soft", (2,))
    whole = torch.arange(12.0).view(4, 3)
    sharded = distribute_tensor(whole.to(device), mesh, [Shard(0)])
    equal(sharded.to_local(), whole[2 * rank : 2 * rank + 2])
    equal(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)
    equal((sharded @ sharded.t()).full_tensor(), whole @ whole.t())
    equal(sharded.sum().full_tensor(), whole.sum())


# --- training -----------------------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 3))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(8, 6), torch.randn(8, 3))] * 8


def train(net: nn.Module, device: torch.device, rows: slice, average: bool) -> list[float]:
    """Loss of the whole batch at each step; with ``average`` each rank sees its rows only."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x[rows].to(device)), y[rows].to(device))
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        if average:
            dist.all_reduce(shown, op=dist.ReduceOp.AVG)
        losses.append(shown.item())
    return losses


def close(found: list[float], expected: list[float]) -> None:
    assert all(abs(a - b) <= 2e-6 * abs(b) for a, b in zip(found, expected)), (found, expected)
    assert found[-1] < found[0]


@check
def ddp_equals_one_process(rank, device):
    from torch.nn.parallel import DistributedDataParallel

    single = network().to(device)
    expected = train(single, device, slice(None), average=False)
    net = DistributedDataParallel(network().to(device), device_ids=[device.index])
    close(train(net, device, slice(4 * rank, 4 * rank + 4), average=True), expected)
    for a, b in zip(single.parameters(), net.module.parameters()):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    for parameter in net.parameters():  # both ranks hold the same bits
        other = parameter.detach().clone()
        dist.broadcast(other, src=0)
        equal(parameter.detach(), other)


@check
def ddp_without_sync_and_with_a_hook(rank, device):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    net = DistributedDataParallel(nn.Linear(2, 1, bias=False).to(device))
    x = torch.full((1, 2), rank + 1.0, device=device)
    with net.no_sync():
        net(x).sum().backward()
    assert net.module.weight.grad.tolist() == [[rank + 1.0] * 2]
    net.module.weight.grad = None
    net(x).sum().backward()
    assert net.module.weight.grad.tolist() == [[1.5, 1.5]]
    net.module.weight.grad = None
    net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    net(x).sum().backward()
    assert net.module.weight.grad.tolist() == [[1.5, 1.5]]


@check
def fsdp2_equals_one_process(rank, device):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    mesh = init_device_mesh("soft", (2,))
    expected = train(network().to(device), device, slice(None), average=False)
    net = network().to(device)
    for layer in (net[0], net[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    assert net[0].weight.to_local().shape == (16, 6)
    close(train(net, device, slice(4 * rank, 4 * rank + 4), average=True), expected)


@check
def fsdp2_mixed_precision_and_state(rank, device):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import init_device_mesh

    net = network().to(device)
    reference = copy.deepcopy(net).cpu().state_dict()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(net, mesh=init_device_mesh("soft", (2,)), mp_policy=policy)
    out = net(torch.ones(2, 6, device=device))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert net[0].weight.grad.dtype == torch.float32
    full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        for name, value in reference.items():
            equal(full[name], value)


for watched in (*compared_collectives.CHECKS, *traced_collectives.CHECKS, *traced_programs.CHECKS):
    check(watched)


def main() -> None:
    import ditorch.soft

    ditorch.soft.load()
    dist.init_process_group("cpu:gloo,soft:softccl", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    device = torch.device("soft", rank)
    torch.soft.set_device(device)
    results = {}
    for name, function in CHECKS.items():
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        try:
            function(rank, device)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    dist.destroy_process_group()
    Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
