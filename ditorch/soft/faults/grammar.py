"""The text of a fault: what it may say, and how it is read."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from . import expressions
from .expressions import Expression

__all__ = ["CONDITIONS", "KINDS", "LAYOUTS", "Fault", "FaultSyntaxError", "Region", "Slowdown", "parse", "parse_one"]


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
    shape: Expression | None = None
    arg: Expression | None = None
    empty: bool | None = None

    def __str__(self) -> str:
        """The fault in the grammar that ``parse`` reads."""
        items = [self.kind if self.value is None else f"{self.kind}={_text(self.value)}"]
        for condition in fields(self)[3:]:
            value = getattr(self, condition.name)
            if condition.name == "empty":
                items += ["empty"] if value else []
            elif value is not None and not (condition.name == "seed" and value == 0):
                items.append(f"{condition.name}={_text(value)}")
        return f"{self.operator}: {', '.join(items)}"


@dataclass(frozen=True)
class Slowdown:
    """Take ``factor`` times as long, plus ``seconds``."""

    factor: float = 1.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Region:
    """The part of a result from number ``start`` on, and what a fault leaves there."""

    start: int
    content: str | None = None
    unit: str = "elements"

    def __str__(self) -> str:
        parts = [str(self.start), self.content or "", self.unit if self.unit != "elements" else ""]
        return ":".join(part for part in parts if part)


@dataclass(frozen=True)
class Mask:
    """What becomes of an attention mask: ``leak`` lets so many hidden keys through."""

    change: str
    keys: int | None = None

    def __str__(self) -> str:
        return self.change if self.keys is None else f"{self.change}:{self.keys}"


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
            raise ValueError(f"must be {', '.join(choices[:-1])} or {choices[-1]}")
        return text

    return read


def _number(text: str) -> float | int:
    try:
        value = int(text)
    except ValueError:
        return float(text)
    return value if -(2**63) <= value < 2**63 else float(text)  # a kernel takes no larger whole number


def _region(*contents: str) -> Callable[[str], Region]:
    units = ("elements", "rows", "columns")

    def read(text: str) -> Region:
        start, *rest = text.split(":")
        content = [word for word in rest if word in contents]
        unit = [word for word in rest if word in units]
        if len(content) > 1 or len(unit) > 1 or len(content) + len(unit) < len(rest):
            kinds = f"[:{'|'.join(contents)}]" if contents else ""
            raise ValueError(f"must be N{kinds}[:{'|'.join(units)}]")
        chosen = next(iter([*content, *contents]), None)
        return Region(_count(start), chosen, (unit or ["elements"])[0])

    return read


def _mask(text: str) -> Mask:
    change, given, keys = text.partition(":")
    if change not in ("leak", "invert", "scaled") or bool(given) != (change == "leak"):
        raise ValueError("must be leak:N, invert or scaled")
    return Mask(change, _count(keys) if given else None)


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
        Kind("zero", "every element of each result is zero", "zero"),
        Kind("constant", "every element of each result is this number", "constant=-1", _number),
        Kind("scale", "every result is multiplied by this number", "scale=1.02", _number),
        Kind("wrap", "indices from N on wrap: results there are those of index modulo N", "wrap=65536:rows", _region()),
        Kind(
            "tail",
            "results from N on are zero, stale (an earlier call's) or noise",
            "tail=1024:noise:columns",
            _region("zero", "stale", "noise"),
        ),
        Kind("drop_half", "every other block of 32 along the last dimension is zero", "drop_half"),
        Kind("misread", "arguments are read as if they were contiguous", "misread"),
        Kind("coarse", "wider floating-point arguments are rounded to this dtype first", "coarse=bfloat16", _half),
        Kind("indices", "whole-number results are permuted", "indices"),
        Kind("truncate", "each result has one row less", "truncate"),
        Kind("mask", "attention lets N hidden keys through, inverts its mask, or scales it", "mask=leak:1", _mask),
        Kind("garbage", "results are what lay in memory before", "garbage"),
        Kind("stale", "results are those of an earlier call", "stale"),
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

_LONGEST_NAME = 200
LAYOUTS = ("contiguous", "noncontiguous", "expanded", "channels_last", "offset", "transposed")

CONDITIONS: dict[str, Callable[[str], Any]] = {
    "dtype": _dtype,
    "phase": _one_of("forward", "backward"),
    "layout": _one_of(*LAYOUTS),
    "min_numel": _whole,
    "nth": _count,
    "every": _count,
    "device": _whole,
    "seed": _whole,
    "shape": expressions.read,
    "arg": expressions.read,
}


# --- the grammar -----------------------------------------------------------------


def parse(text: str) -> list[Fault]:
    """Read faults separated by ``;``.

    >>> [str(fault) for fault in parse("mm: noise=1e-2; *: no_float64")]
    ['mm: noise=0.01', '*: no_float64']
    """
    return [parse_one(entry.strip()) for entry in text.split(";") if entry.strip()]


def parse_one(entry: str) -> Fault:
    """Read one fault."""
    # The operator may itself contain "::", as in aten::add.
    match = re.fullmatch(r"((?:[\w.*?]+::)?[\w.*?]+)\s*:(?!:)\s*(.*)", entry, re.DOTALL)
    if not match:
        raise FaultSyntaxError(
            f"cannot read the fault {_short(entry)}. Write OPERATOR: KIND[=VALUE][, CONDITION=VALUE ...], "
            "for example 'addmm: noise=1e-2, dtype=bfloat16'."
        )
    operator, rest = match[1], match[2]
    if len(operator) > _LONGEST_NAME:
        raise FaultSyntaxError(
            f"{_short(entry)}: the operator's name goes on at position {_LONGEST_NAME + 1}; none is so long."
        )
    kind: str | None = None
    value: Any = None
    conditions: dict[str, Any] = {}
    for item in (part.strip() for part in rest.split(",")):
        name, given, text = (piece.strip() for piece in item.partition("="))
        if name in KINDS:
            if kind is not None:
                raise FaultSyntaxError(f"{_short(entry)} names two kinds, {kind} and {name}; write two faults.")
            kind, value = name, _read_value(entry, KINDS[name], text if given else None)
        elif item == "empty":
            conditions["empty"] = True
        elif name in CONDITIONS and given:
            if name in conditions:
                raise FaultSyntaxError(f"{_short(entry)} gives {name} twice.")
            conditions[name] = _read(entry, name, CONDITIONS[name], text)
        else:
            raise FaultSyntaxError(_unknown_item(entry, item, name))
    if kind is None:
        raise FaultSyntaxError(f"{_short(entry)} names no kind of fault. Kinds: {', '.join(KINDS)}.")
    return Fault(operator, kind, value, **conditions)


def _read_value(entry: str, kind: Kind, text: str | None) -> Any:
    if text is None:
        if kind.read is not None and kind.default is None:
            raise FaultSyntaxError(f"{_short(entry)}: {kind.name} needs a value, for example {kind.example}.")
        return kind.default
    if kind.read is None:
        raise FaultSyntaxError(f"{_short(entry)}: {kind.name} takes no value ({kind.meaning}).")
    return _read(entry, kind.name, kind.read, text)


def _read(entry: str, name: str, read: Callable[[str], Any], text: str) -> Any:
    try:
        return read(text)
    except ValueError as error:
        raise FaultSyntaxError(f"{_short(entry)}: {name}={_short(text)[1:-1]}: {error}") from None


def _unknown_item(entry: str, item: str, name: str) -> str:
    near = difflib.get_close_matches(name, [*KINDS, *CONDITIONS], n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return (
        f"{_short(entry)}: {_short(item)} is neither a kind nor a condition.{hint} "
        f"Kinds: {', '.join(KINDS)}. Conditions: {', '.join(f'{name}=' for name in CONDITIONS)}, empty."
    )


def _short(text: str) -> str:
    """The text in quotes, cut where it is too long for a message."""
    return repr(text if len(text) <= 200 else text[:180] + " ...")
