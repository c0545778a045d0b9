"""Whether two results are the same: leaf by leaf, as equal numbers or bit for bit.

| | NaN and NaN | 0.0 and -0.0 |
| --- | --- | --- |
| `equal` | differ | are equal |
| `same_values` | are equal | are equal |
| `same_bits` | are equal if their bits are | differ |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .description import Tensor, children


def leaves_of(value: Any) -> Iterator[Any]:
    """Everything in nested containers that is compared on its own (`list(leaves_of([x, 1]))`)."""
    found: list[Any] = []
    _collect(value, found)
    return iter(found)


def _collect(value: Any, found: list[Any]) -> None:
    parts = None if isinstance(value, (Tensor, str)) else children(value)
    if parts is None:
        found.append(value)
        return
    for member in parts[1]:
        if isinstance(member, Tensor):
            found.append(member)
        else:
            _collect(member, found)


def same_leaves(ours: Any, theirs: Any, same: Callable[[Any, Any], bool]) -> bool:
    """Whether two trees have as many leaves, and each two of them are the same (`same_leaves([x], [x], equal)`)."""
    left, right = list(leaves_of(ours)), list(leaves_of(theirs))
    return len(left) == len(right) and all(map(same, left, right))


def equal(a: Any, b: Any) -> bool:
    """Whether two leaves have the same type and equal numbers; other objects are equal if their types are.

    >>> equal(torch.ones(2), torch.ones(2)), equal(1, 1.0)
    (True, False)
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*_comparable(a, b))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return type(a) is type(b) and (a == b or not isinstance(a, (int, float, complex, str, tuple)))


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors have the same dtype and equal numbers, or NaN in the same places.

    >>> same_values(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    True
    """
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != torch.strided or b.layout != torch.strided:
        return False
    a, b = _comparable(a, b)
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _comparable(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Complex numbers by their parts: one that is NaN says nothing of the other, and the CPU compares no halves."""
    if not a.is_complex():
        return a, b
    return torch.view_as_real(a.resolve_conj().resolve_neg()), torch.view_as_real(b.resolve_conj().resolve_neg())


def same_bits(a: Any, b: Any) -> bool:
    """Whether two leaves are the same, bit for bit; layout does not count (`same_bits(x, x.t().t())`)."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        ours, theirs = _bits(a), _bits(b)
        if ours.dtype != theirs.dtype:
            ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
        return torch.equal(ours, theirs)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    return bool(a == b)


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_quantized:
        plain = plain.int_repr()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    plain = plain.contiguous().reshape(-1)
    if plain.numel() < 2:  # one element counts as contiguous whatever its stride, but not when seen as bytes
        plain = plain.clone(memory_format=torch.contiguous_format)
    nbytes = plain.numel() * plain.element_size()
    # eight bytes at a time are compared many times faster than one
    whole = nbytes % 8 == 0 and plain.storage_offset() * plain.element_size() % 8 == 0
    return plain.view(torch.int64 if whole else torch.uint8)
