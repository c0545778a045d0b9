"""Arguments and gradients by number: `grad[i]` is the gradient of `input[i]`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from op_tools.call.arguments import Numbering, compared_arguments, numbers_of
from op_tools.call.description import describe
from op_tools.call.equality import leaves_of
from op_tools.judge import golden, verdict

X, W, B = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
INDEX = torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "indices"),
    [
        ("torch.nn.functional.linear", (X, W, B), {}, [0, 1, 2]),
        ("torch.nn.functional.linear", (X, W, None), {}, [0, 1]),
        ("torch.nn.functional.linear", (X,), {"weight": W, "bias": B}, [0, 1, 2]),
        ("torch.Tensor.sum", (X,), {}, [None]),
        ("torch.Tensor.mean", (X, (-1,)), {"keepdim": True}, [None]),
        ("torch.nn.functional.cross_entropy", (X, INDEX), {}, [None]),
        ("torch.nn.functional.embedding", (INDEX, X), {}, [None]),
        ("torch.Tensor.index_put", (X, (INDEX,), W), {}, [0, 2]),
        ("torch.cat", ([X, X],), {"dim": 0}, [0, 1]),
        ("torch.Tensor.div_", (X, 2), {}, [0, 1]),
        ("torch.mul", (2.5, X), {}, [0, 1]),
        ("torch.Tensor.to", (X, 0), {}, [None]),
        ("torch.Tensor.pow", (X, 2), {}, [None]),
        ("torch.Tensor.clamp", (X, 0.0, 1.0), {}, [None]),
        ("torch.Tensor.scatter_add_", (X, 0, INDEX, X), {}, [0, 3]),
        ("torch.where", (INDEX > 0, B[:3], B[:3]), {}, [1, 2]),
        ("torch.view_as_real", (torch.zeros(2, dtype=torch.complex64),), {}, [None]),
        ("torch.arange", (3,), {}, []),
    ],
)
def test_what_may_carry_a_gradient_has_the_number_of_its_argument(
    op: str, args: Any, kwargs: Any, indices: list[int | None]
) -> None:
    numbers = numbers_of(op, args, kwargs)
    assert [index for index, _ in numbers.gradients] == indices
    leaves = list(leaves_of(compared_arguments(args, kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for index, place in numbers.gradients:
        if index is not None and place is not None:
            assert leaves[index] is tensors[place]
            assert numbers.place("grad_input", index) == numbers.place("input", index) == place
            assert numbers.labels("grad")[place] == f"grad[{index}]"
    assert numbers.place("output", 0) is None


def test_a_table_of_gradients_has_a_row_for_none() -> None:
    numbers = Numbering().of("torch.Tensor.div_", 0, (X, 2), {})
    meta = describe((X,)).args[0]
    assert numbers.labelled(describe((X,)), "grad_inputs") == [("grad_inputs[0]", meta), ("grad_inputs[1]", "None")]
    numbers = numbers_of("torch.nn.functional.linear", (X, W), {})
    assert numbers.labelled(describe((None, W)), "grad")[0] == ("grad[0]", "None")


def test_calls_that_look_alike_are_numbered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    numbering = Numbering()
    first = numbering.of("torch.add", 7, (X, X), {})
    assert numbering.of("torch.add", 7, (), {}) is first
    assert numbering.of("torch.add", 0, (X, 1), {}) is not numbering.of("torch.add", 0, (X, 1), {})


def test_results_behind_a_number_are_judged_as_themselves() -> None:
    """`out` is argument 2 here, but only the second tensor: its uncertainty is not that of another one."""
    torch.manual_seed(0)
    x = 1000 * torch.randn(4000, 3)
    out = torch.zeros(4000, 3)
    result = golden.run(torch.cumsum, (x, 0), {"out": out})
    assert result.comparable, result.reason
    exact = result.outputs
    right = (exact + 0.6 * torch.finfo(torch.float32).eps * exact.abs().cummax(0).values).float()
    after = ((x, 0), {"out": right})
    judged = verdict.judge_call("torch.cumsum", result, inputs_after=after)
    assert judged.verdict == verdict.RIGHT, judged.reason
    assert [row.label for row in judged.rows] == [f"torch.cumsum input[{n}]" for n in range(3)]
    wrong = ((x, 0), {"out": right + 50})
    assert verdict.judge_call("torch.cumsum", result, inputs_after=wrong).verdict == verdict.WRONG
