"""Turns chosen calls of capture stores into files of the documented layout, which `torch.load` reads."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..call.filter import OpFilter
from ..settings import SettingsError
from ..view import console
from . import stored
from .archive import ArchiveError
from .captures import encoded
from .seed_layout import BACKWARD_PARTS, FORWARD_PARTS, CallFiles
from .segments import INDEX
from .stored import CaptureStore, StoredCall

Chosen = list[tuple[CaptureStore, StoredCall]]


class Choice(NamedTuple):
    """Which calls: by operator, by number, by training step; None takes all.

    >>> Choice(ops="torch.add", ids=[range(1, 5)])  # doctest: +SKIP
    """

    ops: str | None = None
    ids: Sequence[range] | None = None
    steps: Sequence[range] | None = None


def parse_ranges(text: str, option: str) -> list[range]:
    """Numbers and ranges A:B, A included, B not, separated by commas (`parse_ranges("3,7:9", "--ids")`)."""
    found = []
    for entry in text.split(","):
        first, colon, last = entry.strip().partition(":")
        try:
            start = int(first or (0 if colon else ""))
            found.append(range(start, int(last) if last else sys.maxsize if colon else start + 1))
        except ValueError:
            raise SettingsError(f"{option} {text!r}: write numbers or ranges, such as 3 or 3,7:9") from None
        if start < 0 or not found[-1]:
            raise SettingsError(f"{option} {text!r}: the range {entry.strip()} is empty")
    return found


def choose(sources: Sequence[Path], choice: Choice) -> Chosen:
    """The calls of all stores below some folders that are wanted; what matches nothing is an error with a hint."""
    everything: Chosen = [pair for source in sources for pair in _below(source)]
    patterns = OpFilter(choice.ops or (), include_from="--ops")
    found = [(store, call) for store, call in everything if patterns.matches(call.op)]
    if unused := patterns.unused():
        raise SettingsError("\n".join(unused))
    for what, ranges in (("id", choice.ids), ("step", choice.steps)):
        if ranges is None:
            continue
        numbers = [getattr(call, what) for _, call in found]
        found = [pair for pair, number in zip(found, numbers) if any(number in some for some in ranges)]
        if not found:
            raise SettingsError(f"--{what}s: no such call; those there have {what} {min(numbers)} to {max(numbers)}")
    return found


def _below(source: Path) -> Iterator[tuple[CaptureStore, StoredCall]]:
    """All calls of the stores below a folder, or below a path within a store."""
    inside = stored.within(source)
    if inside is not None:
        store, rest = inside
        calls = [call for name, call in store.calls.items() if not rest or f"{name}/".startswith(f"{rest}/")]
        if not calls:
            raise SettingsError(f"{source}: no such call in the store {store.folder}")
        yield from ((store, call) for call in calls)
        return
    if not source.exists():
        raise SettingsError(f"{source}: no such file or folder")
    folders = sorted(Path(place) for place, _, files in os.walk(source) if INDEX in files)
    if not folders:
        raise SettingsError(f"{source}: no capture store ({INDEX}) under it; other captures are files already")
    for folder in folders:
        store = stored.opened(folder)
        yield from ((store, call) for call in store.calls.values())


def export_call(store: CaptureStore, call: StoredCall, target: Path) -> int:
    """Write the files of one call below a folder; returns how many.

    >>> export_call(store, store.calls["torch.add/1/1/t"], Path("exported"))  # doctest: +SKIP
    """
    files, written = CallFiles(str(target / call.folder)), 0
    for parts in (FORWARD_PARTS, BACKWARD_PARTS):
        texts, facts = {}, {"name": call.op}
        for part in parts:
            if part not in call.lines:
                continue
            payload = store.payload(call, part)
            if isinstance(payload, io.BytesIO):
                files.copy(part, payload.getvalue())
                payload = encoded(store.folder / call.folder / f"{part}.pth")
            else:
                files.save(part, {key: value for key, value in payload.items() if key != "format"})
            if part == "input":
                facts = {key: value for key, value in payload.items() if key not in ("format", "args", "kwargs")}
            texts[part] = json.dumps(store.part(call, part)["tensors"])
        if texts:
            files.describe(facts, texts, store.torch)
            written += len(texts)
    return written


def export(sources: Sequence[Path], target: Path, choice: Choice) -> tuple[str, int]:
    """Write the chosen calls below a folder; the result is what was done, and how many calls could not be read.

    >>> export([Path("op_tools_results")], Path("exported"), Choice(ops="torch.add"))  # doctest: +SKIP
    """
    chosen = choose(sources, choice)
    if any(stored.is_store(parent) for parent in (target.absolute(), *target.absolute().parents)):
        raise SettingsError(f"--to {target}: is inside a capture store; choose another folder")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--to {target}: cannot be made ({error.strerror or error})") from None
    needed, free = sum(call.nbytes for _, call in chosen), shutil.disk_usage(target).free
    if needed > free:
        raise SettingsError(
            f"--to {target}: {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free; choose fewer calls"
        )
    files = failed = 0
    for (store, call), advance in _with_progress(chosen):
        try:
            files += export_call(store, call, target)
        except OSError as error:
            raise SettingsError(f"{target / call.folder}: cannot be written ({error.strerror or error})") from None
        except (ArchiveError, ValueError, LookupError, TypeError) as error:
            failed += 1
            console.print_error(f"{store.folder / call.folder}: {error}")
        advance()
    lost = f"; {failed} could not be read" if failed else ""
    return f"{len(chosen) - failed} calls, {files} files, {needed / 1e6:.1f} MB in {target}{lost}", failed


def _with_progress(chosen: Chosen) -> Iterator[tuple[tuple[CaptureStore, StoredCall], Callable[[], Any]]]:
    """The calls, with a progress bar on stderr where that is a terminal."""
    if len(chosen) < 2 or not sys.stderr.isatty():
        for pair in chosen:
            yield pair, lambda: None
        return
    with console.progress_bar(redirect_stdout=sys.stdout.isatty()) as progress:
        task = progress.add_task("exporting", total=len(chosen))
        for pair in chosen:
            yield pair, lambda: progress.update(task, advance=1)


def overview(chosen: Chosen) -> str:
    """A table of what was chosen, by operator (`print(overview(choose(...)))`)."""
    by_op: dict[str, list[StoredCall]] = {}
    for _, call in chosen:
        by_op.setdefault(call.op, []).append(call)
    rows = [
        [op, str(len(calls)), _range(c.id for c in calls), _range(c.step for c in calls), _megabytes(calls)]
        for op, calls in sorted(by_op.items())
    ]
    return console.table(["name", "calls", "ids", "steps", "MB"], rows)


def _range(numbers: Iterator[int]) -> str:
    found = sorted(set(numbers))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _megabytes(calls: list[StoredCall]) -> str:
    return f"{sum(call.nbytes for call in calls) / 1e6:.1f}"
