"""OpTrace: the graph of a run, recorded while it runs: modules, operators, tensors, memory, and fingerprints."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from .. import settings
from ..call.description import Tensor, tensors_in
from ..call.devices import accelerator_type
from ..call.functions import SUM
from ..call.parameters import updated
from ..call.traits import OpTraits
from ..compat import awaited as pending
from ..compat import running_pass
from ..settings import SettingsError
from ..trace import format as columns
from ..trace.collectives import EndsOfCollectives
from ..trace.compiled import COMPILED
from ..trace.compiled_runs import CompiledRuns
from ..trace.format import SUFFIX, TraceWriter
from ..trace.places import Place, place_of_call
from ..trace.record import Recorder, writer_world
from ..watch.compiled import CompiledRun, Tally
from ..watch.intercept import INTERCEPTOR, Call
from ..watch.storages import STORAGES
from ..watch.traffic import python_call
from .base import Tool
from .light import noted

_NOWHERE = Place(None, None, False)


class OpTrace(Tool):
    """Record the graph of a run: which operators made which tensors, in which module, from what, and what they hold.

    >>> with op_tools.OpTrace(to="run_a", steps=range(1)):   # doctest: +SKIP
    ...     train_step()
    $ op_tools trace show run_a -v 2
    """

    name = "OpTrace"
    prefix = "OP_TRACE"
    order = 34
    wants_backward = True
    wants_sums = True
    wants_pointers = False
    columns: ClassVar[dict[str, str]] = {}
    run_options: ClassVar[dict[str, dict[str, Any]]] = {
        "to": {"metavar": "DIR", "help": "the folder of the trace, one file per rank"},
        "stacks": {"type": int, "metavar": "N", "help": "lines of the Python stack to keep for each operator (1)"},
        "prints": {"choices": ["on", "off"], "help": "fingerprints of every tensor (on)"},
        "frames": {"choices": ["user", "all"], "help": "which lines of the stack (user)"},
    }

    def __init__(
        self,
        *what: Any,
        to: str | Path | None = None,
        stacks: int = 1,
        prints: bool | str = True,
        frames: str = "user",
        **more: Any,
    ) -> None:
        """`what` and `more` choose calls, as for every tool: `ops`, `disable`, `steps`, `ranks`, `max_calls`."""
        super().__init__(*what, **more)
        if not isinstance(stacks, int) or stacks < 1:
            raise SettingsError(
                f"{self.name}(stacks={stacks!r}): lines of the stack to keep (--stacks N) are 1 or more"
            )
        self._to = None if to is None else Path(to)
        self._stacks, self._prints, self._frames = stacks, prints in (True, "on"), frames
        self.path: Path | None = None
        self._recorder: Recorder | None = None
        self._book: Any = None  # which records most calls by itself; False where there is none
        self._starting = threading.RLock()  # several threads may call their first operators at once
        self._compiled = CompiledRuns(self, self._started)
        self._collectives = EndsOfCollectives(self, self._started)

    def prepare(self) -> None:
        self._recorder, self._book = None, None
        self.path, self.hears_roots = None, False
        if self._to is not None:
            _make_folder(self._to)
        COMPILED.listen(self._recording)
        STORAGES.add(self._resized)
        if writer_world()[1] > 1:
            self._collectives.listen()

    def _started(self) -> Recorder:
        """The recorder; the file is opened at the first call, when the rank is known."""
        if self._recorder is None:
            with self._starting:
                if self._recorder is None:
                    self._recorder = self._new_recorder()
        return self._recorder

    def _new_recorder(self) -> Recorder:
        rank, world = writer_world()
        folder = self._to
        if folder is None:
            run = os.getppid() if world > 1 else os.getpid()
            folder = settings.results_dir() / "op_trace_results" / f"{time.strftime('%Y-%m-%d-%H-%M')}-{run}"
        facts = {"rank": rank, "world": world, "torch": torch.__version__, "device": accelerator_type()}
        facts |= {"command": " ".join(sys.argv)[:500], "started": time.strftime("%Y-%m-%d %H:%M:%S")}
        self.path = folder / f"rank{rank}{SUFFIX}"
        if world > 1:
            self._collectives.listen()
        return Recorder(TraceWriter(self.path, facts), self._prints, self._stacks, self._frames == "user")

    def light(self, traits: OpTraits) -> tuple[Any, ...] | None:
        may_write = traits.may_write and not traits.names_inplace  # `native.front` looks at what has that name
        writes = may_write or traits.mutates or traits.is_optimizer or traits.collective or traits.facts.updates
        if type(self) is not OpTrace or self.gated or self.only is not None or self._stacks > 1:
            return None
        if writes or _returns_empty(traits):
            return None
        recorder = self._started()
        with self._starting:
            if self._book is None:
                self._book = recorder.watch_by_itself() or False
                INTERCEPTOR.sums.elsewhere = self._call_at if self._book else None
                if self._book:
                    self._book.tell(self._failed_in_backward)
                    hear = self._book.hear_sums
                    INTERCEPTOR.sums.direct = lambda *callbacks: hear(INTERCEPTOR, self.calls, *callbacks)
        if not self._book:
            return None
        return (
            *noted(self, traits.name, lambda _: None, (), 0),
            *(self._book.begin, self._book.end, recorder.writer.text(traits.name)),
        )

    def _call_at(self, thread: int, number: int) -> Any:
        """The call that made a node of autograd, of those that were recorded without Python."""
        found = self._book.call_at(thread, number) if self._book else None
        return None if found is None else _Made(*found)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has other memory now."""
        recorder = self._recorder
        if recorder is None:
            return
        try:
            with recorder.lock:
                recorder.book.resized(storage)
        except Exception as error:
            resize = torch.UntypedStorage.resize_
            self.failed(Call(OpTraits("torch.UntypedStorage.resize_", resize), resize, (), {}), error, "it is not seen")

    def _failed_in_backward(self, name: int, error: BaseException) -> None:
        """What went wrong while machine code recorded the backward of a call, or a sum of gradients."""
        texts = {} if self._recorder is None else self._recorder.writer.texts
        op = next((text for text, number in texts.items() if number == name), SUM)
        call = Call(OpTraits(op, torch.autograd.backward), torch.autograd.backward, (), {})
        self.failed(call, error, "its backward is not in the trace" if name >= 0 else "it is not in the trace")

    # -- what happens around calls --------------------------------------------------------------------

    def before(self, call: Call) -> None:
        traits, recorder = call.traits, self._started()
        if traits.collective:
            self._collectives.entered(call)
        may_write = traits.may_write or traits.mutates or traits.facts.updates
        if may_write or "out" in call.kwargs or call.kwargs.get("inplace"):
            with recorder.lock:
                recorder.module_of(place_of_call(2, recorder.modules.parts))  # its parameters are known from here on
                call.notes[self] = (recorder.inputs(call.tensors), recorder.versions(call.tensors))
                recorder.launch()

    def after(self, call: Call) -> None:
        self.count(call)
        recorder, traits = self._started(), call.traits
        place = _NOWHERE if traits.by_engine else place_of_call(2, recorder.modules.parts)
        phase = columns.FORWARD
        if traits.by_engine:
            phase = columns.BACKWARD
        elif place.optimizer:  # a hook of a gradient may call one in the backward pass
            phase = columns.OPTIMIZER
        elif running_pass() != -1:  # without gradients it is the backward of a function of the user's own
            recomputed = place.module is not None or torch.is_grad_enabled()
            phase = columns.RECOMPUTED if recomputed else columns.BACKWARD
        with recorder.lock:
            in_backward = phase == columns.BACKWARD
            module = recorder.last_module if in_backward else recorder.module_of(place)
            inputs, written = None, list[Tensor]()
            noted = call.notes.pop(self, None)
            if noted is not None:
                inputs, versions = noted
                now = recorder.versions(call.tensors)
                written = [t for t, before, after in zip(call.tensors, versions, now) if before != after]
                if not written and traits.is_optimizer:
                    written = list(call.tensors)
                elif not written and _in_place(call.op) and call.args:  # below autograd nobody counts versions
                    written = list(tensors_in(call.args[0]))
                written += updated(call.function, call.op, call.args, call.kwargs)
            if inputs is None:
                inputs = recorder.inputs(call.tensors)
            number = recorder.operator(
                *(call.op, phase, place, call.step, call.location),
                module=module,
                arguments=recorder.arguments(call.inputs),
                group=(self._collectives.group(call) or _group(call)) if traits.collective else "",
            )
            recorder.edges(number, columns.INPUT, inputs)
            results = call.results
            if _returns_empty(traits):
                for tensor in results:
                    recorder.book.unwritten(tensor)
            if traits.collective:
                filled, awaited = self._collectives.left(call, number, module, phase)
                written += [tensor for tensor in filled if not any(tensor is other for other in written)]
                results = [tensor for tensor in results if not any(tensor is other for other in awaited)]
                for tensor in awaited:  # until somebody has waited, any part of it may have come
                    recorder.book.unwritten(pending(tensor))
            recorder.outputs(number, module, results, written, phase)
            recorder.launch()
            call.notes[self] = (number, module)

    def after_backward(self, call: Call, grad_outputs: list[Tensor | None], grad_inputs: list[Tensor | None]) -> None:
        recorder = self._recorder
        forward, module = call.notes.get(self, (-1, -1))
        if recorder is None:
            return
        with recorder.lock:
            inputs = [-1 if grad is None else recorder.tensor(grad) for grad in grad_outputs]
            number = recorder.operator(
                *(call.op, columns.BACKWARD, None, call.step, call.location), module=module, forward=forward
            )
            recorder.edges(number, columns.INPUT, inputs)
            recorder.gradients(number, module, grad_inputs)
            recorder.launch()

    def after_backward_passes(self, graph_is_kept: bool) -> None:
        self._collectives.backward_ended()
        if self._recorder is not None and self._in_steps():
            with self._recorder.lock:
                self._recorder.after_backward()
                self._recorder.launch()

    def before_backward_pass(self, roots: Sequence[Tensor]) -> None:
        if self._recorder is not None:
            with self._recorder.lock:  # a loss that compiled code returned may not have been used before
                self._recorder.inputs(roots)
        self.hears_roots = False

    def before_compiled_code(self, run: CompiledRun) -> None:
        if self._in_steps() and self.only is None:
            self._compiled.begin(run)

    def after_compiled_code(self, run: CompiledRun | None) -> None:
        if run is not None:
            self.hears_roots = self._compiled.end(run)
        elif self._recorder is not None:
            self._compiled.backward_ran()

    def _recording(self) -> tuple[Recorder, int] | None:
        """Who records a graph of compiled code that begins to run, and the step."""
        return (self._started(), INTERCEPTOR.step) if self._in_steps() else None

    def _compiled_runs(self, wait: bool = False) -> Tally:
        ran = super()._compiled_runs(wait)
        recorded = Tally() if self._recorder is None else self._recorder.recorded
        return ran._replace(forward=ran.forward - recorded.forward, backward=ran.backward - recorded.backward)

    def _in_steps(self) -> bool:
        return self._steps is None or INTERCEPTOR.step in self._steps

    # -- end ------------------------------------------------------------------------------------------

    def read_late(self) -> None:
        if self._recorder is not None:
            writer = self._recorder.writer
            with self._recorder.lock:
                if writer.bring is not None:
                    writer.bring()
                writer.flush()
            writer.settle()

    def finish(self) -> None:
        COMPILED.ignore()
        STORAGES.remove(self._resized)
        self._collectives.stop()
        if self._book:
            INTERCEPTOR.sums.elsewhere = INTERCEPTOR.sums.direct = None
        if self._recorder is not None:
            self._recorder.close()

    def summary(self) -> list[str]:
        if self._recorder is None or self.path is None:
            counted = f"; steps count from the start of the process, which is at step {INTERCEPTOR.step}"
            return ["nothing was recorded" + counted * (self._steps is not None)]
        counts = self._recorder.writer.counts
        if not self.path.exists():
            return [f"the trace {self.path} was removed during the run"]
        size, shown = self.path.stat().st_size / 2**20, settings.shown_path(self.path)
        return [
            f"{counts['operators']:,} operators, {counts['tensors']:,} tensors, {counts['prints']:,} fingerprints",
            f"trace in {shown} ({size:.1f} MiB); op_tools trace show {shown.parent}",
        ]


def _returns_empty(traits: OpTraits) -> bool:
    """Whether nobody has written yet to what a call returns."""
    return traits.facts.uninitialised and traits.name.rpartition(".")[2].startswith(("empty", "new_empty"))


class _Made(NamedTuple):
    """A call of which sums of gradients tell."""

    op: str
    location: str
    inside: None = None


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except (OSError, RecursionError, ValueError) as error:  # too many folders; a character that no name may have
        reason = "it is a file" if os.path.isfile(folder) else getattr(error, "strerror", None) or error
    raise SettingsError(
        f"the folder of the trace, {str(folder)[-200:]!r}, cannot be written ({reason}); "
        "give a folder you may write to (--to DIR, OpTrace(to=...))"
    )


def _in_place(name: str) -> bool:
    """Whether an operator writes to its first argument (`_in_place("aten.add_.Tensor")`)."""
    return any(word.endswith("_") and not word.endswith("__") for word in name.split(".")[-2:])


def _group(call: Call) -> str:
    try:
        found = python_call(call.op.rpartition(".")[2], call.args, call.kwargs)
        group = call.kwargs.get("group") if found is None else found.group
        return f"ranks={torch.distributed.get_process_group_ranks(group or torch.distributed.group.WORLD)}"
    except Exception:
        return ""
