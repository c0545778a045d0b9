"""Questions about an ATen operator: how it rounds, how long its sums are, which steps it is made of."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch

from ..registry import CPU, KERNELS, KernelFacts, Kind, base_name_of

Tensor = torch.Tensor
_NO_FACTS: Final = KernelFacts()
_FAMILIES: Final = tuple((name[:-1], facts) for name, facts in KERNELS.by_name.items() if name.endswith("*"))


class Facts(NamedTuple):
    """The kind of an operator and the error of its function, in units of rounding errors."""

    kind: str
    accuracy: float = 1.0


@functools.cache
def base_name(func: Any) -> str:
    """Plain name of an ATen overload (`aten::add_.Tensor` is `add`, `aten::_softmax` is `softmax`)."""
    return base_name_of(func._schema.name)


@functools.cache
def kernel_facts(func: Any) -> KernelFacts:
    """What is registered for an ATen overload (`kernel_facts(torch.ops.aten.mul.Tensor).rounded_once`)."""
    name = base_name(func)
    found = KERNELS.by_name.get(f"{name}.{func._overloadname}") or KERNELS.by_name.get(name)
    return found or next((facts for prefix, facts in _FAMILIES if name.startswith(prefix)), _NO_FACTS)


@functools.cache
def facts_of(func: Any) -> Facts:
    """How an ATen overload rounds (`facts_of(torch.ops.aten.mm.default).kind == "contract"`)."""
    if is_view(func):
        return Facts(Kind.VIEW)
    known = kernel_facts(func)
    if known.kind:
        return Facts(known.kind, known.accuracy)
    foreach = func._schema.name.startswith("aten::_foreach_") and base_name(func) != "norm"
    pointwise = foreach or torch.Tag.pointwise in func.tags
    return Facts(Kind.POINTWISE if pointwise else Kind.REDUCE, known.accuracy)


def facts_for(func: Any, args: tuple[Any, ...]) -> Facts:
    """`facts_of`, where they depend on the arguments as well (`facts_for(torch.ops.aten.abs.default, (z,))`)."""
    if kernel_facts(func).exact_if_real and any(t.is_complex() for t in _flat(args)):
        return Facts(Kind.POINTWISE)
    return facts_of(func)


@functools.cache
def least_error(func: Any) -> float:
    """Error that a correct kernel may add to its result at least, in units of its arithmetic (0 for a copy)."""
    facts, known = facts_of(func), kernel_facts(func)
    if facts.kind in (Kind.VIEW, Kind.EXACT, Kind.SELECT) or known.optimizer is not None:
        return 0.0
    return 0.5 if known.rounded_once else facts.accuracy


def rounds_once(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator's only error is the rounding of its result (`rounds_once(torch.ops.aten.mul.Tensor, {})`)."""
    return kernel_facts(func).rounded_once and kwargs.get("alpha", 1) in (1, -1)


@functools.cache
def jumps(func: Any) -> bool:
    """Whether a quotient is rounded to the dtype and then to an integer: one step more or less is no error."""
    return kernel_facts(func).jumps or func._overloadname.endswith("_mode")


@functools.cache
def decomposition(func: Any) -> Callable[..., Any] | None:
    """The steps inside a fused kernel, as a function of tensors (`decomposition(torch.ops.aten.gelu.default)`)."""
    known = kernel_facts(func)
    if not known.fused or func._schema.is_mutable:
        return None
    if known.steps is not None:
        return known.steps
    from torch._decomp import decomposition_table

    steps = decomposition_table.get(func)
    # Without the wrappers that promote dtypes, which are not needed: the first call of one imports Dynamo.
    return None if steps is None else inspect.unwrap(steps)


def is_sum_of_products(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether squaring all numbers squares every term: products, sums and moves without factors."""
    known = kernel_facts(func)
    if known.plain_move or is_view(func):
        return True
    factors = [v for k, v in kwargs.items() if k in ("alpha", "beta")]
    return known.sum_of_products and all(f == 1 for f in factors) and not any(t.is_complex() for t in _flat(args))


def is_aten(func: Any) -> bool:
    """Whether an operator is PyTorch's own, not somebody's by torch.library (`is_aten(torch.ops.aten.mm.default)`)."""
    return func.namespace in ("aten", "prims", "prim")


@functools.cache
def is_composition(func: Any) -> bool:
    """Whether an operator is made of other operators that the dispatcher does not show on its own."""
    return not is_aten(func) or kernel_facts(func).hidden_steps


def computes_low(func: Any, device: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether this device's kernel rounds every step to the result's dtype (`computes_low(f, "cpu", {})`).

    Measured with benchmarks/verdict_op_db.py.
    """
    scaled = device in CPU and kwargs.get("alpha", 1) not in (1, -1)
    return scaled or device in kernel_facts(func).low_on


def steps_in_low(func: Any, args: tuple[Any, ...]) -> float:
    """How much larger than one rounding the error of a product in a half type is: gradients of images are added up
    window by window (`steps_in_low(torch.ops.aten.mm.default, args) == 2`)."""
    if base_name(func) != "convolution_backward":
        return 2.0
    return max(2.0, math.sqrt(math.prod(args[2].shape[2:])))


def adds_rows_low(func: Any, device: str) -> bool:
    """Whether this device's kernel sums over rows in the result's dtype (`adds_rows_low(f, "cpu")`)."""
    return device in CPU and kernel_facts(func).adds_rows_low


def is_view(func: Any) -> bool:
    """Whether an overload returns a view of an argument (`is_view(torch.ops.aten.t.default)`)."""
    flag = getattr(func, "is_view", None)
    if flag is not None:
        return bool(flag)
    return any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)


def length_of_sums(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """How many values at most go into one element of the result, from shapes and indices.

    >>> length_of_sums(torch.ops.aten.mm.default, (torch.ones(2, 7), torch.ones(7, 3)), {})
    7
    """
    try:
        return max(1, _length(func, args, kwargs))
    except Exception:  # arguments of a shape that was not foreseen
        return max((t.numel() for t in _flat(args)), default=1) or 1


def _length(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    length = kernel_facts(func).length
    if length is not None:
        return length(args)
    inputs = _flat(args)
    if not inputs:
        return 1
    if func._schema.name.startswith("aten::_foreach_"):  # each tensor of the list is reduced on its own
        return max(t.numel() for t in inputs)
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | dict(kwargs)
    if "dim" in named and inputs[0].dim():
        dims = named["dim"]
        dims = range(inputs[0].dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
        return math.prod(inputs[0].shape[d] for d in dims)
    if any(argument.name == "dim" for argument in func._schema.arguments) or len(inputs) == 1:
        return inputs[0].numel()
    return max(max(t.shape, default=1) for t in inputs)


def _flat(args: tuple[Any, ...]) -> list[Tensor]:
    return [t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(t, Tensor)]
