"""The op_tools command: replay captured operators, look at the records of a run."""

from __future__ import annotations

import argparse
import contextlib
import os
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path

from . import archive
from .console import table


def _replay_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("folder", type=Path, help="a capture, a folder of captures, or a whole result tree")
    parser.add_argument("--acc_check", action="store_true", help="compare with the CPU")
    parser.add_argument("--sync_time_measure", action="store_true", help="measure forward and backward time")
    parser.add_argument("--run_times", type=int, default=1, help="how often each operator runs")
    parser.add_argument("--only_run_forward", nargs="?", const=True, default=False, type=_yes, metavar="True")
    parser.add_argument("--only_run_backward", nargs="?", const=True, default=False, type=_yes, metavar="True")
    parser.add_argument("--device", default=None, help="where to run; this machine's accelerator by default")
    return parser


def _yes(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `op_tools` (`main(["replay", "op_tools_results"])`)."""
    parser = argparse.ArgumentParser(prog="op_tools", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _replay_parser(commands.add_parser("replay", help="run captured operators again"))
    records = commands.add_parser("records", help="show what a records file holds")
    records.add_argument("file", type=Path)
    commands.add_parser("losscmp", help="compare the losses of several runs", add_help=False)
    options, rest = parser.parse_known_args(arguments)
    if options.command == "losscmp":
        from .losscmp import main as losscmp

        return losscmp(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return run_replay(options) if options.command == "replay" else show_records(options.file)


def run_from_data(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `run_op_from_data.py` (`run_from_data(["DIR", "--acc_check"])`)."""
    parser = argparse.ArgumentParser(prog="run_op_from_data.py", description="Run captured operators again.")
    return run_replay(_replay_parser(parser).parse_args(arguments))


def run_replay(options: argparse.Namespace) -> int:
    """Replay every capture under a folder; the result is the exit code."""
    if options.run_times < 1:
        print(f"--run_times {options.run_times}: an operator must run at least once", file=sys.stderr)
        return 2
    if not options.folder.exists():
        print(f"{options.folder}: no such file or folder", file=sys.stderr)
        return 2
    device = _activate(options.device)
    from .replay import replay
    from .tools.auto_compare import OpAutoCompare
    from .tools.time_measure import OpTimeMeasure

    folders = archive.find(options.folder)
    if not folders:
        print(f"{options.folder}: no capture (input.pth) under it", file=sys.stderr)
        return 2
    if device == "cpu":
        os.environ.setdefault("OP_TOOLS_INCLUDE_CPU", "1")
    failures, differences = [], 0
    with contextlib.ExitStack() as stack:
        compared = stack.enter_context(OpAutoCompare()) if options.acc_check else None
        if options.sync_time_measure:
            stack.enter_context(OpTimeMeasure())
        for number, folder in enumerate(folders, 1):
            if len(folders) > 1:
                _progress(number, len(folders))
            print(folder)
            outcome = replay(
                folder,
                device,
                options.run_times,
                backward=not options.only_run_forward,
            )
            if not outcome.ran:
                failures.append(outcome)
                print(f"{folder}: {outcome.error}", file=sys.stderr)
        if compared is not None:
            differences = sum(f.kind == "difference" for f in compared.findings())
    print(f"{len(folders) - len(failures)} of {len(folders)} captures ran", end="")
    print(f", {differences} with differences" if options.acc_check else "")
    return 1 if failures or differences else 0


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        width = 30
        filled = width * done // total
        end = "\n" if done == total else ""
        print(f"\r[{'#' * filled}{'.' * (width - filled)}] {done}/{total}", end=end, file=sys.stderr, flush=True)


def _activate(device: str | None) -> str | None:
    """Let ditorch choose this machine's device where it is installed, and say which it is."""
    if device == "cpu":
        return device
    try:
        import ditorch

        print(f"ditorch.framework: {ditorch.framework}")
    except ImportError:
        pass
    return device


def show_records(file: Path) -> int:
    """Print the tables of a records file and how many rows each has."""
    if not file.exists():
        print(f"{file}: no such file", file=sys.stderr)
        return 2
    try:
        with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
            names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")]
            rows = [[n, str(connection.execute(f'SELECT count(*) FROM "{n}"').fetchone()[0])] for n in names]
            findings = connection.execute("SELECT tool, op, message, location FROM findings").fetchall()
    except sqlite3.Error as error:
        print(f"{file}: is no records file of op_tools ({error})", file=sys.stderr)
        return 2
    print(table(["table", "rows"], rows))
    for tool, op, message, location in findings[:100]:
        print(f"[{tool}] {op}: {message} ({location})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
