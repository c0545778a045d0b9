"""Axes of elementwise calls: every dimension, or all elements as one long row where they lie alike in memory."""

from __future__ import annotations

import functools
from typing import Final

import torch

from ...call.functions import overloads_of
from ...call.operators.registry import last_name
from .axes import Arguments, Axes, Names, batch_names

# elementwise, though PyTorch does not tag them so
_MORE: Final = frozenset(
    {
        *("clone", "contiguous", "to", "float", "half", "bfloat16", "double", "type_as", "copy_", "masked_fill_"),
        *("dropout", "gelu", "silu", "relu", "softplus", "leaky_relu", "elu", "hardtanh", "relu6", "logsigmoid"),
    }
)
_OPERATORS: Final = {"truediv": "div", "rtruediv": "div", "floordiv": "floor_divide", "mod": "remainder"}
_SELECTS: Final = frozenset({"max", "min", "sort", "topk"})  # elementwise in some of their forms only
_FIXED_GRADIENT: Final = frozenset(
    {
        *("add", "sub", "rsub", "neg", "positive", "clone", "contiguous", "to", "float", "half", "bfloat16", "double"),
        *("type_as", "__add__", "__radd__", "__sub__", "__rsub__", "__neg__"),
    }
)
_SHAPE_OF_FIRST: Final = frozenset({"to", "type_as", "copy_"})


@functools.cache
def is_pointwise(op: str) -> bool:
    """Whether each element of the result depends on the same element of the arguments (`is_pointwise("torch.add")`)."""
    last = last_name(op)
    if last in _MORE:
        return True
    if last.startswith("_foreach") or "as_strided" in last:
        return False
    plain = last.strip("_") if last.startswith("__") else last
    if last.startswith("__i") and not overloads_of(plain):
        plain = plain[1:]
    plain = _OPERATORS.get(plain, plain)
    if plain in _SELECTS:
        return False
    overloads = overloads_of(plain) or overloads_of(plain.rstrip("_")) or overloads_of(plain.removeprefix("r"))
    return any(torch.Tag.pointwise in o.tags for o in overloads)


def pointwise(call: Arguments) -> Axes | None:
    """Any elementwise call."""
    if not call.tensors:
        return None
    try:
        shape = torch.broadcast_shapes(*[t.shape for t in call.tensors])
    except RuntimeError:
        return None
    last = last_name(call.op)
    if (last in _SHAPE_OF_FIRST or last.endswith("_")) and shape != call.tensors[0].shape:
        return None
    alike = [t.shape == shape and t.is_contiguous() for t in call.tensors]
    asks_for_layout = any(isinstance(v, torch.memory_format) for v in (*call.args, *call.kwargs.values()))
    if shape.numel() > 1 and not asks_for_layout and all(a or t.dim() == 0 for a, t in zip(alike, call.tensors)):
        names: tuple[Names, ...] = tuple([("e",) if a else () for a in alike])
        return Axes(names, (("e",),), flat=True, fixed_gradient=last in _FIXED_GRADIENT)
    own = tuple([batch_names(t.shape, "e") for t in call.tensors])
    return Axes(own, (batch_names(shape, "e"),), fixed_gradient=last in _FIXED_GRADIENT)
