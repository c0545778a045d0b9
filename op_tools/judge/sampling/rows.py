"""Axes of calls that work on whole rows: softmax, norms, reductions, attention, look-ups by index, losses."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch

from ...call.description import Tensor
from ...call.operators.registry import last_name
from .axes import Affine, Arguments, Axes, Names, rule
from .moves import getitem_by_slices

_MAX_MASK: Final = 1 << 28  # elements of a causal mask that is written out


def _dims(tensor: Tensor, letter: str = "a") -> list[str | None]:
    return [f"{letter}{n}" if size != 1 else None for n, size in enumerate(tensor.shape)]


@rule("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "normalize", "logcumsumexp")
def along_rows(call: Arguments) -> Axes | None:
    """A result of the same shape; all of one dimension is needed."""
    x = call.get(0, "input")
    dim = call.get(2, "dim", 1) if last_name(call.op) == "normalize" else call.get(1, "dim")
    if len(call.tensors) != 1 or not isinstance(dim, int) or not x.dim():
        return None
    names = _dims(x)
    names[dim] = None
    call.call(x, tuple(names))
    return call.axes(tuple(names))


@rule("sum", "mean", "amax", "amin", "prod", "var", "std", "logsumexp", "argmax", "argmin", "norm", "any", "all")
def reduction(call: Arguments) -> Axes | None:
    """Some dimensions go; all of these is needed."""
    x = call.get(0, "input")
    dim = call.get(2 if last_name(call.op) == "norm" else 1, "dim")
    keep = call.kwargs.get("keepdim", False) or any(a is True for a in call.args)
    if len(call.tensors) != 1 or not isinstance(x, Tensor) or not x.dim() or dim is None or isinstance(dim, bool):
        return None
    gone = {d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)}
    names = [None if n in gone else name for n, name in enumerate(_dims(x))]
    call.call(x, tuple(names))
    return call.axes(tuple([name for n, name in enumerate(names) if keep or n not in gone]) if gone else tuple(names))


@rule("layer_norm", "rms_norm")
def layer_norm(call: Arguments) -> Axes | None:
    """Rows of x; all of each row is needed, and of the weights."""
    x, shape = call.get(0, "input"), call.get(1, "normalized_shape")
    count = len(shape) if isinstance(shape, Sequence) else 1
    rows = _dims(x)[: x.dim() - count]
    names: Names = (*rows, *[None] * count)
    for tensor in call.tensors:
        call.call(tensor, names if tensor is x else (None,) * count)
    centred = last_name(call.op) == "layer_norm"
    weight, bias = call.get(2, "weight"), call.get(3, "bias") if centred else None
    a, b = [None if t is None else call.position(t) for t in (weight, bias)]
    eps = call.get(4, "eps", 1e-5) if centred else call.get(3, "eps")
    affine = Affine((call.position(x), a, b), count, centred, eps) if (a, b) != (None, None) else None
    return call.axes(names, affine=affine)


@rule("batch_norm")
def batch_norm(call: Arguments) -> Axes | None:
    """Channels of x; all images are needed."""
    x = call.get(0, "input")
    if x.dim() < 2:
        return None
    names: Names = (None, "c", *[None] * (x.dim() - 2))
    for tensor in call.tensors:
        call.call(tensor, names if tensor is x else ("c",))
    return call.axes(names, writes=bool(call.get(5, "training", False)) and call.get(1, "running_mean") is not None)


@rule("group_norm")
def group_norm(call: Arguments) -> Axes | None:
    """Images of x."""
    x = call.get(0, "input")
    names: Names = ("n", *[None] * (x.dim() - 1))
    for tensor in call.tensors:
        call.call(tensor, names if tensor is x else (None,))
    return call.axes(names)


@rule("scaled_dot_product_attention")
def attention(call: Arguments) -> Axes | None:
    """Heads and queries; the keys and values of a head are needed."""
    query, key, value = call.get(0, "query"), call.get(1, "key"), call.get(2, "value")
    mask, causal = call.get(3, "attn_mask"), call.get(5, "is_causal", False)
    if call.get(4, "dropout_p", 0.0) or query.dim() < 3 or not query.dim() == key.dim() == value.dim():
        return None
    if query.shape[:-2] != key.shape[:-2] or query.shape[:-2] != value.shape[:-2]:
        return None  # groups of heads share keys
    heads = _dims(query, "h")[:-2]
    call.call(query, (*heads, "n", None))
    call.call(key, (*heads, None, None))
    call.call(value, (*heads, None, None))
    names = (*heads, "n", None)
    if isinstance(mask, Tensor):
        known: Names = (*heads, "n", None)[query.dim() - mask.dim() :]
        call.call(mask, tuple([None if size == 1 else name for name, size in zip(known, mask.shape)]))
    inner = query.shape[:-1].numel() * key.shape[-2]
    if not causal or mask is not None:
        return call.axes(names, inner=inner)
    if query.shape[-2] * key.shape[-2] > _MAX_MASK:
        return None
    found = call.axes(names)
    # the mask is one more tensor, after the three
    return (
        None
        if found is None
        else Axes((*found.tensors, ("n", None)), found.results, prepare=_with_mask, ordered=frozenset("n"), inner=inner)
    )


def _with_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A causal mask as a tensor, so that queries can be taken out of their order."""
    named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"), args))
    named |= kwargs
    query, key = named.pop("query"), named.pop("key")
    value = named.pop("value")
    named["attn_mask"] = _causal_mask(query.shape[-2], key.shape[-2], query.device)
    named["is_causal"] = False
    return (query, key, value), named


@functools.lru_cache(maxsize=2)
def _causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril_()


@rule("embedding")
def embedding(call: Arguments) -> Axes | None:
    """Columns of the table; for its result, some of the indices."""
    index, table = call.get(0, "input"), call.get(1, "weight")
    if call.get(3, "max_norm") is not None:
        return None
    names = _dims(index, "i")
    call.call(index, tuple(names))
    call.call(table, (None, "d"))
    return call.axes((*names, "d"))


@rule("index_select")
def index_select(call: Arguments) -> Axes | None:
    """All other dimensions, and some of the indices."""
    x, dim, index = call.get(0, "input"), call.get(1, "dim"), call.get(2, "index")
    if not isinstance(dim, int) or index.dim() != 1:
        return None
    names = _dims(x)
    names[dim] = None
    call.call(x, tuple(names))
    call.call(index, ("i",))
    names[dim] = "i"
    return call.axes(tuple(names))


@rule("__getitem__")
def getitem(call: Arguments) -> Axes | None:
    """Rows by one tensor of indices, or parts by slices."""
    x, index = call.get(0, "input"), call.get(1, "index")
    if len(call.tensors) == 1 and not isinstance(index, (Tensor, list)):
        return getitem_by_slices(call, x, index)
    if not isinstance(index, Tensor) or index.dtype in (torch.bool, torch.uint8) or x.dim() < 2:
        return None
    names, rows = _dims(x), _dims(index, "i")
    call.call(x, (None, *names[1:]))
    call.call(index, tuple(rows))
    return call.axes((*rows, *names[1:]))


@rule("gather", "take_along_dim", "scatter_add", "scatter_add_", "scatter", "scatter_")
def gather(call: Arguments) -> Axes | None:
    """All other dimensions, as far as the index has all of them; for a gather, some of the indices."""
    x, dim, index = call.get(0, "input"), call.get(1, "dim"), call.get(2, "index")
    if last_name(call.op) == "take_along_dim":
        dim, index = call.get(2, "dim"), call.get(1, "indices")
    if not isinstance(dim, int) or not isinstance(index, Tensor) or index.dim() != x.dim() or not x.dim():
        return None
    gathers = "scatter" not in call.op
    names = [name if index.shape[n] == x.shape[n] else None for n, name in enumerate(_dims(x))]
    names[dim] = None
    own = list(names)
    if gathers:
        own[dim] = "i"
    for tensor in call.tensors:
        if tensor is not x and tensor.shape != index.shape:
            return None
        call.call(tensor, tuple(names if tensor is x else own))
    return call.axes(tuple(own if gathers else names))


@rule("index_add", "index_add_")
def index_add(call: Arguments) -> Axes | None:
    """All other dimensions."""
    x, dim, index, source = (call.get(n, name) for n, name in enumerate(("input", "dim", "index", "source")))
    if not isinstance(dim, int) or source.dim() != x.dim():
        return None
    names = _dims(x)
    names[dim] = None
    call.call(x, tuple(names))
    call.call(index, (None,))
    call.call(source, tuple(names))
    return call.axes(tuple(names))
