"""Axes of calls on lists of tensors side by side: foreach operators and fused optimizers."""

from __future__ import annotations

from ...call import facts
from ...call.description import Tensor
from ...call.operators.registry import last_name
from .axes import Arguments, Axes, Names
from .pointwise import is_pointwise


def works_on_lists(op: str) -> bool:
    """Whether each element of each list has to do only with the same element of the others."""
    if facts.is_optimizer(op):
        return True
    last = last_name(op)
    return last.startswith("_foreach_") and (is_pointwise(f"torch.{last[9:]}") or last in _MORE)


_MORE = frozenset({"_foreach_copy_", "_foreach_zero_"})


def on_lists(call: Arguments) -> Axes | None:
    """An axis for each place in the lists, over all elements of the tensors there."""
    lists = [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, (list, tuple)) and a]
    lists = [a for a in lists if all(isinstance(t, Tensor) for t in a)]
    if not lists:
        return None
    first = lists[0]
    for members in lists:
        if len(members) != len(first):
            return None
        for place, (tensor, model) in enumerate(zip(members, first)):
            if tensor.dim() and tensor.shape != model.shape:
                return None
            call.call(tensor, (f"t{place}",) if tensor.dim() and tensor.numel() > 1 else ())
    for tensor in call.tensors:
        if tensor.dim() == 0:
            call.call(tensor, ())
    names: list[Names] = [(f"t{n}",) if t.dim() and t.numel() > 1 else () for n, t in enumerate(first)]
    return call.axes(*names, flat=True, lists=True)
