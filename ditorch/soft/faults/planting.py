"""Faults in force: which operators they mean, and what happens around a call of one."""

from __future__ import annotations

import difflib
import fnmatch
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ditorch_common.settings import DITORCH

from .. import native
from ..low_precision import ACCUMULATING
from . import effects
from .effects import Strike, sleep
from .grammar import CONDITIONS, Fault, FaultSyntaxError, parse, parse_one
from .reach import Override, has_own_kernel, is_collective, runs_by_fallback

__all__ = ["Planted", "active", "clear", "from_environment", "plant"]


# --- planting --------------------------------------------------------------------------


@dataclass
class Planted:
    """A fault that is in force until ``remove()``, or until its ``with`` block ends."""

    fault: Fault
    operators: frozenset[str]
    calls: int = 0  # calls that met the conditions
    hits: int = 0  # calls that the fault changed
    earlier: dict[Any, torch.Tensor] = field(default_factory=dict, repr=False)  # results of earlier calls
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __enter__(self) -> Planted:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Make the operator right again; removing twice does no harm."""
        _change(lambda planted: [other for other in planted if other is not self])

    def strikes(self) -> int | None:
        """Count a call; its number if this is one that the fault hits, else None."""
        with self._lock:
            self.calls += 1
            number = self.calls
            fault = self.fault
            if (fault.nth is not None and number != fault.nth) or (fault.every is not None and number % fault.every):
                return None
            self.hits += 1
            return number


_planted: list[Planted] = []
_by_operator: dict[str, list[Planted]] = {}
_overrides: dict[str, Override] = {}
_change_lock = threading.RLock()


def plant(fault: str | Fault, /, **changes: Any) -> Planted:
    """Put one fault in force; keyword arguments override its conditions.

    >>> with plant("addmm: noise=1e-2", dtype=torch.bfloat16):  # doctest: +SKIP
    ...     train()
    """
    if isinstance(fault, str):
        read = parse(fault)
        if len(read) != 1:
            raise FaultSyntaxError(f"expected one fault, got {len(read)} in {fault!r}; plant them one by one.")
        fault = read[0]
    if changes:
        unknown = sorted(set(changes) - set(CONDITIONS) - {"value"})
        if unknown:
            raise FaultSyntaxError(f"no such condition: {', '.join(unknown)}. Conditions: {', '.join(CONDITIONS)}.")
        fault = replace(fault, **changes)
        fault = parse_one(str(fault))  # the overrides are checked like text
    planted = Planted(fault, _resolve(fault))
    _change(lambda others: [*others, planted])
    return planted


def active() -> list[Fault]:
    """The faults in force.

    >>> active()
    []
    """
    return [planted.fault for planted in _planted]


def clear() -> None:
    """Remove every fault."""
    _change(lambda planted: [])


def from_environment() -> None:
    """Plant what ``DITORCH_SOFT_FAULTS`` says; called when the device is loaded."""
    text = DITORCH.read("DITORCH_SOFT_FAULTS")
    try:
        for fault in parse(text):
            plant(fault)
    except ValueError as error:
        clear()
        raise FaultSyntaxError(f"DITORCH_SOFT_FAULTS: {error}") from None


def _change(edit: Callable[[list[Planted]], list[Planted]]) -> None:
    global _planted, _by_operator
    with _change_lock:
        planted = edit(_planted)
        by_operator: dict[str, list[Planted]] = {}
        for one in planted:
            for name in one.operators:
                by_operator.setdefault(name, []).append(one)
        _planted, _by_operator = planted, by_operator
        wanted = {name for name in by_operator if has_own_kernel(name)}
        for name in wanted - set(_overrides):
            _overrides[name] = Override(name, _before, _after)
        for name in set(_overrides) - wanted:
            _overrides.pop(name).remove()
        if planted:
            native().set_fault_hook(_before, _after, set(by_operator))
        else:
            native().set_fault_hook(None, None, set())


def _resolve(fault: Fault) -> frozenset[str]:
    """Full names of the operators that a fault means; an error if it can mean none."""
    pattern = fault.operator if "::" in fault.operator else f"aten::{fault.operator}"
    if fault.operator == "*":
        pattern = "*"
    everything = torch._C._dispatch_get_all_op_names()
    planned = native().planned_operators()

    def meant(name: str) -> bool:
        return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.partition(".")[0], pattern)

    named = [name for name in everything if meant(name)]
    named.sort()
    kernels = [
        name
        for name in named
        if name in planned or runs_by_fallback(name) or is_collective(name) or has_own_kernel(name)
    ]
    if not named:
        near = difflib.get_close_matches(
            fault.operator, sorted({name.partition("::")[2].partition(".")[0] for name in everything}), n=3
        )
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise FaultSyntaxError(f"there is no operator {fault.operator!r}.{hint}")
    if not kernels or (_is_plain(fault.operator) and all(_is_out_variant(name) for name in kernels)):
        raise FaultSyntaxError(
            f"{fault.operator!r} has no kernel of its own on soft: it is a view, an allocation, or made of other "
            "operators (linear is addmm and mm, matmul is mm and bmm). Name one of those."
        )
    suited = [name for name in kernels if _suits(fault.kind, name)]
    if not suited:
        raise FaultSyntaxError(f"{fault.kind} does not apply to {fault.operator!r}: {_unsuited_reason(fault.kind)}")
    for condition in ("shape", "arg"):
        _check_names(fault, condition, suited)
    return frozenset(suited)


def _check_names(fault: Fault, condition: str, operators: list[str]) -> None:
    """Refuse an expression with a name that no call of these operators has."""
    expression = getattr(fault, condition)
    if expression is None:
        return
    allowed = {"s", "n", "ndim", *(f"s{i}" for i in range(10))}
    if condition == "arg":
        allowed |= {argument.name for name in operators for argument in _schema(name).arguments}
    for name in sorted(expression.names - allowed):
        near = difflib.get_close_matches(name, allowed, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise FaultSyntaxError(
            f"{condition}={expression}: {fault.operator!r} has no {name!r}.{hint} Names: {', '.join(sorted(allowed))}."
        )


def _is_plain(operator: str) -> bool:
    return "." not in operator and not any(wildcard in operator for wildcard in "*?")


def _is_out_variant(name: str) -> bool:
    """Whether only an explicit ``out=`` reaches this operator: its other overloads are made of others."""
    return any(argument.is_out for argument in _schema(name).arguments)


def _suits(kind: str, name: str) -> bool:
    if kind == "accumulate":
        return name in ACCUMULATING or is_collective(name)
    if kind == "drop_write":
        return is_collective(name) or bool(_written(name))
    if kind == "swap":
        return len(_schema(name).returns) > 1
    if kind == "mask":
        return any(argument.name == "attn_mask" for argument in _schema(name).arguments)
    if kind in ("misread", "coarse"):
        return not is_collective(name)
    if kind == "truncate":
        return len(_schema(name).returns) > 0 and not _written(name) and not is_collective(name)
    return True


def _unsuited_reason(kind: str) -> str:
    if kind == "accumulate":
        return f"it can be emulated for {', '.join(sorted(name.removeprefix('aten::') for name in ACCUMULATING))}."
    if kind == "drop_write":
        return "it writes no argument; name an in-place (add_) or out= (add.out) variant."
    if kind == "mask":
        return "it has no attn_mask; name _scaled_dot_product_flash_attention_for_cpu, which attention runs on soft."
    if kind in ("misread", "coarse"):
        return "a collective sends dense tensors alone."
    if kind == "truncate":
        return "its results are written into its arguments."
    return "it returns fewer than two tensors."


# --- around a call -----------------------------------------------------------------------

_schemas: dict[str, Any] = {}


def _schema(name: str) -> Any:
    schema = _schemas.get(name)
    if schema is None:
        base, _, overload = name.partition(".")
        schema = _schemas[name] = torch._C._get_schema(base, overload)
    return schema


_WRITTEN_AS_WELL = {"aten::native_batch_norm": [3, 4]}
"""Arguments that are written though the schema does not say so: the running statistics."""


def _written(name: str) -> list[int]:
    return _WRITTEN_AS_WELL.get(name) or [
        index
        for index, argument in enumerate(_schema(name).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(_tensors(value))
    return found


def _before(base: str, overload: str, device: int, args: Sequence[Any]) -> list[Strike] | None:
    name = f"{base}.{overload}" if overload else base
    strikes = []
    for planted in _by_operator.get(name, ()):
        inputs = _tensors(args)
        if not _applies(planted.fault, device, inputs, name, args):
            continue
        number = planted.strikes()
        if number is not None:
            strikes.append(_strike(planted, number, name, args))
    return strikes or None


def _applies(fault: Fault, device: int, inputs: list[torch.Tensor], name: str, args: Sequence[Any]) -> bool:
    if fault.kind == "no_float64" and not any(t.dtype in (torch.float64, torch.complex128) for t in inputs):
        return False
    if fault.kind == "misread" and all(t.is_contiguous() for t in inputs):
        return False
    if fault.device is not None and fault.device != device:
        return False
    if fault.dtype is not None and not any(t.dtype == fault.dtype for t in inputs):
        return False
    if fault.phase is not None and fault.phase != _phase():
        return False
    if fault.layout is not None and not _LAYOUT[fault.layout](inputs):
        return False
    if fault.empty and all(t.numel() for t in inputs):
        return False
    if fault.min_numel is not None and all(t.numel() < fault.min_numel for t in inputs):
        return False
    if fault.shape is not None and not fault.shape.holds(_sizes(inputs)):
        return False
    return fault.arg is None or fault.arg.holds(_arguments(name, args) | _sizes(inputs))


def _phase() -> str:
    return "forward" if torch._C._current_graph_task_id() == -1 else "backward"


_LAYOUT: dict[str, Callable[[list[torch.Tensor]], bool]] = {
    "contiguous": lambda tensors: all(t.is_contiguous() for t in tensors),
    "noncontiguous": lambda tensors: not all(t.is_contiguous() for t in tensors),
    "expanded": lambda tensors: any(n > 1 and not step for t in tensors for n, step in zip(t.shape, t.stride())),
    "channels_last": lambda tensors: any(_is_channels_last(t) for t in tensors),
    "offset": lambda tensors: any(t.storage_offset() for t in tensors),
    "transposed": lambda tensors: any(t.dim() > 1 and not t.is_contiguous() and t.mT.is_contiguous() for t in tensors),
}


def _is_channels_last(tensor: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return (
        tensor.dim() in formats
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=formats[tensor.dim()])
    )


def _sizes(inputs: list[torch.Tensor]) -> dict[str, Any]:
    """What ``shape=`` may speak of: ``s``, ``n`` and ``ndim`` of the first tensor, ``s0``, ``s1``, ... of each."""
    names: dict[str, Any] = {f"s{i}": list(tensor.shape) for i, tensor in enumerate(inputs)}
    if inputs:
        names |= {"s": names["s0"], "n": inputs[0].numel(), "ndim": inputs[0].dim()}
    return names


def _arguments(name: str, args: Sequence[Any]) -> dict[str, Any]:
    """The arguments by name; a tensor stands for its sizes."""
    return {argument.name: _plain(value) for argument, value in zip(_schema(name).arguments, args)}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return list(value.shape)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value).removeprefix("torch.")
    return value


def _strike(planted: Planted, number: int, name: str, args: Sequence[Any]) -> Strike:
    fault = planted.fault
    if fault.kind == "missing":
        raise NotImplementedError(
            f"Could not run '{name}' with arguments from the 'soft' backend. This operator is not available for this "
            "backend: a fault was planted here on purpose."
        )
    if fault.kind == "no_float64":
        raise TypeError(f"'{name}' on soft does not support float64 (a fault was planted here on purpose)")
    if fault.kind == "abort":
        os.abort()
    if fault.kind == "hang":
        sleep(fault.value.seconds)
    mixed = zlib.crc32(f"{fault.seed} {name} {number}".encode())
    strike = Strike(
        fault,
        torch.Generator().manual_seed(mixed),
        time.perf_counter(),
        _tensors(args[:1] if is_collective(name) else [args[index] for index in _written(name)]),
        _tensors(args),
        planted.earlier,
    )
    effects.prepare(strike, name, _schema(name), args)
    return strike


def _after(strikes: list[Strike], outputs: Sequence[Any]) -> None:
    for strike in strikes:
        results = _tensors(outputs)
        known = {id(tensor) for tensor in results}
        results += [tensor for tensor in strike.written if id(tensor) not in known]
        with torch.no_grad():
            effects.EFFECTS[strike.fault.kind](strike, results)
