"""Checks of collective_worker.py under OpTrace: collectives that C++ code starts are operators of the trace, too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import op_tools
from op_tools.trace.diff import compare, load
from op_tools.trace.format import PHASES, read
from op_tools.trace.graph import Graph
from tests.device.soft.compared_collectives import _all_reduce, _drop, _nothing, broken, collectives, compared, values

STEPS = 3


def train(device: torch.device, logs: bool = False, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)).to(device)
    replica = DistributedDataParallel(net, **options)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(STEPS):
        loss = replica(values(device, 24).view(4, 6) + step).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if logs and dist.get_rank() == 0:
            print(loss.item(), net[0].weight.norm().item(), (net[3].weight * 2).sum().item(), file=sys.stderr)
    total = torch.ones(2, device=device)
    dist.all_reduce(total)
    return [p.detach().cpu() for p in net.parameters()]


def traced(device: torch.device, name: str, **options: Any) -> tuple[Path, list[torch.Tensor]]:
    folder = Path(sys.argv[1], name)
    with op_tools.OpTrace(to=folder):
        found = train(device, **options)
    return folder, found


def rows(folder: Path, rank: int, last: str) -> list[dict[str, Any]]:
    """The collectives of a name in the trace of this rank."""
    graph = Graph(read(folder / f"rank{rank}.optrace"))
    columns, texts = graph.operators, graph.trace.texts
    return [
        {
            "location": texts[int(columns["location"][i])],
            "group": texts[int(columns["group"][i])],
            "phase": PHASES[int(columns["phase"][i])],
            "step": int(columns["step"][i]),
            "title": graph.titles[i],
            "inputs": [graph.look(t)["shape"] for t in graph.inputs(i).tolist()],
            "outputs": [graph.look(t)["shape"] for t in graph.outputs(i).tolist()],
        }
        for i, operator in enumerate(graph.names)
        if operator == f"torch.distributed.{last}"
    ]


def buckets_and_broadcasts_of_ddp_are_operators(rank: int, device: torch.device) -> None:
    options: tuple[dict[str, Any], ...] = (
        {"bucket_cap_mb": 0.0003},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
    )
    for number, case in enumerate(options):
        expected = train(device, **case)
        folder, found = traced(device, f"ddp{number}", **case)
        assert all(map(torch.equal, expected, found)), case
        reduced, sent = rows(folder, rank, "all_reduce"), rows(folder, rank, "broadcast")
        assert {row["group"] for row in reduced + sent} == {"ranks=[0, 1]"}, reduced
        assert reduced[-1]["phase"] == "forward", "the user's own comes last, once"
        assert reduced[-1]["outputs"] == ["[2]"], reduced[-1]
        buckets = [row for row in reduced if row["location"].startswith("DDP bucket ")]
        used = [row for row in reduced if row["location"] == "DDP: which parameters were used"]
        assert len(buckets) + len(used) + 1 == len(reduced), reduced
        assert len(used) == (STEPS if "find_unused_parameters" in case else "static_graph" in case), reduced
        assert {row["phase"] for row in buckets} == {"backward"}
        assert [row["step"] for row in buckets] == sorted(row["step"] for row in buckets)
        assert all("model-all_reduce-" in row["title"] for row in buckets), buckets
        # 6 * 32 + 32, 2 * 32, 32 * 3 + 3 elements: each is in one bucket of each step, whatever their number
        for step in {row["step"] for row in buckets}:
            of_step = [row for row in buckets if row["step"] == step]
            assert sum(int(row["inputs"][0][1:-1]) for row in of_step) == 387, of_step
            assert [row["inputs"] for row in of_step] == [row["outputs"] for row in of_step]
        more = number == 0
        assert (len(buckets) > STEPS) == more, buckets
        assert {row["outputs"][0] for row in sent if row["title"].startswith("model-")} == {"[64]", "[1]"}, sent


def a_bucket_that_is_reduced_wrong_is_where_the_runs_part(rank: int, device: torch.device) -> None:
    good, _ = traced(device, "good")
    with broken("allreduce_", _all_reduce(_nothing, _drop)):
        bad, _ = traced(device, "bad")
    again, _ = traced(device, "again")
    dist.barrier()
    assert compare(good, again).divergence is None
    found = compare(good, bad)
    assert found.divergence is not None
    operator = int(found.alignment.pairs[found.divergence.pair][0])
    assert "model-all_reduce-" in found.alignment.first.titles[operator], list(found.lines())


def results_are_there_when_somebody_has_waited(rank: int, device: torch.device) -> None:
    folder = Path(sys.argv[1], "waiting")
    tensor, gathered = torch.full((3,), rank + 1.0, device=device), torch.empty(6, device=device)
    with op_tools.OpTrace(to=folder):
        dist.all_reduce(tensor)
        work = dist.all_gather_into_tensor(gathered, tensor, async_op=True)
        work.wait()
        parts = [torch.empty(3, device=device) for _ in range(2)]
        dist.all_gather(parts, tensor)
        later = funcol.all_reduce(tensor, "sum", dist.group.WORLD)
        total = later + gathered[:3] + parts[1]
    assert total.tolist() == [12.0] * 3
    graph = Graph(read(folder / f"rank{rank}.optrace"))
    table, where = graph.prints()
    sums = {
        graph.names[i].rpartition(".")[2]: [table[where[t]][8] for t in graph.outputs(i).tolist()]
        for i in range(graph.count)
        if "distributed" in graph.names[i] or "c10d" in graph.names[i]
    }
    assert sums["all_reduce"] in ([9.0], [18.0]), sums  # of torch.distributed, or the functional one
    assert sums["all_gather_into_tensor"] == [18.0], sums
    assert sums["all_gather"] == [9.0, 9.0], sums
    add = next(i for i, title in enumerate(graph.titles) if title.startswith("add-"))
    makers = [graph.titles[p] for p in graph.tensors["producer"][graph.inputs(add)].tolist()]
    assert [maker.rpartition("-")[0] for maker in makers] == ["all_reduce", "__getitem__"], makers


def groups_are_named_wherever_they_are_given(rank: int, device: torch.device) -> None:
    folder = Path(sys.argv[1], "groups")
    alone = [dist.new_group([r]) for r in range(2)][rank]
    with op_tools.OpTrace(to=folder):
        dist.all_reduce(torch.ones(3, device=device), dist.ReduceOp.SUM, alone)
        dist.all_reduce(torch.ones(3, device=device), group=alone)
        funcol.all_reduce(torch.ones(3, device=device), "sum", alone).sum()
        dist.all_reduce(torch.ones(3, device=device))
    graph = Graph(read(folder / f"rank{rank}.optrace"))
    groups = [graph.trace.texts[g] for g in graph.operators["group"].tolist() if g]
    assert groups == [f"ranks=[{rank}]"] * 3 + ["ranks=[0, 1]"], groups


def one_rank_may_log(rank: int, device: torch.device) -> None:
    plain, _ = traced(device, "plain")
    logging, _ = traced(device, "logging", logs=True)
    dist.barrier()
    merged = [load(folder) for folder in (plain, logging)]
    counts = [int((trace["prints"]["part"] == 1).sum()) for trace in merged]
    assert counts[0] == counts[1] > 100, f"tensors that are put together: {counts}"
    found = compare(plain, logging)
    assert found.divergence is None, list(found.lines())
    assert not found.given(), found.given()


def others_may_hear_of_collectives_at_the_same_time(rank: int, device: torch.device) -> None:
    folder = Path(sys.argv[1], "both")
    expected = train(device)
    with op_tools.OpTrace(to=folder), compared() as tool:
        found = train(device)
    assert all(map(torch.equal, expected, found))
    assert not tool.blames, tool.blames
    assert len(rows(folder, rank, "all_reduce")) == len([r for r in collectives(tool) if "all_reduce" in r["op"]])
    with compared() as tool, op_tools.OpTrace(to=folder):
        train(device)
    assert rows(folder, rank, "all_reduce")
    assert not tool.blames, tool.blames


CHECKS = (
    buckets_and_broadcasts_of_ddp_are_operators,
    a_bucket_that_is_reduced_wrong_is_where_the_runs_part,
    results_are_there_when_somebody_has_waited,
    groups_are_named_wherever_they_are_given,
    one_rank_may_log,
    others_may_hear_of_collectives_at_the_same_time,
)
