"""The verdict: no alarm on correct results, no fault above the rounding bound missed. No device is needed."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from op_tools.judge import golden, measures, uncertainty, verdict
from op_tools.judge.rounding import precision_of
from op_tools.judge.standards import ulp
from op_tools.judge.verdict import NOT_COMPARABLE, RIGHT, WRONG, Rules
from op_tools.settings import SettingsError

ROOT = Path(__file__).resolve().parents[3]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def judged(
    function: Callable[..., Any],
    *args: Any,
    break_it: Callable[[Any], Any] | None = None,
    break_gradient: Callable[[torch.Tensor], torch.Tensor] | None = None,
    rules: Rules | None = None,
    device: str = "cpu",
    name: str | None = None,
    **kwargs: Any,
) -> verdict.Judgement:
    """Run on the CPU in the given dtypes as if it were a device, break the result, and ask for the verdict."""
    inputs = list(golden.tensors_in((args, kwargs)))
    saved = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    copies = iter(saved)
    before = golden.map_tensors((args, kwargs), lambda t: next(copies))
    outputs = function(*args, **kwargs)
    wanted = [t for t in inputs if t.requires_grad]
    tensors = list(golden.tensors_in(outputs))
    grad_outputs = grad_inputs = None
    if wanted and any(t.requires_grad for t in tensors):
        generator = torch.Generator().manual_seed(1)
        grad_outputs = [
            torch.randn(t.shape, generator=generator).to(t.dtype) if t.requires_grad else None for t in tensors
        ]
        used = [t for t in tensors if t.requires_grad]
        found = iter(torch.autograd.grad(used, wanted, [g for g in grad_outputs if g is not None], allow_unused=True))
        grad_inputs = [next(found) if t.requires_grad else None for t in inputs]
        if break_gradient:
            grad_inputs[0] = break_gradient(grad_inputs[0].clone())
    outputs = golden.map_tensors(outputs, lambda t: t.detach().clone())
    if break_it:
        outputs = break_it(outputs)
    result = golden.run(function, *before, grad_outputs=grad_outputs, device=device, name=name)
    return verdict.judge_call(result.source.name, result, outputs=outputs, grad_inputs=grad_inputs, rules=rules)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def scaled_at(index: tuple[int, ...], by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(x: torch.Tensor) -> torch.Tensor:
        x[index] *= by
        return x

    return change


CORRECT: list[tuple[str, Callable[[torch.dtype], Any]]] = [
    ("linear", lambda d: judged(F.linear, normal(33, 200, dtype=d), normal(50, 200, dtype=d, seed=1))),
    ("softmax", lambda d: judged(F.softmax, normal(16, 300, dtype=d), -1)),
    ("log_softmax", lambda d: judged(F.log_softmax, (normal(16, 300, dtype=d) * 9).detach().requires_grad_(), -1)),
    ("layer_norm", lambda d: judged(F.layer_norm, normal(16, 256, dtype=d), (256,))),
    ("gelu", lambda d: judged(F.gelu, normal(40, 50, dtype=d))),
    ("var with a large mean", lambda d: judged(torch.var, (normal(16, 100, dtype=d) + 30).detach(), 1)),
    ("sum", lambda d: judged(torch.sum, normal(5000, dtype=d))),
    ("cumsum", lambda d: judged(torch.cumsum, normal(8, 500, dtype=d), -1)),
    ("conv2d", lambda d: judged(F.conv2d, normal(2, 8, 9, 9, dtype=d), normal(6, 8, 3, 3, dtype=d, seed=2))),
    ("batch_norm", lambda d: judged(F.batch_norm, normal(8, 3, 6, 6, dtype=d), None, None, training=True)),
    ("cancellation", lambda d: judged(torch.sub, normal(999, dtype=d), normal(999, dtype=d))),
    ("sin of large numbers", lambda d: judged(torch.sin, (normal(500, dtype=d) * 1000).detach())),
    ("norm", lambda d: judged(torch.linalg.vector_norm, normal(50, 60, dtype=d), dim=1)),
    ("tanh", lambda d: judged(torch.tanh, normal(1000, dtype=d))),
    ("sigmoid", lambda d: judged(torch.sigmoid, normal(64, 256, dtype=d))),
    ("layer_norm, many rows", lambda d: judged(
        F.layer_norm, normal(300, 64, dtype=d), (64,), normal(64, dtype=d, seed=1), normal(64, dtype=d, seed=2))),
    ("logsumexp near zero", lambda d: judged(torch.logsumexp, (normal(200, 8, dtype=d) - 2).detach(), 1)),
    ("attention with a mask", lambda d: judged(
        F.scaled_dot_product_attention, normal(2, 2, 16, 8, dtype=d), normal(2, 2, 16, 8, dtype=d, seed=1),
        normal(2, 2, 16, 8, dtype=d, seed=2),
        attn_mask=torch.zeros(16, 16, dtype=d).masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf))),
    ("probabilities up to one", lambda d: judged(
        F.binary_cross_entropy, normal(64, 64, dtype=d).sigmoid().clamp(0, 1).detach().requires_grad_(),
        torch.ones(64, 64, dtype=d))),
    ("dilated convolution", lambda d: judged(
        F.conv2d, normal(1, 2, 20, 20, dtype=d), normal(2, 2, 5, 5, dtype=d, seed=1), dilation=3)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [make for _, make in CORRECT], ids=[name for name, _ in CORRECT])
def test_correct_results_are_right(make: Callable[[torch.dtype], Any], dtype: torch.dtype) -> None:
    judgement = make(dtype)
    assert judgement.verdict == RIGHT, judgement.reason


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_wrong_element_in_a_big_tensor_is_found(dtype: torch.dtype) -> None:
    judgement = judged(torch.mul, normal(500, 400, dtype=dtype), normal(500, 400, dtype=dtype, seed=1),
                       break_it=scaled_at((321, 7), 1 + 8 * torch.finfo(dtype).eps))  # fmt: skip
    assert judgement.verdict == WRONG
    assert judgement.rows[0].where == (321, 7)
    assert "1 of 200000 elements" in judgement.reason


def test_a_wrong_gradient_alone_is_found() -> None:
    judgement = judged(F.gelu, normal(100), break_gradient=lambda g: g * 1.001)
    assert [row.verdict for row in judgement.rows] == [RIGHT, WRONG]


def test_a_copy_must_be_exact() -> None:
    x = normal(100)
    nudged = lambda y: torch.nextafter(y, torch.tensor(math.inf))  # noqa: E731
    assert judged(torch.clone, x, break_it=nudged).verdict == WRONG
    assert judged(torch.exp, x, break_it=nudged).verdict == RIGHT  # functions may be off by an ulp


def test_sums_in_low_precision_are_found() -> None:
    a, b = normal(8, 4096, dtype=torch.bfloat16), normal(4096, 8, dtype=torch.bfloat16, seed=1)

    def accumulate(_: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(8, 8, dtype=torch.bfloat16)
        for k in range(4096):
            total = total + a.detach()[:, k : k + 1] * b.detach()[k : k + 1]
        return total

    assert judged(torch.mm, a, b).verdict == RIGHT
    assert judged(torch.mm, a, b, break_it=accumulate).verdict == WRONG


@pytest.mark.parametrize("allowed", [True, False])
def test_products_in_tf32_are_named(allowed: bool) -> None:
    a, b = normal(64, 256), normal(256, 64, seed=1)

    def tf32(x: torch.Tensor) -> torch.Tensor:
        return (x.detach().view(torch.int32) & ~0x1FFF).view(torch.float32)

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        judgement = judged(torch.mm, a, b, break_it=lambda _: tf32(a) @ tf32(b), device="cuda")
        elsewhere = judged(torch.mm, a, b, break_it=lambda _: tf32(a) @ tf32(b), device="npu")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert "TF32" not in elsewhere.reason, "that is CUDA's"
    assert judgement.verdict == WRONG
    assert "TF32" in judgement.reason
    assert ("is off" in judgement.reason) == (not allowed)


def test_small_errors_of_products_are_not_called_tf32() -> None:
    a, b = normal(64, 256), normal(256, 64, seed=1)
    judgement = judged(torch.mm, a, b, break_it=lambda _: (a @ b).detach() * (1 + 1e-5))
    assert judgement.verdict == WRONG
    assert "TF32" not in judgement.reason


def test_no_elements_are_all_explained() -> None:
    nothing = torch.empty(0, dtype=torch.float64)
    elements = ulp._Elements(nothing, nothing, precision_of(torch.float16), torch.float64)
    assert elements.unexplained() is None
    assert (elements.largest, elements.excess()) == (0.0, 0.0)


def test_numbers_that_differ_look_different() -> None:
    assert ulp._as_texts(3.0, 3.0000000001) == ("3", "3.0000000001")
    assert ulp._as_texts(1.5, 2.25) == ("1.5", "2.25")


def test_probes_of_a_scalar_that_needs_gradients_do_not_warn() -> None:
    x, power = normal(64).abs().requires_grad_(), torch.tensor(1.3, requires_grad=True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        judged(torch.pow, x, power, break_gradient=lambda g: g * (1 + 1e-5))
    assert [str(warning.message) for warning in warned] == []


def test_flushed_denormals_are_found() -> None:
    x = (normal(100) * 1e-40).detach()
    judgement = judged(torch.mul, x, 0.5, break_it=torch.zeros_like)
    assert judgement.verdict == WRONG
    assert "subnormal" in judgement.reason


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_found(bad: float) -> None:
    assert judged(torch.exp, normal(50), break_it=lambda y: y.index_fill(0, torch.tensor([3]), bad)).verdict == WRONG


def test_expected_nan_and_infinity_are_right_and_must_be_there() -> None:
    x = torch.tensor([-1.0, 0.0, 4.0])
    assert judged(torch.log, x).verdict == RIGHT
    assert judged(torch.log, x, break_it=torch.nan_to_num).verdict == WRONG


def test_overflow_of_the_dtype_is_no_error() -> None:
    x = torch.full((3,), 300.0, dtype=torch.float16)
    assert judged(torch.mul, x, x).verdict == RIGHT
    assert judged(torch.mul, x, torch.ones_like(x), break_it=lambda y: y * math.inf).verdict == WRONG


def test_swapped_results_are_found() -> None:
    assert judged(torch.std_mean, normal(8, 50), -1, break_it=lambda y: (y[1], y[0])).verdict == WRONG


def test_ties_may_be_broken_in_any_way() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    right = judged(torch.argmax, x, 1, break_it=lambda _: torch.tensor([2]))
    assert right.verdict == RIGHT
    assert "tie broken differently" in right.rows[0].error_info
    assert judged(torch.argmax, x, 1, break_it=lambda _: torch.tensor([0])).verdict == WRONG
    assert judged(torch.argmax, x, 1, break_it=lambda _: torch.tensor([9])).verdict == WRONG


def test_sort_must_stay_a_permutation() -> None:
    x = torch.tensor([2.0, 1.0, 2.0, 0.0])
    assert judged(torch.sort, x, break_it=lambda y: (y[0], torch.tensor([3, 1, 2, 0]))).verdict == RIGHT
    assert judged(torch.sort, x, break_it=lambda y: (y[0], torch.tensor([3, 1, 2, 2]))).verdict == WRONG


def test_gradients_at_ties_may_go_to_either() -> None:
    x = torch.zeros(1, 1, 4, 4, requires_grad=True)

    def elsewhere(g: torch.Tensor) -> torch.Tensor:
        return g.roll((1, 1), (-1, -2))  # within the window

    assert judged(F.max_pool2d, x, 2, break_gradient=elsewhere).verdict == RIGHT
    assert judged(F.max_pool2d, x, 2, break_gradient=lambda g: g.flip(-1, -2)).verdict == WRONG
    assert judged(F.max_pool2d, x, 2, break_gradient=lambda g: g * 1.5).verdict == WRONG
    distinct = torch.arange(16.0).view(1, 1, 4, 4).requires_grad_()
    assert judged(F.max_pool2d, distinct, 2, break_gradient=elsewhere).verdict == WRONG


def test_whole_numbers_and_truth_values_must_be_equal() -> None:
    x = torch.arange(10)
    assert judged(torch.mul, x, 3).verdict == RIGHT
    assert judged(torch.mul, x, 3, break_it=lambda y: y + (y == 9)).verdict == WRONG
    assert judged(torch.gt, x, 3, break_it=torch.logical_not).verdict == WRONG


def test_shape_and_dtype_differences() -> None:
    x = normal(4)
    assert "shape" in judged(torch.exp, x, break_it=lambda y: y[:3]).reason
    assert judged(torch.argmax, x.detach(), break_it=lambda y: y.int()).verdict == WRONG
    assert judged(torch.exp, x, break_it=lambda y: y.long()).verdict == WRONG
    assert judged(torch.std_mean, x, 0, break_it=lambda y: y[0]).verdict == WRONG


def test_strides_are_noted_and_not_wrong() -> None:
    judgement = judged(torch.exp, normal(4, 5), break_it=lambda y: y.t().contiguous().t())
    assert judgement.verdict == RIGHT
    assert "stride" in judgement.rows[0].error_info


def test_signs_of_eigenvectors_are_free() -> None:
    x = normal(6, 6).detach()
    judgement = judged(torch.linalg.eigh, x + x.T, break_it=lambda y: (y[0], y[1] * -1))
    assert judgement.verdict == RIGHT, judgement.reason
    assert judged(torch.linalg.eigh, x + x.T, break_it=lambda y: (y[0], y[1] * 1.01)).verdict == WRONG


def test_random_operators_by_distribution() -> None:
    x = torch.ones(4000)
    assert judged(F.dropout, x, 0.3).verdict == RIGHT
    assert judged(F.dropout, x, 0.3, break_it=lambda y: y * 0.9).verdict == WRONG
    assert judged(F.dropout, x, 0.3, break_it=torch.zeros_like).verdict == WRONG
    assert judged(torch.rand, 4000).verdict == RIGHT
    assert judged(torch.rand, 4000, break_it=lambda y: y * 0.8).verdict == WRONG
    assert judged(torch.rand, 4).verdict == NOT_COMPARABLE
    assert judged(F.gumbel_softmax, x).verdict == NOT_COMPARABLE


def test_a_dropout_is_judged_with_the_mask_that_its_result_shows() -> None:
    x = normal(500)
    for function in (F.dropout, F.alpha_dropout):
        assert judged(function, x, 0.3, True).verdict == RIGHT
        assert judged(function, x, 0.3, True, break_gradient=lambda g: g.flip(0)).verdict == WRONG
        assert judged(function, x, 0.3, True, break_gradient=lambda g: g * 0.7).verdict == WRONG
    assert judged(F.dropout, x.relu().detach().requires_grad_(), 0.3).verdict == RIGHT
    assert judged(F.dropout, torch.full((500,), float("nan")), 0.1).verdict == RIGHT
    assert judged(F.dropout, torch.full((500,), float("nan")), 0.1, break_it=torch.zeros_like).verdict == RIGHT


def test_samples_are_judged_by_mean_and_deviation() -> None:
    assert judged(torch.randn, 1000).verdict == RIGHT
    assert "standard deviation" in judged(torch.randn, 1000, break_it=lambda y: y * 1.5).reason
    assert "mean" in judged(torch.randn, 1000, break_it=lambda y: y + 0.4).reason
    assert "not between" in judged(torch.rand, 1000, break_it=lambda y: y * 1.1).reason
    for size in (300, 100_000):  # the CPU draws in bfloat16: a few hundred different values
        assert judged(torch.randn, size, dtype=torch.bfloat16).verdict == RIGHT
        assert judged(torch.rand, size, dtype=torch.bfloat16).verdict == RIGHT


def test_seed_columns_are_filled() -> None:
    row = judged(torch.exp, normal(10, dtype=torch.bfloat16)).rows[0]
    assert row.name == "torch.exp output"
    assert (row.atol, row.rtol, row.allclose) == (1e-3, 1e-3, True)
    assert row.error_info == "Inconsistent dtypes: torch.bfloat16 torch.float64"
    assert row.cosine > 0.99
    assert 0 < row.max_ulp <= 0.5


def test_tolerances_that_are_set_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(20)
    off = lambda y: y * 1.01  # noqa: E731
    assert judged(torch.exp, x, break_it=off).verdict == WRONG
    monkeypatch.setenv("AUTOCOMPARE_ERROR_TOLERANCE_FLOAT32", "1,1")
    assert judged(torch.exp, x, break_it=off, rules=Rules.from_environment()).verdict == RIGHT
    monkeypatch.setenv("EXP_AUTOCOMPARE_ERROR_TOLERANCE_FLOAT32", "1e-9,1e-9")
    assert judged(torch.exp, x, break_it=off, rules=Rules.from_environment()).verdict == WRONG
    monkeypatch.setenv("AUTOCOMPARE_ERROR_TOLERANCE", "nonsense")
    with pytest.raises(SettingsError, match="AUTOCOMPARE_ERROR_TOLERANCE"):
        Rules.from_environment()


def test_standards_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(1000, dtype=torch.bfloat16)
    seed = judged(torch.mul, (x * 100).detach(), 1.0, rules=Rules("seed"),
                  break_it=lambda y: (y.view(torch.int16) + 1).view(torch.bfloat16))  # fmt: skip
    assert seed.verdict == WRONG  # one ulp fails a fixed tolerance
    small = (normal(100) * 1e-7).detach()
    for standard, expected in (("seed", RIGHT), ("torch", RIGHT), ("dual", RIGHT), ("ulp", WRONG)):
        assert judged(torch.mul, small, 1.5, rules=Rules(standard), break_it=lambda y: y * 1.01).verdict == expected
    monkeypatch.setenv("OP_AUTOCOMPARE_STANDARD", "exact")
    with pytest.raises(SettingsError, match="ulp, torch, dual, seed"):
        Rules.from_environment()


def test_later_results_use_the_probes_of_earlier_ones() -> None:
    x = (normal(6, 200) * 30).detach().requires_grad_()
    judgement = judged(lambda t: tuple(t.log_softmax(-1).unbind(0)), x)
    assert judgement.verdict == RIGHT, judgement.reason


def test_sparse_tensors_are_compared_whole() -> None:
    a = torch.eye(5).to_sparse_csr()
    assert judged(torch.mm, a, normal(5, 3).detach()).verdict == RIGHT
    assert judged(torch.mm, a, normal(5, 3).detach(), break_it=lambda y: y * 1.1).verdict == WRONG


def test_numbers_read_from_tensors() -> None:
    x = torch.tensor(0.1, dtype=torch.bfloat16)
    assert judged(torch.Tensor.item, x).verdict == RIGHT
    assert judged(torch.Tensor.item, x, break_it=lambda y: y * 1.1).verdict == WRONG


def test_ulps() -> None:
    x = torch.tensor([1.0, 1.5, 2.0, 0.0], dtype=torch.float64)
    assert measures.ulps(x, torch.float32).tolist() == [2.0**-23, 2.0**-23, 2.0**-22, 2.0**-149]


def test_few_probes_do_not_let_a_fault_pass() -> None:
    # the roundings of one probe may happen to go the same way: that alone must not widen the bound
    x = normal(64, 256).detach()
    noise = 1 + 64 * torch.finfo(torch.float32).eps * torch.linspace(-1, 1, 64)
    assert judged(torch.var, x, -1).verdict == RIGHT
    assert judged(torch.var, x, -1, break_it=lambda y: y * noise).verdict == WRONG


FUNCTIONS: list[Callable[..., Any]] = [torch.exp, torch.tanh, F.gelu, F.silu, torch.neg, torch.sum, torch.var]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(FUNCTIONS),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 7), min_size=0, max_size=3),
    st.sampled_from([0.0, 1.0, 3.0, 30.0, 3000.0]),
    st.sampled_from([1e-30, 1e-6, 1.0, 1e4]),
    st.integers(0, 10**6),
)
def test_the_quick_way_gives_the_columns_and_the_verdict_of_the_full_one(
    function: Callable[..., Any], dtype: torch.dtype, shape: list[int], ulp: float, scale: float, seed: int
) -> None:
    x = (normal(*shape, seed=seed).detach() * scale).to(dtype)
    change = lambda y: y * (1 + ulp * torch.finfo(dtype).eps)  # noqa: E731
    quick = judged(function, x, break_it=change)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measures, "_quickly", lambda *_: None)
        full = judged(function, x, break_it=change)
    assert quick.verdict == full.verdict
    for a, b in zip(quick.rows, full.rows):
        assert a.allclose == b.allclose
        assert a.max_abs_diff == pytest.approx(b.max_abs_diff, rel=1e-5, abs=1e-45)
        assert a.max_relative_diff == pytest.approx(b.max_relative_diff, rel=1e-5)
        assert a.cosine == pytest.approx(b.cosine, abs=1e-6, nan_ok=True)
        assert a.max_ulp == pytest.approx(b.max_ulp, rel=1e-5, abs=1e-6)


def test_the_cosine_of_a_small_error_keeps_its_digits() -> None:
    exact = torch.ones(1000, dtype=torch.float64)
    device = torch.ones(1000)
    device[::2] += 2.0**-12
    expected = 1 - measures._fully(measures.Sides(device, exact), 0, 0).cosine
    assert 0 < 1 - measures.measure(measures.Sides(device, exact), 0, 0).cosine == pytest.approx(expected, rel=1e-3)


def test_structures_are_found_once_for_calls_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    trace = uncertainty.Uncertainty._trace
    monkeypatch.setattr(uncertainty.Uncertainty, "_trace", lambda self: found.append(self.part) or trace(self))
    for seed in range(3):
        assert judged(F.softmax, normal(7, 311, seed=seed), -1).verdict == RIGHT
    assert sorted(found) == sorted(set(found))  # once for outputs, once for gradients
    assert judged(F.softmax, normal(7, 312), -1).verdict == RIGHT
    assert len(found) == 2 * len(set(found))


def test_elements_in_doubt_are_probed_alone() -> None:
    x = normal(300, 300)
    judgement = judged(lambda t: F.gelu(t), x, break_it=scaled_at((3, 4), 1.0001))
    assert judgement.verdict == WRONG
    assert judgement.rows[0].where == (3, 4)
    assert "1 of 90000 elements" in judgement.reason


def test_probes_need_no_compiler() -> None:
    # the wrappers around PyTorch's decompositions import Dynamo: seconds, in the middle of somebody's training
    code = """if True:
        import sys, torch
        import torch.nn.functional as F
        from op_tools.judge import golden, verdict
        for f in (F.gelu, F.elu, F.softplus, torch.std, lambda x: F.layer_norm(x, (50,))):
            x = torch.linspace(-5, 5, 5000).view(100, 50)
            result = golden.run(f, (x,), device="cpu", traits=golden.OpTraits("torch.f", f, random=False))
            assert verdict.judge_call("torch.f", result, outputs=f(x) * (1 + 1e-3)).verdict == verdict.WRONG
        sys.exit("torch._dynamo" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 200), st.sampled_from(DTYPES), st.integers(0, 10**6))
def test_products_of_any_size_in_any_order_of_summation_are_right(
    m: int, k: int, dtype: torch.dtype, seed: int
) -> None:
    a, b = normal(m, k, dtype=dtype, seed=seed).detach(), normal(k, 5, dtype=dtype, seed=seed + 1).detach()
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))

    def other_order(_: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(m, 5)
        for i in order:
            total = total + a[:, i : i + 1].float() * b[i : i + 1].float()
        return total.to(dtype)

    judgement = judged(torch.mm, a, b, break_it=other_order)
    assert judgement.verdict == RIGHT, judgement.reason


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.sampled_from(DTYPES), st.integers(0, 10**6), st.floats(4, 1000))
def test_any_element_off_by_more_than_the_bound_is_found(n: int, dtype: torch.dtype, seed: int, ulp: float) -> None:
    x = normal(n, dtype=dtype, seed=seed).detach()
    at = seed % n
    if x[at] == 0:
        return
    factor = 1 + 2 * ulp * torch.finfo(dtype).eps
    judgement = judged(torch.mul, x, 1.5, break_it=scaled_at((at,), factor))
    assert judgement.verdict == WRONG
    assert judgement.rows[0].where == (at,)


@pytest.mark.parametrize("name", ["logit_", "sinc_", "digamma_", "exp_", "erfinv_"])
def test_in_place_operators_are_judged_like_the_others(name: str) -> None:
    torch.manual_seed(0)
    x = torch.rand(2000) * 0.9 + 0.05
    function = getattr(torch.Tensor, name)
    reference = golden.run(function, (x.clone(),))
    device = x.clone()
    result = function(device)
    judged = verdict.judge_call(f"torch.Tensor.{name}", reference, outputs=result, inputs_after=((device,), {}))
    assert judged.verdict == RIGHT, judged.reason
    device[7] *= 1 + 2e-5
    judged = verdict.judge_call(f"torch.Tensor.{name}", reference, outputs=device, inputs_after=((device,), {}))
    assert judged.verdict == WRONG


def test_tiny_results_may_be_off_by_some_of_the_smallest_steps() -> None:
    x = torch.full((8,), 1e-6, dtype=torch.float16)
    step = 2.0**-24
    assert judged(torch.erf, x, break_it=lambda y: y + 2 * step).verdict == RIGHT  # more than the bound of large ones
    assert judged(torch.erf, x, break_it=lambda y: y + 20 * step).verdict == WRONG


def test_what_is_right_but_not_allclose_says_why() -> None:
    x = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    result = golden.run(torch.mul, (x, x))
    off = (result.outputs * (1 + 2.0**-8)).bfloat16()
    (row,) = verdict.judge("torch.mul", off, result.outputs, result=result, rules=Rules("dual")).rows
    assert (row.verdict, row.allclose) == (RIGHT, False)
    assert row.error_info.endswith("; right by the standard dual")
    (row,) = verdict.judge("torch.mul", off, result.outputs, result=result, rules=Rules("seed")).rows
    assert (row.verdict, row.allclose) == (WRONG, False)
    assert row.error_info == "Inconsistent dtypes: torch.bfloat16 torch.float64"
    numbers = golden.run(torch.Tensor.tolist, (x,))
    rows = verdict.judge("torch.Tensor.tolist", [1.002, 3.0], numbers.outputs, result=numbers).rows
    assert [(row.verdict, row.allclose, row.error_info) for row in rows] == [
        (RIGHT, False, "within rounding"),
        (RIGHT, True, ""),
    ]


def test_an_index_that_is_chosen_twice_is_said_so() -> None:
    """Of equal values any may be chosen, but each once."""
    result = golden.run(torch.topk, (torch.ones(6), 3), {}, name="torch.topk")
    chosen = result.outputs[1].clone()
    chosen[2] = chosen[0]
    found = verdict.judge_call("torch.topk", result, outputs=(torch.ones(3), chosen))
    assert found.verdict == verdict.WRONG
    assert "1 of 3 differ, first at [2]" in found.reason
    same = golden.run(torch.argsort, (torch.ones(3),), {}, name="torch.argsort")
    twice = torch.stack([same.outputs[1], same.outputs[1], same.outputs[2]])
    found = verdict.judge_call("torch.argsort", same, outputs=twice)
    assert "which was chosen before" in found.reason
