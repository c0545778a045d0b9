"""Memory along a run, by kind and by module, from its trace."""

from __future__ import annotations

from typing import Final

import numpy as np

from ditorch_common.page import Block, View, blocks

from ..trace import format as columns
from ..trace.graph import Graph
from ..trace.memory import live_bytes, memory_of
from .empty import EMPTY
from .run import Run
from .words import both, size_of

_MAX_POINTS: Final = 2_000


def view(run: Run) -> View:
    """Memory of each rank that left a trace."""
    title = both("Memory", "内存")
    found: list[Block] = []
    for graph in run.graphs:
        if graph.count:
            some = _of_rank(graph)
            found += some if len(run.graphs) == 1 else [blocks.group(f"rank {graph.trace.rank}", some, open=not found)]
    return View("memory", title, found, EMPTY["memory"])


def _of_rank(graph: Graph) -> list[Block]:
    needs = memory_of(graph)
    at = graph.titles[needs.operator] if 0 <= needs.operator < graph.count else "-"
    kinds = sorted(needs.kinds.items(), key=lambda item: -item[1])
    facts = [(both("peak", "峰值"), size_of(needs.peak)), (both("at operator", "出现在算子"), at)]
    found = [blocks.facts([*facts, *[(kind, size_of(n)) for kind, n in kinds]], both("At the peak", "峰值时"))]
    found += _along(graph)
    modules = sorted(needs.modules.items(), key=lambda item: -item[1])[:25]
    if modules:
        labels = [graph.paths.get(number, "") or "(outside)" for number, _ in modules]
        sizes = [float(size) for _, size in modules]
        found.append(blocks.bars(labels, sizes, "B", both("At the peak, by module", "峰值时各模块占用")))
    return found


def _along(graph: Graph) -> list[Block]:
    """Live bytes after each operator, by kind of tensor."""
    table = graph.trace["memory"]
    if not len(table["bytes"]):
        return []
    operators = np.clip(table["operator"], 0, max(0, graph.count - 1))
    points = np.unique(np.linspace(0, graph.count - 1, min(graph.count, _MAX_POINTS)).astype(np.int64))
    kind_of: dict[int, int] = {}
    kinds = []
    for block, nbytes, kind in zip(table["block"].tolist(), table["bytes"].tolist(), table["kind"].tolist()):
        kinds.append(kind_of.setdefault(block, kind) if nbytes > 0 else kind_of.get(block, kind))
    codes, series = np.array(kinds), []
    for kind in np.unique(codes).tolist():
        mine = codes == kind
        live = np.cumsum(np.bincount(operators[mine], table["bytes"][mine], graph.count))
        name = columns.KINDS[kind] if 0 <= kind < len(columns.KINDS) else "other"
        series.append({"name": name, "y": live[points].tolist()})
    changes, whole = (np.array(column) for column in zip(*live_bytes(graph)))
    at = np.searchsorted(changes, points, side="right") - 1
    series.append({"name": "all", "y": np.where(at >= 0, whole[at], 0).tolist()})
    steps = graph.operators["step"]
    begins = np.flatnonzero(np.diff(steps)) + 1
    marks = [{"x": float(n), "text": f"step {int(steps[n])}"} for n in begins[:20].tolist()]
    title = both("Live memory along the run, by kind", "运行过程中的内存，按类别")
    words = both("operator", "算子序号")
    return [blocks.lines(points.tolist(), series, marks, words, "B", title)]  # type: ignore[arg-type]
