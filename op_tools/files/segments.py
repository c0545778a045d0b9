"""Writes a capture store: each content once, appended to a few data files, and one line per call in an index.

A line is written when all that it refers to is on disk, so a run that is killed leaves calls that are complete, and at
most one line that is cut off. `stored.py` reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ..native.checksum import crc32
from .archive import Damaged

VERSION: Final = 2  # 1 had no derived contents
DERIVED: Final = 0  # stands for the data file of a content that is derived from others
INDEX: Final = "calls.jsonl"
MAGIC: Final = "op_tools capture store"
_ALIGNMENT: Final = 64
_MAX_SEGMENT: Final = 32 << 30  # bytes after which a writer begins another file
_MAX_KNOWN: Final = 1 << 17  # contents that are remembered; older ones are written again

_SUM_OF_LINE: Final = ',"line_crc32":'

Done = Callable[[Exception | None], None]


def segment_name(number: int) -> str:
    """The data file of this number (`segment_name(1) == "data-1.bin"`)."""
    return f"data-{number}.bin"


class Blob:
    """One content: where it is in the data files, once it is written."""

    __slots__ = ("checksum", "depth", "digest", "error", "nbytes", "place", "waiting")

    def __init__(self, digest: bytes, nbytes: int) -> None:
        self.digest, self.nbytes = digest, nbytes
        self.depth = 0  # of a derived content: one more than its sources have
        self.place: tuple[int, int] | None = None  # number of the data file, first byte; DERIVED and its number
        self.checksum = 0  # of the bytes in the data file
        self.error: Exception | None = None
        self.waiting: list[_Line] = []


class _Line:
    """A line of the index that waits until its contents are written."""

    __slots__ = ("blobs", "done", "head", "missing", "parts")

    def __init__(self, head: str, parts: Mapping[str, tuple[str, Sequence[Blob]]], done: Done) -> None:
        self.head, self.parts, self.done = head, parts, done
        self.blobs = {id(blob): blob for _, blobs in parts.values() for blob in blobs}
        self.missing = 0

    def text(self) -> str:
        texts = []
        for part, (text, blobs) in self.parts.items():
            places = [[*blob.place, blob.nbytes] for blob in blobs if blob.place is not None]
            sums = [blob.checksum for blob in blobs]
            listed = f'"blobs":{json.dumps(places, separators=(",", ":"))},"crc32":{json.dumps(sums)}'
            texts.append(f'"{part}":{{{listed},{text}}}')
        line = f'{{{self.head},"parts":{{{",".join(texts)}}}'
        return f"{line}{_SUM_OF_LINE}{zlib.crc32(line.encode())}}}\n"


def check_line(line: bytes) -> None:
    """Raise Damaged unless a line of the index has the checksum that it ends with; older lines have none."""
    text, mark, rest = line.rpartition(_SUM_OF_LINE.encode())
    if mark and rest.rstrip(b"}\n") != str(zlib.crc32(text)).encode():
        raise Damaged("is damaged: a line of its index does not fit its checksum")


class _DerivedLine(_Line):
    """A line about a content that is derived from others, which it waits for."""

    __slots__ = ()

    def text(self) -> str:
        (sources,) = [blobs for _, blobs in self.parts.values()]
        places = [[*blob.place, blob.nbytes] for blob in sources if blob.place is not None]
        line = f'{{{self.head},"of":{json.dumps(places, separators=(",", ":"))}'
        return f"{line}{_SUM_OF_LINE}{zlib.crc32(line.encode())}}}\n"


class _Segment:
    """A data file that one thread appends to; what failed halfway is overwritten."""

    def __init__(self, path: Path, number: int) -> None:
        self.number, self.end = number, 0
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def append(self, buffers: Iterable[Any]) -> tuple[tuple[int, int], int]:
        """Write buffers one after the other; returns their place and their checksum."""
        checksum = 0
        start = place = -(-self.end // _ALIGNMENT) * _ALIGNMENT
        for buffer in buffers:
            checksum = crc32(buffer, checksum)
            rest = memoryview(buffer)
            while len(rest):
                written = os.pwrite(self.descriptor, rest, place)
                place, rest = place + written, rest[written:]
        if place == start:  # nothing is nowhere: not behind the end of the file
            return (self.number, 0), checksum
        self.end = place
        return (self.number, start), checksum


class StoreWriter:
    """A store that is being written, by several threads; the folder is made for the first call.

    >>> store = StoreWriter(Path("run.store"), "4711")                            # doctest: +SKIP
    >>> blob, is_new = store.claim(b"digest of abc", 3)                           # doctest: +SKIP
    >>> store.write(blob, [b"abc"])                                               # doctest: +SKIP
    >>> store.add({"id": 1}, {"input": ('"value":null', [blob])}, lambda e: None) # doctest: +SKIP
    """

    def __init__(self, folder: Path, label: str) -> None:
        self.folder, self._label = folder, label
        self._known: dict[bytes, Blob] = {}  # by fingerprint
        self._segments: dict[int, _Segment] = {}  # by thread
        self._index = -1
        self._index_end = 0
        self._files = self._derived = 0
        self._lock = threading.RLock()
        self.bytes_written = 0

    @property
    def files(self) -> int:
        """How many files there are, the index included."""
        return self._files + bool(self._index_end)

    # -- contents -------------------------------------------------------------------------------------

    def claim(self, digest: bytes, nbytes: int) -> tuple[Blob, bool]:
        """The content with this fingerprint, and whether the caller must write it, or `fail` it."""
        with self._lock:
            blob = self._known.pop(digest, None)
            is_new = blob is None
            if blob is None:
                blob = Blob(digest, nbytes)
                if len(self._known) >= _MAX_KNOWN:
                    self._known.pop(next(iter(self._known)))
            self._known[digest] = blob  # at the end: seen last, forgotten last
            return blob, is_new

    def write(self, blob: Blob, buffers: Iterable[Any]) -> None:
        """Append a content that was claimed; buffers may come one by one. What goes wrong fails the blob."""
        try:
            place, blob.checksum = self._segment().append(buffers)
        except Exception as error:
            self.fail(blob, error)
            raise
        with self._lock:
            self.bytes_written += blob.nbytes
        self._placed(blob, place)

    def _placed(self, blob: Blob, place: tuple[int, int]) -> None:
        with self._lock:
            blob.place = place
            lines, blob.waiting = blob.waiting, []
            ready = [line for line in lines if self._counted_down(line)]
        for line in ready:
            self._put(line)

    def known(self, digest: bytes | None) -> Blob | None:
        """The content with this fingerprint if it was claimed and has not failed (`store.known(digest)`)."""
        with self._lock:
            return None if digest is None else self._known.get(digest)

    def derive(self, blob: Blob, facts: Mapping[str, Any], sources: Sequence[Blob]) -> None:
        """Write a content that was claimed as an operation on others, once these are written."""
        with self._lock:
            self._derived += 1
            number = self._derived
        blob.depth = 1 + max(source.depth for source in sources)

        def done(error: Exception | None) -> None:
            if error is not None:
                self.fail(blob, error)
            else:
                self._placed(blob, (DERIVED, number))

        head = {"derived": number, "bytes": blob.nbytes, "digest": blob.digest.hex(), **facts}
        self._wait(_DerivedLine(json.dumps(head, separators=(",", ":"))[1:-1], {"of": ("", sources)}, done))

    def fail(self, blob: Blob, error: Exception) -> None:
        """A content will not be written: calls that need it are lost, and it is new when it is seen again."""
        with self._lock:
            blob.error = error
            if self._known.get(blob.digest) is blob:
                del self._known[blob.digest]
            lines, blob.waiting = blob.waiting, []
        for line in lines:
            line.done(error)

    @staticmethod
    def _counted_down(line: _Line) -> bool:
        line.missing -= 1
        return line.missing == 0

    def _segment(self) -> _Segment:
        thread = threading.get_ident()
        segment = self._segments.get(thread)
        if segment is None or segment.end > _MAX_SEGMENT:
            self._open()
            with self._lock:
                self._files += 1
                number = self._files
            if segment is not None:
                os.close(segment.descriptor)
            segment = self._segments[thread] = _Segment(self.folder / segment_name(number), number)
        return segment

    # -- the index ------------------------------------------------------------------------------------

    def add(self, facts: Mapping[str, Any], parts: Mapping[str, tuple[str, Sequence[Blob]]], done: Done) -> None:
        """Add a call once its contents are written; each part is the JSON of its fields, and its contents.

        `done` is called when the line is written, or with the error that prevented it.
        """
        self._wait(_Line(json.dumps(facts, separators=(",", ":"))[1:-1], parts, done))

    def _wait(self, line: _Line) -> None:
        with self._lock:
            missing = [blob for blob in line.blobs.values() if blob.place is None]
            error = next((blob.error for blob in missing if blob.error is not None), None)
            if error is None:
                line.missing = len(missing)
                for blob in missing:
                    blob.waiting.append(line)
        if error is not None:
            line.done(error)
        elif not missing:
            self._put(line)

    def _put(self, line: _Line) -> None:
        try:
            self._open()
            self._append(line.text())
        except Exception as error:
            line.done(error)
        else:
            line.done(None)

    def _append(self, text: str) -> None:
        with self._lock:
            if not os.fstat(self._index).st_nlink:
                raise FileNotFoundError(f"{self.folder} was deleted")
            rest = memoryview(text.encode())
            size = len(rest)
            try:
                while len(rest):
                    rest = rest[os.write(self._index, rest) :]
            except OSError:
                os.ftruncate(self._index, self._index_end)  # the next line begins where this one did
                raise
            self._index_end += size

    def _open(self) -> None:
        """Make the folder and the index, once."""
        with self._lock:
            if self._index >= 0:
                return
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            name, number = self.folder.name, 1
            while True:
                with contextlib.suppress(FileExistsError):
                    self.folder.mkdir()
                    break
                number += 1  # a second run within the same second
                self.folder = self.folder.with_name(name.replace(".store", f"-{number}.store"))
            self._index = os.open(self.folder / INDEX, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            head = {"format": MAGIC, "version": VERSION, "torch": torch.__version__, "byteorder": sys.byteorder}
            self._append(json.dumps({**head, "label": self._label}) + "\n")

    def close(self) -> None:
        """All threads that write have ended."""
        with self._lock:
            for segment in self._segments.values():
                os.close(segment.descriptor)
            self._segments.clear()
            if self._index >= 0:
                os.close(self._index)
                self._index = -1
            unwritten = [blob for blob in self._known.values() if blob.place is None]
            self._known.clear()
        for blob in unwritten:  # whoever claimed it was interrupted
            self.fail(blob, RuntimeError("the capture ended before it was written"))
