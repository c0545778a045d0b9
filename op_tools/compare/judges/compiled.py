"""Compiled code: a run of a whole graph against the same graph, not compiled, on the CPU.

What is wrong is looked at once more, on the device, without the compiler: either eager is right there, and the code of
the backend is wrong, or one of the graph's operators is wrong on the device by itself, and it is named.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import torch

from ...call.description import Tensor, map_tensors, tensors_in
from ...call.devices import quiet
from ...call.equality import leaves_of
from ...call.graphs import OP, Graph, Step
from ...copies.materialise import Copier
from ...judge import golden, verdict
from ...judge.draws import DrawsRandomNumbers
from ...judge.golden import neutral
from ...judge.graphs import Runner, Runs
from ...judge.regions import GRADIENT, INPUT, OUTPUT, judge_graph
from ...judge.verdict import NOT_COMPARABLE, WRONG, Judgement, Rules
from ..ladder import FORWARD, ComparedCall, Job, Judge, Setup, asked

_MAX_NARROWED: Final = 20  # graphs that are looked at once more
_RANDOM: Final = "random numbers, of which two runs draw different ones"


class Compiled(Judge):
    """Settles jobs of compiled code, on a worker thread; all others pass."""

    order: ClassVar[int] = 40
    ops: ClassVar[frozenset[str] | None] = frozenset({OP})

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._lock = threading.Lock()
        self._narrowed: dict[tuple[int, str], str] = {}  # by graph and phase: what was found out about it

    def settle(self, job: Job) -> Judgement | None:
        call = job.call
        graph: Graph | None = call.notes.get(Graph) if isinstance(call, ComparedCall) else None
        if graph is None:
            return None
        assert isinstance(call, ComparedCall)
        assert job.fetcher is not None
        assert job.snapshot is not None
        before = job.before or call.before
        if before is None:
            return Judgement(NOT_COMPARABLE, "its arguments are not known any more")
        (args, _), values = job.fetcher.unpack(before), job.fetcher.unpack(job.snapshot)
        try:
            return self._judge(job, call, graph, args, values)
        except DrawsRandomNumbers:
            graph.why_not = _RANDOM  # later runs are not copied
            return Judgement(NOT_COMPARABLE, f"compiled code with {_RANDOM}")
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0][:200]
            return Judgement(NOT_COMPARABLE, f"the CPU cannot run its graph: {type(error).__name__}: {text}")

    def _judge(self, job: Job, call: ComparedCall, graph: Graph, args: tuple[Any, ...], values: Any) -> Judgement:
        if job.phase == FORWARD:
            after, _, result = values
            runs = Runs(graph, args, call.region.device)
            found = {OUTPUT: list(leaves_of(result)), INPUT: list(after)}
        else:
            sent, made = values
            runs = Runs(graph, args, call.region.device, sent)
            tensors = len(list(tensors_in(args)))
            found = {GRADIENT: [*asked(made, job.unasked), *[None] * (tensors - len(made))]}
        judged = judge_graph(runs, found, self.setup.rules, self.setup.max_seconds)
        written = graph.writes if graph.writes is not None else set()
        shown = [row for row in judged.rows if row.part != INPUT or row.verdict == WRONG or (row.index or 0) in written]
        judged = dataclasses.replace(judged, rows=tuple(shown))
        if judged.verdict != WRONG:
            return judged
        what = self._why(job, call, graph, runs, args, values[0])
        rows = [_named(row, graph, args, what) if row.verdict == WRONG else row for row in judged.rows]
        return dataclasses.replace(
            judged, reason=f"{judged.reason}; {what}" if what else judged.reason, rows=tuple(rows)
        )

    def _why(self, job: Job, call: ComparedCall, graph: Graph, runs: Runs, args: tuple[Any, ...], sent: Any) -> str:
        """Whose fault it is, in words; asked once per graph and phase."""
        key = (id(graph), job.phase)
        with self._lock:
            if key in self._narrowed or len(self._narrowed) >= _MAX_NARROWED:
                return self._narrowed.get(key, "")
            self._narrowed[key] = ""
        try:
            device = next(t.device for t in call.before.storages if not t.is_cpu) if call.before is not None else None
            with quiet():
                narrowing = Narrowing(graph, args, device, call.region.device, self.setup.rules)
                said = narrowing.say() if job.phase == FORWARD else narrowing.say_of_gradients(runs, sent, job.unasked)
        except StopIteration:
            said = ""
        except Exception as error:
            said = f"run again without the compiler, it fails: {type(error).__name__}"
        self._narrowed[key] = said
        return said


def _named(row: Any, graph: Graph, args: tuple[Any, ...], what: str) -> Any:
    """The row of a wrong argument or gradient with its name, and what is known of the cause."""
    own = ""
    if row.part == INPUT:
        own = graph.names[row.index or 0]
    elif row.part == GRADIENT:
        places = [n for n, a in enumerate(args) for _ in tensors_in(a)]
        own = graph.names[places[row.index or 0]]
    text = f"{own}: {row.reason}" if own else row.reason
    return row._replace(reason=f"{text}; {what}" if what else text)


class Narrowing:
    """Runs a graph on the device without the compiler, call by call, and judges each as a call of its own."""

    def __init__(
        self, graph: Graph, args: tuple[Any, ...], device: torch.device | None, kind: str, rules: Rules
    ) -> None:
        self._graph, self._args, self._kind, self._rules = graph, args, kind, rules
        self._device = device or torch.device(kind)
        self._wrong: tuple[Step, str] | None = None

    def say(self) -> str:
        """Who is to blame (`narrowing.say()`)."""
        with neutral(grad=False):
            placed = Copier(self._device, grad=False).copy(self._args)
            Runner(self._graph, here=True, seen=self._seen)(*placed)
        if self._wrong is None:
            return (
                "every call of its graph is right on the device without the compiler: the code of the backend is wrong"
            )
        step, reason = self._wrong
        where = f" at {step.location}" if step.location else ""
        return f"its call {step.name}{where} is wrong on the device without the compiler, too: {reason}"

    def say_of_gradients(self, runs: Runs, sent: Sequence[Tensor | None], unasked: tuple[int, ...]) -> str:
        """The same of a backward: autograd goes through the graph on the device, without the compiler."""
        with neutral(grad=True):
            copier = Copier(self._device, grad=True, enter=True)
            outputs = tensors_in(Runner(self._graph, here=True)(*copier.copy(self._args)))
            pairs = [(o, g) for o, g in zip(outputs, sent) if g is not None and o.requires_grad]
            leaves = list({id(leaf): leaf for leaf in copier.leaves if leaf is not None}.values())
            grads = [g.to(o.device, o.dtype) for o, g in pairs]
            found = golden.differentiated([o for o, _ in pairs], leaves, grads)
        made = {id(leaf): None if grad is None else _on_cpu(grad) for leaf, grad in zip(leaves, found)}
        gradients = asked([None if leaf is None else made[id(leaf)] for leaf in copier.leaves], unasked)
        if judge_graph(runs, {GRADIENT: gradients}, self._rules).verdict == WRONG:
            return "autograd's gradients of its graph are wrong on the device without the compiler, too"
        return (
            "autograd's gradients of its graph are right on the device without the compiler: its own backward is wrong"
        )

    def _seen(self, step: Step, args: Any, kwargs: Any, call: Callable[[], Any]) -> Any:
        if self._wrong is not None:
            return call()
        before = map_tensors((args, kwargs), _on_cpu)
        result = call()
        if not any(True for _ in tensors_in(result)):
            return result
        outputs = map_tensors(result, _on_cpu)
        function = step.node.target if step.node.op == "call_function" else getattr(torch.Tensor, step.node.target)
        reference = golden.run(function, before[0], before[1], name=step.name, device=self._kind)
        if reference.comparable:
            found = verdict.judge_call(step.name, reference, outputs=outputs, rules=self._rules)
            if found.verdict == WRONG:
                self._wrong = (step, found.reason)
        return result


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu() if not tensor.is_cpu else tensor.detach().clone()
