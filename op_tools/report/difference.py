"""Two runs side by side: where they part, how far modules and operators are apart, and what only one has."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import numpy as np

from ditorch_common.page import Block, Page, Text, View, blocks

from ..trace import format as columns
from ..trace.diff import Diff
from ..trace.graph import Graph
from ..trace.parted import growth
from .empty import EMPTY
from .words import both, line_of, short_op, source_of, times_bound

_MAX_NODES: Final = 60_000
_MAX_GROWTH: Final = 400
_COLUMNS: Final[list[Any]] = [
    {"name": "inputs", "title": both("inputs apart", "输入差")},
    {"name": "outputs", "title": both("outputs apart", "输出差")},
    {"name": "phase", "title": both("phase", "阶段")},
]


def view(found: Diff | None) -> View:
    """The view of a difference; without one it says what to run."""
    title = both("Diff", "对比")
    if found is None:
        return View("diff", title, [], EMPTY["diff"])
    sides = [_tree(found), *_growth(found)]
    structure = _structure(found)  # where there are no values, this is what the runs differ by
    parts = [_banner(found), *_first(found), *([*sides, *structure] if found.valued else [*structure[::-1], *sides])]
    return View("diff", title, parts)


def page_of(found: Diff) -> Page:
    """A page of the difference alone."""
    return Page(f"diff: {found.names[0]} and {found.names[1]}", [view(found)])


def _banner(found: Diff) -> Block:
    one, two = found.alignment.first, found.alignment.second
    pairs = len(found.alignment.pairs)
    sides: list[Text] = [
        f"A: {found.names[0]} ({one.count:,} operators)   B: {found.names[1]} ({two.count:,} operators)"
    ]
    sides.append(both(f"{pairs:,} operators correspond", f"{pairs:,} 个算子相互对应"))
    given = found.given()
    if given:
        names = ", ".join(given[:4]) + (f" and {len(given) - 4} more" if len(given) > 4 else "")
        sides.append(both(f"The runs start from different values: {names}", f"两次运行的初始值不同：{names}"))
    if not found.valued:
        headline = both(
            "No values to compare: one of the traces has no fingerprints", "没有数值可比：其中一个 trace 没有指纹"
        )
        return blocks.banner("unknown", headline, sides)
    parted = found.divergence
    if parted is None:
        judged = int(found.numbers.judged.sum())
        rest = int(found.numbers.compared.sum()) - judged
        more = f"；另有 {rest:,} 个无法判断" if rest else ""
        headline = both(found.nothing_found(), f"没有分歧：{judged:,} 个算子的差异均可由舍入解释{more}")
        return blocks.banner("unknown" if given else "right", headline, sides)
    a = (found.parted or (0, 0))[0]
    module = one.modules.get(int(one.operators["module"][a]))
    inside = module["name"] if module else "(outside modules)"
    step, phase = int(one.operators["step"][a]), columns.PHASES[int(one.operators["phase"][a])]
    headline = both(f"The runs part at {one.names[a]} in {inside}", f"两次运行在 {inside} 的 {one.names[a]} 处分开")
    where = f"step {step}, {phase}, {line_of(_location(one, a))}   {source_of(_location(one, a))}"
    return blocks.banner("wrong", headline, [where, parted.reason, *sides])


def _location(graph: Graph, operator: int) -> str:
    return graph.trace.texts[int(graph.operators["location"][operator])]


def _first(found: Diff) -> list[Block]:
    parted, operators = found.divergence, found.parted
    if parted is None or operators is None:
        return []
    rows: list[tuple[Text, str]] = []
    for word, graph, operator in zip("AB", (found.alignment.first, found.alignment.second), operators):
        rows.append((word, f"{graph.titles[operator]}   {_location(graph, operator)}"))
    times = times_bound(parted.outputs / parted.allowed) if parted.allowed else "∞"
    if parted.of_inputs:
        rows += [
            (both("inputs apart", "输入相差"), f"{parted.inputs:.2g} of their norm"),
            (both("what they are made of explains", "其来源可解释"), f"{parted.allowed:.2g}"),
        ]
        return [blocks.facts(rows, both("First divergence", "首个分歧"))]
    rows += [
        (both("inputs apart", "输入相差"), f"{parted.inputs:.2g} of their norm"),
        (both("rounding may make", "舍入最多造成"), f"{parted.allowed:.2g}"),
        (both("outputs apart", "输出相差"), f"{parted.outputs:.2g}, {times} × that"),
    ]
    return [blocks.facts(rows, both("First divergence", "首个分歧"))]


# -- the trees ---------------------------------------------------------------------------------------------


class _Pairs:
    def __init__(self, found: Diff) -> None:
        self.found, self.one, self.two = found, found.alignment.first, found.alignment.second
        numbers = found.numbers
        with np.errstate(divide="ignore", invalid="ignore"):
            apart = np.where(
                numbers.allowed > 0, numbers.outputs / numbers.allowed, np.where(numbers.parted, np.inf, 0)
            )
        self.distance = np.where(numbers.compared, apart, np.nan)
        self.by_module: dict[int, list[int]] = defaultdict(list)  # pairs, by module of A
        for pair, (a, _) in enumerate(found.alignment.pairs.tolist()):
            self.by_module[int(self.one.operators["module"][a])].append(pair)
        self.only: tuple[dict[int, list[int]], dict[int, list[int]]] = (defaultdict(list), defaultdict(list))
        for side, graph in enumerate((self.one, self.two)):
            for operator in found.alignment.only[side]:
                self.only[side][int(graph.operators["module"][operator])].append(operator)
        self.matched = {b: a for a, b in found.alignment.modules.items() if b >= 0}
        self.nodes: list[list[Any]] = []

    def build(self) -> list[tuple[Any, ...]]:
        for module in self.one.children[-1]:
            self._module(module, self.found.alignment.modules.get(module, -1), -1)
        for module in self.two.children[-1]:
            if module not in self.matched:
                self._module(None, module, -1)
        outside = self._node(-1, "(outside modules)", "(outside modules)", "")
        self._operators(-1, -1, outside)
        for node in reversed(self.nodes):
            if node[0] >= 0 and node[3] is not None:
                above = self.nodes[node[0]]
                above[3] = node[3] if above[3] is None else max(above[3], node[3])
        return [tuple(node) for node in self.nodes]

    def _node(self, parent: int, left: str | None, right: str | None, phase: str) -> int:
        self.nodes.append([parent, left, right, None, [None, None, phase]])
        return len(self.nodes) - 1

    def _label(self, graph: Graph, module: int | None) -> str | None:
        if module is None or module < 0:
            return None
        found = graph.modules[module]
        return f"{found['name'].rpartition('.')[2] or found['name']}  {found['class']}"

    def _module(self, a: int | None, b: int, parent: int) -> None:
        if len(self.nodes) >= _MAX_NODES:
            return
        place = self._node(parent, self._label(self.one, a), self._label(self.two, b), "")
        for child in self.one.children[a] if a is not None else ():
            self._module(child, self.found.alignment.modules.get(child, -1), place)
        for child in self.two.children[b] if b >= 0 else ():
            if child not in self.matched:
                self._module(None, child, place)
        self._operators(a, b, place)

    def _operators(self, a: int | None, b: int, parent: int) -> None:
        numbers = self.found.numbers
        rows: list[tuple[int, str | None, str | None, int]] = []
        for pair in self.by_module.get(a, []) if a is not None else []:
            x, y = (int(n) for n in self.found.alignment.pairs[pair])
            rows.append((x, self._name(self.one, x), self._name(self.two, y), pair))
        rows += [(x, self._name(self.one, x), None, -1) for x in (self.only[0].get(a, []) if a is not None else [])]
        rows.sort(key=lambda row: row[0])
        rows += [(y, None, self._name(self.two, y), -1) for y in self.only[1].get(b, [])] if b >= 0 or a == -1 else []
        for operator, left, right, pair in rows:
            if len(self.nodes) >= _MAX_NODES:
                return
            graph = self.one if left is not None else self.two
            phase = columns.PHASES[int(graph.operators["phase"][operator])]
            place = self._node(parent, left, right, phase)
            if pair >= 0:
                apart = float(self.distance[pair])
                self.nodes[place][3] = None if apart != apart else apart
                self.nodes[place][4][:2] = [float(numbers.inputs[pair]), float(numbers.outputs[pair])]

    def _name(self, graph: Graph, operator: int) -> str:
        step = int(graph.operators["step"][operator])
        return f"{short_op(graph.names[operator])}  {line_of(_location(graph, operator))}  step {step}"


def _tree(found: Diff) -> Block:
    nodes: Any = _Pairs(found).build()
    return blocks.pair_tree(
        _COLUMNS,
        nodes,
        both(
            "Both runs, aligned: distance in rounding bounds, inputs and outputs apart in shares of their norm",
            "两次运行对齐：差异以舍入界为单位，输入差与输出差为占范数之比",
        ),
    )


def _growth(found: Diff) -> list[Block]:
    rows = [row for row in growth(found.alignment, found.numbers) if row[3] > 0][:_MAX_GROWTH]
    if not rows:
        return []
    x = list(range(len(rows)))
    series: list[Any] = [
        {"name": "inputs", "y": [_log(row[2]) for row in rows]},
        {"name": "outputs", "y": [_log(row[3]) for row in rows]},
    ]
    marks: list[Any] = []
    title = both(
        "How the difference grew, module by module (log10 of its share of the norm)",
        "差异如何逐模块增长（占范数之比的 log10）",
    )
    listed = [f"{module or '(outside)'}, {phase}: {came:.2g} → {went:.2g}" for module, phase, came, went in rows[:60]]
    return [
        blocks.lines(x, series, marks, both("module, in order", "模块（按顺序）"), "", title),
        blocks.group(both("The same as a list", "列表"), [blocks.list_of(list(listed))], open=False),
    ]


def _log(value: float) -> float | None:
    return float(np.log10(value)) if value > 0 and np.isfinite(value) else None


def _structure(found: Diff) -> list[Block]:
    lines = list(found.lines(40))
    starts = ("Operators that take the place", "Only in", "What else differs")
    parts: list[Block] = []
    title, items = "", list[Text]()
    for line in [*lines, ""]:
        if line.startswith(starts):
            title, items = line, []
        elif title and line.startswith("  "):
            items.append(line.strip())
        elif title:
            parts.append(blocks.list_of(items, title))
            title = ""
    return parts
