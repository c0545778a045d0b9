"""Snapshots of calls under comparison, on the run's thread: how tensors are copied, how much of them, and guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..call.description import Tensor
from ..compat import count_dispatch_modes, no_dispatch_modes
from ..copies.operands import AROUND, Fetcher, Layouts, Operands
from ..copies.routes import Routes
from .ladder import ComparedCall
from .memory import Guarded, Neighbours


class Snapshots:
    """Takes the snapshots of a run; `report` gets an operator whose copies are wrong, and what they do.

    >>> snapshots.arguments(compared)  # doctest: +SKIP
    """

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self.routes = Routes(report, self._follow)
        self.neighbours = Neighbours()
        self._layouts = Layouts(AROUND)
        # held here, too: a forked child drops what threads hold, and freeing pinned memory there aborts it
        self._fetchers: list[Fetcher] = []

    def _follow(self) -> None:
        self._layouts.copy = self.routes.on_device
        for fetcher in self._fetchers:
            fetcher.to_host = self.routes.to_host

    def fetcher(self) -> Fetcher:
        """What brings snapshots to the host, for one thread."""
        made = Fetcher()
        made.to_host = self.routes.to_host
        self._fetchers.append(made)
        return made

    def release(self) -> None:
        """Free pinned memory, once no thread works any more."""
        self._fetchers.clear()

    def unusable(self, device: torch.device) -> str:
        """Why nothing on a device can be compared; empty where it can."""
        self.routes.check(device)
        return self.routes.broken

    def stage(
        self, number: int, tensors: list[Tensor], value: Any, whole: bool = False, gradients: bool = False
    ) -> Operands:
        """A snapshot that the user's dispatch modes do not see; the interceptor has switched off function modes."""
        if not count_dispatch_modes():
            return self._layouts.stage(number, tensors, value, True, whole, gradients)
        with no_dispatch_modes():
            return self._layouts.stage(number, tensors, value, True, whole, gradients)

    def begin(self, compared: ComparedCall) -> Operands:
        """The arguments of a call that is about to run; some calls are guarded until `end`."""
        if compared.traits.by_engine:
            return self.arguments(compared)
        guarded = self.neighbours.begin(compared.live)
        if guarded is not None:
            compared.notes[Guarded] = guarded
        staged = self.arguments(compared)
        layout = staged.layout
        if layout is not None and layout.left_out and self.neighbours.affords(compared.live, layout.left_out):
            compared.whole = True
            staged = self.arguments(compared)
        return staged

    def arguments(self, compared: ComparedCall) -> Operands:
        """The arguments of a call."""
        call = compared.live
        given = (call.args, call.kwargs)
        return self.stage(call.inputs.number, call.tensors, given, compared.whole, compared.traits.by_engine)

    def end(self, compared: ComparedCall) -> None:
        """The call has run."""
        results = compared.live.results
        if results:
            self.routes.check(results[0].device)  # it may have brought the first tensor there
        guarded: Guarded | None = compared.notes.get(Guarded)
        if guarded is not None and not guarded.end(results):
            del compared.notes[Guarded]

    def values(self, compared: ComparedCall) -> Operands:
        """Arguments and results after a call."""
        call, (inputs, outputs) = compared.live, compared.numbers
        number = inputs << 32 | outputs if inputs and outputs else 0  # never that of arguments alone
        everything = (call.args, call.kwargs, call.result)
        gradients = compared.traits.by_engine
        return self.stage(number, [*call.tensors, *call.results], everything, compared.whole, gradients)
