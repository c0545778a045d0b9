"""Questions about a call or an operator, answered from PyTorch's schemas and tags and from the registry of facts.

A call is asked about by the name of its function, an ATen operator by its overload.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from ..compat import decomposition_table, plugin_device
from . import optimizers
from .operators.draws import really_draws as really_draws
from .operators.freedoms import align_gradient_signs as align_gradient_signs
from .operators.freedoms import align_signs as align_signs
from .operators.freedoms import differing_choices as differing_choices
from .operators.freedoms import has_free_vectors as has_free_vectors
from .operators.freedoms import may_be_empty as may_be_empty
from .operators.freedoms import selected_from as selected_from
from .operators.registry import CPU, FUNCTIONS, KERNELS, MEASURED, NODES, KernelFacts, base_name_of, function_facts
from .operators.registry import Kind as Kind
from .operators.registry import last_name as last_name

Tensor = torch.Tensor
Facts = KernelFacts

UNINITIALISED: Final = FUNCTIONS.names(lambda f: f.uninitialised)
AUTOCAST_LOW: Final = FUNCTIONS.names(lambda f: f.autocast_low)
STAYS_ON_DEVICE: Final = FUNCTIONS.names(lambda f: f.stays)
UNDECLARED_WRITES: Final = {name: f.writes for name, f in FUNCTIONS.by_name.items() if f.writes}
COPIES_BETWEEN_DEVICES: Final = FUNCTIONS.names(lambda f: f.moves)
BY_CUDNN: Final = FUNCTIONS.names(lambda f: f.cudnn)
NODES_WITHOUT_KERNEL: Final = NODES.names(lambda runs_kernel: not runs_kernel)
_INPLACE_OPTION: Final = FUNCTIONS.names(lambda f: f.inplace_option)
_TRANSFERS: Final = FUNCTIONS.names(lambda f: f.converts == "device")
_DEVICE_TYPES: Final = _TRANSFERS | {"privateuseone"}
_FAMILIES: Final = tuple((name[:-1], facts) for name, facts in KERNELS.by_name.items() if name.endswith("*"))
_NO_FACTS: Final = Facts()


# --- a call, by the name of its function --------------------------------------------------------------------


def is_device_text(text: str) -> bool:
    """Whether a text is `cuda`, `npu:0` and the like (`is_device_text("cuda:1")`)."""
    kind, _, index = text.partition(":")
    return (kind in _DEVICE_TYPES or kind == plugin_device()) and (not index or index.isdecimal())


def is_bound_to_dtype(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str = "") -> bool:
    """Whether a call on a device only means something in its own dtype (`x.view(torch.int16)`)."""
    retyped = last_name(name) == "view" and any(isinstance(v, torch.dtype) for v in (*args, *kwargs.values()))
    known = function_facts(name)
    return retyped or known.bound_to_dtype or device in known.bound_on


def may_mutate(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may write to its arguments (`may_mutate("torch.Tensor.add_", {})`)."""
    last = last_name(name)
    if last.startswith("__"):
        return last == "__setitem__" or (last.startswith("__i") and last not in ("__invert__", "__index__", "__int__"))
    return last.endswith("_") or kwargs.get("out") is not None or "inplace" in kwargs or last in _INPLACE_OPTION


def on_cpu(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function to call on the CPU: a transfer to another device is a copy."""
    if name.startswith("torch.Tensor.") and (last_name(name) in _TRANSFERS or last_name(name) == plugin_device()):
        return lambda tensor, *args, **kwargs: tensor.clone()
    if is_optimizer(name):
        return functools.partial(_with_narrow_numbers, function)
    if function_facts(name).dense_on_cpu:
        return functools.partial(_on_dense, function)
    return function


def _on_dense(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The CPU's kernel sorts a copy of its argument in place that keeps strides of 0: its elements share memory."""
    return function(*[a.contiguous() if isinstance(a, Tensor) else a for a in args], **kwargs)


def is_optimizer(name: str) -> bool:
    """Whether a function is a fused optimizer (`is_optimizer("torch._fused_adam_")`)."""
    return optimizers.steps_of(last_name(name).strip("_")) is not None


def works_on_lists(name: str) -> bool:
    """Whether a function does the same to each tensor of its lists (`works_on_lists("torch._foreach_add_")`)."""
    return is_optimizer(name) or last_name(name).startswith("_foreach_")


def _with_narrow_numbers(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Fused optimizers take step counts and scales in float32 only, whatever the dtype of the parameters."""
    *lists, last = args
    if isinstance(last, list) and all(isinstance(t, Tensor) and t.dim() == 0 for t in last):
        last = [t.to(torch.float32) for t in last]
    return function(*lists, last, **{k: v.float() if isinstance(v, Tensor) else v for k, v in kwargs.items()})


def adapt(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments whose default depends on the dtype, written out (the `eps` of `rms_norm`)."""
    kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    defaults = function_facts(name).defaults
    if defaults is None:
        return args, kwargs
    inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
    return defaults(args, kwargs, torch.finfo(inputs[0].dtype)) if inputs else (args, kwargs)


# --- an ATen operator -----------------------------------------------------------------------------------------


@functools.cache
def base_name(func: Any) -> str:
    """Plain name of an ATen overload (`aten::add_.Tensor` is `add`, `aten::_softmax` is `softmax`)."""
    return base_name_of(func._schema.name)


@functools.cache
def kernel_facts(func: Any) -> Facts:
    """What is registered for an ATen overload (`kernel_facts(torch.ops.aten.mul.Tensor).rounded_once`)."""
    name = base_name(func)
    found = KERNELS.by_name.get(f"{name}.{func._overloadname}") or KERNELS.by_name.get(name)
    return found or next((facts for prefix, facts in _FAMILIES if name.startswith(prefix)), _NO_FACTS)


@functools.cache
def facts_of(func: Any) -> Facts:
    """How an ATen overload rounds (`facts_of(torch.ops.aten.mm.default).kind == "contract"`)."""
    known = kernel_facts(func)
    if is_view(func):
        return known._replace(kind=Kind.VIEW, accuracy=1.0)
    if known.kind:
        return known
    foreach = func._schema.name.startswith("aten::_foreach_") and base_name(func) != "norm"
    return known._replace(kind=Kind.POINTWISE if foreach or torch.Tag.pointwise in func.tags else Kind.REDUCE)


def facts_for(func: Any, args: tuple[Any, ...]) -> Facts:
    """`facts_of`, where they depend on the arguments as well (`facts_for(torch.ops.aten.abs.default, (z,))`)."""
    if kernel_facts(func).exact_if_real and any(t.is_complex() for t in _flat(args)):
        return Facts(Kind.POINTWISE)
    return facts_of(func)


@functools.cache
def least_error(func: Any) -> float:
    """The error that every correct kernel may make, in rounding errors of its arithmetic (0 for a copy)."""
    facts, known = facts_of(func), kernel_facts(func)
    if facts.kind in (Kind.VIEW, Kind.EXACT, Kind.SELECT) or known.optimizer is not None:
        return 0.0
    return 0.5 if known.rounded_once else facts.accuracy


def rounds_once(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator's only error is the rounding of its result (`rounds_once(torch.ops.aten.mul.Tensor, {})`)."""
    return kernel_facts(func).rounded_once and kwargs.get("alpha", 1) in (1, -1)


@functools.cache
def jumps(func: Any) -> bool:
    """Whether a quotient is rounded to the dtype and then to an integer: one step off is no error."""
    return kernel_facts(func).jumps or func._overloadname.endswith("_mode")


@functools.cache
def decomposition(func: Any) -> Callable[..., Any] | None:
    """The steps inside a fused kernel, as a function of tensors (`decomposition(torch.ops.aten.gelu.default)`)."""
    known = kernel_facts(func)
    if not known.fused or func._schema.is_mutable:
        return None
    if known.steps is not None:
        return known.steps
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
    """Whether an operator is PyTorch's own, not a custom one (`is_aten(torch.ops.aten.mm.default)`)."""
    return func.namespace in ("aten", "prims", "prim")


@functools.cache
def is_composition(func: Any) -> bool:
    """Whether an operator consists of others that the dispatcher shows only if it is redispatched."""
    return not is_aten(func) or kernel_facts(func).hidden_steps


def computes_low(func: Any, device: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether this device's kernel rounds every step to the result's dtype (`computes_low(f, "cpu", {})`).

    Measured with benchmarks/verdict_op_db.py. A device that nobody has measured may do what another one does.
    """
    scaled = device in CPU and kwargs.get("alpha", 1) not in (1, -1)
    low_on = kernel_facts(func).low_on
    return scaled or device in low_on or (bool(low_on) and device not in MEASURED)


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
    return bool(func.is_view)


def length_of_sums(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """How many values at most go into one element of the result, from shapes and indices.

    >>> length_of_sums(torch.ops.aten.mm.default, (torch.ones(2, 7), torch.ones(7, 3)), {})
    7
    """
    try:
        return max(1, _length(func, args, kwargs))
    except Exception:  # arguments that were not foreseen
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
