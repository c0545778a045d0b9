"""Output of a replay: a table for each call, a summary, JSON and CSV."""

from __future__ import annotations

import functools
import inspect
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from .. import settings
from ..view import console, rows, store
from .captured import CapturedOp
from .outcome import ERROR, IDENTICAL, WRONG, Options, Outcome, Shown, counts

_MAX_FAILURES: Final = 50


class Report:
    """Shows outcomes as they come, at the level of `OP_TOOLS_CONSOLE`, and collects them for the summary.

    >>> report = Report(Options(), "full")  # doctest: +SKIP
    >>> report.add(outcome)                 # doctest: +SKIP
    """

    def __init__(self, options: Options, level: str) -> None:
        self.options = options
        self.outcomes: list[Outcome] = []
        self.interrupted = False
        self._full, self._on = level == "full", level != "off"
        self._forward_id = 0
        self._times: list[list[str]] = []
        self._began = time.perf_counter()

    def framework(self, name: str) -> None:
        """`ditorch.framework: ...`, the first line of a run."""
        if name and self._on:
            console.emit(f"ditorch.framework: {name}")

    def add(self, outcome: Outcome) -> None:
        """One more capture is done."""
        self.outcomes.append(outcome)
        if self._full:
            self._show(outcome)
        if outcome.status == ERROR:
            print(console.one_line(f"{outcome.folder}: {outcome.reason}"), file=sys.stderr)
        # the tables were shown; free their descriptions
        outcome.shown_forward = outcome.shown_backward = None

    # -- one capture ----------------------------------------------------------------------------------

    def _show(self, outcome: Outcome) -> None:
        console.emit(f"{outcome.folder}\n\n\n")
        runs = max(len(outcome.forward_ms), len(outcome.backward_ms), 1)
        for number in range(runs):
            self._forward_id += 1
            self._show_pass(outcome, "forward", outcome.shown_forward, outcome.forward_ms, number)
            self._show_pass(outcome, "backward", outcome.shown_backward, outcome.backward_ms, number)
            if self.options.time:
                self._times.append(_times_row(outcome, self._forward_id, number))
        if self.options.acc_check or not outcome.passed:
            console.emit(_conclusion(outcome) + "\n\n")

    def _show_pass(
        self, outcome: Outcome, which: str, shown: Shown | None, times: Sequence[float], number: int
    ) -> None:
        if shown is None:
            return
        lines: list[str] = []
        backward = which == "backward"
        compared = [row for row in outcome.rows if (row.part == "grad_input") == backward]
        if number == 0 and compared:
            cast = f"    cpu_dtype_cast_info(from:to): {shown.cast}" if shown.cast else ""
            lines += [f"{outcome.op} forward_id: {self._forward_id}{cast}", _place(outcome), _table(outcome, shown)]
            compared.sort(key=lambda row: row.part != "input")
            lines.append(console.table(rows.CONSOLE, [row.cells(replayed=True) for row in compared]))
        if number < len(times):
            if number or not lines:
                lines += [] if backward else [_place(outcome)]
                lines.append(_table(outcome, shown))
            header = ["name", "forward_id", f"{which}_elasped", "unit"]
            lines.append(console.table(header, [[outcome.op, str(self._forward_id), f"{times[number]:.8f}", "ms"]]))
        if lines:
            timed = number < len(times)
            above, below = ("", "") if backward else ("\n" * 3 * bool(timed and number), "\n" * (3 if timed else 1))
            console.emit(above + "\n".join(lines) + "\n" + below)

    # -- the end --------------------------------------------------------------------------------------

    def finish(self, total: int) -> None:
        """Show the table of times, the failures and a one-line result."""
        if self._full and self._times:
            console.emit(console.table(console.TIME_COLUMNS, self._times))
        if self.options.time:
            self._write_times()
        if self._on:
            console.emit(self.summary(total))

    def _write_times(self) -> None:
        folder = settings.results_dir() / "op_time_measure_result"
        path = folder / f"op_elasped_info_pid{settings.process_label()}_{store.time_label()}.csv"
        runs = [(o, run) for o in self.outcomes for run in range(max(len(o.forward_ms), len(o.backward_ms)))]
        times = [_times_row(outcome, number, run) for number, (outcome, run) in enumerate(runs, 1)]
        store.write_csv(path, console.TIME_COLUMNS, times)
        if self._on:
            console.emit(f"op elasped info saved to {settings.shown_path(path)}")

    def summary(self, total: int) -> str:
        """Operators by status, failures, totals (`print(report.summary(90))`)."""
        lines = []
        found = counts(self.outcomes)
        if len(self.outcomes) > 1:
            by_op: dict[str, list[Outcome]] = {}
            for outcome in self.outcomes:
                by_op.setdefault(outcome.op or "(unknown)", []).append(outcome)
            body = [
                [op, str(len(some)), *(str(counts(some).get(status, "")) for status in found)]
                for op, some in sorted(by_op.items())
            ]
            lines.append(console.table(["name", "captures", *found], body))
        failed = [o for o in self.outcomes if not o.passed]
        lines += [_failure(o) for o in failed[:_MAX_FAILURES]]
        if len(failed) > _MAX_FAILURES:
            lines.append(f"and {len(failed) - _MAX_FAILURES} more (--json or --csv has them all)")
        seconds = time.perf_counter() - self._began
        ran = sum(o.status != ERROR for o in self.outcomes)
        rate = f" in {seconds:.1f} s ({len(self.outcomes) / seconds:.1f} captures/s)" if seconds > 0 else ""
        parts = ", ".join(f"{count} {status}" for status, count in found.items())
        lines.append(f"{ran} of {total} captures ran{rate}" + (f": {parts}" if parts else ""))
        if self.interrupted:
            lines.append(f"interrupted: {total - len(self.outcomes)} captures were not reached")
        return "\n".join(lines)

    @property
    def exit_code(self) -> int:
        """0 when nothing is wrong, 1 when something is, 130 after Ctrl-C (`sys.exit(report.exit_code)`)."""
        if self.interrupted:
            return 130
        return 0 if all(o.passed for o in self.outcomes) else 1

    # -- files ----------------------------------------------------------------------------------------

    def write_json(self, path: Path, total: int) -> None:
        """Everything, as one JSON document (`report.write_json(Path("x.json"), 90)`)."""
        options = {"device": self.options.device, "dtype": self.options.dtype, "contiguous": self.options.contiguous}
        content = {
            "captures": total,
            "done": len(self.outcomes),
            "interrupted": self.interrupted,
            "passed": self.exit_code == 0,
            "seconds": time.perf_counter() - self._began,
            "counts": counts(self.outcomes),
            "options": {**options, "run_times": self.options.run_times},
            "outcomes": [outcome.as_dict() for outcome in self.outcomes],
        }
        with store.whole_file(path) as file:
            file.write(json.dumps(_finite(content), indent=1, default=str))

    def write_csv(self, path: Path) -> None:
        """One line for each capture, with its worst tensor (`report.write_csv(Path("x.csv"))`)."""
        store.write_csv(path, _CSV_COLUMNS, [_csv_row(o) for o in self.outcomes])


_CSV_COLUMNS: Final = [
    *("folder", "name", "status", "reason", "like_capture", "repeatable", "notes", "device", "location"),
    *("forward_elasped", "backward_elasped", "unit", *rows.REPLAY_CSV),
]


def _csv_row(outcome: Outcome) -> list[Any]:
    worst = max(outcome.rows, key=lambda r: (r.verdict == WRONG, r.excess), default=None)
    times = [min(t) if t else "" for t in (outcome.forward_ms, outcome.backward_ms)]
    facts: list[Any] = [str(outcome.folder), outcome.op, outcome.status, outcome.reason, outcome.like_capture]
    facts += [outcome.repeatable, "; ".join(outcome.notes), outcome.device, outcome.location, *times, "ms"]
    return [*facts, *([""] * len(rows.REPLAY_CSV) if worst is None else worst.replay_csv())]


def _times_row(outcome: Outcome, forward_id: int, number: int) -> list[str]:
    times = [f"{t[number]:.8f}" if number < len(t) else "" for t in (outcome.forward_ms, outcome.backward_ms)]
    return [outcome.op, str(forward_id), *times, "ms"]


def _failure(outcome: Outcome) -> str:
    where = f" ({console.one_line(outcome.location)})" if outcome.location else ""
    return f"{outcome.status}: {outcome.op or '?'}: {_reason(outcome)}{where}\n    {outcome.folder}"


def _reason(outcome: Outcome) -> str:
    prefix = f"{outcome.folder}/"
    return console.one_line("; ".join([outcome.reason.removeprefix(prefix), *outcome.notes]).strip("; "))


def _conclusion(outcome: Outcome) -> str:
    text = f"{outcome.op or outcome.folder}: {outcome.status}"
    if reason := _reason(outcome):
        text += f" ({reason})"
    if outcome.like_capture and outcome.status != IDENTICAL:
        text += f"\n    compared with the capture: {outcome.like_capture}"
    return text


def _table(outcome: Outcome, shown: Shown) -> str:
    return console.tensor_table(outcome.op, shown.rows, shown.pointers)


@functools.cache
def _run_line() -> str:
    lines, first = inspect.getsourcelines(CapturedOp.run_forward)
    number = next(i for i, line in enumerate(lines) if "self.result = " in line)
    return f"{inspect.getsourcefile(CapturedOp)}:{first + number} run_forward: {lines[number].strip()}"


def _place(outcome: Outcome) -> str:
    return _run_line() + (f"    captured at {console.one_line(outcome.location)}" if outcome.location else "")


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they are written as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def with_progress(outcomes: Iterator[Outcome], total: int) -> Iterator[Outcome]:
    """A progress bar on stderr while outcomes come, where stderr is a terminal (`with_progress(found, 90)`)."""
    if total < 2 or not sys.stderr.isatty():
        yield from outcomes
        return
    with console.progress_bar(redirect_stdout=sys.stdout.isatty()) as progress:  # text for a file is left alone
        task = progress.add_task("replaying", total=total)
        for outcome in outcomes:
            progress.update(task, advance=1, description=outcome.op or "replaying")
            yield outcome
