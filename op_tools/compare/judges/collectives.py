"""Collectives: each rank publishes facts about what it sends and judges what it gets by those of the others.

No collective is made for this, and the training waits for nobody: see `compare/exchange.py`. What a rank has not
published in time is not comparable.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Final, Protocol

import torch

from ... import settings
from ...call import site
from ...call.description import Tensor, describe
from ...call.site import module_path
from ...call.traits import OpTraits, traits_of
from ...compat import c10d_classes, coalesces, default_store
from ...copies.invocation import FORWARD, Region, Site
from ...copies.operands import Fetcher, Operands, stage
from ...judge.collectives import MOVE, REDUCTIONS, Facts, NotComparable, Part, decode, encode, facts_of, judge_part
from ...judge.verdict import NOT_COMPARABLE, RIGHT, WRONG, Judgement
from ...watch import collectives as watch
from ...watch.intercept import INTERCEPTOR, Call, ids
from ...watch.traffic import OPERATORS, python_call, traffic_of
from ..choose import Chooser
from ..exchange import Exchange, Question
from ..ladder import ComparedCall, Job, Judge, Setup
from ..teller import Teller

_SEEDS: Final = 8  # samples of elements that take turns
_MANY_RANKS: Final = 16  # from here on, messages get shorter
_OWN_FACTS_SECONDS: Final = 60.0
_RUNS: Final = itertools.count()
_OWN: Final = frozenset({"torch", "typing_extensions", "ditorch"})  # homes of PyTorch's own functions and wrappers


class Tool(Protocol):
    """What this judge needs of OpAutoCompare."""

    condition: Any
    hears_passes: bool

    def wants(self, traits: OpTraits) -> bool: ...
    def accepts(self, call: Call) -> bool: ...
    def count(self, call: Call) -> None: ...
    def site(self, call: Call) -> int: ...
    def failed(self, call: Call, error: BaseException, what: str = ...) -> None: ...
    def in_background(self, nbytes: int, work: Callable[[Fetcher], None]) -> None: ...


@dataclasses.dataclass(eq=False)
class _Group:
    """A process group: its name in keys, the ranks in it, how many of its collectives there have been."""

    group: Any
    key: str
    name: str
    ranks: Sequence[int]
    exchange: Exchange | None
    count: int = 0
    messages: Counter[tuple[int, int, int]] = dataclasses.field(default_factory=Counter)
    sequence: tuple[int, int] = (-1, 0)  # of the last collective, and how many had the same one before

    def next(self, sequence: int | None, run: int, channel: tuple[int, int, int] | None) -> tuple[int, str]:
        """The number of a collective since the start of the tool, and a key for it that comes once."""
        if channel is not None:
            number, self.messages[channel] = self.messages[channel], self.messages[channel] + 1
            return number, f"{self.key}/run{run}/{'-'.join(map(str, channel))}/{number}"
        number, self.count = self.count, self.count + 1
        if sequence is None:  # not all backends count
            return number, f"{self.key}/run{run}/{number}"
        before = self.sequence[1] + 1 if sequence == self.sequence[0] else 0  # in one coalesced operation
        self.sequence = (sequence, before)
        return number, f"{self.key}/{sequence}.{before}"


@dataclasses.dataclass(eq=False)
class _Pending:
    """A collective under comparison."""

    launch: watch.Launch
    group: _Group
    call: Call
    compared: ComparedCall
    key: str
    number: int
    header: dict[str, Any]
    reduction: str
    factor: float | None
    max_bytes: int
    own: concurrent.futures.Future[list[Facts]] = dataclasses.field(default_factory=concurrent.futures.Future)
    found: list[Facts] = dataclasses.field(default_factory=list)
    event: Any = None  # after the copies of the results

    @property
    def seed(self) -> int:
        return self.number % _SEEDS

    def facts(self, tensors: Sequence[Tensor]) -> list[Facts]:
        """Facts about tensors on the host."""
        return [facts_of(t, self.reduction, self.max_bytes, self.seed) for t in tensors]


class Collectives(Judge):
    """Judges collectives; the tool hands it every call of torch.distributed, and it sees the others itself."""

    order: ClassVar[int] = 90

    @classmethod
    def make(cls, setup: Setup) -> Judge | None:
        return cls(setup) if torch.distributed.is_available() and c10d_classes() is not None else None

    def start(self, tool: Tool, teller: Teller, chooser: Chooser) -> None:
        """Begin to watch; `close` ends it."""
        self._tool, self._teller, self._chooser = tool, teller, chooser
        self._seconds = settings.number("OP_AUTOCOMPARE_RANK_SECONDS")
        self._run, self._pid = next(_RUNS), os.getpid()
        self._lock = threading.Lock()
        self._thread = threading.local()  # `call`: of torch.distributed, that this thread is in
        self._groups: dict[int, _Group] = {}
        self._exchanges: dict[int, tuple[Any, Exchange]] = {}
        others = [one for one in watch.COLLECTIVES.listeners if isinstance(one, Collectives)]
        wanted = not others and any(tool.wants(_traits(name)) for name in OPERATORS.values())
        self.watches = wanted and watch.COLLECTIVES.add(self)

    def entered(self, call: Call) -> None:
        """A function of torch.distributed is called; what it launches belongs to this call."""
        if not self.watches:
            self._teller.skip(call, "another OpAutoCompare judges collectives")
            call.notes[self] = True
            return
        self._thread.call = call
        launch = _as_launch(self, call)
        if launch is not None:
            self.began(launch)
            self._thread.whole = launch

    def left(self, call: Call) -> None:
        """It has returned."""
        self._thread.call = None
        launch, self._thread.whole = getattr(self._thread, "whole", None), None
        if launch is not None:
            self.ended(launch, lambda: True)
        name = call.op.rsplit(".", 1)[-1]
        if self in call.notes or name == "barrier" or not call.op.startswith("torch.distributed.") or coalesces():
            return
        anyone = name in ("recv", "irecv")
        self._teller.skip(call, "a message from any rank" if anyone else "it sends nothing that is seen")

    def backward_ended(self) -> None:
        """No backward pass is under way."""
        watch.COLLECTIVES.backward_ended()

    def drain(self) -> bool:
        drained = [exchange.drain() for _, exchange in list(self._exchanges.values())]
        return any(drained)

    def close(self) -> None:
        watch.COLLECTIVES.remove(self)
        for _, exchange in self._exchanges.values():
            exchange.close()
        self._groups, self._exchanges = {}, {}  # which hold process groups

    # -- what the watch tells, on the threads of the run ----------------------------------------------

    def wants(self, tensors: Sequence[Tensor], function: str) -> bool:
        """Whether a collective on these tensors is to be seen."""
        if os.getpid() != self._pid or not tensors or not INTERCEPTOR.tools:
            return False
        if getattr(self._thread, "whole", None) is not None:  # the function that calls it is judged
            return False
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False  # what a CUDA graph records would be replayed with it
        return INTERCEPTOR.include_cpu or any(not t.is_cpu for t in tensors)

    def began(self, launch: watch.Launch) -> None:
        """Copy what is sent, and have facts about it published."""
        self._tool.hears_passes = True
        traffic = launch.traffic
        tensors = [*traffic.sent, *[r.tensor for r in traffic.results]]
        group = self._group(launch.group)
        sequence = _sequence(launch, tensors)
        with self._lock:
            number, key = group.next(sequence, self._run, traffic.channel)
        call = self._call(launch)
        if call is None or not self._chooser.take_by_number(_kind(call.op, tensors)):
            return
        self._tool.count(call)
        staged = stage((list(traffic.sent),))
        if staged.opaque:
            self._teller.skip(call, f"tensors of type {', '.join(dict.fromkeys(staged.opaque))} cannot be copied")
            return
        reduction = _reduction(launch, call)
        header: dict[str, Any] = (
            {"op": "", "step": call.step} if traffic.channel else {"op": launch.name, "reduction": reduction}
        )
        header["number since the start of the tool"] = number
        limit = group.exchange.message_bytes if group.exchange is not None else 1 << 16
        limit = limit * _MANY_RANKS // max(launch.size, _MANY_RANKS) // max(1, traffic.pieces)
        compared = ComparedCall(
            call.id,
            call.op,
            call.function,
            call.traits,
            Site(call.location, "" if launch.bucket is not None else module_path(2), call.step, settings.rank()),
            Region(tensors[0].device.type),
            (call.inputs.number, 0),
            live=call,
            kind=_kind(call.op, tensors),
        )
        compared.event = self._teller.lineage.made_from(
            [t.data_ptr() for t in traffic.sent], [r.tensor.data_ptr() for r in traffic.results]
        )
        factor = _factor(call) if reduction == "premul_sum" else 1.0
        pending = launch.notes = _Pending(launch, group, call, compared, key, number, header, reduction, factor, limit)
        launch.traffic = traffic._replace(sent=())  # the run's tensors are not held any longer
        self._tool.in_background(staged.nbytes, functools.partial(self._publish, pending, staged))

    def ended(self, launch: watch.Launch, is_intact: Callable[[], bool]) -> None:
        """Copy the results, and have them judged."""
        pending: _Pending | None = launch.notes
        if pending is None or not launch.traffic.results:
            return
        staged = stage(([r.tensor for r in launch.traffic.results],))
        pending.event = staged.event
        intact = is_intact()
        launch.traffic = launch.traffic._replace(results=[r._replace(tensor=None) for r in launch.traffic.results])
        if intact:
            self._tool.in_background(staged.nbytes, functools.partial(self._ask, pending, staged))
        else:
            self.lost(launch, "its result was changed before it was read")

    def lost(self, launch: watch.Launch, reason: str) -> None:
        """A collective whose end is not known."""
        if launch.notes is not None and launch.traffic.results:
            self._teller.skip(launch.notes.call, reason)

    def failed(self, name: str, error: Exception) -> None:
        """The tool failed on a collective."""
        traits = _traits(OPERATORS[name])
        self._tool.failed(Call(traits, traits.function, (), {}), error)

    def _call(self, launch: watch.Launch) -> Call | None:
        """The call that a collective belongs to; None where the tool does not want it."""
        call: Call | None = getattr(self._thread, "call", None)
        if call is not None:
            call.notes[self] = True
            return call
        traits = _traits(OPERATORS[launch.name])
        if self._tool.condition is not None or not self._tool.wants(traits):
            return None
        sent, results = list(launch.traffic.sent), [r.tensor for r in launch.traffic.results]
        call = Call(traits, traits.function, (sent,), {})
        call.step = INTERCEPTOR.step
        if launch.bucket is None:
            call.location = site.call_site()
        else:
            bucket = launch.bucket != watch.NO_BUCKET
            call.location = f"DDP bucket {launch.bucket}" if bucket else "DDP: which parameters were used"
        if not self._tool.accepts(call):
            return None
        call.id = next(ids)
        call.inputs, call.outputs = describe((sent,)), describe((results,))
        call.release()
        return call

    def _group(self, group: Any) -> _Group:
        with self._lock:
            known = self._groups.get(id(group))
            if known is None or known.group is not group:
                try:
                    ranks = torch.distributed.get_process_group_ranks(group)
                except Exception:
                    ranks = list(range(group.size()))
                digest = hashlib.sha1(repr(ranks).encode()).hexdigest()[:12]
                name = getattr(group, "group_desc", "") or group.group_name
                exchange = self._exchange() if group.size() > 1 else None
                known = _Group(group, f"{group.group_name}:{digest}", name, ranks, exchange)
                self._groups[id(group)] = known
            return known

    def _exchange(self) -> Exchange | None:
        """The exchange through the store of the default group that there is now."""
        world = torch.distributed.group.WORLD
        known = self._exchanges.get(id(world))
        if known is None or known[0] is not world:
            try:
                store = default_store()
            except Exception:  # groups without a default one
                return None
            known = self._exchanges[id(world)] = (world, Exchange(store, self._seconds))
        return known[1]

    # -- facts, on worker threads ---------------------------------------------------------------------

    def _publish(self, pending: _Pending, staged: Operands, fetcher: Fetcher) -> None:
        try:
            facts = pending.facts(fetcher.unpack(staged)[0])
        except Exception as error:
            pending.own.set_exception(error)
            self._tool.failed(pending.call, error)
            return
        pending.own.set_result(facts)
        group, launch = pending.group, pending.launch
        if group.exchange is not None and facts:
            group.exchange.publish(pending.key, launch.rank, encode(pending.header, facts))

    def _ask(self, pending: _Pending, staged: Operands, fetcher: Fetcher) -> None:
        launch, group = pending.launch, pending.group
        pending.found = pending.facts(fetcher.unpack(staged)[0])
        senders = sorted({rank for result in launch.traffic.results for rank in result.sources})
        ranks = [rank for rank in senders if rank != launch.rank]
        answer = functools.partial(self._answer, pending)
        if group.exchange is None:
            answer({}, ranks)
        else:
            readers = 1 if launch.name in ("reduce_", "gather_", "recv_") else launch.size
            group.exchange.ask(Question(pending.key, ranks, senders, readers, answer))

    def _answer(self, pending: _Pending, messages: dict[int, bytes], missing: Sequence[int]) -> None:
        """Judge a collective by what other ranks have published."""
        job = Job(pending.compared, FORWARD, event=pending.compared.event, live=pending.call)
        try:
            job.judgement = self._judgement(pending, messages, missing)
            pending.compared.record_site = self._tool.site(pending.call)
            pending.compared.numbers = (pending.call.inputs.number, pending.call.outputs.number)
        except Exception as error:
            job.error = error
        job.number = self._teller.number()
        self._teller.tell(job)

    def _judgement(self, pending: _Pending, messages: dict[int, bytes], missing: Sequence[int]) -> Judgement:
        launch, group = pending.launch, pending.group
        if missing:
            names = ", ".join(str(group.ranks[rank]) for rank in missing)
            why = group.exchange.failure if group.exchange is not None else "there is no store"
            text = f"rank{'s' * (len(missing) > 1)} {names} published nothing"
            return Judgement(NOT_COMPARABLE, f"{text} ({why})" if why else text)
        sent = {launch.rank: pending.own.result(_OWN_FACTS_SECONDS)}
        for rank, message in messages.items():
            header, sent[rank] = decode(message)
            if header != pending.header:
                different = [name for name in header if header[name] != pending.header.get(name)]
                return Judgement(NOT_COMPARABLE, f"rank {group.ranks[rank]} has another {', '.join(different)}")
        rows, results = [], launch.traffic.results
        factor = pending.factor
        if factor is None or pending.reduction not in (MOVE, *REDUCTIONS):
            return Judgement(NOT_COMPARABLE, f"what {pending.reduction} reduces with is not known")
        try:
            for number, (result, found) in enumerate(zip(results, pending.found)):
                mine = {group.ranks[rank]: sent[rank][which] for rank, which in result.sources.items()}
                others = {group.ranks[rank]: facts[0] for rank, facts in sent.items() if len(facts) == 1}
                index = number if len(results) > 1 else None
                part = Part(pending.compared.op, index, found, mine, pending.reduction, launch.size, factor, others)
                row = judge_part(part, self.setup.rules, pending.seed)
                rows.append(row._replace(reason=f"{self._where(pending, found)}: {row.reason}" if row.reason else ""))
        except NotComparable as reason:
            return Judgement(NOT_COMPARABLE, str(reason))
        worst = next((row for row in rows if row.verdict == WRONG), None)
        return Judgement(WRONG if worst else RIGHT, worst.reason if worst else "", tuple(rows))

    def _where(self, pending: _Pending, found: Facts) -> str:
        launch, group = pending.launch, pending.group
        name = f"group {group.name}" if group.name != "default_pg" else "the default group"
        return (
            f"on rank {group.ranks[launch.rank]}, in {name} of {launch.size}, {found.numel:,} elements of {found.dtype}"
        )


def _as_launch(judge: watch.Listener, call: Call) -> watch.Launch | None:
    """A call of a function that somebody put in place of PyTorch's, or of a group that is written in Python.

    What it does to its arguments is judged. PyTorch's own functions are judged by what they send.
    """
    function = getattr(call.function, "op_tools_function", call.function)
    home = getattr(function, "__globals__", {}).get("__name__", "torch")
    found = python_call(call.op.rsplit(".", 1)[-1], call.args, call.kwargs)
    if found is None or found.async_op or not call.op.startswith("torch.distributed."):
        return None
    if home.partition(".")[0] in _OWN and type(found.group) is torch.distributed.ProcessGroup:
        return None
    rank, size = found.group.rank(), found.group.size()
    traffic = traffic_of(found.operator, found.given, rank, size) if rank >= 0 else None
    if traffic is None:
        return None
    reduction = -1 if "reduce" in found.operator else None
    return watch.Launch(judge, found.operator, found.group, rank, size, traffic, reduction, None)


@functools.cache
def _traits(name: str) -> OpTraits:
    function = getattr(torch.distributed, name, torch.distributed.all_reduce)  # old names go
    return traits_of(function, f"torch.distributed.{name}")


def _kind(op: str, tensors: Sequence[Tensor]) -> Hashable:
    return (op, *[(t.shape, t.dtype) for t in tensors])


def _sequence(launch: watch.Launch, tensors: Sequence[Tensor]) -> int | None:
    """The group's own number of the collective: ranks that disagree about it are at different ones."""
    try:
        return int(launch.group._get_backend(tensors[0].device)._get_sequence_number_for_group())
    except Exception:  # not all backends count
        return None


def _operation(call: Call) -> Any:
    """The reduction among the arguments of a call, or None."""
    kinds = (torch.distributed.ReduceOp, torch.distributed.ReduceOp.RedOpType)
    return next((value for value in (*call.args, *call.kwargs.values()) if isinstance(value, kinds)), None)


def _reduction(launch: watch.Launch, call: Call) -> str:
    if launch.reduction is None:
        return MOVE
    if launch.reduction >= 0:
        return REDUCTIONS[launch.reduction]
    if launch.bucket is None and not call.tensors:
        return "unknown"  # a call of C++ in an early release
    operation = _operation(call)
    return "sum" if operation is None else str(operation).rsplit(".", 1)[-1].lower()


def _factor(call: Call) -> float | None:
    """The factor of a scaled sum, from the arguments of a call; None where it is not known."""
    state: Any = getattr(_operation(call), "__getstate__", tuple)()
    factor = state[1] if isinstance(state, tuple) and len(state) > 1 else None
    return float(factor) if isinstance(factor, (int, float)) else None
