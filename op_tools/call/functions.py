"""Functions and their names: the name that users write for a function, and the function of a name."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.overrides import get_testing_overrides

from ..compat import OpOverload, OpOverloadPacket, device_constructors
from .operators.registry import last_name


def name_of(function: Callable[..., Any]) -> str:
    """The name that users write (`name_of(torch.nn.functional.linear) == "torch.nn.functional.linear"`)."""
    try:
        name = str(function) if isinstance(function, (OpOverload, OpOverloadPacket)) else _names().get(function)
    except Exception:  # some cannot be looked up
        name = None
    if name is None:
        short = getattr(function, "__name__", type(function).__name__)
        module = getattr(function, "__module__", None) or ""
        owner = getattr(function, "__objclass__", None)
        if owner is not None and issubclass(torch.Tensor, owner):
            return f"torch.Tensor.{short}"
        if "_VariableFunctions" in getattr(function, "__qualname__", "") or getattr(torch, short, None) is function:
            return f"torch.{short}"
        if isinstance(function, types.MethodWrapperType):
            owner = function.__self__
            return f"torch.Tensor.{getattr(owner, '__name__', '?')}.{short}"
        if module.startswith("torch.distributed") and getattr(torch.distributed, short, None) is not None:
            return f"torch.distributed.{short}"
        return f"{module}.{getattr(function, '__qualname__', short)}" if module else short
    if name.startswith("torch.functional.") and getattr(torch, last_name(name), None) is function:
        return f"torch.{last_name(name)}"
    return _SAME_FUNCTION.get(name, name)


def watched_name(name: str) -> str:
    """The name that tools know a function of PyTorch by, from any of its names; other texts stay as they are.

    >>> watched_name("torch.functional.norm"), watched_name("torch.conv2d"), watched_name("torch.no_such")
    ('torch.norm', 'torch.nn.functional.conv2d', 'torch.no_such')
    """
    plain = name.replace("\\.", ".")
    try:
        found = operator.attrgetter(plain.removeprefix("torch."))(torch) if plain.startswith("torch.") else None
    except (AttributeError, RuntimeError):  # a RuntimeError: torch.classes
        return name
    return name_of(found) if callable(found) else name


@functools.cache
def _names() -> dict[Any, str]:
    """What `torch.overrides.resolve_name` looks names up in, without the tables beside it: a tenth of its time."""
    found: dict[Any, str] = {}
    for module in (torch, torch.functional, torch.nn.functional, torch.nn.init, torch.Tensor, *_MODULES[2:]):
        of_tensors = module is torch.Tensor
        home = "torch.Tensor" if of_tensors else module.__name__
        for name in getattr(module, "__all__", ()) if module in (torch, torch.functional) else dir(module):
            if name in ("unique_dim", "__weakref__") or (name.startswith("__") and not of_tensors):
                continue
            member = getattr(module, name)
            if (of_tensors and getattr(object, name, None) == member) or isinstance(member, types.ModuleType):
                continue
            if callable(member):
                found[member] = f"{home}.{name}"
            elif hasattr(member, "__get__") and hasattr(member, "__set__"):
                found[member.__get__], found[member.__set__] = f"{home}.{name}.__get__", f"{home}.{name}.__set__"
    return found


# One C function with several names, of which PyTorch returns the rarer one.
_SAME_FUNCTION: Final = {"torch.spmm": "torch.mm"}


@functools.cache
def factories() -> frozenset[str]:
    """Names of the functions that take their device from the default device."""
    return frozenset(f"torch.{f.__name__}" for f in device_constructors())


def function_of(name: str) -> Callable[..., Any]:
    """The operator of this name; LookupError if PyTorch has none. Nothing but PyTorch's operators can be named.

    >>> function_of("torch.add") is torch.add
    True
    """
    if name.startswith("torch.functional."):  # where PyTorch defines functions of torch
        name = f"torch.{last_name(name)}"
    function = _known_functions().get(name) or _aten_function(name)
    if function is None:
        raise LookupError(f"{name!r} is not an operator of PyTorch {torch.__version__}")
    return function


SUM: Final = "autograd.sum_of_gradients"
ACCUMULATION: Final = "autograd.accumulate_grad"
KERNELS_OF_ENGINE: Final[dict[str, Callable[..., Any]]] = {
    "add": torch.add,
    "add_": torch.Tensor.add_,
    "copy_": torch.Tensor.copy_,
    "clone": torch.clone,
    "to": torch.Tensor.to,
}
_OF_ENGINE: Final = {f"{home}.{k}": f for home in (SUM, ACCUMULATION) for k, f in KERNELS_OF_ENGINE.items()}


def compared_function_of(name: str) -> Callable[..., Any]:
    """As `function_of`; what the autograd engine calls by itself has names of its own.

    >>> compared_function_of("autograd.sum_of_gradients.add") is torch.add
    True
    """
    return _OF_ENGINE.get(name) or function_of(name)


_MODULES: Final = (torch, torch.nn.functional, torch.linalg, torch.fft, torch.special)
_HOMES: Final[dict[str, Any]] = {"torch.Tensor": torch.Tensor, **{module.__name__: module for module in _MODULES}}


def _aten_function(name: str) -> Callable[..., Any] | None:
    """A function whose name is that of an ATen operator on tensors, or None."""
    home, _, last = name.rpartition(".")
    if home.startswith("aten"):
        packet, _, overload = name.removeprefix("aten.").partition(".")
        operator = _operator(packet)
        return getattr(operator, overload, None) if operator is not None and overload else operator
    if home not in _HOMES or _operator(last) is None:
        return None
    return getattr(_HOMES[home], last, None)


def _operator(name: str) -> Any:
    if name.startswith("__") or name.endswith(_NEVER):
        return None
    # the namespace also holds helpers of TorchScript that take no tensors
    takes_tensors = any("Tensor" in str(overload._schema) for overload in overloads_of(name))
    return getattr(torch.ops.aten, name) if takes_tensors else None


def overloads_of(name: str) -> list[Any]:
    """All overloads of an ATen operator, if there is one (`torch.ops.aten.add.out in overloads_of("add")`)."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, OpOverloadPacket):
        return []
    return [getattr(packet, overload) for overload in packet.overloads()]


# never looked up: getters, and what reads or writes files, changes the process or calls back
_NEVER: Final = ("__get__", "__set__", "__delete__", "from_file", "__reduce_ex__", "__setstate__", "share_memory_")


@functools.cache
def _known_functions() -> dict[str, Callable[..., Any]]:
    named = ((name_of(function), function) for function in get_testing_overrides())
    found = {name: function for name, function in named if not name.endswith(_NEVER)}
    made = ((name, getattr(torch, last_name(name), None)) for name in factories() - {"torch.from_file"})
    # `new` has no overload in PyTorch's list; SparseAdam calls it
    return (
        found
        | {name: factory for name, factory in made if factory is not None}
        | {"torch.Tensor.new": torch.Tensor.new}
    )
