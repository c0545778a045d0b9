"""Large calls on lists, piece by piece: together the same rows as the whole call, in the same order."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from op_tools.compare import pieces
from op_tools.compare.pieces import Sides
from op_tools.judge import golden, verdict

sizes = st.lists(st.integers(1, 400), min_size=2, max_size=9)


def judged(op: str, function: Any, sides: Sides, kwargs: dict[str, Any]) -> verdict.Judgement:
    result = golden.run(function, sides.args, kwargs, name=op, device="cuda")
    inputs = verdict.judge(op, sides.args_after, result.inputs_after[0], result=result, part="input")
    return inputs + verdict.judge(op, sides.result, result.outputs, result=result, part="output")


def call(op: str, lengths: list[int], kwargs: dict[str, Any], seed: int) -> tuple[Any, Sides]:
    function = getattr(torch, op.removeprefix("torch."))
    generator = torch.Generator().manual_seed(seed)
    lists: list[Any] = [[torch.randn(n, generator=generator) for n in lengths] for _ in range(4)]
    if op == "torch._fused_adam_":
        steps = [torch.tensor(3.0) for _ in lengths]
        args = (*lists[:3], [t.abs() for t in lists[3]], [], steps)
    elif op == "torch._foreach_addcdiv_":
        args = (lists[0], lists[1], [t.abs() + 1 for t in lists[2]], [0.5 + k for k in range(len(lengths))])
    elif op == "torch._foreach_norm":
        args = (lists[0],)
    else:
        args = (lists[0], lists[1])
    after = tuple([[t.clone() if isinstance(t, torch.Tensor) else t for t in a] for a in args])
    result = function(*after, **kwargs)
    return function, Sides(args, after, list(result) if isinstance(result, (list, tuple)) else result)


ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("torch._fused_adam_", ADAM),
    ("torch._foreach_addcdiv_", {}),
    ("torch._foreach_add", {"alpha": 2.0}),
    ("torch._foreach_norm", {}),
]


@pytest.mark.parametrize(("op", "kwargs"), CALLS, ids=[op for op, _ in CALLS])
@settings(max_examples=6, deadline=None)
@given(lengths=sizes, seed=st.integers(0, 1000))
def test_together_they_are_the_whole(op: str, kwargs: dict[str, Any], lengths: list[int], seed: int) -> None:
    function, sides = call(op, lengths, kwargs, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_AT_ONCE", 2000)
        parts = pieces.pieces(op, sides, kwargs)
    assert parts is not None
    assert len(parts) > 1 or sum(lengths) * 4 <= 2000
    found = pieces.together(op, [(p, judged(op, function, p.sides, kwargs)) for p in parts])
    whole = judged(op, function, sides, kwargs)
    assert found is not None
    assert (found.verdict, whole.verdict) == (verdict.RIGHT, verdict.RIGHT)
    columns = ("name", "allclose", "max_abs_diff", "max_ulp", "atol", "rtol", "error_info", "verdict")
    for mine, expected in zip(found.rows, whole.rows):
        for column in columns:
            assert getattr(mine, column) == getattr(expected, column), (column, mine, expected)
    assert len(found.rows) == len(whole.rows)


def test_a_fault_in_one_piece_is_that_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_AT_ONCE", 2000)
    function, sides = call("torch._foreach_add", [300] * 7, {}, 0)
    sides.result[5][17] += 1.0
    parts = pieces.pieces("torch._foreach_add", sides, {})
    assert parts is not None
    assert len(parts) == 7
    found = pieces.together("x", [(p, judged("torch._foreach_add", function, p.sides, {})) for p in parts])
    assert found is not None
    assert found.verdict == verdict.WRONG
    assert [row.name for row in found.rows if row.verdict == verdict.WRONG] == ["x output[5]"]


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "result"),
    [
        ("torch.add", ([torch.ones(2)] * 2, [torch.ones(2)] * 2), {}, None),
        ("torch._foreach_add_", ([torch.ones(2)] * 2, [torch.ones(2)] * 3), {}, None),
        ("torch._foreach_add_", ([torch.ones(2)] * 2, torch.ones(())), {}, None),
        ("torch._foreach_add_", ([torch.ones(2)], [torch.ones(2)]), {}, None),
        ("torch._foreach_add_", ([torch.ones(2)] * 2,), {"scale": torch.ones(())}, None),
        ("torch._foreach_add", ([torch.ones(2)] * 2,), {}, torch.ones(2)),
        ("torch._foreach_add_", (1.0,), {}, None),
    ],
    ids=["another", "lengths", "tensor", "one", "shared", "result", "none"],
)
def test_what_is_not_made_of_pieces(op: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
    assert pieces.pieces(op, Sides(args, args, result), kwargs) is None


def test_rows_that_do_not_match_are_not_guessed() -> None:
    function, sides = call("torch._foreach_add", [3, 4], {}, 0)
    parts = pieces.pieces("torch._foreach_add", sides, {})
    assert parts is not None
    judgement = judged("torch._foreach_add", function, parts[0].sides, {})
    short = dataclasses.replace(judgement, rows=judgement.rows[:-1])
    assert pieces.together("x", [(parts[0], short)]) is None
