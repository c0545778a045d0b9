"""Gradients of products without the forward pass that autograd does first: it takes as long, and nobody looks at it.

Worker processes use them, which answer only for calls that are right: what is wrong is told by the golden run of the
whole call. A rule is registered for the last name of functions, and returns None where it does not know such a call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch

from ..call.description import Tensor, tensors_in
from ..call.operators.registry import last_name

_Gradients = list[Tensor | None]
_Rule = Callable[[Sequence[Any], Tensor, Collection[int]], "_Gradients | None"]
_NAMES: Final = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_DTYPES: Final = (torch.float32, torch.float64)
_CACHE: Final = 1 << 21  # bytes


def gradients_alone(
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    sent: Sequence[Tensor | None],
    wanted: Collection[int],
) -> _Gradients | None:
    """The gradients of these tensors of a call, None for all others; None where there is no rule, or it does not fit.

    >>> x, w = torch.ones(1, 2), torch.ones(3, 2)
    >>> gradients_alone("torch.nn.functional.linear", (x, w), {}, [torch.ones(1, 3)], {0})
    [tensor([[3., 3.]]), None]
    """
    rule = _RULES.get(last_name(name)) if name.startswith("torch.") else None
    if rule is None or len(sent) != 1 or sent[0] is None or len(args) > len(_NAMES) or not {*kwargs} <= {*_NAMES}:
        return None
    given = [*args, *[kwargs.get(key) for key in _NAMES[len(args) :]]]
    tensors = [value for value in given if isinstance(value, Tensor)]
    if list(map(id, tensors)) != list(map(id, tensors_in((args, dict(kwargs))))) or len({*map(id, tensors)}) != len(
        tensors
    ):
        return None
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1 or not dtypes <= {*_DTYPES} or not all(isinstance(t, Tensor) for t in given[:2]):
        return None
    with torch.no_grad():
        return rule(given, sent[0].detach().to(device="cpu", dtype=tensors[0].dtype), wanted)


def _convolution(given: Sequence[Any], sent: Tensor, wanted: Collection[int]) -> _Gradients | None:
    x, weight, bias, stride, padding, dilation, groups = given
    dims = weight.dim() - 2
    if x.dim() != weight.dim() or sent.dim() != x.dim() or isinstance(padding, str):
        return None
    stride, padding, dilation = _each(stride, 1, dims), _each(padding, 0, dims), _each(dilation, 1, dims)
    settings = (stride, padding, dilation, False, [0] * dims, 1 if groups is None else groups)
    sizes = None if bias is None else list(bias.shape)
    mask = [number in wanted for number in range(3)]
    mask[2] = mask[2] and bias is not None
    # of as many images at once as have their columns in the cache: there are no fast kernels for float64
    columns = x.element_size() * x.shape[1] * weight.shape[2:].numel() * sent.shape[2:].numel()
    count = max(1, _CACHE // max(1, columns)) if len(x) else 1
    pieces = [
        torch.ops.aten.convolution_backward(some, images, weight, sizes, *settings, mask)
        for some, images in zip(sent.split(count), x.split(count))
    ]
    found = torch.cat([p[0] for p in pieces]) if mask[0] else None, *[_sum([p[n] for p in pieces]) for n in (1, 2)]
    return [g if asked else None for g, asked in zip(found, mask)][: 2 if bias is None else 3]


def _sum(pieces: Sequence[Tensor | None]) -> Tensor | None:
    total = pieces[0]
    for piece in pieces[1:]:
        total = None if total is None or piece is None else total.add_(piece)
    return total


def _each(value: Any, default: int, dims: int) -> list[int]:
    """A number for each dimension."""
    values = [default] if value is None else list(value) if isinstance(value, Sequence) else [value]
    return values * dims if len(values) == 1 else values


def _linear(given: Sequence[Any], sent: Tensor, wanted: Collection[int]) -> _Gradients | None:
    x, weight, bias = given[:3]
    if weight.dim() != 2 or sent.shape != (*x.shape[:-1], weight.shape[0]):
        return None
    rows, values = sent.reshape(-1, sent.shape[-1]), x.reshape(-1, x.shape[-1])
    found: _Gradients = [
        torch.matmul(sent, weight) if 0 in wanted else None,
        torch.matmul(rows.t(), values) if 1 in wanted else None,
    ]
    return found if bias is None else [*found, rows.sum(0) if 2 in wanted else None]


_RULES: Final[dict[str, _Rule]] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    "linear": _linear,
}
