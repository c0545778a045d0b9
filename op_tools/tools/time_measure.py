"""OpTimeMeasure: time of every operator, forward and backward, from device events and without a sync per op.

Where the backward clock listens, it keeps most times in C++; others wait here until the device has passed them.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from array import array
from collections import defaultdict, deque
from pathlib import Path
from threading import get_ident
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from .. import settings
from ..call.description import Described, Tensor, describe, labelled
from ..call.devices import accelerator_type, event_class
from ..call.traits import OpTraits
from ..view import console, store, timings
from ..watch.backward_clock import LIBRARIES, BackwardClock, Way
from ..watch.intercept import Call
from .base import Tool
from .light import noted

_READ_AT: Final = 1_024  # timings are read back when this many wait
_MAX_WAITING: Final = 8_192
_MAX_SAMPLES: Final = 4_096
_MAX_SHOWN: Final = 100_000  # rows of the table at the end; the CSV file has all


_MAX_KNOWN: Final = 100_000  # operators of sites


_Made = tuple[int, str, int, int, str]  # a call that was measured: its id, operator, site, step and device type


_Shown = tuple[Described, Described, str]  # what a full console shows of a call, and where it was made


class _Timing(NamedTuple):
    """A measured stretch whose length is known once the device has passed its last event."""

    made: _Made
    phase: str
    spans: tuple[Any, ...]  # first and last mark of each stretch, in turns
    host_start: int
    thread: int
    described: _Shown | None


class _Samples:
    """Times of one operator and phase: exact sums, and a bounded sample for the percentiles."""

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0
        self.values = array("d")
        self._stride = 1

    def extend(self, values: list[float]) -> None:
        """Add some (`samples.extend([0.5, 0.25])`)."""
        for start in range(0, len(values), _MAX_SAMPLES // 2):
            some = values[start : start + _MAX_SAMPLES // 2]
            self.values.extend(some[-self.count % self._stride :: self._stride])
            self.count += len(some)
            self.total += sum(some)
            if len(self.values) >= _MAX_SAMPLES:
                del self.values[1::2]
                self._stride *= 2

    def percentile(self, q: float) -> float:
        ordered = sorted(self.values)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


class OpTimeMeasure(Tool):
    """Time every operator of a run.

    >>> with op_tools.OpTimeMeasure() as timing:  # doctest: +SKIP
    ...     train_step()
    >>> timing.by_op()[0]                         # doctest: +SKIP
    {'name': 'torch.nn.functional.linear', 'phase': 'forward', 'calls': 17, 'total_ms': 1.9, ...}
    """

    name = "OpTimeMeasure"
    prefix = "OP_TIME_MEASURE"
    feature = "measure_op_time"
    order = 90  # closest to the kernel: the work of other tools is not measured
    wants_backward_start = True
    wants_pointers = False
    _clock: BackwardClock | None = None
    columns: ClassVar[dict[str, str]] = {
        "call_id": "INTEGER",
        "site": "INTEGER",
        "phase": "TEXT",
        "elapsed_ms": "REAL",
        "start_us": "REAL",
        "thread": "INTEGER",
        "step": "INTEGER",
    }

    def prepare(self) -> None:
        self._folder = settings.results_dir() / "op_time_measure_result"
        self.wants_gradients = self.view.full
        self._spans = object()  # key of the notes of a call whose backward pass is on its way
        self._waiting: deque[_Timing | str] = deque()  # times, and operators that were left alone
        self._unshown: deque[tuple[_Made, str, _Shown, float]] = deque()  # recorded by `read_late`
        self._free: dict[str, list[Any]] = {}  # device events that have been read, by device type
        self._samples: dict[tuple[str, str], _Samples] = {}
        self._op_names: dict[int, str] = {}  # operators by site
        self._times: timings.Times | None = None
        self._reading = threading.Lock()
        self._began_ns = time.perf_counter_ns()
        here = accelerator_type()
        can_listen = not self.view.full and self.only is None and (here == "cpu" or event_class(here) is not None)
        self._clock_device = here if can_listen else ""
        self._clock = BackwardClock.listening(here) if can_listen else None
        self.wants_backward = self._clock is None  # hooks on the nodes, where C++ does not listen
        self.csv_path: Path | None = None
        self.trace_path: Path | None = None

    # -- measuring ------------------------------------------------------------------------------------

    def light(self, traits: OpTraits) -> tuple[Any, ...] | None:
        clock, device_type = self._clock, self._clock_device
        if type(self) is not OpTimeMeasure or self.gated or clock is None or device_type == "cpu":
            return None
        shared = noted(self, traits.name, lambda _: self._read_when_due(), self._waiting, self._run_key)
        return (*shared, *clock.functions, device_type, traits.runs_kernel)

    def site(self, call: Call) -> int:
        number = super().site(call)
        if number not in self._op_names:
            if len(self._op_names) >= _MAX_KNOWN:
                del self._op_names[next(iter(self._op_names))]
            self._op_names[number] = call.op
        return number

    def _op_of(self, site: int) -> str:
        op = self._op_names.get(site)
        if op is None and self._store is not None:
            op = next(
                (str(found) for (found,) in self._store.tuples(f"SELECT op FROM sites WHERE site = {site}")), None
            )
        return op or ""

    def _mark(self, device_type: str) -> Any:
        event = None
        free = self._free.get(device_type)
        if free:
            try:
                event = free.pop()
            except IndexError:  # another thread took the last one
                pass
        if event is None:
            kind = event_class(device_type)
            if kind is None:
                return time.perf_counter_ns()
            event = kind(enable_timing=True)
        event.record()
        return event

    def before(self, call: Call) -> None:
        device_type = call.device.type
        clock = self._clock
        number = 0 if clock is None else clock.sequence()
        # two events next to each other would still be some microseconds apart, and cost as much
        idle = not call.traits.runs_kernel and event_class(device_type) is not None
        call.notes[self] = (device_type, time.perf_counter_ns(), 0 if idle else self._mark(device_type), number)

    def after(self, call: Call) -> None:
        started = call.notes.get(self)
        if started is None:
            return
        device_type, host_start, first, number = started
        last = 0 if first == 0 else self._mark(device_type)
        call.notes[self] = made = (call.id, call.op, self.site(call), call.step, device_type)
        clock = self._clock
        if clock is not None:
            end = clock.sequence()
            if end > number:
                elsewhere = Way.HOST if device_type == "cpu" else Way.NONE
                way = Way.EVENTS if device_type == self._clock_device != "cpu" else elsewhere
                clock.note(number, end, (made[0], made[2], made[3]), way)
        self.count(call)
        described = (call.inputs, call.outputs, call.location) if self.view.full else None
        self._wait_for(_Timing(made, "forward", (first, last), host_start, _thread(get_ident()), described))

    def before_node(self, call: Call, node: int) -> Any:
        made = call.notes.get(self)
        return None if made is None else (time.perf_counter_ns(), self._mark(made[-1]), made[-1])

    def after_node(self, call: Call, started: Any) -> None:
        host, first, device_type = started
        last = self._mark(device_type)
        earlier = call.notes.get(self._spans)
        call.notes[self._spans] = (host, first, last) if earlier is None else (*earlier, first, last)

    def after_backward(self, call: Call, grad_outputs: list[Tensor | None], grad_inputs: list[Tensor | None]) -> None:
        spans = call.notes.pop(self._spans, None)
        if spans is None:
            return
        described = None
        if self.view.full:
            sent = describe(tuple(g for g in grad_inputs if g is not None))
            described = (describe(tuple(grad_outputs)), sent, "")
        made = call.notes[self]
        self._wait_for(_Timing(made, "backward", spans[1:], spans[0], _thread(get_ident()), described))

    def after_backward_passes(self, graph_is_kept: bool) -> None:
        clock = self._clock
        if clock is None:
            return
        clock.passes(graph_is_kept)
        self._read_when_due()

    # -- reading back ---------------------------------------------------------------------------------

    def skipped(self, op: str) -> None:
        if self.view.full:  # the line waits for the times of earlier calls
            self._wait_for(op)

    def _wait_for(self, timing: _Timing | str) -> None:
        self._waiting.append(timing)
        self._read_when_due()

    def _read_when_due(self) -> None:
        clock = self._clock
        waiting = len(self._waiting) + (0 if clock is None else clock.counts().waiting)
        at_once = self.only is not None  # a feature on one operator shows at once
        if (at_once or waiting + len(self._unshown) >= _READ_AT) and self._reading.acquire(blocking=False):
            try:
                self._read(wait=at_once or waiting >= _MAX_WAITING)
            finally:
                self._reading.release()

    def read_late(self) -> None:
        """Read what is there, twice a second and on another thread: a run that is killed loses no more than that."""
        if self._reading.acquire(blocking=False):
            try:
                self._read(wait=False, show=False)
            finally:
                self._reading.release()

    def _read(self, wait: bool, show: bool = True) -> None:
        clock = self._clock
        if clock is not None:
            self._keep_heard(clock.read(wait))
        waiting, kept = self._waiting, list[tuple[_Timing, float]]()
        try:
            while waiting:
                timing = waiting[0]
                if isinstance(timing, str):
                    if not show:
                        return
                    self._keep(kept)
                    kept.clear()
                    waiting.popleft()
                    self.view.skip(self.hook, timing)
                    continue
                elapsed = self._elapsed(timing, wait)
                if elapsed is None:
                    return
                waiting.popleft()
                kept.append((timing, elapsed))
        finally:
            self._keep(kept, show)

    def _elapsed(self, timing: _Timing, wait: bool) -> float | None:
        """Milliseconds of a timing; None where the device is not that far."""
        spans: Any = timing.spans
        if type(spans[-1]) is int:
            nanoseconds: int = sum(spans[1::2]) - sum(spans[::2])
            return nanoseconds / 1e6
        for last in spans[1::2]:
            if wait:
                last.synchronize()
            elif not last.query():
                return None
        elapsed: float = sum([first.elapsed_time(last) for first, last in zip(spans[::2], spans[1::2])])
        self._free.setdefault(timing.made[-1], []).extend(spans)  # others may record them again from now on
        return elapsed

    def _keep(self, measured: list[tuple[_Timing, float]], show: bool = True) -> None:
        rows, times = list[tuple[Any, ...]](), defaultdict[Any, list[float]](list)
        for (made, phase, _, host_start, thread, described), elapsed in measured:
            number, op, site, step, _ = made
            times[op, phase].append(elapsed)
            start = (host_start - self._began_ns) / 1e3
            rows.append((number, site, phase == "backward", thread, step, elapsed, start))
            if described is not None:
                self._unshown.append((made, phase, described, elapsed))
        for key, values in times.items():
            self._sample(key, values)
        self._record(np.array(rows, timings.ROW))
        while show and self._unshown:
            self._show(*self._unshown.popleft())

    def _keep_heard(self, heard: Any) -> None:
        """Keep times that the clock has read."""
        rows = np.empty(len(heard), timings.ROW)
        for name in ("id", "site", "backward", "thread", "step", "elapsed"):
            rows[name] = heard[name]
        rows["start"] = (heard["began"] - self._began_ns) / 1e3
        times = defaultdict[Any, list[float]](list)
        for site, backward, value in zip(*(rows[name].tolist() for name in ("site", "backward", "elapsed"))):
            times[site, backward].append(value)
        for (site, backward), values in times.items():
            self._sample((self._op_of(site), timings.PHASES[backward]), values)
        self._record(rows)

    def _record(self, rows: Any) -> None:
        if not len(rows):
            return
        self._all_times().add(rows)
        phases = [timings.PHASES[backward] for backward in rows["backward"].tolist()]
        names = ("elapsed", "start", "thread", "step")
        columns = (rows["id"].tolist(), rows["site"].tolist(), phases, *(rows[name].tolist() for name in names))
        self.record_whole(list(zip(itertools.repeat(self._run_key), *columns)))

    def _all_times(self) -> timings.Times:
        assert self._store is not None
        if self._times is None:
            self._times = timings.Times(self._store, self._run_key)
        return self._times

    def _sample(self, key: tuple[str, str], values: list[float]) -> None:
        if key not in self._samples:
            self._samples[key] = _Samples()
        self._samples[key].extend(values)

    def _show(self, made: _Made, phase: str, described: _Shown, elapsed: float) -> None:
        number, op, site, *_ = made
        forward = phase == "forward"
        first, second, location = described
        names = ("inputs", "outputs", "inputs") if forward else ("grad_outputs", "grad_inputs", "gradients")
        shown = self.view.tables.render(
            site if forward else (op, first.args, second.args),
            op,
            lambda: labelled(first, names[0], names[2]) + labelled(second, names[1], names[2]),
            first.data_ptrs + second.data_ptrs,
        )
        times = console.table(
            ["name", "forward_id", f"{phase}_elasped", "unit"],
            [[op, str(number), f"{elapsed:.8f}", "ms"]],
        )
        if forward:
            self.view.block(location, shown, times, above=3, below=3)
        else:
            self.view.block(shown, times)

    # -- results --------------------------------------------------------------------------------------

    def release(self) -> None:
        self._rows = None
        if self._clock is not None:
            self._clock.stop()
            self._clock = None

    def finish(self) -> None:
        times = self._all_times()
        with self._reading:
            self._read(wait=True)
        if self._clock_device and LIBRARIES.failure:
            self.slowed("backward clock", f"hooks on autograd nodes measure backward times: {LIBRARIES.failure}")
        if self.view.full and self._samples:
            rows = list(itertools.islice(times.table(), _MAX_SHOWN))
            self.view.block(console.table(console.TIME_COLUMNS, rows))
        assert self._store is not None
        timings.write_totals(self._store, self._run_key, self.by_op())
        label = f"pid{settings.process_label()}_{store.time_label()}"
        self.csv_path = _unused(self._folder / f"op_elasped_info_{label}.csv")
        times.write_csv(self.csv_path)
        self.trace_path = self.csv_path.with_name(self.csv_path.name.replace("info", "trace")).with_suffix(".json")
        times.write_trace(self.trace_path)
        self.view.say(f"op elasped info saved to {settings.shown_path(self.csv_path)}")

    def by_op(self) -> list[dict[str, Any]]:
        """Calls, total, mean, p50, p99 and share by operator and phase, the costliest first.

        >>> timing.by_op()[0]["share"]  # doctest: +SKIP
        0.31
        """
        everything = sum(s.total for s in self._samples.values()) or 1.0
        rows = [
            {
                "name": op,
                "phase": phase,
                "calls": s.count,
                "total_ms": s.total,
                "mean_ms": s.total / s.count,
                "p50_ms": s.percentile(0.5),
                "p99_ms": s.percentile(0.99),
                "share": s.total / everything,
            }
            for (op, phase), s in self._samples.items()
        ]
        return sorted(rows, key=lambda row: -row["total_ms"])

    def summary(self) -> list[str]:
        rows = self.by_op()
        if not rows:
            return []
        formats = {"share": ".1%", **dict.fromkeys(("total_ms", "mean_ms", "p50_ms", "p99_ms"), ".4f")}
        body = [[format(value, formats.get(key, "")) for key, value in row.items()] for row in rows[:30]]
        facts = console.table(list(rows[0]), body).splitlines()
        if len(rows) > 30:
            facts.append(f"and {len(rows) - 30} more rows: by_op() has them all")
        if self.calls and not self._free and self._clock_device in ("", "cpu"):
            facts.append("times of the host clock (the device has no timing events)")
        shown = [settings.shown_path(path) for path in (self.csv_path, self.trace_path) if path is not None]
        words = ("times", "trace for Perfetto or chrome://tracing")
        return [*facts, *(f"{what} in {path}" for what, path in zip(words, shown))]


@functools.lru_cache(10_000)
def _thread(ident: int) -> int:
    """The number in the system of this very thread: asked once per thread, since asking is a system call."""
    return threading.get_native_id()


def _unused(path: Path) -> Path:
    candidates = (path.with_name(f"{path.stem}_{number}{path.suffix}") for number in itertools.count(1))
    return path if not path.exists() else next(other for other in candidates if not other.exists())
