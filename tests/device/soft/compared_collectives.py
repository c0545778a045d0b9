"""Checks of collective_worker.py under OpAutoCompare: faults of the backend are found, what is right is silent."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

import op_tools

LARGE = 100_000  # elements: more than are published one by one


@contextlib.contextmanager
def compared(**settings: str) -> Iterator[op_tools.OpAutoCompare]:
    given = {"OP_TOOLS_CONSOLE": "off", "OP_TOOLS_RESULTS_DIR": sys.argv[1], **settings}
    os.environ.update(given)
    try:
        with op_tools.OpAutoCompare() as tool:
            yield tool
    finally:
        for name in given:
            del os.environ[name]


def collectives(tool: op_tools.OpAutoCompare) -> list[dict[str, Any]]:
    return [row for row in tool.records() if "distributed" in row["op"] or "c10d" in row["op"]]


def missed(tool: op_tools.OpAutoCompare) -> list[str]:
    """Collectives that were not compared, and why."""
    found = tool._teller.coverage.missed
    return [f"{key[0]}: {reason}" for key, reason in found if "distributed." in key[0] or "c10d" in key[0]]


def is_silent(tool: op_tools.OpAutoCompare, at_least: int) -> None:
    assert not tool.blames, tool.blames
    assert not missed(tool), missed(tool)
    assert len(collectives(tool)) >= at_least, collectives(tool)


# --- faults -----------------------------------------------------------------------------------------------

Kernel = Callable[..., Any]


@contextlib.contextmanager
def broken(name: str, kernel: Kernel) -> Iterator[None]:
    """An operator of c10d with another kernel for soft tensors: what a broken backend does."""
    library = torch.library.Library("c10d", "IMPL")
    library.impl(name, kernel, "PrivateUse1", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def backend_of(group: Any) -> Any:
    return dist.ProcessGroup.unbox(group)._get_backend(torch.device("soft", dist.get_rank()))


def _all_reduce(change: Callable[[torch.Tensor], None], before: Callable[[torch.Tensor], None] | None = None) -> Kernel:
    def kernel(tensors: list[torch.Tensor], group: Any, *_: Any) -> Any:
        if before is not None:
            before(tensors[0])
        work = backend_of(group).allreduce(tensors, c10d.AllreduceOptions())
        work.wait()
        change(tensors[0])
        return tensors, work.boxed()

    return kernel


def _drop(tensor: torch.Tensor) -> None:
    if dist.get_rank() == 1:
        tensor.zero_()


def _round(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.copy_(tensor.to(torch.bfloat16))


def _nothing(tensor: torch.Tensor) -> None:
    pass


def _swap_last(tensor: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        tensor[-5000] += 1.0


def _swapped(output: torch.Tensor, given: torch.Tensor, group: Any, *_: Any) -> Any:
    work = backend_of(group)._allgather_base(output, given, c10d.AllgatherOptions())
    work.wait()
    output.copy_(output.view(2, -1).flip(0).reshape(output.shape))
    return output, work.boxed()


def _wrong_shard(output: torch.Tensor, given: torch.Tensor, group: Any, *_: Any) -> Any:
    turned = given.view(2, -1).flip(0).reshape(given.shape)
    work = backend_of(group)._reduce_scatter_base(output, turned, c10d.ReduceScatterOptions())
    work.wait()
    return output, work.boxed()


def _idle_broadcast(tensors: list[torch.Tensor], group: Any, *_: Any) -> Any:
    backend = backend_of(group)
    given = tensors if dist.get_rank() == 0 else [t.clone() for t in tensors]
    work = backend.broadcast(given, c10d.BroadcastOptions())
    work.wait()
    return tensors, work.boxed()


_SENT: list[Any] = []


def _changed_message(tensors: list[torch.Tensor], group: Any, dst: int, tag: int) -> Any:
    changed = [tensors[0].clone()]
    changed[0][3] = 7.0
    _SENT.append(changed)
    return backend_of(group).send(changed, dst, tag).boxed()  # gloo's works can be waited for once


def _message(device: torch.device) -> None:
    if dist.get_rank() == 0:
        dist.send(values(device), dst=1)
    else:
        dist.recv(values(device), src=0)


def values(device: torch.device, count: int = 1000, **more: Any) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(dist.get_rank()), **more).to(device)


def train(device: torch.device, net: nn.Module, **options: Any) -> None:
    replica = DistributedDataParallel(net.to(device), **options)
    for step in range(2):
        replica(values(device, 24).view(4, 6) + step).square().sum().backward()


FAULTS: dict[str, tuple[str, Kernel, Callable[[torch.device], Any], str]] = {
    "dropped": (
        "allreduce_",
        _all_reduce(_nothing, _drop),
        lambda d: dist.all_reduce(values(d)),
        "rank 1 had sent nothing",
    ),
    "rounded": ("allreduce_", _all_reduce(_round), lambda d: dist.all_reduce(values(d, LARGE)), "rounded to bfloat16"),
    "one element": (
        "allreduce_",
        _all_reduce(_swap_last),
        lambda d: dist.all_reduce(values(d, LARGE), async_op=True).wait(),
        "another sum over the ranks among elements 65,536 to 99,999",
    ),
    "swapped": (
        "_allgather_base_",
        _swapped,
        lambda d: dist.all_gather_into_tensor(torch.empty(2000, device=d), values(d)),
        "it has the data of rank 1 where that of rank 0 belongs",
    ),
    "shard": (
        "_reduce_scatter_base_",
        _wrong_shard,
        lambda d: dist.reduce_scatter_tensor(torch.empty(500, device=d), values(d)),
        "the sum over 2 ranks is",
    ),
    "message": ("send", _changed_message, _message, "element 3 is 7, and rank 0 sent"),
    "idle": ("broadcast_", _idle_broadcast, lambda d: dist.broadcast(values(d), 0), "and rank 0 sent"),
    "bucket": (
        "allreduce_",
        _all_reduce(_nothing, _drop),
        lambda d: train(d, nn.Linear(6, 3)),
        "rank 1 had sent nothing",
    ),
}
ON_RANKS = {"one element": [0], "idle": [1], "message": [1]}  # the others: on both


def planted_faults_are_found_where_they_are(rank: int, device: torch.device) -> None:
    found = {}
    for name, (operator, kernel, run, _) in FAULTS.items():
        with compared() as tool, broken(operator, kernel):
            run(device)
        with compared() as twin:
            run(device)
        found[name] = tool, twin
    for name, (tool, twin) in found.items():  # only now: a rank that fails must not leave the other alone
        is_silent(twin, rank if name == "message" else 1)
        wrong = [blame for blame in tool.blames if "distributed" in blame.op]
        if rank not in ON_RANKS.get(name, [0, 1]):
            assert not wrong, (name, wrong)
            continue
        assert wrong, (name, missed(tool), collectives(tool))
        assert FAULTS[name][-1] in wrong[0].reason, (name, wrong)
        assert f"on rank {rank}, in the default group of 2" in wrong[0].reason, wrong[0].reason
        here = "DDP bucket 0" if name == "bucket" else os.path.basename(__file__)
        assert here in wrong[0].location, (name, wrong[0].location)


def functions_in_the_place_of_pytorchs_are_judged_by_what_they_do(rank: int, device: torch.device) -> None:
    def rounds(func: Kernel) -> Kernel:
        @functools.wraps(func)
        def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            wide = tensor.clone()
            func(wide, *args, **kwargs)
            tensor.copy_(wide.to(torch.bfloat16) if rank == 1 else wide)

        return all_reduce

    original = dist.all_reduce
    dist.all_reduce = rounds(original)
    try:
        with compared() as tool:
            dist.all_reduce(values(device))
            dist.all_reduce(values(device), op=dist.ReduceOp.MAX)
    finally:
        dist.all_reduce = original
    assert not missed(tool), missed(tool)
    assert len(collectives(tool)) == 2, collectives(tool)
    reasons = [blame.reason for blame in tool.blames if "distributed" in blame.op]
    assert len(reasons) == 2 * rank, reasons
    assert all(word in reason for word, reason in zip(("rounded to bfloat16", "the maximum over 2 ranks"), reasons))


# --- healthy ----------------------------------------------------------------------------------------------


def healthy_collectives_raise_no_alarm(rank: int, device: torch.device) -> None:
    import torch.distributed._functional_collectives as functional

    with compared() as tool:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8):
            for count in (7, LARGE):
                x = (100 * values(device, count)).to(dtype)
                for operation in ("SUM", "MAX", "MIN", "PRODUCT", "AVG"):
                    if operation != "AVG" or dtype.is_floating_point:
                        dist.all_reduce(x.clone(), op=getattr(dist.ReduceOp, operation))
        special = torch.tensor([float("inf"), float("nan"), 6e4, 6e4, 1e-7, -0.0], dtype=torch.float16).to(device)
        dist.all_reduce(special)
        x = values(device, 8)
        works = [dist.all_reduce(values(device), async_op=True) for _ in range(3)]
        dist.all_reduce(torch.ones(2, device=device), async_op=True).get_future().then(
            lambda done: done.value()[0].zero_()
        ).wait()
        for work in reversed(works):
            work.wait()
        dist.reduce(x.clone(), dst=1)
        dist.broadcast(x.clone(), src=1)
        dist.all_gather([torch.empty_like(x) for _ in range(2)], x)
        dist.all_gather_into_tensor(torch.empty(16, device=device), x)
        dist.reduce_scatter(torch.empty(4, device=device), list(x.chunk(2)))
        dist.reduce_scatter_tensor(torch.empty(4, device=device), x)
        dist.all_to_all([torch.empty(4, device=device) for _ in range(2)], list(x.chunk(2)))
        dist.all_to_all_single(torch.empty_like(x), x)
        dist.all_to_all_single(torch.empty([3, 5][rank] * 2, device=device), x, [[3, 3], [5, 5]][rank], [3, 5])
        dist.gather(x, [torch.empty_like(x) for _ in range(2)] if rank == 0 else None, dst=0)
        dist.scatter(torch.empty(4, device=device), list(x.chunk(2)) if rank == 1 else None, src=1)
        if rank == 0:
            dist.send(x, dst=1)
            dist.recv(x.clone(), src=1)
        else:
            dist.recv(x.clone(), src=0)
            dist.send(x, dst=0)
        messages = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, x.clone(), 1 - rank)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        dist.barrier()
        with dist.distributed_c10d._coalescing_manager():
            for _ in range(2):
                dist.all_reduce(x.clone())
        group = dist.group.WORLD
        functional.all_reduce(x, "sum", group) + 0
        functional.all_gather_tensor(x, 0, group) + 0
        functional.reduce_scatter_tensor(x, "avg", 0, group) + 0
        [y + 0 for y in functional.all_reduce_coalesced([x, x * 2], "sum", group)]
    assert not missed(tool), missed(tool)
    assert not tool.blames, tool.blames
    assert len(collectives(tool)) > 70


def training_in_parallel_raises_no_alarm_and_keeps_its_bits(rank: int, device: torch.device) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    def run(options: dict[str, Any], make: Callable[[], nn.Module], hook: Any, state: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        net = DistributedDataParallel(make().to(device), **options)
        if hook is not None:
            net.register_comm_hook(state() if state else None, hook)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(4):
            with net.no_sync() if step == 1 else contextlib.nullcontext():
                net(values(device, 24).view(4, 6) + step).square().sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
        return [p.detach().cpu() for p in net.parameters()]

    def linear() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 3))

    cases: list[tuple[dict[str, Any], Any, Any, Any]] = [
        ({"bucket_cap_mb": 0.0001}, linear, None, None),
        ({"gradient_as_bucket_view": True}, linear, None, None),
        ({"find_unused_parameters": True, "bucket_cap_mb": 0.00001}, Unused, None, None),
        ({"static_graph": True}, linear, None, None),
        ({"gradient_as_bucket_view": True}, linear, default_hooks.fp16_compress_hook, None),
        ({}, linear, powerSGD_hook.powerSGD_hook, lambda: powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)),
    ]
    outcomes = []
    for case in cases:
        expected = run(*case)
        with compared() as tool:
            found = run(*case)
        outcomes.append((case, tool, all(map(torch.equal, found, expected))))
    for case, tool, same in outcomes:
        assert same, case
        assert not tool.blames, (case, tool.blames)
        assert not missed(tool), (case, missed(tool))
        buckets = [row for row in collectives(tool) if row["op"].endswith("all_reduce")]
        assert len(buckets) >= 3, (case, collectives(tool))


def sharded_training_raises_no_alarm(rank: int, device: torch.device) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    net = nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 3)).to(device)
    with compared() as tool:
        fully_shard(net, mesh=init_device_mesh("soft", (2,)))
        for step in range(2):
            net(values(device, 24).view(4, 6) + step).square().sum().backward()
    assert not tool.blames, tool.blames
    names = [row["op"] for row in collectives(tool)]
    assert any("all_gather" in name for name in names), (names, missed(tool))
    assert any("reduce_scatter" in name for name in names), (names, missed(tool))
    assert not missed(tool), missed(tool)


def a_rank_without_the_tool_is_named_and_nobody_waits_for_it(rank: int, device: torch.device) -> None:
    if rank == 0:
        dist.all_reduce(values(device))
        return
    with compared(OP_AUTOCOMPARE_RANK_SECONDS="0.5") as tool:
        dist.all_reduce(values(device))
    assert missed(tool) == ["torch.distributed.all_reduce: rank 0 published nothing"], missed(tool)
    assert not tool.blames


def what_was_published_is_deleted(rank: int, device: torch.device) -> None:
    with compared() as tool:
        for count in (10, LARGE):
            dist.all_reduce(values(device, count))
            dist.broadcast(values(device, count), 1)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    left = [key for key in store.list_keys() if "op_tools" in str(key) and not str(key).endswith("/run")]
    dist.barrier()
    is_silent(tool, 4)
    assert not left, left


CHECKS = (
    planted_faults_are_found_where_they_are,
    functions_in_the_place_of_pytorchs_are_judged_by_what_they_do,
    healthy_collectives_raise_no_alarm,
    training_in_parallel_raises_no_alarm_and_keeps_its_bits,
    sharded_training_raises_no_alarm,
    a_rank_without_the_tool_is_named_and_nobody_waits_for_it,
    what_was_published_is_deleted,
)
