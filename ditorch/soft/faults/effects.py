"""What a fault does to a call: some harm is prepared before it, most is done to its results."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..low_precision import ACCUMULATING, accumulate_in
from .grammar import Fault, Mask, Region, Slowdown

__all__ = ["EFFECTS", "Strike", "prepare", "sleep"]

MAX_EARLIER = 64
"""Kinds of results that a fault remembers, for those that come back stale."""


@dataclass
class Strike:
    """A fault that hits one call, between its start and its end."""

    fault: Fault
    generator: torch.Generator
    started: float
    written: list[torch.Tensor]
    inputs: list[torch.Tensor]
    earlier: dict[Any, torch.Tensor]  # of the fault: results of earlier calls, by place, shape and dtype
    saved: list[torch.Tensor] = field(default_factory=list)  # what the call will write to, as it was
    replacements: list[torch.Tensor] = field(default_factory=list)  # wrong results, ready


def sleep(seconds: float) -> None:
    """Sleep in short pieces, so that Ctrl-C is heard."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.05))


# --- before the call ----------------------------------------------------------------


def prepare(strike: Strike, name: str, schema: Any, args: Sequence[Any]) -> None:
    """Do what must be done while the arguments are still what they were."""
    kind = strike.fault.kind
    with torch.no_grad():
        if kind == "drop_write":
            strike.saved = [tensor.clone() for tensor in strike.written]
        elif kind == "accumulate" and name in ACCUMULATING:
            strike.replacements = [accumulate_in(name, args, strike.fault.value)]
        elif kind == "misread":
            strike.replacements = _again(name, schema, [_misread(value) for value in args])
        elif kind == "coarse":
            strike.replacements = _again(name, schema, [_coarse(value, strike.fault.value) for value in args])
        elif kind == "mask":
            changed = _masked(strike.fault.value, schema, args)
            strike.replacements = [] if changed is None else _again(name, schema, changed)


def _again(name: str, schema: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    """The results of the operator on other arguments, on the CPU."""
    base, _, overload = name.partition(".")
    space, _, function = base.partition("::")
    call = getattr(getattr(getattr(torch.ops, space), function), overload or "default")
    declared = schema.arguments
    given = [value for value, argument in zip(args, declared) if not argument.kwarg_only]
    named = {argument.name: value for value, argument in zip(args, declared) if argument.kwarg_only}
    found = call(*given, **named)
    return [value for value in (found if isinstance(found, (list, tuple)) else [found]) if torch.is_tensor(value)]


def _misread(value: Any) -> Any:
    """A tensor as it looks to a kernel that takes its memory for contiguous; a copy, also where nothing changes."""
    if isinstance(value, (list, tuple)):
        return [_misread(item) for item in value]
    if not isinstance(value, torch.Tensor) or value.dtype.is_complex:
        return value
    if value.is_contiguous() or value.numel() == 0:
        return value.clone()
    memory = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    memory = memory[value.storage_offset() :][: value.numel()]
    dense = torch.zeros(value.numel(), dtype=value.dtype)
    dense[: memory.numel()] = memory
    return dense.view(value.shape)


def _coarse(value: Any, dtype: torch.dtype) -> Any:
    """A copy of a tensor that lost digits, if it had more of them."""
    if isinstance(value, (list, tuple)):
        return [_coarse(item, dtype) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    wider = value.is_floating_point() and torch.finfo(value.dtype).eps < torch.finfo(dtype).eps
    return value.to(dtype).to(value.dtype) if wider else value.clone()


def _masked(mask: Mask, schema: Any, args: Sequence[Any]) -> list[Any] | None:
    """The arguments of attention with another mask; None if there is nothing to change."""
    values = {argument.name: value for argument, value in zip(schema.arguments, args)}
    query, key, given = values["query"], values["key"], values.get("attn_mask")
    causal = bool(values.get("is_causal"))
    if causal and mask.change == "leak":
        hidden = torch.full((query.shape[-2], key.shape[-2]), -math.inf, dtype=query.dtype)
        values |= {"is_causal": False, "attn_mask": hidden.triu(1 + int(mask.keys or 0))}
    elif given is None:
        return None
    else:
        values["attn_mask"] = _changed(mask, given, values.get("scale") or 1 / math.sqrt(query.shape[-1]))
    return [values[argument.name] for argument in schema.arguments]


def _changed(mask: Mask, given: torch.Tensor, scale: float) -> torch.Tensor:
    hidden = ~given if given.dtype == torch.bool else given <= torch.finfo(given.dtype).min / 2
    if mask.change == "scaled":
        return given if given.dtype == torch.bool else given * scale
    if mask.change == "invert":
        shown = hidden
    else:
        shown = ~hidden | (hidden.cumsum(-1) <= int(mask.keys or 0))
    if given.dtype == torch.bool:
        return shown
    if mask.change == "invert":
        return torch.zeros_like(given).masked_fill(~shown, -math.inf)
    return given.masked_fill(hidden & shown, 0.0)


# --- after the call -----------------------------------------------------------------


def _effect_noise(strike: Strike, results: list[torch.Tensor]) -> None:
    for tensor in _inexact(results):
        factor = torch.empty(tensor.shape, dtype=torch.float64).uniform_(-1, 1, generator=strike.generator)
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        tensor.copy_(tensor.to(wide) * (1 + strike.fault.value * factor))


def _effect_element(strike: Strike, results: list[torch.Tensor]) -> None:
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


def _effect_nan(strike: Strike, results: list[torch.Tensor]) -> None:
    _set_some(strike, results, float("nan"))


def _effect_inf(strike: Strike, results: list[torch.Tensor]) -> None:
    _set_some(strike, results, float("inf"))


def _effect_overflow(strike: Strike, results: list[torch.Tensor]) -> None:
    for tensor in _inexact(results):
        if not tensor.is_complex():
            wide = tensor.double()
            tensor.copy_(torch.where(wide.abs() > strike.fault.value, wide.sign() * float("inf"), wide))


def _effect_denormals(strike: Strike, results: list[torch.Tensor]) -> None:
    for tensor in _inexact(results):
        if not tensor.is_complex():
            tiny = torch.finfo(tensor.dtype).tiny
            wide = tensor.double()
            tensor.copy_(torch.where(wide.abs() < tiny, torch.zeros_like(wide), wide))


def _effect_swap(strike: Strike, results: list[torch.Tensor]) -> None:
    for index, first in enumerate(results):
        for second in results[index + 1 :]:
            if first.shape == second.shape and first.dtype == second.dtype:
                kept = first.clone()
                first.copy_(second)
                second.copy_(kept)
                return


def _effect_drop_write(strike: Strike, results: list[torch.Tensor]) -> None:
    for tensor, saved in zip(strike.written, strike.saved):
        if tensor.shape == saved.shape:
            tensor.copy_(saved)
        else:  # an out= that was resized: its memory is new, and never written
            tensor.zero_()


def _effect_accumulate(strike: Strike, results: list[torch.Tensor]) -> None:
    if strike.replacements:
        _effect_replace(strike, results)
    else:  # a collective: what travels is rounded
        for tensor in _inexact(results):
            tensor.copy_(tensor.to(strike.fault.value))


def _effect_replace(strike: Strike, results: list[torch.Tensor]) -> None:
    for tensor, wrong in zip(results, strike.replacements):
        if tensor.shape == wrong.shape:
            tensor.copy_(wrong)


def _effect_zero(strike: Strike, results: list[torch.Tensor]) -> None:
    for tensor in results:
        tensor.zero_()


def _effect_constant(strike: Strike, results: list[torch.Tensor]) -> None:
    for tensor in results:
        with contextlib.suppress(RuntimeError):  # a number that this dtype does not have
            tensor.fill_(strike.fault.value)


def _effect_scale(strike: Strike, results: list[torch.Tensor]) -> None:
    for tensor in _inexact(results):
        tensor.mul_(strike.fault.value)


def _effect_wrap(strike: Strike, results: list[torch.Tensor]) -> None:
    region: Region = strike.fault.value
    for tensor in results:
        lines, count = _lines(tensor, region.unit)
        if region.start < count:
            index = torch.arange(count) % region.start
            tensor.copy_(_unlined(lines[index], tensor, region.unit))


def _effect_tail(strike: Strike, results: list[torch.Tensor]) -> None:
    region: Region = strike.fault.value
    earlier = _exchange(strike, results) if region.content == "stale" else [None] * len(results)
    for tensor, before in zip(results, earlier):
        lines, count = _lines(tensor, region.unit)
        if region.start >= count:
            continue
        tail = lines[region.start :]
        if before is not None:
            tail.copy_(_lines(before, region.unit)[0][region.start :])
        elif region.content == "noise":
            tail.copy_(_noise(tail, strike.generator))
        else:
            tail.zero_()
        tensor.copy_(_unlined(lines, tensor, region.unit))


def _effect_drop_half(strike: Strike, results: list[torch.Tensor]) -> None:
    for tensor in results:
        if tensor.dim():
            blocks = torch.arange(tensor.shape[-1]) // 32
            tensor.masked_fill_(blocks % 2 == 1, 0)


def _effect_indices(strike: Strike, results: list[torch.Tensor]) -> None:
    for tensor in results:
        if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool) and tensor.numel() > 1:
            flat = tensor.reshape(-1)
            wrong = flat[torch.randperm(flat.numel(), generator=strike.generator)]
            tensor.copy_((flat.roll(1) if torch.equal(wrong, flat) else wrong).view(tensor.shape))


def _effect_truncate(strike: Strike, results: list[torch.Tensor]) -> None:
    for tensor in results:
        if tensor.dim() and tensor.shape[0] > 1:
            fewer = tensor[:-1].clone()
            tensor.set_(fewer.untyped_storage(), 0, fewer.shape, fewer.stride())


def _effect_garbage(strike: Strike, results: list[torch.Tensor]) -> None:
    own = {tensor.untyped_storage().data_ptr() for tensor in results}
    others = [t for t in strike.inputs if t.numel() and t.untyped_storage().data_ptr() not in own]
    for tensor in results:
        size = tensor.numel() * tensor.element_size()
        if others:
            found = others[0].contiguous().view(-1).view(torch.uint8)
            found = found.repeat(-(-size // found.numel()))[:size]
        else:
            found = torch.randint(256, (size,), dtype=torch.uint8, generator=strike.generator)
        if size:
            tensor.copy_((found % 2 if tensor.dtype == torch.bool else found).view(tensor.dtype).view(tensor.shape))


def _effect_stale(strike: Strike, results: list[torch.Tensor]) -> None:
    for tensor, before in zip(results, _exchange(strike, results)):
        if before is not None:
            tensor.copy_(before)


def _effect_slow(strike: Strike, results: list[torch.Tensor]) -> None:
    slow: Slowdown = strike.fault.value
    sleep((time.perf_counter() - strike.started) * (slow.factor - 1) + slow.seconds)


EFFECTS: dict[str, Callable[[Strike, list[torch.Tensor]], None]] = {
    "noise": _effect_noise,
    "element": _effect_element,
    "accumulate": _effect_accumulate,
    "denormals": _effect_denormals,
    "nan": _effect_nan,
    "inf": _effect_inf,
    "overflow": _effect_overflow,
    "zero": _effect_zero,
    "constant": _effect_constant,
    "scale": _effect_scale,
    "wrap": _effect_wrap,
    "tail": _effect_tail,
    "drop_half": _effect_drop_half,
    "misread": _effect_replace,
    "coarse": _effect_replace,
    "indices": _effect_indices,
    "truncate": _effect_truncate,
    "mask": _effect_replace,
    "garbage": _effect_garbage,
    "stale": _effect_stale,
    "swap": _effect_swap,
    "drop_write": _effect_drop_write,
    "slow": _effect_slow,
    "hang": lambda strike, results: None,
}


def _inexact(results: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in results if tensor.is_floating_point() or tensor.is_complex()]


def _set_some(strike: Strike, results: list[torch.Tensor], value: float) -> None:
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


def _lines(tensor: torch.Tensor, unit: str) -> tuple[torch.Tensor, int]:
    """A copy whose first dimension counts elements, rows or columns, and how many there are."""
    last = tensor.shape[-1] if tensor.dim() else 1
    dense = tensor.contiguous().clone()
    if unit == "elements" or not tensor.numel():
        lines = dense.view(-1)
    else:
        lines = dense.view(-1, last)
        lines = lines.t().contiguous() if unit == "columns" else lines
    return lines, lines.shape[0]


def _unlined(lines: torch.Tensor, like: torch.Tensor, unit: str) -> torch.Tensor:
    """Lines as the tensor that they were made of."""
    return (lines.t() if unit == "columns" and lines.dim() == 2 else lines).reshape(like.shape)


def _noise(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if like.is_floating_point() or like.is_complex():
        return torch.randn(like.shape, generator=generator).to(like.dtype)
    return torch.randint(2 if like.dtype == torch.bool else 100, like.shape, generator=generator).to(like.dtype)


def _exchange(strike: Strike, results: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The results of the last call with such results, None where there was none; these take their place."""
    found: list[torch.Tensor | None] = []
    for place, tensor in enumerate(results):
        key = (place, tuple(tensor.shape), tensor.dtype)
        found.append(strike.earlier.pop(key, None))
        strike.earlier[key] = tensor.clone()
        if len(strike.earlier) > MAX_EARLIER:
            del strike.earlier[next(iter(strike.earlier))]
    return found
