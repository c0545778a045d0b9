"""What collectives made, for OpTrace, and those that C++ code starts: the buckets of DDP, and its broadcasts.

Autograd does not count what a collective writes, and its results are there only when somebody has waited for it.
Buckets of DDP have ended at the end of the backward pass.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final

import torch

from ..call import site
from ..call.description import Tensor, describe
from ..call.traits import OpTraits
from ..compat import running_pass
from ..watch.collectives import BROADCAST, COLLECTIVES, NO_BUCKET, REDUCER, Launch
from ..watch.hooks import Hooks
from ..watch.intercept import INTERCEPTOR, Call
from ..watch.traffic import OPERATORS
from . import format as columns
from .book import storage_of
from .places import Place, place_of_call
from .record import Recorder

_NOWHERE: Final = Place(None, None, False)


@dataclasses.dataclass(eq=False)
class Begun:
    """A collective that has begun; user code calls it, or C++ does."""

    operator: int = -1  # that stands for it, where it has one already
    module: int = -1
    phase: int = columns.FORWARD
    launches: list[Launch] = dataclasses.field(default_factory=list)  # of a call that has not returned
    ended: set[Launch] = dataclasses.field(default_factory=set)  # of those
    awaited: dict[Launch, list[Tensor]] = dataclasses.field(default_factory=dict)  # what each will have filled


class EndsOfCollectives:
    """Tells a trace when collectives have ended, and of those that no Python function calls.

    >>> EndsOfCollectives(tool, lambda: recorder).listen()   # doctest: +SKIP
    """

    def __init__(self, tool: Hooks, recorder: Callable[[], Recorder]) -> None:
        self._tool, self._recorder = tool, recorder
        self._pid = os.getpid()
        self._thread = threading.local()  # `begun`: the call of user code that this thread is in

    def listen(self) -> None:
        """Begin, if that has not been done; `stop` ends it."""
        if self not in COLLECTIVES.listeners:
            self._pid = os.getpid()
            COLLECTIVES.add(self)

    def backward_ended(self) -> None:
        """No backward pass is under way: the results of buckets are there."""
        if COLLECTIVES.listeners:
            COLLECTIVES.backward_ended()

    def stop(self) -> None:
        """Hear no more."""
        COLLECTIVES.remove(self)

    # -- calls of user code ---------------------------------------------------------------------------

    def entered(self, call: Call) -> None:
        """User code calls a collective; what it launches belongs to this call."""
        call.notes[self] = self._thread.begun = Begun()

    def group(self, call: Call) -> str:
        """The ranks of the group that a call of user code is about; empty where it has launched nothing."""
        launches = call.notes[self].launches
        return _ranks(launches[0]) if launches else ""

    def left(self, call: Call, operator: int, module: int, phase: int) -> tuple[list[Tensor], list[Tensor]]:
        """It has returned, and has an operator now: the tensors that it has filled, and those that it will have."""
        begun: Begun = call.notes.pop(self)
        self._thread.begun = None
        begun.operator, begun.module, begun.phase = operator, module, phase
        filled = list[Tensor]()
        for launch in begun.launches:
            tensors = _filled(launch, [*call.tensors, *call.results])
            launch.traffic = launch.traffic._replace(sent=())  # the run's tensors are not held any longer
            if launch in begun.ended:
                filled += tensors
            else:
                begun.awaited[launch] = tensors
        begun.launches, begun.ended = [], set()
        return filled, [tensor for tensors in begun.awaited.values() for tensor in tensors]

    # -- what the watch tells, on the threads of the run ----------------------------------------------

    def wants(self, tensors: Sequence[Tensor], function: str) -> bool:
        """Whether the trace has a collective; what DDP keeps its own books with is not in it."""
        if function not in (REDUCER, BROADCAST) and (function or getattr(self._thread, "begun", None) is None):
            return False
        if not tensors or os.getpid() != self._pid or not INTERCEPTOR.tools:
            return False
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        return INTERCEPTOR.include_cpu or any(not t.is_cpu for t in tensors)

    def began(self, launch: Launch) -> None:
        """Add an operator for what C++ starts, with what is sent."""
        begun: Begun | None = getattr(self._thread, "begun", None)
        if launch.bucket is None and begun is not None:
            launch.notes = begun
            begun.launches.append(launch)
            return
        call = _call(launch)
        if not self._tool.wants(call.traits) or (self._tool.gated and not self._tool.accepts(call)):
            return
        recorder = self._recorder()
        in_backward = launch.bucket is not None or running_pass() != -1
        phase = columns.BACKWARD if in_backward else columns.FORWARD
        with recorder.lock:
            place = _NOWHERE if in_backward else place_of_call(2, recorder.modules.parts)
            module = _wrapper(recorder, launch) if in_backward else recorder.module_of(place)
            # DDP's C++ code has filled its bucket, and counted no version
            inputs = [recorder.tensor(tensor, wrote=launch.bucket is not None) for tensor in call.tensors]
            number = recorder.operator(
                *(call.op, phase, place, call.step, call.location),
                module=module,
                arguments=recorder.arguments(call.inputs),
                group=_ranks(launch),
            )
            recorder.edges(number, columns.INPUT, inputs)
            recorder.launch()
        launch.notes = Begun(number, module, phase)

    def ended(self, launch: Launch, is_intact: Callable[[], bool]) -> None:
        """Add what came out of it."""
        begun: Begun | None = launch.notes
        if begun is None:
            return
        if begun.operator < 0:
            begun.ended.add(launch)
            return
        results = begun.awaited.pop(launch, None) or [result.tensor for result in launch.traffic.results]
        if is_intact():
            recorder = self._recorder()
            with recorder.lock:
                recorder.outputs(begun.operator, begun.module, (), results, begun.phase)
                for tensor in results if launch.bucket is not None else ():
                    recorder.book.allocated(begun.operator, begun.module, tensor, columns.GRADIENT)
                recorder.launch()

    def lost(self, launch: Launch, reason: str) -> None:
        """The operator has no results then."""

    def failed(self, name: str, error: Exception) -> None:
        """The run goes on."""
        self._tool.failed(Call(_traits(name), torch.distributed.all_reduce, (), {}), error, "it is not in the trace")


def _ranks(launch: Launch) -> str:
    return f"ranks={torch.distributed.get_process_group_ranks(launch.group)}"


def _filled(launch: Launch, among: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that a collective has filled: those of its caller, where they are known, or c10d's."""
    results = [result.tensor for result in launch.traffic.results]
    storages, sent = {storage_of(tensor) for tensor in results}, launch.traffic.sent
    found: dict[int, Tensor] = {}
    for tensor in among:
        filled = any(tensor is result for result in results)
        if filled or (storage_of(tensor) in storages and not any(tensor is one for one in sent)):
            found[id(tensor)] = tensor
    return list(found.values()) or results


def _traits(name: str) -> OpTraits:
    name = OPERATORS.get(name, name)
    function = getattr(torch.distributed, name, torch.distributed.all_reduce)
    return OpTraits(f"torch.distributed.{name}", function, collective=True, mutates=True)


def _call(launch: Launch) -> Call:
    """The call that a collective would be if user code made it."""
    traits, sent = _traits(launch.name), list(launch.traffic.sent)
    call = Call(traits, traits.function, (sent,), {})
    call.step, call.location = INTERCEPTOR.step, _location(launch)
    call.tensors, call.inputs = sent, describe((sent,))
    return call


def _location(launch: Launch) -> str:
    if launch.bucket is None:
        return site.call_site()
    return "DDP: which parameters were used" if launch.bucket == NO_BUCKET else f"DDP bucket {launch.bucket}"


def _wrapper(recorder: Recorder, launch: Launch) -> int:
    """The module whose gradients a group of ranks adds up; -1 where several do, or it was not called yet."""
    kind = torch.nn.parallel.DistributedDataParallel
    wrappers = [(m, n) for m, n in recorder.modules.living() if isinstance(m, kind)]
    found = [number for module, number in wrappers if module.process_group is launch.group]
    return found[0] if len(found) == 1 else -1
