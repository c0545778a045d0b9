"""Keeps captured calls in a store: what a call shares with earlier calls is neither copied nor written again.

Two contents are the same if their fingerprints are (`native/fingerprints.py`). On an accelerator the fingerprint is
computed in place, before the call goes on, and only new contents are copied; elsewhere the writer computes it. What is
new, but the sum, product or conversion of contents that are there, is written as that (`derived.py`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ..call.description import Tensor, map_tensors, tensors_in
from ..call.devices import module_of
from ..copies.operands import (
    Fetcher,
    Layout,
    Layouts,
    Operands,
    Ref,
    Whole,
    bytes_of,
    copy_storage,
    lay_out,
    map_leaves,
    mark_after,
    tensors_over,
)
from ..copies.queue import Writer
from ..native import fingerprints
from ..view import store as records
from . import archive, derived, plain_json
from .derived import Recipe, Trial
from .header import content
from .seed_layout import Done, buffer_of, described, encoded
from .segments import Blob, StoreWriter

_AT_ONCE: Final = 1 << 25  # bytes that go to the host together
_New = dict[torch.device, list[tuple[Blob, fingerprints.Span]]]
_Content = tuple[Blob, Tensor, Tensor]  # its copy on the device, and the sums behind the fingerprint of the copy


class QueueFull(Exception):
    """A content was not copied because the queue was full."""


class ChangedMeanwhile(Exception):
    """A content is not the one that its fingerprint was computed of."""


class StoreFormat:
    """A capture store that is being written; snapshots wait in a bounded queue until its threads write them.

    >>> StoreFormat(Path("op_capture_results"), "4711", Writer(1 << 20))  # doctest: +SKIP
    """

    def __init__(self, folder: Path, label: str, writer: Writer) -> None:
        self._store = StoreWriter(folder / f"{label}-{records.time_label()}.store", label)
        self._writer = writer
        self._fetchers: dict[int, Fetcher] = {}

    @property
    def folder(self) -> Path:
        """The store."""
        return self._store.folder

    @property
    def bytes_written(self) -> int:
        """Bytes of contents that are in the data files."""
        return self._store.bytes_written

    @property
    def files(self) -> int:
        """How many files the store has."""
        return self._store.files

    # -- on threads of the training -------------------------------------------------------------------

    def stage(
        self,
        layouts: Layouts,
        number: int,
        tensors: list[Tensor],
        value: Any,
        event: bool = True,
        recipes: Sequence[Recipe] = (),
    ) -> tuple[Operands, int] | None:
        """A snapshot of `value`, and the bytes that it takes in the queue; None where the queue is full.

        `recipes` say how tensors in it may have come about. Its storages are contents of the store, or copies whose
        fingerprints the writer will compute. New contents are on their way to the store when this returns.
        """
        opaque: list[str] = []
        shared = layout = layouts.of(number, tensors, value)
        if layout is None:
            tensors = list(tensors_in(value))
            layout = lay_out(value, tensors, opaque)
        spans = [(tensors[at], start, end) for at, start, end in layout.parts]
        is_odd = shared is None and _is_odd(layout)
        trials = [] if is_odd else derived.tried(recipes)
        operands = [t for trial in trials for t in (trial.found, *trial.recipe.sources())]
        more = [(t, 0, t.numel() * t.element_size()) for t in operands]
        digests: list[bytes | None] = [None] * len(spans) if is_odd else fingerprints.of_device(spans + more)
        ways = self._ways(trials, digests[len(spans) :])
        parts: list[Any] = []
        new: _New = {}
        copied = sent = 0
        for span, digest in zip(spans, digests):
            if digest is None:
                parts.append(span)
                copied += span[2] - span[1]
                continue
            blob, is_new = self._store.claim(digest, span[2] - span[1])
            parts.append(blob)
            way = ways.get(digest)
            if is_new and way is not None and blob not in way[1]:
                self._store.derive(blob, *way)
            elif is_new:
                new.setdefault(span[0].device, []).append((blob, span))
                sent += blob.nbytes
        claimed = False
        try:
            claimed = self._writer.reserve(copied + sent)
            if not claimed:
                self._fail(new, QueueFull("the queue was full"))
                return None
            storages = tuple([copy_storage(*part) if type(part) is tuple else part for part in parts])
            jobs = self._copied(new)
        except BaseException as error:  # Ctrl-C while it waits, no memory for the copies
            if claimed:
                self._writer.release(copied + sent)
            self._fail(new, RuntimeError(f"it could not be copied ({type(error).__name__}: {error})"))
            raise
        for contents, event_after in jobs:
            nbytes = sum(blob.nbytes for blob, *_ in contents)
            self._writer.submit(nbytes, functools.partial(self._write_contents, contents, event_after))
        copies = tuple([s for s in storages if isinstance(s, Tensor)])
        mark = mark_after(copies) if event and copies else None
        return Operands(layout.tree, storages, mark, layout.nbytes, tuple(opaque), shared), copied

    def _ways(self, trials: list[Trial], digests: list[bytes | None]) -> dict[bytes, tuple[dict[str, Any], list[Blob]]]:
        """Operations on contents of the store by the fingerprint of what comes of them."""
        ways: dict[bytes, tuple[dict[str, Any], list[Blob]]] = {}
        place = 0
        for trial in trials:
            count = 1 + len(trial.recipe.sources())
            found, *of = digests[place : place + count]
            place += count
            sources = [
                blob for blob in map(self._store.known, of) if blob is not None and blob.depth < derived.MAX_DEPTH
            ]
            if found is not None and len(sources) == len(of) and not bool(trial.nans):
                ways[found] = (trial.recipe.described(), sources)
        return ways

    def _copied(self, new: _New) -> list[tuple[list[_Content], Any]]:
        """New contents, copied on their devices, in portions that several threads can write, and events after them."""
        jobs: list[tuple[list[_Content], Any]] = []
        for device, pairs in new.items():
            context = getattr(module_of(device.type), "device", None)
            with context(device) if context is not None else contextlib.nullcontext():
                copies = [copy_storage(*span) for _, span in pairs]
                sums = fingerprints.sums(copies)  # another stream may have written meanwhile
                mark = mark_after(tuple(copies))
            size = _AT_ONCE
            for found in zip([blob for blob, _ in pairs], copies, sums):
                if size + found[0].nbytes > _AT_ONCE:
                    jobs.append(([], mark))
                    size = 0
                jobs[-1][0].append(found)
                size += found[0].nbytes
        return jobs

    def _fail(self, new: _New, error: Exception) -> None:
        for blob, _ in itertools.chain(*new.values()):
            self._store.fail(blob, error)

    # -- on threads of the queue ----------------------------------------------------------------------

    def _fetcher(self) -> Fetcher:
        return self._fetchers.setdefault(threading.get_ident(), Fetcher())

    def _write_contents(self, contents: list[_Content], event: Any) -> None:
        """Bring a portion of new contents to the host and append them to the data files."""
        blobs, copies, sums = zip(*contents)
        is_large = blobs[0].nbytes > _AT_ONCE  # and alone in its portion
        try:
            flats = self._fetcher().borrow(sums if is_large else sums + copies, event)
            for blob, copy, rows, flat in itertools.zip_longest(blobs, copies, flats[: len(sums)], flats[len(sums) :]):
                if fingerprints.from_sums(rows.numpy().tobytes(), blob.nbytes) != blob.digest:
                    self._store.fail(blob, ChangedMeanwhile("another stream wrote to a tensor while it was captured"))
                else:
                    self._store.write(blob, self._in_pieces(copy, event) if is_large else [buffer_of(flat)])
        except Exception as error:
            for blob in blobs:
                if blob.place is None and blob.error is None:
                    self._store.fail(blob, error)

    def _in_pieces(self, copy: Tensor, event: Any) -> Iterator[Any]:
        flat = bytes_of(copy)
        for start in range(0, flat.numel(), _AT_ONCE):
            piece = flat.narrow(0, start, min(_AT_ONCE, flat.numel() - start))
            yield buffer_of(self._fetcher().borrow([piece], event)[0])

    def write(
        self, folder: str, call: Mapping[str, int], staged: Mapping[str, Operands], facts: Mapping[str, Any], done: Done
    ) -> None:
        """Add parts of a call, on a thread of the queue; `call` has its id and step, `done` is called at the end."""
        try:
            event = next((s.event for s in reversed([*staged.values()]) if s.event is not None), None)
            parts: dict[str, tuple[str, list[Blob]]] = {}
            for part, one in staged.items():
                of_part = facts if part == "input" else {"name": facts["name"]}
                parts[part] = self._part(part, one._replace(event=event), of_part)
            nbytes = sum(one.nbytes for one in staged.values())
            self._store.add({"folder": folder, "op": facts["name"], **call, "bytes": nbytes}, parts, done)
        except Exception as error:
            done(error)

    def _part(self, part: str, staged: Operands, facts: Mapping[str, Any]) -> tuple[str, list[Blob]]:
        """A part in the index: its fields as JSON, and its contents."""
        layout = staged.layout
        if layout is None and _is_odd(staged):
            value = self._fetcher().unpack(staged)
            with tempfile.TemporaryDirectory() as folder:  # `torch.save` writes the name of the file into it
                path = Path(folder) / f"{part}.pth"
                archive.save(path, encoded(part, value, facts))
                return f'"archive":true,"tensors":{described(part, value)}', [self._host_blob(path.read_bytes())]
        blobs = [s if isinstance(s, Blob) else self._copied_blob(s, staged.event) for s in staged.storages]
        texts = layout.notes.get((part,)) if layout is not None else None
        if texts is None:
            sizes = [s.nbytes for s in staged.storages]
            texts = (plain_json.dumps(content(part, staged.tree))[1:], described(part, _empty(staged.tree, sizes)))
            if layout is not None:
                layout.notes[(part,)] = texts
        own = {key: archive.encode(fact) for key, fact in facts.items()}

        def refer(tensor: Tensor) -> Ref:
            blobs.append(self._host_blob(buffer_of(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))))
            return Ref.of(tensor, len(blobs) - 1)

        head = plain_json.dumps({"format": archive.FORMAT, **map_tensors(own, refer)})[:-1]
        return f'"value":{head},{texts[0]},"tensors":{texts[1]}', blobs

    def _copied_blob(self, copy: Tensor, event: Any) -> Blob:
        return self._host_blob(buffer_of(self._fetcher().borrow([copy], event)[0]))

    def _host_blob(self, buffer: Any) -> Blob:
        """The content of bytes on the host, written if it is new."""
        blob, is_new = self._store.claim(fingerprints.of_host(buffer), len(buffer))
        if is_new:
            self._store.write(blob, [buffer])
        return blob

    def close(self) -> None:
        """The queue is empty."""
        self._store.close()
        self._fetchers.clear()


def _is_odd(staged: Layout | Operands) -> bool:
    """Whether a tensor in a tree is without strides: only `torch.save` can write it."""
    found: list[bool] = []

    def look(leaf: Any) -> None:
        found.append(isinstance(leaf, Whole))

    map_leaves(staged.tree, look)
    return any(found)


def _empty(tree: Any, sizes: list[int]) -> Any:
    """A staged tree with tensors over memory that nobody touches, in order to describe them."""
    flats = [torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage(size)) for size in sizes]
    return tensors_over(tree, flats)
