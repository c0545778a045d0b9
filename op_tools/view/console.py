"""Everything the tools show on the console: a view on their data, the one place that prints."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, Final, TextIO

import torch

from .. import settings
from ..call.description import Described, Finding, TensorMeta, labelled, short
from ..call.recent import Recent

if TYPE_CHECKING:
    from rich.progress import Progress

# The column orders of the documented tables.
CAPTURE_COLUMNS: Final = ["name", "device", "dtype", "numel", "shape", "stride", "requires_grad", "layout", "data_ptr"]
DEFAULT_COLUMNS: Final = ["name", "shape", "stride", "numel", "dtype", "device", "requires_grad", "layout", "data_ptr"]
TIME_COLUMNS: Final = ["name", "forward_id", "forward_elasped", "backward_elasped", "unit"]
CAST_COLUMNS: Final = ["name", "target", "action", "config"]
_MAX_TEMPLATES: Final = 4 << 20  # characters
_PROGRESS_SECONDS: Final = 30.0  # between lines of progress that do not go to a terminal
_MAX_GROUPS: Final = 10_000
_MAX_TOLD_AT_ONCE: Final = 10  # findings in a run without a full console

LabelledRows = list[tuple[str, "TensorMeta | str"]]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A boxed table with centred cells.

    >>> print(table(["a"], [["1"]]))
    +---+
    | a |
    +---+
    | 1 |
    +---+
    """
    body = [list(row) for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(header, *body)]
    rule = "+" + "+".join("-" * (w + 2) for w in widths) + "+"
    lines = [rule, _line(header, widths), rule, *(_line(row, widths) for row in body)]
    if body:
        lines.append(rule)
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join([cell.center(width) for cell, width in zip(cells, widths)]) + " |"


def _cell(value: Any) -> str:
    if value is None:  # the stride of a tensor that has none
        return ""
    return short(value) if isinstance(value, torch.dtype) else str(tuple(value) if isinstance(value, tuple) else value)


def tensor_table(
    op: str, rows: LabelledRows, pointers: Sequence[int | str], columns: Sequence[str] = DEFAULT_COLUMNS
) -> str:
    """The table of a call's arguments; the `value` column appears where some argument is no tensor."""
    remaining = iter(pointers)
    header = [*columns, "value"] if any(not isinstance(part, TensorMeta) for _, part in rows) else list(columns)
    body = []
    for label, part in rows:
        cells = {"name": f"{op} {label}"}
        if isinstance(part, TensorMeta):
            cells |= {name: _cell(value) for name, value in part._asdict().items()}
            cells["data_ptr"] = str(next(remaining, ""))
        else:
            cells["value"] = part
        body.append([cells.get(column, "") for column in header])
    return table(header, body)


class TableCache:
    """Tables that differ only in addresses are laid out once; later ones are filled in."""

    def __init__(self) -> None:
        self._templates = Recent[Hashable, list[str]](_MAX_TEMPLATES)

    def render(
        self,
        key: Hashable,
        op: str,
        rows: Callable[[], LabelledRows],
        pointers: Sequence[int],
        columns: Sequence[str] = DEFAULT_COLUMNS,
    ) -> str:
        """The table of `rows()` with these addresses; `key` says which calls look the same."""
        texts = [str(p) for p in pointers]
        full_key = (key, tuple([len(t) for t in texts]))
        template = self._templates.get(full_key)
        if template is None:
            blank = tensor_table(op, rows(), ["\0" * len(t) for t in texts], columns)
            template = re.split("\0+", blank)
            self._templates.keep(full_key, template, len(blank))
        return template[0] + "".join([text + piece for text, piece in zip(texts, template[1:])])


def call_rows(inputs: Described, outputs: Described) -> LabelledRows:
    """Rows of the inputs, then of the outputs, labelled as documented."""
    return labelled(inputs, "inputs") + labelled(outputs, "outputs")


def emit(text: str) -> None:
    """Write a block to the standard output of now, so that redirection works."""
    _write(sys.stdout, text if text.endswith("\n") else text + "\n")


def _write(stream: TextIO | None, text: str) -> None:
    """Write what the stream can show; one that is closed, full or not there (pythonw, daemons) stops no training."""
    if stream is None:
        return
    try:
        stream.write(text)
    except UnicodeEncodeError:
        with contextlib.suppress(OSError, ValueError):
            encoding = getattr(stream, "encoding", None) or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    except (OSError, ValueError):
        pass


def print_error(text: str, who: str = "op_tools") -> None:
    """One line on stderr about a command that cannot be carried out (`print_error("there is no script x.py")`)."""
    _write(sys.stderr, f"{who}: {text}\n")


def note(text: str) -> None:
    """One line on stderr about something that takes a while, unless OP_TOOLS_CONSOLE=off (`note("compiling ...")`)."""
    if settings.read("OP_TOOLS_CONSOLE", settings.environment()).lower() != "off":
        _write(sys.stderr, f"op_tools: {text}\n")


class View:
    """What one tool shows, at the chosen level; `full` repeats each call, `summary` tells findings and the end."""

    _hinted: ClassVar[bool] = False

    def __init__(self, level: str) -> None:
        self.full = level == "full"
        self.on = level != "off"
        self.tables = TableCache()

    def skip(self, hook: str, op: str) -> None:
        """`skip OpXHook on <op>`: this call was left alone."""
        if self.full:
            emit(f"skip {hook} on {op}")

    def apply(self, hook: str, op: str) -> None:
        """`apply OpXHook on <op>`: the tool works on this call."""
        if self.full:
            emit(f"apply {hook} on {op}")

    def block(self, *lines: str, above: int = 0, below: int = 0) -> None:
        """A block of a single call, at level full, with so many blank lines above and below it."""
        if self.full:
            if not View._hinted:
                View._hinted = True
                if not settings.read_list("OP_TOOLS_CONSOLE"):  # nobody has chosen
                    note("every call is shown; OP_TOOLS_CONSOLE=summary shows findings and the summary alone")
            emit("\n" * above + "\n".join(lines) + "\n" * (below + 1))

    def say(self, *lines: str) -> None:
        """A message at the end or about the tool itself, at levels full and summary."""
        if self.on:
            emit("\n".join(lines))


def one_line(text: str) -> str:
    """Text from a file or a file's name as one line, without what moves a terminal's cursor (`one_line("a\\nb")`)."""
    return text if text.isprintable() else "".join([c if c.isprintable() else repr(c)[1:-1] for c in text])


def finding_line(finding: Finding, short: bool = False) -> str:
    """`[OpCapture] torch.add: disk full (train.py:3 f: ...)`; a short line ends with the file and line."""
    where = _file_and_line(finding.location) if short else finding.location
    op = "" if short and finding.message.startswith(finding.op) else f"{finding.op}: "
    return f"[{finding.tool}] {op}{finding.message}" + (f" ({one_line(where)})" if where else "")


def _file_and_line(location: str) -> str:
    first = location.split(" ", 1)[0]
    return first if ":" in first else location  # words, where no line of the user's makes the call


class FindingGroups:
    """Findings by operator, kind, phase and module: the first, how many, and the worst.

    >>> groups = FindingGroups()
    >>> [groups.add(Finding("OpX", "torch.add", "wrong", "off", n, size=n, phase="forward")) for n in (2, 9)]
    [True, False]
    >>> groups.lines()
    ['torch.add (forward): 2 times, first at call 2, worst at call 9 (excess 9)']
    """

    def __init__(self, shown: int = 10) -> None:
        self.count, self._shown = 0, shown
        self._groups: dict[Hashable, tuple[Finding, int, Finding]] = {}
        self._seen: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def add(self, finding: Finding) -> bool:
        """Count a finding; whether it is one of the first few of a new kind or operator, to be told at once."""
        with self._lock:
            self.count += 1
            key = (finding.op, finding.kind, finding.phase, finding.module)
            first, count, worst = self._groups.get(key, (finding, 0, finding))
            if count or len(self._groups) < _MAX_GROUPS:
                self._groups[key] = (first, count + 1, finding if finding.size > worst.size else worst)
            seen = len(self._seen)
            if seen < _MAX_TOLD_AT_ONCE:
                self._seen.add((finding.op, finding.kind))
            return len(self._seen) > seen

    def lines(self, details: bool = False) -> list[str]:
        """The groups as they appeared, the largest ones where there are many; `details` adds the worst of each."""
        with self._lock:
            groups = list(self._groups.values())
        kept = sorted(sorted(range(len(groups)), key=lambda n: -groups[n][1])[: self._shown])
        lines = []
        for first, count, worst in [groups[n] for n in kept]:
            times = f"{count:,} times" if count > 1 else "once"
            where = one_line(_file_and_line(first.location))
            if not first.size:  # its text says what it is
                found = first.message + (f" ({where})" if where else "")
                lines.append(f"{first.op}: {found}" + (f"; {times}" if count > 1 else ""))
                continue
            place = (f" ({first.phase})" if first.phase else "") + (f" in {first.module}" if first.module else "")
            excess = f" (excess {worst.size:.3g})" if math.isfinite(worst.size) else ""
            text = f"first at call {first.call_id}, worst at call {worst.call_id}{excess}"
            lines.append(f"{first.op}{place}: {times}, {text}" if count > 1 else f"{first.op}{place}: once{excess}")
            lines += [f"  {worst.message} ({one_line(worst.location)})"] * details
        if len(groups) > len(kept):
            lines.append(f"… and {len(groups) - len(kept):,} more groups: `op_tools records` lists them")
        return lines


def progress_bar(redirect_stdout: bool = True) -> Progress:
    """A bar on stderr; text that is printed meanwhile appears above it (`with progress_bar() as bar: ...`)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=redirect_stdout)


def wait_with_progress(what: str, total: int, left: Callable[[], int]) -> None:
    """A progress bar on stderr until nothing is left (`wait_with_progress("comparing", 100, count)`)."""
    with progress_bar() as progress:
        task = progress.add_task(what, total=total)
        while (remaining := left()) > 0:
            progress.update(task, completed=total - remaining)
            time.sleep(0.1)


class ProgressLine:
    """A line on stderr that says how far a run is: rewritten every second in a terminal, else a new one at times.

    >>> with ProgressLine(lambda: "step 3"):  # doctest: +SKIP
    ...     train()
    """

    def __init__(self, text: Callable[[], str]) -> None:
        self._text, self._stop = text, threading.Event()
        self._thread = threading.Thread(target=self._show, name="op_tools-progress", daemon=True)
        self._thread.op_tools_internal = True  # type: ignore[attr-defined]

    def __enter__(self) -> None:
        if settings.rank() == 0:
            self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(1.0)  # the line is gone before other text comes

    def _show(self) -> None:
        if sys.stderr is None:
            return
        started, terminal = time.monotonic(), sys.stderr.isatty()
        while not self._stop.wait(1.0 if terminal else _PROGRESS_SECONDS):
            line = f"op_tools: {time.monotonic() - started:.0f} s, {self._text()}"
            try:  # in a terminal the cursor goes back: what the program prints takes the line's place
                sys.stderr.write(f"\r\x1b[2K{line}\r" if terminal else f"{line}\n")
                sys.stderr.flush()
            except (OSError, ValueError):
                return
        if terminal:
            sys.stderr.write("\r\x1b[2K")


def html_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A plain HTML table for notebooks."""
    head = "".join(f"<th>{escape(str(h))}</th>" for h in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def rich_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    """A table of rich, for terminals (`rich.print(rich_table("OpObserve", rows))`)."""
    from rich.table import Table

    shown = Table(*(rows[0] if rows else ()), title=title)
    for row in rows:
        shown.add_row(*map(str, row.values()))
    return shown
