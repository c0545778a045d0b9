"""A plan says "right" with the rows of the full way, and leaves everything else to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from op_tools.call.traits import traits_of
from op_tools.judge import golden, uncertainty, verdict
from op_tools.judge.verdict import RIGHT, WRONG, Judgement, Plan
from op_tools.native import measuring

pytestmark = pytest.mark.skipif(not measuring.available(), reason="no compiler here: plans need machine code")

INDEX = torch.tensor([3, 0, 7, 3])
CALLS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "linear": (F.linear, [(4, 80), (16, 80), (16,)]),
    "matmul": (torch.matmul, [(3, 5, 70), (70, 9)]),
    "add": (torch.add, [(5, 6), (6,)]),
    "mul": (torch.mul, [(5, 6), (5, 6)]),
    "gelu": (F.gelu, [(7, 9)]),
    "softmax": (lambda x: F.softmax(x, -1), [(7, 9)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (32,), w, b), [(6, 32), (32,), (32,)]),
    "embedding": (lambda w: F.embedding(INDEX, w), [(20, 8)]),
    "sum": (torch.sum, [(40, 9)]),
    "conv2d": (F.conv2d, [(2, 3, 8, 8), (4, 3, 3, 3), (4,)]),
    "max": (lambda x: torch.max(x, 1), [(7, 9)]),  # indices: no plan
    "svd": (torch.linalg.svd, [(4, 4)]),  # signs are free: no plan
}
DTYPES = (torch.float32, torch.bfloat16)


class Kind:
    """Calls of one kind, each judged by the full way and with one plan per part."""

    def __init__(self, name: str, dtype: torch.dtype, rules: verdict.Rules | None = None) -> None:
        self.function, self.shapes = CALLS[name]
        self.name = {"max": "torch.max", "svd": "torch.linalg.svd"}.get(name, f"torch.{name}")
        if name in ("linear", "gelu", "softmax", "layer_norm", "embedding", "conv2d"):
            self.name = f"torch.nn.functional.{name}"
        self.dtype, self.rules = dtype, rules
        self.plans = {"output": Plan(), "grad_input": Plan()}

    def judge(self, seed: int, planted: float = 0.0) -> list[tuple[Judgement, Judgement]]:
        """For each part what the full way says, and what is said with the plan."""
        made = torch.Generator().manual_seed(seed)
        given = [torch.randn(s, generator=made).to(self.dtype).requires_grad_() for s in self.shapes]
        outputs = self.function(*given)
        tensors = [t for t in golden.tensors_in(outputs) if t.requires_grad]
        sent = [torch.randn(t.shape, generator=made).to(t.dtype) for t in tensors]
        grads = torch.autograd.grad(tensors, given, sent)
        grad_outputs = [sent.pop(0) if t.requires_grad else None for t in golden.tensors_in(outputs)]
        found = golden.map_tensors((outputs, list(grads)), lambda t: t.detach().contiguous().clone())
        for tensor in golden.tensors_in(found):
            if planted and tensor.is_floating_point():
                tensor.view(-1)[-1] += planted * tensor.abs().max()
        result = golden.run(
            self.function,
            given,
            grad_outputs=grad_outputs,
            name=self.name,
            traits=traits_of(self.function),
            outputs=outputs,
            device="cpu",
        )
        judged = []
        for part, ours, theirs in (
            ("output", found[0], result.outputs),
            ("grad_input", found[1], result.grad_inputs),
        ):
            options = {"result": result, "part": part, "rules": self.rules}
            full = verdict.judge(self.name, ours, theirs, **options)
            judged.append((full, verdict.judge(self.name, ours, theirs, **options, plan=self.plans[part])))
        return judged


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_rows_with_a_plan_are_those_of_the_full_way(name: str, dtype: torch.dtype) -> None:
    if name == "svd" and dtype != torch.float32:
        pytest.skip("the CPU has no such kernel")
    kind = Kind(name, dtype)
    for seed in range(8):
        for planted in (0.0, 1e-5, 1e-2, 0.3) if seed else (0.0,):
            for full, planned in kind.judge(seed, planted):
                assert planned.verdict == full.verdict
                assert planned.reason == full.reason
                assert repr(planned.rows) == repr(full.rows)
                if planted in (0.0, 0.3) and name != "svd":  # whose gradients depend on more than its signs
                    assert full.verdict == (WRONG if planted else RIGHT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["linear", "matmul", "add", "mul", "embedding"])
def test_a_repeated_call_that_is_right_needs_its_plan_alone(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Kind(name, dtype)
    for seed in range(4):
        kind.judge(seed)
    full_way = []
    judge_pair = verdict._judge_pair
    monkeypatch.setattr(verdict, "_judge_pair", lambda pair, rules: full_way.append(pair) or judge_pair(pair, rules))
    [(first, _), (second, _)] = kind.judge(9)
    assert len(full_way) == len(first.rows) + len(second.rows)


def test_a_plan_that_fails_again_and_again_is_given_up() -> None:
    kind = Kind("linear", torch.float32)
    for seed in range(8):
        assert not kind.plans["output"].gave_up or seed > 4
        kind.judge(seed, 0.3 if seed else 0.0)
    assert kind.plans["output"].gave_up
    [(full, planned), _] = kind.judge(9)
    assert planned == full


def test_another_look_takes_the_full_way() -> None:
    kind = Kind("add", torch.float32)
    kind.judge(0)
    kind.shapes = [(6, 5), (5,)]
    [(full, planned), _] = kind.judge(1)
    assert planned == full
    x = torch.ones(5, 6)
    result = golden.run(torch.add, (x, 1), name="torch.add")
    transposed = torch.full((6, 5), 2.0).t()
    judged = verdict.judge("torch.add", transposed, result.outputs, result=result, plan=kind.plans["output"])
    assert "Inconsistent stride" in judged.rows[0].error_info


@pytest.mark.parametrize(
    "rules", [verdict.Rules("seed"), verdict.Rules(tolerances={"AUTOCOMPARE_ERROR_TOLERANCE": (0.0, 0.0)})]
)
def test_other_standards_and_tolerances_have_no_plan(rules: verdict.Rules) -> None:
    kind = Kind("linear", torch.bfloat16, rules)
    for seed in range(3):
        for full, planned in kind.judge(seed):
            assert planned == full
    assert all(not plan._rows for plan in kind.plans.values())


def test_nested_results_take_the_full_way() -> None:
    x = torch.rand(5)

    def two(a: torch.Tensor) -> Any:
        return a.sin(), [a.cos()]

    plan = Plan()
    result = golden.run(two, (x,), name="two")
    for _ in range(3):
        assert verdict.judge("two", two(x), result.outputs, result=result, plan=plan).verdict == RIGHT
    wrong = (x.sin(), [x.cos() + 0.1])
    assert verdict.judge("two", wrong, result.outputs, result=result, plan=plan).verdict == WRONG


def test_a_call_on_many_tensors_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan learns does not take as many looks at all tensors as there are tensors."""
    looks: list[str] = []
    signature = uncertainty._signature
    monkeypatch.setattr(uncertainty, "_signature", lambda *given: looks.append(given[1]) or signature(*given))
    tensors = [torch.rand(5) + 1 for _ in range(40)]
    result = golden.run(torch._foreach_exp, (tensors,))
    ours = [t.float() * (1 + 2**-22) for t in result.outputs]  # more than a rounding: the structure is asked for
    plan = Plan()
    found = verdict.judge("torch._foreach_exp", ours, result.outputs, result=result, plan=plan)
    assert found.verdict == RIGHT
    assert plan.judge(ours, result.outputs, result, None) is not None
    assert 1 <= len(looks) <= 3
