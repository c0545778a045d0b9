"""Runs an unmodified script under a tool: `op_tools run OpAutoCompare train.py --epochs 1`."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import op_tools

from .settings import SettingsError
from .view import console

TOOLS = ("OpAutoCompare", "OpCapture", "OpDtypeCast", "OpFallback", "OpObserve", "OpOverflowCheck", "OpTimeMeasure")


def parser(prog: str = "op_tools run") -> argparse.ArgumentParser:
    """The options of the command (`parser().parse_args(["OpObserve", "x.py"])`)."""
    made = argparse.ArgumentParser(
        prog=prog,
        description="Run a Python script, as it is, under one or several tools of op_tools.",
        epilog=f"example: {prog} OpAutoCompare --steps 0:2 train.py --batch 16",
    )
    made.add_argument("tool", help=f"one or several of {', '.join(TOOLS)}, separated by commas")
    made.add_argument("--steps", metavar="A:B", help="only in these steps of the optimizer, A included, B not")
    made.add_argument("--ops", metavar="LIST", help="only these operators: names or regular expressions, with commas")
    made.add_argument("--mode", choices=("every", "once"), help="OpAutoCompare: every call, or each kind of call once")
    made.add_argument("--budget", metavar="2x", help="OpAutoCompare: keep the run within this factor")
    made.add_argument("--no-ditorch", action="store_true", help="do not import ditorch first")
    made.add_argument("script", help="the script to run")
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    return made


def main(arguments: Sequence[str] | None = None, prog: str = "python -m op_tools.launch") -> int:
    """Run the command; the exit code is the script's (`main(["OpObserve", "train.py"])`)."""
    options = parser(prog).parse_args(arguments)
    try:
        tools = [_tool(name.strip(), options) for name in options.tool.split(",")]
    except (SettingsError, ValueError) as error:
        console.complain(str(error))
        return 2
    script = Path(options.script)
    if not script.is_file():
        console.complain(f"there is no script {options.script}")
        return 2
    if not options.no_ditorch:
        import ditorch  # noqa: F401  (CUDA code runs on the machine's accelerator from here on)
    sys.argv = [str(script), *options.arguments]
    sys.path[0] = str(script.resolve().parent)
    started: list[Any] = []
    try:
        for tool in tools:
            started.append(tool.start())
        runpy.run_path(str(script), run_name="__main__")
    except SettingsError as error:
        console.complain(str(error))
        return 2
    finally:
        for tool in reversed(started):
            tool.stop()
    return 0


def _tool(name: str, options: argparse.Namespace) -> Any:
    if name not in TOOLS:
        raise ValueError(f"there is no tool {name!r}; choose from {', '.join(TOOLS)}")
    more: dict[str, Any] = {}
    if name == "OpAutoCompare":
        more = {"mode": options.mode, "budget": options.budget}
    elif options.mode or options.budget:
        raise ValueError(f"--mode and --budget belong to OpAutoCompare, not to {name}")
    return getattr(op_tools, name)(ops=options.ops, steps=_steps(options.steps), **more)


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
