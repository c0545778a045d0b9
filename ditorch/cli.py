"""The ``ditorch`` command: run a script, look at the machine, look at a code base."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ditorch.conformance.arguments import add_arguments as add_conformance_arguments
from ditorch.scan import OUTSIDE, Scan

PACKAGE = Path(__file__).resolve().parent


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command.

    Example: ``main(["doctor", "--json"])``
    """
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.device:
        os.environ["DITORCH_DEVICE"] = options.device
    try:
        if options.command == "run":
            return run(options)
        if options.command == "doctor":
            return doctor(options)
        if options.command == "conformance":
            return conformance(options)
        if options.command == "probe":
            return probe(options)
        return scan(options)
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        print(error if str(error).startswith("ditorch") else f"ditorch: {error}", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """The command line's grammar.

    Example: ``make_parser().parse_args(["run", "train.py", "--lr", "1"]).arguments``
    """
    parser = argparse.ArgumentParser("ditorch", description="Run CUDA code on the accelerator of this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    device = argparse.ArgumentParser(add_help=False)
    device.add_argument("--device", help="backend to use (sets DITORCH_DEVICE)")

    run_parser = commands.add_parser("run", parents=[device], help="run a script or module unmodified")
    run_parser.add_argument("-m", dest="module", action="store_true", help="run a module instead of a script")
    run_parser.add_argument("target", help="script, or module with -m")
    run_parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on as they are")

    doctor_parser = commands.add_parser("doctor", parents=[device], help="versions, devices, patches, gaps")
    doctor_parser.add_argument("--json", action="store_true")
    doctor_parser.add_argument("--verbose", action="store_true", help="every function that is emulated or missing, too")

    scan_parser = commands.add_parser("scan", parents=[device], help="which CUDA calls a code base makes")
    scan_parser.add_argument("path", help="a script, with the modules of its own that it imports, or a folder")
    scan_parser.add_argument("--json", action="store_true")
    scan_parser.add_argument("--all", action="store_true", help="list mapped calls one by one too")

    probe_parser = commands.add_parser("probe", parents=[device], help="try an unknown vendor's package")
    probe_parser.add_argument("package", help="the vendor's package, torch_acme")
    probe_parser.add_argument("--write", metavar="FILE", help="write the backend file to start from")

    add_conformance_arguments(
        commands.add_parser("conformance", help="how much of PyTorch a device does, from PyTorch's own test cases")
    )
    return parser


def run(options: argparse.Namespace) -> int:
    """Replace this process by the script; its children are covered too (torchrun, spawn, workers).

    Example: ``ditorch run --device soft train.py --epochs 1``
    """
    if not options.module and not Path(options.target).is_file():
        raise FileNotFoundError(f"ditorch run: {options.target} is not a file (a module is run with -m)")
    environment = dict(os.environ)
    # The package's own folder comes last: it must be importable, but shadow nothing of the script's.
    paths = [str(PACKAGE / "_inject"), *environment.get("PYTHONPATH", "").split(os.pathsep), str(PACKAGE.parent)]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    target = ["-m", options.target] if options.module else [options.target]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *target, *options.arguments], environment)


def doctor(options: argparse.Namespace) -> int:
    """Print the diagnosis.

    Example: ``ditorch doctor --json``
    """
    import ditorch

    ditorch.activate()
    found = ditorch.doctor()
    if options.json:
        print(json.dumps(found.as_dict(), indent=2))
        return 0
    print(found.text(options.verbose))
    return 0


def scan(options: argparse.Namespace) -> int:
    """Print what becomes of the CUDA calls of a script or a folder; exit status 1 when some will fail.

    Example: ``ditorch scan src --device ascend --json``
    """
    from ditorch.discovery import choose, known_backends
    from ditorch.scan import scan as look

    backends = known_backends()
    wanted = (
        next((b for b in backends.values() if options.device in (b.name, b.device_type)), None)
        if options.device
        else choose()
    )
    if wanted is None:
        raise ValueError(f"--device {options.device}: no such backend. Known: {', '.join(sorted(backends))}")
    found = look(options.path, wanted)
    if options.json:
        print(json.dumps(found.as_dict(), indent=2))
    elif sys.stdout.isatty():
        _print_scan(found, options.all)
    else:
        for use in found.uses:
            print(use)
        print(_verdict(found), file=sys.stderr)
    return 1 if found.failing() else 0


def conformance(options: argparse.Namespace) -> int:
    """Run PyTorch's databases of test cases against a device; exit status 1 where the ledger expected otherwise.

    Example: ``ditorch conformance --device soft --ops 'nn.functional.*'``
    """
    from ditorch.conformance.command import main as run_conformance

    return run_conformance(options)


def probe(options: argparse.Namespace) -> int:
    """Print what an unknown PrivateUse1 package can do; exit status 1 where its device cannot be used.

    Example: ``ditorch probe torch_acme --write acme.py``
    """
    from ditorch.probe import probe as look

    found = look(options.package)
    print("\n".join(found.lines()))
    if options.write:
        Path(options.write).write_text(found.source())
        print(f"\nwritten: {options.write}")
    return 0 if found.tried.get("device") == "works" else 1


def _print_scan(found: Scan, everything: bool) -> None:
    console = Console()
    summary = Table(title=f"CUDA calls on {found.backend}", title_justify="left")
    for column in ("status", "name", "uses", "note"):
        summary.add_column(column, overflow="fold")
    groups: dict[tuple[str, str, str], int] = {}
    for use in found.uses:
        key = (use.status, use.name, use.note)
        groups[key] = groups.get(key, 0) + 1
    for (status, name, note), count in sorted(groups.items()):
        summary.add_row(status, name, str(count), note)
    console.print(summary)
    for use in found.uses:
        if everything or use.status in ("unsupported", "unreadable"):
            console.print(str(use), markup=False, soft_wrap=True)
    console.print(_verdict(found), markup=False)


def _verdict(found: Scan) -> str:
    counts = ", ".join(f"{count} {status}" for status, count in sorted(found.counts().items()))
    failing = len(found.failing())
    ends = f"{failing} will fail" if failing else "nothing that will fail"
    return f"{found.files} files: {counts or 'no CUDA calls'}; {ends} on {found.backend}. Not looked at: {OUTSIDE}."
