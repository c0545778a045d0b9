"""The layout of the seeds: a folder per call with `input.pth`, `output.pth`, the gradients and readable metadata."""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ..call.description import Tensor, TensorMeta, describe, labelled
from ..copies.operands import MAX_BORROWED, Fetcher, Layouts, Operands, measure
from ..copies.queue import Writer
from . import archive
from .header import content

FORWARD_PARTS: Final = ("input", "output")
BACKWARD_PARTS: Final = ("grad_inputs", "grad_outputs")
Done = Callable[[Exception | None], None]  # called once a call is on disk, or could not be written


class SeedFormat:
    """Keeps calls in the layout of the seeds; snapshots wait in a bounded queue until its threads write them.

    >>> SeedFormat(Path("op_capture_results"), Writer(1 << 20))  # doctest: +SKIP
    """

    def __init__(self, folder: Path, writer: Writer) -> None:
        self.folder, self._writer = folder, writer
        self._fetchers: dict[int, Fetcher] = {}
        self.bytes_written = 0
        self.files = 0
        self._counting = threading.Lock()

    def stage(
        self,
        layouts: Layouts,
        number: int,
        tensors: list[Tensor],
        value: Any,
        event: bool = True,
        recipes: Sequence[Any] = (),
    ) -> tuple[Operands, int] | None:
        """A snapshot of `value`, and the bytes that it takes in the queue; None where the queue is full.

        Files hold bytes as they are, so `recipes` for them are of no use.
        """
        nbytes = measure(tensors)
        if not self._writer.reserve(nbytes):
            return None
        try:
            return layouts.stage(number, tensors, value, event), nbytes
        except BaseException:
            self._writer.release(nbytes)
            raise

    def write(
        self, folder: str, call: Mapping[str, int], staged: Mapping[str, Operands], facts: Mapping[str, Any], done: Done
    ) -> None:
        """Write parts of a call, on a thread of the queue; `facts` describe the call, `done` is called at the end."""
        try:
            files = CallFiles(f"{self.folder}/{folder}", self._fetchers.setdefault(threading.get_ident(), Fetcher()))
            event = next((s.event for s in reversed([*staged.values()]) if s.event is not None), None)
            texts = {}
            for part, one in staged.items():
                of_part = dict(facts) if part == "input" else {"name": facts["name"]}
                texts[part] = files.add(part, one._replace(event=event), of_part)
                with self._counting:
                    self.bytes_written += one.nbytes
                    self.files += 1
            files.describe(facts, texts)
        except Exception as error:
            done(error)
        else:
            done(None)

    def close(self) -> None:
        """The queue is empty."""
        self._fetchers.clear()


class CallFiles:
    """Writes the files of one call; calls with the same layout share what can be prepared once.

    >>> CallFiles("op_capture_results/torch.add/1/1/t", Fetcher()).add("input", staged, facts)  # doctest: +SKIP
    """

    def __init__(self, folder: str, fetcher: Fetcher | None = None) -> None:
        self._folder, self._fetcher = folder, fetcher or Fetcher()

    def add(self, part: str, staged: Operands, facts: dict[str, Any]) -> str:
        """Write one part; returns the description of its tensors as JSON."""
        layout = staged.layout
        known = layout.notes.get(part) if layout is not None else None
        if known is None or facts.get("rng") is not None:
            described: str = self._add_odd(part, staged, facts)
            if layout is not None:
                try:
                    sizes = [end - start for _, start, end in layout.parts]
                    payload = content(part, layout.tree)
                    pickled = b"".join([archive.fragment(v, sizes) for pair in payload.items() for v in pair])
                    layout.notes[part] = (pickled, described)
                except archive.NotPlain:
                    pass
            return described
        pickled, known_text = known
        fragments = [archive.fragment(archive.encode(v)) for pair in facts.items() for v in pair]
        borrow, event, storages = self._fetcher.borrow, staged.event, staged.storages
        buffers: list[Any]
        if staged.nbytes <= MAX_BORROWED:
            buffers = [buffer_of(flat) for flat in borrow(storages, event)]
        else:
            buffers = [functools.partial(lambda s: buffer_of(borrow([s], event)[0]), s) for s in storages]
        self._with_folder(lambda: archive.save_fragments(f"{self._folder}/{part}.pth", [*fragments, pickled], buffers))
        return str(known_text)

    def _add_odd(self, part: str, staged: Operands, facts: dict[str, Any]) -> str:
        value = self._fetcher.unpack(staged)
        self.save(part, encoded(part, value, facts))
        return described(part, value)

    def save(self, part: str, payload: Mapping[str, Any]) -> None:
        """Write one part whose content is encoded already."""
        self._with_folder(lambda: archive.save(Path(f"{self._folder}/{part}.pth"), payload))

    def copy(self, part: str, whole: bytes) -> None:
        """Write one part that is a file already."""
        self._with_folder(lambda: archive.save_bytes(f"{self._folder}/{part}.pth", whole))

    def describe(self, facts: Mapping[str, Any], texts: Mapping[str, str], version: str = torch.__version__) -> None:
        """Write what people may want to read: facts of the call, and the description of each part as JSON."""
        readable = {"torch": version, **{key: fact for key, fact in facts.items() if key != "rng"}}
        tensors = ", ".join([f'"{part}": {text}' for part, text in texts.items()])
        name = "metadata.json" if "input" in texts else "grad_metadata.json"
        whole = f'{json.dumps(readable, default=str)[:-1]}, "tensors": {{{tensors}}}}}'
        self._with_folder(lambda: archive.save_text(f"{self._folder}/{name}", whole))

    def _with_folder(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (FileNotFoundError, RuntimeError) as error:  # the first file of a call creates the folder
            if isinstance(error, RuntimeError) and "does not exist" not in str(error):  # as PyTorch says it
                raise
            os.makedirs(self._folder, exist_ok=True)
            write()


def encoded(part: str, value: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts and values of a part as a file holds them (`encoded("output", x, {"name": "torch.add"})`)."""
    return {**{key: archive.encode(fact) for key, fact in facts.items()}, **content(part, value)}


def described(part: str, value: Any) -> str:
    """What the tensors of a part look like, as JSON (`described("output", x)`)."""
    found = describe(*value) if part == "input" else describe((value,) if part == "output" else value)
    rows = labelled(found, {"input": "inputs", "output": "outputs"}.get(part, part))
    return json.dumps({label: p.as_dict() if isinstance(p, TensorMeta) else p for label, p in rows}, default=str)


def buffer_of(flat: Tensor) -> Any:
    """The memory of bytes on the host (`buffer_of(torch.zeros(2, dtype=torch.uint8))`)."""
    array: Any = flat.numpy()
    return memoryview(array) if flat.numel() else b""
