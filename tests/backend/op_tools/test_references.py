"""OpAutoCompare on kernels for the device alone: references, decompositions, fake kernels, and none of these."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ditorch
import op_tools
from op_tools.judge import references

Tensor = torch.Tensor
library = torch.library.Library("op_tools_references", "FRAGMENT")
ops = torch.ops.op_tools_references


def cubed(x: Tensor) -> Tensor:
    return x.detach() * x.detach() * x.detach()


for name, kernel in (
    ("cube", cubed),
    ("wrong_cube", lambda x: 1.001 * cubed(x)),
    ("short_cube", lambda x: cubed(x)[1:].clone()),
    ("random_cube", lambda x: cubed(x) * torch.rand_like(x)),
    ("by_steps", lambda x: 1.001 * cubed(x)),
):
    library.define(f"{name}(Tensor x) -> Tensor")
    for key in ("CUDA", "PrivateUse1"):
        library.impl(name, kernel, key)
    library.impl(name, lambda x: torch.empty_like(x), "Meta")


def prepare(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1]


def differentiated(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return 2.001 * ctx.factor * grad * ctx.saved_tensors[0], None  # which is wrong


library.define("square(Tensor x, float factor) -> Tensor")
for key in ("CUDA", "PrivateUse1"):
    library.impl("square", lambda x, factor: factor * x.detach() * x.detach(), key)
torch.library.register_autograd("op_tools_references::square", differentiated, setup_context=prepare, lib=library)
square = ops.square


@torch._decomp.register_decomposition(ops.by_steps.default)
def by_steps(x: Tensor) -> Tensor:
    return x**3


class Doubled(torch.autograd.Function):
    """Writes to the memory of its result by itself, as a kernel behind ctypes or Triton does."""

    error = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()  # an operator, but not the one that matters
        values = np.ctypeslib.as_array(ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float)), (x.numel(),))
        result = torch.empty_like(x)
        numbers = ctypes.cast(result.data_ptr(), ctypes.POINTER(ctypes.c_float))
        np.ctypeslib.as_array(numbers, (x.numel(),))[:] = 2 * values
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return (2 + Doubled.error) * grad


class Plain(torch.autograd.Function):
    """Made of operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        result[:] = 2 * x
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


@pytest.fixture(autouse=True)
def known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "off")
    monkeypatch.setattr(references, "given", {})
    if getattr(ditorch.backend, "name", "") not in ("cuda", "soft"):
        pytest.skip("no kernel is registered for this device")


def compared(work: Any) -> tuple[list[str], list[str]]:
    """Operators that are wrong, and the summary."""
    with op_tools.OpAutoCompare() as tool:
        work()
    return [f"{blame.op.rpartition('op_tools_references.')[2]} {blame.phase}" for blame in tool.blames], tool.summary()


def test_a_reference_decides_forward_and_backward(device: str) -> None:
    op_tools.reference("op_tools_references::cube", lambda x: x**3)
    op_tools.reference("op_tools_references::wrong_cube", lambda x: x**3)
    op_tools.reference(square, lambda x, factor: factor * x * x)
    x = torch.linspace(-2, 2, 24, device=device).view(4, 6)

    def work() -> None:
        ops.cube(x)
        ops.cube.default(x)
        ops.wrong_cube(x.bfloat16())
        ops.wrong_cube(x)
        square(x.clone().requires_grad_(), 3.0).sum().backward()

    wrong, summary = compared(work)
    assert wrong == ["wrong_cube forward", "square backward"]
    assert "every call that computes was compared" in summary[0]


def test_a_reference_in_numpy_is_judged_by_tolerances(device: str) -> None:
    @op_tools.reference("op_tools_references::cube")
    @op_tools.reference("op_tools_references::wrong_cube")
    def cube(x: Tensor) -> Tensor:
        return torch.from_numpy(np.power(x.detach().numpy(), 3))

    op_tools.reference(square, lambda x, factor: torch.from_numpy(factor * np.square(x.detach().numpy())))
    x = torch.linspace(-2, 2, 24, device=device)

    def work() -> None:
        ops.cube(x)
        ops.wrong_cube(x)
        square(x.clone().requires_grad_(), 3.0).sum().backward()

    wrong, summary = compared(work)
    assert wrong == ["wrong_cube forward"]
    assert any("its reference cannot be differentiated" in line for line in summary)


def test_a_decomposition_stands_in_for_a_reference(device: str) -> None:
    x = torch.linspace(-2, 2, 24, device=device)
    assert compared(lambda: ops.by_steps(x))[0] == ["by_steps forward"]


def test_what_nobody_can_judge_is_said_first(device: str) -> None:
    x = torch.linspace(-2, 2, 24, device=device)

    def work() -> None:
        ops.cube(x)
        ops.random_cube(x)
        torch.exp(x)

    wrong, summary = compared(work)
    assert not wrong
    assert summary[0].startswith("2 operators were NOT JUDGED")
    assert {"op_tools_references.cube", "op_tools_references.random_cube"} <= set(summary[0].replace(",", "").split())
    lines = {line.split(":")[0].strip(): line for line in summary if "not compared" in line}
    assert lines["op_tools_references.cube"].endswith("repeated only: the device gives the same bits again")
    assert "repeated only" not in lines["op_tools_references.random_cube"], "it draws random numbers"


def test_a_repetition_changes_no_random_numbers(device: str) -> None:
    x = torch.linspace(-2, 2, 24, device=device)
    drawn = []
    for watched in (False, True):
        torch.manual_seed(3)
        if watched:
            compared(lambda: (ops.random_cube(x), drawn.append(torch.rand(3, device=device))))
        else:
            ops.random_cube(x)
            drawn.append(torch.rand(3, device=device))
    assert torch.equal(*drawn)


def test_the_fake_kernel_knows_the_shape(device: str) -> None:
    x = torch.linspace(-2, 2, 24, device=device)
    with op_tools.OpAutoCompare() as tool:
        ops.short_cube(x)
    assert [f.message for f in tool.findings() if f.kind == "difference"] == [
        "op_tools_references.short_cube output is wrong: shape (23,) instead of (24,), as its fake kernel says"
    ]


def test_kernels_behind_a_class(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if ditorch.backend.name != "soft":
        pytest.skip("the kernel of this test writes to host memory")
    x = torch.linspace(-2, 2, 24, device=device).requires_grad_()

    def work() -> None:
        Plain.apply(x).sum().backward()
        Doubled.apply(x).sum().backward()

    original = vars(torch.autograd.Function)["apply"]
    wrong, summary = compared(work)
    assert not wrong
    assert summary[0].startswith("1 operator was NOT JUDGED")
    assert summary[0].endswith(".Doubled")
    op_tools.reference(Doubled, lambda x: 2 * x)
    wrong, summary = compared(work)
    assert not wrong
    assert "every call that computes was compared" in summary[0]
    monkeypatch.setattr(Doubled, "error", 1e-3)
    wrong, _ = compared(work)
    assert [text.rpartition(".")[2] for text in wrong] == ["Doubled backward"]
    assert vars(torch.autograd.Function)["apply"] is original


def test_references_in_a_file(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import op_tools\n"
        "def all_of_them():\n"
        "    op_tools.reference('op_tools_references::wrong_cube', lambda x: x**3)\n"
    )
    monkeypatch.setenv("OP_AUTOCOMPARE_REFERENCES", f"{file}:all_of_them")
    x = torch.linspace(-2, 2, 24, device=device)
    assert compared(lambda: ops.wrong_cube(x))[0] == ["wrong_cube forward"]
    monkeypatch.setenv("OP_AUTOCOMPARE_REFERENCES", f"{file}:nothing")
    with pytest.raises(op_tools.SettingsError, match=r"mine\.py:nothing' cannot be used"):
        op_tools.OpAutoCompare().start()


@pytest.mark.parametrize("wrong", [False, True])
def test_parts_of_synchronised_batch_norm_are_judged(device: str, wrong: bool) -> None:
    """PyTorch has no CPU kernels for them; their steps are known."""
    torch.manual_seed(0)
    x, sent, weight = (
        torch.randn(2, 3, 4, 4, device=device),
        torch.randn(2, 3, 4, 4, device=device),
        torch.rand(3).to(device),
    )
    running = [torch.zeros(3, device=device), torch.ones(3, device=device)]
    library = torch.library.Library("aten", "IMPL")
    if wrong:
        if getattr(ditorch.backend, "name", "") != "soft":
            pytest.skip("only the software accelerator can be made to fail on purpose")
        from ditorch.soft import cuda_only

        def stale(*args: Any) -> Any:
            found = cuda_only.batch_norm_gather_stats_with_counts(*args)
            args[4].mul_(1.01)
            return found

        library.impl("batch_norm_gather_stats_with_counts", stale, "PrivateUse1", allow_override=True)
    try:
        with op_tools.OpAutoCompare() as compared:
            mean, inverse = torch.batch_norm_stats(x, 1e-5)
            counts = torch.full((2,), 32.0, device=device)
            both = torch.stack([mean, mean + 0.1]), torch.stack([inverse, inverse])
            mean, inverse = torch.batch_norm_gather_stats_with_counts(x, *both, *running, 0.1, 1e-5, counts)
            torch.batch_norm_elemt(x, weight, None, mean, inverse, 1e-5)
            parts = torch.batch_norm_backward_reduce(sent, x, mean, inverse, weight, True, True, True)
            torch.batch_norm_backward_elemt(sent, x, mean, inverse, weight, *parts[:2], counts.int())
    finally:
        library._destroy()
    assert "every call that computes was compared" in compared.summary()[0]
    assert [b.op for b in compared.blames] == ["torch.batch_norm_gather_stats_with_counts"] * wrong
    assert not wrong or "running_var" in compared.blames[0].reason
