"""Newer distributed training code as people write it for CUDA, on four ranks that are forked from one process."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.optim
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import trained

import ditorch  # noqa: F401

RANKS = 4


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def expected(make: Callable[[nn.Module], torch.optim.Optimizer]) -> list[float]:
    torch.manual_seed(0)
    net = model().cuda()
    return trained(net, make(net))


def close(mine: list[float], wanted: list[float]) -> None:
    assert max(abs(a - b) for a, b in zip(mine, wanted, strict=True)) < 1e-5, (mine, wanted)


def zero_redundancy() -> None:
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(model().cuda(), device_ids=[torch.cuda.current_device()])
    optimizer = torch.distributed.optim.ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
    close(trained(net, optimizer), expected(lambda net: torch.optim.AdamW(net.parameters(), lr=0.01)))


def compressed_gradients() -> None:
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(model().cuda(), device_ids=[torch.cuda.current_device()])
    net.register_comm_hook(None, default_hooks.bf16_compress_hook)
    mine = trained(net, torch.optim.SGD(net.parameters(), lr=0.1))
    wanted = expected(lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
    assert max(abs(a - b) for a, b in zip(mine, wanted, strict=True)) < 1e-2, (mine, wanted)


def fsdp_from_meta() -> None:
    with torch.device("meta"):
        net = model()
    mesh = init_device_mesh("cuda", (RANKS,))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    net.to_empty(device="cuda")
    torch.manual_seed(0)
    for layer in net:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    whole = [p.full_tensor() for p in net.parameters() if isinstance(p, DTensor)]
    torch.manual_seed(0)
    plain = [p for layer in model() for p in layer.parameters()]
    # Sharded initialisation draws what one device would draw, where the parts are whole blocks of the generator.
    assert torch.equal(whole[0].cpu(), plain[0])
    assert trained(net, torch.optim.AdamW(net.parameters(), lr=0.01))[-1] < 10


def fsdp_and_tensor_parallel() -> None:
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    net = parallelize_module(model().cuda(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    close(trained(net, optimizer), expected(lambda net: torch.optim.SGD(net.parameters(), lr=0.1)))
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)


def sync_batch_norm() -> None:
    rank = dist.get_rank()
    torch.manual_seed(1)
    everything = torch.randn(4 * RANKS, 3, 2, 2, device="cuda")
    plain, synced = nn.BatchNorm2d(3).cuda(), nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(3)).cuda()
    mine = everything[4 * rank : 4 * rank + 4].clone().requires_grad_()
    whole = everything.clone().requires_grad_()
    weights = torch.randn_like(everything)
    (plain(whole) * weights).sum().backward()
    result = nn.parallel.DistributedDataParallel(synced, device_ids=[torch.cuda.current_device()])(mine)
    (result * weights[4 * rank : 4 * rank + 4]).sum().backward()
    assert torch.allclose(mine.grad, whole.grad[4 * rank : 4 * rank + 4], atol=1e-5)
    assert torch.allclose(synced.running_var, plain.running_var, atol=1e-5)


def random_on_dtensors() -> None:
    mesh = init_device_mesh("cuda", (RANKS,))
    torch.manual_seed(3)
    drawn = nn.init.normal_(distribute_tensor(torch.empty(64, 16, device="cuda"), mesh, [Shard(0)]))
    torch.manual_seed(3)
    assert torch.equal(drawn.full_tensor(), torch.randn(64, 16, device="cuda"))
    dropped = F.dropout(distribute_tensor(torch.ones(RANKS, 256, device="cuda"), mesh, [Shard(0)]), 0.5)
    rows = dropped.full_tensor()
    assert len({tuple(row.tolist()) for row in rows}) == RANKS, "each rank has a mask of its own"
    same = F.dropout(distribute_tensor(torch.ones(256, device="cuda"), mesh, [Replicate()]), 0.5).to_local()
    gathered = [torch.empty_like(same) for _ in range(RANKS)]
    dist.all_gather(gathered, same)
    assert all(torch.equal(part, same) for part in gathered), "replicas have one mask"


def attention_on_dtensors() -> None:
    mesh = init_device_mesh("cuda", (RANKS,))
    torch.manual_seed(4)
    parts = [torch.randn(2, RANKS, 6, 8, device="cuda", requires_grad=True) for _ in range(3)]
    wanted = F.scaled_dot_product_attention(*parts, is_causal=True)
    grads = torch.autograd.grad(wanted.square().sum(), parts)
    sharded = [distribute_tensor(part.detach(), mesh, [Shard(1)]).requires_grad_() for part in parts]
    result = F.scaled_dot_product_attention(*sharded, is_causal=True)
    assert torch.allclose(result.full_tensor(), wanted, atol=1e-5)
    assert result.transpose(1, 2).contiguous().view(2, 6, -1).shape == (2, 6, 8 * RANKS)
    for mine, gradient in zip(torch.autograd.grad(result.square().sum(), sharded), grads, strict=True):
        assert torch.allclose(mine.full_tensor(), gradient, atol=1e-5)


def gloo_beside_nccl() -> None:
    group = dist.new_group(backend="gloo")
    assert dist.get_backend() == "nccl"
    assert dist.get_backend(group) == "gloo"
    for where in ("cuda", "cpu"):
        value = torch.ones(3, device=where)
        dist.all_reduce(value, group=group)
        assert value.tolist() == [RANKS] * 3
    told = [None] * RANKS
    dist.all_gather_object(told, dist.get_rank(), group=group)
    assert told == list(range(RANKS))


def pipeline() -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(RANKS))).cuda()
    x = torch.randn(8, 8, device="cuda")
    loss = F.mse_loss(layers(x), torch.zeros_like(x))
    device = torch.device("cuda", torch.cuda.current_device())
    stage = PipelineStage(layers[rank], rank, RANKS, device)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=F.mse_loss)
    told: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x)
    elif rank == RANKS - 1:
        schedule.step(target=torch.zeros_like(x), losses=told)
        assert torch.allclose(torch.stack(told).mean(), loss, atol=1e-6)
    else:
        schedule.step()


def checkpoint() -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    torch.manual_seed(0)
    net = model().cuda()
    fully_shard(net)
    kept = {name: value.full_tensor().clone() for name, value in net.state_dict().items()}
    dcp.save({"model": net.state_dict()}, checkpoint_id=folder[0])
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    state = {"model": net.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    assert all(torch.equal(value.full_tensor(), kept[name]) for name, value in state["model"].items())


def twice(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def remote_calls(port: str) -> None:
    rank = dist.get_rank()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=RANKS, rpc_backend_options=options)
    if rank == 0:
        assert rpc.rpc_sync("worker1", twice, args=(torch.ones(2),)).tolist() == [2, 2]
        ref = rpc.remote("worker1", nn.Linear, args=(2, 2))
        assert ref.rpc_sync().forward(torch.ones(1, 2)).shape == (1, 2)
    rpc.shutdown()


def coalesced() -> None:
    """Collectives in a coalescing manager, with and without its device; averages too, which soft composes."""
    rank = dist.get_rank()
    for device in (None, torch.device("cuda", torch.cuda.current_device())):
        for op, share in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, RANKS)):
            for later in (False, True):
                sums = [torch.full((RANKS,), float(rank + i), device="cuda") for i in range(2)]
                parts = [torch.empty(1, device="cuda") for _ in sums]
                with dist._coalescing_manager(device=device, async_ops=later) as first:
                    for part, each in zip(parts, sums):
                        dist.reduce_scatter_tensor(part, each.clone(), op)
                if later:
                    first.wait()
                with dist._coalescing_manager(device=device, async_ops=later) as second:
                    for each in sums:
                        dist.all_reduce(each, op)
                if later:
                    second.wait()
                for i, (part, each) in enumerate(zip(parts, sums)):
                    right = (sum(range(RANKS)) + i * RANKS) / share
                    assert [part.tolist(), each.tolist()] == [[right], [right] * RANKS], (device, op, later)
    whole = torch.tensor([4 * rank], device="cuda")
    with dist._coalescing_manager(device=torch.device("cuda", torch.cuda.current_device())):
        dist.all_reduce(whole, dist.ReduceOp.AVG)
    assert whole.item() == 6


PARTS: tuple[Callable[[], None], ...] = (
    zero_redundancy,
    compressed_gradients,
    fsdp_from_meta,
    fsdp_and_tensor_parallel,
    sync_batch_norm,
    random_on_dtensors,
    attention_on_dtensors,
    gloo_beside_nccl,
    coalesced,
    pipeline,
    checkpoint,
)


def work(rank: int, folder: str, wanted: list[str]) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    os.environ["LOCAL_RANK"] = str(rank)  # by which a mesh chooses the device, where the script has not
    init = f"file://{folder}/store"
    dist.init_process_group("nccl", init_method=init, rank=rank, world_size=RANKS, device_id=device)
    init_device_mesh("cuda", (RANKS,))
    assert torch.cuda.current_device() == device.index
    failed = []
    for part in PARTS:
        if wanted and part.__name__ not in wanted:
            continue
        try:
            part()
        except Exception:
            failed.append(part.__name__)
            if rank == 0 or "-v" in sys.argv:
                sys.stderr.write(f"{part.__name__} on rank {rank}:\n{traceback.format_exc()}")
        dist.barrier()
        if rank == 0:
            print(part.__name__, "failed" if part.__name__ in failed else "ok", flush=True)
    if not wanted or "remote_calls" in wanted:
        remote_calls(os.environ["RPC_PORT"])
        if rank == 0:
            print("remote_calls ok", flush=True)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=init + "2", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(model().cuda(), device_ids=[device.index])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    close(trained(net, optimizer), expected(lambda net: torch.optim.SGD(net.parameters(), lr=0.1)))
    if rank == 0:
        print("gloo_for_device_tensors ok", flush=True)
    dist.destroy_process_group()
    os._exit(1 if failed else 0)


def main() -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["RPC_PORT"] = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                try:
                    work(rank, folder, [name for name in sys.argv[1:] if name != "-v"])
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            ranks.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
