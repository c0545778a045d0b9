"""Where the time goes: by operator, by module, forward and backward, along a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

import numpy as np

from ditorch_common.page import Block, Column, Table, View, blocks

from .columns import Array, groups
from .empty import EMPTY
from .places import Places
from .run import Run
from .words import both, line_of, short_op

_MAX_SPANS: Final = 4_000
_MAX_FLAME: Final = 20_000


def view(run: Run, places: Places, perfetto: str = "") -> tuple[View, list[Table]]:
    """The view, and the table of times by operator; `perfetto` is the address of the trace, where it is served."""
    title = both("Time", "时间")
    if not run.count("op_time_measure"):
        return View("time", title, [], EMPTY["time"]), []
    rows = run.joined("op_time_measure", "call_id", "site", "phase", "elapsed_ms", "start_us", "thread", "step")
    rows["elapsed_ms"] = np.nan_to_num(rows["elapsed_ms"])
    table = by_operator(run, rows)
    found = [_totals(run, rows), *_steps(run, rows)]
    shown = ["operator", "phase", "calls", "total", "mean", "p50", "p99", "share"]
    found.append(blocks.table("times_by_op", shown, ["phase"], ("total", "down"), None, both("By operator", "按算子")))
    found.append(_flame(run, rows, places))
    found += _timeline(run, rows)
    found += _perfetto(run, perfetto)
    return View("time", title, found), [table]


def by_operator(run: Run, rows: dict[str, Array]) -> Table:
    """Calls, total, mean, median, 99th percentile and share of each operator and phase."""
    keys = rows["op"].astype(np.int64) << 32 | rows["phase"]
    order = np.lexsort((rows["elapsed_ms"], keys))
    keys, times = keys[order], rows["elapsed_ms"][order]
    groups, starts, counts = np.unique(keys, return_index=True, return_counts=True)
    totals = np.add.reduceat(times, starts) if len(starts) else np.empty(0)
    at = [np.minimum(starts + (q * counts).astype(np.int64), starts + counts - 1) for q in (0.5, 0.99)]
    ops, phases = run.words["op"].known, run.words["phase"].known
    whole = float(totals.sum()) or 1.0
    return Table(
        "times_by_op",
        [
            Column.words("operator", [ops[g >> 32] for g in groups.tolist()], both("operator", "算子")),
            Column.words("phase", [phases[g & 0xFFFFFFFF] for g in groups.tolist()], both("phase", "阶段")),
            Column.numbers("calls", counts, both("calls", "次数")),
            Column.numbers("total", totals, both("total", "合计"), "ms", 5),
            Column.numbers("mean", totals / np.maximum(counts, 1), both("mean", "平均"), "ms", 4),
            Column.numbers("p50", times[at[0]] if len(groups) else totals, both("median", "中位数"), "ms", 4),
            Column.numbers("p99", times[at[1]] if len(groups) else totals, "p99", "ms", 4),
            Column.numbers("share", 100 * totals / whole, both("share", "占比"), "%", 3),
        ],
    )


def _totals(run: Run, rows: dict[str, Array]) -> Block:
    phases = run.words["phase"].known
    sums = np.bincount(rows["phase"], rows["elapsed_ms"], len(phases))
    labels = [phases[n] for n in np.flatnonzero(sums).tolist()]
    return blocks.bars(labels, sums[sums > 0].tolist(), "ms", both("Forward and backward", "前向与反向"))


def _steps(run: Run, rows: dict[str, Array]) -> list[Block]:
    """The time of each step, by phase, where there are several."""
    steps, back = np.unique(rows["step"], return_inverse=True)
    if len(steps) < 2:
        return []
    phases = run.words["phase"].known
    series = []
    for code in np.unique(rows["phase"]).tolist():
        mine = rows["phase"] == code
        y = np.bincount(back[mine], rows["elapsed_ms"][mine], len(steps))
        series.append({"name": phases[code], "y": y.tolist()})
    ranks = max(1, len(run.ranks))
    title = both("Time of each step", "每一步的时间") if ranks == 1 else both("All ranks", "全部 rank 的每步时间")
    return [blocks.lines(steps.tolist(), series, (), both("step", "步"), "ms", title)]  # type: ignore[arg-type]


# -- flame ---------------------------------------------------------------------------------------------------


class Tree:
    """Sums along paths (`Tree().add(["model", "linear"], 2.0)`)."""

    def __init__(self) -> None:
        self.nodes: list[list[Any]] = []
        self._children: dict[tuple[int, str], int] = {}

    def add(self, path: Sequence[str], value: float) -> None:
        """Add to every node along a path."""
        parent = -1
        for name in path:
            key = (parent, name)
            place = self._children.get(key)
            if place is None:
                place = self._children[key] = len(self.nodes)
                self.nodes.append([parent, name, 0.0])
            self.nodes[place][2] += value
            parent = place


def _flame(run: Run, rows: dict[str, Array], places: Places) -> Block:
    """Time by module and operator; by line of source where modules are not known."""
    modules = places.of(rows["rank"], rows["call_id"], rows["step"], rows["op"], rows["location"])
    keys = (rows["phase"], modules, rows["op"], rows["location"])
    first, back = groups(*keys)
    sums = np.bincount(back, rows["elapsed_ms"], len(first))
    words = run.words
    tree = Tree()
    for n in np.argsort(-sums)[:_MAX_FLAME].tolist():
        phase, module, op, location = (int(key[first[n]]) for key in keys)
        name = words["module"].known[module]
        inside = name.split(".") if name else [line_of(words["location"].known[location]) or "(no line)"]
        tree.add([words["phase"].known[phase], *inside, words["op"].known[op]], float(sums[n]))
    title = both("By module", "按模块")
    if not places.known:
        title = both(
            "By line (OpTrace or OpAutoCompare in the same run names the modules)",
            "按代码行（同时运行 OpTrace 或 OpAutoCompare 可得到模块名）",
        )
    return blocks.flame([(p, n, v) for p, n, v in tree.nodes], "ms", title)


# -- timeline ------------------------------------------------------------------------------------------------


def _timeline(run: Run, rows: dict[str, Array]) -> list[Block]:
    steps, counts = np.unique(rows["step"], return_counts=True)
    chosen = int(steps[len(steps) // 2]) if len(steps) > 2 else int(steps[np.argmax(counts)])
    mine = np.flatnonzero((rows["step"] == chosen) & np.isfinite(rows["start_us"]))
    mine = mine[np.argsort(rows["start_us"][mine], kind="stable")]
    left_out = max(0, len(mine) - _MAX_SPANS)
    mine = mine[:_MAX_SPANS]
    if not len(mine):
        return []
    several = len(run.ranks) > 1
    names: dict[str, int] = {}
    phases, ops = run.words["phase"].known, run.words["op"].known
    began = {r: float(rows["start_us"][mine][rows["rank"][mine] == r].min()) for r in np.unique(rows["rank"][mine])}
    spans = []
    for n in mine.tolist():
        rank, phase, op = int(rows["rank"][n]), phases[int(rows["phase"][n])], ops[int(rows["op"][n])]
        row = names.setdefault(f"rank {rank} {phase}" if several else phase, len(names))
        start = (float(rows["start_us"][n]) - began[rank]) / 1e3
        spans.append((row, start, float(rows["elapsed_ms"][n]), op, short_op(op)))
    more = f", the first {_MAX_SPANS:,} calls" if left_out else ""
    title = both(
        f"Step {chosen}{more}: when the host launched, how long the device ran",
        f"第 {chosen} 步{'（前 ' + format(_MAX_SPANS, ',') + ' 次调用）' if left_out else ''}：主机发起时刻与设备耗时",
    )
    return [blocks.timeline(list(names), spans, "ms", title)]


def _perfetto(run: Run, address: str) -> list[Block]:
    if address:
        link = f"https://ui.perfetto.dev/#!/?url={quote(address, safe='')}"
        return [blocks.command(link, both("Open in Perfetto", "在 Perfetto 中打开"))]
    found = sorted(run.folder.rglob("op_elasped_trace_*.json")) if run.folder.is_dir() else []
    if not found:
        return []
    title = both(
        "Trace for ui.perfetto.dev (or: op_tools ui RUN, which opens it there)",
        "可在 ui.perfetto.dev 打开的文件（或用 op_tools ui RUN 直接打开）",
    )
    return [blocks.command(str(found[-1]), title)]
