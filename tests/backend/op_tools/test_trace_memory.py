"""What memory a run needs: the peak of the device's allocator, and what it consists of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import op_tools
from op_tools.native import book
from op_tools.trace.format import TABLES, Trace, read
from op_tools.trace.graph import Graph
from op_tools.trace.memory import BEFORE, KEPT, live_bytes, memory_of
from op_tools.trace.show import as_perfetto, memory_lines

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
    assert sum(needs.modules.values()) == pytest.approx(needs.peak - needs.kinds.get(BEFORE, 0), rel=0.02)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert needs.kinds["parameter"] == size
    states = 2 * size if make is _attention else size
    assert states <= needs.kinds["optimizer"] <= 1.05 * states + 4096
    if make is _attention:  # what attention and dropout keep for their backward
        assert needs.kinds[KEPT] > 0.05 * needs.peak
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
    assert f'"bytes": {held}' in "".join(as_perfetto(graph))
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
