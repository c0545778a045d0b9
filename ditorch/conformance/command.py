"""The sub-command itself: options, what is left to do, the run, its files."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import itertools
import json
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import ditorch
from ditorch.backend import Backend
from ditorch.conformance import diff, findings, ledger, native, pack, page, store
from ditorch.conformance.cases import PARTS, Case, Result, Unit
from ditorch.conformance.console import View
from ditorch.conformance.engines import Engine, LocalEngine
from ditorch.conformance.slot import Settings
from ditorch.conformance.summary import Summary
from ditorch.discovery import choose
from ditorch_common.settings import DITORCH

MOST_JOBS_ON_ACCELERATORS = 12
"""Each worker holds a context on the device, and the host's side of a case is what takes time."""
NATIVE_TIMEOUT = 300.0
CASE_TIMEOUT = 60.0
INTERRUPTED = 130
_LONG = ("nn.LSTM", "nn.GRU", "nn.RNN", "nn.Transformer", "linalg.", "nn.functional.")


def main(options: argparse.Namespace, view: View | None = None) -> int:
    """Do what the command line says; the exit status is 1 where the ledger did not expect what was found.

    Example: ``main(parser.parse_args(["conformance", "--device", "soft", "--ops", "add"]))``
    """
    view = view or View()
    if options.action == "diff":
        return show_difference(options, view)
    if options.action == "report":
        return report(options, view)
    if options.action == "pack":
        return pack_page(options, view)
    if options.resume and options.fresh:
        raise ValueError("--resume and --fresh exclude each other")
    request = options.devices or DITORCH.read("DITORCH_DEVICE") or None
    backend, devices = chosen_devices(request)
    if options.hunt and (options.pytorch_src is not None or options.what != ",".join(PARTS)):
        raise ValueError("--hunt is a run of its own: it goes without --what and --pytorch-src")
    if not options.minutes > 0:
        raise ValueError(f"--minutes {options.minutes:g}: expected minutes, more than 0")
    folder = options.out or Path("conformance_results") / (f"{backend.name}-hunt" if options.hunt else backend.name)
    if options.pytorch_src is not None:
        return run_native(options, view, backend, devices, folder)
    if options.case:
        return run_case(options, view, backend, devices[0])
    return run(options, view, backend, devices, folder)


# --- options --------------------------------------------------------------------------------------------


def chosen_devices(request: str | None) -> tuple[Backend, list[str]]:
    """The backend and the devices that a request names: ``cuda:0,cuda:1``, ``soft``, or nothing.

    Example: ``chosen_devices("soft:1")[1] == ["soft:1"]``
    """
    parts = [part.strip() for part in (request or "").split(",") if part.strip()]
    names = {part.partition(":")[0] for part in parts}
    if len(names) > 1:
        raise ValueError(f"--device {request}: devices of one backend at a time, not {', '.join(sorted(names))}")
    numbers = [part.partition(":")[2] for part in parts]
    if any(number and not number.isdecimal() for number in numbers):
        raise ValueError(f"--device {request}: expected a backend, or devices as in cuda:0,cuda:1")
    backend = choose(names.pop() if names else None)
    if backend.device_type == "cpu":
        return backend, ["cpu"]
    return backend, [f"{backend.device_type}:{number or 0}" for number in numbers or ["0"]]


def _listed(text: str, known: Sequence[str], option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in parts if part not in known]
    if unknown or not parts:
        raise ValueError(f"{option} {text}: {', '.join(unknown) or 'nothing'} is not one of {', '.join(known)}")
    return parts


def number_of_samples(text: str) -> int | None:
    """``all`` is None (`number_of_samples("5") == 5`)."""
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--samples {text}: expected a number, 1 or more, or all")
    return int(text)


def _jobs(options: argparse.Namespace, backend: Backend) -> int:
    if options.jobs is not None:
        if options.jobs < 1:
            raise ValueError(f"--jobs {options.jobs}: at least 1")
        return int(options.jobs)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if backend.fallback else min(cores, MOST_JOBS_ON_ACCELERATORS)


def _timeout(options: argparse.Namespace, default: float) -> float:
    if options.timeout is None:
        return default
    if not options.timeout > 0:
        raise ValueError(f"--timeout {options.timeout:g}: expected seconds, more than 0")
    return float(options.timeout)


def selected(units: Sequence[Unit], options: argparse.Namespace) -> list[Unit]:
    """Those that the options ask for, the long ones first; ValueError where there is none.

    Example: ``selected(units, parser.parse_args(["conformance", "--ops", "add*"]))``
    """
    patterns = [part.strip() for part in (options.ops or "*").split(",") if part.strip()]
    found = [unit for unit in units if any(fnmatch.fnmatchcase(unit.name, pattern) for pattern in patterns)]
    if not found:
        raise ValueError(f"--ops {options.ops}: {_nothing_called(options.ops, units)}")
    if options.dtypes:
        dtypes = _listed(options.dtypes, sorted({unit.dtype for unit in units}), "--dtypes")
        found = [unit for unit in found if unit.dtype in dtypes]
    if options.checks:
        checks = set(_listed(options.checks, sorted({c for unit in units for c in unit.checks}), "--checks"))
        found = [unit.without(set(unit.checks) - checks) for unit in found]
    found = [unit for unit in found if unit.checks]
    if not found:
        raise ValueError("no case fits --ops, --dtypes and --checks together")
    return sorted(found, key=lambda unit: not unit.name.startswith(_LONG))


def _nothing_called(pattern: str, units: Sequence[Unit]) -> str:
    import difflib

    near = difflib.get_close_matches(pattern, sorted({unit.name for unit in units}), n=3)
    hint = f"; did you mean {', '.join(near)}?" if near else "; wildcards are * and ?"
    return f"no operator, module, optimizer or name is called so{hint}"


# --- runs -----------------------------------------------------------------------------------------------


def run(options: argparse.Namespace, view: View, backend: Backend, devices: list[str], folder: Path) -> int:
    """Run cases, keep them, write the files; Ctrl-C ends it early, with the same files."""
    what = ["hunt"] if options.hunt else _listed(options.what, PARTS, "--what")
    jobs, samples = _jobs(options, backend), number_of_samples(options.samples)
    entries = ledger.load(backend.name, options.ledger)
    settings = Settings(backend.name, devices[0], samples=samples, timeout=_timeout(options, CASE_TIMEOUT))
    if options.hunt and not options.ops:  # all operators get their turn
        settings = replace(settings, hunt_seconds=60 * options.minutes * jobs)
    workers = [replace(settings, device=devices[number % len(devices)]) for number in range(jobs)]
    about = describe(backend, devices, options, jobs)
    if not options.resume and not options.fresh and (folder / store.FILE).exists():
        store.Store.create(folder, about)  # says what can be done
    started = time.monotonic()
    view.say(f"{jobs} workers on {', '.join(devices)}; listing the cases")
    with _engines(options, workers, what) as parts:
        units: list[tuple[Engine, list[Unit]]] = []
        everything: list[Unit] = []
        for engine, names in parts:
            listed = engine.list(names)
            everything += listed
            units.append((engine, listed))
            about["device_name"] = about.get("device_name") or engine.device_name()
        wanted = set(selected(everything, options))
        if options.resume and (folder / store.FILE).exists():
            kept, stored = store.Store.resume(folder, about)
            done = stored.results
            about = {**stored.about, "resumed": int(stored.about.get("resumed", 0)) + 1}
        else:
            kept, done = store.Store.create(folder, about, options.fresh), {}
        todo = [(engine, _left(selected_in(listed, wanted), done)) for engine, listed in units]
        results = dict(done)
        if options.hunt:
            todo = [(engine, _in_rounds(left)) for engine, left in todo]
            view.say(f"hunting for {options.minutes:g} minutes")
        complete = _collect(view, kept, todo, results, started + 60 * options.minutes if options.hunt else None)
    about["seconds"] = round(time.monotonic() - started, 1)
    about["complete"] = complete
    summary = Summary.of(results.values(), about, ledger.Ledger(entries, torch.__version__))
    summary.write(folder)
    view.summary(summary, folder)
    if options.hunt:
        found = findings.write(folder, results.values(), ledger.Ledger(entries, torch.__version__))
        scripts = (
            f"{found} wrong, made small: one line each in {folder}/{findings.FILE}, a script each in {folder}/scripts"
        )
        view.say(scripts if found else "nothing wrong was found")
    if not complete:
        view.say("interrupted: --resume goes on with the cases that are left")
        return INTERRUPTED
    return 1 if summary.new_failures or summary.new_passes else 0


def selected_in(listed: Sequence[Unit], wanted: set[Unit]) -> list[Unit]:
    """The wanted ones, whose checks may be fewer, the long ones first (`selected_in(units, wanted)`)."""
    keys = {(unit.what, unit.name, unit.dtype): unit for unit in wanted}
    found = [keys[(u.what, u.name, u.dtype)] for u in listed if (u.what, u.name, u.dtype) in keys]
    return sorted(found, key=lambda unit: not unit.name.startswith(_LONG))


def _left(units: Sequence[Unit], done: dict[Case, Result]) -> list[Unit]:
    left = [unit.without({case.check for case in unit.cases() if case in done}) for unit in units]
    return [unit for unit in left if unit.checks]


def _in_rounds(units: Sequence[Unit]) -> list[Unit]:
    """The first check of every unit, then the second of every unit, and so on."""
    rounds = itertools.zip_longest(*[[replace(unit, checks=(check,)) for check in unit.checks] for unit in units])
    return [unit for one in rounds for unit in one if unit is not None]


def _collect(
    view: View,
    kept: store.Store,
    todo: list[tuple[Engine, list[Unit]]],
    results: dict[Case, Result],
    ends: float | None = None,
) -> bool:
    """Run everything, or what there is time for; False when the user ended it."""
    before = len(results)
    total = before + sum(len(unit.checks) for _, units in todo for unit in units)
    try:
        with kept, _ended_politely(), view.progress(None if ends else total, before) as bar:
            for engine, units in todo:
                for result in engine.run(units, ends) if units else ():
                    kept.add(result)
                    results[result.case] = result
                    bar.add(result.failed)
    except KeyboardInterrupt:
        return False
    return True


@contextlib.contextmanager
def _ended_politely() -> Iterator[None]:
    """Let SIGTERM, which schedulers send, do what Ctrl-C does."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _engines(
    options: argparse.Namespace, workers: list[Settings], what: list[str]
) -> Iterator[list[tuple[Engine, list[str]]]]:
    """One engine for the databases and one for the CUDA surface, whose workers redirect "cuda"."""
    parts: list[tuple[Engine, list[str]]] = []
    with contextlib.ExitStack() as stack:
        for names, chosen in (
            ([name for name in what if name != "api"], workers),
            ([name for name in what if name == "api"], [replace(workers[0], mode="api")]),
        ):
            if names:
                engine = _engine(options, chosen)
                stack.callback(engine.close)
                parts.append((engine, names))
        yield parts


def _engine(options: argparse.Namespace, workers: list[Settings]) -> Engine:
    if options.engine == "ray" and workers[0].mode == "plain":
        from ditorch.conformance.ray_engine import RayEngine

        return RayEngine(workers, options.ray_address)
    return LocalEngine(workers)


def run_case(options: argparse.Namespace, view: View, backend: Backend, device: str) -> int:
    """Run one case and show all that is known of it."""
    case = Case.parse(options.case)
    settings = Settings(
        backend.name,
        device,
        "api" if case.what == "api" else "plain",
        number_of_samples(options.samples),
        _timeout(options, CASE_TIMEOUT),
    )
    engine = LocalEngine([settings])
    try:
        results = list(engine.run([Unit(case.what, case.name, case.dtype, (case.check,))]))
    finally:
        engine.close()
    for result in results:
        view.case(result)
    return 1 if any(result.failed for result in results) else 0


def run_native(options: argparse.Namespace, view: View, backend: Backend, devices: list[str], folder: Path) -> int:
    """Run the test files of a PyTorch checkout; exit status 1 where a test failed or never ran."""
    files = native.find_files(options.pytorch_src.expanduser().resolve(), options.files)
    run = native.NativeRun(
        options.pytorch_src.expanduser(),
        backend.name,
        folder,
        _jobs(options, backend),
        _timeout(options, NATIVE_TIMEOUT),
    )
    about = describe(backend, devices, options, run.jobs)
    found: list[native.TestResult] = []
    interrupted = False
    try:
        for file in files:
            view.say(f"{file.name}: collecting")
            found += run.run(file)
            native.write_csv(folder, found)  # so that what is known survives an interruption
    except KeyboardInterrupt:
        interrupted = True
    summaries = native.write_csv(folder, found)
    about |= {"device_name": run.device_name, "complete": not interrupted, "samples": None}
    view.native(summaries, pack.write(run.folder, about, pack.native_rows(found, about)), folder)
    if interrupted:
        return INTERRUPTED
    return 1 if any(summary.failed or summary.never_run for summary in summaries) else 0


def report(options: argparse.Namespace, view: View) -> int:
    """Write the files of a run again, after a change of the ledger: no case is run, no device is needed."""
    stored = store.load(options.folder)
    entries = ledger.load(str(stored.about.get("backend", "")), options.ledger)
    about = {**_said_before(options.folder), **stored.about}
    summary = Summary.of(stored.results.values(), about, ledger.Ledger(entries, str(about.get("torch", ""))))
    summary.write(options.folder)
    view.summary(summary, options.folder)
    return 1 if summary.new_failures or summary.new_passes else 0


def pack_page(options: argparse.Namespace, view: View) -> int:
    """Pack the summary of a run again, from its page: no case is run, no device is needed."""
    source = options.source / "index.html" if options.source.is_dir() else options.source
    summary = page.read(source)
    path = pack.write(options.out or source.parent, summary.about, pack.case_rows(summary))
    view.say(f"{path}: {len(summary.results):,} cases, {summary.by_case} right")
    return 0


def _said_before(folder: Path) -> dict[str, Any]:
    """What summary.json knows beyond the first line of the results: how long it took, whether it is complete."""
    try:
        return dict(json.loads((folder / "summary.json").read_text(encoding="utf-8"))["about"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def show_difference(options: argparse.Namespace, view: View) -> int:
    """Compare two results; exit status 1 where something was lost."""
    found = diff.compare(options.before, options.after)
    if options.json:
        view.json(found.as_dict())
    else:
        view.difference(found)
    return 1 if found.lost else 0


def describe(backend: Backend, devices: list[str], options: argparse.Namespace, jobs: int) -> dict[str, Any]:
    """What a result says about itself (`describe(...)["torch"]`)."""
    return {
        "backend": backend.name,
        "vendor": backend.vendor,
        "device": ",".join(dict.fromkeys(devices)),
        "framework": backend.framework,
        "torch": torch.__version__,
        "ditorch": ditorch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "jobs": jobs,
        "engine": options.engine,
        "samples": number_of_samples(options.samples),
    }
