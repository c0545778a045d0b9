"""OpOverflowCheck: statistics of every tensor on the device, and the first operator that made a NaN or Inf."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, ClassVar, Final, NamedTuple

import torch

from .. import console
from ..devices import can_pin, event_class, quiet
from ..intercept import Call
from ..opcall import Described, Tensor, TensorMeta, labelled, tensors_in
from .base import Tool

_BATCH: Final = 256  # tensors measured between two transfers to the host
_MOST_BATCHES: Final = 4
_MOST_REPORTED: Final = 10


class _Measure:
    """Statistics of one version of one tensor; the numbers arrive with its batch."""

    __slots__ = ("numel", "values")

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.values: tuple[float, float, float, float] | None = None

    @property
    def bad(self) -> bool:
        values = self.values
        return values is not None and not (math.isfinite(values[0]) and math.isfinite(values[1]))

    def row(self) -> dict[str, Any]:
        if self.values is None:
            return {}
        low, high, mean, var = self.values
        n = self.numel
        spread = max(var, 0.0) if not math.isnan(var) else var
        return {
            "inf": math.isinf(low) or math.isinf(high),
            "nan": math.isnan(low) or math.isnan(high),
            "min": low,
            "max": high,
            "mean": mean,
            "std": math.sqrt(spread * n / (n - 1)) if n > 1 else 0.0,
            "norm": math.sqrt(n * (spread + mean * mean)),
        }


class _Entry(NamedTuple):
    call: Call
    phase: str
    arriving: tuple[tuple[int, _Measure], ...]
    leaving: tuple[tuple[int, _Measure], ...]


class _Flight(NamedTuple):
    """A batch on its way to the host."""

    values: Tensor
    event: Any
    measures: list[_Measure]
    entries: list[_Entry]


class OpOverflowCheck(Tool):
    """Find the operator that made the first NaN or Inf, forward or backward.

    >>> with op_tools.OpOverflowCheck() as check:  # doctest: +SKIP
    ...     train_step()
    >>> check.first()                              # doctest: +SKIP
    Finding(tool='OpOverflowCheck', op='torch.exp', kind='overflow', ...)
    """

    name = "OpOverflowCheck"
    prefix = "OP_OVERFLOW_CHECK"
    order = 35
    wants_backward = True
    columns: ClassVar[dict[str, str]] = {
        "call_id": "INTEGER",
        "site": "INTEGER",
        "phase": "TEXT",
        "role": "TEXT",
        "tensor": "INTEGER",
        "inf": "INTEGER",
        "nan": "INTEGER",
        "min": "REAL",
        "max": "REAL",
        "mean": "REAL",
        "std": "REAL",
        "norm": "REAL",
    }

    def prepare(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, _Measure]] = {}
        self._scalars: dict[torch.dtype, list[Tensor]] = {}
        self._measures: dict[torch.dtype, list[_Measure]] = {}
        self._entries: list[_Entry] = []
        self._flights: deque[_Flight] = deque()
        self._guard = threading.RLock()
        self._pending = 0
        self._made = 0
        self._passed_on = 0
        self._first: Any = None
        self.measured = 0
        self.reused = 0

    # -- on the device --------------------------------------------------------------------------------

    def _measure(self, tensor: Tensor) -> _Measure | None:
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
            return None
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return None
        key = id(tensor)
        version = -1 if tensor.is_inference() else tensor._version
        known = self._known.get(key)
        if known is not None and known[0]() is tensor and known[1] == version and version >= 0:
            self.reused += 1
            return known[2]
        data = tensor.detach()
        if data.is_complex():
            data = torch.view_as_real(data.resolve_conj())
        if data.dtype not in (torch.float32, torch.float64):
            data = data.float()
        low, high = torch.aminmax(data)
        var, mean = torch.var_mean(data, correction=0)
        measure = _Measure(data.numel())
        self._scalars.setdefault(data.dtype, []).extend((low, high, mean, var))
        self._measures.setdefault(data.dtype, []).append(measure)
        self._pending += 1
        self.measured += 1
        known_now = self._known

        def forget(_: Any, key: int = key) -> None:
            known_now.pop(key, None)

        self._known[key] = (weakref.ref(tensor, forget), version, measure)
        return measure

    def _all(self, tensors: Iterable[Tensor | None]) -> tuple[tuple[int, _Measure], ...]:
        found = []
        for index, tensor in enumerate(tensors):
            measure = self._measure(tensor) if tensor is not None else None
            if measure is not None:
                found.append((index, measure))
        return tuple(found)

    def before(self, call: Call) -> None:
        with quiet(), self._guard:
            call.notes[self] = self._all([*tensors_in(call.args), *tensors_in(call.kwargs)])

    def after(self, call: Call) -> None:
        self.announce(call)
        arriving = call.notes.pop(self, ())
        with quiet(), self._guard:
            leaving = () if call.traits.view else self._all(tensors_in(call.result))
            self._enter(_Entry(call, "forward", arriving, leaving))

    def after_backward(self, call: Call, grad_outputs: list[Tensor | None], grad_inputs: list[Tensor | None]) -> None:
        with self._guard:
            arriving, leaving = self._all(grad_outputs), self._all(grad_inputs)
            self._enter(_Entry(call, "backward", arriving, leaving))

    def _enter(self, entry: _Entry) -> None:
        self._entries.append(entry)
        at_once = self.only is not None  # a feature on one operator shows at once
        if at_once or self._pending >= _BATCH or len(self._entries) >= 4 * _BATCH:
            self._send()
            while len(self._flights) > (0 if at_once else _MOST_BATCHES):
                self._land(self._flights.popleft())

    def _send(self) -> None:
        entries, self._entries = self._entries, []
        dtypes = list(self._scalars)
        for dtype in dtypes:
            scalars, measures = self._scalars.pop(dtype), self._measures.pop(dtype)
            stacked = torch.stack(scalars) if _one_device(scalars) else torch.stack([s.cpu() for s in scalars])
            event = None
            if stacked.device.type != "cpu":
                kind = event_class(stacked.device.type)
                if kind is not None and can_pin(stacked.device.type):
                    host = torch.empty(stacked.shape, dtype=dtype, pin_memory=True)
                    host.copy_(stacked, non_blocking=True)
                    event = kind()
                    event.record()
                    stacked = host
                else:
                    stacked = stacked.cpu()
            last = dtype is dtypes[-1]
            self._flights.append(_Flight(stacked, event, measures, entries if last else []))
        if not dtypes and entries:
            self._flights.append(_Flight(torch.empty(0), None, [], entries))
        self._pending = 0

    # -- on the host ----------------------------------------------------------------------------------

    def _land(self, flight: _Flight) -> None:
        if flight.event is not None:
            flight.event.synchronize()
        numbers = flight.values.tolist()
        for index, measure in enumerate(flight.measures):
            low, high, mean, var = numbers[4 * index : 4 * index + 4]
            measure.values = (low, high, mean, var)
        for entry in flight.entries:
            self._judge(entry)

    def _judge(self, entry: _Entry) -> None:
        call = entry.call
        site = self.site(call)
        roles = ("inputs", "outputs") if entry.phase == "forward" else ("grad_outputs", "grad_inputs")
        for role, measures in zip(roles, (entry.arriving, entry.leaving)):
            for index, measure in measures:
                row = measure.row()
                if row:
                    self.record(call.id, site, entry.phase, role, index, *row.values())
        if not any(m.bad for _, m in entry.leaving):
            return
        if any(m.bad for _, m in entry.arriving):
            self._passed_on += 1
        elif _asked_for_infinity(call.inputs):
            return  # masks are filled with -inf on purpose
        else:
            self._made += 1
            kinds = sorted({k for _, m in entry.leaving for k in ("nan", "inf") if m.row()[k]})
            text = f"made {' and '.join(kinds)} in its {roles[1]} from finite {roles[0]} ({entry.phase})"
            if self._first is None:
                self._first = text
                text = f"first of the run: {text}"
            if self._made <= _MOST_REPORTED:
                self.found(call, "overflow", text)
        if self.view.full:
            self.view.block(call.location, self._table(entry, roles))

    def _table(self, entry: _Entry, roles: tuple[str, str]) -> str:
        header = ["name", "shape", "dtype", "inf", "nan", "min", "max", "mean", "std", "norm"]
        call = entry.call
        rows = []
        sides = (entry.arriving, entry.leaving)
        described = (call.inputs, call.outputs) if entry.phase == "forward" else (None, None)
        for role, measures, parts in zip(roles, sides, described):
            labels = _tensor_labels(parts, role) if parts is not None else None
            for index, measure in measures:
                label, meta = labels[index] if labels and index < len(labels) else (f"{role}[{index}]", None)
                row = measure.row()
                shape = str(tuple(meta.shape)) if meta is not None else ""
                dtype = str(meta.dtype).removeprefix("torch.") if meta is not None else ""
                cells = [f"{row[k]:.6g}" for k in ("min", "max", "mean", "std", "norm")]
                rows.append([f"{call.op} {label}", shape, dtype, str(row["inf"]), str(row["nan"]), *cells])
        return console.table(header, rows)

    # -- results --------------------------------------------------------------------------------------

    def finish(self) -> None:
        with quiet(), self._guard:
            self._send()
            while self._flights:
                self._land(self._flights.popleft())
            self._known.clear()

    def first(self) -> Any:
        """The finding about the first operator that made a NaN or Inf, or None (`check.first().op`)."""
        return next((f for f in self.findings_now if f.kind == "overflow"), None)

    def summary(self) -> list[str]:
        facts = [f"{self.measured} tensors measured, {self.reused} seen again unchanged"]
        if self._made:
            facts.append(f"{self._made} calls made NaN or Inf from finite inputs, {self._passed_on} passed them on")
            first = self.first()
            facts.append(f"first: {first.op} at {first.location}")
        return facts

    def polish(self, row: dict[str, Any]) -> None:
        row.pop("described", None)
        row["inf"], row["nan"] = bool(row["inf"]), bool(row["nan"])


def _one_device(tensors: list[Tensor]) -> bool:
    first = tensors[0].device
    return all(t.device == first for t in tensors)


def _tensor_labels(described: Described, role: str) -> list[tuple[str, TensorMeta]]:
    return [(label, part) for label, part in labelled(described, role) if isinstance(part, TensorMeta)]


def _asked_for_infinity(inputs: Described) -> bool:
    return any(part in ("inf", "-inf", "nan") for _, part in labelled(inputs, "") if isinstance(part, str))
