"""OpOverflowCheck: statistics of every tensor on the device, and the first operator that made a NaN or Inf."""

from __future__ import annotations

import math
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Iterable
from math import isfinite
from typing import Any, ClassVar, Final, NamedTuple

import torch

from .. import console
from ..devices import can_pin, event_class, quiet
from ..intercept import Call
from ..opcall import Described, Tensor, TensorMeta, labelled
from .base import Tool

_BATCH: Final = 256  # tensors measured between two transfers to the host
_MOST_FLIGHTS: Final = 4
_MOST_ENTRIES: Final = 1_024
_STATISTICS: Final = ("inf", "nan", "min", "max", "mean", "std", "norm")
_ROLES: Final = {"forward": ("inputs", "outputs"), "backward": ("grad_outputs", "grad_inputs")}
_MEASURED_AS_THEY_ARE: Final = frozenset({torch.float32, torch.float64})
_MOST_REPORTED: Final = 10


class _Measure:
    """Statistics of one version of one tensor; the numbers arrive with its batch."""

    __slots__ = ("bad", "numel", "stats")

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.bad = False
        self.stats: tuple[float, ...] = ()  # in the order of _STATISTICS

    def arrive(self, low: float, high: float, mean: float, var: float) -> None:
        n = self.numel
        self.bad = not (isfinite(low) and isfinite(high))
        spread = max(var, 0.0) if var == var else var
        std = math.sqrt(spread * n / (n - 1)) if n > 1 else 0.0
        norm = math.sqrt(n * (spread + mean * mean))
        inf, nan = math.isinf(low) or math.isinf(high), low != low or high != high
        self.stats = (float(inf), float(nan), low, high, mean, std, norm)

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = dict(zip(_STATISTICS, self.stats))
        row["inf"], row["nan"] = bool(row["inf"]), bool(row["nan"])
        return row


class _Entry(NamedTuple):
    call: Call
    phase: str
    arriving: tuple[tuple[int, _Measure], ...]
    leaving: tuple[tuple[int, _Measure], ...]


class _Flight(NamedTuple):
    """A batch on its way to the host."""

    values: Tensor  # the extremes of all its tensors, then their variances, then their means
    event: Any
    measures: list[_Measure]
    entries: list[_Entry]


class _Batch:
    """Measurements of one device and dtype that are still on the device."""

    __slots__ = ("extremes", "means", "measures", "slots", "variances")

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.extremes = torch.empty(2 * _BATCH, dtype=dtype, device=device)
        self.slots = list(self.extremes.unbind())  # reductions write there: nothing is gathered afterwards
        self.slots.reverse()
        self.variances: list[Tensor] = []
        self.means: list[Tensor] = []
        self.measures: list[_Measure] = []

    def add(self, data: Tensor) -> _Measure:
        slots = self.slots
        torch.aminmax(data, out=(slots[-1], slots[-2]))
        var, mean = torch.var_mean(data, correction=0)
        del slots[-2:]  # only now: a reduction that the device lacks leaves the batch as it was
        self.variances.append(var)
        self.means.append(mean)
        measure = _Measure(data.numel())
        self.measures.append(measure)
        return measure

    def values(self) -> Tensor:
        count = 2 * len(self.measures)
        return torch.cat([self.extremes[:count], torch.stack(self.variances + self.means)])


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
    wants_pointers = False
    columns: ClassVar[dict[str, str]] = {
        "call_id": "INTEGER",
        "site": "INTEGER",
        "phase": "TEXT",
        "tensors": "BLOB",  # 0 or 1 for what arrived or left, and its number: unsigned 16-bit pairs
        "statistics": "BLOB",  # _STATISTICS of each of them as doubles
    }

    def prepare(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, _Measure]] = {}
        self._batches: dict[tuple[torch.dtype, torch.device], _Batch] = {}
        self._entries: list[_Entry] = []
        self._flights: deque[_Flight] = deque()
        self._full: list[_Batch] = []
        self._guard = threading.RLock()
        self._made = 0
        self._passed_on = 0
        self._first: Any = None
        self.measured = 0
        self.reused = 0

    # -- on the device --------------------------------------------------------------------------------

    def _all(self, tensors: Iterable[Tensor | None]) -> tuple[tuple[int, _Measure], ...]:
        found = []
        index = -1
        for tensor in tensors:
            index += 1
            if tensor is None:
                continue
            known = self._known.get(id(tensor))
            if known is not None and known[0]() is tensor and known[1] == tensor._version:
                self.reused += 1
                found.append((index, known[2]))
            elif (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel():
                measure = self._measure(tensor)
                if measure is not None:
                    found.append((index, measure))
        return tuple(found)

    def _measure(self, tensor: Tensor) -> _Measure | None:
        if tensor.layout != torch.strided or tensor.is_meta:
            return None
        with quiet():
            data = tensor
            if data.is_complex():
                data = torch.view_as_real(data.resolve_conj())
            if data.dtype not in _MEASURED_AS_THEY_ARE:
                data = data.float()
            kind = (data.dtype, data.device)
            batch = self._batches.get(kind)
            if batch is None:
                batch = self._batches[kind] = _Batch(*kind)
            measure = batch.add(data)
            if not batch.slots:
                self._full.append(self._batches.pop(kind))
        self.measured += 1
        if not tensor.is_inference():  # those count no versions
            key, known = id(tensor), self._known

            def forget(_: Any) -> None:
                known.pop(key, None)

            known[key] = (weakref.ref(tensor, forget), tensor._version, measure)
        return measure

    def before(self, call: Call) -> None:
        with self._guard:
            call.notes[self] = self._all(call.tensors)

    def after(self, call: Call) -> None:
        self.announce(call)
        arriving = call.notes.pop(self, ())
        with self._guard:
            leaving = () if call.traits.view else self._all(call.results)
            self._enter(_Entry(call, "forward", arriving, leaving))

    def after_backward(self, call: Call, grad_outputs: list[Tensor | None], grad_inputs: list[Tensor | None]) -> None:
        with self._guard:
            arriving, leaving = self._all(grad_outputs), self._all(grad_inputs)
            self._enter(_Entry(call, "backward", arriving, leaving))

    def _enter(self, entry: _Entry) -> None:
        self._entries.append(entry)
        at_once = self.only is not None  # a feature on one operator shows at once
        if at_once or self._full or len(self._entries) >= _MOST_ENTRIES:
            with quiet():
                self._send()
            while len(self._flights) > (0 if at_once else _MOST_FLIGHTS):
                self._land(self._flights.popleft())

    def _send(self) -> None:
        """Start the batches on their way; what waits for them waits with the last one."""
        entries, self._entries = self._entries, []
        batches = [*self._full, *self._batches.values()]
        self._full, self._batches = [], {}
        for batch in batches:
            values = batch.values()
            event = None
            if values.device.type != "cpu":
                kind = event_class(values.device.type)
                if kind is not None and can_pin(values.device.type):
                    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
                    host.copy_(values, non_blocking=True)
                    event = kind()
                    event.record()
                    values = host
                else:
                    values = values.cpu()
            self._flights.append(_Flight(values, event, batch.measures, entries if batch is batches[-1] else []))
        if not batches and entries:
            self._flights.append(_Flight(torch.empty(0), None, [], entries))

    # -- on the host ----------------------------------------------------------------------------------

    def _land(self, flight: _Flight) -> None:
        if flight.event is not None:
            flight.event.synchronize()
        numbers = flight.values.tolist()
        n = len(flight.measures)
        extremes, variances, means = numbers[: 2 * n], numbers[2 * n : 3 * n], numbers[3 * n :]
        for measure, low, high, mean, var in zip(flight.measures, extremes[::2], extremes[1::2], means, variances):
            measure.arrive(low, high, mean, var)
        for entry in flight.entries:
            self._judge(entry)

    def _judge(self, entry: _Entry) -> None:
        call = entry.call
        roles = _ROLES[entry.phase]
        which, numbers = array("H"), array("d")
        for side, measures in enumerate((entry.arriving, entry.leaving)):
            for index, measure in measures:
                which.extend((side, index & 0xFFFF))
                numbers.extend(measure.stats)
        if which:
            self.record(call.id, self.site(call), entry.phase, which.tobytes(), numbers.tobytes())
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

    def records(self) -> list[dict[str, Any]]:
        """One row per measured tensor of a call (`check.records()[0]["max"]`)."""
        rows = []
        for row in super().records():
            which, numbers = array("H", row.pop("tensors")), array("d", row.pop("statistics"))
            described = (row.pop("op"), row.pop("location"))
            row.pop("described", None)
            size = len(_STATISTICS)
            for position in range(len(which) // 2):
                side, index = which[2 * position : 2 * position + 2]
                stats = dict(zip(_STATISTICS, numbers[size * position : size * position + size]))
                stats["inf"], stats["nan"] = bool(stats["inf"]), bool(stats["nan"])
                role = _ROLES[row["phase"]][side]
                rows.append(
                    {**row, "role": role, "tensor": index, **stats, "op": described[0], "location": described[1]}
                )
        return rows


def _tensor_labels(described: Described, role: str) -> list[tuple[str, TensorMeta]]:
    return [(label, part) for label, part in labelled(described, role) if isinstance(part, TensorMeta)]


def _asked_for_infinity(inputs: Described) -> bool:
    return any(part in ("inf", "-inf", "nan") for _, part in labelled(inputs, "") if isinstance(part, str))
