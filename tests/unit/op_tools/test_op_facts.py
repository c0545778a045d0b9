"""Facts about operators: what is exact, which whole numbers are free."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from op_tools.call import facts
from op_tools.judge import golden, verdict


def source(*args: Any, **kwargs: Any) -> Any:
    return SimpleNamespace(args=args, kwargs=kwargs)


def judged(name: str, call: Any, args: tuple[Any, ...], outputs: Any, **kwargs: Any) -> str:
    result = golden.run(call, args, kwargs, name=name, device="cuda")
    return verdict.judge_call(name, result, outputs=outputs).verdict


# --- mode


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_any_of_the_most_frequent_values_is_the_mode(dtype: torch.dtype) -> None:
    x = torch.tensor([[5, 4, 5, 4, 1], [2, 2, 3, 4, 5]], dtype=dtype)
    ours = torch.tensor([5, 2], dtype=dtype), torch.tensor([2, 1])
    assert judged("torch.mode", torch.mode, (x,), ours) == verdict.RIGHT  # the CPU takes 4
    assert judged("torch.mode", torch.mode, (x,), (torch.tensor([1, 2], dtype=dtype), ours[1])) == verdict.WRONG
    assert judged("torch.mode", torch.mode, (x,), (ours[0], torch.tensor([4, 1]))) == verdict.WRONG
    assert judged("torch.mode", torch.mode, (x,), (ours[0], torch.tensor([7, 1]))) == verdict.WRONG


def test_the_mode_along_another_dimension() -> None:
    x = torch.tensor([[5, 1], [4, 1], [5, 2], [4, 2]], dtype=torch.int32)
    ours = torch.tensor([[5, 2]], dtype=torch.int32), torch.tensor([[0, 3]])
    assert judged("torch.mode", torch.mode, (x, 0, True), ours) == verdict.RIGHT


# --- linspace


@settings(max_examples=60, deadline=None)
@given(st.floats(-100, 100), st.floats(-100, 100), st.integers(2, 200))
def test_whole_numbers_of_a_linspace_in_float32(start: float, end: float, steps: int) -> None:
    """As CUDA's kernel does it: whole ends, a float32 step, from both ends to the middle, cut off."""
    first, last = int(start), int(end)
    step = torch.tensor(last - first, dtype=torch.float32) / (steps - 1)
    index = torch.arange(steps)
    up = first + step * index.float()
    down = last - step * (steps - 1 - index).float()
    ours = torch.where(index < steps // 2, up, down).to(torch.int32)
    different = facts.differing_choices("torch.linspace", source(start, end, steps), ours, ours, 0)
    assert different is not None
    assert not bool(different.any())


def test_a_linspace_that_hits_a_whole_number() -> None:
    theirs = torch.linspace(4.3, -3, 50, dtype=torch.int32)
    ours = theirs.clone()
    ours[14] = 1  # 4 - 14/7, just below 2 in float32
    assert int(theirs[14]) == 2
    assert judged("torch.linspace", torch.linspace, (4.3, -3, 50), ours, dtype=torch.int32) == verdict.RIGHT
    ours[20] += 1
    assert judged("torch.linspace", torch.linspace, (4.3, -3, 50), ours, dtype=torch.int32) == verdict.WRONG


# --- what rounds


def test_the_tangent_of_glu_is_computed() -> None:
    assert facts.facts_of(torch.ops.aten.glu_jvp.default).kind == facts.Kind.POINTWISE
    assert facts.facts_of(torch.ops.aten.relu.default).kind == facts.Kind.EXACT
