"""OpCapture: saves real inputs, outputs and gradients of operators, with their layout and aliasing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
import threading
from collections import deque
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from .. import settings
from ..call.description import Described, Descriptions, Tensor, describe, labelled
from ..call.devices import accelerator_type, autocast_dtype, get_rng_state, quiet
from ..copies.invocation import Invocation, Region, Site
from ..copies.operands import Layouts, Operands, mark_after, on_host
from ..copies.queue import FreeMemory, Writer, within_free_memory
from ..files.derived import factor_of, of_call, of_gradients
from ..files.header import header
from ..files.seed_layout import BACKWARD_PARTS, FORWARD_PARTS, SeedFormat
from ..files.store_format import ChangedMeanwhile, QueueFull, StoreFormat
from ..native import fingerprints
from ..view import console, store
from ..watch.intercept import Call
from .base import Tool

_MEBI: Final = 1 << 20
_PATIENCE: Final = 0.1  # seconds before writing starts: a burst of captures is not slowed down, a kill costs little
_STORE_PATIENCE: Final = 0.04
_MAX_AGE: Final = 0.15  # seconds that a capture waits before the run does: this much is lost at a kill
_GIVE_UP_AFTER: Final = 3  # failed writes in a row
_DROPPED: Final = "captures were dropped: the queue was full (OP_CAPTURE_WHEN_FULL)"
_MAX_JOBS: Final = 50_000  # in the queue of a store, where a call may need no copies at all
FORMATS: Final = settings.options("OP_CAPTURE_FORMAT")


class OpCapture(Tool):
    """Save what operators got and returned, forward and backward, for replay elsewhere.

    >>> with op_tools.OpCapture(ops=["torch.Tensor.sort"]):  # doctest: +SKIP
    ...     model(x).sort()
    """

    name = "OpCapture"
    prefix = "OP_CAPTURE"
    feature = "op_capture"
    columns: ClassVar[dict[str, str]] = {
        "call_id": "INTEGER",
        "site": "INTEGER",
        "part": "TEXT",
        "path": "TEXT",
        "bytes": "INTEGER",
    }
    order = 40
    wants_backward = looks_inside = wants_twins_joined = True
    wants_pointers = False
    run_options: ClassVar[dict[str, dict[str, Any]]] = {
        "format": {"choices": FORMATS, "help": "files per call as documented, or each content once (the default)"},
    }
    writer: Writer

    def __init__(self, *args: Any, format: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if format is not None and format not in FORMATS:
            raise settings.SettingsError(f"OpCapture(format={format!r}): choose from {', '.join(FORMATS)}")
        self._format = format

    def prepare(self) -> None:
        self.folder = settings.results_dir() / "op_capture_results"
        drop = settings.choice("OP_CAPTURE_WHEN_FULL") == "drop"
        threads = int(settings.number("OP_CAPTURE_WRITERS"))
        megabytes = settings.number("OP_CAPTURE_QUEUE_MB", _default_queue() / _MEBI)
        in_store = (self._format or settings.choice("OP_CAPTURE_FORMAT")) == "store"
        patience, max_jobs = (_STORE_PATIENCE, _MAX_JOBS) if in_store else (_PATIENCE, 1 << 30)
        self.writer = Writer(int(megabytes * _MEBI), threads, drop, patience, max_jobs, _MAX_AGE)
        most = 0.8 * shutil.disk_usage(self.folder.parent).free / 1e9  # a run does not fill a disk
        self._max_bytes = settings.number("OP_CAPTURE_MAX_GB", most) * 1e9
        self._label, self._rank = settings.process_label(), settings.rank()
        self._in_store = in_store
        self._files: SeedFormat | StoreFormat
        self._files = (
            StoreFormat(self.folder, self._label, self.writer) if in_store else SeedFormat(self.folder, self.writer)
        )
        self._shown_folder = settings.shown_path(self._files.folder)
        self._inputs, self._outputs, self._grads = Layouts(), Layouts(), Layouts()
        self._gradients = Descriptions()
        self._shown: deque[_Shown | str] = deque()  # blocks, and operators that were left alone
        self._showing = threading.Lock()
        self._memory: FreeMemory | None = FreeMemory(self.writer.max_bytes)
        self.bytes_captured = 0
        self._broken = 0
        self._dropped = 0

    # -- on threads of the training --------------------------------------------------------------------

    def before(self, call: Call) -> None:
        if self._broken >= _GIVE_UP_AFTER:
            with self._counting:
                self._dropped += 1
            return
        if self._memory is not None and self._memory.is_low() and self.writer.shrink():  # before the training gets none
            self._memory = None
        device = call.device
        rng = None
        if call.traits.random is not False:
            rng = {"cpu": torch.get_rng_state(), "device": get_rng_state(device), "type": str(device)}
        region = Region(device.type, torch.is_grad_enabled(), autocast_dtype(device.type), None, rng)
        arguments = (call.args, call.kwargs)
        with quiet():
            staged = self._files.stage(self._inputs, call.inputs.number, call.tensors, arguments, event=False)
        if staged is None:
            self.found(call, "dropped", _DROPPED, once=True)
            return
        call.notes[self] = (staged[0], region, _Claim(self.writer, staged[1]))

    def after(self, call: Call) -> None:
        noted = call.notes.pop(self, None)
        if noted is None:
            return
        inputs, region, claimed = noted
        with quiet():
            recipes = of_call(call.op, call.args, call.kwargs, call.result) if self._in_store else ()
            staged = self._files.stage(self._outputs, call.outputs.number, call.results, call.result, recipes=recipes)
            if staged is None:
                return
            outputs, nbytes = staged
            if outputs.event is None:
                inputs = inputs._replace(event=mark_after(inputs.copies()))
        self.calls[call.op] += 1
        folder = f"{call.op}/{self._label}/{call.id}/{store.time_label()}"
        call.notes[self] = (folder, factor_of(call.op, call.args, call.kwargs) if self._in_store else None)
        total = nbytes + claimed.take()
        if inputs.opaque:
            kinds = ", ".join(inputs.opaque)
            self.found(call, "not-captured", f"arguments of type {kinds} were not captured", once=True)
        shown = self._to_show(call, None)  # here, not on the writer's thread: shown in the order of the calls
        parts = dict(zip(FORWARD_PARTS, (inputs, outputs)))
        job = functools.partial(self._write, call, folder, parts, region, shown)
        self.writer.submit(total, job)
        if self.view.full or self.only is not None:
            self._settle()

    def _settle(self) -> None:
        if self.only is not None:  # a feature on one operator shows at once
            self.writer.drain()
        self._show_done()

    def make_room(self, call: Call) -> bool:
        noted, freed = call.notes.get(self), self.writer.shrink()
        if noted is not None and isinstance(noted[0], Operands):  # of the arguments, until the call has run
            call.notes[self] = (on_host(noted[0]), *noted[1:])
        return freed

    def after_backward(self, call: Call, grad_outputs: list[Tensor | None], grad_inputs: list[Tensor | None]) -> None:
        noted = call.notes.get(self)
        if noted is None:
            return
        folder, factor = noted
        found: list[list[Tensor]] = [[], []]
        to_inputs = self._gradients.of(tuple(grad_inputs), {}, found[0], False)
        from_outputs = self._gradients.of(tuple(grad_outputs), {}, found[1], False)
        staged = self._files.stage(self._grads, from_outputs.number, found[1], tuple(grad_outputs), event=False)
        if staged is None:
            return
        outputs, claimed = staged[0], _Claim(self.writer, staged[1])
        recipes = of_gradients(factor, grad_outputs, grad_inputs)
        staged = self._files.stage(self._grads, to_inputs.number, found[0], tuple(grad_inputs), recipes=recipes)
        if staged is None:
            return
        inputs, nbytes = staged
        if inputs.event is None:
            outputs = outputs._replace(event=mark_after(outputs.copies()))
        described = None
        if self.view.full:
            described = (describe(tuple(g for g in grad_outputs if g is not None)), describe(tuple(grad_inputs)))
        shown = self._to_show(call, described)
        parts = dict(zip(BACKWARD_PARTS, (inputs, outputs)))
        job = functools.partial(self._write, call, folder, parts, None, shown)
        self.writer.submit(nbytes + claimed.take(), job)
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
        self, call: Call, folder: str, parts: dict[str, Operands], region: Region | None, shown: _Shown | None
    ) -> None:
        facts: dict[str, Any] = {"name": call.op}
        if region is not None:
            made_at = Site(call.location, "", call.step, self._rank)
            facts = header(Invocation(call.id, call.op, call.function, call.traits, made_at, region))
        sizes = {part: staged.nbytes for part, staged in parts.items()}
        done = functools.partial(self._written, call, folder, sizes, shown)
        self._files.write(folder, {"id": call.id, "step": call.step}, parts, facts, done)

    def _written(
        self, call: Call, folder: str, sizes: dict[str, int], shown: _Shown | None, error: Exception | None
    ) -> None:
        """Parts of a call are on disk, or could not be written."""
        try:
            path = f"{self._shown_folder}/{folder}"
            if error is not None:
                with self._counting:
                    self._broken += not isinstance(error, (QueueFull, ChangedMeanwhile))
                    self._dropped += 1
                if isinstance(error, QueueFull):
                    self.found(call, "dropped", _DROPPED, once=True)
                else:
                    self.failed(call, error, f"a capture could not be written to {path}")
                return
            site = self.site(call)
            for part, nbytes in sizes.items():
                self.record(call.id, site, part, f"{path}/{part}.pth", nbytes)
            with self._counting:
                self.bytes_captured += sum(sizes.values())
                full = self.bytes_written >= self._max_bytes
                self._broken = _GIVE_UP_AFTER if full else 0
            if full and self._is_first("", "full"):
                free = shutil.disk_usage(self.folder.parent).free / 1e9
                told = f"{self._max_bytes / 1e9:.3g} GB are written, {free:.3g} GB are free (OP_CAPTURE_MAX_GB)"
                self.found(call, "dropped", f"later calls are not captured: {told}")
            if shown is not None:
                shown.paths = [Path(f"{path}/{part}.pth") for part in sizes]
        finally:
            if shown is not None:
                shown.done = True

    @property
    def bytes_written(self) -> int:
        """Bytes of tensors in the files of the last run (`capture.bytes_written`)."""
        return self._files.bytes_written

    @property
    def files_written(self) -> int:
        """How many files the last run has written (`capture.files_written`)."""
        return self._files.files

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
        self._files.close()
        self._show_done()
        for device, why in fingerprints.BROKEN.items():
            self.slowed(f"fingerprints on {device}", f"slower kernels or the host compute them: {why}")

    def summary(self) -> list[str]:
        facts = [f"{self.files_written} files, {self.bytes_written / 1e6:.1f} MB in {self._shown_folder}"]
        if self.bytes_captured > self.bytes_written:
            facts[0] += f"; {self.bytes_captured / 1e6:.1f} MB of tensors, each content written once"
        if self.writer.waited:
            facts.append("the run waited for the disk: the queue was full (OP_CAPTURE_QUEUE_MB, OP_CAPTURE_WHEN_FULL)")
        elif self.writer.paused_seconds >= 1:
            facts.append(f"the run waited {self.writer.paused_seconds:.0f} s for the disk, so that a kill costs little")
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
    most = 512 * _MEBI
    if accelerator_type() == "cuda":
        with contextlib.suppress(Exception):
            most = int(torch.cuda.mem_get_info()[1]) // 16
    return within_free_memory(most)
