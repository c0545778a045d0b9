"""Results that a correct device may choose: which of equal values an index points at, the sign of a unit vector."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from .registry import FUNCTIONS, KERNELS, FunctionFacts, IndexFacts, KernelFacts, Kind, function_facts, last_name

Tensor = torch.Tensor

KERNELS.register("""
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d amax amin aminmax argmax argmin argsort cummax
    cummax_helper cummin cummin_helper fractional_max_pool2d fractional_max_pool3d kthvalue max max_pool1d
    max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d_with_indices maximum median min minimum mode
    msort nanmedian sort topk unique unique2
    """, KernelFacts(Kind.SELECT))  # fmt: skip
FUNCTIONS.register("argmax argmin", FunctionFacts(indices=IndexFacts(None)))
FUNCTIONS.register("max min cummax cummin", FunctionFacts(indices=IndexFacts(...)))
FUNCTIONS.register("median nanmedian", FunctionFacts(indices=IndexFacts(...), dense_on_cpu=True))
FUNCTIONS.register("amax amin aminmax", FunctionFacts(indices=IndexFacts(None)))
FUNCTIONS.register("mode", FunctionFacts(indices=IndexFacts(-1)))
FUNCTIONS.register("msort", FunctionFacts(indices=IndexFacts(0)))
FUNCTIONS.register("sort argsort", FunctionFacts(indices=IndexFacts(-1, permutes=True)))
FUNCTIONS.register("topk", FunctionFacts(indices=IndexFacts(-1, position=2, permutes=True)))
FUNCTIONS.register("kthvalue", FunctionFacts(indices=IndexFacts(-1, position=2)))


def differing_choices(name: str, source: Any, device: Tensor, golden: Tensor, number: int) -> Tensor | None:
    """Where two results that are indices point at different values; None if they are not indices.

    `number` is that of the result: values come first, indices second, and both may be int64. Any of several equal
    values may be chosen, unless the call asks for a stable order.
    """
    shape = device.shape
    last = last_name(name)
    if last == "linspace":
        return _truncated_otherwise(source, device)
    known = function_facts(last).indices
    if known is None or not source.args or not isinstance(source.args[0], Tensor):
        return None
    if last == "mode":
        return _less_frequent(source, device, golden)
    if device.dtype != torch.int64 or (number == 0 and not last.startswith("arg")):
        return None
    if source.kwargs.get("stable"):
        return device != golden
    values: Tensor = source.args[0].detach()
    dim, permutes = _dim_of(known, source), known.permutes
    if dim is None:
        values, dim = values.reshape(-1), 0
        device, golden = device.reshape(-1) if device.dim() else device[None], golden.reshape(-1)
    if values.dim() == 0:
        return (device != golden).reshape(shape)
    if device.dim() == values.dim() - 1:
        device, golden = device.unsqueeze(dim), golden.unsqueeze(dim)
    if device.dim() != values.dim():
        return None
    outside, at_device, at_golden = _pointed_at(values, dim, device, golden)
    different: Tensor = outside | ~((at_device == at_golden) | (at_device.isnan() & at_golden.isnan()))
    if permutes and device.shape[dim] > 1:
        ordered, order = device.sort(dim=dim, stable=True)
        again = torch.zeros_like(different)
        again.narrow(dim, 1, device.shape[dim] - 1).copy_(ordered.diff(dim=dim) == 0)
        different = different | torch.zeros_like(again).scatter(dim, order, again)
    return different.reshape(shape)


def _dim_of(known: IndexFacts, source: Any) -> Any:
    """The dimension, or dimensions, along which a call selects; None for all."""
    dim = source.args[known.position] if len(source.args) > known.position else source.kwargs.get("dim", known.dim)
    if isinstance(dim, bool) or dim is ...:
        dim = None if known.dim is ... else known.dim
    return None if dim == () or dim == [] else dim


def selected_from(source: Any) -> Tensor | None:
    """The number of the row that each element of the first argument competes in; None if it is not known.

    >>> selected_from(source_of(torch.max, (torch.ones(2, 2), 1)))  # doctest: +SKIP
    tensor([[0, 0], [1, 1]])
    """
    known = function_facts(source.name).indices
    if known is None or not source.args or not isinstance(source.args[0], Tensor):
        return None
    shape, dim = source.args[0].shape, _dim_of(known, source)
    if isinstance(dim, Tensor):  # torch.max of two tensors
        return None
    along = range(len(shape)) if dim is None else (dim,) if isinstance(dim, int) else dim
    reduced = [1 if d in {a % max(1, len(shape)) for a in along} else n for d, n in enumerate(shape)]
    return torch.arange(math.prod(reduced)).view(reduced).expand(shape)


def _pointed_at(values: Tensor, dim: int, device: Tensor, golden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the device's indices lie outside, and the values at these and at the golden indices."""
    size = values.shape[dim]
    outside = (device < 0) | (device >= size)
    return outside, values.gather(dim, device.clamp(0, size - 1)), values.gather(dim, golden)


def _truncated_otherwise(source: Any, device: Tensor) -> Tensor | None:
    """Where integers of a linspace are not what rounding in float32, and then truncating, may give.

    The ends are integers, too; steps between them may hit an integer exactly, from either side.
    """
    ends = [source.kwargs.get(key) for key in ("start", "end", "steps")]
    ends[: len(source.args)] = source.args[:3]
    start, end, steps = (float(e) if e is not None else math.nan for e in ends)
    if not (math.isfinite(start) and math.isfinite(end) and steps > 1) or device.numel() != int(steps):
        return None
    start, end = math.trunc(start), math.trunc(end)
    exact = start + (end - start) * torch.arange(int(steps), dtype=torch.float64) / (int(steps) - 1)
    slack = 4 * torch.finfo(torch.float32).eps * max(abs(start), abs(end), 1)
    low, high = (exact - slack).trunc(), (exact + slack).trunc()
    wide = device.to(torch.float64).reshape(-1)
    return ~((wide == low) | (wide == high)).reshape(device.shape)


def _less_frequent(source: Any, device: Tensor, golden: Tensor) -> Tensor | None:
    """Where the device's value (or the value that its index points at) is not among the most frequent ones."""
    values: Tensor = source.args[0].detach()
    dim = source.args[1] if len(source.args) > 1 else source.kwargs.get("dim", -1)
    shape = device.shape
    if values.dim() == 0 or device.dim() not in (values.dim(), values.dim() - 1):
        return None
    if device.dim() == values.dim() - 1:
        device, golden = device.unsqueeze(dim), golden.unsqueeze(dim)

    def frequency(chosen: Tensor) -> Tensor:
        return (values == chosen).sum(dim, keepdim=True)

    most = frequency(golden)
    rarer = frequency(device) != most
    is_index = bool((most == 0).any()) or (device.dtype == torch.int64 != values.dtype)
    if device.dtype == torch.int64 and (is_index or bool(rarer.any())):  # indices, as far as integers tell
        outside, at_device, at_golden = _pointed_at(values, dim, device, golden)
        rarer = outside | (frequency(at_device) != frequency(at_golden))
    return rarer.reshape(shape)


# --- results that depend on the algorithm -----------------------------------------------------------------------

FUNCTIONS.register("lstsq linalg_lstsq", FunctionFacts(may_be_empty=(1, 2, 3)))  # residuals, rank and singular values


def may_be_empty(name: str, number: int) -> bool:
    """Whether some algorithm leaves this result of a function empty (`may_be_empty("torch.linalg.lstsq", 2)`)."""
    return number in function_facts(name).may_be_empty


# --- vectors of unit length: their sign (or phase) is free ----------------------------------------------------

FUNCTIONS.register("eigh eig linalg_eigh _linalg_eigh linalg_eig", FunctionFacts(free_vectors=((1, -2),)))
FUNCTIONS.register("svd linalg_svd _linalg_svd", FunctionFacts(free_vectors=((0, -2), (2, -1))))


def align_signs(name: str, number: int, device: Any, golden: Any) -> Any:
    """The golden vectors with the signs that the device chose, where signs are free (`torch.linalg.eigh`)."""
    phase = _phase(name, number, device, golden)
    return golden if phase is None else golden * phase


def align_gradient_signs(name: str, number: int, device: Any, golden: Any, grad: Tensor) -> Tensor:
    """The gradient of a device's result, for the golden result, whose vectors may have other signs."""
    phase = _phase(name, number, device, golden)
    return grad if phase is None else grad * phase.conj()


@functools.cache
def has_free_vectors(name: str) -> bool:
    """Whether a function returns vectors whose signs are free (`has_free_vectors("torch.linalg.svd")`)."""
    return bool(function_facts(name).free_vectors)


def _phase(name: str, number: int, device: Any, golden: Any) -> Tensor | None:
    """The factor that turns the golden vectors into the device's; None where no sign is free."""
    along = dict(function_facts(name).free_vectors).get(number)
    if along is None or not isinstance(device, Tensor) or device.shape != golden.shape or device.dim() < 2:
        return None
    if last_name(name) == "svd" and number == 2 and ".linalg." not in name:
        along = -2  # torch.svd returns V, torch.linalg.svd its conjugate transpose
    exact = golden.detach()
    product = (exact.conj() * device.detach().to(exact.dtype)).sum(along, keepdim=True)
    return torch.where(product.abs() > 0, product.sgn(), torch.ones_like(product))
