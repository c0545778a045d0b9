"""All records: one table per kind, as columns for the page."""

from __future__ import annotations

from typing import Final

import numpy as np

from ditorch_common.page import Block, Column, Table, Text, View, blocks

from .columns import Array, short_floats
from .empty import EMPTY
from .places import Places
from .run import Run
from .words import both, line_of

_MAX_FINDINGS: Final = 50_000


def view(run: Run, places: Places) -> tuple[View, list[Table]]:
    """The view, and a table for each kind of record that the run has."""
    found: list[Block] = []
    tables: list[Table] = []
    if run.count("op_autocompare"):
        tables.append(comparisons(run))
        shown = [
            "step",
            "call",
            "operator",
            "tensor",
            "phase",
            "module",
            "verdict",
            "excess",
            "ulp",
            "difference",
            "line",
        ]
        filters = ["verdict", "operator", "module", "phase", "step", "rank"]
        found.append(blocks.table("comparisons", shown, filters, ("excess", "down"), None, both("Comparisons", "比较")))
    if run.count("op_time_measure"):
        tables.append(times(run, places))
        shown = ["step", "call", "operator", "phase", "module", "ms", "line"]
        filters = ["operator", "module", "phase", "step", "rank"]
        found.append(blocks.table("times", shown, filters, None, None, both("Times", "计时")))
    if any(p.small["findings"] for p in run.processes):
        tables.append(findings(run))
        found.append(blocks.table("findings", None, ["tool", "kind", "operator"], None, None, both("Findings", "发现")))
    return View("records", both("All records", "全部记录"), found, EMPTY["records"]), tables


def comparisons(run: Run) -> Table:
    """One row per compared tensor."""
    rows = run.joined("op_autocompare", "call_id", "site", "phase", "name", "verdict", "max_abs_diff", "max_ulp",
                      "excess", "cosine", "module", "step", "reason")  # fmt: skip
    words = run.words
    return Table(
        "comparisons",
        [
            *_common(run, rows),
            Column.words("tensor", _tensors(rows["name"], words["name"].known), both("tensor", "张量")),
            Column.words("phase", (rows["phase"], words["phase"].known), both("phase", "阶段")),
            Column.words("module", (rows["module"], words["module"].known), both("module", "模块")),
            Column.words("verdict", (rows["verdict"], words["verdict"].known), both("verdict", "结论"), "verdict"),
            Column.numbers("excess", short_floats(rows["excess"]), both("× bound", "× 舍入界"), digits=4),
            Column.numbers("ulp", short_floats(rows["max_ulp"], 3), "ulp", digits=3),
            Column.numbers("difference", short_floats(rows["max_abs_diff"], 3), both("difference", "差值"), digits=3),
            Column.numbers("cosine", short_floats(rows["cosine"], 7), both("cosine", "余弦"), digits=6),
            Column.words("reason", (rows["reason"], words["reason"].known), both("reason", "原因")),
            _lines(run, rows),
        ],
    )


def _tensors(codes: Array, names: list[str]) -> tuple[Array, list[str]]:
    """Names of rows without their operators: `torch.add output` is `output`."""
    known: dict[str, int] = {}
    short = np.array([known.setdefault(name.partition(" ")[2] or name, len(known)) for name in names] or [0], np.int32)
    return short[codes], list(known) or [""]


def times(run: Run, places: Places) -> Table:
    """One row per measured phase of a call, in the order in which they began."""
    rows = run.joined("op_time_measure", "call_id", "site", "phase", "elapsed_ms", "start_us", "thread", "step")
    order = np.lexsort((rows["start_us"], rows["rank"]))  # they are written when their times are known
    rows = {name: column[order] for name, column in rows.items()}
    words = run.words
    modules = places.of(rows["rank"], rows["call_id"], rows["step"], rows["op"], rows["location"])
    return Table(
        "times",
        [
            *_common(run, rows),
            Column.words("phase", (rows["phase"], words["phase"].known), both("phase", "阶段")),
            Column.words("module", (modules, words["module"].known), both("module", "模块")),
            Column.numbers("ms", short_floats(rows["elapsed_ms"]), both("time", "时间"), "ms", 4),
            _lines(run, rows),
        ],
    )


def _common(run: Run, rows: dict[str, Array]) -> list[Column]:
    return [
        Column.numbers("rank", rows["rank"], "rank"),
        Column.numbers("step", rows["step"], both("step", "步")),
        Column.numbers("call", rows["call_id"], both("call", "调用")),
        Column.words("operator", (rows["op"], run.words["op"].known), both("operator", "算子")),
    ]


def _lines(run: Run, rows: dict[str, Array]) -> Column:
    known: dict[str, int] = {}
    texts = run.words["location"].known
    short = np.array([known.setdefault(line_of(text), len(known)) for text in texts] or [0], np.int32)
    return Column.words("line", (short[rows["location"]], list(known) or [""]), both("line", "代码行"), "code")


def findings(run: Run) -> Table:
    """One row per finding."""
    rows = run.small("findings")[:_MAX_FINDINGS]

    def words(name: str, key: str, title: Text, kind: str = "text") -> Column:
        return Column.words(name, ["" if row.get(key) is None else str(row[key]) for row in rows], title, kind)

    steps = [row["step"] if isinstance(row.get("step"), int) else 0 for row in rows]
    return Table(
        "findings",
        [
            Column.numbers("rank", np.array([row["rank"] for row in rows], np.int64), "rank"),
            Column.numbers("step", np.array(steps, np.float64), both("step", "步")),
            words("tool", "tool", both("tool", "工具")),
            words("kind", "kind", both("kind", "类别")),
            words("operator", "op", both("operator", "算子")),
            words("message", "message", both("message", "内容")),
            words("phase", "phase", both("phase", "阶段")),
            words("module", "module", both("module", "模块")),
            words("line", "location", both("line", "代码行"), "code"),
        ],
    )
