"""Faults on purpose: makes a chosen operator of the software accelerator wrong, slow or missing.

This is how one knows that a tool finds what it claims to find. A fault is one line of text,
the same in Python and in the environment variable ``DITORCH_SOFT_FAULTS``::

    OPERATOR: KIND[=VALUE][, CONDITION=VALUE ...]        several of them, separated by ";"

    addmm: noise=1e-2                          every result off by up to 1 %
    mm: accumulate=bfloat16, phase=backward    summed as if in bfloat16, in backward only
    add.Tensor: element=0.5, dtype=float16, nth=3
    *: no_float64

>>> from ditorch.soft import faults
>>> with faults.plant("mul.Tensor: nan") as fault:
...     (torch.ones(3, device="soft") * 2).isnan().sum().item()
1
>>> fault.hits
1

The same seed gives the same fault, call for call.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from ditorch_common.settings import DITORCH

from . import native
from .low_precision import ACCUMULATING, accumulate_in

__all__ = ["Fault", "FaultSyntaxError", "KINDS", "Planted", "active", "clear", "parse", "plant"]


class FaultSyntaxError(ValueError):
    """A fault that cannot be understood; the message shows it and what is allowed there."""


# --- what a fault is ----------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """One way of being wrong: how its value reads, and what it does around a call."""

    name: str
    meaning: str
    example: str
    read: Callable[[str], Any] | None = None
    default: Any = None  # None: a value must be given (unless ``read`` is None)


@dataclass(frozen=True)
class Fault:
    """An operator, a kind of fault, and the conditions under which it strikes."""

    operator: str
    kind: str
    value: Any = None
    dtype: torch.dtype | None = None
    phase: str | None = None
    layout: str | None = None
    min_numel: int | None = None
    nth: int | None = None
    every: int | None = None
    device: int | None = None
    seed: int = 0

    def __str__(self) -> str:
        """The fault in the grammar that ``parse`` reads."""
        items = [self.kind if self.value is None else f"{self.kind}={_text(self.value)}"]
        for condition in fields(self)[3:]:
            value = getattr(self, condition.name)
            if value is not None and not (condition.name == "seed" and value == 0):
                items.append(f"{condition.name}={_text(value)}")
        return f"{self.operator}: {', '.join(items)}"


@dataclass(frozen=True)
class Slowdown:
    """Take ``factor`` times as long, plus ``seconds``."""

    factor: float = 1.0
    seconds: float = 0.0


_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def _text(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Slowdown):
        return f"{value.factor:g}x" if value.factor != 1 else f"{value.seconds!r}s"
    return repr(value) if isinstance(value, float) else str(value)


def _dtype(text: str) -> torch.dtype:
    found = _DTYPES.get(text.removeprefix("torch."))
    if found is None:
        near = difflib.get_close_matches(text, _DTYPES, n=1)
        raise ValueError(f"no such dtype{f'; did you mean {near[0]}?' if near else ''}")
    return found


def _half(text: str) -> torch.dtype:
    dtype = _dtype(text)
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError("must be float16 or bfloat16")
    return dtype


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("must be a positive number")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("must be a whole number, 1 or more")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("must be a whole number, 0 or more")
    return int(text)


def _one_of(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be {' or '.join(choices)}")
        return text

    return read


def _slowdown(text: str) -> Slowdown:
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*(x|s|ms|us)", text)
    if not match:
        raise ValueError("must be a factor like 3x or a time like 20ms, 1.5s, 100us")
    number, unit = float(match[1]), match[2]
    if unit == "x":
        if number < 1:
            raise ValueError("a factor must be 1x or more")
        return Slowdown(factor=number)
    return Slowdown(seconds=number * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit])


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("noise", "every result is off by up to this relative error", "noise=1e-2", _positive),
        Kind(
            "element",
            "one element of each result is off by this relative error",
            "element=0.5",
            _positive,
            0.5,
        ),
        Kind("accumulate", "sums are rounded to this dtype after each term", "accumulate=bfloat16", _half),
        Kind("denormals", "results too small for a normal number become zero", "denormals"),
        Kind("nan", "so many elements of each result become NaN", "nan=1", _count, 1),
        Kind("inf", "so many elements of each result become infinite", "inf=1", _count, 1),
        Kind("overflow", "results beyond this magnitude become infinite", "overflow=65504", _positive, 65504.0),
        Kind("swap", "the first two results are exchanged", "swap"),
        Kind("drop_write", "an in-place or out= result is not written", "drop_write"),
        Kind("missing", "the kernel does not exist", "missing"),
        Kind("no_float64", "the kernel refuses float64 and complex128", "no_float64"),
        Kind("slow", "the kernel takes a factor or a time longer", "slow=3x", _slowdown),
        Kind(
            "hang",
            "the kernel never returns (or only after this time)",
            "hang",
            _slowdown,
            Slowdown(seconds=1e9),
        ),
        Kind("abort", "the kernel takes the process down", "abort"),
    )
}

_CONDITIONS: dict[str, Callable[[str], Any]] = {
    "dtype": _dtype,
    "phase": _one_of("forward", "backward"),
    "layout": _one_of("contiguous", "noncontiguous"),
    "min_numel": _whole,
    "nth": _count,
    "every": _count,
    "device": _whole,
    "seed": _whole,
}


# --- the grammar -----------------------------------------------------------------


def parse(text: str) -> list[Fault]:
    """Read faults separated by ``;``.

    >>> [str(fault) for fault in parse("mm: noise=1e-2; *: no_float64")]
    ['mm: noise=0.01', '*: no_float64']
    """
    return [_parse_one(entry.strip()) for entry in text.split(";") if entry.strip()]


def _parse_one(entry: str) -> Fault:
    # The operator may itself contain "::", as in aten::add.
    match = re.fullmatch(r"((?:[\w.*?]+::)?[\w.*?]+)\s*:(?!:)\s*(.*)", entry, re.DOTALL)
    if not match:
        raise FaultSyntaxError(
            f"cannot read the fault {entry!r}. Write OPERATOR: KIND[=VALUE][, CONDITION=VALUE ...], "
            "for example 'addmm: noise=1e-2, dtype=bfloat16'."
        )
    operator, rest = match[1], match[2]
    kind: str | None = None
    value: Any = None
    conditions: dict[str, Any] = {}
    for item in (part.strip() for part in rest.split(",")):
        name, given, text = (piece.strip() for piece in item.partition("="))
        if name in KINDS:
            if kind is not None:
                raise FaultSyntaxError(f"{entry!r} names two kinds, {kind} and {name}; write two faults.")
            kind, value = name, _read_value(entry, KINDS[name], text if given else None)
        elif name in _CONDITIONS and given:
            if name in conditions:
                raise FaultSyntaxError(f"{entry!r} gives {name} twice.")
            conditions[name] = _read(entry, name, _CONDITIONS[name], text)
        else:
            raise FaultSyntaxError(_unknown_item(entry, item, name))
    if kind is None:
        raise FaultSyntaxError(f"{entry!r} names no kind of fault. Kinds: {', '.join(KINDS)}.")
    return Fault(operator, kind, value, **conditions)


def _read_value(entry: str, kind: Kind, text: str | None) -> Any:
    if text is None:
        if kind.read is not None and kind.default is None:
            raise FaultSyntaxError(f"{entry!r}: {kind.name} needs a value, for example {kind.example}.")
        return kind.default
    if kind.read is None:
        raise FaultSyntaxError(f"{entry!r}: {kind.name} takes no value ({kind.meaning}).")
    return _read(entry, kind.name, kind.read, text)


def _read(entry: str, name: str, read: Callable[[str], Any], text: str) -> Any:
    try:
        return read(text)
    except ValueError as error:
        raise FaultSyntaxError(f"{entry!r}: {name}={text}: {error}") from None


def _unknown_item(entry: str, item: str, name: str) -> str:
    near = difflib.get_close_matches(name, [*KINDS, *_CONDITIONS], n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return (
        f"{entry!r}: {item!r} is neither a kind nor a condition.{hint} "
        f"Kinds: {', '.join(KINDS)}. Conditions: {', '.join(f'{name}=' for name in _CONDITIONS)}."
    )


# --- planting --------------------------------------------------------------------------


@dataclass
class Planted:
    """A fault that is in force until ``remove()``, or until its ``with`` block ends."""

    fault: Fault
    operators: frozenset[str]
    calls: int = 0  # calls that met the conditions
    hits: int = 0  # calls that the fault changed
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
        unknown = sorted(set(changes) - set(_CONDITIONS) - {"value"})
        if unknown:
            raise FaultSyntaxError(f"no such condition: {', '.join(unknown)}. Conditions: {', '.join(_CONDITIONS)}.")
        fault = replace(fault, **changes)
        fault = _parse_one(str(fault))  # the overrides are checked like text
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
    kernels = [name for name in named if name in planned or _runs_by_fallback(name)]
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
    return frozenset(suited)


def _is_plain(operator: str) -> bool:
    return "." not in operator and not any(wildcard in operator for wildcard in "*?")


def _is_out_variant(name: str) -> bool:
    """Whether only an explicit ``out=`` reaches this operator: its other overloads are made of others."""
    return any(argument.is_out for argument in _schema(name).arguments)


def _runs_by_fallback(name: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return not name.startswith("aten::") and has(name, "CPU") and not has(name, "PrivateUse1")


def _suits(kind: str, name: str) -> bool:
    if kind == "accumulate":
        return name in ACCUMULATING
    if kind == "drop_write":
        return bool(_written(name))
    if kind == "swap":
        return len(_schema(name).returns) > 1
    return True


def _unsuited_reason(kind: str) -> str:
    if kind == "accumulate":
        return f"it can be emulated for {', '.join(sorted(name.removeprefix('aten::') for name in ACCUMULATING))}."
    if kind == "drop_write":
        return "it writes no argument; name an in-place (add_) or out= (add.out) variant."
    return "it returns fewer than two tensors."


# --- around a call -----------------------------------------------------------------------

_schemas: dict[str, Any] = {}


def _schema(name: str) -> Any:
    schema = _schemas.get(name)
    if schema is None:
        base, _, overload = name.partition(".")
        schema = _schemas[name] = torch._C._get_schema(base, overload)
    return schema


def _written(name: str) -> list[int]:
    return [
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


@dataclass
class _Strike:
    """A fault that hits one call, between its start and its end."""

    fault: Fault
    generator: torch.Generator
    started: float
    written: list[torch.Tensor]
    saved: list[torch.Tensor]
    replacement: torch.Tensor | None


def _before(base: str, overload: str, device: int, args: Sequence[Any]) -> list[_Strike] | None:
    name = f"{base}.{overload}" if overload else base
    strikes = []
    for planted in _by_operator.get(name, ()):
        inputs = _tensors(args)
        if not _applies(planted.fault, device, inputs):
            continue
        number = planted.strikes()
        if number is not None:
            strikes.append(_strike(planted.fault, number, name, args, inputs))
    return strikes or None


def _applies(fault: Fault, device: int, inputs: list[torch.Tensor]) -> bool:
    if fault.kind == "no_float64" and not any(t.dtype in (torch.float64, torch.complex128) for t in inputs):
        return False
    if fault.device is not None and fault.device != device:
        return False
    if fault.dtype is not None and not any(t.dtype == fault.dtype for t in inputs):
        return False
    if fault.phase is not None and fault.phase != _phase():
        return False
    if fault.layout is not None and (fault.layout == "contiguous") != all(t.is_contiguous() for t in inputs):
        return False
    return fault.min_numel is None or any(t.numel() >= fault.min_numel for t in inputs)


def _phase() -> str:
    return "forward" if torch._C._current_graph_task_id() == -1 else "backward"


def _strike(fault: Fault, number: int, name: str, args: Sequence[Any], inputs: list[torch.Tensor]) -> _Strike:
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
        _sleep(fault.value.seconds)
    mixed = zlib.crc32(f"{fault.seed} {name} {number}".encode())
    written = _tensors(args[index] for index in _written(name))
    return _Strike(
        fault,
        torch.Generator().manual_seed(mixed),
        time.perf_counter(),
        written,
        [tensor.clone() for tensor in written] if fault.kind == "drop_write" else [],
        accumulate_in(name, args, fault.value) if fault.kind == "accumulate" else None,
    )


def _sleep(seconds: float) -> None:
    """Sleep in short pieces, so that Ctrl-C is heard."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.05))


def _after(strikes: list[_Strike], outputs: Sequence[Any]) -> None:
    for strike in strikes:
        results = _tensors(outputs)
        known = {id(tensor) for tensor in results}
        results += [tensor for tensor in strike.written if id(tensor) not in known]
        with torch.no_grad():
            _EFFECTS[strike.fault.kind](strike, results)


def _effect_noise(strike: _Strike, results: list[torch.Tensor]) -> None:
    for tensor in _inexact(results):
        factor = torch.empty(tensor.shape, dtype=torch.float64).uniform_(-1, 1, generator=strike.generator)
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        tensor.copy_(tensor.to(wide) * (1 + strike.fault.value * factor))


def _effect_element(strike: _Strike, results: list[torch.Tensor]) -> None:
    for tensor in results:
        for place in _places(tensor, 1, strike.generator):
            value = tensor[place]
            if tensor.dtype == torch.bool:
                tensor[place] = ~value
            elif not tensor.is_floating_point() and not tensor.is_complex():
                tensor[place] = value + 1
            else:
                size = value.abs() if value != 0 else tensor.abs().float().nan_to_num().max()
                tensor[place] = value + strike.fault.value * (size if size != 0 else 1.0)


def _effect_nan(strike: _Strike, results: list[torch.Tensor]) -> None:
    _set_some(strike, results, float("nan"))


def _effect_inf(strike: _Strike, results: list[torch.Tensor]) -> None:
    _set_some(strike, results, float("inf"))


def _effect_overflow(strike: _Strike, results: list[torch.Tensor]) -> None:
    for tensor in _inexact(results):
        if not tensor.is_complex():
            wide = tensor.double()
            tensor.copy_(torch.where(wide.abs() > strike.fault.value, wide.sign() * float("inf"), wide))


def _effect_denormals(strike: _Strike, results: list[torch.Tensor]) -> None:
    for tensor in _inexact(results):
        if not tensor.is_complex():
            tiny = torch.finfo(tensor.dtype).tiny
            wide = tensor.double()
            tensor.copy_(torch.where(wide.abs() < tiny, torch.zeros_like(wide), wide))


def _effect_swap(strike: _Strike, results: list[torch.Tensor]) -> None:
    for index, first in enumerate(results):
        for second in results[index + 1 :]:
            if first.shape == second.shape and first.dtype == second.dtype:
                kept = first.clone()
                first.copy_(second)
                second.copy_(kept)
                return


def _effect_drop_write(strike: _Strike, results: list[torch.Tensor]) -> None:
    for tensor, saved in zip(strike.written, strike.saved):
        if tensor.shape == saved.shape:
            tensor.copy_(saved)
        else:  # an out= that was resized: its memory is new, and never written
            tensor.zero_()


def _effect_accumulate(strike: _Strike, results: list[torch.Tensor]) -> None:
    if strike.replacement is not None and results:
        results[0].copy_(strike.replacement)


def _effect_slow(strike: _Strike, results: list[torch.Tensor]) -> None:
    slow: Slowdown = strike.fault.value
    _sleep((time.perf_counter() - strike.started) * (slow.factor - 1) + slow.seconds)


_EFFECTS: dict[str, Callable[[_Strike, list[torch.Tensor]], None]] = {
    "noise": _effect_noise,
    "element": _effect_element,
    "accumulate": _effect_accumulate,
    "denormals": _effect_denormals,
    "nan": _effect_nan,
    "inf": _effect_inf,
    "overflow": _effect_overflow,
    "swap": _effect_swap,
    "drop_write": _effect_drop_write,
    "slow": _effect_slow,
    "hang": lambda strike, results: None,
}


def _inexact(results: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in results if tensor.is_floating_point() or tensor.is_complex()]


def _set_some(strike: _Strike, results: list[torch.Tensor], value: float) -> None:
    for tensor in _inexact(results):
        for place in _places(tensor, strike.fault.value, strike.generator):
            with contextlib.suppress(RuntimeError):  # fp8 types without the value
                tensor[place] = value


def _places(tensor: torch.Tensor, count: int, generator: torch.Generator) -> list[tuple[int, ...]]:
    """Distinct positions in a tensor, drawn from the fault's own generator."""
    total = tensor.numel()
    if total == 0:
        return []
    drawn = (
        torch.randperm(total, generator=generator)[:count]
        if count > 1
        else torch.randint(total, (1,), generator=generator)
    )
    places = []
    for flat in drawn.tolist():
        place: list[int] = []
        for size in reversed(tensor.shape):
            flat, position = divmod(flat, size)
            place.append(position)
        places.append(tuple(reversed(place)))
    return places
