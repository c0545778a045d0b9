"""The op_tools command: run a script under a tool, replay captured operators, look at runs and their records."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from . import settings
from .call.description import Finding
from .view import settings_table
from .view.console import FindingGroups, note, one_line, table
from .view.store import read_only, tables_of

if TYPE_CHECKING:
    from .replay.outcome import Options


_EXAMPLES: Final = """\
examples:
  %(prog)s op_tools_results/op_capture_results --acc_check
      is every captured operator right on this machine's device? (compares with the capture and with the CPU)
  %(prog)s op_tools_results/op_capture_results/torch.Tensor.sort --sync_time_measure --run_times 3
      how long does it take, forward and backward?
  %(prog)s DIR --acc_check --jobs 4 --json report.json
      in four processes; the exit code says whether all passed, the file says everything
  %(prog)s DIR --acc_check --dtype bfloat16
      the same inputs in another precision
  %(prog)s DIR --acc_check --contiguous
      is it the layout? (the same values without strides, offsets and shared memory)

With --acc_check each capture is one of
  bit-identical           the captured results again, bit for bit (what the same device should give)
  right within rounding   other bits, but rounding explains every difference from the CPU in double precision
  wrong                   rounding does not explain it
  not comparable          with the reason: random numbers of another device, uninitialised memory, a collective
exit code: 0 all passed, 1 something is wrong or could not be read or run, 2 a mistake in the command, 130 Ctrl-C
"""
_SWITCHES: Final = ("--acc_check", "--sync_time_measure", "--only_run_forward", "--only_run_backward")
_YES: Final = frozenset({"1", "true", "yes", "on"})
_NO: Final = frozenset({"0", "false", "no", "off"})


def _replay_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "folder", type=Path, nargs="+", metavar="DIR", help="a capture, a folder of captures, or a whole result tree"
    )
    parser.add_argument("--acc_check", action="store_true", help="compare with the captured results and with the CPU")
    parser.add_argument("--sync_time_measure", action="store_true", help="measure forward and backward time")
    parser.add_argument("--run_times", type=int, default=1, metavar="N", help="how often each operator runs (1)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--only_run_forward", action="store_true", help="leave the backward pass out")
    backward = "time and compare the backward pass alone (forward runs once, before it)"
    only.add_argument("--only_run_backward", action="store_true", help=backward)
    parser.add_argument("--device", default=None, help="where to run; this machine's accelerator by default")
    parser.add_argument("--dtype", default=None, help="compute in this floating dtype instead of the captured ones")
    layout = parser.add_mutually_exclusive_group()
    layout.add_argument("--contiguous", action="store_true", help="make every argument contiguous, in its own memory")
    captured = "keep strides, offsets and shared memory (the default)"
    layout.add_argument("--as-captured", "--as_captured", action="store_true", help=captured)
    jobs = "run in N processes, which share the cores; a crash costs one capture (default: 1; 0 is this process)"
    parser.add_argument("--jobs", type=int, metavar="N", help=jobs)
    trust = "the captures are my own: run in this process, without limits, operators that trust their indices as well"
    parser.add_argument("--trust", action="store_true", help=trust)
    time_limit = "seconds that one capture may take in a process of its own, 0 for any number (300)"
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="S", help=time_limit)
    memory_limit = "memory that one capture may take (default: 2, or 32 times its files, at most half of what is free)"
    parser.add_argument("--memory-limit", type=float, default=0.0, metavar="GIB", help=memory_limit)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found to FILE")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write one line per capture to FILE")
    return parser


_EXPORTS: Final = """\
examples:
  %(prog)s op_tools_results --list
      which operators are in the stores, how often, with which ids
  %(prog)s op_tools_results --to exported --ops torch.nn.functional.linear --steps 0
  %(prog)s op_tools_results/op_capture_results/4711-2026-11-16-06-00-00.store --to exported --ids 37,40:50

The files are those of OP_CAPTURE_FORMAT=seed: OPERATOR/PROCESS/ID/TIME/input.pth, output.pth, grad_inputs.pth,
grad_outputs.pth and metadata. `op_tools replay` reads stores as they are and needs no export.
exit code: 0 all were written, 1 some could not be read, 2 a mistake in the command or a disk that is full, 130 Ctrl-C
"""


def _export_parser(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXPORTS
    sources = "a capture store, a folder with stores below it, or the path of calls in a store"
    parser.add_argument("source", type=Path, nargs="+", metavar="STORE", help=sources)
    parser.add_argument("--to", type=Path, metavar="DIR", help="the folder to write to")
    parser.add_argument("--ops", metavar="LIST", help="only these operators: names or regular expressions, with commas")
    parser.add_argument("--ids", metavar="LIST", help="only these calls: numbers or ranges A:B, with commas")
    parser.add_argument("--steps", metavar="LIST", help="only calls of these training steps, written in the same way")
    parser.add_argument("--list", action="store_true", help="show the calls by operator and write nothing")


def run_export(given: argparse.Namespace) -> int:
    """Turn the chosen calls of stores into files; the result is the exit code."""
    from .files.export import Choice, choose, export, overview, parse_ranges

    try:
        ids, steps = (
            None if text is None else parse_ranges(text, option)
            for text, option in ((given.ids, "--ids"), (given.steps, "--steps"))
        )
        choice = Choice(given.ops, ids, steps)
        if given.list:
            print(overview(choose(given.source, choice)))
            return 0
        if given.to is None:
            raise settings.SettingsError("--to DIR is missing: where are the files to go? (--list shows the calls)")
        done, failed = export(given.source, given.to, choice)
        print(done)
        return 1 if failed else 0
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what was written is complete", file=sys.stderr)
        return 130


def _plain_switches(arguments: Sequence[str]) -> list[str]:
    """`--only_run_forward True` is an older way to write `--only_run_forward`."""
    plain: list[str] = []
    for argument in arguments:
        if plain and plain[-1] in _SWITCHES and argument.lower() in _YES | _NO:
            if argument.lower() in _NO:
                plain.pop()
            continue
        plain.append(argument)
    return plain


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `op_tools` (`main(["replay", "op_tools_results"])`)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["run"]:  # what follows the script is the script's, whatever it looks like
        from .launch import main as run

        return run(given[1:], prog="op_tools run")
    if given[:1] in (["trace"], ["diff"]):
        from .launch import main as run
        from .report.commands import diff_page
        from .trace.commands import main as trace

        return trace(given, run, diff_page)
    if given[:1] in (["report"], ["ui"]):
        from .report.commands import main as report

        return report(given)
    parser = argparse.ArgumentParser(prog="op_tools", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run", help="run a script, as it is, under one or several tools", add_help=False)
    _replay_parser(commands.add_parser("replay", help="run captured operators again"))
    records = commands.add_parser("records", help="show what was recorded: tables and findings")
    records.add_argument("file", type=Path, help="a records file, a capture store, or a folder with records")
    records.add_argument("--all", action="store_true", help="of a folder, every records file under it")
    _export_parser(commands.add_parser("export", help="turn calls of a capture store into files"))
    commands.add_parser("losscmp", help="compare the losses of several runs", add_help=False)
    commands.add_parser("trace", help="record, show, import or merge the graph of a run", add_help=False)
    commands.add_parser("diff", help="align two traces: where the runs part, and what differs", add_help=False)
    commands.add_parser("report", help="the page of a run, as one HTML file", add_help=False)
    commands.add_parser("ui", help="the page of a run, live in the browser", add_help=False)
    listed = commands.add_parser("settings", help="list the environment variables, their values and defaults")
    listed.add_argument("--json", action="store_true", help="as JSON")
    listed.add_argument("--all", action="store_true", help="with internal ones")
    options, rest = parser.parse_known_args(_plain_switches(given))
    if options.command == "losscmp":
        from .losscmp import main as losscmp

        return losscmp(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "settings":
        return settings_table.show(options.json, options.all)
    if options.command == "export":
        return run_export(options)
    return run_replay(options) if options.command == "replay" else show_records(options.file, options.all)


def run_from_data(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `run_op_from_data.py` (`run_from_data(["DIR", "--acc_check"])`)."""
    parser = argparse.ArgumentParser(prog="run_op_from_data.py", description="Run captured operators again.")
    given = _plain_switches(sys.argv[1:] if arguments is None else arguments)
    return run_replay(_replay_parser(parser).parse_args(given))


def run_replay(given: argparse.Namespace) -> int:
    """Replay every capture under some folders; the result is the exit code."""
    from .files.captures import find
    from .replay.outcome import Options

    try:
        for mistake in settings.begin():
            note(mistake)
        dtype = settings.parse_dtype(given.dtype, "--dtype") if given.dtype else None
        options = Options(
            given.device,
            dtype,
            given.contiguous,
            given.acc_check,
            given.sync_time_measure,
            given.run_times,
            forward=not given.only_run_backward,
            backward=not given.only_run_forward,
            describe=settings.console_level() == "full" and (given.acc_check or given.sync_time_measure),
            trusted=given.trust,
            time_limit=given.time_limit,
            memory_limit=int(given.memory_limit * 2**30),
        )
        _check_usage(given, dtype)
        folders = list(dict.fromkeys(found for folder in given.folder for found in find(folder)))
        if not folders:
            named = ", ".join(str(f) for f in given.folder)
            raise settings.SettingsError(f"{named}: no capture under it")
        return _replay_folders(folders, options, given)
    except ValueError as error:  # a mistake of the user's, told in one line
        print(error, file=sys.stderr)
        return 2


def _check_usage(given: argparse.Namespace, dtype: torch.dtype | None) -> None:
    from .files.captures import exists

    for folder in given.folder:
        if not exists(folder):
            raise settings.SettingsError(f"{folder}: no such file or folder")
    if dtype is not None and not dtype.is_floating_point:
        raise settings.SettingsError(f"--dtype {given.dtype}: a floating dtype is needed, such as bfloat16 or float32")
    if given.jobs is not None and given.jobs < 0:
        raise settings.SettingsError(f"--jobs {given.jobs}: a number of processes is needed")
    for path in (given.json, given.csv):
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            raise settings.SettingsError(f"{path}: cannot be written (is its folder there?)")


def _replay_folders(folders: Sequence[Path], options: Options, given: argparse.Namespace) -> int:
    from .judge import verdict
    from .replay.pool import replay_all
    from .replay.report import Report, with_progress

    report = Report(options, settings.console_level())
    jobs = given.jobs if given.jobs is not None else 0 if given.trust else 1
    if options.acc_check:
        verdict.Rules.from_environment()  # mistakes in the variables that decide are errors now, not in each capture
    try:
        for outcome in with_progress(replay_all(folders, options, jobs, report.framework), len(folders)):
            report.add(outcome)
    except KeyboardInterrupt:
        report.interrupted = True
    report.finish(len(folders))
    if given.json:
        report.write_json(given.json, len(folders))
    if given.csv:
        report.write_csv(given.csv)
    return report.exit_code


def show_records(given: Path, everything: bool = False) -> int:
    """Print the tables of a records file, or of the newest in a folder (or all), and how many rows each has."""
    if not given.exists():
        print(f"{given}: no such file or folder", file=sys.stderr)
        return 2
    files = [given]
    if (given / "calls.jsonl").is_file():
        return run_export(argparse.Namespace(source=[given], ops=None, ids=None, steps=None, list=True))
    if given.is_dir():
        files = sorted((f for f in given.rglob("*.sqlite") if f.is_file()), key=lambda file: file.stat().st_mtime)
        if not files:
            print(f"{given}: no records (*.sqlite) under it", file=sys.stderr)
            return 2
        if not everything and len(files) > 1:
            print(f"the newest of {len(files)} files; --all shows them all", file=sys.stderr)
            files = files[-1:]
    return max(_show_file(file) for file in files)


def _show_file(file: Path) -> int:
    try:
        with contextlib.closing(read_only(file)) as connection:
            names = tables_of(connection)
            # rows are only ever added: the number of the last one is known without reading them all
            last = 'SELECT coalesce((SELECT max(rowid) FROM "{0}") - (SELECT min(rowid) FROM "{0}") + 1, 0)'
            rows = [[n, str(connection.execute(last.format(n.replace('"', '""'))).fetchone()[0])] for n in names]
            print(file)
            print(table(["table", "rows"], rows), flush=True)
            connection.row_factory = sqlite3.Row
            connection.text_factory = lambda text: text.decode(errors="replace")
            groups, shown = FindingGroups(shown=100), 0
            fields = [field.name for field in dataclasses.fields(Finding)]
            for found in connection.execute("SELECT * FROM findings LIMIT ?", (_MAX_FINDINGS,)):
                row, shown = dict(found), shown + 1  # files of earlier versions have fewer columns
                groups.add(Finding(**{name: row[name] for name in fields if row.get(name) is not None}))
            lines = groups.lines(details=True)
    except (sqlite3.Error, TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
        print(one_line(f"{file}: is not an op_tools records file, or damaged ({error})"), file=sys.stderr)
        return 2
    for line in lines:
        print(one_line(line))
    if shown == _MAX_FINDINGS:
        print(f"of the first {_MAX_FINDINGS:,} findings; the rest is in the table")
    return 0


_MAX_FINDINGS: Final = 50_000  # that are read for the overview


if __name__ == "__main__":
    sys.exit(main())
