"""OpAutoCompare on kernels that write where they must not, and on writes that do not take place."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ditorch
import op_tools
from op_tools.compare import memory

Tensor = torch.Tensor
Plant = Callable[[str, Callable[[Tensor], None]], None]


@pytest.fixture
def plant(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plant]:
    """Have an operator of the software accelerator do something with the memory of its result besides."""
    if getattr(ditorch.backend, "name", "") != "soft":
        pytest.skip("only the software accelerator can be made to fail on purpose")
    from ditorch.soft import faults
    from ditorch.soft.faults import effects

    def planted(operator: str, harm: Callable[[Tensor], None]) -> None:
        monkeypatch.setitem(effects.EFFECTS, "hang", lambda strike, results: harm(results[0]))
        faults.plant(f"{operator}: hang=0s")

    monkeypatch.setenv("OP_TOOLS_CONSOLE", "off")
    yield planted
    faults.clear()


def wrong(work: Callable[[], Any]) -> list[tuple[str, str]]:
    with op_tools.OpAutoCompare() as tool:
        work()
    return [(f.op.rpartition(".")[2], f.message) for f in tool.findings() if f.kind != "skipped"]


def base_of(view: Tensor) -> Tensor:
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())


def past_its_end(view: Tensor) -> None:
    base, size = base_of(view), view.storage_offset() + sum((n - 1) * s for n, s in zip(view.shape, view.stride())) + 1
    if size < base.numel():
        base[size] += 1


def between(view: Tensor) -> None:
    base_of(view)[view.storage_offset() + view.shape[-1]] += 1


def at_its_base(view: Tensor) -> None:
    base_of(view)[0] += 1


WRITES: dict[str, tuple[str, Callable[[str], Any], Callable[[Tensor], None], str]] = {
    "rows": ("add_.Tensor", lambda d: torch.zeros(8, 4, device=d)[2:5].add_(1), past_its_end, "1 past its last"),
    "columns": ("mul_.Tensor", lambda d: torch.ones(8, 6, device=d)[:, 1:3].mul_(2), between, "between its elements"),
    "rows of much": (
        "add_.Tensor",
        lambda d: torch.zeros(80_000, 4, device=d)[20:50].add_(1),
        at_its_base,
        "80 before its first",
    ),
    "out=": (
        "add.out",
        lambda d: torch.add(torch.ones(4, device=d), 1, out=torch.zeros(9, device=d)[:4]),
        past_its_end,
        "1 past its last",
    ),
    "copy_": (
        "copy_",
        lambda d: torch.zeros(9, device=d, dtype=torch.int16)[3:5].copy_(torch.ones(2, device=d, dtype=torch.int16)),
        past_its_end,
        "1 past its last (0 became 1)",
    ),
    "scatter_": (
        "scatter_.value",
        lambda d: torch.zeros(6, 6, device=d)[1:3].scatter_(1, torch.zeros(2, 1, dtype=torch.int64, device=d), 1.0),
        past_its_end,
        "1 past its last",
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_beside_a_view(name: str, device: str, plant: Plant) -> None:
    operator, work, harm, where = WRITES[name]
    assert wrong(lambda: work(device)) == [], "a healthy device is right"
    plant(operator, harm)
    found = wrong(lambda: work(device))
    assert len(found) == 1
    assert where in found[0][1]


def test_writes_to_what_is_only_read(device: str, plant: Plant) -> None:
    base = torch.arange(1.0, 10.0, device=device)
    plant("exp", lambda result: base[6:].add_(1))
    found = wrong(lambda: torch.exp(base[:4]))
    assert [op for op, _ in found] == ["exp"]
    assert "outside of this argument: 3 elements" in found[0][1]


def test_a_read_argument_that_moves_by_less_than_rounding(device: str, plant: Plant) -> None:
    x = torch.full((4,), 1.0, device=device)
    plant("exp", lambda result: x.mul_(1 + 1.2e-7))
    found = wrong(lambda: torch.exp(x))
    assert [op for op, _ in found] == ["exp"]
    assert "only reads" in found[0][1]


def test_writes_to_a_parameter_that_was_not_given(device: str, plant: Plant) -> None:
    layer = torch.nn.Linear(4, 4).to(device)

    def work() -> None:
        layer(torch.ones(2, 4, device=device)).exp().sin()

    assert wrong(work) == []
    plant("exp", lambda result: ctypes.memset(layer.bias.data_ptr(), 1, 4) and None)
    found = wrong(work)
    assert [op for op, _ in found] == ["exp"], "not what came before or after it"
    assert "parameter bias, which it was not given: 4 bytes" in found[0][1]


def test_later_calls_of_a_kind_are_guarded_now_and_then(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guarded: list[int] = []
    begin = memory.Neighbours._begin

    def counting(self: memory.Neighbours, call: Any, kind: Any) -> memory.Guarded:
        guarded.append(call.id)
        return begin(self, call, kind)

    monkeypatch.setattr(memory.Neighbours, "_begin", counting)
    x = torch.ones(4, device=device)
    with op_tools.OpAutoCompare(["torch.exp", "torch.sin"]):
        for _ in range(70):
            torch.exp(x)
        for _ in range(70):
            torch.sin(x)
    assert [number - guarded[0] + 1 for number in guarded] == [1, 64, 71, 128]


def test_calls_are_guarded_closely_after_a_finding(device: str, plant: Plant) -> None:
    layer, x = torch.nn.Linear(4, 4).to(device), torch.ones(4, device=device)
    with op_tools.OpAutoCompare() as tool:
        layer(x)
        for _ in range(3):
            torch.exp(x)
        assert not tool.findings()
        plant("exp", lambda result: ctypes.memset(layer.bias.data_ptr(), 1, 4) and None)
        for _ in range(64):
            layer.bias.data.zero_()
            torch.exp(x)
        before = len([f for f in tool.findings() if "not given" in f.message])
        for _ in range(3):
            layer.bias.data.zero_()
            torch.exp(x)
    after = len([f for f in tool.findings() if "not given" in f.message])
    assert before >= 1
    assert after - before == 3


@pytest.mark.parametrize("where", ["a parameter", "what it reads", "behind a view"])
def test_writes_of_backward_kernels(where: str, device: str, plant: Plant) -> None:
    layer = torch.nn.Linear(4, 4).to(device)
    base = torch.linspace(0, 1, 16, device=device).view(4, 4)
    given = base[:2].detach().requires_grad_()
    places = {"a parameter": (layer.bias, 0), "what it reads": (given, 8), "behind a view": (base, 48)}

    def work() -> None:
        layer(given.cos()).sin().sum().backward()

    assert wrong(work) == []
    written, offset = places[where]
    operator = "sin" if where != "a parameter" else "cos"  # kernels of the gradients of the other one

    def harm(result: Tensor) -> None:
        if torch._C._current_autograd_node() is not None:
            ctypes.memset(written.data_ptr() + offset, 1, 4)

    plant(operator, harm)
    found = wrong(work)
    assert [op for op, _ in found] == ["cos" if operator == "sin" else "sin"]
    assert "4 bytes changed" in found[0][1]


def test_views_that_get_other_memory_are_no_alarm(device: str, plant: Plant) -> None:
    def work() -> None:
        x, y = torch.zeros(9, device=device)[2:4], torch.ones(9, device=device)[2:4]
        x.set_(y)
        x.resize_(5)
        torch.add(y, 1, out=torch.zeros(9, device=device)[3:3]).mul_(2)

    assert wrong(work) == []


def test_a_write_that_only_the_schema_tells_of(device: str, plant: Plant) -> None:
    from ditorch.soft import faults

    def work() -> None:
        x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)).to(device)
        mean, variance = torch.zeros(3, device=device), torch.ones(3, device=device)
        for _ in range(2):
            torch._native_batch_norm_legit(x, None, None, mean, variance, True, 0.1, 1e-5)

    assert wrong(work) == []
    faults.plant("_native_batch_norm_legit: drop_write")
    assert [op for op, _ in wrong(work)] == ["_native_batch_norm_legit"] * 2
