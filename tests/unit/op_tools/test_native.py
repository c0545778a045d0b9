"""Measuring in machine code, and sigma by formula: the same as the long way, only quicker."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from op_tools.judge import golden, measures, verdict
from op_tools.judge.measures import Bound, Sides
from op_tools.judge.noise import PROBES
from op_tools.judge.rounding import precision_of
from op_tools.judge.uncertainty import Uncertainty
from op_tools.native import measuring
from op_tools.native.compiling import Library

ROOT = Path(__file__).resolve().parents[3]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

compiled = pytest.mark.skipif(not measuring.available(), reason="no compiler here: Python measures")


def laid_out(values: torch.Tensor, order: Sequence[int], step: int) -> torch.Tensor:
    """The same values with other strides: dimensions in another order in memory, gaps between elements."""
    if not values.dim():
        return values
    backwards = [list(order).index(d) for d in range(values.dim())]
    return values.permute(*order).repeat_interleave(step, -1)[..., ::step].permute(*backwards)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A result, its reference and squares: shapes, strides, dtypes, sizes, now and then no number."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 5), max_size=4)) + draw(st.sampled_from([[], [1], [7], [1500]]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    golden_values = torch.randn(shape, generator=generator, dtype=torch.float64) * draw(
        st.sampled_from([1.0, 1e-3, 300.0, 1e-7])
    )
    noise = torch.randn(shape, generator=generator, dtype=torch.float64) * draw(st.sampled_from([0.0, 1e-7, 1e-2, 3.0]))
    device = (golden_values * (1 + noise)).to(dtype)
    if device.numel() and draw(st.booleans()):
        golden_values.view(-1)[0] = 0.0
    for odd in draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), max_size=1)):
        target = draw(st.sampled_from([device, golden_values]))
        target.view(-1)[draw(st.integers(0, target.numel() - 1))] = odd
    orders = [draw(st.permutations(range(len(shape)))) for _ in range(3)]
    squares = torch.rand(shape, generator=generator).to(draw(st.sampled_from([torch.float32, torch.float64])))
    tensors = (device, golden_values, squares)
    return tuple(laid_out(t, o, draw(st.integers(1, 2))) for t, o in zip(tensors, orders))  # type: ignore[return-value]


def in_python(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(measuring, "_built", Library("none", lambda: None))


@compiled
@settings(max_examples=300, deadline=None)
@given(pair=pairs(), tolerance=st.sampled_from([0.0, 1e-5, 1e-2]))
def test_machine_code_measures_what_python_does(pair: tuple[torch.Tensor, ...], tolerance: float) -> None:
    sides = Sides(pair[0], pair[1])
    quick = measures.measure(sides, tolerance, tolerance)
    with pytest.MonkeyPatch.context() as patch:
        in_python(patch)
        slow = measures.measure(sides, tolerance, tolerance)
    assert quick.allclose == slow.allclose
    assert quick.max_abs_diff == pytest.approx(slow.max_abs_diff, rel=1e-5, abs=1e-45)
    assert quick.max_relative_diff == pytest.approx(slow.max_relative_diff, rel=1e-5)
    assert quick.cosine == pytest.approx(slow.cosine, abs=1e-5, nan_ok=True)
    most = 3e38  # that of float32, in which Python measures
    assert min(quick.max_ulp, most) == pytest.approx(min(slow.max_ulp, most), rel=1e-5, abs=1e-6)
    if quick.units is not None and slow.units is not None:
        assert min(quick.units, most) == pytest.approx(min(slow.units, most), rel=1e-5, abs=1e-6)
    finite = bool(pair[0].isfinite().all()) and bool(pair[1].isfinite().all())
    assert measuring.measure(pair[0], pair[1], 0, 0).regular == finite  # type: ignore[union-attr]


@compiled
@settings(max_examples=300, deadline=None)
@given(
    pair=pairs(),
    factor=st.sampled_from([1e-7, 1e-2]),
    least=st.sampled_from([0.0, 1e-3]),
    with_squares=st.booleans(),
    most=st.integers(0, 20),
)
def test_machine_code_doubts_what_python_does(
    pair: tuple[torch.Tensor, ...], factor: float, least: float, with_squares: bool, most: int
) -> None:
    sides = Sides(pair[0], pair[1])
    bound = Bound(factor, 1e-9, 6.0, least, 1e-6, 1e-8)
    squares = pair[2] if with_squares else None
    quick = measures.beyond(sides, bound, squares, most)
    with pytest.MonkeyPatch.context() as patch:
        in_python(patch)
        slow = measures.beyond(sides, bound, squares, most)
    assert (quick is None) == (slow is None)
    if quick is None or slow is None:
        return
    assert quick.worst == pytest.approx(slow.worst, rel=1e-9)
    assert quick.exceeding == slow.exceeding
    assert quick.places.tolist() == slow.places.tolist()
    size = sides.right.abs()
    sigma = (1e-8 * size.square() + (1e-6 * pair[2].double() if with_squares else 0.0)).sqrt().maximum(size * least)
    limit = (size * factor).clamp(min=1e-9) + 6.0 * sigma
    assert quick.exceeding == int(((sides.left - sides.right).abs() / limit > 1).sum())


@compiled
def test_zeros_without_memory_are_left_to_python() -> None:
    zeros = torch._efficientzerotensor((3, 4))
    assert measuring.measure(zeros, torch.zeros(3, 4, dtype=torch.float64), 0, 0) is None
    assert verdict.judge("torch.sgn", zeros, torch.zeros(3, 4, dtype=torch.float64)).verdict == verdict.RIGHT
    assert verdict.judge("torch.sgn", zeros, torch.ones(3, 4, dtype=torch.float64)).verdict == verdict.WRONG


@compiled
def test_every_half_number_is_read_and_rounded_as_pytorch_does() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        every = every[every.isfinite()]
        exact = every.double()
        found = measuring.measure(every, exact, 0, 0)
        assert found is not None
        assert found.equal
        assert found.largest == 0
        for nudge in (0.5, 0.49, 0.51, -0.5):  # of the distance to the next number: ties, and both sides of them
            between = exact + nudge * measures.ulps(exact.abs(), dtype)
            rounded = between.to(dtype)
            keep = rounded.isfinite()
            found = measuring.measure(rounded[keep], between[keep], 0, 0)
            assert found is not None
            assert found.equal, (dtype, nudge)


# --- formulas -------------------------------------------------------------------------------------------------


def normal(*shape: int, scale: float = 1.0, shift: float = 0.0, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return (drawn * scale + shift).requires_grad_()


def attention(mask: torch.Tensor | None = None, **options: Any) -> tuple[Any, ...]:
    q, k, v = (normal(2, 3, 33, 16, seed=n) for n in range(3))
    return F.scaled_dot_product_attention, (q, k, v), {**options, **({} if mask is None else {"attn_mask": mask})}


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "gelu": (F.gelu, (normal(64, 65, scale=2.0),), {}),
    "layer_norm": (F.layer_norm, (normal(40, 64), (64,), normal(64, shift=1.0), normal(64, scale=0.1)), {}),
    "layer_norm shifted": (F.layer_norm, (normal(40, 64, shift=3.0), (64,), normal(64), normal(64)), {}),
    "layer_norm plain": (F.layer_norm, (normal(6, 7, 64), (7, 64)), {}),
    "linear": (F.linear, (normal(5, 16, 128), normal(48, 128), normal(48)), {}),
    "linear without bias": (F.linear, (normal(16, 128), normal(48, 128)), {}),
    "matmul": (torch.matmul, (normal(3, 16, 128), normal(3, 128, 17)), {}),
    "mm": (torch.mm, (normal(16, 128), normal(128, 17)), {}),
    "add repeated": (torch.add, (normal(19, 12, 40), normal(12, 40)), {}),
    "mul repeated": (torch.mul, (normal(90, 40).detach(), normal(40)), {}),
    "addcmul repeated": (torch.addcmul, (normal(40), normal(90, 40).detach(), normal(40)), {}),
    "batch_norm": (F.batch_norm, (normal(8, 40, 5, 5, shift=0.5), None, None, normal(40), normal(40), True), {}),
    "batch_norm plain": (F.batch_norm, (normal(60, 40, shift=0.5), None, None, None, None, True), {}),
    "embedding": (F.embedding, (torch.arange(300) % 11, normal(32, 24)), {}),
    "attention": attention(),
    "attention causal": attention(is_causal=True),
    "attention scaled": attention(scale=0.5),
    "attention masked": attention(torch.ones(33, 33).tril().bool()),
    "attention biased": attention(torch.linspace(-1, 1, 33 * 33).view(33, 33)),
}


def parts_of(name: str, dtype: torch.dtype) -> list[tuple[golden.GoldenResult, str, list[Any]]]:
    """Golden runs of a call and what a correct device gives: the CPU, in this dtype."""
    function, args, kwargs = CALLS[name]
    cast = lambda t: t.detach().to(dtype).requires_grad_() if t.requires_grad else t  # noqa: E731
    args = golden.map_tensors(args, cast)
    output = function(*args, **kwargs)
    sent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    tensors = list(golden.tensors_in((args, kwargs)))
    found = iter(torch.autograd.grad(output, [t for t in tensors if t.requires_grad], sent))
    grads = [next(found) if t.requires_grad else None for t in tensors]
    plain = golden.map_tensors(args, lambda t: t.detach().requires_grad_(t.requires_grad))
    forward = golden.run(function, plain, kwargs, device="cpu")
    backward = golden.run(function, plain, kwargs, grad_outputs=[sent], device="cpu")
    return [(forward, "output", [output.detach()]), (backward, "grad_input", grads)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(CALLS))
def test_a_formula_never_says_more_than_the_probes(name: str, dtype: torch.dtype) -> None:
    known = 0
    for result, part, results in parts_of(name, dtype):
        spread = Uncertainty(result, part, precision_of(dtype, "cpu"), None)
        while spread.probes < PROBES:
            assert spread.grow()
        for number, exact in enumerate(spread.exact):
            if results[number] is None or not isinstance(exact, torch.Tensor):
                continue
            terms = spread.terms(number, exact)
            if terms is None:
                continue
            known += 1
            variance = terms.squares.double() * terms.of_squares + exact.square() * terms.of_result
            # sums of products have had a formula before, with all of their terms
            products = spread.terms_of_products(number, exact, torch.float64)
            sigma = spread.sigma(number) if products is None else products.sigma(exact)
            probed = sigma.square()  # type: ignore[union-attr]
            assert bool((variance > 0).any())
            assert float(variance.sum()) <= 1.1 * float(probed.sum()), (part, number)
            # each element has but 16 probes: the mean of 16 squares is below 0.4 of its expectation for 2 % of them,
            # and of few elements sometimes for some more
            usual = 0.02 * exact.numel()
            assert int((variance > 2.5 * probed).sum()) <= usual + 5 * math.sqrt(usual) + 1, (part, number)
    assert known, "no formula applies: the test would say nothing"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(CALLS))
def test_right_results_need_no_probe_and_wrong_ones_are_found(name: str, dtype: torch.dtype) -> None:
    for result, part, results in parts_of(name, dtype):
        expected = result.grad_inputs if part == "grad_input" else [result.outputs]
        judgement = verdict.judge(result.source.name, results, expected, result=result, part=part)
        assert judgement.verdict == verdict.RIGHT, judgement.reason
        if dtype == torch.float32:
            assert judgement.probes == 0
        for number, found in enumerate(results):
            if found is None:
                continue
            broken = [None if r is None else r.clone(memory_format=torch.contiguous_format) for r in results]
            broken[number].view(-1)[found.abs().argmax()] *= 1.5  # numbered as if in order
            judgement = verdict.judge(result.source.name, broken, expected, result=result, part=part)
            assert judgement.verdict == verdict.WRONG, (part, number)


def test_a_formula_leaves_the_arguments_alone() -> None:
    for name in CALLS:
        for result, part, results in parts_of(name, torch.float32):
            held = [*result.source.tensors, *(result.source.grad_outputs or ())]
            before = [None if t is None else t.detach().clone() for t in held]
            expected = result.grad_inputs if part == "grad_input" else [result.outputs]
            verdict.judge(result.source.name, results, expected, result=result, part=part)
            assert all(b is None or torch.equal(b, t) for b, t in zip(before, held)), name  # type: ignore[arg-type]


@pytest.mark.parametrize("lists", [False, True])
def test_what_an_optimizer_adds_is_explained_without_a_probe(lists: bool) -> None:
    weights, grads = normal(200, 30, scale=0.02).detach(), normal(200, 30, seed=5).detach()
    before = weights.clone()
    if lists:
        function, args, after = torch._foreach_add_, ([before], [grads]), [weights]
        torch._foreach_add_([weights], [grads], alpha=-1e-2)
    else:
        function, args, after = torch.Tensor.add_, (before, grads), weights
        weights.add_(grads, alpha=-1e-2)
    result = golden.run(function, args, {"alpha": -1e-2}, device="cpu")
    judge = lambda: verdict.judge(  # noqa: E731
        result.source.name, [after, args[1]], list(result.inputs_after[0]), result=result, part="input"
    )
    assert (judge().verdict, judge().probes) == (verdict.RIGHT, 0)
    weights[3, 4] *= 1.001
    assert judge().verdict == verdict.WRONG


# --- without a compiler ---------------------------------------------------------------------------------------


def test_without_a_compiler_the_verdicts_are_the_same(tmp_path: Path) -> None:
    program = """if True:
        import torch, torch.nn.functional as F
        from op_tools.judge import golden, verdict
        from op_tools.native import measuring
        assert not measuring.available()
        x = torch.randn(40, 64)
        x[3, 4] = 0.5  # near -2.7 and -0.02 the fault below would be less than rounding
        result = golden.run(F.gelu, (x,), device="cpu")
        y = F.gelu(x)
        print(verdict.judge_call("torch.nn.functional.gelu", result, outputs=y).verdict)
        y[3, 4] = y[3, 4] * 1.001 + 1e-5
        print(verdict.judge_call("torch.nn.functional.gelu", result, outputs=y).rows[0].where)
    """
    clean = {k: v for k, v in os.environ.items() if k not in ("CXX", "PATH")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**clean, "PATH": "", "DITORCH_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split("\n")[:2] == ["right", "(3, 4)"], done.stderr
    assert not list(tmp_path.iterdir())


@compiled
def test_a_broken_compiler_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("DITORCH_CACHE_DIR", str(tmp_path / "cache"))
    assert Library("broken", measuring._load).wait() is None
    monkeypatch.delenv("CXX")
    assert Library("good", measuring._load).wait() is not None
    assert list((tmp_path / "cache").glob("op_tools-*/measure.so"))


# --- golden runs that are gone back through later -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear", "attention causal", "gelu", "embedding"])
def test_a_kept_graph_gives_the_gradients_of_a_whole_run(name: str) -> None:
    function, args, kwargs = CALLS[name]
    kept = golden.run(function, args, kwargs, keep_graph=True)
    sent = [torch.ones(kept.outputs.shape)]
    whole = golden.run(function, args, kwargs, grad_outputs=sent)
    later = golden.backward(kept, sent)
    assert torch.equal(later.outputs, whole.outputs)
    assert later.source.grad_outputs is sent
    for a, b in zip(later.grad_inputs or (), whole.grad_inputs or ()):
        assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]
    assert not later.outputs.requires_grad
    with pytest.raises(ValueError, match="has no graph"):
        golden.backward(kept, sent)


def test_no_graph_is_kept_where_there_is_nothing_to_go_back_to() -> None:
    plain, leaf = torch.ones(3), torch.ones(3, requires_grad=True)
    assert golden.run(torch.neg, (plain,), keep_graph=True).graph is None
    assert golden.run(torch.Tensor.add_, (leaf.detach(), leaf), keep_graph=True).graph is None
    assert golden.run(torch.neg, (leaf,), grad_outputs=[plain], keep_graph=True).graph is None
    assert golden.run(torch.neg, (leaf,), keep_graph=True).graph is not None


def test_moves_are_told_from_what_computes() -> None:
    x = normal(4, 6)
    for function, args, moves in (
        (torch.Tensor.transpose, (x, 0, 1), True),
        (torch.Tensor.contiguous, (x.t(),), True),
        (torch.split, (x, 2), True),
        (torch.neg, (x,), True),
        (torch.exp, (x,), False),
        (torch.Tensor.expand, (x, 3, 4, 6), True),
        (torch.sort, (x,), False),
    ):
        result = golden.run(function, args, device="cpu")
        assert verdict.only_moves(result, "output") == moves, function
    result = golden.run(torch.Tensor.expand, (x, 3, 4, 6), grad_outputs=[torch.ones(3, 4, 6)], device="cpu")
    assert not verdict.only_moves(result, "grad_input")  # a sum
    outputs, grads = golden.run_as_is(torch.split, "torch.split", (x, 2), {}, [torch.ones(2, 6), None])
    assert [o.dtype for o in outputs] == [torch.float32] * 2
    assert grads is not None
    assert torch.equal(grads[0], torch.cat([torch.ones(2, 6), torch.zeros(2, 6)]))  # type: ignore[arg-type]


def test_asking_for_moves_leaves_the_structure_as_the_device_has_it() -> None:
    args = (torch.ones(1, 3, 7, 5, dtype=torch.bfloat16), torch.ones(2, 3, 3, 3, dtype=torch.bfloat16))
    result = golden.run(F.conv2d, args, device="cpu")
    assert not verdict.only_moves(result, "output")
    structure = verdict.structure_of(result, "output")
    assert structure is not None
    assert structure.steps_in_low == 2  # the CPU rounds products in a half type twice
