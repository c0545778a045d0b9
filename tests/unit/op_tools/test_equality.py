"""The three ways to be the same, against NumPy and the bytes themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from op_tools.call.equality import equal, leaves_of, same_bits, same_leaves, same_values

from .test_archive import strided

_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.int32]
_FEW = st.lists(st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf")]), min_size=0, max_size=4)


def _tensor(values: list[float], dtype: torch.dtype, layout: str) -> torch.Tensor:
    if dtype == torch.int32:
        values = [v if v in (0.0, 1.0) else 7.0 for v in values]
    if dtype.is_complex:
        parts = {torch.complex32: torch.float16, torch.complex64: torch.float32}[dtype]
        tensor = torch.view_as_complex(
            torch.tensor([[v, w] for v, w in zip(values, values[::-1])], dtype=parts).view(-1, 2)
        )
        return tensor.conj().conj_physical() if layout == "strided" and dtype == torch.complex64 else tensor
    tensor = torch.tensor(values, dtype=dtype)
    return torch.stack([tensor, tensor], 1)[:, 0] if layout == "strided" else tensor


def _numpy(tensor: torch.Tensor) -> Any:
    tensor = tensor.resolve_conj()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.to(torch.float64).numpy()


@given(_FEW, _FEW, st.sampled_from(_DTYPES), st.sampled_from(_DTYPES), st.sampled_from(["dense", "strided"]))
@settings(deadline=None, max_examples=100)
def test_numbers_are_the_same_as_numpy_has_it(
    left: list[float], right: list[float], dtype: torch.dtype, other: torch.dtype, layout: str
) -> None:
    for values, kind in ((left, dtype), (right, dtype), (left, other)):
        a, b = _tensor(left, dtype, "dense"), _tensor(values, kind, layout)
        alike = a.dtype == b.dtype and a.shape == b.shape
        assert equal(a, b) == (alike and np.array_equal(_numpy(a), _numpy(b)))
        assert same_values(a, b) == (alike and np.array_equal(_numpy(a), _numpy(b), equal_nan=True))
        signs = alike and np.array_equal(np.signbit(_numpy(a)), np.signbit(_numpy(b)))
        if not (np.isnan(_numpy(a)).any() and np.isnan(_numpy(b)).any()):
            assert same_bits(a, b) == (alike and signs and np.array_equal(_numpy(a), _numpy(b)))


@given(strided(), strided())
@settings(deadline=None, max_examples=60)
def test_same_bits_is_about_values_alone(x: torch.Tensor, y: torch.Tensor) -> None:
    assert same_bits(x, x.detach().clone())
    alike = x.dtype == y.dtype and x.shape == y.shape
    assert same_bits(x, y) == (alike and torch.equal(x, y) and torch.equal(_signs(x), _signs(y)))
    assert equal(x, y) == same_values(x, y) == (alike and torch.equal(x, y))


def _signs(x: torch.Tensor) -> torch.Tensor:
    """Of zeros, too: the conjugate of 0 is -0j."""
    return torch.signbit(torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach())


def test_zeros_and_nans() -> None:
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    assert (equal(zero, -zero), same_values(zero, -zero), same_bits(zero, -zero)) == (True, True, False)
    assert (equal(nan, nan.clone()), same_values(nan, nan.clone()), same_bits(nan, nan.clone())) == (False, True, True)
    assert same_bits(float("nan"), float("nan"))
    assert not same_bits(torch.ones(1), None)


def test_other_layouts() -> None:
    sparse = torch.eye(2).to_sparse()
    assert not same_values(sparse, sparse)
    assert same_bits(sparse, torch.eye(2).to_sparse())


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (1, 2, False),
        ("a", "a", True),
        (None, None, True),
        (None, torch.ones(1), False),
        (torch.Size([1]), torch.Size([2]), False),
        (object(), object(), True),
    ],
)
def test_what_is_no_tensor_is_equal_by_type_and_number(a: Any, b: Any, expected: bool) -> None:
    assert equal(a, b) == expected


def test_trees_are_compared_leaf_by_leaf() -> None:
    x = torch.ones(2)
    assert list(leaves_of({"a": [1, "text"], "b": torch.Size([3])})) == [1, "text", torch.Size([3])]
    assert same_leaves([x, (1,)], [x.clone(), 1], equal)
    assert not same_leaves([x], [x, x], equal)
    assert not same_leaves([x, x], [x, x + 1], same_values)
