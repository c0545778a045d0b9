"""What sums give in float32 when their terms are added one by one, in some order that a correct kernel may take.

Random roundings add up like a random walk. Those of terms that are equal, or nearly so, all go the same way: a constant
background, rows of padding, a mean of equal scores. So before a result is called wrong, the golden run is done again
with each of its sums really done in float32: straight, and in lanes. What these are off is no error of the device.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F

from ..call import facts as op_facts
from ..call.description import Tensor
from ..compat import DispatchMode, decomposition_table
from .golden import GoldenResult
from .opaque_kernels import redispatched

LANES: Final = (1, 4, 16, 64)  # running sums that are kept side by side, and added up in the end
DRIFTS: Final = 2.0  # how often what real orders of summation are off is added, before a result is called wrong
_MAX_TERMS_AT_ONCE: Final = 1 << 21
_Terms = Callable[[Tensor], Tensor]  # the terms with these consecutive numbers, a row for each


class TooLong(Exception):
    """There are more terms than can be added one by one in the time that is left."""


class InOrder(DispatchMode):
    """Does the sums inside a call in float32, one term after the other in each lane; all else stays as it is."""

    def __init__(self, lanes: int, until: float) -> None:
        super().__init__()
        self._lanes, self._until = lanes, until

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op_facts.is_composition(func):
            return redispatched(self, func, args, kwargs)
        name = op_facts.base_name(func)
        handler = _HANDLERS.get(name)
        if handler is not None and all(_plain(a, name in _COMPLEX) for a in args):
            given = {key: value for key, value in kwargs.items() if key != "out"}
            found = handler(self, func, *args, **given)
            if isinstance(found, Tensor) and func._schema.is_mutable:  # out=, or in place
                target = kwargs.get("out", args[0])
                return target.resize_(found.shape).copy_(found)
            if found is not NotImplemented:
                return found
        if name in _TAKEN_APART:
            steps = op_facts.decomposition(func) or decomposition_table.get(func)
            if steps is not None:
                with self:
                    return steps(*args, **kwargs)
        return func(*args, **kwargs)

    def total(self, count: int, width: int, terms: _Terms) -> Tensor:
        """The sum of `count` rows of `width` terms."""
        if count == 0:
            return torch.zeros(width, dtype=torch.float64)
        lanes = min(self._lanes, count)
        at_once = max(1, _MAX_TERMS_AT_ONCE // max(1, width * lanes)) * lanes
        sums: Any = None
        for some in torch.arange(count).split(at_once):
            if time.perf_counter() > self._until:
                raise TooLong
            sums = dealt_out(sums, terms(some).to(torch.float32).numpy(), lanes)
        return torch.from_numpy(added(sums)).to(torch.float64)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """`a @ b`, of matrices or of batches of the same size."""
        left, right = a.unsqueeze(-1), b.unsqueeze(-3)  # (..., m, k, 1) and (..., 1, k, n)
        shape = (*a.shape[:-1], b.shape[-1])

        def terms(some: Tensor) -> Tensor:
            products = left.index_select(-2, some) * right.index_select(-2, some)
            return products.movedim(-2, 0).reshape(len(some), -1)

        return self.total(a.shape[-1], math.prod(shape), terms).view(shape)

    def along(self, x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
        """The sum of a tensor along some dimensions, all of them if none are named."""
        dims = sorted({d % x.dim() for d in dims}) or list(range(x.dim()))
        rows = x.movedim(dims, list(range(len(dims)))).flatten(0, len(dims) - 1) if x.dim() else x.view(1)
        total = self.total(
            rows.shape[0],
            rows[0].numel() if len(rows) else 0,
            lambda some: rows.narrow(0, int(some[0]), len(some)).reshape(len(some), -1),
        )
        shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
        total = total.view(shape)
        return total if keepdim else total.view([n for d, n in enumerate(x.shape) if d not in dims])


def dealt_out(sums: Any, rows: Any, lanes: int) -> Any:
    """Running sums of the lanes, a row for each, after these rows of terms, which they take in turns."""
    whole = len(rows) // lanes * lanes
    terms = rows[:whole].reshape(-1, lanes * rows.shape[1])
    first = terms if sums is None else np.concatenate([sums.reshape(1, -1), terms])
    found = added(first).reshape(lanes, -1)
    if whole < len(rows):
        with np.errstate(over="ignore", invalid="ignore"):
            found[: len(rows) - whole] += rows[whole:]
    return found


def added(rows: Any) -> Any:
    """The sum of all rows, one after the other; numpy adds pairwise only along a row."""
    with np.errstate(over="ignore", invalid="ignore"):  # infinity and NaN are results like others
        if rows.shape[1] == 1:
            return np.add.accumulate(rows[:, 0])[-1:]
        return np.add.reduce(rows, axis=0)


def _plain(value: Any, may_be_complex: bool = False) -> bool:
    return not isinstance(value, Tensor) or (
        value.layout == torch.strided and (may_be_complex or not value.is_complex())
    )


def drift(
    result: GoldenResult, backward: bool, leaves: Callable[[Any], list[Any]], exact: list[Any], seconds: float
) -> list[Any]:
    """How far each result is off at most when its sums are done in some order; None where that is not known."""
    until = time.perf_counter() + seconds
    worst: list[Any] = [None] * len(exact)
    for lanes in LANES:
        try:
            found = leaves(result.rerun(InOrder(lanes, until), backward))
        except TooLong:
            break
        for position, (here, there) in enumerate(zip(exact, found)):
            if isinstance(here, Tensor) and isinstance(there, Tensor) and here.shape == there.shape:
                wide = torch.complex128 if here.is_complex() else torch.float64
                moved = (there.to(wide) - here.to(wide)).abs().nan_to_num(0.0, 0.0, 0.0)
                worst[position] = moved if worst[position] is None else torch.maximum(worst[position], moved)
    return worst


# -- sums of one tensor ----------------------------------------------------------------------------------------


def _sum(mode: InOrder, func: Any, x: Tensor, dim: Any = (), keepdim: bool = False, **more: Any) -> Any:
    if x.is_complex():
        parts = [_sum(mode, func, part, dim, keepdim) for part in (x.real, x.imag)]
        return torch.complex(*parts).to(more.get("dtype") or x.dtype)
    if not x.is_floating_point():
        return NotImplemented
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    return mode.along(x, dims, keepdim).to(more.get("dtype") or x.dtype)


def _mean(mode: InOrder, func: Any, x: Tensor, dim: Any = (), keepdim: bool = False, **more: Any) -> Any:
    total = _sum(mode, func, x, dim, keepdim, **more)
    return total if total is NotImplemented else total / (x.numel() / max(1, total.numel()))


def _var(
    mode: InOrder, func: Any, x: Tensor, dim: Any = (), unbiased: bool = True, keepdim: bool = False,
    *, correction: Any = None,
) -> Any:  # fmt: skip
    if isinstance(dim, bool):
        dim, unbiased = (), dim
    mean = _mean(mode, func, x, dim, True)
    count = x.numel() / max(1, mean.numel())
    squares = _sum(mode, func, (x - mean).square(), dim, keepdim)
    return squares / max(0.0, count - (int(unbiased) if correction is None else correction))


def _var_mean(mode: InOrder, func: Any, x: Tensor, dim: Any = (), *args: Any, **kwargs: Any) -> Any:
    keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    return _var(mode, func, x, dim, *args, **kwargs), _mean(
        mode, func, x, () if isinstance(dim, bool) else dim, keepdim
    )


def _cumsum(mode: InOrder, func: Any, x: Tensor, dim: int, *, dtype: Any = None) -> Any:
    if not x.is_floating_point() or not x.dim():
        return NotImplemented
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.cumsum(x.to(torch.float32).numpy(), dim, np.float32)
    return torch.from_numpy(sums).to(dtype or x.dtype)


def _norm(
    mode: InOrder, func: Any, x: Tensor, order: Any = 2, dim: Any = (), keepdim: bool = False, **more: Any
) -> Any:
    order = 2 if order is None else order
    if not isinstance(order, (int, float)) or order == 0 or math.isinf(order):
        return NotImplemented
    sizes = x.abs()
    if order == 2:
        found = _sum(mode, func, sizes.square(), dim, keepdim).sqrt()
    else:
        found = _sum(mode, func, sizes.pow(order), dim, keepdim).pow(1 / order)
    return found.to(more.get("dtype") or found.dtype)


def _norms(mode: InOrder, func: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """Those of the tensors in a list, or of one."""
    if isinstance(tensors, Tensor):
        return _norm(mode, func, tensors, *args, **kwargs)
    if not all(_plain(x, True) for x in tensors):
        return NotImplemented
    found = [_norm(mode, func, x, *args, **kwargs) for x in tensors]
    return NotImplemented if any(norm is NotImplemented for norm in found) else found


# -- sums of products --------------------------------------------------------------------------------------------


def _mm(mode: InOrder, func: Any, a: Tensor, b: Tensor) -> Any:
    return mode.product(a, b).to(a.dtype)


def _mv(mode: InOrder, func: Any, a: Tensor, b: Tensor) -> Any:
    return mode.product(a, b.unsqueeze(-1)).squeeze(-1).to(a.dtype)


def _dot(mode: InOrder, func: Any, a: Tensor, b: Tensor) -> Any:
    return mode.product(a.unsqueeze(0), b.unsqueeze(-1)).view(()).to(a.dtype)


def _addmm(mode: InOrder, func: Any, c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return beta * c + alpha * mode.product(a, b).to(c.dtype)


def _addmv(mode: InOrder, func: Any, c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return beta * c + alpha * _mv(mode, func, a, b)


# -- sums at places that indices name ----------------------------------------------------------------------------


def _in_float32(mode: InOrder, func: Any, *args: Any, **kwargs: Any) -> Any:
    """The CPU adds these up one by one, in the order of the indices, in the dtype that it is given."""
    if any(argument.is_out for argument in func._schema.arguments):
        return NotImplemented
    if op_facts.base_name(func) == "index_put" and not (args[3] if len(args) > 3 else kwargs.get("accumulate")):
        return NotImplemented
    found = func(*[_with_dtype(a, torch.float32) for a in args], **kwargs)
    if isinstance(found, Tensor):
        return _with_dtype(found, torch.float64)
    return type(found)(_with_dtype(result, torch.float64) for result in found)


def _with_dtype(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


# -- convolutions --------------------------------------------------------------------------------------------------


def _patches(x: Tensor, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any) -> Tensor:
    """What each window sees: (n, groups of channels, places, taps), with places and taps in order."""
    x = F.pad(x, [p for p in reversed(padding) for _ in (0, 1)])
    for d, (k, s, w) in enumerate(zip(kernel, stride, dilation)):
        x = x.unfold(2 + d, w * (k - 1) + 1, s)[..., ::w]
    return x  # (n, c, *places, *taps)


def _as_products(
    x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> tuple[Tensor, list[int]]:
    """Patches as matrices of (groups, n · places, channels · taps), and the shape of the places."""
    dims = weight.dim() - 2
    patches = _patches(x, weight.shape[2:], stride, padding, dilation)
    places = list(patches.shape[2 : 2 + dims])
    n, c = patches.shape[:2]
    patches = patches.reshape(n, groups, c // groups, math.prod(places), -1)
    return patches.permute(1, 0, 3, 2, 4).reshape(groups, n * math.prod(places), -1), places


def _rows(g: Tensor, groups: int) -> Tensor:
    """Channels of an image as columns: (groups, n · places, channels)."""
    return g.reshape(g.shape[0], groups, g.shape[1] // groups, -1).permute(1, 0, 3, 2).flatten(1, 2)


def _folded(
    columns: Tensor, like: Tensor, weight: Tensor, places: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> Tensor:
    """Add columns of (groups, n · places, channels · taps) up in an image."""
    kernel, groups, n = list(weight.shape[2:]), columns.shape[0], like.shape[0]
    columns = columns.view(groups, n, math.prod(places), -1, math.prod(kernel)).permute(1, 0, 3, 4, 2)
    columns = columns.reshape(n, like.shape[1], math.prod(kernel), *places)
    image = torch.zeros(n, like.shape[1], *[s + 2 * p for s, p in zip(like.shape[2:], padding)], dtype=torch.float32)
    for number, tap in enumerate(itertools.product(*map(range, kernel))):
        where: list[Any] = [
            slice(t * w, t * w + (p - 1) * s + 1, s) for t, w, p, s in zip(tap, dilation, places, stride)
        ]
        image[_everywhere(where)] += columns[:, :, number].to(torch.float32)
    inside: list[Any] = [slice(p, p + s) for p, s in zip(padding, like.shape[2:])]
    return image[_everywhere(inside)].to(torch.float64)


def _everywhere(inside: list[Any]) -> tuple[Any, ...]:
    return (..., *inside)


def _convolution(
    mode: InOrder, func: Any, x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, *_: Any,
) -> Any:  # fmt: skip
    if transposed or x.dim() != weight.dim():
        return NotImplemented
    patches, places = _as_products(x, weight, stride, padding, dilation, groups)
    matrix = weight.reshape(groups, weight.shape[0] // groups, -1).mT
    out = mode.product(patches, matrix).view(groups, x.shape[0], -1, matrix.shape[2]).permute(1, 0, 3, 2)
    out = out.reshape(x.shape[0], weight.shape[0], *places).to(x.dtype)
    return out if bias is None else out + bias.view(-1, *[1] * len(places))


def _convolution_backward(
    mode: InOrder, func: Any, grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int, mask: Sequence[bool],
) -> Any:  # fmt: skip
    if x.dim() != weight.dim():
        return NotImplemented
    # a transposed convolution is the gradient of one: the image and the windows change places
    image, seen = (grad, x) if transposed else (x, grad)
    patches, places = _as_products(image, weight, stride, padding, dilation, groups)
    flat = weight.reshape(groups, weight.shape[0] // groups, -1)
    to_x = to_weight = None
    if mask[0]:
        columns = mode.product(_rows(grad, groups), flat) if not transposed else None
        if columns is not None:
            to_x = _folded(columns, x, weight, places, stride, padding, dilation)
        else:
            out = mode.product(patches, flat.mT).view(groups, x.shape[0], -1, flat.shape[1]).permute(1, 0, 3, 2)
            to_x = out.reshape(x.shape).to(x.dtype)
    if mask[1]:
        to_weight = mode.product(_rows(seen, groups).mT, patches).view(weight.shape).to(weight.dtype)
    to_bias = mode.along(grad, [0, *range(2, grad.dim())]).to(grad.dtype) if mask[2] else None
    return to_x, to_weight, to_bias


# By names without the underscores at their ends (`op_facts.base_name`).
_HANDLERS: Final[dict[str, Callable[..., Any]]] = {
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "var_mean": _var_mean,
    "cumsum": _cumsum,
    "linalg_vector_norm": _norm,
    "norm": _norms,
    "mm": _mm,
    "bmm": _mm,
    "mv": _mv,
    "dot": _dot,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "addmv": _addmv,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(
        (
            *("index_add", "index_put", "index_reduce", "scatter_add", "scatter_reduce", "bincount", "renorm"),
            *("embedding_dense_backward", "embedding_bag", "embedding_bag_forward_only", "embedding_bag_backward"),
            *(
                "embedding_bag_dense_backward",
                "avg_pool2d",
                "avg_pool2d_backward",
                "avg_pool3d",
                "avg_pool3d_backward",
            ),
            *("cdist_forward", "cdist_backward", "pdist_forward", "pdist_backward"),
            *("multi_margin_loss", "multi_margin_loss_backward"),
            *("multilabel_margin_loss_forward", "multilabel_margin_loss_backward"),
        ),
        _in_float32,
    ),
}
_COMPLEX: Final = frozenset({"sum", "mean", "linalg_vector_norm", "norm"})
_TAKEN_APART: Final = frozenset(
    {
        *("native_batch_norm", "native_batch_norm_backward", "native_layer_norm", "native_layer_norm_backward"),
        *("native_group_norm", "native_group_norm_backward", "std", "std_mean", "nll_loss_forward", "mse_loss"),
        *("softmax_backward_data", "log_softmax_backward_data"),
    }
)
