"""Coverage: which calls were compared and which were not, in calls and in estimated work.

While the run goes on, calls are counted by kind. What they computed is estimated at the end, from their shapes: the
time that an accelerator would need, at so many operations and bytes per second. Only the shares mean something.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from ..call.description import Described, Group, Part, TensorMeta
from ..call.facts import may_mutate
from ..call.operators.registry import KERNELS, Kind, function_facts, last_name
from ..call.recent import Recent
from ..call.traits import OpTraits
from ..judge.references import NOT_JUDGED
from .ladder import BACKWARD, FORWARD

_FLOPS: Final = 1e14  # per second
_BYTES: Final = 2e12  # per second
_BACKWARD: Final = 2.0  # work of a backward, in forwards
_MAX_KINDS: Final = 20_000
_MAX_LINES: Final = 8
_FACTOR_STEPS: Final = 10  # operations for each element and row when a matrix is factored

_LEFT_OUT: Final = "left out, and no call of its kind was compared"

_BEFORE: Final = "compiled before the tool was started (TORCH_COMPILE_DISABLE=1 runs its operators one by one)"

_Key = tuple[str, Hashable, str]  # operator, arguments and results, phase


class _Call(NamedTuple):
    """What the first call of a kind looked like."""

    traits: OpTraits
    inputs: Described
    outputs: Described
    chosen_as: Hashable  # what the chooser calls its kind


class Share(NamedTuple):
    """Calls that compute, and their estimated work."""

    calls: int = 0
    work: float = 0.0

    def plus(self, calls: int, work_each: float) -> Share:
        """With so many calls more."""
        return Share(self.calls + calls, self.work + calls * work_each)

    def of(self, whole: Share) -> tuple[str, str]:
        """Shares of calls and of work, as texts (`Share(1, 1.0).of(Share(2, 2.0)) == ("50.0 %", "50.0 %")`)."""
        return percent(self.calls, whole.calls), percent(self.work, whole.work)


class Coverage:
    """Counts phases of calls that were compared, and those that were not, with the reason."""

    def __init__(self) -> None:
        self.compared: Counter[_Key] = Counter()
        self.missed: Counter[tuple[_Key, str]] = Counter()
        self._calls: dict[_Key, _Call] = {}
        self.keys = Recent[Hashable, _Key](_MAX_KINDS // 4)  # by the numbers of descriptions
        self._lock = threading.Lock()

    def add(self, call: Any, phase: str, chosen_as: Hashable = None) -> None:
        """A phase of a call was compared; one thread at a time."""
        self.compared[self._key(call, phase, chosen_as)] += 1

    def miss(self, call: Any, phase: str, reason: str) -> None:
        """A phase of a call was not compared."""
        with self._lock:
            self.missed[self._key(call, phase), reason] += 1

    def _key(self, call: Any, phase: str, chosen_as: Hashable = None) -> _Key:
        inputs, outputs = call.inputs, call.outputs
        phase = BACKWARD if call.traits.by_engine else phase
        short = (call.op, (inputs.number, outputs.number), phase)
        key: _Key | None = self.keys.get(short)
        if key is None:
            key = (call.op, (*map(_look, inputs.args), _look(inputs.kwargs), *map(_look, outputs.args)), phase)
            if key not in self._calls:
                if len(self._calls) >= _MAX_KINDS:
                    return (call.op, None, phase)
                self._calls[key] = _Call(call.traits, inputs, outputs, chosen_as)
            if inputs.number and outputs.number:
                self.keys[short] = key
        return key

    def compared_by_op(self) -> Counter[str]:
        """Comparisons by operator (`coverage.compared_by_op()["torch.add"]`)."""
        counts: Counter[str] = Counter()
        for (op, _, _), count in self.compared.items():
            counts[op] += count
        return counts

    def describe(self, wrong: int, left_out: Mapping[Hashable, int], compiled: str = "") -> list[str]:
        """The verdict with its coverage, then what was not compared.

        `left_out` are kinds the chooser passed over; `compiled` says how often compiled code ran, if it did.
        """
        work = self._work()
        done = alike = Share()
        for key, count in self.compared.items():
            if work[key] is not None:
                done = done.plus(count, work[key] or 0.0)
        missed: dict[tuple[str, str], tuple[Counter[str], Share]] = {}
        everything = done
        for (key, reason), count in self.missed.items():
            if work[key] is None:
                continue
            everything = everything.plus(count, work[key] or 0.0)
            phases, share = missed.get((key[0], reason), (Counter(), Share()))
            phases[key[2]] += count
            missed[key[0], reason] = phases, share.plus(count, work[key] or 0.0)
        known: dict[Hashable, float] = {}  # of both phases
        for key, call in self._calls.items():
            if key in self.compared and call.chosen_as is not None and work[key] is not None:
                known[call.chosen_as] = known.get(call.chosen_as, 0.0) + (work[key] or 0.0)
        compared_kinds = {call.chosen_as for key, call in self._calls.items() if key in self.compared}
        for kind, count in left_out.items():
            if kind in known:
                alike, everything = alike.plus(count, known[kind]), everything.plus(count, known[kind])
            elif kind not in compared_kinds and isinstance(kind, tuple) and not _only_allocates(kind[0]):
                work_each = sum(_sizes_in(kind)) / _BYTES
                everything = everything.plus(count, work_each)
                phases, share = missed.get((kind[0], _LEFT_OUT), (Counter(), Share()))
                phases[FORWARD] += count
                missed[kind[0], _LEFT_OUT] = phases, share.plus(count, work_each)
        judged = {op for op, _, _ in self.compared}
        open_ops = [op for op, reason in missed if reason.startswith(NOT_JUDGED) and op not in judged]
        unjudged = dict.fromkeys([op.removesuffix(".default") for op in open_ops])
        first = _verdict(sum(self.compared.values()), wrong, done, everything, bool(compiled))
        if alike.calls:
            calls, of_work = Share(done.calls + alike.calls, done.work + alike.work).of(everything)
            first += f"; with calls of the same kinds {calls} and {of_work}"
        ordered = sorted(missed.items(), key=lambda item: (-item[1][1].work, -item[1][1].calls))
        lines = [first]
        if compiled:
            lines.append(f"  torch.compile: {compiled}, not compared: {_BEFORE}")
        if unjudged:
            names = ", ".join(unjudged)
            were = "operator was" if len(unjudged) == 1 else "operators were"
            lines.insert(0, f"{len(unjudged)} {were} NOT JUDGED, for want of a CPU kernel or a reference: {names}")
        for (op, reason), (phases, share) in ordered[:_MAX_LINES]:
            counts = " and ".join(f"{phases[p]:,} {p}" for p in (FORWARD, BACKWARD) if phases[p])
            counts += " calls" if share.calls > 1 else " call"
            lines.append(f"  {op}: {counts}, {share.of(everything)[1]} of the work, not compared: {reason}")
        if len(ordered) > _MAX_LINES:
            rest = len({op for (op, _), _ in ordered[_MAX_LINES:]})
            lines.append(f"  … and {rest} more operator{'s' * (rest > 1)} not compared")
        return lines

    def _work(self) -> dict[_Key, float | None]:
        """Estimated seconds of one call by key; None where nothing is computed."""
        found = {key: _seconds(call, key[2]) for key, call in self._calls.items()}
        for key in [*self.compared, *[key for key, _ in self.missed]]:
            if key not in found:  # too many kinds: as much as others of the operator
                others = [work for other, work in found.items() if other[0] == key[0] and work is not None]
                found[key] = sum(others) / len(others) if others else 0.0
        return found


def _verdict(comparisons: int, wrong: int, done: Share, everything: Share, compiled: bool) -> str:
    if not comparisons and not everything.calls:
        if compiled:
            return "NOTHING WAS COMPARED: no call outside compiled code was seen"
        return "NOTHING WAS COMPARED: no call on the device was seen (OP_TOOLS_INCLUDE_CPU=1 watches the CPU as well)"
    if not done.calls and everything.calls:
        return f"NOTHING THAT COMPUTES WAS COMPARED: none of {everything.calls:,} such calls; {comparisons:,} others"
    text = f"{comparisons:,} comparison{'s' * (comparisons != 1)}, {wrong:,} wrong; "
    outside = " outside compiled code" if compiled else ""
    if not everything.calls:
        return text + f"no call{outside} computes anything"
    if done.calls == everything.calls:
        return text + f"every call{outside} that computes was compared"
    calls, work = done.of(everything)
    return text + f"{calls} of the calls{outside} that compute compared, {work} of the estimated work"


def percent(part: float, whole: float) -> str:
    """A share with one digit; 100 % only where it is all of it (`percent(1, 3) == "33.3 %"`)."""
    share = part / whole if whole else 1.0
    if 0 < share < 0.001:
        return "< 0.1 %"
    return "100 %" if share == 1 else f"{min(math.floor(1000 * share + 0.5), 999) / 10:.1f} %"


# --- how much a call computes -------------------------------------------------------------------------------


def _only_allocates(op: Any) -> bool:
    return isinstance(op, str) and function_facts(op).uninitialised


def _sizes_in(kind: Any) -> Iterator[int]:
    """Bytes of the tensors in what the chooser calls a kind."""
    if isinstance(kind, tuple) and len(kind) > 1 and isinstance(kind[0], torch.Size):
        yield math.prod(kind[0]) * kind[1].itemsize
    elif isinstance(kind, tuple):
        for part in kind:
            yield from _sizes_in(part)


def _seconds(call: _Call, phase: str) -> float | None:
    """Estimated seconds of one phase of a call; None if it computes nothing: views and allocations."""
    name, inputs, outputs = call.traits.name, list(_tensors(call.inputs)), list(_tensors(call.outputs))
    if _only_allocates(name) or _returns_views(call, inputs, outputs):
        return None
    moved = sum(t.numel * t.dtype.itemsize for t in (*inputs, *outputs))
    try:
        flops = _flops(name, [t.shape for t in inputs], outputs)
    except (IndexError, ZeroDivisionError):  # arguments that were not foreseen
        flops = 0.0
    differentiates = phase == BACKWARD and not call.traits.by_engine
    return max(flops / _FLOPS, moved / _BYTES) * (_BACKWARD if differentiates else 1.0)


def _returns_views(call: _Call, inputs: Sequence[TensorMeta], outputs: Sequence[TensorMeta]) -> bool:
    """Whether a call writes nothing and all its results lie in the memory of its arguments."""
    named = call.inputs.kwargs
    if not outputs or may_mutate(call.traits.name, dict.fromkeys(named.keys or (), True) if named is not None else {}):
        return False
    ranges = [
        (start, start + (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride or ()))) * t.dtype.itemsize)
        for t, start in zip(inputs, call.inputs.data_ptrs)
        if t.numel
    ]
    pointers = [pointer for t, pointer in zip(outputs, call.outputs.data_ptrs) if t.numel]
    return all(any(start <= pointer < end for start, end in ranges) for pointer in pointers)


def _look(part: Any) -> Hashable:
    """A described argument without fractions: they say nothing of the work, and an optimizer has new ones each step."""
    if isinstance(part, Group):
        return (part.keys, *map(_look, part.items))
    if isinstance(part, str) and not part.isdecimal():
        try:
            float(part)
            return "fraction"
        except ValueError:
            pass
    return part  # type: ignore[no-any-return]


def _tensors(described: Described) -> Iterator[TensorMeta]:
    def walk(part: Part) -> Iterator[TensorMeta]:
        if isinstance(part, TensorMeta):
            yield part
        elif isinstance(part, Group):
            for member in part.items:
                yield from walk(member)

    for part in (*described.args, *([described.kwargs] if described.kwargs is not None else ())):
        yield from walk(part)


def _flops(op: str, shapes: list[tuple[int, ...]], outputs: Sequence[TensorMeta]) -> float:
    """Operations of products, recurrent networks and factorisations, from shapes; 0 for all else."""
    name, results = last_name(op).strip("_"), sum(t.numel for t in outputs)
    if name.startswith("conv_transpose"):
        return 2.0 * math.prod(shapes[0]) * math.prod(shapes[1][1:])
    if name.startswith("conv"):
        return 2.0 * results * math.prod(shapes[1][1:])
    if name in ("linear", "matmul", "mm", "bmm", "mv"):
        return 2.0 * results * shapes[0][-1]
    if name in ("addmm", "addmv", "baddbmm"):
        return 2.0 * results * shapes[1][-1]
    if name == "scaled_dot_product_attention":
        return 2.0 * (math.prod(shapes[0]) + math.prod(outputs[0].shape)) * shapes[1][-2]
    facts = function_facts(op)
    if facts.cudnn or name == "multi_head_attention_forward":  # each row times all weights
        rows = math.prod(shapes[0]) / shapes[0][-1]
        return 2.0 * rows * sum(math.prod(shape) for shape in shapes[1:] if len(shape) == 2)
    kernel = KERNELS.by_name.get(name) or KERNELS.by_name.get(f"linalg_{name}")
    kind = kernel.kind if kernel is not None else ""
    if kind == Kind.MATRIX or (not kind and op.startswith("torch.linalg.")):
        return float(_FACTOR_STEPS * math.prod(shapes[0]) * shapes[0][-1])
    if kind == Kind.CONTRACT or facts.autocast_low:
        # of (m, k) and (k, n) to (m, n), the root of all three sizes is m · k · n
        sizes = sorted(math.prod(shape) for shape in shapes)[-2:]
        return 2.0 * math.sqrt(math.prod(sizes) * results) if len(sizes) == 2 else 0.0
    return 0.0
