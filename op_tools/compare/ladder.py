"""The ladder of judges: each says what it can about a job, the next one gets what it leaves open.

A job is one phase of a call, with snapshots of its operands.
A judge is one module in `judges/` with a subclass of `Judge`; it is found by itself and takes its place by `order`.

    class Sampled(Judge):
        order = 35

        @classmethod
        def make(cls, setup):
            return cls(setup) if setup.settings_say_so else None

        def settle(self, job):
            return Judgement(RIGHT, "", rows) if ... else None
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Final

import torch

from ..call.description import Described, Tensor
from ..call.functions import compared_function_of
from ..copies.invocation import BACKWARD as BACKWARD
from ..copies.invocation import FORWARD as FORWARD
from ..copies.invocation import Invocation, Region
from ..copies.operands import Fetcher, Operands
from ..judge import references
from ..judge.golden import GoldenResult
from ..judge.random_draws import Mask
from ..judge.verdict import Judgement, Rules

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
    in_backward: bool = False  # what autograd or a wrapper tensor calls in a backward: its forward is told as that
    whole: bool = False  # its snapshots have all of the storages behind its arguments
    drawn: Any = None  # what is known of its random numbers: `repeat.Drawn`, and states of generators during the call
    gradients_only: bool = False  # its forward is not judged, and nobody may wait for that
    doubts: dict[str, str] | None = None  # by phase: why a wrong result would not be the call's fault
    notes: dict[Any, Any] = dataclasses.field(default_factory=dict)  # what judges remember until the backward

    def cut_down(self, before: Operands, region: Region, number: int) -> ComparedCall:
        """A call like this one on slices of its arguments; calls that are cut alike have the same number."""
        what = (self.id, self.op, self.function, self.traits, self.site, region, (number, number), before)
        told = (self.live, self.event, self.kind, self.record_site, None, self.in_backward, self.whole)
        return ComparedCall(*what, *told, None, self.gradients_only, self.doubts)

    def continue_for(self, earlier: ComparedCall, live: Any) -> Any:
        """Stand for an earlier call in its backward alone; the states of generators that were taken for this one."""
        states, self.drawn, self.live, self.gradients_only = self.drawn, earlier.drawn, live, True
        for name in ("region", "numbers", "record_site", "event"):
            setattr(self, name, getattr(earlier, name))
        return states


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
    unasked: tuple[int, ...] = ()  # tensors whose gradient the backward pass was not asked for
    on_device: Described | None = None  # of a backward that is shown: the gradients where the device has them
    places: Places | None = None
    before: Operands | None = None  # snapshot of the arguments, for this job
    snapshot: Operands | None = None
    local: bool = False  # no other process is asked
    alone: bool = False  # nothing else ran on the device during the call
    suspicion: str = ""  # memory beside an argument changed, and something else may have done it
    piece: bool = False  # of a larger job
    whole: Any = None  # of a part of a sampled job: what takes its judgement
    parts: Sequence[Job] = ()  # of a sampled job that is pending
    nbytes: int = 0
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    values: tuple[Any, ...] = ()
    flats: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None  # of a forward: the bytes under `args` and `values`
    draws: tuple[Tensor, ...] | None = None  # random numbers that the call drew inside
    mask: Mask | None = None  # of a dropout
    fetcher: Fetcher | None = None  # of the thread that works on it
    judgement: Judgement | None = None
    golden: GoldenResult | None = None
    moves_only: bool = False  # values are moved, nothing is computed
    error: BaseException | None = None
    done: threading.Event = dataclasses.field(default_factory=threading.Event)


def arguments_kind(call: Invocation) -> Hashable:
    """Equal for calls with the same arguments, apart from values, under the same numerics (`arguments_kind(call)`)."""
    return (call.op, call.numbers[0], call.region.autocast, call.region.grad_enabled)


def asked(gradients: Sequence[Tensor | None], unasked: tuple[int, ...]) -> list[Tensor | None]:
    """The gradients that a backward pass was asked for; the golden run computes them all."""
    return [None if index in unasked else gradient for index, gradient in enumerate(gradients)]


def gradient_kind(
    sent: Sequence[Tensor | None], found: Sequence[Tensor | None], unasked: tuple[int, ...] = ()
) -> Hashable:
    """Equal for gradients that look alike: shapes, strides and dtypes (`gradient_kind([x], [None])`)."""
    looks = [None if g is None else (g.shape, _strides(g), g.dtype, g.requires_grad) for g in (*sent, *found)]
    return (len(sent), unasked, *looks)


def _strides(tensor: Tensor) -> Hashable:
    return tensor.stride() if tensor.layout is torch.strided else tensor.layout


@dataclasses.dataclass
class Setup:
    """What the judges of one run share."""

    rules: Rules
    shown: bool  # both sides of every call are shown on the console
    at_once: bool  # calls are judged one by one, while the run waits
    sampled: bool  # only some calls are compared
    precheck: str  # where calls like earlier ones are judged first: cpu or device
    threads: int
    queue_bytes: int
    max_bytes: int
    max_seconds: float
    finish: Callable[[Job], None]  # a job that was PENDING is judged
    again: Callable[[Job], None]  # a job that was PENDING goes down the ladder again
    wait: Callable[[], None]  # until all jobs so far are judged
    report: Callable[[str], None]  # a failure of a judge, told once each
    skip: Callable[[Any, str, str], None] = lambda call, reason, phase: None  # a phase that is not compared, and why

    def __post_init__(self) -> None:
        if self.shown or self.rules.standard != "ulp" or self.rules.tolerances:
            self.precheck = "cpu"  # tables of both sides, tolerances and other standards need results on the CPU
        self._stock: dict[str, bool] = {}

    def is_stock(self, op: str, function: Any) -> bool:
        """Whether an operator is PyTorch's own of that name, with the usual golden run."""
        known = self._stock.get(op)
        if known is None:
            try:
                known = compared_function_of(op) == function and self.rules.casts.of(op) is None
                known = known and references.named(function, op) is None
            except Exception:
                known = False
            self._stock[op] = known
        return known


class Judge:
    """One rung of the ladder.

    Live judges see the run's own tensors, on its thread, right after the call; the others see snapshots, on a worker
    thread. `settle` returns a judgement, None to pass the job on, or `PENDING` to answer later through the setup.
    """

    order: ClassVar[int] = 50
    live: ClassVar[bool] = False
    ops: ClassVar[frozenset[str] | None] = None  # operators that it is asked about; None for all

    @classmethod
    def make(cls, setup: Setup) -> Judge | None:
        """The judge for a run, or None where it has no part in it."""
        return cls(setup)

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.never_settles: set[Hashable] = set()  # (op, number of its arguments) that it need not be asked about

    def expects(self, call: ComparedCall) -> bool:
        """Before the call: whether this judge hopes to settle it without a snapshot of its arguments."""
        return False

    def settle(self, job: Job) -> Judgement | None:
        """The judgement, None, or PENDING."""
        return None

    def arguments(self, call: ComparedCall) -> Operands | str | None:
        """The arguments of a call without a snapshot, for its backward; the reason where they are lost; or None."""
        return None

    def admit(self, job: Job) -> None:
        """The job is queued for the worker threads; still on the run's thread."""

    def claims(self, parts: Sequence[Job]) -> bool:
        """On the run's thread: whether this judge takes over all parts of a sampled job, by `take_parts`."""
        return False

    def take_parts(self, parts: Sequence[Job]) -> None:
        """Judge these parts, which it has claimed, and tell through the setup."""

    def learn(self, job: Job) -> None:
        """Another judge has settled a job with a golden run."""

    def leave(self, job: Job, seconds: float) -> None:
        """A worker thread has gone through the ladder with a job, in so many seconds."""

    def drain(self) -> bool:
        """Wait for what is pending; whether there was any."""
        return False

    def close(self) -> None:
        """End processes and threads; nothing is pending."""

    def release(self) -> None:
        """Free memory, once no thread works any more."""

    def summary(self) -> list[str]:
        """Lines for the summary at stop."""
        return []


def make_ladder(setup: Setup) -> list[Judge]:
    """The judges that take part in a run, in order (`make_ladder(setup)[-1].settle(job)`)."""
    from . import judges

    found = []
    for module in pkgutil.iter_modules(judges.__path__):
        members = vars(importlib.import_module(f"{judges.__name__}.{module.name}"))
        kinds = [m for m in members.values() if isinstance(m, type) and issubclass(m, Judge)]
        found += [kind for kind in kinds if kind.__module__ == f"{judges.__name__}.{module.name}"]
    made = [kind.make(setup) for kind in sorted(found, key=lambda kind: kind.order)]
    return [judge for judge in made if judge is not None]
