"""Axes of operators that no rule knows, found by golden runs of corners of a call, or of all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from op_tools.call.description import tensors_in
from op_tools.judge.sampling.trial import axes_by_trial

Function = Callable[..., torch.Tensor]


def _names(function: Function, *args: torch.Tensor) -> tuple[Any, int]:
    """The names of the dimensions of the result, and the most elements of the arguments of a golden run."""
    most = [0]

    def run(value: tuple[Any, Any]) -> Sequence[torch.Tensor] | None:
        most.append(sum(t.numel() for t in tensors_in(value)))
        try:
            return [function(*value[0], **value[1])]
        except (RuntimeError, ValueError):
            return None

    found = axes_by_trial((args, {}), run)
    return None if found is None else found.results[0], max(most)


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _by_heads(x: torch.Tensor) -> torch.Tensor:
    heads = x.unflatten(-1, (-1, 100))
    return (heads / heads.norm(dim=-1, keepdim=True)).flatten(-2)


def _half_shifted(x: torch.Tensor) -> torch.Tensor:
    """The second half of the channels comes from the step before."""
    half = x.shape[-1] // 2
    return torch.cat((x[..., :half], x[..., half:].roll(1, 1)), -1)


ALIKE: list[tuple[str, Function, tuple[str | None, ...] | None]] = [
    ("along one dimension", lambda x: x.cumsum(1), ("d3", None, "d1")),
    ("everything by itself", lambda x: x.exp(), ("d3", "d2", "d1")),
    ("from far away", lambda x: x + x.roll(300, -1), ("d3", "d2", None)),
    ("from far away in time", lambda x: torch.cat((x[:, :200], x[:, 200:] + x[:, :-200]), 1), ("d3", None, "d1")),
    ("from the whole", lambda x: x / x.abs().max(), None),
    ("half of it from the step before", _half_shifted, ("d3", None, None)),
    ("normed, half of it from before", lambda x: _half_shifted(x) / x.norm(dim=-1, keepdim=True), ("d3", None, None)),
    ("in groups of channels", _by_heads, ("d3", "d2", None)),
]


@pytest.mark.parametrize(("function", "names"), [each[1:] for each in ALIKE], ids=[each[0] for each in ALIKE])
def test_corners_show_the_axes_of_a_call(function: Function, names: Any) -> None:
    x = _x(24, 400, 600)
    assert _names(function, x)[0] == names


def test_corners_are_much_smaller_than_the_call() -> None:
    x, scale = _x(24, 400, 600), _x(600)
    names, most = _names(lambda x, s: (x * s).cumsum(1), x, scale)
    assert names == ("d3", None, "d1")
    assert most < x.numel() // 8


def test_a_call_that_has_no_golden_run_of_a_corner_is_tried_as_a_whole() -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] != 400:
            raise ValueError("the length is given elsewhere")
        return x.cumsum(1)

    x = _x(24, 400, 60)
    assert _names(picky, x) == (("d3", None, "d1"), x.numel())


def test_a_corner_of_zeros_says_nothing() -> None:
    x = torch.zeros(24, 400, 60, dtype=torch.float64)
    x[13, 201, 31] = 1.0  # elsewhere, all of it looks as if every element were by itself
    assert _names(lambda x: x.cumsum(1), x) == (("d3", None, "d1"), x.numel())


def test_where_a_result_has_another_length_there_is_no_axis() -> None:
    assert _names(lambda x: x[..., ::2].cumsum(1), _x(24, 400, 600))[0] == ("d3", None, None)
