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
from ..call.description import Finding, Tensor
from ..call.traits import OpTraits
from ..settings import OpFilter, SettingsError
from ..view import console
from ..watch.call import Call
from ..watch.intercept import INTERCEPTOR
from .records import Records

_Self = TypeVar("_Self", bound="Tool")
_RUNS = itertools.count(1)  # not the id of the tool: a later one may have the same
_MAX_FINDINGS = 10_000
TOOLS: dict[str, type[Tool]] = {}  # all that are defined, by name


class Tool(Records):
    """A tool that works on operator calls between `start()` and `stop()`.

    A subclass with a `name` of its own is a tool of `op_tools run`; one with a `feature` is one of `apply_feature`.

    >>> with op_tools.OpObserve(ops=["torch.add"]):  # doctest: +SKIP
    ...     torch.add(x, y)
    """

    feature: ClassVar[str] = ""  # its name in `apply_feature`, if it has one
    run_options: ClassVar[dict[str, dict[str, Any]]] = {}  # of `op_tools run`: keyword of the tool, words for argparse
    transforms: ClassVar[bool] = False  # replaces how the operator runs, instead of watching it
    wants_backward: bool = False
    wants_backward_start: bool = False
    wants_pointers: ClassVar[bool] = True  # looks at the addresses of tensors; with a full console all do
    announces: ClassVar[bool] = False  # says "apply OpXHook on ..." for every call
    order: ClassVar[int] = 50  # lower ones see the call first and the result last

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
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

    def release(self) -> None:
        """Give back what `prepare` took: after `finish`, and where the tool could not start."""

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
                for mistake in settings.begin():
                    console.note(mistake)
                self.view = console.View(settings.console_level())
                self.filter = OpFilter.from_environment(self.prefix, self._ops, self._disable)
                self.prepare()
                try:
                    self._open(next(_RUNS))
                    self._reported.clear()
                    self.calls = Counter()
                    self.findings_now = []
                    INTERCEPTOR.add(self)
                except BaseException:
                    self.release()
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
            INTERCEPTOR.remove(self)
        try:
            self.finish()
            if self._store is not None:
                self._store.flush()
        except Exception as error:
            self._report(Finding(self.name, "(end of run)", "tool-failure", _reason(error)))
        finally:
            self.release()
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
        with self._counting:
            self.calls[call.op] += 1
        if self.announces or self.only is not None:
            self.view.apply(self.hook, call.op)

    # -- findings and records -------------------------------------------------------------------------

    def failed(self, call: Call, error: BaseException, what: str = "the tool failed on this operator") -> None:
        """A failure of the tool's own becomes a finding, once per operator; the training goes on."""
        if self._is_first(call.op, type(error).__name__):
            self._report(
                Finding(self.name, call.op, "tool-failure", f"{what}: {_reason(error)}", call.id, call.location)
            )

    def slowed(self, part: str, why: str) -> None:
        """A fast path is broken for good: report it once per run."""
        if self._is_first(part, "slow"):
            self._report(Finding(self.name, part, "slow", f"a slower way is used: {why}"))

    def _is_first(self, op: str, kind: str) -> bool:
        with self._counting:
            if (op, kind) in self._reported:
                return False
            self._reported.add((op, kind))
            return True

    def found(self, call: Call, kind: str, message: str, once: bool = False) -> None:
        """Report something about a call; `once` keeps it to one report per operator and kind."""
        if not once or self._is_first(call.op, kind):
            self._report(Finding(self.name, call.op, kind, message, call.id, call.location))

    def _report(self, finding: Finding) -> None:
        if len(self.findings_now) < _MAX_FINDINGS:
            self.findings_now.append(finding)
        self._add_finding(finding)
        self.view.finding(finding)

    def findings(self) -> list[Finding]:
        """What was found since the last start (`tool.findings()`)."""
        return list(self.findings_now)

    def _say_summary(self) -> None:
        facts = [f"{_counted(sum(self.calls.values()), 'call')} of {_counted(len(self.calls), 'operator')}"]
        if self.calls:
            facts.append("most frequent: " + ", ".join(f"{op} ({n})" for op, n in self.calls.most_common(5)))
        facts += self.summary()
        facts += self.filter.unused()
        shown = [f for f in self.findings_now if f.kind != "skipped"]
        facts.append(_counted(len(shown), "finding") if shown else "nothing found")
        facts += [console.finding_line(f) for f in shown[:10]]
        if self._store is not None:
            facts.append(f"records in {self._store.path}")
            if self._store.failure is not None:
                facts.append(f"records could not all be written ({self._store.failure}); the rest was dropped")
            elif self._store.dropped:
                facts.append(f"{self._store.dropped} records over OP_TOOLS_MAX_RECORDS were dropped")
        self.view.say(console.summary_text(f"{self.name} summary", facts, [], []))


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:500]}"
