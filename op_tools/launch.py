"""Runs an unmodified script or module under a tool: `op_tools run OpAutoCompare train.py --epochs 1`."""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from . import settings
from .settings import SettingsError
from .tools import all_tools
from .tools.base import Tool
from .view import console

FAIL_ON: Final = {"wrong": ("difference",), "overflow": ("overflow",), "any": ("*",)}
LAUNCHERS: Final = ("torch.distributed.run", "torch.distributed.launch")


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
    made.add_argument("--max-calls", type=int, metavar="N", help="only the first N calls of each operator")
    made.add_argument("--out", type=Path, metavar="DIR", help="where results are written (OP_TOOLS_RESULTS_DIR)")
    fails = (
        "exit code 1 if OpAutoCompare called something wrong, OpOverflowCheck met an overflow, or anything was found"
    )
    made.add_argument("--fail-on", choices=list(FAIL_ON), help=fails)
    made.add_argument("--no-ditorch", action="store_true", help="do not import ditorch first")
    made.add_argument("-m", dest="module", action="store_true", help="run a module; torch.distributed.run starts ranks")
    made.add_argument("script", help="the script to run, or the module with -m")
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
    if not options.module and not Path(options.script).is_file():
        console.print_error(f"there is no script {options.script} (a module is run with -m)")
        return 2
    if options.module and options.script in LAUNCHERS:
        return _run_ranks(options, list(sys.argv[1:] if arguments is None else arguments))
    if not options.no_ditorch:
        import ditorch  # noqa: F401  (CUDA code runs on the machine's accelerator from here on)
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = os.getcwd() if options.module else str(Path(options.script).resolve().parent)
    code = 0
    try:
        with settings.run_defaults(options.console), contextlib.ExitStack() as started:
            if options.out is not None:
                started.enter_context(_variable("OP_TOOLS_RESULTS_DIR", str(options.out)))
            for tool in tools:
                started.enter_context(tool)
            if tools[0].view.on and not tools[0].view.full:
                started.enter_context(console.ProgressLine(lambda: "; ".join(tool.progress() for tool in tools)))
            code = _run(options)
    except SettingsError as error:
        console.print_error(str(error))
        return 2
    return code or int(_failed(tools, options.fail_on))


def _run(options: argparse.Namespace) -> int:
    """Run the script; the result is its exit code."""
    try:
        if options.module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(options.script, run_name="__main__")
    except SystemExit as ended:
        if not isinstance(ended.code, int) and ended.code is not None:
            raise  # Python prints what it was given
        return ended.code or 0
    return 0


def _failed(tools: Sequence[Tool], fail_on: str | None) -> bool:
    kinds = FAIL_ON[fail_on] if fail_on else ()
    found = (finding.kind for tool in tools for finding in tool.findings())
    return any(kind != "skipped" and ("*" in kinds or kind in kinds) for kind in found)


def _run_ranks(options: argparse.Namespace, given: list[str]) -> int:
    """`op_tools run TOOL -m torch.distributed.run ... train.py`: ranks run under the tool, not the launcher."""
    from torch.distributed import run

    own = given[: len(given) - len(options.arguments) - 2]  # less -m and the launcher
    launch = run.get_args_parser().parse_args(options.arguments)
    before = options.arguments[: len(options.arguments) - len(launch.training_script_args) - 1]
    before = [word for word in before if word not in ("-m", "--module")]
    inner = ["-m"] if launch.module else []
    run.main([*before, "-m", "op_tools.launch", *own, *inner, launch.training_script, *launch.training_script_args])
    return 0


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


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
    common = {"ops": options.ops, "steps": _steps(options.steps), "max_calls": options.max_calls}
    return [known[name](**common, **{o: v for o, v in given.items() if o in known[name].run_options}) for name in names]


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
