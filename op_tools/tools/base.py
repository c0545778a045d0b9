"""What all tools share: beginning and end, lists of operators, records, findings, the summary at stop."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from .. import settings
from ..call.description import Finding, Tensor, TensorMeta, labelled
from ..call.traits import OpTraits
from ..settings import OpFilter, SettingsError
from ..view import console, store
from ..watch.intercept import INTERCEPTOR, Call

_Self = TypeVar("_Self", bound="Tool")
_FINDING_COLUMNS = {
    "tool": "TEXT",
    "run": "INTEGER",
    "op": "TEXT",
    "kind": "TEXT",
    "message": "TEXT",
    "call_id": "INTEGER",
    "location": "TEXT",
}

_MOST_SITES = 20_000
_RUNS = itertools.count(1)  # not the id of the tool: a later one may have the same


class Tool:
    """A tool that works on operator calls between `start()` and `stop()`.

    >>> with op_tools.OpObserve(ops=["torch.add"]):  # doctest: +SKIP
    ...     torch.add(x, y)
    """

    name: ClassVar[str] = "Tool"
    prefix: ClassVar[str] = "OP_TOOL"
    transforms: ClassVar[bool] = False  # replaces how the operator runs, instead of watching it
    wants_backward: bool = False
    wants_backward_start: bool = False
    wants_pointers: ClassVar[bool] = True  # looks at the addresses of tensors; with a full console all do
    announces: ClassVar[bool] = False  # says "apply OpXHook on ..." for every call
    order: ClassVar[int] = 50  # lower ones see the call first and the result last
    columns: ClassVar[dict[str, str]] = {}

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
        self._failures: set[tuple[str, str]] = set()
        self._store: store.Store | None = None
        self.filter = OpFilter()
        self.view = console.View("off")
        self.calls: Counter[str] = Counter()
        self.findings_now: list[Finding] = []
        self.condition: Callable[..., Any] | None = None  # set by apply_feature
        self.only: Callable[[OpTraits], bool] | None = None  # set by apply_feature

    # -- what a tool does; subclasses override these --------------------------------------------------

    def prepare(self) -> None:
        """Read and validate settings, at start."""

    def before(self, call: Call) -> None:
        """The operator is about to run."""

    def after(self, call: Call) -> None:
        """The operator has run; `call.result` is what it returned."""

    def transform(self, call: Call, run: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """Run the operator in another way."""
        return run(call.args, call.kwargs)

    @property
    def wants_gradients(self) -> bool:
        """Whether `after_backward` looks at the gradients; where no tool does, its lists are empty."""
        return True

    def before_node(self, call: Call, node: int) -> Any:
        """A backward node of the call is about to run; `after_node` gets what this returns."""

    def after_node(self, call: Call, started: Any) -> None:
        """A backward node of the call has run; not called where `before_node` returned None."""

    def after_backward(self, call: Call, grad_outputs: list[Tensor | None], grad_inputs: list[Tensor | None]) -> None:
        """The backward pass of the call is complete."""

    def after_passes(self, graph_is_kept: bool) -> None:
        """Backward passes have ended and none is under way, whichever calls they were of."""

    def finish(self) -> None:
        """Read back, write out, at stop."""

    def summary(self) -> list[str]:
        """Facts for the summary at stop."""
        return []

    # -- beginning and end ----------------------------------------------------------------------------

    @property
    def hook(self) -> str:
        """The tool's name in apply and skip lines."""
        return f"{self.name}Hook"

    @property
    def active(self) -> bool:
        """Whether the tool is started (`tool.active`)."""
        return self._starts > 0

    def start(self: _Self) -> _Self:
        """Begin; settings are read now. Starting twice needs stopping twice (`tool.start()`)."""
        with self._lock:
            if self._starts == 0:
                self._pid = os.getpid()
                self.view = console.View(settings.console_level())
                self.filter = OpFilter.from_environment(self.prefix, self._ops, self._disable)
                self.prepare()
                self._store = store.current()
                self._add_row = self._store.table(self.table_name, {"run": "INTEGER", **self.columns})
                self._add_finding = self._store.table("findings", _FINDING_COLUMNS)
                self._run_key = next(_RUNS)
                self._failures.clear()
                self.calls = Counter()
                self.findings_now = []
                self._sites: dict[tuple[str, str, int, int], int] = {}
                INTERCEPTOR.add(self)
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
            INTERCEPTOR.remove(self)
        try:
            self.finish()
            if self._store is not None:
                self._store.flush()
        except Exception as error:
            self._report(Finding(self.name, "(end of run)", "tool-failure", _reason(error)))
        if self.only is None:
            self._say_summary()

    end = stop

    def step(self) -> None:
        """Count a training step by hand, where no optimizer does it (`tool.step()`)."""
        INTERCEPTOR.count_step()

    def __enter__(self: _Self) -> _Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- which calls ----------------------------------------------------------------------------------

    @property
    def gated(self) -> bool:
        """Whether each call must be asked about, besides its operator."""
        return (
            self.condition is not None
            or self._steps is not None
            or self._ranks is not None
            or self._max_calls is not None
        )

    @property
    def names_skips(self) -> bool:
        """Whether operators that are left alone are named on the console: only where a list was given."""
        return self.only is None and bool(self.filter.include or self.filter.exclude)

    def wants(self, traits: OpTraits) -> bool:
        """Whether the tool works on an operator at all; asked once per function."""
        if self.only is not None:
            return self.only(traits)
        return self.filter.matches(traits.name)

    def accepts(self, call: Call) -> bool:
        """Whether the tool works on this very call; asked only of gated tools."""
        if self._ranks is not None and settings.rank() not in self._ranks:
            return False
        if self._steps is not None and call.step not in self._steps:
            return False
        if self._max_calls is not None and self.calls[call.op] >= self._max_calls:
            return False
        if self.condition is not None:
            try:
                wanted = bool(self.condition(*call.args, **call.kwargs))
            except Exception as error:
                self.failed(call, error, "condition_func raised")
                wanted = False
            if not wanted:
                self.view.skip(self.hook, call.op)
            return wanted
        return True

    def announce(self, call: Call) -> None:
        """Count the call, and say `apply OpXHook on ...` where that is documented."""
        self.calls[call.op] += 1
        if self.announces or self.only is not None:
            self.view.apply(self.hook, call.op)

    # -- findings and records -------------------------------------------------------------------------

    @property
    def table_name(self) -> str:
        """The tool's table in the store."""
        return self.prefix.lower()

    def failed(self, call: Call, error: BaseException, what: str = "the tool failed on this operator") -> None:
        """A failure of the tool's own becomes a finding, once per operator; the training goes on."""
        key = (call.op, type(error).__name__)
        if key in self._failures:
            return
        self._failures.add(key)
        self._report(Finding(self.name, call.op, "tool-failure", f"{what}: {_reason(error)}", call.id, call.location))

    def found(self, call: Call, kind: str, message: str, once: bool = False) -> None:
        """Report something about a call; `once` keeps it to one report per operator and kind."""
        if once:
            if (call.op, kind) in self._failures:
                return
            self._failures.add((call.op, kind))
        self._report(Finding(self.name, call.op, kind, message, call.id, call.location))

    def _report(self, finding: Finding) -> None:
        if len(self.findings_now) < 10_000:
            self.findings_now.append(finding)
        if self._store is not None:
            self._add_finding(
                (
                    finding.tool,
                    self._run_key,
                    finding.op,
                    finding.kind,
                    finding.message,
                    finding.call_id,
                    finding.location,
                )
            )
        self.view.finding(finding)

    def site(self, call: Call) -> int:
        """Number of the call's place and signature in the store; its description is stored once."""
        inputs, outputs = call.inputs, call.outputs
        quick = (call.op, call.location, inputs.number, outputs.number)
        found = self._sites.get(quick)
        if found is None:
            assert self._store is not None
            key = (call.op, call.location, inputs.args, inputs.kwargs, outputs.args)
            found = self._store.site(key, call.op, call.location, lambda: describe_site(call))
            if inputs.number and outputs.number:
                if len(self._sites) >= _MOST_SITES:
                    self._sites.clear()
                self._sites[quick] = found
        return found

    def record(self, *row: Any) -> None:
        """Append one row to the tool's table."""
        self._add_row((self._run_key, *row))

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
            self.polish(row)
        return rows

    def polish(self, row: dict[str, Any]) -> None:
        """Turn one stored row into what users get."""

    def findings(self) -> list[Finding]:
        """What was found since the last start (`tool.findings()`)."""
        return list(self.findings_now)

    def to_pandas(self) -> Any:
        """The records as a DataFrame; needs pandas (`tool.to_pandas().groupby("op")`)."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_pandas() needs pandas: pip install pandas, or use records()") from None
        return pandas.DataFrame(self.records())

    def _repr_html_(self) -> str:
        rows = self.records()[:200]
        if not rows:
            return f"<p>{self.name}: no records</p>"
        header = [k for k in rows[0] if k != "described"]
        return console.html_table(header, ([row.get(k, "") for k in header] for row in rows))

    def __rich__(self) -> Any:
        from rich.table import Table

        rows = self.records()[:200]
        shown = Table(title=self.name)
        header = [k for k in rows[0] if k != "described"] if rows else []
        for column in header:
            shown.add_column(column)
        for row in rows:
            shown.add_row(*(str(row.get(k, "")) for k in header))
        return shown

    def _say_summary(self) -> None:
        total, ops = sum(self.calls.values()), len(self.calls)
        facts = [f"{total} calls of {ops} operators"]
        if ops:
            facts.append("most often: " + ", ".join(f"{op} {n}" for op, n in self.calls.most_common(5)))
        facts += self.summary()
        facts += self.filter.unused()
        shown = [f for f in self.findings_now if f.kind != "skipped"]
        facts.append(f"{len(shown)} findings" if shown else "nothing found")
        facts += [console.finding_line(f) for f in shown[:10]]
        if self._store is not None:
            facts.append(f"records in {self._store.path}")
            if self._store.failure is not None:
                facts.append(f"records could not all be written ({self._store.failure}); the rest was dropped")
            elif self._store.dropped:
                facts.append(f"{self._store.dropped} records over OP_TOOLS_MAX_RECORDS were dropped")
        self.view.say(console.summary_text(f"{self.name} summary", facts, [], []))


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:500]}"


def describe_site(call: Call) -> dict[str, Any]:
    """JSON-able description of a call's arguments and results."""
    return {
        "inputs": _plain(labelled(call.inputs, "inputs")),
        "outputs": _plain(labelled(call.outputs, "outputs")),
    }


def _plain(rows: list[tuple[str, TensorMeta | str]]) -> list[Any]:
    return [[label, part.as_dict() if isinstance(part, TensorMeta) else part] for label, part in rows]
