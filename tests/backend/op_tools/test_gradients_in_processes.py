"""Gradients of products that worker processes compute without a forward pass: what is wrong is found."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ditorch
import op_tools
from op_tools.compare import pool as compare_pool
from op_tools.compare.judges.workers import Workers

pytestmark = pytest.mark.skipif(not compare_pool.available(), reason="needs Linux")


@pytest.mark.skipif(ditorch.backend.name != "soft", reason="faults are planted in the software accelerator")
@pytest.mark.parametrize("fault", ["", "convolution_backward: element=1e-1", "mm: noise=1e-2", "sum: noise=1e-2"])
def test_gradients_of_products_are_judged_there(fault: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of large calls, whose gradients a process computes without a forward pass: what is wrong is found."""
    from ditorch.soft import faults

    monkeypatch.setenv("OP_AUTOCOMPARE_PROCESSES", "1")
    monkeypatch.setenv("OP_AUTOCOMPARE_COVERAGE", "sample")
    torch.manual_seed(5)
    images, kernels = torch.randn(6, 5, 12, 11, device=device), torch.randn(8, 5, 3, 3, device=device)
    x, weight, bias = (torch.randn(*s, device=device) for s in ((3, 50, 20), (60, 20), (60,)))
    for tensor in (given := [images, kernels, x, weight, bias]):
        tensor.requires_grad_()
    with op_tools.OpAutoCompare() as tool:
        torch.ones(1, device=device).neg()
        pool = tool.judge(Workers).pool
        assert pool is not None
        assert pool.wait_until_ready() == 1
        answers: list[tuple[str, str, bool]] = []
        original = pool._answered

        def note(job: Any, answer: Any) -> None:
            answers.append((job.call.op.rpartition(".")[2], job.phase, answer is not None and answer.rows is not None))
            original(job, answer)

        pool._answered = note
        for _ in range(3):
            results = F.conv2d(images, kernels, None, 2, 1), F.linear(x, weight, bias)
            sent = [torch.randn_like(r) for r in results]
            with faults.plant(fault) if fault else contextlib.nullcontext():
                torch.autograd.grad(results, given, sent)
        tool.wait()
    products = [(op, right) for op, phase, right in answers if op in ("conv2d", "linear") and phase == "backward"]
    assert {op for op, _ in products} == {"conv2d", "linear"}
    assert all(right for _, right in products) == (not fault)
    wrong = {b.op.rpartition(".")[2] for b in tool.blames if b.phase == "backward"}
    assert wrong == ({"conv2d"} if "convolution" in fault else {"linear"} if fault else set())
