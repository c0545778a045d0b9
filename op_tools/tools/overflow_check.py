"""OpOverflowCheck: statistics of every tensor on the device, and the first operator that made a NaN or Inf."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar, Final, NamedTuple

import torch

from ..call.description import Described, Tensor, TensorMeta, labelled, short
from ..call.devices import can_pin, event_class, quiet
from ..call.facts import UNINITIALISED, last_name
from ..call.site import module_path
from ..copies.operands import mark_after
from ..native.ledger import new_ledger
from ..native.statistics import BROKEN, NAMES, Batch, FusedBatch, Measure, batch_for
from ..view import console
from ..watch.intercept import Call
from .base import Tool

_MAX_FLIGHTS: Final = 2
_MAX_ENTRIES: Final = 1_024
_ROLES: Final = {"forward": ("inputs", "outputs"), "backward": ("grad_outputs", "grad_inputs")}
_MAX_REPORTED: Final = 10
_PLACES: Final = {"run": "INTEGER", "call_id": "INTEGER", "site": "INTEGER", "step": "INTEGER", "module": "TEXT"}


class _Entry(NamedTuple):
    call: Call
    phase: str
    arriving: tuple[Any, ...]  # number of a tensor, its measure, number of the next one, ...
    leaving: tuple[Any, ...]


def _pairs(side: tuple[Any, ...]) -> Iterator[tuple[int, Measure]]:
    return zip(side[::2], side[1::2])


class _Flight(NamedTuple):
    """A batch on its way to the host."""

    values: Tensor
    event: Any
    batch: Batch | None
    entries: list[_Entry]


class OpOverflowCheck(Tool):
    """Find the operator that made the first NaN or Inf, forward or backward.

    >>> with op_tools.OpOverflowCheck() as check:  # doctest: +SKIP
    ...     train_step()
    >>> check.first()                              # doctest: +SKIP
    Finding(tool='OpOverflowCheck', op='torch.exp', kind='overflow', ...)
    """

    name = "OpOverflowCheck"
    nothing_found = "nothing found"
    prefix = "OP_OVERFLOW_CHECK"
    feature = "overflow_check"
    order = 35
    wants_backward = True
    looks_inside = True
    wants_pointers = False
    columns: ClassVar[dict[str, str]] = {
        "numbers": "BLOB",  # of measured tensors; all integers have 64 bits
        "statistics": "BLOB",  # NAMES of each of them, as doubles
        "calls": "BLOB",  # of each call: id, site, phase, how many tensors; of each tensor: side, place, its number
        "steps": "BLOB",  # of each call
    }

    def prepare(self) -> None:
        self._ledger = new_ledger()
        self._at_once: FusedBatch | None = None  # one of the batches, which takes many tensors in one launch
        self._batches: dict[Any, Batch] = {}
        self._entries: list[_Entry] = []
        self._flights: deque[_Flight] = deque()
        self._full: list[Batch] = []
        self._guard = threading.RLock()
        self._rows: dict[int, Any] = {}  # statistics by number, for a full console
        self._any_bad = False
        self._made = self._passed_on = self.measured = 0
        self._first_step: int | None = None  # whose calls are noted with their modules

    # -- on the device --------------------------------------------------------------------------------

    @property
    def reused(self) -> int:
        """How often a tensor was seen again unchanged (`check.reused`)."""
        return int(self._ledger.reused)

    def _measure_all(self, tensors: list[Tensor]) -> list[Measure | None]:
        """Start measuring; None for tensors that cannot be measured."""
        found: list[Measure | None] = []
        while len(found) < len(tensors):
            batch = self._at_once
            some = [] if batch is None else batch.add_some(tensors[len(found) :] if found else tensors)
            if batch is None or not some:
                found.append(self._measure(tensors[len(found)]))
                continue
            found += some
            self.measured += len(some)
            if batch.full:
                self._send_later(batch.device)
        return found

    def _send_later(self, key: Any) -> None:
        self._full.append(self._batches.pop(key))
        self._at_once = None

    def _measure(self, tensor: Tensor) -> Measure | None:
        if tensor.layout != torch.strided or tensor.is_meta:
            return None
        key: Any = tensor.device
        batch = self._batches.get(key)
        if batch is None:
            key, kind = batch_for(tensor)
            batch = self._batches.get(key)
            if batch is None:
                with quiet():
                    batch = self._batches[key] = kind(tensor)
        try:
            measure = batch.add(tensor)
        except Exception:
            if not batch.measures:  # made inside a transform of torch.func, its memory may be of no use outside
                self._batches.pop(key, None)
            raise
        if isinstance(batch, FusedBatch):
            self._at_once = batch
        if batch.full:
            self._send_later(key)
        self.measured += 1
        return measure

    def before(self, call: Call) -> None:
        with self._guard:
            call.notes[self] = self._ledger.look(call.tensors, self._measure_all)

    def after(self, call: Call) -> None:
        self.count(call)
        if call.step == self._first_step or self._first_step is None:
            self._note_place(call)
        arriving = call.notes.pop(self, ())
        with self._guard:
            if last_name(call.op) in UNINITIALISED:
                self._ledger.leave_alone(call.results)
            leaving = () if call.traits.view else self._ledger.look(call.results, self._measure_all)
            self._enter(_Entry(call, "forward", arriving, leaving))

    def _note_place(self, call: Call) -> None:
        """Note in which module a call is: of the first step alone, since later ones make the same calls in order."""
        self._first_step = call.step
        if call.inside is None and not call.traits.by_engine and self._store is not None:
            row = (self._run_key, call.id, self.site(call), call.step, module_path(3))
            self._store.table("places", _PLACES).append(row)

    def after_backward(self, call: Call, grad_outputs: list[Tensor | None], grad_inputs: list[Tensor | None]) -> None:
        with self._guard:
            look, measure = self._ledger.look, self._measure_all
            self._enter(_Entry(call, "backward", look(grad_outputs, measure), look(grad_inputs, measure)))

    def after_compiled_code(self) -> None:
        with self._guard:
            self._ledger.clear()

    def _enter(self, entry: _Entry) -> None:
        self._entries.append(entry)
        at_once = self.only is not None  # a feature on one operator shows at once
        if at_once or self._full or len(self._entries) >= _MAX_ENTRIES:
            with quiet():
                self._send()
            while len(self._flights) > (0 if at_once else _MAX_FLIGHTS):
                self._land(self._flights.popleft())

    def _send(self) -> None:
        """Start the batches on their way; what waits for them waits with the last one."""
        entries, self._entries = self._entries, []
        batches = [*self._full, *self._batches.values()]
        self._full, self._batches, self._at_once = [], {}, None
        for batch in batches:
            values, event = batch.values(), None
            if event_class(values.device.type) is not None and can_pin(values.device.type):
                host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
                host.copy_(values, non_blocking=True)
                event, values = mark_after((values,)), host
            else:
                values = values.cpu()
            self._flights.append(_Flight(values, event, batch, entries if batch is batches[-1] else []))
        if not batches and entries:
            self._flights.append(_Flight(torch.empty(0), None, None, entries))

    # -- on the host ----------------------------------------------------------------------------------

    def _land(self, flight: _Flight) -> None:
        if flight.event is not None:
            flight.event.synchronize()
        numbers, statistics = b"", b""
        if flight.batch is not None and flight.batch.measures:
            measures = flight.batch.measures
            rows = flight.batch.land(flight.values)
            numbers, statistics = array("q", [m.number for m in measures]).tobytes(), rows.tobytes()
            self._any_bad = self._any_bad or bool(rows[:, :2].any())
            if self.view.full:
                if len(self._rows) > 100_000:
                    self._rows.clear()
                self._rows.update(zip([m.number for m in measures], rows))
        log: list[int] = []
        steps = array("q")
        for entry in flight.entries:
            call, phase, arriving, leaving = entry
            if arriving or leaving:
                steps.append(call.step)
                log += (call.id, self.site(call), phase == "backward", (len(arriving) + len(leaving)) // 2)
                for index, measure in zip(arriving[::2], arriving[1::2]):
                    log += (0, index, measure.number)
                for index, measure in zip(leaving[::2], leaving[1::2]):
                    log += (1, index, measure.number)
            if self._any_bad:
                self._judge(entry)
        if log or statistics:
            self.record(numbers, statistics, array("q", log).tobytes(), steps.tobytes())

    def _judge(self, entry: _Entry) -> None:
        call = entry.call
        roles = _ROLES[entry.phase]
        if not any(m.bad for m in entry.leaving[1::2]):
            return
        if any(m.bad for m in entry.arriving[1::2]):
            self._passed_on += 1
        elif _asked_for_infinity(call.inputs):
            return  # masks are filled with -inf on purpose
        else:
            self._made += 1
            kinds = sorted({kind for m in entry.leaving[1::2] for kind in m.bad})
            phase = "backward" if call.inside is not None and call.inside.backward else entry.phase
            text = f"made {' and '.join(kinds)} in its {roles[1]} from finite {roles[0]} ({phase})"
            if self._made == 1:
                text = f"first of the run: {text}"
            if self._made <= _MAX_REPORTED:
                self.found(call, "overflow", text)
        if self.view.full:
            self.view.block(call.location, self._table(entry, roles))

    def _table(self, entry: _Entry, roles: tuple[str, str]) -> str:
        header = ["name", "shape", "dtype", "inf", "nan", "min", "max", "mean", "std", "norm"]
        call, rows = entry.call, []
        described = (call.inputs, call.outputs) if entry.phase == "forward" else (None, None)
        for role, measures, parts in zip(roles, (entry.arriving, entry.leaving), described):
            named = labelled(parts, role) if parts is not None else []
            labels = [(label, part) for label, part in named if isinstance(part, TensorMeta)]
            for index, measure in _pairs(measures):
                label, meta = labels[index] if index < len(labels) else (f"{role}[{index}]", None)
                row = dict(zip(NAMES, self._rows.get(measure.number, _UNKNOWN)))
                look = ["", ""] if meta is None else [str(tuple(meta.shape)), short(meta.dtype)]
                cells = [f"{row[k]:.6g}" for k in ("min", "max", "mean", "std", "norm")]
                rows.append([f"{call.op} {label}", *look, str(bool(row["inf"])), str(bool(row["nan"])), *cells])
        return console.table(header, rows)

    # -- results --------------------------------------------------------------------------------------

    def finish(self) -> None:
        with quiet(), self._guard:
            self._send()
            while self._flights:
                self._land(self._flights.popleft())
            self._ledger.clear()
        for index, why in BROKEN.items():
            self.slowed(f"statistics on GPU {index}", f"PyTorch's reductions compute them: {why}")

    def first(self) -> Any:
        """The finding about the first operator that made a NaN or Inf, or None (`check.first().op`)."""
        return next((f for f in self._findings_now if f.kind == "overflow"), None)

    def summary(self) -> list[str]:
        facts = [f"{self.measured} tensors measured, {self.reused} seen again unchanged"]
        if self._made:
            facts.append(f"{self._made} calls made NaN or Inf from finite inputs, {self._passed_on} passed them on")
            first = self.first()
            facts.append(f"first: {first.op} at {first.location}")
        return facts

    def records(self) -> list[dict[str, Any]]:
        """One row per measured tensor of a call (`check.records()[0]["max"]`)."""
        if self._store is None:
            return []
        sites = {site: found for site, *found in self._store.tuples("SELECT site, op, location FROM sites", ())}
        found: list[dict[str, Any]] = []
        known: dict[int, dict[str, Any]] = {}
        for flight in super().records():
            statistics = array("d", flight["statistics"])
            for place, number in enumerate(array("q", flight["numbers"])):
                stats: dict[str, Any] = dict(zip(NAMES, statistics[place * len(NAMES) : (place + 1) * len(NAMES)]))
                stats["inf"], stats["nan"] = bool(stats["inf"]), bool(stats["nan"])
                known[number] = stats
            log = iter(array("q", flight["calls"]))
            for call_id in log:
                site, backward, tensors = next(log), next(log), next(log)
                phase = "backward" if backward else "forward"
                op, location = sites[site]
                for _ in range(tensors):
                    role, index, number = _ROLES[phase][next(log)], next(log), next(log)
                    row = {"call_id": call_id, "phase": phase, "role": role, "tensor": index}
                    found.append({**row, **known[number], "op": op, "location": location})
        return found


_UNKNOWN: Final = (0.0, 0.0, *[float("nan")] * 5)


def _asked_for_infinity(inputs: Described) -> bool:
    return any(part in ("inf", "-inf", "nan") for _, part in labelled(inputs, "") if isinstance(part, str))
