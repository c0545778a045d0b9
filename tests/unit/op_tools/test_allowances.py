"""TF32 where the settings allow it, and known weaknesses of kernels: explained up to their size, and said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from op_tools.judge import allowances, golden, verdict

NOTE = verdict.Rules(allowances=True)


def in_tf32(x: torch.Tensor) -> torch.Tensor:
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.fixture(params=[False, True])
def allowed(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = before


def test_tf32(allowed: bool) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 256), torch.randn(256, 64)
    result = golden.run(torch.mm, (a, b), device="cuda", name="torch.mm")
    found = verdict.judge_call("torch.mm", result, outputs=in_tf32(a) @ in_tf32(b), rules=NOTE)
    assert found.verdict == (verdict.RIGHT if allowed else verdict.WRONG), found.reason
    assert (allowances.IN_TF32 in found.rows[0].error_info) == allowed
    low = (a.bfloat16() @ b.bfloat16()).float()
    assert verdict.judge_call("torch.mm", result, outputs=low, rules=NOTE).verdict == verdict.WRONG, "less than TF32"
    soft = golden.run(torch.mm, (a, b), device="soft", name="torch.mm")
    judged = verdict.judge_call("torch.mm", soft, outputs=in_tf32(a) @ in_tf32(b), rules=NOTE)
    assert judged.verdict == verdict.WRONG, "only CUDA has TF32"


def batch_norm() -> tuple[golden.GoldenResult, list[torch.Tensor | None], torch.Tensor]:
    """Gradients of a batch norm on bfloat16, and the bias's as a kernel has it that adds up in bfloat16."""
    torch.manual_seed(0)
    x, sent = torch.randn(64, 8, 10).bfloat16().requires_grad_(), torch.randn(64, 8, 10).bfloat16() * 0.1
    weight, bias = torch.ones(8, requires_grad=True), torch.zeros(8, requires_grad=True)
    args = (x, torch.zeros(8), torch.ones(8), weight, bias, True)
    result = golden.run(F.batch_norm, args, device="cuda", grad_outputs=[sent], name="torch.nn.functional.batch_norm")
    grads = [None if g is None else g.float() for g in result.grad_inputs or ()]
    assert grads[0] is not None
    grads[0] = grads[0].bfloat16()
    lanes = torch.zeros(8, 8, dtype=torch.bfloat16)
    for some in sent.permute(0, 2, 1).reshape(-1, 8, 8):
        lanes = lanes + some
    return result, grads, lanes.sum(0).float()


def test_a_known_weakness_has_a_verdict_of_its_own() -> None:
    result, grads, coarse = batch_norm()
    name = "torch.nn.functional.batch_norm"
    assert verdict.judge_call(name, result, grad_inputs=grads, rules=NOTE).verdict == verdict.RIGHT
    found = [*grads[:-1], coarse]
    judged = verdict.judge_call(name, result, grad_inputs=found, rules=NOTE)
    assert judged.verdict == verdict.WEAK
    assert "gradient of the bias" in judged.reason
    assert verdict.judge_call(name, result, grad_inputs=found).verdict == verdict.WRONG, "unless it is to be blamed"
    assert grads[-1] is not None
    twice = [*grads[:-1], grads[-1] * 2]
    assert verdict.judge_call(name, result, grad_inputs=twice, rules=NOTE).verdict == verdict.WRONG, "too large for it"


def test_only_what_the_ledger_names() -> None:
    half, single = torch.bfloat16, torch.float32
    assert "recurrent" in allowances.known_weakness("torch.gru", "backward", "cuda", single)
    assert not allowances.known_weakness("torch.gru", "backward", "soft", single)
    assert not allowances.known_weakness("torch.nn.functional.linear", "forward", "cuda", half)
    assert not allowances.known_weakness("torch.nn.functional.batch_norm", "forward", "cuda", half)


def bias_gradient_of_batch_norm(off: float) -> verdict.Judgement:
    """The judgement on a bias gradient that is off by so many times the length of what is added up."""
    x = torch.randn(64, 3, 14, 14, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    sent = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight, bias = torch.ones(3).requires_grad_(), torch.zeros(3).requires_grad_()
    args = (x, torch.zeros(3), torch.ones(3), weight, bias, True, 0.1, 1e-5)
    result = golden.run(F.batch_norm, args, {}, grad_outputs=[sent], device="cuda")
    assert result.grad_inputs is not None
    grads = [None if g is None else g.float() for g in result.grad_inputs]
    grads[0] = grads[0].bfloat16()  # type: ignore[union-attr]
    length = float(sent[:, 0].float().norm())
    grads[4] = grads[4] + off * length  # type: ignore[operator]
    rules = verdict.Rules(allowances=True)
    return verdict.judge_call("torch.nn.functional.batch_norm", result, grad_inputs=grads, rules=rules)


def test_a_known_weakness_that_a_formula_explains_needs_no_probe() -> None:
    judged = bias_gradient_of_batch_norm(4e-3)  # as a GPU adds it up
    assert judged.verdict == verdict.WEAK
    assert judged.probes == 0


def test_a_known_weakness_does_not_explain_a_sum_that_lacks_a_tenth_of_its_terms() -> None:
    judged = bias_gradient_of_batch_norm(0.3)
    assert judged.verdict == verdict.WRONG
