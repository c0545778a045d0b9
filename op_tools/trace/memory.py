"""What memory a run needs: live bytes at the peak, by kind and by module.

A trace has the blocks of the tensors that operators returned, and what the device's allocator had handed out after
each operator. What lies between the two is memory that operators keep to themselves until their backward has run.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, NamedTuple

import numpy as np

from . import format as columns
from .graph import Graph

KEPT: Final = "kept inside operators"
BEFORE: Final = "from before the trace"


class Memory(NamedTuple):
    """The peak of live bytes (`memory_of(graph).kinds["activation"]`)."""

    peak: int
    operator: int  # at which it was reached; -1 where there is none
    kinds: dict[str, int]
    modules: dict[int, int]  # by number; -1 is outside of all


class _Moment(NamedTuple):
    """A state of the memory: after which operator, what the allocator had handed out, and more for a moment."""

    after: int
    held: int
    inside: int  # bytes that an operator took above that, and gave back
    operator: int


def memory_of(graph: Graph) -> Memory:
    """The memory that a run needs: its peak, and what it consists of (`memory_of(graph).peak`)."""
    table, levels = graph.trace["memory"], graph.trace["levels"]
    order = np.argsort(table["operator"], kind="stable")
    blocks = {name: column[order] for name, column in table.items()}
    kinds, modules = Counter[str](), Counter[int]()
    moment = _by_allocator(graph, levels)
    if moment is None:
        live = np.cumsum(blocks["bytes"])
        event = int(live.argmax()) if len(live) else -1
        after = int(blocks["operator"][event]) if len(live) else -1
        peak = max(0, int(live[event])) if len(live) else 0
        upto = np.arange(len(live)) <= event
    else:
        after, peak = moment.after, moment.held + moment.inside
        upto = blocks["operator"] <= after
        kinds["temporary"] += moment.inside
        modules[_module(graph, moment.operator)] += moment.inside
    known = 0
    for size, kind, module in _alive(graph, blocks, upto):
        known += size
        kinds[columns.KINDS[kind]] += size
        modules[module] += size
    if moment is not None:
        rest = moment.held - known
        started = int(levels["held"][0]) if levels["operator"][0] < 0 else 0
        seen = int(blocks["bytes"][blocks["operator"] < 0].sum())  # parameters that no operator of the trace made
        kinds[BEFORE] = max(0, min(rest, started - seen))
        kinds[KEPT] = max(0, rest - kinds[BEFORE])
        modules[-1] += kinds[BEFORE]
        for module, size in _growth(graph, blocks, levels, after).items():
            modules[module] += size
    at = after if moment is None else moment.operator
    return Memory(peak, at, {k: n for k, n in kinds.items() if n}, {m: n for m, n in modules.items() if n > 0})


def live_bytes(graph: Graph) -> list[tuple[int, int]]:
    """Operators after which the live bytes changed, and those: the allocator's where they are known, or of tensors."""
    levels, table = graph.trace["levels"], graph.trace["memory"]
    if len(levels["held"]) and levels["held"].max():
        return list(zip(levels["operator"].tolist(), levels["held"].tolist()))
    order = np.argsort(table["operator"], kind="stable")
    return list(zip(table["operator"][order].tolist(), np.cumsum(table["bytes"][order]).tolist()))


def _by_allocator(graph: Graph, levels: dict[str, Any]) -> _Moment | None:
    """When the allocator had handed out most, while the trace went on; None where that is not known."""
    operators, held, top = levels["operator"], levels["held"], levels["top"]
    if not len(held) or not held.max():
        return None
    best = int(held.argmax())
    found = _Moment(int(operators[best]), int(held[best]), 0, int(operators[best]))
    rose = np.diff(top, prepend=top[0] if operators[0] < 0 else 0) > 0
    rose &= ~_after_gaps(graph)[np.clip(operators, 0, graph.count)]
    if rose.any():
        row = int(np.where(rose, top, 0).argmax())
        if top[row] > found.held:
            operator = int(operators[row])
            if row and held[row - 1] > held[row]:  # it lay in what went in
                return _Moment(operator - 1, int(held[row - 1]), int(top[row] - held[row - 1]), operator)
            return _Moment(operator, int(held[row]), int(top[row] - held[row]), operator)
    return found


def _after_gaps(graph: Graph) -> Any:
    """Operators, and what comes after the last, that follow steps which are not in the trace."""
    steps = graph.operators["step"]
    return np.concatenate([[False], np.diff(steps) > 1, [False]])[: graph.count + 1]


def _alive(graph: Graph, blocks: dict[str, Any], upto: Any) -> list[tuple[int, int, int]]:
    """Bytes, kind and module of blocks that are there.

    What is gone before the next backward pass is temporary, what a pass or an optimizer made also before its end.
    """
    taken = blocks["bytes"] > 0
    gone = np.isin(blocks["block"], blocks["block"][upto & ~taken])
    alive = np.flatnonzero(upto & taken & ~gone)
    freed = dict(zip(blocks["block"][~taken].tolist(), blocks["operator"][~taken].tolist()))
    phase = graph.operators["phase"]
    ends = {
        columns.ACTIVATION: np.flatnonzero(phase == columns.BACKWARD),
        columns.GRADIENT: np.flatnonzero(phase != columns.BACKWARD),
        columns.STATE: np.flatnonzero(phase != columns.OPTIMIZER),
    }
    found = []
    for block, operator, size, kind, module in zip(
        *(blocks[c][alive].tolist() for c in ("block", "operator", "bytes", "kind", "module"))
    ):
        if kind == columns.STATE and module < 0:  # of which parameter
            module = max((int(graph.tensors["module"][t]) for t in graph.inputs(operator)[:1].tolist()), default=-1)
        if kind in ends and block in freed:
            at = int(np.searchsorted(ends[kind], operator))
            last = int(ends[kind][at]) if at < len(ends[kind]) else graph.count
            if freed[block] < last + (kind != columns.ACTIVATION):
                kind = columns.TEMPORARY
        found.append((size, kind, module))
    return found


def _growth(graph: Graph, blocks: dict[str, Any], levels: dict[str, Any], after: int) -> Counter[int]:
    """What the allocator handed out by `after`, and no tensor shows, by the module whose operator took it.

    What was taken last is given back first, as a backward pass does.
    """
    upto = levels["operator"] <= after
    operators, held = levels["operator"][upto], levels["held"][upto]
    known = np.concatenate([[0], np.cumsum(blocks["bytes"])])
    shown = known[np.searchsorted(blocks["operator"], operators, side="right")]
    hidden = held - shown
    stack: list[tuple[int, int]] = []  # modules and bytes
    debt = 0  # that was given back, and is not known to have been taken
    first = 1 if len(operators) and operators[0] < 0 else 0
    for operator, size in zip(operators[first:].tolist(), np.diff(hidden, prepend=0)[first:].tolist()):
        size -= debt
        debt = 0
        while size < 0 and stack:
            module, taken = stack.pop()
            size += taken
            if size > 0:
                stack.append((module, size))
                size = 0
        if size > 0:
            stack.append((_module(graph, operator), size))
        debt = max(0, -size)
    found = Counter[int]()
    for module, taken in stack:
        found[module] += taken
    return found


def _module(graph: Graph, operator: int) -> int:
    return int(graph.operators["module"][operator]) if 0 <= operator < graph.count else -1
