"""Gradients whose tensors were computed again by checkpointing, or went through hooks of the user."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

import op_tools

Block = Callable[..., torch.Tensor]
again: Callable[..., torch.Tensor] = functools.partial(checkpoint, use_reentrant=False)

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="before 2.8 PyTorch does not tell which hooks are on",
)


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sin(F.linear(torch.tanh(x @ w), w) * 0.3)


def ends_in_softmax(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.cos(x @ w), -1)


def to_the_end(run: Block, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with set_checkpoint_early_stop(False):
        return again(run, x, w)


def inner(run: Block, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return again(lambda x: again(run, torch.cos(x) * 2, w).sigmoid(), x)


def outer(run: Block, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return again(run, again(block, torch.cos(x), w), w)


def selective(run: Block, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return again(run, x, w, context_fn=keep)


def train(way: Callable[..., torch.Tensor], run: Block, device: str, fault: Any = None) -> Any:
    """Compare one step in which `fault` strikes whenever `run` is done again."""
    torch.manual_seed(0)
    x, w = torch.randn(4, 8, device=device, requires_grad=True), torch.randn(8, 8, device=device, requires_grad=True)
    runs = []

    def watched(*args: torch.Tensor) -> torch.Tensor:
        runs.append(args)
        if fault is None or len(runs) == 1:
            return run(*args)
        with fault():
            return run(*args)

    with op_tools.OpAutoCompare() as compared:
        way(watched, x, w).square().sum().backward()
    assert not [f for f in compared.findings() if f.kind == "tool-failure"]
    return compared


@pytest.mark.parametrize("way", [again, to_the_end, inner, outer], ids=["again", "to_the_end", "inner", "outer"])
def test_what_is_wrong_when_it_is_computed_again_is_blamed_and_nothing_else(
    device: str, faults: Any, way: Callable[..., torch.Tensor]
) -> None:
    compared = train(way, block, device, lambda: faults.plant("mm: noise=5e-2"))
    assert {(b.op, b.phase) for b in compared.blames} == {
        ("torch.Tensor.matmul", "forward"),
        ("torch.nn.functional.linear", "forward"),
    }
    assert "every call that computes was compared" in compared.summary()[0]


def test_a_call_that_checkpointing_does_not_let_return_is_compared(device: str, faults: Any) -> None:
    compared = train(again, ends_in_softmax, device, lambda: faults.plant("_softmax: noise=5e-2"))
    assert {b.op for b in compared.blames} == {"torch.softmax"}
    assert compared.blames[0].phase == "forward"


def test_results_that_selective_checkpointing_kept_are_not_those_of_the_second_arguments(
    device: str, faults: Any
) -> None:
    compared = train(selective, block, device, lambda: faults.plant("tanh: noise=5e-2"))
    assert {b.op for b in compared.blames} == {"torch.tanh"}  # whose gradient is computed from its wrong result
    assert not train(selective, block, device, lambda: faults.plant("mm: noise=5e-2")).blames  # it is not done again


def test_a_wrong_gradient_under_checkpointing_is_found(device: str, faults: Any) -> None:
    with faults.plant("tanh_backward: noise=5e-2"):
        compared = train(again, block, device)
    assert {(b.op, b.phase) for b in compared.blames} == {("torch.tanh", "backward")}


def test_hooks_that_round_what_is_saved_make_no_alarm(device: str, faults: Any) -> None:
    def rounded(run: Block, *args: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(torch.Tensor.bfloat16, torch.Tensor.float):
            return run(*args)

    compared = train(rounded, block, device)
    assert not compared.blames
    assert any("may have changed the tensors that it saved" in line for line in compared.summary())


def test_gradients_of_tensors_that_were_kept_on_the_cpu_are_compared(device: str, faults: Any) -> None:
    def on_cpu(run: Block, *args: torch.Tensor) -> torch.Tensor:
        with save_on_cpu():
            return run(*args)

    with faults.plant("tanh_backward: noise=5e-2"):
        compared = train(on_cpu, block, device)
    assert {(b.op, b.phase) for b in compared.blames} == {("torch.tanh", "backward")}
