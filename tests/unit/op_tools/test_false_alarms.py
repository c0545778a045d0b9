"""Correct results that were called wrong on CUDA, and their neighbours that are wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from op_tools.judge import golden, verdict


def judged(name: str, call: Any, args: tuple[Any, ...], sent: Any = None, **parts: Any) -> str:
    result = golden.run(call, args, {}, name=name, grad_outputs=None if sent is None else [sent], device="cuda")
    return verdict.judge_call(name, result, **parts).verdict


def test_absolute_values_of_complex_numbers_are_computed() -> None:
    z = 5 * torch.randn(400, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    absolute = (z.real**2 + z.imag**2).sqrt()
    assert judged("torch.abs", torch.abs, (z,), outputs=absolute) == verdict.RIGHT
    assert judged("torch.sgn", torch.sgn, (z,), outputs=z / absolute) == verdict.RIGHT
    assert judged("torch.abs", torch.abs, (z,), outputs=absolute * (1 + 2e-6)) == verdict.WRONG
    x = z.real.contiguous()  # of real numbers they are exact
    assert judged("torch.abs", torch.abs, (x,), outputs=torch.nextafter(x.abs(), torch.tensor(99.0))) == verdict.WRONG


def test_the_smallest_numbers_of_float64_have_a_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (15 * torch.randn(2, n, 4, dtype=torch.float64, generator=generator) for n in (3, 5))

    signs = torch.randn(2, 3, 5, dtype=torch.float64, generator=generator).sign()

    def attended(q: torch.Tensor, k: torch.Tensor, off: float = 0.0) -> torch.Tensor:
        scores = q @ k.mT
        return (scores * (1 + off * signs) if off else scores).softmax(-1)

    exact = attended(q, k)
    assert bool(((exact > 0) & (exact < 1e-200)).any())
    assert judged("torch.softmax", attended, (q, k), outputs=attended(q, k, 1.01 * 2**-53)) == verdict.RIGHT
    assert judged("torch.softmax", attended, (q, k), outputs=attended(q, k, 2**-44)) == verdict.WRONG


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_overflows_on_the_way(dtype: torch.dtype) -> None:
    x = torch.full((4,), 6.15, dtype=dtype, requires_grad=True)
    y = torch.full((4,), torch.finfo(dtype).tiny, dtype=dtype, requires_grad=True)
    sent = torch.full((4,), 0.05, dtype=dtype)
    found = torch.autograd.grad(torch.fmod(x, y), (x, y), sent)
    assert bool(found[1].isinf().all())  # 6 / 1e-38; times 0.05 it would be a number
    assert judged("torch.fmod", torch.fmod, (x, y), sent, grad_inputs=list(found)) == verdict.RIGHT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_that_are_stored_between_two_kernels(dtype: torch.dtype) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x, w, sent = (torch.randn(*s, generator=generator).to(dtype) for s in ((5, 10, 5), (10,), (5, 10, 5)))
        x, w = x.requires_grad_(), w.requires_grad_()
        products = torch.where(x < 0, x * sent, 0).detach()  # stored in the half type, summed in float32
        found = [torch.where(x < 0, w[None, :, None] * sent, sent).detach(), products.float().sum((0, 2)).to(dtype)]
        assert judged("torch.prelu", F.prelu, (x, w), sent, grad_inputs=found) == verdict.RIGHT
        found[1][0] += 2
        assert judged("torch.prelu", F.prelu, (x, w), sent, grad_inputs=found) == verdict.WRONG


def test_complex_numbers_too_large_for_the_dtype() -> None:
    z = torch.tensor([300 + 200j, 1 + 1j], dtype=torch.complex64)
    right = (z.to(torch.complex128) ** 2).to(torch.complex64)
    small = torch.view_as_complex(torch.view_as_real(right).half())
    spoiled = small.clone()
    spoiled[0] = complex(float("nan"), float("nan"))
    half = torch.view_as_complex(torch.view_as_real(z).half())
    for result, expected in ((small, verdict.RIGHT), (spoiled, verdict.RIGHT), (small * 0, verdict.WRONG)):
        assert judged("torch.square", torch.square, (half,), outputs=result) == expected


def test_values_that_are_whole_numbers_are_no_places() -> None:
    x = torch.tensor([[2, 2, 2, 1]])
    assert judged("torch.max", torch.max, (x, 1), outputs=(torch.tensor([2]), torch.tensor([2]))) == verdict.RIGHT
    assert judged("torch.max", torch.max, (x, 1), outputs=(torch.tensor([0]), torch.tensor([0]))) == verdict.WRONG
    assert judged("torch.max", torch.max, (x,), outputs=torch.tensor(0)) == verdict.WRONG


def test_overflow_on_the_way_beside_a_nan() -> None:
    base = torch.tensor([300.0, -1.0], dtype=torch.float16)
    exponent = torch.tensor([2.5, 0.5], dtype=torch.float16)  # the second one is NaN

    def call(base: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
        return base.pow(exponent) * 1e-3

    stored = torch.tensor([float("inf"), float("nan")], dtype=torch.float16)  # 300 ** 2.5 is beyond float16
    assert judged("call", call, (base, exponent), outputs=stored) == verdict.RIGHT


@pytest.mark.parametrize("length", [40, 700, 5000])
def test_running_sums_in_a_loop(length: int) -> None:
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(6, length, generator=generator) * torch.exp(4 * torch.randn(6, length, generator=generator))
        sums = torch.zeros(6, length)
        for i in range(length):
            sums[:, i] = (sums[:, i - 1] if i else 0) + x[:, i]
        assert judged("torch.cumsum", torch.cumsum, (x, -1), outputs=sums) == verdict.RIGHT
        sums[3, length // 2 :] += 1e-4 * sums[3].abs().max()
        assert judged("torch.cumsum", torch.cumsum, (x, -1), outputs=sums) == verdict.WRONG


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("adjoint", [True, False])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_results_that_are_conjugate_views(dtype: torch.dtype, left: bool, adjoint: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    factors, pivots = torch.linalg.lu_factor(torch.randn(5, 5, dtype=dtype, generator=generator))
    b = torch.randn(5, 5, dtype=dtype, generator=generator)

    def solve(*args: torch.Tensor) -> torch.Tensor:
        return torch.linalg.lu_solve(*args, left=left, adjoint=adjoint)

    found = solve(factors, pivots, b).resolve_conj()
    assert judged("torch.linalg.lu_solve", solve, (factors, pivots, b), outputs=found) == verdict.RIGHT
    found[2, 3] *= 1 + 1e-3
    assert judged("torch.linalg.lu_solve", solve, (factors, pivots, b), outputs=found) == verdict.WRONG


def test_arguments_that_are_conjugate_or_negative_views() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, sent = (torch.randn(*s, dtype=torch.complex64, generator=generator) for s in ((6, 7), (7, 5), (6, 5)))
    a, b = a.requires_grad_(), b.requires_grad_()

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.conj() @ b + (a.conj().imag @ b.conj().imag)

    found = [g.resolve_conj() for g in torch.autograd.grad(multiply(a, b), (a, b), sent)]
    assert judged("torch.matmul", multiply, (a, b), sent, grad_inputs=found) == verdict.RIGHT
    found[0][2, 3] *= 1 + 1e-3
    assert judged("torch.matmul", multiply, (a, b), sent, grad_inputs=found) == verdict.WRONG


def test_an_operator_that_calls_one_which_autocast_rounds() -> None:
    """Autocast does not know `affine_grid`, but the product of matrices inside it is done in bfloat16."""
    torch.manual_seed(0)
    theta, size = torch.randn(4, 2, 3) * 0.1 + torch.eye(2, 3), [4, 1, 28, 28]
    low = theta.bfloat16()
    grid = torch.nn.functional.affine_grid(torch.eye(2, 3)[None].double(), [1, 1, 28, 28], False).view(-1, 2)
    base = torch.cat([grid, torch.ones(784, 1).double()], 1).bfloat16()
    found = (base.float() @ low.float().mT).bfloat16().view(4, 28, 28, 2)
    name = "torch.nn.functional.affine_grid"
    rounded = golden.autocast_rounds_to(name, torch.bfloat16, found, [theta])
    assert rounded == torch.bfloat16
    options = {"device": "cuda", "name": name, "autocast": torch.bfloat16}
    arguments = (theta, size, False)
    result = golden.run(torch.nn.functional.affine_grid, arguments, rounded_to=rounded, **options)
    judged = verdict.judge_call(name, result, outputs=found)
    assert judged.verdict == verdict.RIGHT, judged.reason
    assert golden.autocast_rounds_to("torch.add", torch.bfloat16, found, [low, theta]) is None, "low came in"
