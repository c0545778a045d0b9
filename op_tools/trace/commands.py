"""`op_tools trace` and `op_tools diff`."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from ..settings import SettingsError
from .format import SUFFIX, files_of, rank_of, read, runs_in

_DESCRIPTION: Final = """\
Record the graph of a run, show it, read it from a log, put ranks together.

  op_tools trace [--steps A:B] [--to DIR] train.py ARGUMENTS   record: runs the script as it is
  op_tools trace show RUN [-v 0..3] [--only TEXT]              print the tree, as OneFlow's graph.debug does
  op_tools trace import LOG --to DIR                           the graph in a training log of OneFlow
  op_tools trace merge RUN --to FILE                           one file from those of all ranks
  op_tools diff A B [--html FILE]                              where two runs part, and what differs
"""
_LEVELS: Final = "0: modules, 1: and their tensors, 2: and operators, 3: and stacks, arguments and regions"


def main(
    arguments: Sequence[str], run: Callable[[list[str]], int], page: Callable[[Any, Path, bool], Path] | None = None
) -> int:
    """Entry point: `["trace", ...]` or `["diff", ...]`; `run` starts a script under a tool, `page` writes a page."""
    try:
        command, given = arguments[0], list(arguments[1:])
        if command == "diff":
            return _diff(given, page)
        actions = {"show": _show, "import": _import, "merge": _merge}
        if given[:1] and given[0] in actions:
            return actions[given[0]](given[1:])
        if not given or given[0] in ("-h", "--help"):
            print(_DESCRIPTION, end="")
            return 0 if given else 2
        if note := _misplaced(given):
            print(note, file=sys.stderr)
        return run(["OpTrace", *given])
    except (SettingsError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130


def _misplaced(given: Sequence[str]) -> str:
    """What to say of an option of ours behind the script, which gets it (`_misplaced(["t.py", "--steps", "0:1"])`)."""
    at = next((i for i, word in enumerate(given) if word == "-m" or word.endswith(".py")), len(given))
    for name, value in itertools.pairwise(given[at + 1 :]):
        if (name == "--steps" and re.fullmatch(r"\d*:\d*", value)) or (name == "--prints" and value in ("on", "off")):
            return f"op_tools: {name} {value} is behind the script, which gets it; before it, it says what is traced"
    return ""


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"op_tools {name}", description=description)


def _show(given: list[str]) -> int:
    parser = _parser("trace show", "Print a trace.")
    parser.add_argument("run", type=Path, help=f"a trace (*{SUFFIX}) or the folder of a run")
    parser.add_argument("-v", "--level", type=int, default=1, choices=range(4), help=_LEVELS)
    parser.add_argument("--only", default="", metavar="TEXT", help="only modules and operators with this in their name")
    parser.add_argument("--step", type=int, metavar="N", help="only operators of this step")
    parser.add_argument("--ranks", metavar="LIST", help="of these ranks, such as 0,2 or all (0)")
    parser.add_argument("--partial", action="store_true", help="also of a run that was stopped")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one line of JSON per operator")
    form.add_argument("--perfetto", action="store_true", help="for ui.perfetto.dev")
    form.add_argument("--model-explorer", action="store_true", help="for model-explorer")
    options = parser.parse_args(given)
    from . import exports, show
    from .graph import Graph

    _tell_newest(options.run)
    files = _chosen(options.run, options.ranks)
    level = None if options.json or options.perfetto or options.model_explorer else options.level
    nothing: list[str] = []

    def graphs() -> Iterator[Graph]:
        for file in files:
            graph = Graph(read(file, partial=options.partial))
            if missing := show.missing(graph, level, options.only, options.step):
                nothing.append(f"{file}: {missing}")
                if len(nothing) == len(files):  # another rank may have other modules
                    raise SettingsError(nothing[0])
            else:
                yield graph

    there = graphs()
    there = itertools.chain([next(there)], there)  # before anything is printed
    lines: Iterator[str]
    if options.perfetto:
        lines = exports.as_perfetto(there, options.only, options.step)
    elif options.model_explorer:
        lines = exports.as_model_explorer(there, options.only, options.step)
    elif options.json:
        lines = (line for graph in there for line in exports.as_json(graph, options.only, options.step))
    else:
        lines = (line for graph in there for line in show.lines(graph, options.level, options.only, options.step))
    for line in lines:
        print(line)
    return 0


def _tell_newest(run: Path) -> None:
    """Say which run is taken of a folder that has several (`_tell_newest(Path("op_trace_results"))`)."""
    if run.is_dir() and len(runs := runs_in(run)) > 1:
        print(f"{run} has {len(runs)} runs; this is the newest, {runs[-1].name}", file=sys.stderr)


def _chosen(run: Path, ranks: str | None) -> list[Path]:
    files = files_of(run)
    if ranks is None:
        return files[:1]
    if ranks == "all":
        return files
    words = [word.strip() for word in ranks.split(",")]
    if not all(re.fullmatch("[0-9]{1,9}", word) for word in words):
        raise SettingsError(f"--ranks {ranks}: give numbers of ranks with commas, such as 0,2, or all")
    wanted, there = {int(word) for word in words}, {rank_of(file) for file in files}
    if not wanted <= there:
        lacking, known = (", ".join(str(rank) for rank in sorted(some)) for some in (wanted - there, there))
        raise SettingsError(f"--ranks {ranks}: {run} has no rank {lacking}; it has {known}")
    return [file for file in files if rank_of(file) in wanted]


def _import(given: list[str]) -> int:
    parser = _parser("trace import", "Read the graph that OneFlow printed into a training log.")
    parser.add_argument("log", type=Path, help="the log")
    parser.add_argument("--to", type=Path, metavar="DIR", help="the folder of the trace (LOG.trace)")
    options = parser.parse_args(given)
    from .oneflow_log import import_log

    folder = options.to or Path(f"{options.log.stem}.trace")
    path, counts = import_log(options.log, folder)
    print(f"{path}: " + ", ".join(f"{count:,} {what}" for what, count in counts.items()))
    return 0


def _merge(given: list[str]) -> int:
    parser = _parser("trace merge", "Put the traces of all ranks of a run together, by logical tensor.")
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="the trace to write")
    parser.add_argument("--partial", action="store_true", help="also of a run that was stopped")
    options = parser.parse_args(given)
    from .merge import merged, write_merged

    _tell_newest(options.run)
    files = files_of(options.run)
    path = write_merged(merged([read(file, partial=options.partial) for file in files]), options.to)
    print(f"{path}: {len(files)} ranks")
    return 0


def _diff(given: list[str], page: Callable[[Any, Path, bool], Path] | None) -> int:
    parser = _parser("diff", "Align two runs and say where they part beyond rounding, and what differs.")
    parser.add_argument("first", type=Path, metavar="A", help="a trace or the folder of a run")
    parser.add_argument("second", type=Path, metavar="B", help="another one")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="both runs side by side, as a page")
    parser.add_argument("--open", action="store_true", help="open that page in the browser")
    parser.add_argument("--lines", type=int, default=12, metavar="N", help="lines of each list (12)")
    parser.add_argument("--partial", action="store_true", help="also of runs that were stopped")
    parser.epilog = "exit code: 0 no divergence, 1 the runs part or start from other values, 2 a mistake"
    options = parser.parse_args(given)
    if options.lines < 1:
        raise SettingsError(f"--lines {options.lines}: give how many lines of each list are shown, 1 or more")
    for run in dict.fromkeys((options.first, options.second)):
        _tell_newest(run)
    from .diff import compare

    found = compare(options.first, options.second, options.partial)
    if options.html is not None and page is not None:
        print(f"the page is {page(found, options.html, options.open)}", file=sys.stderr)
    if options.json:
        print(json.dumps(found.as_dict()))
    else:
        for line in found.lines(options.lines):
            print(line)
    return 1 if found.divergence is not None or found.given() else 0
