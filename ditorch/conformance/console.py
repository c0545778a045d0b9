"""The one place where conformance runs speak to the user: progress, summaries, single cases, differences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ditorch.conformance import pack
from ditorch.conformance.cases import Result
from ditorch.conformance.diff import Difference
from ditorch.conformance.native import FileSummary
from ditorch.conformance.summary import Summary

MOST_LISTED = 20


class View:
    """Writes to a terminal, or plain lines where there is none.

    Example: ``View().say("12 cases left")``
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(escape(text), highlight=False, soft_wrap=True)

    @contextmanager
    def progress(self, total: int | None, done: int = 0, noun: str = "cases") -> Iterator[Bar]:
        """A bar with rate, failures so far and time left (`with view.progress(100) as bar: bar.add(result)`)."""
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TextColumn("[red]{task.fields[failures]} failed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, refresh_per_second=4) as shown:
            task = shown.add_task(noun, total=total, completed=done, rate="", failures=0)
            yield Bar(shown, task, done, noun)

    def summary(self, summary: Summary, folder: Path) -> None:
        """Counts, rates, news against the ledger, and where the files are."""
        table = Table(title=f"PyTorch on {summary.about.get('backend')}, torch {summary.about.get('torch')}")
        for column in ("part", "right cases", "right as a whole: names", "names and dtypes"):
            table.add_column(column)
        for part in summary.parts:
            one = summary.only(part)
            table.add_row(part, str(one.by_case), str(one.rate("name")), str(one.rate("name", "dtype")))
        self.console.print(table)
        self.say("cases: " + ", ".join(f"{count:,} {status}" for status, count in summary.statuses.items()))
        if summary.coverage is not None:
            self.say(str(summary.coverage))
        self._listed("failures that the ledger does not know", summary.new_failures)
        self._listed("unexpected passes: the ledger says that they fail", summary.new_passes)
        self.say(f"{folder / 'index.html'} is the page; summary.csv, summary.json and badge.svg are beside it")
        self.say(f"{folder / pack.file_name(summary.about)} is the summary to hand on")

    def _listed(self, title: str, results: list[Result]) -> None:
        if not results:
            return
        self.say(f"{len(results):,} {title}:")
        for result in results[:MOST_LISTED]:
            self.say(f"  {result.status:8} {result.case}  {' '.join(result.message.split())[:160]}")
        if len(results) > MOST_LISTED:
            self.say(f"  … and {len(results) - MOST_LISTED:,} more")

    def case(self, result: Result) -> None:
        """One case in full."""
        counts = f"{result.samples} samples, {result.not_comparable} not comparable, {result.seconds:.2f} s"
        self.say(f"{result.case}: {result.status} ({counts})")
        for text in (result.message, result.note, *result.details):
            if text:
                self.say(text)

    def difference(self, found: Difference) -> None:
        """What changed between two runs."""
        for about, label in ((found.before, "before"), (found.after, "after")):
            self.say(f"{label}: {about.get('device')} with torch {about.get('torch')}, {about.get('date', 'no date')}")
        for name in ("lost", "gained", "changed"):
            changes = getattr(found, name)
            self.say(f"{len(changes):,} {name}")
            for case, old, new in changes:
                self.say(f"  {case}: {old} → {new}")
        self.say(
            f"{found.same:,} the same, {len(found.only_before):,} only before, {len(found.only_after):,} only after"
        )

    def native(self, files: Iterable[FileSummary], packed: Path, folder: Path) -> None:
        """Native test files, one line each."""
        table = Table(title="PyTorch's own test files")
        names = ("discovered", "passed", "failed", "skipped", "never_run")
        table.add_column("file")
        for name in names:
            table.add_column(name.replace("_", " "), justify="right")
        for file in files:
            table.add_row(file.file, *(f"{getattr(file, name):,}" for name in names))
        self.console.print(table)
        self.say(f"{folder / 'native_files.csv'} and native_cases.csv hold the same by file and by case")
        self.say(f"{packed} is the summary to hand on")

    def json(self, data: Any) -> None:
        """Data for another program."""
        import json

        self.console.file.write(json.dumps(data, indent=2) + "\n")


class Bar:
    """A running progress bar."""

    def __init__(self, shown: Progress, task: TaskID, done: int, noun: str) -> None:
        self._shown, self._task, self._noun = shown, task, noun
        self._before, self._done, self._failures = done, done, 0

    def add(self, failed: bool) -> None:
        """Count one case (`bar.add(result.failed)`)."""
        self._done += 1
        self._failures += failed
        elapsed = self._shown.tasks[self._task].elapsed or 0.0
        rate = (self._done - self._before) / elapsed if elapsed > 0 else 0.0
        self._shown.update(self._task, completed=self._done, failures=self._failures, rate=f"{rate:.1f} {self._noun}/s")
