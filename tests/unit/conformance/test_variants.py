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

from ditorch.conformance import databases, hunt_script
from ditorch.conformance.cases import WRONG
from ditorch.conformance.trial import Outcome, Place
from ditorch.conformance.variants import LAYOUTS, MAX_ELEMENTS, VALUES, Variant, Variants, resized
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


def test_an_entry_is_named_by_what_it_calls() -> None:
    """Judged as `rand_like`, normal numbers would be called wrong."""
    found = databases.operators()["rand_like"]
    torch.manual_seed(0)
    drawn = found.op(torch.zeros(1000))
    assert databases.called(found) == ("randn_like" if float(drawn.min()) < 0 else "rand_like")
    assert databases.called(databases.operators()["add"]) == "add"
