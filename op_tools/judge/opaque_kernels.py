"""Custom operators: whether ATen operators do all of their work, or some of it is invisible to the dispatcher.

A kernel in C++, in numpy or behind ctypes writes to memory that no ATen operator writes to. So an operator is run once
under a dispatch mode: memory that changes between two operators, or is read before any has written it, gives it away.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ..call import facts
from ..call.description import Tensor, map_tensors, tensors_in
from ..compat import CPU_KERNELS, DispatchMode


def has_hidden_work(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the dispatcher misses work of an operator (`has_hidden_work(torch.ops.mine.f.default, (x,), {})`)."""
    args, kwargs = map_tensors((args, kwargs), lambda t: t.detach().clone())
    watch = _MemoryWatch(list(tensors_in((args, kwargs))))
    try:
        result = redispatched(watch, func, args, kwargs)
    except Exception:  # it cannot run under a dispatch mode
        return True
    for tensor in tensors_in((args, kwargs, result)):
        watch.check(tensor)
    return watch.found_hidden_write


class _MemoryWatch(DispatchMode):
    """Copies the memory that each operator has written, and compares it when the next one reads it."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.found_hidden_write = False
        self._written: dict[int, Tensor | None] = {}  # by address; None: allocated, but not written yet
        self._alive: list[Tensor] = []  # so that no address is reused
        for tensor in inputs:
            self._note(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if facts.is_composition(func):
            return redispatched(self, func, args, kwargs)
        if facts.facts_of(func).kind == facts.Kind.VIEW:
            result = func(*args, **kwargs)
            for tensor in tensors_in(result):
                if tensor.numel() == 1 and address(tensor) not in self._written:  # a number that became a tensor
                    self._note(tensor)
            return result
        written = mutated(func, args, kwargs)
        for tensor in tensors_in((args, kwargs)):
            if not any(tensor is w for w in written):
                self.check(tensor)
        result = func(*args, **kwargs)
        for tensor in (*written, *tensors_in(result)):
            self._note(tensor, blank=facts.base_name(func) in _BLANK)
        return result

    def check(self, tensor: Tensor) -> None:
        """Find out whether the memory of a tensor differs from what operators have written there."""
        if tensor.numel() == 0 or tensor.layout != torch.strided:
            return
        written = self._written.get(address(tensor))
        if written is None or not torch.equal(written, _bytes(tensor)):
            self.found_hidden_write = True

    def _note(self, tensor: Tensor, blank: bool = False) -> None:
        if tensor.numel() == 0 or tensor.layout != torch.strided:
            return
        self._alive.append(tensor)
        self._written[address(tensor)] = None if blank else _bytes(tensor).clone()


_BLANK: Final = frozenset(name.strip("_") for name in facts.UNINITIALISED)


def _bytes(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


_NARROW: Final = {torch.float64: torch.float32, torch.complex128: torch.complex64}
_WIDER: Final = {narrow: wide for wide, narrow in _NARROW.items()}
_TRUSTED: Final = 2.0**-10  # error of a run in single precision, relative to the size of the result


def errors_in_single_precision(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
    """The rounding errors of an operator's own float32 kernel; None where it has no such kernel.

    One tensor for each result and each argument that is written to. The arguments, in float64, stay as they are.
    """
    narrow = map_tensors((args, kwargs), lambda t: t.to(_NARROW.get(t.dtype, t.dtype), copy=True))
    wide = map_tensors(narrow, lambda t: t.to(_WIDER.get(t.dtype, t.dtype), copy=True))
    try:
        rounded, exact = (results_of(func, *copies) for copies in (narrow, wide))
    except Exception:  # it takes float64 only
        return None
    return [_error(r, e) for r, e in zip(rounded, exact)] if len(rounded) == len(exact) else None


def results_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Everything that a run returns or writes to, in order (`results_of(torch.ops.mine.scan.default, (x,), {})`)."""
    return [*tensors_in(func(*args, **kwargs)), *mutated(func, args, kwargs)]


def has_a_single_precision(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator's kernel for float32 exists and is about right (`has_a_single_precision(f, (x,), {})`)."""
    errors = errors_in_single_precision(func, args, kwargs)
    if errors is None:
        return False
    args, kwargs = map_tensors((args, kwargs), lambda t: t.detach().clone())
    sizes = (torch.where(r.isfinite(), r, 0).norm() for r in results_of(func, args, kwargs))
    return all(bool(e.nan_to_num(0, 0, 0).norm() <= _TRUSTED * size) for e, size in zip(errors, sizes) if e.numel())


def _error(rounded: Tensor, exact: Tensor) -> Tensor:
    if not (exact.is_floating_point() or exact.is_complex()) or rounded.shape != exact.shape:
        return torch.zeros(())
    error = rounded.to(exact.dtype).sub_(exact)
    return error.masked_fill_(~(rounded.isfinite() | exact.isfinite()), 0)


# --- what an ATen operator reads and writes ---------------------------------------------------------------------


def redispatched(mode: DispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a custom operator so that a mode sees the ATen operators inside it."""
    with mode:
        return func.redispatch(CPU_KERNELS, *args, **kwargs)


def mutated(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operator writes to (`mutated(torch.ops.aten.add_.Tensor, (x, y), {}) == [x]`)."""
    if not func._schema.is_mutable:
        return []
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found.extend(tensors_in(value))
    return found


def address(tensor: Tensor) -> int:
    """Address of a tensor's storage (`address(x) == address(x[1:])`)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except Exception:  # sparse tensors and the like have no storage of their own
        return id(tensor)
