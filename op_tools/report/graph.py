"""The module tree with its calls: from the trace where there is one, otherwise from the modules of recorded calls."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import numpy as np

from ditorch_common.page import Block, Text, View, blocks

from ..trace import format as columns
from ..trace.graph import Graph
from ..view.rows import NOT_COMPARABLE, RIGHT, WEAK, WRONG
from .columns import groups, occurrences
from .empty import EMPTY
from .places import Places
from .run import Run
from .words import both, line_of, short_op, size_of

_MAX_OPERATORS: Final = 20_000
_MAX_DETAILS: Final = 4_000
_MAX_USERS: Final = 12
_COLUMNS: Final[list[Any]] = [
    {"name": "verdict", "title": both("verdict", "结论")},
    {"name": "time", "title": both("time", "时间"), "unit": "ms"},
    {"name": "bytes", "title": both("bytes", "字节"), "unit": "B"},
    {"name": "dtype", "title": "dtype"},
    {"name": "device", "title": both("placement", "设备")},
    {"name": "sharding", "title": both("sharding", "切分")},
]
_ORDER: Final = ("", RIGHT, NOT_COMPARABLE, WEAK, WRONG)
_PHASES: Final = {columns.FORWARD: "forward", columns.BACKWARD: "backward"}


def view(run: Run, places: Places) -> View:
    """The tree of the first rank."""
    title = both("Graph", "计算图")
    if run.graphs and run.graphs[0].count:
        return View("graph", title, _Traced(run, run.graphs[0]).blocks())
    found = _from_records(run, places)
    return View("graph", title, found, EMPTY["graph"])


class Known:
    """Verdicts and times of calls, by operator, line, phase and turn within a step."""

    def __init__(self, run: Run, rank: int) -> None:
        self.verdicts: dict[tuple[str, str, str, int], str] = {}
        self.times: dict[tuple[str, str, str, int], float] = {}
        for process in run.processes:
            if process.rank == rank:
                self._note(run, process, "op_autocompare")
                self._note(run, process, "op_time_measure")

    def _note(self, run: Run, process: Any, table: str) -> None:
        rows = process.growing[table]
        if not len(rows):
            return
        mine = np.flatnonzero(rows["step"] == rows["step"].min())
        phase, calls = rows["phase"][mine], rows["call_id"][mine]
        first, back = groups(calls, phase)
        phases = phase[first]
        sites = rows["site"][mine][first]
        op, location = (process.of_site(sites, name) for name in ("op", "location"))
        turn = occurrences(phases, op, location)
        words = run.words
        keys = [
            (words["op"].known[o], words["location"].known[at], words["phase"].known[p], int(t))
            for o, at, p, t in zip(op.tolist(), location.tolist(), phases.tolist(), turn.tolist())
        ]
        if table == "op_time_measure":
            sums = np.bincount(back, np.nan_to_num(rows["elapsed_ms"][mine]), len(keys))
            self.times = dict(zip(keys, sums.tolist()))
            return
        rank_of = np.array([_ORDER.index(v) if v in _ORDER else 1 for v in words["verdict"].known])
        worst = np.zeros(len(keys), np.int64)
        np.maximum.at(worst, back, rank_of[rows["verdict"][mine]])
        self.verdicts = dict(zip(keys, [_ORDER[n] for n in worst.tolist()]))


class _Traced:
    def __init__(self, run: Run, graph: Graph) -> None:
        self.graph = graph
        self.known = Known(run, graph.trace.rank)
        operators = graph.operators
        self.step = int(operators["step"].min())
        self.chosen = np.flatnonzero(operators["step"] == self.step)[:_MAX_OPERATORS].tolist()
        texts = graph.trace.texts
        self.locations = [texts[n] for n in operators["location"].tolist()]
        self.consumers: dict[int, list[int]] = defaultdict(list)
        for operator in self.chosen:
            for tensor in graph.inputs(operator).tolist():
                self.consumers[tensor].append(operator)
        self.nodes: list[list[Any]] = []
        self.details: list[list[Block]] = []
        self._turns: dict[tuple[str, str, str], int] = defaultdict(int)

    def blocks(self) -> list[Block]:
        by_module: dict[int, list[int]] = defaultdict(list)
        values = {operator: self._values(operator) for operator in self.chosen}  # in order: turns are counted
        for operator in self.chosen:
            by_module[int(self.graph.operators["module"][operator])].append(operator)
        for module in self.graph.children[-1]:
            self._module(module, -1, by_module, values)
        if by_module.get(-1):
            place = len(self.nodes)
            self.nodes.append([-1, "(outside modules)", "module", [None] * len(_COLUMNS), -1])
            self._operators(by_module[-1], place, values)
        self._sum_up()
        nodes = [(p, label, kind, values, d) for p, label, kind, values, d in self.nodes]
        shown = both(
            f"Step {self.step}, rank {self.graph.trace.rank}", f"第 {self.step} 步，rank {self.graph.trace.rank}"
        )
        return [blocks.tree(_COLUMNS, nodes, self.details, shown)]

    def _module(self, number: int, parent: int, by_module: dict[int, list[int]], values: dict[int, list[Any]]) -> None:
        found, place = self.graph.modules[number], len(self.nodes)
        name = found["name"].rpartition(".")[2] or found["name"]
        label = f"{name}  {found['class']}({found['settings']})" if found["class"] else name
        self.nodes.append([parent, label, "module", [None] * len(_COLUMNS), -1])
        for child in self.graph.children[number]:
            self._module(child, place, by_module, values)
        self._operators(by_module.get(number, []), place, values)

    def _operators(self, operators: list[int], parent: int, values: dict[int, list[Any]]) -> None:
        for operator in operators:
            detail = -1
            if len(self.details) < _MAX_DETAILS:
                detail = len(self.details)
                self.details.append(self._detail(operator))
            phase = columns.PHASES[int(self.graph.operators["phase"][operator])]
            label = f"{short_op(self.graph.names[operator])}  {line_of(self.locations[operator])}"
            self.nodes.append([parent, label, phase, values[operator], detail])

    def _values(self, operator: int) -> list[Any]:
        graph = self.graph
        name, location = graph.names[operator], self.locations[operator]
        phase = _PHASES.get(int(graph.operators["phase"][operator]), "forward")
        turn = self._turns[name, location, phase]
        self._turns[name, location, phase] += 1
        key = (name, location, phase, turn)
        outputs = graph.outputs(operator).tolist()
        look = graph.look(outputs[0]) if outputs else {}
        size = sum(int(graph.look(t)["bytes"]) for t in outputs)
        dtype, device, sharding = (str(look.get(k, "")) for k in ("dtype", "device", "placements"))
        return [self.known.verdicts.get(key), self.known.times.get(key), size or None, dtype, device, sharding]

    def _detail(self, operator: int) -> list[Block]:
        graph, found, texts = self.graph, self.graph.operators, self.graph.trace.texts
        facts: list[tuple[Text, str]] = [
            (both("operator", "算子"), graph.names[operator]),
            (both("line", "代码行"), self.locations[operator]),
            (both("arguments", "参数"), texts[int(found["arguments"][operator])]),
        ]
        path: list[Text] = []
        for tensor in graph.inputs(operator).tolist():
            path.append(f"← {self._tensor(tensor)}, from {self._maker(tensor)}")
        for tensor in graph.outputs(operator).tolist():
            users = self.consumers.get(tensor, [])
            names = ", ".join(graph.titles[user] for user in users[:_MAX_USERS])
            more = f" and {len(users) - _MAX_USERS} more" if len(users) > _MAX_USERS else ""
            path.append(f"→ {self._tensor(tensor)}, to {names or 'nobody in this step'}{more}")
        title = both("From producers, to consumers", "来自哪里，去往哪里")
        return [blocks.facts([f for f in facts if f[1]]), blocks.list_of(path, title)]

    def _tensor(self, tensor: int) -> str:
        look = self.graph.look(tensor)
        return f"{self.graph.tensor_title(tensor)} {look['dtype']}{look['shape']} {size_of(look['bytes'])}"

    def _maker(self, tensor: int) -> str:
        producer = int(self.graph.tensors["producer"][tensor])
        if producer < 0:
            return columns.KINDS[int(self.graph.tensors["kind"][tensor])]
        return self.graph.titles[producer] if producer < self.graph.count else "?"

    def _sum_up(self) -> None:
        """Modules get the worst verdict, the time and the bytes of what is in them."""
        for node in reversed(self.nodes):
            parent = node[0]
            if parent < 0:
                continue
            above, values = self.nodes[parent][3], node[3]
            if _ORDER.index(values[0] or "") > _ORDER.index(above[0] or ""):
                above[0] = values[0]
            for column in (1, 2):
                if values[column] is not None:
                    above[column] = (above[column] or 0) + values[column]


def _from_records(run: Run, places: Places) -> list[Block]:
    """Modules and the operators that they called, from comparisons and times."""
    worst: dict[tuple[str, str, str], list[Any]] = {}
    for table in ("op_autocompare", "op_time_measure"):
        if not run.count(table):
            continue
        extra = "verdict" if table == "op_autocompare" else "elapsed_ms"
        rows = run.joined(table, "call_id", "site", "phase", "step", extra)
        modules = places.of(rows["rank"], rows["call_id"], rows["step"], rows["op"], rows["location"])
        first, back = groups(modules, rows["op"], rows["phase"])
        unique = np.stack([modules[first], rows["op"][first], rows["phase"][first]])
        if table == "op_autocompare":
            rank_of = np.array([_ORDER.index(v) if v in _ORDER else 1 for v in run.words["verdict"].known])
            found = np.zeros(unique.shape[1], np.int64)
            np.maximum.at(found, back, rank_of[rows["verdict"]])
            values: list[Any] = [_ORDER[n] for n in found.tolist()]
        else:
            values = np.bincount(back, np.nan_to_num(rows["elapsed_ms"]), unique.shape[1]).tolist()
        for (module, op, phase), value in zip(unique.T.tolist(), values):
            words = run.words
            key = (words["module"].known[module], words["op"].known[op], words["phase"].known[phase])
            row = worst.setdefault(key, [None, None])
            row[table != "op_autocompare"] = value
    if not any(module for module, _, _ in worst):
        return []
    return [_tree_of(worst)]


def _tree_of(rows: dict[tuple[str, str, str], list[Any]]) -> Block:
    nodes: list[list[Any]] = []
    known: dict[str, int] = {}

    def module(path: str) -> int:
        if path not in known:
            above, _, name = path.rpartition(".")
            parent = module(above) if above else -1
            known[path] = len(nodes)
            nodes.append([parent, name or "(outside modules)", "module", [None, None], -1])
        return known[path]

    for (path, op, phase), values in sorted(rows.items(), key=lambda row: (not row[0][0], row[0])):
        nodes.append([module(path), short_op(op), phase, list(values), -1])
    for node in reversed(nodes):
        if node[0] >= 0:
            above, values = nodes[node[0]][3], node[3]
            if _ORDER.index(values[0] or "") > _ORDER.index(above[0] or ""):
                above[0] = values[0]
            if values[1] is not None:
                above[1] = (above[1] or 0.0) + values[1]
    return blocks.tree(_COLUMNS[:2], [(p, label, kind, v, d) for p, label, kind, v, d in nodes])
