"""Sums that autograd makes itself: gradients of what several calls use, and what is added to `.grad`.

Faults are planted in the engine alone: in additions that no Python code calls, while an autograd node is evaluated.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ditorch
import op_tools
from op_tools.watch import sums
from op_tools.watch.intercept import INTERCEPTOR

Effect = Callable[[Tensor, Tensor], Tensor]
IN_PLACE = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 12)
needs_soft = pytest.mark.skipif(ditorch.backend.name != "soft", reason="faults are planted in the software accelerator")


@pytest.fixture(autouse=True)
def _listens() -> None:
    assert sums.LIBRARY.wait() is not None, sums.LIBRARY.failure
    torch.manual_seed(0)


@contextlib.contextmanager
def fault(effect: Effect | None, kernels: tuple[str, ...] = ("add.Tensor", "add_.Tensor")) -> Iterator[None]:
    """Let `effect` of the operands replace what the engine's own kernels return."""
    if effect is None:
        yield
        return
    from ditorch.soft import native

    def before(base: str, overload: str, device: int, args: Any) -> Any:
        by_python = sys._getframe(0).f_back is not None
        if torch._C._current_autograd_node() is None or by_python:
            return None
        return [a.clone() for a in args[:2] if isinstance(a, Tensor)]

    def after(given: list[Tensor], outputs: Any) -> None:
        with torch.no_grad():
            outputs[0].copy_(effect(*given))

    native().set_fault_hook(before, after, {f"aten::{kernel}" for kernel in kernels})
    try:
        yield
    finally:
        native().set_fault_hook(None, None, set())


def compared(program: Callable[[], Any], effect: Effect | None = None, **options: Any) -> op_tools.OpAutoCompare:
    with fault(effect), op_tools.OpAutoCompare(**options) as comparison:
        program()
    return comparison


def places(comparison: op_tools.OpAutoCompare) -> set[str]:
    """Where sums were compared, in words."""
    return {row["location"] for row in comparison.records() if row["op"].startswith("autograd.")}


def drop(total: Tensor, added: Tensor) -> Tensor:
    return total


def lose(total: Tensor, added: Tensor) -> Tensor:
    return added


def double(total: Tensor, added: Tensor) -> Tensor:
    return total + added + added


def in_bfloat16(total: Tensor, added: Tensor) -> Tensor:
    return (total + added).bfloat16().to(total.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(F.relu(self.up(x)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, numbers: Tensor) -> Any:
        return self.head(self.words(numbers))


def residual() -> None:
    nn.Sequential(Block(), Block()).to("cuda")(torch.ones(4, 8, device="cuda")).square().sum().backward()


def micro_batches() -> None:
    model = nn.Linear(8, 8).to("cuda")
    for _ in range(2):
        model(torch.ones(4, 8, device="cuda")).square().sum().backward()


def tied_weights() -> None:
    numbers = torch.arange(5, device="cuda")
    model = Tied().to("cuda")
    model(numbers).square().sum().backward()


def layer_used_twice() -> None:
    model, x = nn.Linear(8, 8).to("cuda"), torch.ones(4, 8, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(F.relu(model(x))).float().square().sum()
    loss.backward()


_CAUSES = {
    residual: ("autograd.sum_of_gradients.add", "sum of 2 gradients of the result of torch.Tensor.add, "),
    micro_batches: ("autograd.accumulate_grad.add_", "accumulation into .grad of bias"),
    tied_weights: ("autograd.sum_of_gradients.add", "sum of 2 gradients of words.weight"),
    layer_used_twice: ("autograd.sum_of_gradients.add", "sum of 2 gradients of bias"),
}


@needs_soft
@pytest.mark.parametrize(
    ("program", "effect"),
    [
        *[(residual, effect) for effect in (drop, in_bfloat16)],
        *[(micro_batches, effect) for effect in (drop, lose, double, in_bfloat16)],
        (tied_weights, drop),
        (layer_used_twice, double),
    ],
)
def test_wrong_sum_is_blamed(program: Callable[[], None], effect: Effect) -> None:
    comparison = compared(program, effect)
    first, (op, words) = comparison.blames[0], _CAUSES[program]
    assert {blame.op.rstrip("_") for blame in comparison.blames} == {op.rstrip("_")}, "only sums are wrong"
    assert first.op.rstrip("_") == op.rstrip("_")
    assert first.location.startswith(words)
    assert first.phase == "backward"
    assert first.module == ("0" if program is residual else "")
    assert not compared(program).blames


@needs_soft
def test_wrong_conversion_of_a_sum_is_blamed() -> None:
    def twice(empty: Tensor, given: Tensor) -> Tensor:
        return 2 * given.to(empty.dtype)

    with fault(twice, ("copy_",)), op_tools.OpAutoCompare() as comparison:
        layer_used_twice()
    found = {blame.location for blame in comparison.blames if blame.op == "autograd.accumulate_grad.to"}
    assert found == {f"conversion of the sum of gradients of {name}" for name in ("weight", "bias")}


class Recomputed(torch.autograd.Function):
    """As checkpoints do: a backward pass inside of another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Any:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            h = ctx.block(x * 1)
        torch.autograd.backward(h, grad)
        return x.grad, None


def checkpointed() -> None:
    x = torch.ones(4, 8, device="cuda", requires_grad=True)
    h: Any = Recomputed.apply(x, Block().to("cuda"))
    (h.sum() + h.square().sum()).backward()


def twice_differentiated() -> None:
    x = torch.randn(3, 4, device="cuda", requires_grad=True)
    y = x.tanh()
    (g,) = torch.autograd.grad((y * y + y).sum(), x, create_graph=True)
    (g.square().sum() + y.sum()).backward()


def graph_kept() -> None:
    h = torch.randn(4, device="cuda", requires_grad=True) * 2
    loss = (h.sin() + h.cos()).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def changed_by_hooks() -> None:
    h = torch.randn(4, device="cuda", requires_grad=True) * 2
    h.register_hook(lambda g: g * 3 + g)
    (h.sin() + h.cos() + h.exp()).sum().backward()


def some_inputs() -> None:
    w, v = (torch.randn(4, device="cuda", requires_grad=True) for _ in range(2))
    h = w * 2 + v
    (h.sin() + h.cos()).sum().backward(inputs=[w])


def views() -> None:
    h = torch.randn(4, 4, device="cuda", requires_grad=True) * 2
    h[0].mul_(2)
    a, b = h.chunk(2)
    ((a * b).sum() + h.t().sum()).backward()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (checkpointed, "sum of 2 gradients of the result of torch.Tensor.mul"),
        (twice_differentiated, "sum of 3 gradients of the result of torch.Tensor.tanh"),
        (graph_kept, "accumulation into .grad of a leaf of shape (4,)"),
        (changed_by_hooks, "sum of 3 gradients of the result of torch.Tensor.mul"),
        (some_inputs, "sum of 2 gradients of the result of torch.Tensor.add"),
        (views, "sum of 2 gradients of the result of torch.Tensor.mul_"),
        (tied_weights, "sum of 2 gradients of words.weight"),
        (layer_used_twice, "conversion of the sum of gradients of weight"),
    ],
)
def test_right_sums_are_compared_and_raise_no_alarm(program: Callable[[], None], words: str) -> None:
    comparison = compared(program)
    assert not comparison.blames
    assert any(place.startswith(words) for place in places(comparison)), places(comparison)


def test_sparse_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_INCLUDE_CPU", "1")
    words, numbers = nn.Embedding(11, 4, sparse=True), torch.arange(5)

    def program() -> None:
        for _ in range(2):
            (words(numbers).sum() + words(numbers + 1).square().sum()).backward()

    comparison = compared(program)
    assert not comparison.blames
    assert "sum of 2 gradients of weight" in places(comparison)
    assert "accumulation into .grad of weight" in places(comparison)


def test_sums_do_not_change_what_the_engine_does() -> None:
    """A gradient that nobody else holds becomes `.grad` without a copy, and `.grad` stays the same tensor."""
    model, x = nn.Linear(8, 8).to("cuda"), torch.ones(4, 8, device="cuda")
    with op_tools.OpAutoCompare() as comparison:
        model(x).sum().backward()
        assert not places(comparison), "the first gradient is taken over, nothing is added or copied"
        first = model.weight.grad
        model(x).sum().backward()
        assert model.weight.grad is first
    assert {row["op"] for row in comparison.records() if "autograd" in row["op"]} == {"autograd.accumulate_grad.add_"}


@pytest.mark.skipif(not IN_PLACE, reason="a Python object for a gradient keeps its memory before 2.12")
def test_engine_still_adds_in_place() -> None:
    """It does so only while nobody else holds the memory of a gradient; else faults of that kernel would hide."""

    def program() -> None:
        h = torch.randn(4, device="cuda", requires_grad=True) * 2
        (h.sin() * h.cos() * h.exp()).sum().backward()

    found = {row["op"] for row in compared(program).records()}
    assert {op for op in found if "autograd" in op} == {"autograd.sum_of_gradients.add_"}


def test_lists_of_operators_hold_for_sums() -> None:
    assert not places(compared(residual, ops=["torch.nn.functional.linear"]))
    assert not places(compared(residual, disable=["autograd.*"]))
    assert places(compared(residual, ops=["autograd.sum_of_gradients.*"]))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [({}, True), ({"ops": ["torch.add"]}, False), ({"disable": ["autograd.*"]}, False), ({"ops": ["autog.*_"]}, True)],
)
def test_nothing_is_heard_for_lists_without_sums(options: dict[str, Any], wanted: bool) -> None:
    with op_tools.OpAutoCompare(**options) as comparison:
        assert INTERCEPTOR.sums.wanted is wanted
    listed = [*options.get("ops", ()), *options.get("disable", ())]
    assert len(comparison.filter.unused()) == len(listed), "to be asked about sums is not to see one"


def test_passes_that_were_not_heard_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums.GradientSums, "_prepare", lambda self: None)
    monkeypatch.setattr(INTERCEPTOR.sums, "_library", None)
    comparison = compared(residual)
    assert any("sums of gradients in 1 backward pass not compared" in line for line in comparison.summary())


@needs_soft
def test_wrong_sum_can_be_repeated() -> None:
    comparison = compared(micro_batches, double)
    script = Path(comparison.blames[0].folder, "reproduce.py").read_text()
    assert "FUNCTION = 'torch.Tensor.add_'\n" in script
