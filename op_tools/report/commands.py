"""`op_tools report` and `op_tools ui`, and the page of `op_tools diff --html`."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ditorch_common.page import Page, write_page

from ..settings import SettingsError
from ..trace.diff import Diff, compare
from . import difference, verdict
from .gather import page_of
from .run import NoRunYet, ReportError, Run

_POLL: Final = 0.5  # seconds between two looks for a run that has not begun
_PORT: Final = 9001  # the one from which ui.perfetto.dev takes traces
_RUN: Final = "a folder that tools wrote to (op_tools_results), the records file of one process, or a trace"
_EXAMPLES: Final = """\
examples:
  op_tools report op_tools_results -o run.html --open
  op_tools report run_a --against run_b --loss run_a/metrics.json run_b/metrics.json
  op_tools ui op_tools_results          the same, live, while the training runs
exit code: 0 the page is there, 2 a mistake in the command or in a file
"""


def main(arguments: Sequence[str]) -> int:
    """Entry point: `["report", ...]` or `["ui", ...]`; the result is the exit code."""
    command = arguments[0]
    try:
        options = _parser(command).parse_args(list(arguments[1:]))
        return _report(options) if command == "report" else _serve(options)
    except (SettingsError, OSError) as error:
        told = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(told, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser(command: str) -> argparse.ArgumentParser:
    about = "Write the page of a run: one file that opens from disk."
    parser = argparse.ArgumentParser(
        prog=f"op_tools {command}",
        description=about if command == "report" else "Show the page of a run on this machine, live, while it goes on.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help=_RUN)
    if command == "report":
        parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the file to write (RUN.html)")
    else:
        parser.add_argument("--port", type=int, default=None, help=f"the port to listen on ({_PORT}, or any free one)")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    loss = "losses: metrics.json or a log of the run, then of those to compare with (RUN/metrics.json)"
    parser.add_argument("--loss", type=Path, nargs="+", default=[], metavar="FILE", help=loss)
    parser.add_argument("--against", type=Path, metavar="RUN", help="another trace or run, to be aligned with this one")
    return parser


def _report(options: argparse.Namespace) -> int:
    run = Run(options.run, options.loss)
    page = page_of(run, _against(options))
    name = options.run.resolve().name or "run"
    path = _write(page, options.output or Path(f"{name}.html"), options.open)
    print(f"{verdict.one_line(run)}; the page is {path} ({path.stat().st_size / 2**20:.1f} MiB)")
    return 0


def _against(options: argparse.Namespace) -> Diff | None:
    if options.against is None:
        return None
    return compare(_traced(options.run), _traced(options.against), partial=True)


def _traced(folder: Path) -> Path:
    """Where the traces of a run are."""
    inside = folder / "op_trace_results"
    return inside if inside.is_dir() else folder


def _write(page: Page, path: Path, show: bool) -> Path:
    if path.is_dir():
        raise ReportError(f"{path}: is a folder; name the file to write")
    if not path.absolute().parent.is_dir():
        raise ReportError(f"{path}: cannot be written (is its folder there?)")
    written = write_page(page, path)
    if show:
        webbrowser.open(written.resolve().as_uri())
    return written


def diff_page(found: Diff, path: Path, show: bool = False) -> Path:
    """Write the page of a difference (`diff_page(compare(a, b), Path("diff.html"))`)."""
    return _write(difference.page_of(found), path, show)


# -- live ------------------------------------------------------------------------------------------------------


def _serve(options: argparse.Namespace) -> int:
    try:
        import uvicorn

        from .live import Live, application
    except ImportError:
        raise ReportError("op_tools ui needs Starlette and uvicorn: pip install 'ditorch[ui]'") from None
    compared = _against(options)
    with _listening(options.port) as listener:
        port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
        traced = f"http://127.0.0.1:{port}/trace.json?token={token}" if port == _PORT else ""
        live = Live(_awaited(options), lambda run: page_of(run, compared, traced))
        address = f"http://127.0.0.1:{port}/?token={token}"
        print(f"{address}\nCtrl-C ends it; the run does not notice.", flush=True)
        if options.open:
            webbrowser.open(address)
        _step_back()
        config = uvicorn.Config(application(live, token), log_level="warning", timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def _awaited(options: argparse.Namespace) -> Run:
    """The run, as soon as a tool has begun to write it."""
    told = False
    while True:
        try:
            return Run(options.run, options.loss)
        except NoRunYet as error:
            if not told:
                print(f"{error}. Waiting for a run to begin there; Ctrl-C ends it.", flush=True)
            told = True
            time.sleep(_POLL)


def _listening(port: int | None) -> socket.socket:
    """A socket on the loopback address: on the port, or on any where none is given and the usual one is taken."""
    for number in [port] if port is not None else [_PORT, 0]:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", number))
            listener.listen()
            return listener
        except (OSError, OverflowError) as error:
            listener.close()
            if port is not None:
                raise ReportError(f"--port {port}: {getattr(error, 'strerror', None) or error}") from None
    raise ReportError("no port is free on the loopback address")


def _step_back() -> None:
    """Let the training go first."""
    if hasattr(os, "nice"):
        os.nice(10)
