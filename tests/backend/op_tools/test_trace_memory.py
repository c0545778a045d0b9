"""What memory a run needs: the peak of the device's allocator, and what it consists of."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import op_tools
from op_tools.native import book
from op_tools.trace.exports import as_perfetto
from op_tools.trace.format import PARAMETER, PHASES, TABLES, Trace, read
from op_tools.trace.graph import Graph
from op_tools.trace.memory import BEFORE, KEPT, live_bytes, memory_of
from op_tools.trace.show import memory_lines
from op_tools.watch.intercept import INTERCEPTOR

Step = Callable[[], None]


def _attention(device: str) -> tuple[nn.Module, Step]:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.1)
    model = nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    model.append(nn.Linear(32, 50)).to(device)
    x = torch.randint(0, 50, (4, 32)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        optimizer.step()

    return model, step


def _convolutions(device: str) -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU()).to(device)
    x = torch.randn(4, 3, 16, 16).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        torch.empty(1 << 16, device="cpu").add_(1).mul(2).sum().item()  # not the device's memory

    return model, step


def _needs_statistics() -> None:
    gc.collect()  # what other tests have left is not freed in the middle
    try:
        torch.accelerator.reset_peak_memory_stats()
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"this PyTorch has no statistics of allocators: {error}")


@pytest.mark.parametrize("make", [_attention, _convolutions])
def test_the_peak_is_that_of_the_allocator(
    make: Callable[[str], tuple[nn.Module, Step]], keeps_book: str, tmp_path: Path, device: str
) -> None:
    model, step = make(device)
    torch.zeros(1 << 22, device=device).add_(1)  # a peak that came before the trace
    _needs_statistics()
    with op_tools.OpTrace(to=tmp_path, prints=False):
        step()
        step()
    graph = Graph(read(tmp_path / "rank0.optrace"))
    needs = memory_of(graph)
    assert needs.peak == torch.accelerator.max_memory_allocated()
    assert 0 < needs.operator < graph.count
    assert sum(needs.kinds.values()) == pytest.approx(needs.peak, rel=0.02)
    assert sum(needs.modules.values()) == pytest.approx(needs.peak, rel=0.02)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert needs.kinds["parameter"] == size
    states = 2 * size if make is _attention else size
    assert states <= needs.kinds["optimizer"] <= 1.05 * states + 4096
    if make is _attention:  # what attention and dropout keep for their backward
        assert needs.kinds[KEPT] > 0.05 * (needs.peak - needs.kinds.get(BEFORE, 0))  # other tests may hold more
    text = "\n".join(memory_lines(graph))
    assert f"needs [ {needs.peak / 2**20:.2f} MiB ]" in text, text
    assert "of it" in text


def test_gradients_between_layers_are_temporary(tmp_path: Path, device: str) -> None:
    if book.LIBRARY.wait() is None:
        pytest.skip(f"no compiler here, or it failed: {book.LIBRARY.failure}")
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).to(device)
    x = torch.randn(256, 64).to(device)
    with op_tools.OpTrace(to=tmp_path, prints=False):
        model(x).sum().backward()
    graph = Graph(read(tmp_path / "rank0.optrace"))
    table = graph.trace["memory"]
    sent = [int(n) for n in table["bytes"][(table["kind"] == 3) & (table["bytes"] > 0)].tolist()]
    assert sent.count(256 * 64 * 4) >= 2, "what the third and the second layer sent on"
    needs = memory_of(graph)
    assert needs.kinds["temporary"] >= 256 * 64 * 4
    assert needs.kinds.get("gradient", 0) <= 3 * (64 * 64 + 64) * 4


def test_who_resets_the_peak_changes_nothing(tmp_path: Path, device: str) -> None:
    _needs_statistics()
    with op_tools.OpTrace(to=tmp_path, prints=False):
        x = torch.zeros(1 << 18, device=device) + 1
        peak = torch.accelerator.max_memory_allocated()
        del x
        torch.accelerator.reset_peak_memory_stats()
        torch.zeros(1 << 10, device=device).add_(1)
    assert memory_of(Graph(read(tmp_path / "rank0.optrace"))).peak == peak


def test_without_an_allocator_that_keeps_books_it_is_what_tensors_show(tmp_path: Path, device: str) -> None:
    model = nn.Linear(64, 64).to(device)
    x = torch.randn(128, 64).to(device)
    with op_tools.OpTrace(to=tmp_path, prints=False):
        model(x).relu().sum().backward()
    whole = read(tmp_path / "rank0.optrace")
    tables = {name: whole[name] for name in TABLES}
    tables["levels"] = {name: column[:0] for name, column in whole["levels"].items()}
    needs = memory_of(Graph(Trace(tables, whole.texts, whole.facts, whole.path)))
    assert needs.kinds["parameter"] == (64 * 64 + 64) * 4
    assert needs.kinds["activation"] >= 128 * 64 * 4
    assert sum(needs.kinds.values()) == needs.peak
    assert KEPT not in needs.kinds


def test_the_curve_of_live_bytes_ends_where_the_allocator_does(tmp_path: Path, device: str) -> None:
    _needs_statistics()
    with op_tools.OpTrace(to=tmp_path, prints=False):
        x = torch.zeros(1 << 16, device=device)
        y = x + 1
        held = torch.accelerator.memory_allocated()
    graph = Graph(read(tmp_path / "rank0.optrace"))
    curve = live_bytes(graph)
    assert curve[-1][1] == held, curve
    assert [operator for operator, _ in curve] == sorted(operator for operator, _ in curve)
    assert f'"bytes": {held}' in "".join(as_perfetto([graph]))
    assert y.numel() == 1 << 16


def test_the_memory_of_all_devices_counts(tmp_path: Path, keeps_book: str) -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    _needs_statistics()
    others = sum(torch.accelerator.memory_allocated(i) for i in range(2, torch.accelerator.device_count()))
    first, second = nn.Linear(64, 64).to("cuda:0"), nn.Linear(64, 64).to("cuda:1")
    x = torch.randn(32, 64).to("cuda:0")
    torch.accelerator.reset_peak_memory_stats(0)
    torch.accelerator.reset_peak_memory_stats(1)
    with op_tools.OpTrace(to=tmp_path, prints=False):
        second(first(x).relu().to("cuda:1")).square().mean().backward()
    needs = memory_of(Graph(read(tmp_path / "rank0.optrace")))
    assert needs.peak == others + sum(torch.accelerator.max_memory_allocated(i) for i in range(2))
    assert needs.kinds["parameter"] == 2 * (64 * 64 + 64) * 4
    assert needs.kinds[BEFORE] >= x.nbytes


def test_parameters_count_once_while_they_are_there(tmp_path: Path, device: str, keeps_book: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.head = nn.Embedding(100, 32), nn.Linear(32, 100, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(self.emb(x))
            return y

    x = torch.arange(20).to(device)
    size = 100 * 32 * 4
    with op_tools.OpTrace(to=tmp_path, prints=False) as tool:
        for _ in range(3):  # one after the other
            model = Tied().to(device)
            model.emb(x)  # a part of it before the whole
            model(x).sum().backward()
            del model
        lazy = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(4)).to(device)
        lazy(torch.ones(3, 5, device=device)).sum().backward()
        large = nn.Linear(512, 512).to(device).half()
        large.weight.detach().mul(2)
        large(torch.ones(1, 512, device=device, dtype=torch.float16))
    assert not tool.findings()
    graph = Graph(read(tmp_path / "rank0.optrace"))
    table = graph.trace["memory"]
    of_model = table["kind"] == PARAMETER
    live = np.cumsum(np.where(of_model, table["bytes"], 0))
    assert live.min() >= 0
    assert sorted(int(n) for n in table["bytes"][of_model & (table["bytes"] > 0)].tolist()).count(size) == 3
    needs = memory_of(graph)
    assert needs.kinds["parameter"] <= 4 * (512 * 512 + 512) + 8 * 1024
    for parts in (needs.kinds, needs.modules):
        assert sum(parts.values()) == pytest.approx(needs.peak, rel=0.02)
    names = [module["name"] for module in graph.modules.values()]
    assert "(ReLU)" not in names
    (lazy_name,) = (name.removesuffix(".2") for name in names if name.endswith(".2"))
    assert {f"{lazy_name}.0", f"{lazy_name}.1"} <= set(names)
    members = {graph.trace.texts[n] for n in graph.tensors["name"].tolist()}
    assert {f"{lazy_name}.0.weight", f"{lazy_name}.2.bias"} <= members


def test_what_follows_the_last_operator_counts_and_what_is_left_out_does_not(tmp_path: Path, device: str) -> None:
    _needs_statistics()
    from torch.utils._python_dispatch import _disable_current_modes

    x = torch.ones(16, device=device)
    with op_tools.OpTrace(to=tmp_path / "tail", prints=False):
        x.add(1)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            torch.zeros(1 << 20, device=device)
    assert memory_of(Graph(read(tmp_path / "tail" / "rank0.optrace"))).peak == torch.accelerator.max_memory_allocated()
    optimizer = torch.optim.SGD([torch.ones(4, device=device, requires_grad=True)])
    steps = range(INTERCEPTOR.step, INTERCEPTOR.step + 5, 2)
    with op_tools.OpTrace(to=tmp_path / "gaps", prints=False, steps=steps):
        for step in range(4):
            torch.zeros(1 << (22 if step == 1 else 8), device=device).add_(1)
            optimizer.step()
    graph = Graph(read(tmp_path / "gaps" / "rank0.optrace"))
    needs = memory_of(graph)
    assert needs.kinds.get("temporary", 0) < 1 << 20, needs


def test_an_optimizer_in_a_hook_of_a_gradient_is_one(tmp_path: Path, device: str, keeps_book: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).to(device)
    optimizers = {p: torch.optim.AdamW([p], foreach=False) for p in model.parameters()}
    for parameter in model.parameters():

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            optimizers[parameter].zero_grad()  # type: ignore[index]

        parameter.register_post_accumulate_grad_hook(step)
    with op_tools.OpTrace(to=tmp_path, prints=False):
        for _ in range(2):
            model(torch.ones(8, 16, device=device)).sum().backward()
    graph = Graph(read(tmp_path / "rank0.optrace"))
    phases = {PHASES[int(graph.operators["phase"][n])] for n, name in enumerate(graph.names) if "addcdiv" in name}
    assert phases == {"optimizer"}
    size = sum(p.nbytes for p in model.parameters())
    assert 2 * size <= memory_of(graph).kinds["optimizer"] <= 2 * size + 4096


def test_threads_may_begin_at_once(tmp_path: Path, device: str) -> None:
    x = torch.ones(4, device=device)
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(25):
            x.add(1)

    for attempt in range(3):
        with op_tools.OpTrace(to=tmp_path / str(attempt)) as tool:
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not tool.findings()
        graph = Graph(read(tmp_path / str(attempt) / "rank0.optrace"))
        assert sum(name.endswith(".add") for name in graph.names) == 100
