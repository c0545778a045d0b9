"""Reads capture stores, which `segments.py` writes; they may be cut off, damaged or hostile.

A call in a store has a path, as if the store were a folder of captures: `run.store/torch.add/4711/12/2026-11-16`,
and below that `input.pth` and so on. Nothing of that is on disk.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ..native import fingerprints
from ..view.console import note
from . import derived, plain_json
from .archive import ArchiveError, Damaged, check_sum
from .limits import check_memory
from .segments import DERIVED, INDEX, MAGIC, VERSION, check_line, segment_name

_MAX_LINE: Final = 1 << 26  # bytes of the description of one call
_MAX_NAME: Final = 255  # bytes of each name in the path of a call, as file systems have it
_MAX_PATH: Final = 2_000


class StoredCall(NamedTuple):
    """A call in a store: what it is, and where the lines are that describe its parts."""

    folder: str  # below the store
    op: str
    id: int
    step: int
    lines: Mapping[str, tuple[int, int]]  # by part: first byte of the line, its length
    nbytes: int  # of its tensors


class CaptureStore:
    """A store on disk (`CaptureStore(Path("run.store")).calls["torch.add/1/1/t"].op`).

    `torn` says what of it could not be read, "" where nothing is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: dict[str, StoredCall] = {}
        self.torch = ""
        self.torn = ""
        self._derived: dict[int, dict[str, Any]] = {}  # contents that are operations on others
        self._read_index()

    def _read_index(self) -> None:
        path, damaged, end = self.folder / INDEX, 0, 0
        for line, start in _lines(path):
            whole = line.endswith(b"\n")
            try:
                check_line(line)
                facts = json.loads(line)
                if start == 0:
                    self._check_head(path, facts)
                else:
                    self._add(facts, start, len(line))
            except Damaged:
                damaged, end = damaged + 1, end + (not whole)
            except ArchiveError:
                raise
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                damaged, end = damaged + 1, end + (not whole)
        if not self.torch:
            raise ArchiveError(f"{path}: is empty or cut off: there is no call in it")
        if end:
            self.torn = "its last call was being written when the run ended, and is not there"
        if damaged > end:
            lost = damaged - end
            self.torn = f"{lost} damaged line{'s were' if lost > 1 else ' was'} left out"

    def _check_head(self, path: Path, facts: Any) -> None:
        if not isinstance(facts, dict) or facts.get("format") != MAGIC:
            raise ArchiveError(f"{path}: is not the index of a capture store")
        if facts.get("version") not in range(1, VERSION + 1):
            raise ArchiveError(f"{path}: has version {facts.get('version')!r}, this op_tools reads 1 to {VERSION}")
        if facts.get("byteorder") != sys.byteorder:
            raise ArchiveError(f"{path}: was written on a machine of another byte order")
        self.torch = str(facts.get("torch") or "unknown")

    def _add(self, facts: dict[str, Any], start: int, length: int) -> None:
        if "derived" in facts:
            self._derived[int(facts["derived"])] = facts
            return
        op, folder = str(facts["op"]), str(facts["folder"])
        names = folder.split("/")
        if not facts["parts"] or {"", ".", ".."} & set(names) or not (folder + op).isprintable():
            raise ValueError(folder)
        if len(folder) > _MAX_PATH or any(len(name.encode()) > _MAX_NAME for name in names):
            raise ValueError(folder)
        number, step = int(facts["id"]), int(facts["step"])
        known = self.calls.get(folder)
        lines = dict.fromkeys(facts["parts"], (start, length))
        nbytes = int(facts["bytes"])
        if known is not None:
            lines, nbytes = {**known.lines, **lines}, nbytes + known.nbytes
        self.calls[folder] = StoredCall(folder, op, number, step, lines, nbytes)

    # -- a part of a call -----------------------------------------------------------------------------

    def part(self, call: StoredCall, part: str) -> dict[str, Any]:
        """What the index says about a part of a call: `value` or `archive`, `blobs` and `tensors`."""
        start, length = call.lines[part]
        with open(self.folder / INDEX, "rb") as file:
            file.seek(start)
            found = json.loads(file.read(length))["parts"][part]
        if not isinstance(found, dict):
            raise ArchiveError("is not a part of a call")
        return found

    def payload(self, call: StoredCall, part: str) -> Any:
        """The encoded content of a part, as `archive.save` takes it; of an odd part, a file that holds it."""
        found = self.part(call, part)
        flats = self._contents(found["blobs"])
        for place, flat, expected in zip(found["blobs"], flats, found.get("crc32", ())):
            if place[0] == DERIVED:  # compared with its fingerprint
                continue
            check_sum(f"{segment_name(place[0])} at byte {place[1]}", memoryview(flat.numpy()), expected)  # type: ignore[arg-type]
        if found.get("archive"):
            return io.BytesIO(flats[0].numpy().tobytes())
        return plain_json.loads(found["value"], [flat.untyped_storage() for flat in flats])

    def _contents(self, places: Any) -> list[torch.Tensor]:
        """The bytes of contents, each in memory of its own: read from the data files, or computed from others."""
        for place in places:
            if len(place) != 3 or not all(type(number) is int and number >= 0 for number in place):
                raise ArchiveError("a place in the data files makes no sense")
        made: dict[int, torch.Tensor] = {}
        numbers = [number for file, number, _ in places if file == DERIVED]
        for number in sorted(set(numbers)):
            self._derive(number, made)
        found = iter(self._read([place for place in places if place[0] != DERIVED]))
        flats = []
        for file, start, nbytes in places:
            flat = made[start] if file == DERIVED else next(found)
            if flat.nbytes != nbytes:
                raise ArchiveError("a place in the data files makes no sense")
            flats.append(flat.clone() if file == DERIVED and numbers.count(start) > 1 else flat)
        return flats

    def _derive(self, number: int, made: dict[int, torch.Tensor]) -> None:
        """Add a derived content to `made`, with all derived ones that it needs."""
        waiting = [number]
        while waiting:
            facts = self._derived.get(waiting[-1])
            if facts is None:
                raise ArchiveError("a content that it needs is missing in the index")
            try:
                sources = [tuple(map(int, place)) for place in facts["of"]]
                if any(len(s) != 3 or min(s) < 0 or (s[0] == DERIVED and s[1] >= waiting[-1]) for s in sources):
                    raise ArchiveError("a place in the data files makes no sense")
                missing = [s[1] for s in sources if s[0] == DERIVED and s[1] not in made]
                if missing:
                    waiting += missing
                    continue
                check_memory(int(facts["bytes"]) + sum(flat.nbytes for flat in made.values()))
                read = iter(self._read([s for s in sources if s[0] != DERIVED]))
                flat = derived.read(facts, [made[s[1]] if s[0] == DERIVED else next(read) for s in sources])
                digest = bytes.fromhex(facts["digest"])
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise ArchiveError(f"a content cannot be computed ({type(error).__name__}: {error})") from None
            if not fingerprints.fits(digest, flat):
                raise ArchiveError("a content that is computed from others has other bits than the captured one")
            made[waiting.pop()] = flat

    def _read(self, places: Any) -> list[torch.Tensor]:
        """The bytes at some places of the data files, each in memory of its own."""
        check_memory(sum(nbytes for _, _, nbytes in places))
        flats = []
        with contextlib.ExitStack() as stack:
            files: dict[int, Any] = {}
            for number, start, nbytes in places:
                path = self.folder / segment_name(number)
                if number not in files:
                    if not path.is_file():
                        raise ArchiveError(f"its data file {path.name} is missing")
                    files[number] = stack.enter_context(open(path, "rb", buffering=0))
                file = files[number]
                if start + nbytes > os.fstat(file.fileno()).st_size:
                    raise ArchiveError(f"its data file {path.name} is cut off")
                flat = torch.empty(nbytes, dtype=torch.uint8)
                rest = memoryview(flat.numpy())  # type: ignore[arg-type]
                while len(rest):
                    done = os.preadv(file.fileno(), [rest], start)
                    if not done:
                        raise ArchiveError(f"its data file {path.name} is cut off")
                    start, rest = start + done, rest[done:]
                flats.append(flat)
        return flats


def _lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """The lines of an index, and where they begin; nothing after one that is longer than any line."""
    start = 0
    with open(path, "rb") as file:
        while line := file.readline(_MAX_LINE):
            yield line, start
            start += len(line)
            if len(line) == _MAX_LINE and not line.endswith(b"\n"):
                return


# --- paths ---------------------------------------------------------------------------------------------------


def is_store(folder: Path) -> bool:
    """Whether a folder is a capture store (`is_store(Path("run.store"))`)."""
    return (folder / INDEX).is_file()


def opened(folder: Path) -> CaptureStore:
    """A store, read once while it does not grow; what is missing in it is said once (`opened(folder).calls`)."""
    found = (folder / INDEX).stat()
    return _opened(folder, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _opened(folder: Path, size: int, changed: int) -> CaptureStore:
    store = CaptureStore(folder)
    if store.torn:
        note(f"{folder}: {store.torn}")
    return store


def within(path: Path) -> tuple[CaptureStore, str] | None:
    """The store that a path leads into, and the rest of the path; None where it leads to none.

    >>> within(Path("run.store/torch.add/4711/12/2026-11-16-06-00-00/input.pth"))  # doctest: +SKIP
    """
    if path.is_file():  # the index, a data file, or something else
        path = path.parent
    for parent in (path, *path.parents):
        if is_store(parent):
            rest = path.relative_to(parent).as_posix()
            return opened(parent), "" if rest == "." else rest
        if parent.exists():  # there are no folders in a store
            return None
    return None


def calls_below(path: Path) -> list[Path]:
    """The paths of the calls in a store, or below a path within it (`calls_below(Path("run.store/torch.add"))`)."""
    found = within(path)
    if found is None:
        return []
    store, rest = found
    return [store.folder / name for name in store.calls if not rest or f"{name}/".startswith(f"{rest}/")]


def call_at(path: Path) -> tuple[CaptureStore, StoredCall] | None:
    """The call in a store that has this path (`call_at(Path("run.store/torch.add/4711/12/…"))`)."""
    found = within(path)
    if found is None or found[1] not in found[0].calls:
        return None
    return found[0], found[0].calls[found[1]]
