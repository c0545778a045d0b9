"""What all tools share: beginning and end, lists of operators, records, findings, the summary at stop."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Any, ClassVar, Final, TypeVar

from .. import lifecycle, settings
from ..call.description import Described, Finding, TensorMeta, labelled
from ..call.devices import NO_DOUBLE
from ..call.filter import OpFilter
from ..call.recent import Recent
from ..call.traits import OpTraits
from ..compat import in_func_transform
from ..settings import SettingsError
from ..view import console, runs, store
from ..watch.compiled import Tally
from ..watch.hooks import Hooks
from ..watch.intercept import INTERCEPTOR, Call
from ..watch.room import is_out_of_memory, make_room

_Self = TypeVar("_Self", bound="Tool")
_RUNS = itertools.count(1)  # not the id of the tool: a later one may have the same
_MAX_FINDINGS = 10_000
_IN_TRANSFORM = "inside torch.func transforms"
_MAX_SITES = 5_000
_MAX_SHOWN = 200  # rows in a notebook
_FINDING_COLUMNS = {
    "tool": "TEXT",
    "run": "INTEGER",
    "op": "TEXT",
    "kind": "TEXT",
    "message": "TEXT",
    "call_id": "INTEGER",
    "location": "TEXT",
    "phase": "TEXT",
    "module": "TEXT",
    "step": "INTEGER",
    "size": "REAL",
}
TOOLS: dict[str, type[Tool]] = {}  # all that are defined, by name


class Shown(Hooks):
    """The records of a tool, and how notebooks and consoles show them."""

    _store: store.Store | None = None
    _run_key: int  # the number of this run in its table
    prefix: ClassVar[str] = "OP_TOOL"
    columns: ClassVar[dict[str, str]] = {}  # of its table in the store

    @property
    def table_name(self) -> str:
        """The tool's table in the store."""
        return self.prefix.lower()

    def records(self) -> list[dict[str, Any]]:
        """What was recorded since the last start, one dict per row (`tool.records()[0]["op"]`)."""
        if self._store is None:
            return []
        joined = "site" in self.columns
        what = "r.*, s.op, s.location, s.described" if joined else "r.*"
        join = "LEFT JOIN sites s ON s.site = r.site" if joined else ""
        rows = self._store.rows(
            f"SELECT {what} FROM {self.table_name} r {join} WHERE r.run = ? ORDER BY r.rowid", (self._run_key,)
        )
        for row in rows:
            row.pop("run", None)
            row.pop("site", None)
            self.decode_row(row)
        return rows

    def decode_row(self, row: dict[str, Any]) -> None:
        """Turn one stored row into what users get."""
        row.pop("described", None)

    def to_pandas(self) -> Any:
        """The records as a DataFrame; needs pandas (`tool.to_pandas().groupby("op")`)."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_pandas() needs pandas: pip install pandas, or use records()") from None
        return pandas.DataFrame(self.records())

    def answer_as_html(self) -> str:
        """What `op_tools report` says first about this run, as plain HTML (notebooks show it)."""
        if self._store is None:
            return ""
        from ..report.small import html_of_tool  # only notebooks need it

        self._store.flush()
        return html_of_tool(self._store.path, self._run_key, self.name)

    def _repr_html_(self) -> str:
        rows = self.records()[:_MAX_SHOWN]
        if not rows:
            return f"<p>{self.name}: no records</p>"
        return self.answer_as_html() + console.html_table(list(rows[0]), [list(row.values()) for row in rows])

    def __rich__(self) -> Any:
        return console.rich_table(self.name, self.records()[:_MAX_SHOWN])


class Tool(Shown):
    """A tool that works on operator calls between `start()` and `stop()`.

    A subclass with a `name` of its own is a tool of `op_tools run`; one with a `feature` is one of `apply_feature`.

    >>> with op_tools.OpObserve(ops=["torch.add"]) as tool:  # doctest: +SKIP
    ...     torch.add(x, y)
    >>> tool.records()[0]["op"]                              # doctest: +SKIP
    'torch.add'
    """

    feature: ClassVar[str] = ""  # its name in `apply_feature`, if it has one
    run_options: ClassVar[dict[str, dict[str, Any]]] = {}  # of `op_tools run`: keyword of the tool, words for argparse
    nothing_found: ClassVar[str] = ""  # what the summary of a tool that looks for something says where it found nothing
    announces: ClassVar[bool] = False  # says "apply OpXHook on ..." as a tool; the others do as features

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "after_backward_passes" in vars(cls):
            cls.hears_passes = True
        if "name" in vars(cls):
            known = TOOLS.get(cls.name, cls)
            if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise TypeError(f"{cls.__module__}: there is a tool {cls.name!r} in {known.__module__} already")
            TOOLS[cls.name] = cls

    def __init__(
        self,
        ops: Iterable[str] | str | None = None,
        disable: Iterable[str] | str | None = None,
        steps: Container[int] | None = None,
        ranks: Container[int] | None = None,
        max_calls: int | None = None,
    ) -> None:
        if max_calls is not None and max_calls < 0:
            raise SettingsError(f"{self.name}(max_calls={max_calls}): a number of calls cannot be negative")
        self._ops, self._disable = ops, disable
        self._steps, self._ranks, self._max_calls = steps, ranks, max_calls
        self._starts = self._pid = 0
        self._lock = threading.RLock()
        self._counting = threading.Lock()
        self._reported: set[tuple[str, str]] = set()
        self.filter = OpFilter()
        self.view = console.View("off")
        self.calls: Counter[str] = Counter()
        self._findings_now: list[Finding] = []
        self._groups = console.FindingGroups()
        self._unwatched: Counter[str] = Counter()
        self._last_unwatched = 0  # the id of a call
        self.compiled = ""  # runs of compiled code that the tool left alone, and their share; known at stop
        self.condition: Callable[..., Any] | None = None  # set by apply_feature
        self.only: Callable[[OpTraits], bool] | None = None  # set by apply_feature

    # -- what a tool does, besides the hooks; subclasses override these -------------------------------

    def prepare(self) -> None:
        """Read and validate settings, at start."""

    def finish(self) -> None:
        """Read back, write out, at stop."""

    def read_late(self) -> None:
        """Add rows that are known by now; the records' background thread asks twice a second."""

    def release(self) -> None:
        """Give back what `prepare` took: after `finish`, and where the tool could not start."""

    def summary(self) -> list[str]:
        """Facts for the summary at stop."""
        return []

    # -- beginning and end ----------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether the tool is started (`tool.active`)."""
        return self._starts > 0

    def start(self: _Self) -> _Self:
        """Begin; settings are read now. Starting twice needs stopping twice (`tool.start()`)."""
        with self._lock:
            if self._starts == 0:
                self._pid, self._starter = os.getpid(), threading.current_thread()
                lifecycle.finish_on_sigterm()
                for mistake in settings.begin():
                    console.note(mistake)
                self.view = console.View(settings.console_level())
                self.filter = OpFilter.from_environment(self.prefix, self._ops, self._disable)
                self.prepare()
                try:
                    self._run_key = next(_RUNS)
                    self._store = store.current()
                    self._new_rows = self._store.table(self.table_name, {"run": "INTEGER", **self.columns})
                    self._add_finding = self._store.table("findings", _FINDING_COLUMNS).append
                    runs.begin(self._store, self._run_key, self.name)
                    self._sites = Recent[tuple[str, str, int, int], int](_MAX_SITES)
                    self._reported.clear()
                    self.calls = Counter()
                    self._findings_now = []
                    self._groups = console.FindingGroups()
                    self._unwatched.clear()
                    self.compiled = ""
                    self._store.sources.append(self.read_late)
                    _active.add(self)
                    INTERCEPTOR.add(self)
                    self._began, self._compiled_before = time.perf_counter(), self._compiled_runs()
                except BaseException:  # Ctrl-C as well: nothing may go on watching that nobody can stop
                    self._detach()
                    self.release()
                    INTERCEPTOR.finished()
                    raise
            self._starts += 1
        return self

    def stop(self) -> None:
        """End; results are complete and files are written when this returns (`tool.stop()`)."""
        if self._starts and self._pid != os.getpid():  # a forked child: neither its threads nor its records
            self._starts = 0
            return
        with self._lock:
            if self._starts == 0:
                return
            self._starts -= 1
            if self._starts:
                return
            self._detach()
        with lifecycle.finishing():
            try:
                self._ask_for_compiled_code()
                self.finish()
                if self._store is not None:
                    self._store.flush()
            except Exception as error:
                self._report(Finding(self.name, "(end of run)", "tool-failure", _reason(error)))
            finally:
                self.release()
                INTERCEPTOR.finished()
            if self.only is None:
                self._say_summary()

    end = stop

    def _detach(self) -> None:
        INTERCEPTOR.remove(self)
        _active.discard(self)
        if self._store is not None and self.read_late in self._store.sources:
            self._store.sources.remove(self.read_late)

    def _ask_for_compiled_code(self) -> None:
        ran = self._compiled_runs(wait=True).since(self._compiled_before)
        self.compiled = ran.describe(time.perf_counter() - self._began)
        if self.compiled:
            self._report(
                Finding(self.name, "torch.compile", "skipped", f"compiled code is left alone: {self.compiled}")
            )

    def _compiled_runs(self, wait: bool = False) -> Tally:
        """Runs of compiled code that the tool leaves alone."""
        return INTERCEPTOR.regions.tally(wait)

    def step(self) -> None:
        """Count a training step by hand, where no optimizer does it (`tool.step()`)."""
        INTERCEPTOR.count_step()

    def __enter__(self: _Self) -> _Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    # -- which calls ----------------------------------------------------------------------------------

    @property
    def gated(self) -> bool:
        conditions = (self.condition, self._steps, self._ranks, self._max_calls)
        return any(condition is not None for condition in conditions)

    @property
    def names_skips(self) -> bool:
        """Whether operators that are left alone are named on the console: only where a list was given."""
        return self.only is None and bool(self.filter.include or self.filter.exclude)

    def wants(self, traits: OpTraits) -> bool:
        return self.filter.matches(traits.name) if self.only is None else self.only(traits)

    def wants_inside(self, traits: OpTraits) -> bool:
        # what a collective returns is not there yet, and a view may be of that
        return not (traits.collective or traits.view or self.filter.excludes(traits.name))

    def accepts(self, call: Call) -> bool:
        if self._ranks is not None and settings.rank() not in self._ranks:
            return False
        if self._steps is not None and call.step not in self._steps:
            return False
        if self._max_calls is not None and self.calls[call.op] >= self._max_calls:
            return False
        if self.condition is None or call.inside is not None:  # it was asked about the call around it
            return True
        try:
            if self.condition(*call.args, **call.kwargs):
                return True
        except Exception as error:
            self.failed(call, error, "condition_func raised")
        self.skipped(call.op)
        return False

    def count(self, call: Call) -> None:
        """Count the call, and say `apply OpXHook on ...` where that is documented."""
        with self._counting:
            self.calls[call.op] += 1
        if self.announces != (self.only is not None):
            self.view.apply(self.hook, call.op)

    # -- findings ---------------------------------------------------------------------------------------

    def failed(self, call: Call, error: BaseException, what: str = "the tool failed on this operator") -> None:
        """A failure of the tool's own becomes a finding, once per operator; the training goes on."""
        if is_out_of_memory(error):
            make_room([self], call)  # before the training itself gets none
        if in_func_transform():
            self.not_watched(call, _IN_TRANSFORM)
        elif self._is_first(call.op, type(error).__name__):
            self.found(call, "tool-failure", f"{what}: {_reason(error)}")

    def not_watched(self, call: Call, reason: str) -> None:
        """Count a call that the tool cannot work on; the summary says how many there were, and why."""
        with self._counting:
            self._unwatched[reason] += call.id != self._last_unwatched  # before and after it the tool may fail
            self._last_unwatched = call.id
        self.found(call, "skipped", f"not watched: {reason}", once=True)

    def slowed(self, part: str, why: str) -> None:
        """A fast path is broken for good: report it once per run."""
        if self._is_first(part, "slow"):
            self._report(Finding(self.name, part, "slow", f"a slower way is used: {why}"))

    def no_double(self) -> None:
        """Say, once per run, that the device has no float64 and float32 stands in for it."""
        if self._is_first("", "no float64"):
            self.view.say(NO_DOUBLE)

    def _is_first(self, op: str, kind: str) -> bool:
        with self._counting:
            known = len(self._reported)
            self._reported.add((op, kind))
            return len(self._reported) > known

    def found(self, call: Call, kind: str, message: str, once: bool = False, **more: Any) -> None:
        """Report something about a call; `once` keeps it to one report per operator and kind.

        `more` are further fields of the finding: `phase`, `module`, `size`.
        """
        if not once or self._is_first(call.op, kind):
            self._report(Finding(self.name, call.op, kind, message, call.id, call.location, step=call.step, **more))

    def _report(self, finding: Finding) -> None:
        if len(self._findings_now) < _MAX_FINDINGS:
            self._findings_now.append(finding)
        if self._store is not None:
            tool, *rest = dataclasses.astuple(finding)
            self._add_finding((tool, self._run_key, *rest))
        is_new = finding.kind != "skipped" and self._groups.add(finding)
        if self.view.full or is_new:
            self.view.say(console.finding_line(finding, short=not self.view.full))

    def findings(self) -> list[Finding]:
        """What was found since the last start (`tool.findings()`)."""
        return list(self._findings_now)

    def progress(self) -> str:
        """How far the run is, in one line (`"OpObserve: step 3, 1,204 calls"`)."""
        found = f", {_counted(self._groups.count, 'finding')}" if self._groups.count else ""
        return f"{self.name}: step {INTERCEPTOR.step}, {_counted(sum(self.calls.values()), 'call')}{found}"

    def _say_summary(self) -> None:
        try:
            facts = self.summary()
        except Exception as error:  # its files may be gone: the training goes on
            self._report(Finding(self.name, "(end of run)", "tool-failure", _reason(error)))
            facts = []
        facts.append(f"{_counted(sum(self.calls.values()), 'call')} of {_counted(len(self.calls), 'operator')}")
        if not self.calls and self._starter is not threading.main_thread():
            facts.append(f"started in thread {self._starter.name!r}: it and the threads that it starts are watched")
        if self.calls:
            facts.append("most frequent: " + ", ".join(f"{op} ({n:,})" for op, n in self.calls.most_common(5)))
        facts += [f"not watched, {reason}: {_counted(n, 'call')}" for reason, n in self._unwatched.items()]
        facts += self._compiled_fact()
        facts += self.filter.unused()
        facts.append(_counted(self._groups.count, "finding") if self._groups.count else self.nothing_found)
        facts += self._groups.lines()
        if self._store is not None:
            facts.append(f"records in {self._store.path}")
            if not self._store.is_there:
                facts.append("that file was removed during the run: its records are lost")
            elif self._store.failure is not None:
                facts.append(f"records could not all be written ({self._store.failure}); the rest was dropped")
            elif self._store.dropped:
                facts.append(f"{self._store.dropped} records over OP_TOOLS_MAX_RECORDS were dropped")
            runs.end(self._store, self._run_key, self.name, facts)
            self._store.flush()
        self.view.say(f"{self.name} summary", *(f"  {fact}" for fact in facts if fact))

    def _compiled_fact(self) -> list[str]:
        return [f"not watched, made by torch.compile: {self.compiled}"] if self.compiled else []

    # -- records --------------------------------------------------------------------------------------

    def site(self, call: Call) -> int:
        """Number of the call's place and signature in the store; its description is stored once."""
        inputs, outputs = call.inputs, call.outputs
        quick = (call.op, call.location, inputs.number, outputs.number)
        found = self._sites.young.get(quick)
        if found is None:
            found = self._sites.get(quick)
        if found is None:
            assert self._store is not None
            key = (call.op, call.location, inputs.args, inputs.kwargs, outputs.args)
            found = self._store.site(key, call.op, call.location, lambda: _as_json(inputs=inputs, outputs=outputs))
            if inputs.number and outputs.number:
                self._sites[quick] = found
        return found

    def record(self, *row: Any) -> None:
        """Append one row to the tool's table."""
        rows = self._new_rows
        rows.append((self._run_key, *row))
        if not len(rows) % store.ASK_EVERY and self._store is not None:
            self._store.flush_when_due(rows)

    def record_all(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Append many rows at once (`tool.record_all([(1, "forward"), (1, "backward")])`)."""
        run = self._run_key
        self.record_whole([(run, *row) for row in rows])

    def record_whole(self, added: list[tuple[Any, ...]]) -> None:
        """Append many rows that begin with the number of the run (`tool.record_whole([(run, 1, "forward")])`)."""
        waiting = self._new_rows
        waiting.extend(added)
        if len(waiting) % store.ASK_EVERY < len(added) and self._store is not None:
            self._store.flush_when_due(waiting)


def _as_json(**described: Described) -> str:
    rows = {
        name: ", ".join([f"[{_quoted(label)}, {_part_as_json(part)}]" for label, part in labelled(parts, name)])
        for name, parts in described.items()
    }
    return f"{{{', '.join([f'{_quoted(name)}: [{texts}]' for name, texts in rows.items()])}}}"


_quoted: Final = json.encoder.encode_basestring_ascii


@functools.lru_cache(4_096)
def _part_as_json(part: TensorMeta | str) -> str:
    return json.dumps(part.as_dict()) if isinstance(part, TensorMeta) else _quoted(part)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:500]}"


_active: set[Tool] = set()


def _stop_terminated() -> None:
    """Tools that nobody stops write their files all the same where SIGTERM ends the run."""
    for tool in list(_active) if lifecycle.is_terminated() else ():
        while tool.active:
            tool.stop()


lifecycle.at_exit(lifecycle.Exit.TOOLS, _stop_terminated)
