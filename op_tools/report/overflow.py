"""Where magnitudes grow: largest values of what operators returned, layer by step."""

from __future__ import annotations

from typing import Final

import numpy as np

from ditorch_common.page import Block, Column, Table, View, blocks

from ..native.statistics import NAMES
from .columns import Array, groups, occurrences, short_floats
from .empty import EMPTY
from .places import Places
from .run import Run
from .words import both, line_of, short_op, source_of

_MAX_LAYERS: Final = 200
_MAX_STEPS: Final = 200


def view(run: Run, places: Places) -> tuple[View, list[Table]]:
    """The view, and the table of all measured tensors."""
    title = both("Overflow", "溢出")
    rows = measured(run, places)
    if not len(rows["op"]):
        return View("overflow", title, [], EMPTY["overflow"]), []
    found = [_answer(run), *_heat(run, rows)]
    shown = ["step", "call", "operator", "phase", "role", "module", "min", "max", "mean", "std", "norm", "nan", "inf"]
    everything = both("All measured tensors", "全部被测张量")
    filters = ["operator", "phase", "role", "module"]
    found.append(blocks.table("statistics", shown, filters, None, None, everything))
    return View("overflow", title, found), [_table(run, rows)]


def measured(run: Run, places: Places) -> dict[str, Array]:
    """One row per tensor that went into a call or came out, with its statistics."""
    rows = run.joined("measured", "call_id", "site", "backward", "side", "place", "number", "step")
    base, stats = 0, []
    numbers = []
    for process in run.processes:
        numbers.append(process.measured["number"] + base)
        stats.append(process.statistics)
        base += len(process.statistics)
    whole = np.concatenate(stats) if stats else np.empty((0, len(NAMES)))
    at = np.concatenate(numbers) if numbers else np.empty(0, np.int64)
    for place, name in enumerate(NAMES):
        rows[name] = whole[at, place] if len(whole) else np.empty(0)
    rows["module"] = places.of(rows["rank"], rows["call_id"], rows["step"], rows["op"], rows["location"])
    return rows


def _answer(run: Run) -> Block:
    made = [f for f in run.small("findings") if f.get("kind") == "overflow"]
    if not made:
        return blocks.banner("right", both("No operator made a NaN or Inf", "没有算子产生 NaN 或 Inf"))
    first = made[0]
    place = str(first.get("location") or "")
    lines = [f"{line_of(place)}   {source_of(place)}", str(first.get("message"))]
    headline = both(f"First NaN or Inf: {first['op']}", f"最早的 NaN 或 Inf：{first['op']}")
    return blocks.banner("wrong", headline, lines)


def _heat(run: Run, rows: dict[str, Array]) -> list[Block]:
    """Largest magnitudes of results: layers down, in the order of the first step, and steps across."""
    found = []
    for backward, title in (
        (0, both("Largest magnitude of results, layer by step (forward)", "前向结果的最大绝对值：层 × 步")),
        (1, both("Largest magnitude of gradients, layer by step (backward)", "梯度的最大绝对值：层 × 步")),
    ):
        mine = np.flatnonzero((rows["backward"] == backward) & (rows["side"] == 1))
        if not len(mine):
            continue
        some = {name: values[mine] for name, values in rows.items()}
        steps = np.unique(some["step"])[-_MAX_STEPS:]
        values, labels = _layers(run, some, steps)
        if labels:
            across = [str(step) for step in steps.tolist()]
            found.append(blocks.heat(labels, across, values.reshape(-1).tolist(), "max |x|", title, "log"))
    return found


def _layers(run: Run, rows: dict[str, Array], steps: Array) -> tuple[Array, list[str]]:
    """A row per call of a step, those of different steps matched by their order, and its name."""
    order = np.argsort(rows["call_id"], kind="stable")
    rows = {name: values[order] for name, values in rows.items()}
    turn = occurrences(rows["rank"], rows["step"], rows["op"], rows["location"], rows["place"])
    first, back = groups(rows["op"], rows["location"], rows["place"], turn)
    by_time = np.argsort(first, kind="stable")[:_MAX_LAYERS]
    place_of = np.full(len(first), -1, np.int64)
    place_of[by_time] = np.arange(len(by_time))
    values = np.full((len(by_time), len(steps)), np.nan)
    row, column = place_of[back], np.searchsorted(steps, rows["step"])
    size = np.maximum(np.abs(rows["min"]), np.abs(rows["max"]))
    size[(rows["inf"] > 0) | (rows["nan"] > 0)] = np.inf
    inside = (row >= 0) & np.isin(rows["step"], steps)
    np.fmax.at(values, (row[inside], column[inside]), size[inside])
    ops, modules, lines = (run.words[name].known for name in ("op", "module", "location"))
    names = []
    for n in first[by_time].tolist():
        module = modules[int(rows["module"][n])]
        where = module or line_of(lines[int(rows["location"][n])])
        place = int(rows["place"][n])
        names.append(f"{where} {short_op(ops[int(rows['op'][n])])}" + (f" [{place}]" if place else ""))
    return values, names


_ROLES: Final = ("input", "output", "grad_output", "grad_input")


def _table(run: Run, rows: dict[str, Array]) -> Table:
    words = run.words
    role = rows["backward"].clip(0, 1) * 2 + rows["side"].clip(0, 1)
    numbers = [
        Column.numbers(name, short_floats(rows[name]), name, digits=4) for name in ("min", "max", "mean", "std", "norm")
    ]
    return Table(
        "statistics",
        [
            Column.numbers("rank", rows["rank"], "rank"),
            Column.numbers("step", rows["step"], both("step", "步")),
            Column.numbers("call", rows["call_id"], both("call", "调用")),
            Column.words("operator", (rows["op"], words["op"].known), both("operator", "算子")),
            Column.words("phase", (rows["backward"].clip(0, 1), ["forward", "backward"]), both("phase", "阶段")),
            Column.words("role", (role, list(_ROLES)), both("role", "角色")),
            Column.numbers("tensor", rows["place"], both("tensor", "张量")),
            Column.words("module", (rows["module"], words["module"].known), both("module", "模块")),
            *numbers,
            Column.numbers("nan", rows["nan"] > 0, "NaN"),
            Column.numbers("inf", rows["inf"] > 0, "Inf"),
            Column.words("line", (rows["location"], words["location"].known), both("line", "代码行"), "code"),
        ],
    )
