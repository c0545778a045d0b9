"""Calls that PyTorch's samples leave out: the same values in other layouts, the same draws for the same seed."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ditorch.conformance import databases, findings, hunt_script, ledger
from ditorch.conformance.cases import ERROR, PASS, WRONG, Case, Result
from ditorch.conformance.hunt_checks import Finding
from ditorch.conformance.trial import Outcome, Place, nearly_same
from ditorch.conformance.variants import (
    LAYOUTS,
    MAX_ELEMENTS,
    VALUES,
    Samples,
    Variant,
    Variants,
    in_dtype,
    resized,
)
from tests.databases import load

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=5)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    load()


@settings(deadline=None, max_examples=60)
@given(shape=shapes, dtype=dtypes, name=st.sampled_from(sorted(LAYOUTS)))
def test_a_layout_keeps_shape_and_values(shape: list[int], dtype: torch.dtype, name: str) -> None:
    values = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    fits, make = LAYOUTS[name]
    if not fits(values):
        return
    made = make(values)
    assert (made.shape, made.dtype) == (values.shape, values.dtype)
    if name == "expanded":
        assert 0 in made.stride()
    else:
        assert torch.equal(made, values)
        assert not made.is_contiguous() or made.storage_offset() or name == "channels_last" or max(shape) == 1


@settings(deadline=None, max_examples=60)
@given(shape=shapes, old=st.integers(1, 5), new=st.integers(1, 9), name=st.sampled_from(["", *LAYOUTS]))
def test_a_size_changes_everywhere(shape: list[int], old: int, new: int, name: str) -> None:
    values = torch.rand(shape)
    fits, make = LAYOUTS.get(name, (lambda t: True, lambda t: t))
    laid = make(values) if fits(values) else values
    variant = Variant((laid.requires_grad_(), 3), {"weight": torch.rand(old, 2)})
    after = resized(variant, old, new)
    assert [t.shape for t in after.tensors] == [
        torch.Size([new if n == old else n for n in t.shape]) for t in variant.tensors
    ]
    assert after.tensors[0].requires_grad
    assert set(after.tensors[0].flatten().tolist()) <= set(laid.flatten().tolist())  # the domain is kept


@pytest.mark.parametrize("name", VALUES)
def test_values_are_of_the_same_kind(name: str) -> None:
    values = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).half()
    made = VALUES[name](values, torch.Generator().manual_seed(0))
    assert (made.shape, made.dtype) == (values.shape, values.dtype)
    assert not torch.equal(made, values)


def test_the_same_seed_draws_the_same() -> None:
    info = databases.operators()["nn.functional.avg_pool2d"]

    def drawn(seed: str) -> list[tuple[str, list[Any]]]:
        made = itertools.islice(Variants(info, "float32", grad=True, seed=seed).drawn(), 30)
        return [(v.told, [(t.shape, t.stride(), t.sum().item()) for t in v.tensors]) for v in made]

    assert drawn("1") == drawn("1") != drawn("2")
    told = " ".join(text for text, _ in drawn("1"))
    assert "channels_last" in told
    assert "size" in told
    assert all(shape.numel() <= MAX_ELEMENTS for _, tensors in drawn("1") for shape, _, _ in tensors)


@pytest.mark.parametrize("way", ["plain", "backward", "out", "in place"])
@pytest.mark.parametrize("name", ["add", "norm.nuc"])
def test_a_script_stands_alone(tmp_path: Path, way: str, name: str) -> None:
    info = databases.operators()[name]
    x = torch.tensor([[1.0, float("inf")], [float("nan"), -2.0]]) if name == "add" else torch.eye(3)
    args = (x.t().requires_grad_(way == "backward"), *([2] if name == "add" else ["nuc"]))
    text = hunt_script.text(info, Variant(args, {}), way, "cpu", Outcome(WRONG, 'off by """1"""'))
    compile(text, "script", "exec")
    assert "allow_tf32 = False" in text  # as in the workers, or every convolution on CUDA is "still there"
    if way == "backward":
        script = tmp_path / "script.py"
        script.write_text(text)
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stdout) == (0, "the difference is gone\n"), done.stderr


@pytest.mark.parametrize(("allowed", "status"), [(1.0, 0), (0.0, 1)])
def test_a_script_asks_about_the_worst_element_and_its_own_bound(allowed: float, status: int, tmp_path: Path) -> None:
    x = torch.full((2, 3), 0.1)  # in place: the CPU's call must not change what the device gets
    place = Outcome(WRONG, "off", worst=Place("output", 0, (1, 2), allowed))  # 0.3 has no exact float32
    script = tmp_path / "script.py"
    script.write_text(hunt_script.text(databases.operators()["mul"], Variant((x, 3.0), {}), "in place", "cpu", place))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert done.returncode == status, done.stdout + done.stderr


def test_a_script_with_out_is_held_against_float64_and_says_what_one_needs_to_judge(tmp_path: Path) -> None:
    """A name of the body hid the function that widens, so no result of `out=` was ever held against float64."""
    place = Outcome(WRONG, "out= with strides: off", worst=Place("output", 0, (1, 2), 0.0))
    script = tmp_path / "script.py"
    script.write_text(
        hunt_script.text(databases.operators()["mul"], Variant((torch.full((2, 3), 0.1), 3.0), {}), "out", "cpu", place)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stdout + done.stderr
    for said in ("0 of 6 elements are not the CPU's", "in float64", "the same result", "largest error"):
        assert said in done.stdout
    assert "not known" not in done.stdout


def test_a_script_with_out_finds_what_the_cpu_does_not_fill_either(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    info, variant = databases.operators()["fft.ihfftn"], Variant((torch.full((1, 1, 1), 3.0),), {"dim": 1})
    script.write_text(hunt_script.text(info, variant, "out", "cpu", Outcome(WRONG)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stdout + done.stderr


def test_a_script_fills_several_results(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    x = torch.tensor([3.0, 1.0, 2.0])
    script.write_text(hunt_script.text(databases.operators()["sort"], Variant((x,), {}), "out", "cpu", Outcome(WRONG)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "the difference is gone\n"), done.stderr


def test_an_entry_is_named_by_what_it_calls() -> None:
    """Judged as `rand_like`, normal numbers would be called wrong."""
    found = databases.operators()["rand_like"]
    torch.manual_seed(0)
    drawn = found.op(torch.zeros(1000))
    assert databases.called(found) == ("randn_like" if float(drawn.min()) < 0 else "rand_like")
    assert databases.called(databases.operators()["add"]) == "add"


def test_samples_in_half_types_are_those_of_float32() -> None:
    info = databases.operators()["nn.functional.linear"]
    samples = Samples(info)
    wide, narrow = samples.made((5, 10, 20), "float32", True), samples.made((5, 10, 20), "bfloat16", True)
    assert wide is narrow
    drawn = list(itertools.islice(Variants(info, "bfloat16", grad=True, seed="1", samples=samples).drawn(), 20))
    assert {t.dtype for v in drawn for t in v.tensors} == {torch.bfloat16}
    assert all(t.requires_grad for t in in_dtype(wide[0], torch.float16).tensors)


def test_a_size_that_makes_a_tensor_too_large_is_left_alone() -> None:
    variant = Variant((torch.zeros(5, 5, 7), torch.zeros(5)), {})
    assert resized(variant, 5, 1000, most=4096) is variant
    assert [t.shape[0] for t in resized(variant, 5, 24, most=4096).tensors] == [24, 24]
    assert [t.shape[0] for t in resized(variant, 5, 2, most=1).tensors] == [2, 2]


def test_eight_bit_numbers_and_sparse_tensors_keep_their_values() -> None:
    """Few kernels know them: the draw itself raised."""
    info = databases.operators()["add"]
    odd = (torch.zeros(2).to(torch.float8_e4m3fn), torch.eye(2).to_sparse())
    variants = Variants(info, "float32", grad=False, seed="1")
    assert all(variants._other_values(Variant((t,), {})).args[0] is t for t in odd for _ in range(8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_that_differ_in_rounding_alone_need_no_verdict(dtype: torch.dtype) -> None:
    x = torch.randn(50, dtype=dtype)
    assert nearly_same([x], [torch.nextafter(x, x + 1)])
    assert not nearly_same([x], [x * (1 + 8 * torch.finfo(dtype).eps)])
    assert not nearly_same([torch.zeros(2, dtype=dtype)], [-torch.zeros(2, dtype=dtype)])
    assert not nearly_same([x], [x.half()])
    assert not nearly_same([x], [torch.where(x == x[3], torch.nan, x)])
    assert not nearly_same([x.bfloat16()], [torch.nextafter(x.bfloat16(), x.bfloat16() + 1)])  # 0.8 % is much


def hunt_result(*several: Finding) -> Result:
    details = tuple(text for one in several for text in (one.details, one.script))
    message = " | ".join(one.message for one in several)
    return Result(Case("hunt", "nn.functional.avg_pool2d", "-", "round-1"), WRONG, message, details=details)


def test_findings_are_one_line_each_with_what_is_known(tmp_path: Path) -> None:
    entries = ledger.parse("ops/nn.functional.avg_pool2d/*/out  wrong  ignores strides", "cuda.txt")
    off = "x: y (at [0], largest difference 0.57, 3 ulp, 1e+06 times what rounding explains)"
    result = hunt_result(
        Finding("out, float32, (1, 2), 3: out= with strides: 7 instead of 1", "drawn", off, "print(1)"),
        Finding("backward, float32, (1, 2, 3, 3) strides (18, 1, 6, 2), padding=1: off", "drawn", off, "print(2)"),
    )
    lost = Result(Case("hunt", "add", "-", "round-2"), ERROR, "the device was lost: plain, float32, (3,): CUDA error")
    clean = Result(Case("hunt", "mul", "-", "round-1"), PASS)
    assert findings.write(tmp_path, [result, lost, clean], ledger.Ledger(entries, "2.13.0")) == 3
    lines = (tmp_path / findings.FILE).read_text().splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["add", *["nn.functional.avg_pool2d"] * 2]
    assert "device was lost: plain, float32, (3,)" in lines[0]
    assert "known: ignores strides" in lines[1]
    assert lines[2].endswith("| off by 0.57, 1e+06 x the bound | new | round-1")
    assert len(list((tmp_path / "scripts").iterdir())) == 2


def test_no_matrix_is_made_singular() -> None:
    """The logarithm of a determinant of zero is what rounding makes of it: -inf in float32, -40 in float64."""
    drawn = Variants(databases.operators()["logdet"], "float32", grad=False, seed="1").drawn()
    told = {change for v in itertools.islice(drawn, 200) for change in v.changes}
    assert any("transposed" in change for change in told)
    assert not any("expanded" in change or "zeros" in change or "equal" in change for change in told)


def test_indices_that_a_kernel_trusts_stay_as_they_are() -> None:
    """With strides of their own, they took the CPU's process down."""
    drawn = Variants(databases.operators()["_segment_reduce.offsets"], "float32", grad=False, seed="1").drawn()
    whole = [t for v in itertools.islice(drawn, 100) for t in v.tensors if not t.is_floating_point()]
    assert whole
    assert all(t.is_contiguous() and t.storage_offset() == 0 for t in whole)


def test_indices_that_a_kernel_trusts_fit_the_data() -> None:
    """At other sizes PyTorch's samples keep their lengths: with `unsafe=True` the kernel wrote past its memory."""
    info = databases.operators()["_segment_reduce.lengths"]
    for seed in range(4):
        made = itertools.islice(Variants(info, "float32", grad=False, seed=str(seed)).drawn(), 40)
        for variant in made:
            lengths, axis = variant.kwargs["lengths"], variant.kwargs.get("axis", 0)
            assert int(lengths.sum(-1).max()) <= variant.args[0].shape[axis]
