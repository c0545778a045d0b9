"""Operators that faults reach outside of soft's own kernels: collectives, and kernels that a library brought."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import native

__all__ = ["COLLECTIVES", "Override", "has_own_kernel", "is_collective", "runs_by_fallback"]

COLLECTIVES = frozenset(
    f"c10d::{name}_"
    for name in (
        *("broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "_allgather_base"),
        *("allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter", "reduce_scatter"),
        *("_reduce_scatter_base", "alltoall_base", "alltoall", "recv", "recv_any_source"),
    )
)
"""What ``csrc/collectives.cpp`` asks about; their first argument is what they write."""


def is_collective(name: str) -> bool:
    """Whether this operator is a collective that can be made wrong."""
    return name in COLLECTIVES


def runs_by_fallback(name: str) -> bool:
    """Whether an operator that is not PyTorch's runs the CPU's kernel on soft."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return not name.startswith("aten::") and has(name, "CPU") and not has(name, "PrivateUse1")


def has_own_kernel(name: str) -> bool:
    """Whether somebody registered a kernel of an operator of their own for this device, or for every one."""
    if name.startswith(("aten::", "prims::", "prim::", "c10d::", "_c10d_functional::", "profiler::")):
        return False
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "PrivateUse1") or has(name, "CompositeExplicitAutograd")


class Override:
    """Puts the hooks around a kernel that is not soft's, until ``remove()``."""

    def __init__(self, name: str, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        base, _, overload = name.partition(".")
        space, _, function = base.partition("::")
        operator = getattr(getattr(getattr(torch.ops, space), function), overload or "default")
        kernel = torch.library.get_kernel(operator, "PrivateUse1")

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            declared = operator._schema.arguments
            given = [*args, *[kwargs.get(a.name, a.default_value) for a in declared[len(args) :]]]
            tensors = [value for value in given if isinstance(value, torch.Tensor)]
            device = tensors[0].device.index if tensors else 0
            strikes = before(base, overload, device, _hosts(given))
            found = kernel.call_boxed(keys, *args, **kwargs)
            if strikes:
                several = isinstance(found, (list, tuple))
                results = _hosts(found if several else [found])
                shapes = [getattr(result, "shape", None) for result in results]
                after(strikes, results)
                if shapes != [getattr(result, "shape", None) for result in results]:
                    moved = [_like(old, new) for old, new in zip(found if several else [found], results)]
                    return type(found)(moved) if several else moved[0]
            return found

        self._library = torch.library.Library(space, "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            self._library.impl(
                f"{function}.{overload}" if overload else function,
                run,
                "PrivateUse1",
                with_keyset=True,
                allow_override=True,
            )

    def remove(self) -> None:
        """Give the operator its kernel back."""
        self._library._destroy()


def _hosts(values: Sequence[Any]) -> list[Any]:
    """The same values with CPU tensors over the same memory."""
    alias = native().host_alias
    return [
        alias(value)
        if isinstance(value, torch.Tensor)
        else _hosts(value)
        if isinstance(value, (list, tuple))
        else value
        for value in values
    ]


def _like(old: Any, new: Any) -> Any:
    """A result that a fault gave another shape, on the device where the old one is."""
    return new.to(old.device) if isinstance(old, torch.Tensor) and new.shape != old.shape else old
