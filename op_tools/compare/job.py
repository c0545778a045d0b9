"""What is compared: a call of the run with the snapshot of its arguments, and one phase of it to be judged."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final

from ..call.description import Tensor, tensors_in
from ..copies.invocation import BACKWARD, FORWARD, Invocation
from ..copies.operands import Operands
from ..copies.transport import MOST_BORROWED, Fetcher
from ..judge.golden import GoldenResult
from ..judge.verdict import Judgement

Places = tuple[tuple[int, int, bool, bool], ...]
PENDING: Final = Judgement("pending", "")  # a judge has taken the job, and tells later


@dataclasses.dataclass(slots=True, eq=False)
class ComparedCall(Invocation):
    """A call under comparison; it lives as long as a backward pass of the call may come."""

    live: Any = None  # the interceptor's call: a weak proxy once its forward is judged or queued
    event: int = -1
    kind: Hashable = None  # where calls are chosen: what decides about calls like it
    record_site: int = 0
    places: Places | None = None  # of the results in the memory of the arguments, where they may be views of these
    notes: dict[Any, Any] = dataclasses.field(default_factory=dict)  # what judges remember until the backward


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """One phase of a call, the values that it produced, and what comes out of judging it.

    `snapshot` holds (args, kwargs, result) after a forward, (grad_outputs, grad_inputs) after a backward;
    `args`, `kwargs` (before the call) and `values` are the same on the host.
    """

    call: Invocation
    phase: str
    number: int = 0  # its place in the order of telling
    event: int = -1
    live: Any = None  # of a forward: the interceptor's call; see `ComparedCall.live`
    grads: tuple[Sequence[Tensor | None], Sequence[Tensor | None]] | None = None  # while they are the run's own
    grad_kind: Hashable = None  # of a backward: shapes, strides and dtypes of its gradients
    places: Places | None = None
    before: Operands | None = None  # snapshot of the arguments, for this job
    snapshot: Operands | None = None
    local: bool = False  # no other process is asked
    piece: bool = False  # of a larger job
    nbytes: int = 0
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    values: tuple[Any, ...] = ()
    fetcher: Fetcher | None = None  # of the thread that works on it
    judgement: Judgement | None = None
    golden: GoldenResult | None = None
    moves_only: bool = False  # values are moved, nothing is computed
    error: BaseException | None = None
    done: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def result(self) -> Any:
        """What the device returned in a forward."""
        return self.values[2]

    def fetch(self) -> None:
        """Bring arguments and values to the host; the arguments stay there for a backward to come."""
        call, values, fetcher = self.call, self.snapshot, self.fetcher
        before = self.before
        assert before is not None
        assert values is not None
        assert fetcher is not None
        together = before.nbytes + values.nbytes <= MOST_BORROWED
        if together and self.phase == FORWARD:  # the later event includes the earlier one
            flats = fetcher.borrow((*before.storages, *values.storages), values.event or before.event)
            count = len(before.storages)
            own = [f if s.is_cpu else f.clone() for s, f in zip(before.storages, flats)]
            self.values = values.tensors(flats[count:])
        else:
            own = fetcher.fetch(before)
            borrowed = fetcher.borrow(values.storages, values.event) if together else fetcher.fetch(values)
            self.values = values.tensors(borrowed)
        if self.phase == FORWARD:
            call.before = before._replace(storages=tuple(own), event=None)  # no device memory is held for a backward
        self.args, self.kwargs = before.tensors(own)

    def keep_values(self) -> None:
        """Copy what was borrowed: it is shown and saved after the fetcher has gone on."""
        assert self.snapshot is not None
        assert self.fetcher is not None
        self.values = self.snapshot.tensors(self.fetcher.fetch(self.snapshot))

    def release(self) -> None:
        """Let go of all tensors."""
        self.before = self.snapshot = self.golden = self.fetcher = self.grads = None
        self.values, self.args, self.kwargs = (), (), {}


def compared_arguments(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Any]:
    """What is compared of the arguments after a call: positional ones, and tensors given by keyword."""
    return [*args, *tensors_in(kwargs)]


def gradient_kind(sent: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> Hashable:
    """Equal for gradients that look alike: shapes, strides and dtypes (`gradient_kind([x], [None])`)."""
    looks = [None if g is None else (g.shape, g.stride(), g.dtype, g.requires_grad) for g in (*sent, *found)]
    return (len(sent), *looks)


__all__ = ["BACKWARD", "FORWARD", "PENDING", "ComparedCall", "Job", "Places", "compared_arguments", "gradient_kind"]
