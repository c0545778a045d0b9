"""What a result is apart from its values: shape, dtype, strides, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from op_tools.judge import kinds

X = torch.randn(4, 6)
CALLS: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("torch.add", torch.add, (X, 1)),
    ("torch.add", torch.add, (X.t(), X.t())),
    ("torch.mm", torch.mm, (X, X.t())),
    ("torch.t", torch.t, (X,)),
    ("torch.reshape", torch.reshape, (X.t(), (-1,))),
    ("torch.Tensor.contiguous", torch.Tensor.contiguous, (X,)),
    ("torch.Tensor.expand", torch.Tensor.expand, (X[:, :1], 4, 6)),
    ("torch.max", torch.max, (X, 1)),
    ("torch.split", torch.split, (X, 2)),
    ("torch.nn.functional.dropout", F.dropout, (X, 0.5, False)),
    ("torch.nn.functional.layer_norm", F.layer_norm, (X, (6,))),
    ("torch.Tensor.to", torch.Tensor.to, (X, torch.bfloat16)),
]


def of(results: Any, args: Any) -> list[kinds.Kind]:
    return kinds.kinds_of(results, kinds.borrowed(args, results))


@pytest.mark.parametrize(("op", "function", "args"), CALLS)
def test_right_results_are_right(op: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    assert kinds.problem(op, of(function(*args), args), of(function(*args), args)) == ""


@pytest.mark.parametrize(
    ("op", "function", "args", "result", "reason"),
    [
        ("torch.mm", torch.mm, (X, X.t()), torch.ones(3, 4), "shape (3, 4) instead of (4, 4)"),
        ("torch.exp", torch.exp, (X.bfloat16(),), torch.ones(4, 6), "dtype torch.float32 instead of torch.bfloat16"),
        ("torch.exp", torch.exp, (X.t(),), torch.ones(6, 4), "strides (4, 1) instead of (1, 6)"),
        ("torch.mm", torch.mm, (X, X.t()), torch.ones(1).expand(4, 4), "several elements share memory"),
        ("torch.abs", torch.abs, (X,), X, "lies in the memory of an argument; it must have its own"),
        ("torch.t", torch.t, (X,), X.t().clone(), "it is a copy"),
        ("torch.max", torch.max, (X, 1), (torch.ones(4),), "1 tensors instead of 2"),
    ],
)
def test_wrong_ones_are_named(
    op: str, function: Callable[..., Any], args: tuple[Any, ...], result: Any, reason: str
) -> None:
    assert reason in kinds.problem(op, of(result, args), of(function(*args), args))


def test_libraries_choose_the_strides_of_what_is_not_elementwise() -> None:
    x, w = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    result = F.conv2d(x, w).contiguous(memory_format=torch.channels_last)
    wanted = of(F.conv2d(x, w), (x, w))
    assert kinds.problem("torch.nn.functional.conv2d", of(result, (x, w)), wanted) == ""


def test_a_copy_between_devices_may_be_one_on_the_cpu_too() -> None:
    assert kinds.problem("torch.Tensor.cuda", of(X.clone(), X), of(X, X)) == ""
