"""OpCapture: saves real inputs, outputs and gradients of operators, faithful in layout and aliasing."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import deque
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from .. import archive, console, settings, store
from ..devices import accelerator_type, get_rng_state, module_of, quiet
from ..intercept import Call
from ..opcall import Described, Tensor, TensorMeta, describe, labelled
from ..snapshot import Staged, Unpacker, measure, stage
from ..writer import Writer
from .base import Tool

_MEBI: Final = 1 << 20
_PATIENCE: Final = 1.0  # seconds that a burst of captures goes undisturbed by its own writing
_GIVE_UP_AFTER: Final = 3  # failed writes in a row


class OpCapture(Tool):
    """Save what operators got and returned, forward and backward, for replay elsewhere.

    >>> with op_tools.OpCapture(ops=["torch.Tensor.sort"]):  # doctest: +SKIP
    ...     model(x).sort()
    """

    name = "OpCapture"
    prefix = "OP_CAPTURE"
    order = 40
    wants_backward = True
    columns: ClassVar[dict[str, str]] = {
        "call_id": "INTEGER",
        "site": "INTEGER",
        "part": "TEXT",
        "path": "TEXT",
        "bytes": "INTEGER",
    }

    def __init__(
        self,
        ops: Iterable[str] | str | None = None,
        disable: Iterable[str] | str | None = None,
        steps: Container[int] | None = None,
        ranks: Container[int] | None = None,
        max_calls: int | None = None,
    ) -> None:
        super().__init__(ops, disable, steps, ranks, max_calls)
        self.writer: Writer | None = None

    def prepare(self) -> None:
        self.folder = settings.results_dir() / "op_capture_results"
        drop = settings.choice("OP_CAPTURE_WHEN_FULL", ("block", "drop")) == "drop"
        threads = max(1, int(settings.number("OP_CAPTURE_WRITERS", 2, minimum=1)))
        room = settings.number("OP_CAPTURE_QUEUE_MB", _default_queue() / _MEBI, minimum=1)
        self.writer = Writer(int(room * _MEBI), threads, drop, _PATIENCE)
        self._label = settings.process_label()
        self._shown: deque[_Shown] = deque()
        self._unpackers: dict[int, Unpacker] = {}
        self.bytes_written = 0
        self.files_written = 0
        self.write_seconds = 0.0
        self._broken = 0
        self._dropped = 0

    # -- on the training's threads --------------------------------------------------------------------

    def before(self, call: Call) -> None:
        assert self.writer is not None
        if self._broken >= _GIVE_UP_AFTER:
            self._dropped += 1
            return
        value = (call.args, call.kwargs)
        nbytes = measure(value)
        if not self.writer.reserve(nbytes):
            self.found(call, "dropped", "captures were dropped: the queue was full (OP_CAPTURE_WHEN_FULL)", once=True)
            return
        claimed = _Claim(self.writer, nbytes)
        state = self._state(call)
        with quiet():
            call.notes[self] = (stage(value, event=False), state, claimed)

    def _state(self, call: Call) -> dict[str, Any]:
        device = call.device
        state: dict[str, Any] = {
            "name": call.op,
            "id": call.id,
            "location": call.location,
            "step": call.step,
            "grad_enabled": torch.is_grad_enabled(),
            "autocast": _autocast_state(device.type),
            "rng": None,
        }
        if call.traits.random is not False:
            state["rng"] = {"cpu": torch.get_rng_state(), "device": get_rng_state(device), "type": str(device)}
        return state

    def after(self, call: Call) -> None:
        noted = call.notes.pop(self, None)
        if noted is None:
            return
        assert self.writer is not None
        inputs, state, claimed = noted
        nbytes = measure(call.result)
        if not self.writer.reserve(nbytes):
            return
        with quiet():
            outputs = stage(call.result)
        self.calls[call.op] += 1
        stamp = store.time_label()
        folder = f"{self.folder}/{call.op}/{self._label}/{call.id}/{stamp}"
        call.notes[self] = folder
        total = nbytes + claimed.take()
        if inputs.opaque:
            kinds = ", ".join(inputs.opaque)
            self.found(call, "not-captured", f"arguments of type {kinds} were not captured", once=True)
        parts = {"input": (inputs, {**state, "kind": "input"}), "output": (outputs, {"name": call.op})}
        shown = self._to_show(call, None)  # here, not on the writer's thread: shown in the order of the calls
        self.writer.submit(total, lambda: self._write(call, folder, parts, shown, outputs.event))
        self._settle()

    def _settle(self) -> None:
        if self.only is not None and self.writer is not None:  # a feature on one operator shows at once
            self.writer.drain()
        self._show_done()

    def after_backward(self, call: Call, grad_outputs: list[Tensor | None], grad_inputs: list[Tensor | None]) -> None:
        noted = call.notes.get(self)
        if noted is None:
            return
        assert self.writer is not None
        value = (tuple(grad_outputs), tuple(grad_inputs))
        nbytes = measure(value)
        if not self.writer.reserve(nbytes):
            return
        outputs = stage(tuple(grad_outputs), event=False)
        inputs = stage(tuple(grad_inputs))
        described = (describe(tuple(g for g in grad_outputs if g is not None)), describe(tuple(grad_inputs)))
        parts = {
            "grad_inputs": (inputs, {"name": call.op}),
            "grad_outputs": (outputs, {"name": call.op}),
        }
        shown = self._to_show(call, described)
        self.writer.submit(nbytes, lambda: self._write(call, noted, parts, shown, inputs.event))
        if self.only is not None:
            self._settle()

    def _to_show(self, call: Call, gradients: Any) -> _Shown | None:
        if not self.view.full:
            return None
        shown = _Shown(call, gradients)
        self._shown.append(shown)
        return shown

    # -- on the writer's threads ----------------------------------------------------------------------

    def _write(
        self,
        call: Call,
        place: str,
        parts: dict[str, tuple[Staged, dict[str, Any]]],
        shown: _Shown | None,
        event: Any,
    ) -> None:
        try:
            began = time.perf_counter()
            os.makedirs(place, exist_ok=True)
            folder = Path(place)
            unpacker = self._unpackers.setdefault(threading.get_ident(), Unpacker())
            paths = []
            described: dict[str, Any] = {}
            readable: dict[str, Any] = {"torch": torch.__version__}
            for part, (staged, facts) in parts.items():
                value = unpacker.unpack(staged._replace(event=event))
                path = folder / f"{part}.pth"
                archive.save(path, {**_encode_facts(facts), **_payload(part, value)})
                described[part] = _described(part, value)
                readable.update(_plain_facts(facts))
                paths.append(path)
                self.bytes_written += staged.nbytes
                self.files_written += 1
                self.record(call.id, self.site(call), part, str(path), staged.nbytes)
            name = "metadata.json" if "input" in parts else "grad_metadata.json"
            archive.save_json(folder / name, {**readable, "tensors": described})
            self.write_seconds += time.perf_counter() - began
            self._broken = 0
            if shown is not None:
                shown.paths = paths
        except Exception as error:
            self._broken += 1
            self._dropped += 1
            self.failed(call, error, f"a capture could not be written to {place}")
        finally:
            if shown is not None:
                shown.done = True

    # -- what is shown --------------------------------------------------------------------------------

    def _show_done(self) -> None:
        while self._shown and self._shown[0].done:
            shown_call = self._shown.popleft()
            call, paths, gradients = shown_call.call, shown_call.paths, shown_call.gradients
            if not paths:
                continue
            lines = [f"{path} saved" for path in paths]
            stamp = f"forward_id:{call.id}/{paths[0].parent.name}"
            if gradients is None:
                pointers = call.inputs.data_ptrs + call.outputs.data_ptrs
                lines.insert(0, f"apply {self.hook} on {call.op}")
                lines.append(f"{call.op}    {stamp}    {call.location}")
                shown = self.view.tables.render(
                    self.site(call),
                    call.op,
                    functools.partial(console.call_rows, call.inputs, call.outputs),
                    pointers,
                    console.CAPTURE_COLUMNS,
                )
            else:
                outputs, inputs = gradients
                lines.append(f"{call.op} {stamp}")
                shown = self.view.tables.render(
                    (call.op, outputs.args, inputs.args),
                    call.op,
                    functools.partial(_gradient_rows, outputs, inputs),
                    outputs.data_ptrs + inputs.data_ptrs,
                    console.CAPTURE_COLUMNS,
                )
            self.view.block(*lines, shown, "\n\n\n")

    def finish(self) -> None:
        assert self.writer is not None
        self.writer.close()
        self._show_done()
        self._unpackers.clear()

    def summary(self) -> list[str]:
        assert self.writer is not None
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

    def polish(self, row: dict[str, Any]) -> None:
        row.pop("described", None)


def _gradient_rows(outputs: Described, inputs: Described) -> console.LabelledRows:
    return labelled(outputs, "grad_output") + labelled(inputs, "grad_inputs")


class _Shown:
    """A block that the console shows, in the order of the calls, once its files are written."""

    __slots__ = ("call", "done", "gradients", "paths")

    def __init__(self, call: Call, gradients: Any) -> None:
        self.call, self.gradients = call, gradients
        self.paths: list[Path] = []
        self.done = False


class _Claim:
    """Room in the queue, given back when the operator itself failed and nothing will be written."""

    def __init__(self, writer: Writer, nbytes: int) -> None:
        self._writer, self._nbytes = writer, nbytes

    def take(self) -> int:
        nbytes, self._nbytes = self._nbytes, 0
        return nbytes

    def __del__(self) -> None:
        if self._nbytes:
            self._writer.release(self._nbytes)


def _default_queue() -> int:
    """A few percent of the memory that staged copies live in."""
    kind = accelerator_type()
    if kind == "cuda":
        try:
            free, total = module_of(kind).mem_get_info()
            return int(min(total // 16, free // 4))
        except Exception:
            pass
    return 512 * _MEBI


def _autocast_state(device_type: str) -> dict[str, Any] | None:
    try:
        if torch.is_autocast_enabled(device_type):
            return {"device_type": device_type, "dtype": str(torch.get_autocast_dtype(device_type))}
    except (RuntimeError, TypeError):
        pass
    return None


def _encode_facts(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: archive.encode(value) for key, value in facts.items()}


def _plain_facts(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if key != "rng"}


def _payload(part: str, value: Any) -> dict[str, Any]:
    if part == "input":
        return {"args": archive.encode(value[0]), "kwargs": archive.encode(value[1])}
    return {"result" if part == "output" else part: archive.encode(value)}


def _described(part: str, value: Any) -> dict[str, Any]:
    described: Described
    if part == "input":
        described = describe(*value)
    elif part == "output":
        described = describe((value,))
    else:
        described = describe(value)
    rows = labelled(described, {"input": "inputs", "output": "outputs"}.get(part, part))
    return {label: p.as_dict() if isinstance(p, TensorMeta) else p for label, p in rows}
