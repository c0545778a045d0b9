"""Axes of products: `linear`, `matmul` and its relatives, `einsum`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...call.description import Tensor
from .axes import Arguments, Axes, Names, Product, batch_names, rule


@rule("linear")
def linear(call: Arguments) -> Axes | None:
    """x[..., k], w[m, k], b[m] to y[..., m]."""
    x, weight, bias = call.get(0, "input"), call.get(1, "weight"), call.get(2, "bias")
    if weight.dim() != 2:
        return None
    rows = batch_names(x.shape[:-1], "n")
    call.call(x, (*rows, "k"))
    call.call(weight, ("m", "k"))
    beside = {}
    if bias is not None:
        call.call(bias, ("m",))
        beside[call.position(bias)] = call.position(weight)
    positions = call.position(x), call.position(weight)
    over = frozenset((*_longest(x.shape[:-1], rows), "m", "k"))
    product = Product(positions, over, None if bias is None else call.position(bias))
    return call.axes((*rows, "m"), product=product, beside=beside)


@rule("mm", "bmm", "matmul", "__matmul__", "__rmatmul__")
def matmul(call: Arguments) -> Axes | None:
    """a[..., n, k], b[..., k, m] to y[..., n, m]; vectors lack n or m."""
    if len(call.tensors) != 2:
        return None
    left, right = (call.get(0, "input"), call.get(1, "other" if call.get(1, "other") is not None else "mat2"))
    if call.op.endswith("__rmatmul__"):
        left, right = right, left
    return _product(call, left, right, None)


@rule("addmm", "baddbmm", "addmm_", "baddbmm_")
def addmm(call: Arguments) -> Axes | None:
    """c + a[n, k] b[k, m]."""
    batched = "baddbmm" in call.op
    left, right = call.get(1, "batch1" if batched else "mat1"), call.get(2, "batch2" if batched else "mat2")
    return _product(call, left, right, call.get(0, "input"))


def _product(call: Arguments, left: Any, right: Any, added: Any) -> Axes | None:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or left.is_complex():
        return None
    if left.dim() < 2 or right.dim() < 2 or left is right:
        return None
    before, after = batch_names(left.shape[:-2], "b"), batch_names(right.shape[:-2], "b")
    call.call(left, (*before, "n", "k"))
    call.call(right, (*after, "k", "m"))
    sizes = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    result: Names = (*batch_names(sizes, "b"), "n", "m")
    beside = {}
    if isinstance(added, Tensor):
        shape = (*sizes, left.shape[-2], right.shape[-1])
        names = result[len(result) - added.dim() :]
        call.call(added, tuple([None if size == 1 else name for name, size in zip(names, added.shape)]))
        if added.dim() == 1 and shape[-1] == added.shape[0] > 1:
            beside[call.position(added)] = call.position(right)
    positions, place = (call.position(left), call.position(right)), None
    if isinstance(added, Tensor):
        place = call.position(added)
    scales = call.kwargs.get("alpha", 1), call.kwargs.get("beta", 1)
    return call.axes(result, product=Product(positions, frozenset("nmk"), place, *scales), beside=beside)


@rule("einsum")
def einsum(call: Arguments) -> Axes | None:
    """The letters of the equation."""
    equation = call.get(0, "equation")
    if not isinstance(equation, str) or "..." in equation or "->" not in equation:
        return None
    given, _, wanted = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if len(terms) != len(call.tensors) or any(len(set(term)) != len(term) for term in terms):
        return None
    for term, tensor in zip(terms, call.tensors):
        if tensor.dim() != len(term):
            return None
        call.call(tensor, tuple([letter if size != 1 else None for letter, size in zip(term, tensor.shape)]))
    result = tuple([letter if call.is_named(letter) else None for letter in wanted])
    product = Product((0, 1), frozenset(given)) if len(terms) == 2 else None
    return call.axes(result, product=product)


def _longest(shape: Sequence[int], names: Names) -> tuple[str, ...]:
    """The name of the longest of these dimensions, if any has one."""
    found = [(size, name) for size, name in zip(shape, names) if name is not None]
    return (max(found)[1],) if found else ()
