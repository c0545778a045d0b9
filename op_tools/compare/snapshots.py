"""Snapshots of calls under comparison, on the run's thread: how tensors are copied, how much of them, and guards."""

from __future__ import annotations

import gc
from collections.abc import Callable

from ..copies.operands import AROUND, Fetcher, Layouts, Operands, on_host
from ..copies.routes import Routes
from .ladder import ComparedCall
from .memory import Guarded, Neighbours


class Snapshots:
    """Takes the snapshots of a run; `report` gets an operator whose copies are wrong, and what they do.

    >>> snapshots.begin(compared)  # doctest: +SKIP
    """

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self.routes = Routes(report, self._follow)
        self.neighbours = Neighbours()
        self.layouts = Layouts(AROUND)
        # held here, too: a forked child drops what threads hold, and freeing pinned memory there aborts it
        self._fetchers: list[Fetcher] = []

    def _follow(self) -> None:
        self.layouts.copy = self.routes.on_device
        for fetcher in self._fetchers:
            fetcher.to_host = self.routes.to_host

    def fetcher(self) -> Fetcher:
        """What brings snapshots to the host, for one thread."""
        made = Fetcher()
        made.to_host = self.routes.to_host
        self._fetchers.append(made)
        return made

    def make_room(self) -> None:
        """Bring to the host what waits for a backward, and copy to the host alone from now on."""
        self.routes.spare_memory()
        for compared in [each for each in gc.get_objects() if type(each) is ComparedCall]:  # rare: nobody lists them
            if compared.before is not None:
                compared.before = on_host(compared.before)

    def release(self) -> None:
        """Free pinned memory, once no thread works any more."""
        self._fetchers.clear()

    def begin(self, compared: ComparedCall) -> Operands:
        """The arguments of a call that is about to run; some calls are guarded until `end`.

        `layouts` alone does where a call of the kind was guarded before and no guard is due.
        """
        call = compared.live
        guarded = self.neighbours.begin(call)
        if guarded is not None:
            compared.notes[Guarded] = guarded
        staged = self.layouts.stage(call.inputs.number, call.tensors, (call.args, call.kwargs))
        return self.widened(compared, staged)

    def widened(self, compared: ComparedCall, staged: Operands) -> Operands:
        """The snapshot of a call's arguments, now and then with all of the storages that they are views of."""
        call, layout = compared.live, staged.layout
        if layout is None or not layout.left_out or not self.neighbours.affords(call, layout.left_out):
            return staged
        compared.whole = True
        return self.layouts.stage(call.inputs.number, call.tensors, (call.args, call.kwargs), whole=True)

    def end(self, compared: ComparedCall) -> None:
        """The call has run: it was guarded, or brought the first tensor to a device."""
        results = compared.live.results
        if results:
            self.routes.check(results[0].device)
        guarded: Guarded | None = compared.notes.get(Guarded)
        if guarded is not None and not guarded.end(results):
            del compared.notes[Guarded]
