"""Gradients of products without a forward pass: those of autograd, and judged alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from op_tools.call.functions import name_of
from op_tools.judge import golden
from op_tools.judge.golden import GoldenResult
from op_tools.judge.gradients import gradients_alone
from op_tools.judge.verdict import RIGHT, WRONG, judge_call


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "linear": (F.linear, (_x(2, 7, 5), _x(6, 5), _x(6)), {}),
    "linear without bias": (F.linear, (_x(7, 5), _x(6, 5)), {}),
    "linear of a vector": (F.linear, (_x(5), _x(6, 5), None), {}),
    "conv1d": (F.conv1d, (_x(3, 4, 9), _x(6, 4, 3), _x(6)), {"padding": 1}),
    "conv2d": (F.conv2d, (_x(40, 3, 40, 30), _x(5, 3, 7, 5), None, 2, (3, 1)), {}),
    "conv2d with a bias": (F.conv2d, (_x(3, 4, 9, 8), _x(6, 4, 3, 3), _x(6), (2, 1), 1), {}),
    "conv2d in groups": (F.conv2d, (_x(3, 4, 9, 8), _x(6, 2, 3, 3)), {"groups": 2, "dilation": (1, 2)}),
    "conv3d": (F.conv3d, (_x(2, 3, 5, 6, 4), _x(4, 3, 3, 2, 1), None, 1, 0, 1, 1), {}),
}


def _results(name: str, only: tuple[int, ...]) -> tuple[GoldenResult, GoldenResult]:
    """By autograd, and by themselves."""
    function, args, kwargs = CALLS[name]
    sent = [torch.randn_like(function(*args, **kwargs))]
    both = [golden.run(function, args, kwargs, grad_outputs=sent, only=o) for o in (None, only)]
    return both[0], both[1]


@pytest.mark.parametrize("only", [(0,), (1,), (0, 1, 2), (1, 2)])
@pytest.mark.parametrize("name", list(CALLS))
def test_they_are_those_of_autograd(name: str, only: tuple[int, ...]) -> None:
    whole, alone = _results(name, only)
    assert whole.outputs is not None
    assert alone.outputs is None, "there was no forward pass"
    assert whole.grad_inputs is not None
    assert alone.grad_inputs is not None
    assert len(alone.grad_inputs) == len(whole.grad_inputs)
    for number, (theirs, ours) in enumerate(zip(whole.grad_inputs, alone.grad_inputs)):
        assert (ours is None) == (number not in only)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["linear", "conv2d with a bias"])
def test_they_find_what_those_of_autograd_find(name: str) -> None:
    function, args, _ = CALLS[name]
    for result in _results(name, (0, 1, 2)):
        assert result.grad_inputs is not None
        right = [None if g is None else g.float() for g in result.grad_inputs]
        op = name_of(function)
        assert judge_call(op, result, grad_inputs=right).verdict == RIGHT
        for number in range(3):
            wrong = [g if n != number or g is None else g * (1 + 1e-4) for n, g in enumerate(right)]
            assert judge_call(op, result, grad_inputs=wrong).verdict == WRONG
        assert judge_call(op, result, grad_inputs=[None, *right[1:]]).verdict == WRONG, "one that is missing"
    assert all(t.grad is None for t in args if isinstance(t, torch.Tensor))


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (F.conv2d, (_x(3, 4, 9, 8), _x(6, 4, 3, 3), None, 1, "same")),  # how much is padded is not known
        (F.conv2d, (_x(4, 9, 8), _x(6, 4, 3, 3))),  # one image
        (torch.mul, (_x(4), _x(4))),
    ],
)
def test_calls_that_no_rule_knows_go_the_usual_way(function: Any, args: tuple[Any, ...]) -> None:
    sent = [torch.randn_like(function(*args))]
    assert gradients_alone(name_of(function), args, {}, sent, (0, 1)) is None
    found = golden.run(function, args, grad_outputs=sent, only=(0, 1))
    assert found.outputs is not None
    assert all(g is not None for g in found.grad_inputs or ())


def test_a_tensor_in_two_places_goes_the_usual_way() -> None:
    x = _x(4, 4)
    assert gradients_alone("torch.nn.functional.linear", (x, x), {}, [torch.ones(4, 4)], (0, 1)) is None
