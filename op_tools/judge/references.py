"""References: what the result of an operator without a CPU kernel is compared with.

A kernel of the user's own often exists for the device alone. What it should compute, the user can say:

    @op_tools.reference("mylib::wkv")
    def wkv(w, u, k, v): ...        # operators of PyTorch's, on the CPU, in float64; differentiated for the backward

The name is that of a `torch.library` operator, as the tool prints it or with `::`; a `torch.autograd.Function` around a
kernel is named by its class. Without a reference, a decomposition that is registered for the operator is taken.
"""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar, overload

import torch

from .. import settings
from ..call.description import map_tensors, tensors_in
from ..call.functions import name_of
from ..compat import OpOverload, OpOverloadPacket, decomposition_table, has_kernel
from .synced_norms import PARTS

_Function = TypeVar("_Function", bound=Callable[..., Any])
given: Final[dict[str, Callable[..., Any]]] = {}  # the references that the user named
_loaded: Final[set[str]] = set()
NOT_JUDGED: Final = "it has no CPU kernel"  # how the reason begins, wherever only the user can say what is right
_REMEDY: Final = "name a reference (op_tools.reference) or register a CPU kernel"
NO_KERNEL: Final = f"{NOT_JUDGED}; {_REMEDY}"
NO_STEPS: Final = f"{NOT_JUDGED}: no operator of PyTorch's makes its result; name a reference (op_tools.reference)"
NO_GRADIENT: Final = f"{NOT_JUDGED}, and its reference cannot be differentiated"


@overload
def reference(op: Any) -> Callable[[_Function], _Function]: ...
@overload
def reference(op: Any, function: _Function) -> _Function: ...
def reference(op: Any, function: Any = None) -> Any:
    """Name the function that an operator is compared with; alone, it is a decorator.

    `op` is the name of an operator, the operator itself, or a subclass of `torch.autograd.Function`. The function gets
    the arguments of a call on the CPU, in float64 where it takes that, and returns (or writes) what the operator does.

    >>> reference("mylib::twice", lambda x: 2 * x)(3)
    6
    """
    if function is None:
        return lambda chosen: reference(op, chosen)
    if not callable(function):
        raise settings.SettingsError(f"op_tools.reference({op!r}, ...): {function!r} is not a function")
    given[_key(op)] = function
    return function


def load(texts: str) -> None:
    """Import what `OP_AUTOCOMPARE_REFERENCES` names: modules or files that name references; `module:function` is run.

    >>> load("")
    """
    for text in settings.split_list(texts):
        if text in _loaded:
            continue
        where, _, name = text.partition(":")
        try:
            module = vars(importlib.import_module(where)) if not where.endswith(".py") else runpy.run_path(where)
            if name:
                module[name]()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise settings.SettingsError(
                f"OP_AUTOCOMPARE_REFERENCES: {text!r} cannot be used ({reason}); write a module, a file or "
                "module:function; it calls op_tools.reference"
            ) from None
        _loaded.add(text)


def named(function: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """The reference that the user named for a function, or None."""
    return given.get(_plain(name)) or given.get(_key(function)) if given else None


def has_reference(kind: type) -> bool:
    """Whether the user named a reference for a class (`has_reference(MyFunction)`)."""
    return bool(given) and _key(kind) in given


def is_kernel_of_a_class(function: Callable[..., Any]) -> bool:
    """Whether a function is `apply` of a `torch.autograd.Function`: its kernel may crash on the CPU."""
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def decomposed(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The steps of an operator: those registered for it, if it is not PyTorch's own, or of a part of SyncBatchNorm.

    >>> decomposed(torch.batch_norm_stats) is not None
    True
    """
    part = PARTS.get(getattr(function, "__name__", ""))
    if part is not None and function is getattr(torch, function.__name__, None):
        return part
    for one in _overloads(function):
        steps = decomposition_table.get(one)
        if steps is not None and one.namespace != "aten":
            return steps
    return None


def runs_on_the_device_alone(function: Callable[..., Any], read_only: bool = False) -> bool:
    """Whether nothing says what an operator should compute: no CPU kernel, decomposition or reference.

    With `read_only`, it must also be one that by its schema writes to nothing and draws nothing.
    """
    found = list(_overloads(function))
    if not found or named(function, "") is not None or decomposed(function) is not None:
        return False
    keys = ("CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    if any(has_kernel(one._schema.name, one._schema.overload_name, key) for one in found for key in keys):
        return False
    seeded = torch.Tag.nondeterministic_seeded
    return not read_only or not any(one._schema.is_mutable or seeded in one.tags for one in found)


def shape_problem(function: Callable[..., Any], args: Any, kwargs: Any, outputs: Any) -> str:
    """What an operator's fake kernel says against a result: its shape or dtype; empty where it agrees or is missing."""
    if not any(has_kernel(one._schema.name, one._schema.overload_name, "Meta") for one in _overloads(function)):
        return ""
    try:
        with torch.no_grad():
            expected = list(tensors_in(function(*_on_meta(args), **_on_meta(kwargs))))
    except Exception:  # sizes that depend on values
        return ""
    found = list(tensors_in(outputs))
    if len(found) != len(expected):
        return f"{len(found)} tensors instead of {len(expected)}, as its fake kernel says"
    for ours, theirs in zip(found, expected):
        if ours.shape != theirs.shape:
            return f"shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}, as its fake kernel says"
        if ours.dtype != theirs.dtype:
            return f"dtype {ours.dtype} instead of {theirs.dtype}, as its fake kernel says"
        if theirs.numel() > 1 and ours.layout == torch.strided and ours.stride() != theirs.stride():
            return f"strides {ours.stride()} instead of {theirs.stride()}, as its fake kernel says"
    return ""


def _on_meta(value: Any) -> Any:
    return map_tensors(value, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"))


def _overloads(function: Any) -> Iterator[Any]:
    if isinstance(function, OpOverload):
        yield function
    elif isinstance(function, OpOverloadPacket):
        yield from [getattr(function, name) for name in function.overloads()]


def _key(op: Any) -> str:
    if isinstance(op, str):
        return _plain(op)
    if isinstance(op, (OpOverload, OpOverloadPacket)):
        return _plain(str(op))
    op = getattr(op, "_opoverload", op)  # of torch.library.custom_op
    if is_kernel_of_a_class(op):
        op = op.__self__
    if isinstance(op, type):
        return f"{op.__module__}.{op.__qualname__}"
    return _plain(str(op) if isinstance(op, OpOverload) else name_of(op))


def _plain(name: str) -> str:
    """One spelling for all names of an operator (`_plain("torch.ops.mylib::f") == _plain("mylib.f.default")`)."""
    return name.replace("::", ".").removeprefix("torch.ops.").removesuffix(".default")
