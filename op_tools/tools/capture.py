"""OpCapture: saves real inputs, outputs and gradients of operators, with their layout and aliasing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from .. import settings
from ..call.description import Described, Descriptions, Tensor, TensorMeta, describe, labelled
from ..call.devices import accelerator_type, autocast_dtype, get_rng_state, quiet
from ..copies.invocation import Invocation, Region, Site
from ..copies.operands import MAX_BORROWED, Fetcher, Layouts, Operands, mark_after, measure
from ..copies.queue import Writer
from ..files import archive
from ..files.header import content, header
from ..view import console, store
from ..watch.intercept import Call
from .base import Tool

_MEBI: Final = 1 << 20
_PATIENCE: Final = 1.0  # seconds before writing starts, so that a burst of captures is not slowed down
_GIVE_UP_AFTER: Final = 3  # failed writes in a row
_FORWARD: Final = ("input", "output")
_BACKWARD: Final = ("grad_inputs", "grad_outputs")


class OpCapture(Tool):
    """Save what operators got and returned, forward and backward, for replay elsewhere.

    >>> with op_tools.OpCapture(ops=["torch.Tensor.sort"]):  # doctest: +SKIP
    ...     model(x).sort()
    """

    name = "OpCapture"
    prefix = "OP_CAPTURE"
    feature = "op_capture"
    order = 40
    wants_backward = True
    looks_inside = True
    columns: ClassVar[dict[str, str]] = {
        "call_id": "INTEGER",
        "site": "INTEGER",
        "part": "TEXT",
        "path": "TEXT",
        "bytes": "INTEGER",
    }
    wants_pointers = False
    writer: Writer

    def prepare(self) -> None:
        self.folder = settings.results_dir() / "op_capture_results"
        drop = settings.choice("OP_CAPTURE_WHEN_FULL") == "drop"
        threads = int(settings.number("OP_CAPTURE_WRITERS"))
        megabytes = settings.number("OP_CAPTURE_QUEUE_MB", _default_queue() / _MEBI)
        self.writer = Writer(int(megabytes * _MEBI), threads, drop, _PATIENCE)
        self._label, self._rank = settings.process_label(), settings.rank()
        self._root = str(self.folder)
        self._inputs, self._outputs, self._grads = Layouts(), Layouts(), Layouts()
        self._gradients = Descriptions()
        self._shown: deque[_Shown | str] = deque()  # blocks, and operators that were left alone
        self._showing = threading.Lock()
        self._fetchers: dict[int, Fetcher] = {}
        self.bytes_written = 0
        self.files_written = 0
        self.write_seconds = 0.0
        self._broken = 0
        self._dropped = 0

    # -- on threads of the training --------------------------------------------------------------------

    def before(self, call: Call) -> None:
        if self._broken >= _GIVE_UP_AFTER:
            with self._counting:
                self._dropped += 1
            return
        nbytes = _bytes_in(call.inputs, call.tensors)
        if not self.writer.reserve(nbytes):
            self.found(call, "dropped", "captures were dropped: the queue was full (OP_CAPTURE_WHEN_FULL)", once=True)
            return
        claimed = _Claim(self.writer, nbytes)
        device = call.device
        rng = None
        if call.traits.random is not False:
            rng = {"cpu": torch.get_rng_state(), "device": get_rng_state(device), "type": str(device)}
        region = Region(device.type, torch.is_grad_enabled(), autocast_dtype(device.type), None, rng)
        with quiet():
            staged = self._inputs.stage(call.inputs.number, call.tensors, (call.args, call.kwargs), event=False)
        call.notes[self] = (staged, region, claimed)

    def after(self, call: Call) -> None:
        noted = call.notes.pop(self, None)
        if noted is None:
            return
        inputs, region, claimed = noted
        nbytes = _bytes_in(call.outputs, call.results)
        if not self.writer.reserve(nbytes):
            return
        with quiet():
            outputs = self._outputs.stage(call.outputs.number, call.results, call.result)
            if outputs.event is None:
                inputs = inputs._replace(event=mark_after(inputs.storages))
        self.calls[call.op] += 1
        folder = f"{self._root}/{call.op}/{self._label}/{call.id}/{store.time_label()}"
        call.notes[self] = folder
        total = nbytes + claimed.take()
        if inputs.opaque:
            kinds = ", ".join(inputs.opaque)
            self.found(call, "not-captured", f"arguments of type {kinds} were not captured", once=True)
        shown = self._to_show(call, None)  # here, not on the writer's thread: shown in the order of the calls
        job = functools.partial(self._write, call, folder, _FORWARD, (inputs, outputs), region, shown)
        self.writer.submit(total, job)
        if self.view.full or self.only is not None:
            self._settle()

    def _settle(self) -> None:
        if self.only is not None:  # a feature on one operator shows at once
            self.writer.drain()
        self._show_done()

    def after_backward(self, call: Call, grad_outputs: list[Tensor | None], grad_inputs: list[Tensor | None]) -> None:
        folder = call.notes.get(self)
        if folder is None:
            return
        found: list[list[Tensor]] = [[], []]
        to_inputs = self._gradients.of(tuple(grad_inputs), {}, found[0], False)
        from_outputs = self._gradients.of(tuple(grad_outputs), {}, found[1], False)
        nbytes = _bytes_in(to_inputs, found[0]) + _bytes_in(from_outputs, found[1])
        if not self.writer.reserve(nbytes):
            return
        outputs = self._grads.stage(from_outputs.number, found[1], tuple(grad_outputs), event=False)
        inputs = self._grads.stage(to_inputs.number, found[0], tuple(grad_inputs))
        if inputs.event is None:
            outputs = outputs._replace(event=mark_after(outputs.storages))
        described = None
        if self.view.full:
            described = (describe(tuple(g for g in grad_outputs if g is not None)), describe(tuple(grad_inputs)))
        shown = self._to_show(call, described)
        job = functools.partial(self._write, call, folder, _BACKWARD, (inputs, outputs), None, shown)
        self.writer.submit(nbytes, job)
        if self.only is not None:
            self._settle()

    def _to_show(self, call: Call, gradients: Any) -> _Shown | None:
        if not self.view.full:
            return None
        shown = _Shown(call, gradients)
        self._shown.append(shown)
        return shown

    # -- on threads of the writer ----------------------------------------------------------------------

    def _write(
        self,
        call: Call,
        folder: str,
        parts: tuple[str, ...],
        staged: tuple[Operands, ...],
        region: Region | None,
        shown: _Shown | None,
    ) -> None:
        try:
            began = time.perf_counter()
            facts = {"name": call.op}
            if region is not None:
                made_at = Site(call.location, "", call.step, self._rank)
                facts = header(Invocation(call.id, call.op, call.function, call.traits, made_at, region))
            written = _Files(folder, self._fetchers.setdefault(threading.get_ident(), Fetcher()))
            event = next((s.event for s in reversed(staged) if s.event is not None), None)
            described = []
            for part, one in zip(parts, staged):
                of_part = facts if part == "input" else {"name": call.op}
                described.append(f'"{part}": {written.add(part, one._replace(event=event), of_part)}')
                with self._counting:
                    self.bytes_written += one.nbytes
                    self.files_written += 1
            readable = {"torch": torch.__version__, **{key: fact for key, fact in facts.items() if key != "rng"}}
            written.describe(
                "metadata.json" if "input" in parts else "grad_metadata.json",
                f'{json.dumps(readable, default=str)[:-1]}, "tensors": {{{", ".join(described)}}}}}',
            )
            site = self.site(call)
            for part, one in zip(parts, staged):
                self.record(call.id, site, part, f"{folder}/{part}.pth", one.nbytes)
            with self._counting:
                self.write_seconds += time.perf_counter() - began
                self._broken = 0
            if shown is not None:
                shown.paths = [Path(f"{folder}/{part}.pth") for part in parts]
        except Exception as error:
            with self._counting:
                self._broken += 1
                self._dropped += 1
            self.failed(call, error, f"a capture could not be written to {folder}")
        finally:
            if shown is not None:
                shown.done = True

    # -- what is shown --------------------------------------------------------------------------------

    def skipped(self, op: str) -> None:
        if self.view.full:  # the line waits until the files of earlier calls are written
            self._shown.append(op)
            self._show_done()

    def _show_done(self) -> None:
        with self._showing:
            while self._shown:
                shown = self._shown[0]
                if not isinstance(shown, str) and not shown.done:
                    return
                self._shown.popleft()
                if isinstance(shown, str):
                    self.view.skip(self.hook, shown)
                elif shown.paths:
                    self._show(shown.call, shown.paths, shown.gradients)

    def _show(self, call: Call, paths: list[Path], gradients: tuple[Described, Described] | None) -> None:
        lines = [f"{path} saved" for path in paths]
        stamp = f"forward_id:{call.id}/{paths[0].parent.name}"
        first, second = gradients or (call.inputs, call.outputs)
        key: Any = (call.op, first.args, second.args)
        if gradients is None:
            names, key = ("inputs", "outputs"), self.site(call)
            lines = [f"apply {self.hook} on {call.op}", *lines, f"{call.op}    {stamp}    {call.location}"]
        else:
            names = ("grad_output", "grad_inputs")
            lines.append(f"{call.op} {stamp}")
        shown = self.view.tables.render(
            key,
            call.op,
            lambda: labelled(first, names[0]) + labelled(second, names[1]),
            first.data_ptrs + second.data_ptrs,
            console.CAPTURE_COLUMNS,
        )
        self.view.block(*lines, shown, below=4)

    def finish(self) -> None:
        self.writer.close()
        self._show_done()
        self._fetchers.clear()

    def summary(self) -> list[str]:
        facts = [f"{self.files_written} files, {self.bytes_written / 1e6:.1f} MB in {self.folder}"]
        if self.writer.waited:
            facts.append("the run waited for the disk: the queue was full (OP_CAPTURE_QUEUE_MB, OP_CAPTURE_WHEN_FULL)")
        lost = self.writer.dropped + self._dropped
        if lost:
            facts.append(f"{lost} captures were dropped")
        return facts

    def records(self) -> list[dict[str, Any]]:
        """The files of the last run, in the order of the calls (`capture.records()[0]["path"]`)."""
        return sorted(super().records(), key=lambda row: row["call_id"])


@dataclasses.dataclass(slots=True)
class _Shown:
    """A block that the console shows, in the order of the calls, once its files are written."""

    call: Call
    gradients: tuple[Described, Described] | None
    paths: list[Path] = dataclasses.field(default_factory=list)
    done: bool = False


class _Claim:
    """Bytes reserved in the queue, released when the operator itself failed and nothing will be written."""

    def __init__(self, writer: Writer, nbytes: int) -> None:
        self._writer, self._nbytes = writer, nbytes

    def take(self) -> int:
        nbytes, self._nbytes = self._nbytes, 0
        return nbytes

    def __del__(self) -> None:
        if self._nbytes:
            self._writer.release(self._nbytes)


def _default_queue() -> int:
    """A few percent of the device memory, where the snapshots are."""
    if accelerator_type() == "cuda":
        with contextlib.suppress(Exception):
            free, total = torch.cuda.mem_get_info()
            return int(min(total // 16, free // 4))
    return 512 * _MEBI


def _bytes_in(described: Described, tensors: list[Tensor]) -> int:
    return sum([t.nbytes for t in tensors]) if described.number else measure(tensors)


class _Files:
    """Writes the files of one call; calls with the same layout share what can be prepared once."""

    def __init__(self, folder: str, fetcher: Fetcher) -> None:
        self._folder, self._fetcher = folder, fetcher

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
            buffers = [_buffer(flat) for flat in borrow(storages, event)]
        else:
            buffers = [functools.partial(lambda s: _buffer(borrow([s], event)[0]), s) for s in storages]
        self._with_folder(lambda: archive.save_fragments(f"{self._folder}/{part}.pth", [*fragments, pickled], buffers))
        return str(known_text)

    def _add_odd(self, part: str, staged: Operands, facts: dict[str, Any]) -> str:
        value = self._fetcher.unpack(staged)
        payload = {**{key: archive.encode(v) for key, v in facts.items()}, **content(part, value)}
        self._with_folder(lambda: archive.save(Path(f"{self._folder}/{part}.pth"), payload))
        return json.dumps(_described(part, value), default=str)

    def describe(self, name: str, text: str) -> None:
        self._with_folder(lambda: archive.save_text(f"{self._folder}/{name}", text))

    def _with_folder(self, write: Callable[[], None]) -> None:
        try:
            write()
        except FileNotFoundError:  # the first file of a call creates the folder
            os.makedirs(self._folder, exist_ok=True)
            write()


def _buffer(flat: Tensor) -> Any:
    array: Any = flat.numpy()
    return memoryview(array) if flat.numel() else b""


def _described(part: str, value: Any) -> dict[str, Any]:
    described = describe(*value) if part == "input" else describe((value,) if part == "output" else value)
    rows = labelled(described, {"input": "inputs", "output": "outputs"}.get(part, part))
    return {label: p.as_dict() if isinstance(p, TensorMeta) else p for label, p in rows}
