"""A dispatch mode that does every rounding of a correct kernel at random (see `rounding.py`), and the random signs."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

from ..call import facts as op_facts
from ..call import optimizers
from ..call.description import Tensor, map_tensors, tensors_in
from ..call.facts import Facts, Kind
from ..compat import DispatchMode, conj_view, neg_view
from . import opaque_kernels
from .opaque_kernels import mutated, redispatched
from .rounding import MAX_LOW_TERMS, SINGLE, Precision, precision_of, roundings

PROBES: Final = 16  # a power of two
# Columns of the matrix of turns. In column 0 all roundings go the same way: it comes last, since the first few probes
# are often the only ones.
_ORDER: Final = (15, 5, 10, 3, 12, 6, 9, 1, 2, 4, 8, 7, 11, 13, 14, 0)
_LARGEST_POOL: Final = 1 << 23
_PROBE_STEP: Final = 7919
_SIZE_STEP: Final = 104729
_ONE: Final = torch.ones((), dtype=torch.float64)
_LANES_OF_SCANS: Final = 32  # few enough for a loop without any
_LONGEST_LOOP: Final = 4096  # steps of the longest loop that is not done in parallel
_NEARBY: Final = 2.0**-12
_LARGEST_SINGLE: Final = torch.finfo(torch.float32).max
_ATTENTION: Final = ("safe_softmax", "scaled_dot_product_flash_attention_for_cpu")
_OTHER_KERNELS_FACTOR: Final = 3  # may round more often than the CPU's, in another order, with coarser functions
_ROUNDINGS_OF_QUOTIENTS: Final = 4  # before they are made whole: of the divisor, of a difference, of the quotient
_REMAINDERS: Final = ("fmod", "remainder")
_TIE: Final = 1e-13  # breaks ties, invisible beside any rounding
_WIDE: Final = (torch.float64, torch.complex128, torch.float32, torch.complex64)


class _Pool:
    """Random signs, drawn once: each use takes a stretch of them that begins elsewhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._signs = self._draw(1 << 16)

    def signs(self, numel: int, start: int) -> Tensor:
        signs = self._signs
        length = signs.numel()
        if numel > length // 2 and length < _LARGEST_POOL:
            with self._lock:
                wanted = min(_LARGEST_POOL, 1 << (2 * numel - 1).bit_length())
                if self._signs.numel() < wanted:
                    self._signs = self._draw(wanted)
                signs = self._signs
            length = signs.numel()
        if numel > length:
            return signs[: length - 1].repeat(1 + numel // (length - 1))[:numel]  # of odd length: no pattern
        return signs.narrow(0, start % (length - numel + 1), numel)

    @staticmethod
    def _draw(length: int) -> Tensor:
        drawn = torch.empty(length, dtype=torch.int8).random_(0, 2, generator=torch.Generator().manual_seed(2))
        return drawn.to(torch.float64).mul_(2).sub_(1)


_POOL: Final = _Pool()


class Signs:
    """Which way each rounding of one probe goes.

    Every place has its own random sign, drawn anew for each probe; every rounding turns all of them by its row of a
    Hadamard matrix. So terms of a sum go their ways independently, while over all probes the mixed terms of
    different roundings at one place cancel exactly: their mean square is the sum of the squares, without luck.
    """

    def __init__(self, probe: int = 0) -> None:
        self._probe, self._drawn = _ORDER[probe], 0
        self._factors: dict[tuple[int, float], Tensor] = {}  # most roundings of a probe are equal in size

    def next(self, numel: int) -> tuple[Tensor, float]:
        """Signs in float64 for so many places, and the turn of one more rounding."""
        self._drawn += 1
        return _POOL.signs(numel, _PROBE_STEP * self._probe + _SIZE_STEP * numel), self._turn(self._probe)

    def factors(self, numel: int, by: float) -> Tensor:
        """One plus or minus `by`, for one more rounding; not to be written to."""
        signs, turn = self.next(numel)
        key = numel, by * turn
        if key not in self._factors:
            self._factors[key] = torch.add(_ONE, signs, alpha=by * turn)
        return self._factors[key]

    def like(self, tensor: Tensor, size: float) -> Tensor:
        """Plus or minus `size` in float64 for each element of one more rounding."""
        signs, turn = self.next(tensor.numel())
        return signs.view(tensor.shape).mul(size * turn)

    def uniform(self, tensor: Tensor) -> Tensor:
        """Numbers in [0, 1) that differ from probe to probe."""
        self._drawn += 1
        generator = torch.Generator().manual_seed(self._drawn * PROBES + self._probe)
        return torch.rand(tensor.shape, generator=generator, dtype=torch.float64)

    def _turn(self, probe: int) -> float:
        row = 1 + self._drawn % (PROBES - 1)  # the first row would turn nothing
        return 1.0 - 2.0 * ((probe & row).bit_count() % 2)


class AllSigns(Signs):
    """All probes at once, for a call on `PROBES` copies of its elements, one after the other."""

    def factors(self, numel: int, by: float) -> Tensor:
        """Those of single numbers alone are reused."""
        return super().factors(numel, by) if numel % PROBES else torch.add(_ONE, self.next(numel)[0], alpha=by)

    def next(self, numel: int) -> tuple[Tensor, float]:
        """Signs for all copies; single numbers go one way."""
        signs, turn = super().next(numel)
        if numel % PROBES:
            return signs, turn
        turns = torch.tensor([self._turn(probe) for probe in range(PROBES)], dtype=torch.float64)
        return (signs.view(PROBES, -1) * turns[:, None]).view(-1), 1.0


class Noise(DispatchMode):
    """Does every rounding of a correct kernel at random; the same probe gives the same roundings."""

    def __init__(
        self,
        precision: Precision,
        last: frozenset[tuple[int, int]],
        signs: Signs,
        inside: float | None = None,
        opaque: Mapping[Any, bool] | None = None,
    ) -> None:
        super().__init__()
        self._precision, self._last, self._signs = precision, last, signs
        self._opaque = opaque or {}
        self._inside = inside  # of one kernel: its unit; nothing is stored
        self.breaks_ties = True
        self._adds_rows_low = False
        self._operator = -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._opaque:
            self._operator += 1
            return self._opaque_kernel(func, args, kwargs)
        if op_facts.is_composition(func):
            return redispatched(self, func, args, kwargs)
        self._operator += 1
        facts = op_facts.facts_for(func, args)
        if facts.kind == Kind.VIEW or any(t.layout != torch.strided for t in tensors_in(args)):
            return func(*args, **kwargs)
        if facts.kind == Kind.EXACT:
            args = tuple(map(self._scalar, args))
            return func(*args, **kwargs)
        if not func._schema.is_mutable:
            args = _resolved(args)
        if facts.kind == Kind.SELECT:
            if self.breaks_ties:
                args = self._changed_inputs(func, args, self._without_ties)
            return func(*args, **kwargs)
        steps = optimizers.steps_of(op_facts.base_name(func))
        if steps is not None:
            return self._optimized(func, steps, args, kwargs)
        return self._rounded(func, facts, args, kwargs)

    def _optimized(self, func: Any, steps: Callable[..., list[optimizers.Update]], args: Any, kwargs: Any) -> None:
        """A fused optimizer: in float32 inside, unless it stores wider numbers, or this device's does it otherwise."""
        inside = self._unit_inside(func, kwargs)
        precision = precision_of(torch.float32) if inside == SINGLE else self._precision
        number = self._narrowed if inside == SINGLE else float
        with Noise(precision, frozenset(), self._signs, optimizers.UNITS * inside):
            updates = steps(*args, **kwargs, number=number)
        for parameter, value, update in updates:
            parameter.copy_(value - update)

    def _narrowed(self, value: float) -> float:
        """A number as a kernel may take it: in half of the probes in float32."""
        # not in PyTorch, where it would be moved as well
        return float(np.float32(value)) if self._signs.next(1)[1] > 0 else value

    def _rounded(self, func: Any, facts: Facts, args: Any, kwargs: Any) -> Any:
        unit_in, unit_out = self._units(func, facts, args, kwargs)
        change = self._shifted if facts.kind in (Kind.MATRIX, Kind.RESAMPLE) else self._scaled
        if facts.kind == Kind.RESAMPLE and "grid" in op_facts.base_name(func):
            change = self._jittered
        if op_facts.jumps(func):  # one of both moves in every probe: a quotient gets to either side of a whole number
            moved = self._changed_inputs(func, args, self._only_the_first(unit_in))
        else:
            moved = self._changed_inputs(func, args, lambda t: change(t, unit_in))
        try:
            result = func(*moved, **kwargs)
            args = moved
        except (RuntimeError, ValueError, IndexError):  # a probability just above one
            result = func(*args, **kwargs)
        self._round_inside(func, args, kwargs, result)
        if op_facts.base_name(func) in _ATTENTION:
            _forget_masked_rows(func, args, kwargs, result)
        seen: set[int] = set()
        for position, tensor in enumerate((*tensors_in(result), *mutated(func, args, kwargs))):
            if id(tensor) in seen or not _inexact(tensor):
                continue
            seen.add(id(tensor))
            self._round_in_place(tensor, unit_out, facts.kind, (self._operator, position) in self._last)
        return result

    def _opaque_kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A kernel that shows none of its steps: how its data move it, and what it rounds by itself in float32.

        Where it has no float32, the data are moved as far as a loop over their longest dimension may move them.
        """
        precision = self._precision
        length = op_facts.length_of_sums(func, args, kwargs)
        errors, walk = None, float(min(length, _LONGEST_LOOP))
        if self._opaque[func] and precision.inner == SINGLE:
            # data nearby: the roundings inside are others then, of the same size
            errors = opaque_kernels.errors_in_single_precision(func, *self._all_moved(args, kwargs, self._nearby))
            walk = roundings(Kind.REDUCE, length) if errors is not None else walk
        by = precision.inner * math.sqrt(walk)

        def change(tensor: Tensor) -> Tensor:
            # what a kernel multiplies with low numbers is low as well: attention rounds its weights
            low = precision.stored > precision.inner and _is_low(tensor, precision.dtype)
            return self._scaled(tensor, precision.stored / 2 if low else by)

        moved, named = self._all_moved(args, kwargs, change)
        result = func(*moved, **named)
        written = mutated(func, moved, named)
        for position, tensor in enumerate((*tensors_in(result), *written)):
            if not _inexact(tensor):
                continue
            if errors is not None:
                tensor.add_(errors[position], alpha=_OTHER_KERNELS_FACTOR)
            self._round_in_place(tensor, by, Kind.REDUCE, (self._operator, position) in self._last)
        for target, source in zip(mutated(func, args, kwargs), written):
            target.copy_(source)
        return result

    def _all_moved(self, args: Any, kwargs: Any, change: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
        """Copies of all arguments, also of those that are written to."""
        numbered = tuple(map(self._scalar, args)), {k: self._scalar(v) for k, v in kwargs.items()}
        copied: tuple[Any, Any] = map_tensors(numbered, lambda t: change(t) if _inexact(t) else t.clone())
        return copied

    def _round_inside(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """A fused kernel rounds at each of its steps: do them one by one, and take what comes out."""
        steps = op_facts.decomposition(func)
        if steps is None or (self._inside is not None and op_facts.base_name(func) != "sigmoid"):
            return
        copies = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)  # running statistics are written to
        try:
            inside = Noise(self._precision, frozenset(), self._signs, self._unit_inside(func, kwargs))
            inside._adds_rows_low = op_facts.adds_rows_low(func, self._precision.device)
            with inside:
                rounded = list(tensors_in(steps(*copies, **kwargs)))
        except Exception:  # a decomposition that does not know these arguments
            return
        whole = list(tensors_in(result))
        if len(whole) == len(rounded):
            for target, source in zip(whole, rounded):
                if _inexact(target) and target.shape == source.shape:
                    target.copy_(source)

    def _unit_inside(self, func: Any, kwargs: Any) -> float:
        if self._inside is not None:
            return self._inside
        low = op_facts.computes_low(func, self._precision.device, kwargs)
        return self._precision.stored if low else self._precision.inner

    def _units(self, func: Any, facts: Facts, args: Any, kwargs: Any) -> tuple[float, float]:
        """Units of rounding to apply to the inputs (the terms of a sum) and to the result."""
        inner, stored = self._unit_inside(func, kwargs), self._precision.stored
        if facts.kind == Kind.POINTWISE:
            unit = inner * facts.accuracy
            if op_facts.jumps(func):  # a remainder is taken in float32, a quotient is stored and then cut off
                return _ROUNDINGS_OF_QUOTIENTS * (unit if op_facts.base_name(func) in _REMAINDERS else stored), unit
            return (0.0, unit / 2) if op_facts.rounds_once(func, kwargs) else (unit, unit)
        length = op_facts.length_of_sums(func, args, kwargs)
        grown = self._precision.inner * math.sqrt(roundings(facts.kind, length, straight=self._inside is not None))
        grown = max(grown, inner) * facts.accuracy
        if self._inside is not None:
            if self._adds_rows_low and op_facts.base_name(func) == "sum" and not (len(args) > 2 and args[2]):
                grown = stored * math.sqrt(length)
            return grown, grown
        if facts.kind == Kind.SCATTER:
            hits = min(length, MAX_LOW_TERMS) if stored > self._precision.inner else length
            grown = (stored * math.sqrt(hits) if length > 1 else inner) * facts.accuracy
        elif facts.kind == Kind.SCAN:  # trees of stored sums, or one wide sum, maybe in a loop
            walk = self._precision.inner * math.sqrt(roundings(facts.kind, length, lanes=_LANES_OF_SCANS))
            grown = max(grown, walk * facts.accuracy, stored * math.sqrt(1 + math.log2(length)))
        elif facts.kind == Kind.RESAMPLE:  # coordinates, and weights in each direction
            grown = 4 * inner * length
        elif facts.kind == Kind.CONTRACT:
            low = inner == stored > self._precision.inner
            return max(grown, stored) * (op_facts.steps_in_low(func, args) if low else 1), grown
        return grown, grown

    def _changed_inputs(self, func: Any, args: Any, change: Any) -> tuple[Any, ...]:
        changed = []
        for value, argument in zip(args, func._schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            written = written or argument.name in ("running_mean", "running_var")
            if written:
                # read before it is written: in-place operators round their input, too
                for tensor in filter(_inexact, tensors_in(value) if argument.name == "self" else ()):
                    moved = change(tensor)
                    if moved is not tensor:
                        tensor.copy_(moved)
                changed.append(value)
            elif isinstance(value, Tensor):
                if value.dim() == 0 and value.dtype == torch.float64 and not self._inside:
                    value = torch.full_like(value, self._scalar(value.item()))  # a Python number, maybe
                changed.append(change(value) if _inexact(value) else value)
            elif isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
                changed.append([change(v) if isinstance(v, Tensor) and _inexact(v) else v for v in value])
            else:
                changed.append(self._scalar(value))
        return tuple(changed)

    def _scalar(self, value: Any) -> Any:
        """Kernels take numbers in the dtype of the tensor beside them, or in a wider one; all else stays."""
        if type(value) is not float or not math.isfinite(value) or abs(value) > self._precision.largest:
            return value
        inner = self._inside is not None and self._inside < self._precision.stored
        return torch.tensor(value, dtype=torch.float32 if inner else self._precision.dtype).real.item()

    def _only_the_first(self, by: float) -> Callable[[Tensor], Tensor]:
        units = iter((by,))
        return lambda tensor: self._scaled(tensor, next(units, 0.0))

    def _scaled(self, tensor: Tensor, by: float) -> Tensor:
        return tensor * self._factors(tensor, by) if by else tensor

    def _nearby(self, tensor: Tensor) -> Tensor:
        return tensor * self._signs.uniform(tensor).mul_(2 * _NEARBY).add_(1 - _NEARBY).to(tensor.real.dtype)

    def _factors(self, tensor: Tensor, by: float) -> Tensor:
        factors = self._signs.factors(tensor.numel(), by).view(tensor.shape)
        if tensor.is_complex():  # products mix both parts: each moves by a share of the whole number
            return torch.complex(factors, self._signs.like(tensor, by)).to(tensor.dtype)
        return factors.to(tensor.dtype)

    def _shifted(self, tensor: Tensor, by: float) -> Tensor:
        if by == 0 or tensor.numel() == 0:
            return tensor
        size = tensor.abs()
        size = torch.where(size.isfinite(), size, 0.0)
        size = size.amax((-2, -1), keepdim=True) if size.dim() >= 2 else size.amax()
        return tensor + self._signs.like(tensor, by) * size

    def _jittered(self, tensor: Tensor, by: float) -> Tensor:
        """Shifted by up to this much, and by much less: coordinates fall on either side of what is near."""
        shifted = self._shifted(tensor, by)
        return tensor + (shifted - tensor) * self._signs.uniform(tensor).square_().to(tensor.real.dtype)

    def _without_ties(self, tensor: Tensor) -> Tensor:
        largest = tensor.abs().nan_to_num(posinf=0.0).max() if tensor.numel() else 0.0
        return tensor + self._signs.uniform(tensor).to(tensor.real.dtype) * (_TIE * max(float(largest), 1e-30))

    def _round_in_place(self, tensor: Tensor, by: float, kind: str, last: bool) -> None:
        precision = self._precision
        tensor = conj_view(tensor) if tensor.is_conj() else tensor  # what is in memory
        tensor = neg_view(tensor) if tensor.is_neg() else tensor
        if kind in (Kind.MATRIX, Kind.FACTORY, Kind.RESAMPLE):
            tensor.copy_(self._shifted(tensor, by))
        elif by:
            tensor.mul_(self._factors(tensor, by))
        if last or tensor.dtype not in _WIDE:
            return
        largest = precision.largest
        if self._inside is None:
            tensor.mul_(self._factors(tensor, precision.stored))
            if precision.dtype != torch.float64 and not tensor.is_complex():
                self._round_subnormals(tensor, precision)
        elif self._inside < precision.stored:  # in float32, which is wider
            largest = max(largest, _LARGEST_SINGLE)
        if tensor.is_complex() or precision.dtype == torch.float64 or not tensor.numel():
            return
        if not float(tensor.abs().max()) <= largest:  # or a NaN
            tensor.masked_fill_(tensor > largest, math.inf)
            tensor.masked_fill_(tensor < -largest, -math.inf)

    def _round_subnormals(self, tensor: Tensor, precision: Precision) -> None:
        """Numbers below the normal ones are rounded to the same distance, whatever their size."""
        tiny = tensor != 0
        if precision.dtype != torch.float16:  # the others reach further down
            tiny &= tensor.abs() < torch.finfo(precision.dtype).smallest_normal
            if not bool(tiny.any()):
                return
        tensor.add_(self._signs.like(tensor, precision.smallest / 2).mul_(tiny))


def _forget_masked_rows(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Where a row attends to nothing at all no value is defined: zero, NaN, or the mean of all values."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
    mask = named.get("attn_mask", named.get("self"))
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        return
    rows = (mask == -math.inf).all(-1, keepdim=True)
    if bool(rows.any()):
        attended, *sums = tensors_in(result)  # (..., rows, features), and a number for each row
        attended.masked_fill_(rows, math.nan)
        for tensor in sums:
            tensor.masked_fill_(rows.squeeze(-1), math.nan)


def _resolved(args: Any) -> Any:
    """Without the bits for conjugate and negative numbers: arithmetic inside a dispatch mode does not look at them."""
    if not any(t.is_conj() or t.is_neg() for t in tensors_in(args)):
        return args
    return map_tensors(args, lambda t: t.resolve_conj().resolve_neg())


def _is_low(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether all values are numbers of a low dtype, as are those that came in it."""
    return not tensor.is_complex() and torch.equal(tensor, tensor.to(dtype).to(tensor.dtype))


def _inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
