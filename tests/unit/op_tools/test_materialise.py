"""Copies of arguments lie in memory as the originals do, whatever their layout, dtype and cast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from op_tools.call.description import Tensor
from op_tools.copies import materialise
from op_tools.copies.materialise import Copier
from op_tools.judge.golden import DOUBLE, SINGLE

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "a view of all of it": lambda x: x.view(x.shape),
    "a slice": lambda x: x[1:3],
    "steps": lambda x: x[:, ::2, :, 1:],
    "transposed": lambda x: x.transpose(0, 2),
    "channels_last": lambda x: x.detach().to(memory_format=torch.channels_last),
    "expanded": lambda x: x[0, 0, 0].expand(5, 3),
    "expanded, as many as there are": lambda x: x[:1, :1, :1, :1].expand(x.shape),
    "overlapping": lambda x: x.as_strided((3, 4), (1, 1), 2),
    "one element": lambda x: x[1, 1, 1, 1],
    "one element, odd strides": lambda x: x.as_strided((1, 1), (7, 3), 5),
    "empty": lambda x: x[2:2],
    "empty at the end": lambda x: x.as_strided((0, 2), (2, 1), x.numel()),
    "apart": lambda x: x.detach().clone(),
    "bytes": lambda x: x.detach().reshape(-1).view(torch.uint8),
}
DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
CASTS = {"as is": {}, "double": DOUBLE, "single": SINGLE, "half": {torch.float32: torch.bfloat16}}


def make(dtype: torch.dtype, shape: tuple[int, ...] = (3, 4, 2, 3)) -> Tensor:
    count = torch.Size(shape).numel()
    numbers = torch.arange(count) % 5 - 2
    if dtype.is_complex:
        return torch.complex(numbers.double(), -numbers.double()).to(dtype).reshape(shape)
    return numbers.to(torch.float32).to(dtype).reshape(shape)


def values(tensor: Tensor) -> Tensor:
    """In a dtype that every operator has."""
    plain = tensor.detach()
    negated, conjugated = plain.is_neg(), plain.is_conj()
    plain = torch._neg_view(plain) if negated else plain
    plain = torch._conj(plain) if conjugated else plain
    plain = plain.to(torch.complex128 if plain.is_complex() else torch.float64)
    plain = plain.conj_physical() if conjugated else plain
    return -plain if negated else plain


def check(originals: list[Tensor], copies: list[Tensor], cast: dict[torch.dtype, torch.dtype], shared: bool) -> None:
    for x, y in zip(originals, copies):
        assert y.dtype == cast.get(x.dtype, x.dtype)
        assert (y.shape, y.stride(), y.is_conj(), y.is_neg()) == (x.shape, x.stride(), x.is_conj(), x.is_neg())
        assert y.requires_grad == x.requires_grad
        expected = values(x) if x.dtype == y.dtype else values(values(x).to(y.dtype))
        torch.testing.assert_close(values(y), expected, rtol=0, atol=0)
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or not x.numel()
    places = [materialise.place_of(x) for x in originals]
    for i, (x, a) in enumerate(zip(originals, copies)):
        for j, (y, b) in enumerate(zip(originals, copies)):
            together = x.untyped_storage()._cdata == y.untyped_storage()._cdata
            alike = x.dtype == y.dtype or not (x.dtype in cast or y.dtype in cast)
            if i == j or not (x.numel() and y.numel()):
                continue
            if shared:
                assert (a.untyped_storage()._cdata == b.untyped_storage()._cdata) == (together and alike)
                if together and x.dtype == y.dtype:  # and as far apart as they were
                    assert (a.data_ptr() - b.data_ptr()) // a.itemsize == (x.data_ptr() - y.data_ptr()) // x.itemsize
                assert (a is b) == (places[i] == places[j])
            else:
                assert (a.untyped_storage()._cdata == b.untyped_storage()._cdata) == (x is y)


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    names=st.lists(st.sampled_from(sorted(LAYOUTS)), min_size=1, max_size=4),
    cast=st.sampled_from(sorted(CASTS)),
    bits=st.sampled_from(["", "conj", "neg", "both"]),
    large=st.booleans(),
    grad=st.booleans(),
    whole=st.booleans(),
    own_memory=st.booleans(),
)
def test_every_layout_and_cast(
    dtype: torch.dtype,
    names: list[str],
    cast: str,
    bits: str,
    large: bool,
    grad: bool,
    whole: bool,
    own_memory: bool,
) -> None:
    """Small storages are copied whole, of large ones what is needed; both give the same tensors."""
    base = make(dtype, (3, 400, 20, 3) if large else (3, 4, 2, 3))
    originals = []
    for name in names:
        x = LAYOUTS[name](base)
        if bits in ("conj", "both") and x.is_complex():
            x = torch._conj(x)
        if bits in ("neg", "both") and x.dtype not in (torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2):
            x = torch._neg_view(x)
        if grad and (x.is_floating_point() or x.is_complex()):
            x = x.detach().requires_grad_()
        originals.append(x)
    originals.append(originals[0])  # one tensor given twice
    copier = Copier(cast=CASTS[cast], whole=whole, own_memory=own_memory)
    copies = copier.copy(tuple(originals))
    check(originals, copies, CASTS[cast], shared=not own_memory)
    assert [leaf is not None for leaf in copier.leaves] == [x.requires_grad for x in originals]
    assert all(leaf is None or leaf is copy for leaf, copy in zip(copier.leaves, copies))
    if whole and not own_memory:
        assert [c.storage_offset() for c in copies] == [x.storage_offset() for x in originals]


def test_casting_keeps_layout_and_sharing() -> None:
    base = torch.randn(4, 6)
    a, b, c = Copier(cast=DOUBLE).copy((base[1:, ::2], base.t(), torch.arange(3)))
    assert a.dtype == b.dtype == torch.float64
    assert c.dtype == torch.int64
    assert a.stride() == base[1:, ::2].stride()
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    a.zero_()
    assert b.t()[1:, ::2].eq(0).all()
    assert base[1:, ::2].ne(0).all()


def test_one_storage_in_two_dtypes_stays_one_where_neither_is_cast() -> None:
    real = torch.arange(8.0)
    a, b = Copier().copy((real, real.view(torch.int32)))
    a[0] = 1.0
    assert b[0] == torch.tensor(1.0).view(torch.int32)


def test_a_small_part_of_a_large_storage_is_copied_alone() -> None:
    base = torch.arange(1 << 20)
    (part,) = Copier().copy((base[1000:1010],))
    assert part.tolist() == list(range(1000, 1010))
    assert part.untyped_storage().nbytes() < 200
    wide = base.float()
    (part,) = Copier(cast=DOUBLE).copy((wide[1000:1010],))
    assert part.tolist() == list(range(1000, 1010))
    assert part.untyped_storage().nbytes() == 80


def test_float32_is_rounded_first_and_other_dtypes_are_not() -> None:
    x = torch.tensor([1.001, -2.003])
    for cast in (DOUBLE, {}):
        a, b = Copier(cast=cast, rounded_to=torch.bfloat16).copy((x, x.double()))
        assert a.dtype == cast.get(torch.float32, torch.float32)
        assert torch.equal(a, x.bfloat16().to(a.dtype))
        assert torch.equal(b, x.double())


def test_entered_copies_may_be_written_to_and_are_differentiated_by_their_leaves() -> None:
    base = torch.ones(6, requires_grad=True)
    x, y = base.detach()[:4].requires_grad_(), base.detach()[2:].requires_grad_()
    copier = Copier(cast=DOUBLE, enter=True)
    a, b = copier.copy((x, y))
    a.mul_(3)
    assert b.tolist() == [3, 3, 1, 1]
    (gradient,) = torch.autograd.grad(a.sum(), [copier.leaves[0]])
    assert gradient.tolist() == [3, 3, 3, 3]


def test_tensors_of_one_place_are_kept_apart_on_request() -> None:
    x = torch.ones(3, requires_grad=True)
    for own_memory in (False, True):
        copier = Copier(distinct_leaves=True, own_memory=own_memory)
        a, b = copier.copy((x, x))
        (a * 2 + b * 5).sum().backward()
        assert copier.leaves[0].grad.tolist() == [2, 2, 2]
        assert copier.leaves[1].grad.tolist() == [5, 5, 5]
        assert (a.data_ptr() == b.data_ptr()) != own_memory


def test_contiguous_copies() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    a, b, again = Copier(cast=DOUBLE, contiguous=True).copy((base.t(), base[:, 1:2], base.t()))
    assert a is again
    assert a.is_contiguous()
    assert b.stride() == (1, 1)
    assert b.storage_offset() == 0
    assert torch.equal(a, base.t().double())
    assert torch.equal(b, base[:, 1:2].double())


@pytest.mark.parametrize("kind", ["coo", "csr", "quantized", "nested", "jagged"])
def test_tensors_without_strides(kind: str) -> None:
    dense = torch.eye(3)
    x = {
        "coo": lambda: dense.to_sparse(),
        "csr": lambda: dense.to_sparse_csr(),
        "quantized": lambda: torch.quantize_per_tensor(dense, 0.5, 1, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([dense, dense[:1]]),
        "jagged": lambda: torch.nested.nested_tensor([dense, dense[:1]], layout=torch.jagged),
    }[kind]()
    if kind == "coo":
        x.requires_grad_()
    copier = Copier(cast=DOUBLE)
    (y,) = copier.copy((x,))
    assert y is not x
    assert y.layout == x.layout
    assert y.requires_grad == x.requires_grad == (copier.leaves[0] is not None)
    if kind == "quantized":
        assert torch.equal(y.int_repr(), x.int_repr())
        return
    assert y.dtype == torch.float64
    parts = list(zip(y.unbind(), x.unbind())) if "ed" in kind else [(y.to_dense(), x.to_dense())]
    assert all(torch.equal(a, b.double()) for a, b in parts)
