"""The teller: outcomes in the order of the calls, as records, on the console, as saved calls, and who is to blame.

Every comparison is an event; forward and backward of a call are two. An event knows which earlier events made
the values that it used, so that errors can be told from their consequences.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from .. import settings
from ..call.arguments import numbers_of
from ..call.description import Described, TensorMeta, describe, golden_pair, labelled
from ..call.parameters import leaf_of_row, leaves_of_record, name_of_row
from ..call.site import parameter_names
from ..files.saved import save_comparison
from ..judge.allowances import IN_TF32
from ..judge.pair import right_because
from ..judge.verdict import NOT_COMPARABLE, RIGHT, WEAK, WRONG, Judgement, Row
from ..view import console, rows, store
from ..view.rows import label_of
from .blame import Blame, report
from .coverage import Coverage
from .ladder import BACKWARD, FORWARD, ComparedCall, Job, asked
from .memory import PART as MEMORY
from .wrong_elements import picture_of, source_around

_MAX_SAVED: Final = 200  # wrong calls that are saved to disk
_MAX_EVENTS: Final = 200_000
_MAX_ADDRESSES: Final = 50_000
_MAX_BLAMES: Final = 10_000
_MAX_TRACED: Final = 10  # wrong events whose consequences are counted
_MAX_SHOWN: Final = 5_000  # rows of the table at the end
# columns after those of the comparison; the location stands behind the module
_CSV_END: Final = ("module", "phase", "step", "excess")


class Reporter(Protocol):
    """What the teller needs of its tool."""

    view: console.View

    def record_all(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Store some rows."""

    def found(self, call: Any, kind: str, message: str, once: bool = False, **more: Any) -> None:
        """Report something about a call."""

    def failed(self, call: Any, error: BaseException, what: str = ..., phase: str = ...) -> None:
        """Report a failure of the tool's own."""

    def note_wrong(self, *row: Any) -> None:
        """Store what is known of a wrong call; see `wrong_elements.COLUMNS`."""


class Teller:
    """Takes judged jobs in any order and tells them one by one in theirs; no lock is held while it does."""

    def __init__(self, tool: Reporter, background: Callable[[Callable[[], None]], None], standard: str = "ulp") -> None:
        self._tool, self._background, self._standard = tool, background, standard
        self._change = threading.Condition(threading.RLock())
        self._ready: dict[int, Job] = {}
        self.numbered = self.told = 0
        self._telling = False
        self.abandoned = False  # what is not judged yet is dropped
        self.lineage = Lineage()
        self.blames: list[Blame] = []
        self.verdicts: Counter[str] = Counter()
        self.not_allclose = 0  # comparisons that are right all the same
        self.known: Counter[tuple[str, str, str]] = Counter()  # operator, phase, and what explains its error
        self.coverage = Coverage()
        self._saved = self._noted = 0
        self._wrong_copies: dict[str, str] = {}  # by operator
        self.folder = settings.results_dir() / "op_capture_results"

    # -- the order ----------------------------------------------------------------------------------------

    def number(self) -> int:
        """The place of the next job in the order of telling."""
        with self._change:
            self.numbered += 1
            return self.numbered - 1

    def tell(self, job: Job, at_once: bool = True) -> None:
        """Tell a job when its turn comes; unless `at_once`, another thread saves and shows what is wrong."""
        with self._change:
            self._ready[job.number] = job
            if self._telling or self.told not in self._ready:
                return
            self._telling = True
        self._tell_ready(at_once)

    def _tell_ready(self, at_once: bool = True) -> None:
        try:
            while True:
                with self._change:
                    job = self._ready.get(self.told)
                    if job is None:
                        self._stop_telling()
                        return
                    if not at_once and (job.golden is not None or job.error is not None):
                        break  # there may be files to write: not on the run's thread
                    del self._ready[self.told]
                    self.told += 1
                try:
                    if not self.abandoned or job.judgement is not None:
                        self._tell(job)
                    else:
                        self.coverage.miss(job.live, job.phase, "interrupted")
                except Exception as error:
                    self._tool.failed(job.live, error)
                finally:  # let go of all its tensors
                    job.before = job.snapshot = job.golden = job.fetcher = job.grads = None
                    job.values, job.args, job.kwargs = (), (), {}
                    job.done.set()
            self._background(self._tell_ready)
        except BaseException:  # Ctrl-C in the run's thread: others go on with the rest
            self._stop_telling()
            raise

    def _stop_telling(self) -> None:
        with self._change:
            self._telling = False
            self._change.notify_all()

    def wait(self) -> None:
        """Wait until nothing is being told."""
        with self._change:
            while self._telling:
                self._change.wait(1.0)

    def summary(self, left_out: Mapping[Hashable, int], notes: Sequence[str], compiled: str = "") -> list[str]:
        """What was compared and what was not, these notes where they say something, and who is to blame."""
        lines = [f"THE DEVICE'S COPIES ARE WRONG: {op}: {what}" for op, what in self._wrong_copies.items()]
        lines += self.coverage.describe(self.verdicts[WRONG], left_out, compiled)
        if self.not_allclose:
            why = right_because(self._standard)
            saves = "OP_AUTOCOMPARE_STANDARD=seed saves these as well"
            lines.append(f"{self.not_allclose} not allclose but {why} ({saves})")
        lines += [f"{op} ({phase}): {count} results {note}" for (op, phase, note), count in self.known.most_common()]
        lines += [note for note in notes if note]
        if self.abandoned:
            lines.append("interrupted: comparisons that were still queued were dropped")
        return lines + report(self.blames, self.lineage, self.coverage.compared_by_op())

    # -- one job ------------------------------------------------------------------------------------------

    def copies_are_wrong(self, op: str, what: str) -> None:
        """Copies that the tool makes show that an operator is wrong: it is the first one to be blamed."""
        self._wrong_copies[op] = what
        self.blames.insert(0, Blame(-1, 0, op, FORWARD, f"{op}: {what}", math.inf))

    def skip(self, call: Any, reason: str, phase: str = FORWARD) -> None:
        """A call that cannot be compared, and why."""
        self.coverage.miss(call, phase, reason)
        self._tool.found(call, "skipped", f"not comparable: {reason}", once=True)

    def _tell(self, job: Job) -> None:
        live, judgement, call = job.live, job.judgement, job.call
        assert isinstance(call, ComparedCall)
        if job.error is not None:
            self._tool.failed(live, job.error, phase=job.phase)
            return
        if judgement is None:
            return
        if judgement.verdict == NOT_COMPARABLE and not judgement.rows:
            self.skip(live, judgement.reason, job.phase)
            return
        if judgement.verdict == WRONG:
            judgement = _with_parameters(job, judgement)
        elif judgement.verdict == RIGHT and False in [row.allclose for row in judgement.rows]:
            self.not_allclose += 1
        self.verdicts[judgement.verdict] += 1
        phase = BACKWARD if call.in_backward else job.phase
        for row in judgement.rows:
            if row.verdict == WEAK:
                self.known[call.op, phase, row.reason] += 1
            elif IN_TF32 in row.error_info:
                self.known[call.op, phase, IN_TF32] += 1
        known = self.coverage.keys.young.get((call.op, call.numbers, BACKWARD if call.traits.by_engine else job.phase))
        if known is not None:
            self.coverage.compared[known] += 1
        else:
            self.coverage.add(live, job.phase, call.kind)
        which, where = (call.id, call.record_site, phase), (call.site.module, call.site.step)
        self._tool.record_all(
            [(*which, label_of(*row[:3]), *row[rows.FIRST : rows.END], *where, row[rows.END]) for row in judgement.rows]
        )
        if job.golden is not None and self._tool.view.full:
            self._show(job, judgement)
        if judgement.verdict == WRONG:
            self._blame(job, call, judgement, phase)

    def _blame(self, job: Job, call: ComparedCall, judgement: Judgement, phase: str) -> None:
        wrong = sorted((r for r in judgement.rows if r.verdict == WRONG), key=lambda r: -r.excess)
        worst = wrong[0]
        own_name = name_of_row(call.function, call.op, job.live.inputs, worst.part, worst.index)
        if own_name and worst.part == "grad_input":
            own_name += worst.label.removeprefix(call.op).replace(" grad", " (grad") + ")"
        name, folder = f"{call.op} {own_name}" if own_name else worst.label, ""
        if self._saved < _MAX_SAVED and job.golden is not None and worst.part != MEMORY:
            self._saved += 1
            folder = self._save(job, call, [row for row in wrong if row.part != MEMORY])
        if len(self.blames) < _MAX_BLAMES:
            reason = f"{name}: {worst.reason}"
            where = (*call.site[:3], folder, worst.part == MEMORY)
            self.blames.append(Blame(job.event, call.id, call.op, phase, reason, worst.excess, *where))
        self._note(job, call, worst, name, phase, folder)
        where_in_model = f" in module {call.site.module}" if call.site.module else ""
        message = f"{name} is wrong{where_in_model}: {worst.reason}{'' if worst.part == MEMORY else worst.size}"
        self._tool.found(job.live, "difference", message, phase=phase, module=call.site.module, size=worst.excess)

    def _note(self, job: Job, call: ComparedCall, worst: Row, name: str, phase: str, folder: str) -> None:
        """Keep the lines around a wrong call and a picture of its errors, of as many calls as are saved."""
        self._noted += 1
        if self._noted > _MAX_SAVED:
            return
        location, module, step, *_ = call.site
        about = (job.event, call.id, call.op, phase, name, worst.reason, worst.excess, location, module, step, folder)
        self._tool.note_wrong(*about, source_around(location), picture_of(job, worst))

    def consequences(self) -> list[tuple[int, bool, int]]:
        """Of the first wrong events: whether wrong results went into them, and how many later ones they reached."""
        events, first = {b.event for b in self.blames}, sorted(self.blames, key=lambda b: b.event)[:_MAX_TRACED]
        lineage = self.lineage
        return [(b.event, bool(lineage.ancestors_among(b.event, events)), lineage.reached_by(b.event)) for b in first]

    def _save(self, job: Job, call: ComparedCall, wrong: Sequence[Row]) -> str:
        """The saved call, both sides, and a script that repeats it; what cannot be saved is left out."""
        result, live = job.golden, job.live
        assert result is not None
        if result.source.draws:  # another run draws other numbers
            wrong = [row._replace(bound=None) for row in wrong]
        stamp = call.notes.setdefault("stamp", store.time_label())
        folder = self.folder / call.op / settings.process_label() / "autocompare" / str(call.id) / stamp
        device: dict[str, Any] = {"input": (result.source.args, result.source.kwargs)}
        if job.phase == FORWARD:
            device["output"] = job.values[2]
            reference: dict[str, Any] = {"input": result.inputs_after, "output": result.outputs}
        else:
            device["grad_outputs"], device["grad_inputs"] = map(tuple, job.values)
            reference = {"grad_inputs": tuple(asked(result.grad_inputs or (), job.unasked))}
        files = save_comparison(folder, call, device, reference, wrong, *map(_devices_of, (live.inputs, live.outputs)))
        self._tool.view.block(*[f"{settings.shown_path(path)} saved" for path in files])
        return str(settings.shown_path(folder))

    def write_table(self, records: store.Store, table: str, run: int, shown: bool) -> Path:
        """Write all rows of a run to a CSV file, and show them where the console is full."""
        folder = self.folder.with_name("op_autocompare_result")
        path = folder / f"op_autocompare_info_pid{settings.process_label()}_{store.time_label()}.csv"
        columns = ", ".join([*_CSV_END, *rows.SQL])
        query = f"SELECT call_id, site, {columns} FROM {table} WHERE run = ? ORDER BY rowid"
        end = 2 + len(_CSV_END)
        if self._tool.view.full and shown:
            some = records.tuples(f"{query} LIMIT {_MAX_SHOWN}", (run,))
            body = [[str(row[0]), *rows.console_cells(row[end:])] for row in some]
            if body:
                self._tool.view.block(console.table(["forward_id", *rows.CONSOLE], body))
        names, line = _ParameterNames(records), rows.csv_line
        places = {site: store.quoted_cell(where) for site, where in records.tuples("SELECT site, location FROM sites")}
        lines = (
            f"{row[0]},{line(row[end:])},{store.quoted_cell(row[2] or '')},{places.get(row[1], '')},"
            f"{row[3]},{'' if row[4] is None else row[4]},{'' if row[5] is None else row[5]},"
            f"{names.of(row[1], row[end])}\r\n"
            for row in records.stream(query, (run,))
        )
        header = ["forward_id", *rows.CSV, "module", "location", *_CSV_END[1:], "parameter"]
        store.write_csv_lines(path, header, lines)
        return path

    def _show(self, job: Job, judgement: Judgement) -> None:
        live, result = job.live, job.golden
        assert result is not None
        if job.phase == FORWARD:
            golden = describe(*result.inputs_after), describe((result.outputs,))
            cpu_inputs, cpu_outputs = golden_pair(live.inputs, live.outputs, golden)
            parts = [
                (live.inputs, "inputs"),
                (live.outputs, "outputs"),
                (cpu_inputs, "inputs(cpu)"),
                (cpu_outputs, "outputs(cpu)"),
            ]
        else:
            sent, found = job.values
            numbers = numbers_of(live.op, result.source.args, result.source.kwargs)
            parts = [
                (describe(tuple(g for g in sent if g is not None)), "grad_output(cpu)"),
                (job.on_device or describe(tuple(found)), "grad_inputs"),
                (describe(tuple(asked(result.grad_inputs or (), job.unasked))), "grad_inputs(cpu)"),
            ]
        shown: list[tuple[str, TensorMeta | str]] = []
        pointers: tuple[int, ...] = ()
        for described, what in parts:
            shown += numbers.labelled(described, what) if what.startswith("grad_inputs") else labelled(described, what)
            pointers += described.data_ptrs
        info = f"    cpu_dtype_cast_info(from:to): {result.cast_info}" if result.cast_info else ""
        self._tool.view.block(
            f"{live.op} forward_id: {live.id}{info}",
            live.location,
            console.tensor_table(live.op, shown, pointers),
            console.table(rows.CONSOLE, [row.cells() for row in judgement.rows]),
            *[f"{r.label}: {r.reason}" for r in judgement.rows if r.verdict == WRONG],
            above=3,
            below=3,
        )


def _devices_of(described: Described) -> list[str]:
    """The types of device of the tensors in a description, in order."""
    return [meta.device.type for _, meta in labelled(described, "") if isinstance(meta, TensorMeta)]


def _with_parameters(job: Job, judgement: Judgement) -> Judgement:
    """The judgement on a wrong call, with the names of the parameters whose values or gradients are wrong."""
    wrong = any(row.verdict == WRONG and row.part != "output" for row in judgement.rows)
    if not wrong or job.golden is None:
        return judgement
    names, source, live = parameter_names(), job.golden.source, job.live
    numbers, pointers = numbers_of(live.op, source.args, source.kwargs), live.inputs.data_ptrs

    def named(row: Row) -> Row:
        place = numbers.place(row.part, row.index) if row.verdict == WRONG else None
        if place is None or place >= len(pointers):
            return row
        name = names.get((pointers[place], tuple(source.tensors[place].shape)))
        return row if name is None else row._replace(reason=f"parameter {name}: {row.reason}")

    return dataclasses.replace(judgement, rows=tuple([named(row) for row in judgement.rows]))


class _ParameterNames:
    """The parameters that stored rows are about, by site and by the row's name; each is worked out once."""

    def __init__(self, records: store.Store) -> None:
        self._records = records
        self._sites: dict[int, tuple[str, str]] | None = None
        self._known: dict[tuple[int, str], str] = {}
        self._leaves: dict[int, Any] = {}

    def of(self, site: int, row: str) -> str:
        """The name as a cell of a CSV file, empty for results (`names.of(3, "torch.add grad[0]")`)."""
        name = self._known.get((site, row))
        if name is None:
            name = self._known[site, row] = store.quoted_cell(self._find(site, row))
        return name

    def _find(self, site: int, row: str) -> str:
        if self._sites is None:
            found = self._records.tuples("SELECT site, op, described FROM sites")
            self._sites = {number: (op, described) for number, op, described in found}
        match = re.search(r" (input|grad)(?:\[(\d+)\])?$", row)
        if match is None or site not in self._sites:
            return ""
        if site not in self._leaves:  # an optimizer has thousands of rows, and all of its parameters in each record
            op, described = self._sites[site]
            self._leaves[site] = leaves_of_record(op, json.loads(described)["inputs"])
        part = "grad_input" if match[1] == "grad" else "input"
        leaf = leaf_of_row(self._leaves[site], part, None if match[2] is None else int(match[2]))
        return "" if leaf is None else leaf.name


# --- blame --------------------------------------------------------------------------------------------


class Lineage:
    """Which event made which value, for as many events as fit a fixed memory.

    >>> lineage = Lineage()
    >>> first = lineage.made_from([], [100])
    >>> second = lineage.made_from([100], [200])
    >>> lineage.ancestors_among(second, {first}) == {first}
    True
    """

    def __init__(self, most: int = _MAX_EVENTS) -> None:
        self._lock = threading.Lock()
        self._most = most
        self._maker: dict[int, int] = {}  # address -> event
        self._parents = array("i")  # of all events that are known, one after the other, counted from the first
        self._ends = array("i")  # of each event: where its parents end
        self._first = 0  # the first event that is known

    def made_from(self, inputs: Iterable[int], outputs: Iterable[int], also: Sequence[int] = ()) -> int:
        """Number a new event that read and wrote these addresses; `also` are events it follows from."""
        with self._lock:
            maker = self._maker
            if len(self._ends) >= self._most:  # a long run: what lies far back is forgotten
                self._forget(self._most // 2)
            event = self._first + len(self._ends)
            parents = {maker[p] for p in inputs if p in maker}.union(also)
            self._parents.extend([parent - self._first for parent in parents if parent >= self._first])
            self._ends.append(len(self._parents))
            for pointer in outputs:
                if pointer:
                    maker[pointer] = event
            if len(maker) > _MAX_ADDRESSES:  # those that were written to longest ago are free by now, most likely
                self._maker = dict(sorted(maker.items(), key=lambda item: item[1])[_MAX_ADDRESSES // 2 :])
        return event

    def _forget(self, count: int) -> None:
        start = self._ends[count - 1]
        self._parents = array("i", [parent - count for parent in self._parents[start:]])
        self._ends = array("i", [end - start for end in self._ends[count:]])
        self._first += count
        self._maker = {address: event for address, event in self._maker.items() if event >= self._first}

    def _parents_of(self, event: int) -> Sequence[int]:
        at = event - self._first
        if not 0 <= at < len(self._ends):
            return ()
        return [self._first + parent for parent in self._parents[self._ends[at - 1] if at else 0 : self._ends[at]]]

    def ancestors_among(self, event: int, wanted: set[int]) -> set[int]:
        """Which of the wanted events had a part in this one's inputs (`lineage.ancestors_among(e, wrong)`)."""
        if not wanted:
            return set()
        oldest, seen, stack = min(wanted), {event}, [event]
        with self._lock:
            while stack:
                new = [p for p in self._parents_of(stack.pop()) if p >= oldest and p not in seen]
                seen.update(new)
                stack += new
        return (seen - {event}) & wanted

    def reached_by(self, event: int) -> int:
        """How many later events used values that come from this one (`lineage.reached_by(event)`)."""
        reached = {event}
        with self._lock:
            for later in range(max(event + 1, self._first), self._first + len(self._ends)):
                if not reached.isdisjoint(self._parents_of(later)):
                    reached.add(later)
        return len(reached) - 1
