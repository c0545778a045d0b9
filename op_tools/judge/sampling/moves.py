"""Axes of calls that only move values: they can be cut along every dimension that they leave as it is."""

from __future__ import annotations

from typing import Any

from ...call.description import Tensor
from ...call.operators.registry import last_name
from .axes import Arguments, Axes, Names, rule


def _dims(tensor: Tensor) -> list[str | None]:
    return [f"a{n}" if size != 1 else None for n, size in enumerate(tensor.shape)]


def _moved(call: Arguments, x: Any, dims: list[int], results: int = 1) -> Axes | None:
    """The axes of a call with results that have as many dimensions as x, and other sizes along some of them."""
    if len(call.tensors) != 1 or x is not call.tensors[0] or not x.dim():
        return None
    names = _dims(x)
    for dim in dims:
        names[dim] = None
    call.call(x, tuple(names))
    return call.axes(*[tuple(names)] * results, fixed_gradient=True)


@rule("cat", "concat", "concatenate")
def cat(call: Arguments) -> Axes | None:
    """All other dimensions; empty vectors among the tensors count for nothing."""
    dim, full = call.get(1, "dim", 0), [t for t in call.tensors if t.shape != (0,)]
    if not isinstance(dim, int) or not full or any(t.dim() != full[0].dim() or not t.dim() for t in full):
        return None
    names = _dims(full[0])
    names[dim] = None
    for tensor in call.tensors:
        call.call(tensor, tuple(names) if tensor.shape != (0,) else (None,))
    return call.axes(tuple(names), fixed_gradient=len({t.dtype for t in full}) == 1)


@rule("stack")
def stack(call: Arguments) -> Axes | None:
    """All dimensions of the tensors."""
    dim, first = call.get(1, "dim", 0), call.tensors[0]
    if not isinstance(dim, int) or any(t.shape != first.shape for t in call.tensors):
        return None
    names = _dims(first)
    for tensor in call.tensors:
        call.call(tensor, tuple(names))
    names.insert(dim % (len(names) + 1), None)
    return call.axes(tuple(names), fixed_gradient=True)


@rule("split", "chunk", "tensor_split", "split_with_sizes")
def split(call: Arguments) -> Axes | None:
    """All other dimensions."""
    x, size, dim = call.get(0, "input", call.get(0, "tensor")), call.args[1:2], call.get(2, "dim", 0)
    if not isinstance(x, Tensor) or not size or not isinstance(dim, int) or not x.dim():
        return None
    length, given = x.shape[dim], size[0]
    if not isinstance(given, int):
        count = len(given) + (last_name(call.op) == "tensor_split")
    elif last_name(call.op) == "split":
        count = -(-length // max(1, given))
    elif last_name(call.op) == "chunk":
        count = -(-length // max(1, -(-length // given)))
    else:
        count = given
    return _moved(call, x, [dim], count)


@rule("narrow", "flip", "roll")
def along_dims(call: Arguments) -> Axes | None:
    """All other dimensions."""
    x = call.get(0, "input")
    dims = call.get(2, "dims") if last_name(call.op) == "roll" else call.get(1, "dim", call.kwargs.get("dims"))
    if isinstance(dims, int):
        dims = call.args[1:] if last_name(call.op) == "flip" else [dims]
    return _moved(call, x, list(dims)) if dims else None


@rule("transpose", "swapaxes", "swapdims", "t", "permute")
def transpose(call: Arguments) -> Axes | None:
    """All dimensions, in another order."""
    x, last = call.get(0, "input"), last_name(call.op)
    if len(call.tensors) != 1 or not x.dim():
        return None
    order = list(range(x.dim()))
    if last == "permute":
        dims = call.get(1, "dims")
        order = [d % x.dim() for d in (dims if not isinstance(dims, int) else call.args[1:])]
    else:
        a, b = (0, -1) if last == "t" else (call.get(1, "dim0"), call.get(2, "dim1"))
        if not isinstance(a, int) or not isinstance(b, int):
            return None
        order[a], order[b] = order[b], order[a]
    names = _dims(x)
    call.call(x, tuple(names))
    return call.axes(tuple([names[d] for d in order]), fixed_gradient=True)


def getitem_by_slices(call: Arguments, x: Tensor, index: Any) -> Axes | None:
    """Dimensions of which all is taken."""
    names, wanted = _dims(x), list(index) if isinstance(index, tuple) else [index]
    if not all(i is None or i is ... or isinstance(i, (int, slice)) for i in wanted) or isinstance(index, bool):
        return None
    if ... in wanted:
        at = wanted.index(...)
        wanted[at : at + 1] = [slice(None)] * (x.dim() - sum(i is not None and i is not ... for i in wanted))
    result: list[str | None] = []
    dim = 0
    for each in wanted:
        if each is None:
            result.append(None)
            continue
        if each != slice(None):
            names[dim] = None
        if isinstance(each, slice):
            result.append(names[dim])
        dim += 1
    found: Names = (*result, *names[dim:])
    call.call(x, tuple(names))
    return call.axes(found, fixed_gradient=True)
