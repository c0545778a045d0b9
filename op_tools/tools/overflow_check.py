"""OpOverflowCheck: statistics of every tensor on the device, and the first operator that made a NaN or Inf."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import torch

from ..call.description import Described, Tensor, TensorMeta, labelled, short
from ..call.devices import can_pin, event_class, quiet
from ..call.facts import UNINITIALISED, last_name
from ..call.site import module_path
from ..call.traits import OpTraits
from ..copies.operands import mark_after
from ..native.ledger import Pairs, new_ledger
from ..native.statistics import BROKEN, NAMES, Batch, FusedBatch, TorchBatch, batch_for
from ..view import console
from ..watch.compiled import CompiledRun
from ..watch.intercept import INTERCEPTOR, Call
from .base import Tool
from .light import Seen, noted

_MAX_FLIGHTS: Final = 2
_ROLES: Final = (("inputs", "outputs"), ("grad_outputs", "grad_inputs"))  # forward, backward
_PHASES: Final = ("forward", "backward")
_MAX_REPORTED: Final = 10
_MAX_KNOWN: Final = 100_000
_PLACES: Final = {"run": "INTEGER", "call_id": "INTEGER", "site": "INTEGER", "step": "INTEGER", "module": "TEXT"}


class _Entry(NamedTuple):
    """A call of the log, or its backward: places of tensors and their numbers, in turns."""

    id: int
    site: int
    backward: int
    step: int
    arriving: Pairs
    leaving: Pairs
    call: Call | None  # None where C++ watched it


def entries_of(log: bytes, steps: bytes, calls: Sequence[Call | None]) -> Iterator[_Entry]:
    """The calls of a log, as `Ledger.take` returns it."""
    numbers = iter(array("q", log))
    for step, call in zip(array("q", steps), calls):
        id, site, backward, count = (next(numbers) for _ in range(4))
        sides: tuple[list[int], list[int]] = [], []
        for _ in range(count):
            sides[next(numbers)].extend((next(numbers), next(numbers)))
        yield _Entry(id, site, backward, step, tuple(sides[0]), tuple(sides[1]), call)


class _Flight(NamedTuple):
    """A batch on its way to the host, and the log of the calls that wait for it."""

    values: Tensor
    event: Any
    batch: Batch | None
    log: tuple[bytes, bytes, list[Call | None]]


_NO_LOG: Final = (b"", b"", list[Call | None]())


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
        self._ledger, self._compiled = new_ledger(self._measure_all, self._send_and_land, self._failed_in_backward)
        self._batches: dict[Any, Batch] = {}
        self._flights: deque[_Flight] = deque()
        self._full: list[Batch] = []
        self._guard = threading.RLock()
        self._rows: dict[int, Any] = {}  # statistics by number, for a full console
        self._bad: dict[int, tuple[str, ...]] = {}  # numbers of tensors: what is in them of "inf" and "nan"
        self._seen: dict[int, Seen] = {}  # what calls look like, by site
        self._made = self._passed_on = self.measured = 0
        self._first_step: int | None = None  # whose calls are noted with their modules
        self._noting = [self._note_place]  # empty after that step

    # -- on the device --------------------------------------------------------------------------------

    @property
    def reused(self) -> int:
        """How often a tensor was seen again unchanged (`check.reused`)."""
        return int(self._ledger.reused)

    def light(self, traits: OpTraits) -> tuple[Any, ...] | None:
        may_write = traits.may_write and not traits.names_inplace  # `native.front` looks at what has that name
        writes = may_write or traits.mutates or traits.is_optimizer or traits.collective
        if not self._compiled or self.view.full or self.gated or self.only is not None or self._store is None:
            return None
        if type(self) is not OpOverflowCheck or writes or last_name(traits.name) in UNINITIALISED:
            return None
        return (
            *noted(self, traits.name, lambda _: None, (), 0),
            *(self._ledger.begin, self._ledger.end, traits.view, self._noting),
        )

    def _measure_all(self, tensors: list[Tensor], numbers: list[int]) -> list[bool]:
        """Start measuring; which of them can be measured."""
        with self._guard:
            found: list[bool] = []
            while len(found) < len(tensors):
                batch = self._batches.get(tensors[len(found)].device) if self._compiled else None
                if isinstance(batch, FusedBatch) and batch.native is not None and len(tensors) - len(found) > 1:
                    taken: list[bool] = batch.native.measure(tensors[len(found) :], numbers[len(found) :])
                    for place in [place for place, is_taken in enumerate(taken) if not is_taken]:
                        taken[place] = self._measure(tensors[len(found) + place], numbers[len(found) + place])
                    return found + taken
                found.append(self._measure(tensors[len(found)], numbers[len(found)]))
            return found

    def _measure(self, tensor: Tensor, number: int) -> bool:
        if tensor.layout != torch.strided or tensor.is_meta:
            return False
        key: Any = tensor.device
        batch = self._batches.get(key)
        if batch is None:
            key, kind = batch_for(tensor)
            batch = self._batches.get(key)
            if batch is None:
                with quiet():
                    batch = self._batches[key] = kind(tensor)
                if isinstance(batch, FusedBatch) and self._compiled and batch.native is not None:
                    self._ledger.use(batch.native)  # which measures most tensors of that device from now on
        try:
            batch.add(tensor, number)
        except Exception:
            if (
                isinstance(batch, TorchBatch) and not batch.numbers
            ):  # made inside a transform of torch.func, its memory may be of no use outside
                self._batches.pop(key, None)
            raise
        if batch.full:
            self._full.append(self._batches.pop(key))
            self._stop_using()
        return True

    def _stop_using(self) -> None:
        if self._compiled:
            self._ledger.use(None)

    def before(self, call: Call) -> None:
        with self._guard:
            call.notes[self] = self._ledger.look(call.tensors)

    def after(self, call: Call) -> None:
        self.count(call)
        site = self.site(call)
        if self._noting and call.inside is None and not call.traits.by_engine:
            self._note_place(call.id, site, call.step, 4)
        arriving = call.notes.pop(self, ())
        with self._guard:
            if last_name(call.op) in UNINITIALISED:
                self._ledger.leave_alone(call.results)
            # what lies in an argument's memory has been looked at there; `to` and `reshape` give a view or a copy
            fresh = [None if call.traits.view and result._is_view() else result for result in call.results]
            leaving = self._ledger.look(fresh)
            self._enter(call, site, False, arriving, leaving)

    def _note_place(self, number: int, site: int, step: int, depth: int = 2) -> None:
        """Note in which module a call is: of the first step alone, since later ones make the same calls in order."""
        if self._first_step is None:
            self._first_step = step
        if step != self._first_step:
            self._noting.clear()
        elif self._store is not None:
            row = (self._run_key, number, site, step, module_path(depth))
            self._store.table("places", _PLACES).append(row)

    def after_backward(self, call: Call, grad_outputs: list[Tensor | None], grad_inputs: list[Tensor | None]) -> None:
        with self._guard:
            arriving = self._ledger.look(grad_outputs)
            self._enter(call, self.site(call), True, arriving, self._ledger.look(grad_inputs))

    def after_compiled_code(self, run: CompiledRun | None) -> None:
        with self._guard:
            self._ledger.clear()

    def _enter(self, call: Call, site: int, backward: bool, arriving: Pairs, leaving: Pairs) -> None:
        self._ledger.enter(call.id, site, backward, call.step, arriving, leaving, call)
        if self.only is not None or self._full:  # a feature on one operator shows at once
            self._send_and_land(0 if self.only is not None else _MAX_FLIGHTS)

    def _send_and_land(self, flights: int = _MAX_FLIGHTS) -> None:
        """Send what is measured, and read what has arrived: all but so many flights."""
        with self._guard:
            with quiet():
                self._send()
            while len(self._flights) > flights:
                self._land(self._flights.popleft())

    def _send(self) -> None:
        """Start the batches on their way; what waits for them waits with the last one."""
        log = self._ledger.take()
        batches = [*self._full, *self._batches.values()]
        self._full, self._batches = [], {}
        self._stop_using()
        for batch in batches:
            values, event = batch.values(), None
            self.measured += len(batch.numbers)
            if event_class(values.device.type) is not None and can_pin(values.device.type):
                host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
                host.copy_(values, non_blocking=True)
                event, values = mark_after((values,)), host
            else:
                values = values.cpu()
            self._flights.append(_Flight(values, event, batch, log if batch is batches[-1] else _NO_LOG))
        if not batches and log[0]:
            self._flights.append(_Flight(torch.empty(0), None, None, log))

    # -- on the host ----------------------------------------------------------------------------------

    def _land(self, flight: _Flight) -> None:
        if flight.event is not None:
            flight.event.synchronize()
        numbers, statistics = b"", b""
        if flight.batch is not None and flight.batch.numbers:
            rows = flight.batch.land(flight.values)
            measured = flight.batch.numbers
            numbers, statistics = array("q", measured).tobytes(), rows.tobytes()
            self._note_bad(measured, rows)
            if self.view.full:
                if len(self._rows) > _MAX_KNOWN:
                    self._rows.clear()
                self._rows.update(zip(measured, rows))
        log, steps, _ = flight.log
        if self._bad:
            for entry in entries_of(*flight.log):
                self._judge(entry)
        if log or statistics:
            self.record(numbers, statistics, log, steps)

    def _note_bad(self, numbers: list[int], rows: Any) -> None:
        for place in rows[:, :2].any(axis=1).nonzero()[0].tolist():
            kinds = tuple([name for name, there in zip(("inf", "nan"), rows[place]) if there])
            self._bad[numbers[place]] = kinds
        while len(self._bad) > _MAX_KNOWN:  # the oldest are of tensors that are gone
            del self._bad[next(iter(self._bad))]

    def _judge(self, entry: _Entry) -> None:
        bad = self._bad
        found = [bad[number] for number in entry.leaving[1::2] if number in bad]
        if not found:
            return
        call = self._call_of(entry)
        roles = _ROLES[entry.backward]
        if any(number in bad for number in entry.arriving[1::2]):
            self._passed_on += 1
        elif asked_for_infinity(call.inputs):
            return  # masks are filled with -inf on purpose
        else:
            self._made += 1
            kinds = sorted({kind for kinds in found for kind in kinds})
            phase = "backward" if call.inside is not None and call.inside.backward else _PHASES[entry.backward]
            text = f"made {' and '.join(kinds)} in its {roles[1]} from finite {roles[0]} ({phase})"
            if self._made == 1:
                text = f"first of the run: {text}"
            if self._made <= _MAX_REPORTED:
                self.found(call, "overflow", text)
        if self.view.full:
            self.view.block(call.location, self._table(entry, call, roles))

    def site(self, call: Call) -> int:
        number = super().site(call)
        if number not in self._seen and self._compiled:
            if len(self._seen) >= _MAX_KNOWN:
                del self._seen[next(iter(self._seen))]
            self._seen[number] = Seen(call.op, call.location, call.inputs, call.outputs)
        return number

    def _call_of(self, entry: _Entry) -> Call:
        """The call of an entry; one that C++ watched is put together from its site."""
        if entry.call is not None:
            return entry.call
        seen = self._seen.get(entry.site)
        op = "(an operator whose site is forgotten)" if seen is None else seen.op
        call = Call(OpTraits(op, torch.autograd.backward), torch.autograd.backward, (), {})
        call.id, call.step = entry.id, entry.step
        if seen is not None:
            call.location, call.inputs, call.outputs = seen.location, seen.inputs, seen.outputs
        return call

    def _failed_in_backward(self, site: int, error: BaseException) -> None:
        entry = _Entry(0, site, 1, INTERCEPTOR.step, (), (), None)
        self.failed(self._call_of(entry), error, "its backward was not checked")

    def _table(self, entry: _Entry, call: Call, roles: tuple[str, str]) -> str:
        header = ["name", "shape", "dtype", "inf", "nan", "min", "max", "mean", "std", "norm"]
        rows = []
        described = (None, None) if entry.backward else (call.inputs, call.outputs)
        for role, pairs, parts in zip(roles, (entry.arriving, entry.leaving), described):
            named = labelled(parts, role) if parts is not None else []
            labels = [(label, part) for label, part in named if isinstance(part, TensorMeta)]
            for index, number in zip(pairs[::2], pairs[1::2]):
                label, meta = labels[index] if index < len(labels) else (f"{role}[{index}]", None)
                row = dict(zip(NAMES, self._rows.get(number, _UNKNOWN)))
                look = ["", ""] if meta is None else [str(tuple(meta.shape)), short(meta.dtype)]
                cells = [f"{row[k]:.6g}" for k in ("min", "max", "mean", "std", "norm")]
                rows.append([f"{call.op} {label}", *look, str(bool(row["inf"])), str(bool(row["nan"])), *cells])
        return console.table(header, rows)

    # -- results --------------------------------------------------------------------------------------

    def finish(self) -> None:
        self._send_and_land(0)
        with self._guard:
            self._ledger.close()
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
            count = len(flight["steps"]) // 8
            for entry in entries_of(flight["calls"], flight["steps"], [None] * count):
                op, location = sites[entry.site]
                phase, roles = _PHASES[entry.backward], _ROLES[entry.backward]
                for role, pairs in zip(roles, (entry.arriving, entry.leaving)):
                    for index, number in zip(pairs[::2], pairs[1::2]):
                        row = {"call_id": entry.id, "phase": phase, "role": role, "tensor": index}
                        if number in known:
                            found.append({**row, **known[number], "op": op, "location": location})
        return found


_UNKNOWN: Final = (0.0, 0.0, *[float("nan")] * 5)


def asked_for_infinity(inputs: Described) -> bool:
    """Whether a number among the arguments is infinite or no number (`x.masked_fill(mask, -inf)`)."""
    return any(part in ("inf", "-inf", "nan") for _, part in labelled(inputs, "") if isinstance(part, str))
