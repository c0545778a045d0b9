"""Runs an unmodified script under a tool: `op_tools run OpAutoCompare train.py --epochs 1`."""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import settings
from .settings import SettingsError
from .tools import all_tools
from .tools.base import Tool
from .view import console


def parser(prog: str = "op_tools run") -> argparse.ArgumentParser:
    """The options of the command (`parser().parse_args(["OpObserve", "x.py"])`)."""
    tools = all_tools()
    made = argparse.ArgumentParser(
        prog=prog,
        description="Run a Python script, as it is, under one or several tools of op_tools.",
        epilog=f"example: {prog} OpAutoCompare --steps 0:2 train.py --batch 16",
    )
    made.add_argument("tool", help=f"one or several of {', '.join(tools)}, separated by commas")
    made.add_argument("--steps", metavar="A:B", help="only in these steps of the optimizer, A included, B not")
    made.add_argument("--ops", metavar="LIST", help="only these operators: names or regular expressions, with commas")
    for name, (owners, words) in _own_options(tools).items():
        made.add_argument(f"--{name}", **{**words, "help": f"{', '.join(owners)}: {words['help']}"})
    levels = settings.options("OP_TOOLS_CONSOLE")
    shown = "each call, findings and the summary (the default, unless OP_TOOLS_CONSOLE says otherwise), or nothing"
    made.add_argument("--console", choices=levels, help=shown)
    made.add_argument("--no-ditorch", action="store_true", help="do not import ditorch first")
    made.add_argument("script", help="the script to run")
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    return made


def main(arguments: Sequence[str] | None = None, prog: str = "python -m op_tools.launch") -> int:
    """Run the command; the exit code is the script's (`main(["OpObserve", "train.py"])`)."""
    options = parser(prog).parse_args(arguments)
    try:
        tools = _chosen_tools(options)
    except ValueError as error:
        console.print_error(str(error))
        return 2
    script = Path(options.script)
    if not script.is_file():
        console.print_error(f"there is no script {options.script}")
        return 2
    if not options.no_ditorch:
        import ditorch  # noqa: F401  (CUDA code runs on the machine's accelerator from here on)
    sys.argv = [str(script), *options.arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        with settings.run_defaults(options.console), contextlib.ExitStack() as started:
            for tool in tools:
                started.enter_context(tool)
            if tools[0].view.on and not tools[0].view.full:
                started.enter_context(console.ProgressLine(lambda: "; ".join(tool.progress() for tool in tools)))
            runpy.run_path(str(script), run_name="__main__")
    except SettingsError as error:
        console.print_error(str(error))
        return 2
    return 0


def _own_options(tools: dict[str, type[Tool]]) -> dict[str, tuple[list[str], dict[str, Any]]]:
    """Options of some tools only: whose they are, and the words for argparse."""
    found: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for tool in tools.values():
        for name, words in tool.run_options.items():
            found.setdefault(name, ([], words))[0].append(tool.name)
    return found


def _chosen_tools(options: argparse.Namespace) -> list[Tool]:
    known = all_tools()
    names = [name.strip() for name in options.tool.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"there is no tool {name!r}; choose from {', '.join(known)}")
    own = _own_options(known)
    given = {name: value for name in own if (value := getattr(options, name)) is not None}
    for option in given:
        owners = own[option][0]
        if not set(owners) & set(names):
            theirs = [f"--{name}" for name in known[owners[0]].run_options]
            what = f"{' and '.join(theirs)} {'belongs' if len(theirs) == 1 else 'belong'}"
            raise ValueError(f"{what} to {', '.join(owners)}, not to {', '.join(names)}")
    steps = _steps(options.steps)
    return [
        known[name](ops=options.ops, steps=steps, **{o: v for o, v in given.items() if o in known[name].run_options})
        for name in names
    ]


def _steps(text: str | None) -> range | None:
    if text is None:
        return None
    first, _, last = text.partition(":")
    try:
        start, stop = int(first or 0), int(last) if last else sys.maxsize
    except ValueError:
        raise ValueError(f"--steps {text!r}: write A:B, such as 0:2 for the first two steps") from None
    if not 0 <= start < stop:
        raise ValueError(f"--steps {text!r}: the range is empty")
    return range(start, stop)


if __name__ == "__main__":
    raise SystemExit(main())
