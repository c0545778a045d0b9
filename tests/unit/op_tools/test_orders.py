"""Sums in the orders of real kernels: close to the exact ones, off as a loop in float32 is, and never an alarm."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from op_tools.judge import golden, orders, verdict

CASES: dict[str, tuple[list[tuple[int, ...]], Callable[..., torch.Tensor]]] = {
    "linear": ([(2, 5, 7), (3, 7), (3,)], F.linear),
    "bmm": ([(3, 4, 5), (3, 5, 2)], torch.bmm),
    "mv": ([(4, 5), (5,)], torch.mv),
    "dot": ([(5,), (5,)], torch.dot),
    "conv1d": ([(2, 4, 11), (6, 4, 3), (6,)], F.conv1d),
    "conv2d": ([(2, 4, 9, 8), (6, 2, 3, 3), (6,)], lambda x, w, b: F.conv2d(x, w, b, 2, 1, groups=2)),
    "dilated": ([(2, 4, 11, 9), (6, 4, 3, 2), (6,)], lambda x, w, b: F.conv2d(x, w, b, 1, (2, 1), 2)),
    "conv3d": ([(2, 2, 4, 5, 5), (3, 2, 2, 3, 3)], lambda x, w: F.conv3d(x, w, padding=1)),
    "transposed": ([(2, 4, 5, 5), (4, 3, 3, 3), (3,)], lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1)),
    "batch_norm": ([(4, 3, 5), (3,), (3,)], lambda x, w, b: F.batch_norm(x, None, None, w, b, True)),
    "layer_norm": ([(4, 6), (6,), (6,)], lambda x, w, b: F.layer_norm(x, (6,), w, b)),
    "group_norm": ([(4, 6, 5), (6,), (6,)], lambda x, w, b: F.group_norm(x, 2, w, b)),
    "sum": ([(4, 5, 6)], lambda x: x.sum((0, 2), keepdim=True)),
    "mean": ([(4, 5, 6)], torch.mean),
    "var": ([(4, 5, 6)], lambda x: x.var(1)),
    "norm": ([(4, 5)], torch.norm),
    "norm of order 3": ([(4, 5)], lambda x: torch.linalg.vector_norm(x, 3.0, 1)),
    "norm of order 1/2": ([(4, 5)], lambda x: x.abs().norm(0.5)),
    "pairwise_distance": ([(4, 5), (4, 5)], lambda x, y: F.pairwise_distance(x, y, 1.0)),
    "cdist": ([(4, 5), (3, 5)], lambda x, y: torch.cdist(x, y, p=1.0)),
    "avg_pool2d": ([(2, 3, 6, 6)], lambda x: F.avg_pool2d(x, 3)),
    "embedding_bag": ([(5, 3)], lambda x: F.embedding_bag(torch.tensor([[1, 1, 2, 0]]), x)),
    "scatter_reduce": ([(3,), (4,)], lambda x, y: x.scatter_reduce(0, torch.tensor([1, 1, 2, 1]), y, "sum")),
    "softmax": ([(4, 5)], lambda x: F.softmax(x, 1)),
    "cumsum": ([(4, 5)], lambda x: x.cumsum(0)),
    "index_add": ([(5, 3), (4, 3)], lambda x, y: x.index_add(0, torch.tensor([1, 1, 2, 1]), y)),
    "embedding": ([(5, 3)], lambda x: F.embedding(torch.tensor([1, 1, 2, 0]), x)),
}


def run(name: str, mode: Any) -> list[torch.Tensor]:
    shapes, function = CASES[name]
    torch.manual_seed(1)
    leaves = [torch.randn(s).double().requires_grad_() for s in shapes]
    with mode:
        y = function(*leaves)
        weights = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape)
        return [y.detach(), *torch.autograd.grad((y * weights).sum(), leaves)]


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("name", list(CASES))
def test_close_to_the_exact_result(name: str, lanes: int) -> None:
    exact = run(name, contextlib.nullcontext())
    found = run(name, orders.InOrder(lanes, math.inf))
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, exact)]
    assert max(errors) < 2e-6
    assert max(errors) > 0, "sums are really done in float32"


@given(st.integers(0, 200), st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_as_a_loop_adds(count: int, width: int, lanes: int, seed: int) -> None:
    terms = np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)
    sums = np.zeros((max(1, min(lanes, count)), width), np.float32)
    for number, row in enumerate(terms):
        sums[number % lanes] = sums[number % lanes] + row
    expected = np.zeros(width, np.float32)
    for number, row in enumerate(sums):
        expected = row if number == 0 else expected + row
    rows = torch.from_numpy(terms)
    found = orders.InOrder(lanes, math.inf).total(count, width, lambda some: rows[some])
    assert np.array_equal(found.numpy(), expected)


def test_too_many_terms_end_in_time() -> None:
    mode = orders.InOrder(1, time.perf_counter() - 1)
    with pytest.raises(orders.TooLong):
        mode.total(4, 4, lambda some: torch.ones(len(some), 4))


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1.1])
def test_equal_terms_in_a_loop_are_right(value: float) -> None:
    """A loop in float32 drifts; the bound of random roundings alone does not allow that."""
    x = torch.full((40_000, 2), value)
    looped = torch.from_numpy(np.add.reduce(x.numpy(), axis=0))
    result = golden.run(torch.sum, (x, 0), device="cpu")
    judged = verdict.judge_call("torch.sum", result, outputs=looped)
    assert judged.verdict == verdict.RIGHT, judged.reason
    assert verdict.judge_call("torch.sum", result, outputs=looped * 1.001).verdict == verdict.WRONG


INDICES = torch.zeros(1, 30_000, dtype=torch.long)
EQUAL: dict[str, Callable[..., torch.Tensor]] = {
    "torch.linalg.vector_norm": lambda x: torch.linalg.vector_norm(x, 3.0),
    "torch.norm": lambda x: torch.norm(x.to(torch.complex64) if x.dtype == torch.float32 else x + 0j, 2),
    "torch.linalg.norm": lambda x: torch.linalg.norm(x, 3.0, dtype=x.dtype),
    "torch.cdist": lambda x: torch.cdist(x[None], x[None] * 2, p=1.0),
    "torch.bincount": lambda x: torch.bincount(INDICES[0], x),
    "torch.Tensor.scatter_reduce": lambda x: x[:3].scatter_reduce(0, INDICES[0], x, "mean"),
    "torch.nn.functional.avg_pool1d": lambda x: F.avg_pool1d(x[None], 29_999, 1),
    "torch.nn.functional.embedding_bag": lambda x: F.embedding_bag(INDICES, x[:3, None], mode="mean"),
}


@pytest.mark.parametrize("name", list(EQUAL))
def test_kernels_that_add_equal_terms_one_by_one_are_right(name: str) -> None:
    x = torch.full((30_000,), 0.3)
    result = golden.run(EQUAL[name], (x,), {}, name=name)
    outputs = EQUAL[name](x)
    judged = verdict.judge_call(name, result, outputs=outputs)
    assert judged.verdict == verdict.RIGHT, judged.reason
    far = outputs * (1 + 0.02 * (outputs == outputs))
    assert verdict.judge_call(name, result, outputs=far).verdict == verdict.WRONG


def test_a_constant_background_is_right() -> None:
    """Gradients of a convolution's weights over a constant image, added up one by one."""
    image, weight = torch.full((2, 1, 52, 52), 0.1), torch.randn(1, 1, 3, 3, requires_grad=True)
    sent = torch.ones(2, 1, 50, 50)
    terms = torch.full((5000, 9), 0.1)
    looped = torch.from_numpy(np.add.reduce(terms.numpy(), axis=0)).view(1, 1, 3, 3)
    result = golden.run(F.conv2d, (image, weight), device="cpu", grad_outputs=[sent])
    judged = verdict.judge_call("torch.nn.functional.conv2d", result, grad_inputs=[None, looped])
    assert judged.verdict == verdict.RIGHT, judged.reason


def test_norms_of_a_list_in_some_order() -> None:
    x = torch.rand(1 << 17, generator=torch.Generator().manual_seed(0))
    one_by_one = torch.tensor(np.add.reduce(x.square().numpy()[:, None].repeat(2, axis=1), axis=0)[0]).sqrt()
    result = golden.run(torch._foreach_norm, ([torch.ones(4), x],), name="torch._foreach_norm", device="cuda")
    for factor, expected in ((1.0, verdict.RIGHT), (1.003, verdict.WRONG)):
        found = [torch.tensor(2.0), one_by_one * factor]
        assert verdict.judge_call("torch._foreach_norm", result, outputs=found).verdict == expected


def test_gradients_of_margins_that_a_loop_adds_are_right() -> None:
    """The gradient of the target is a sum of equal terms, one for every other class."""
    x, target = torch.linspace(-0.4, 0.4, 498).requires_grad_(), torch.tensor(0)
    name, sent = "torch.nn.functional.multi_margin_loss", torch.tensor(1.2309371)
    y = F.multi_margin_loss(x, target)
    (found,) = torch.autograd.grad(y, x, sent)
    result = golden.run(F.multi_margin_loss, (x, target), {}, name=name, grad_outputs=[sent])
    for gradient, expected in ((found, verdict.RIGHT), (found * 1.001, verdict.WRONG)):
        judged = verdict.judge_call(name, result, outputs=y.detach(), grad_inputs=[gradient, None])
        assert judged.verdict == expected, judged.reason
