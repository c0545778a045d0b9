"""Where one run has compiled code, the operators of the other one become one as well, so that the two can be compared.

Compiled code of Inductor is one operator of a trace: what went into a module, what came out, and the gradients that its
backward sent. In a run without it, the operators of that module and of the modules in it do the same. They are folded
into one: its inputs are the tensors that come from outside, its outputs those that somebody else uses. A compiled
function that is no module takes the place of the operators that stand where it does, between those that both runs have.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from ..call.functions import SUM
from ..call.graphs import OP as COMPILED
from . import format as columns
from .align import Alignment, align, match_modules
from .behaviour import DREW, draws
from .format import INPUT, OUTPUT, PROJECTIONS, Trace
from .graph import Graph

_PHASES: Final = (columns.FORWARD, columns.RECOMPUTED, columns.OPTIMIZER)
_AFTER: Final = 8  # operators after the last backward of a group among which autograd adds up what these send
_NORM: Final = PROJECTIONS + 1
_MIN_SHARED: Final = 0.5  # of the parameters of compiled code, to be that of a module


class Folded(Graph):
    """A graph in which some operators are one; `inside` says which, `numbers` what they are called in the trace."""

    def __init__(self, trace: Trace, whole: Graph, inside: dict[int, list[int]], numbers: Sequence[int]) -> None:
        super().__init__(trace)
        self.whole = whole
        self.inside = inside
        self.numbers = numbers


def align_folded(first: Graph, second: Graph) -> Alignment:
    """Align two runs; where one has compiled code, the other one is folded (`align_folded(eager, compiled).pairs`)."""
    if has_compiled_code(first) or has_compiled_code(second):
        modules = match_modules(first, second)
        back = {b: a for a, b in modules.items()}
        first, second = fold_modules(first, second, back), fold_modules(second, first, modules)
    found = align(first, second)
    if has_compiled_code(first) or has_compiled_code(second):
        back = {b: a for a, b in found.modules.items()}
        one = fold_gaps(first, second, [(a, b) for a, b in found.pairs.tolist()], back)
        two = fold_gaps(second, first, [(b, a) for a, b in found.pairs.tolist()], found.modules)
        if one is not first or two is not second:
            found = align(one, two)
    return found


def whole_of(graph: Graph) -> Graph:
    """The graph as it was recorded."""
    return graph.whole if isinstance(graph, Folded) else graph


def has_compiled_code(graph: Graph) -> bool:
    """Whether a run of compiled code is one of its operators."""
    texts = graph.trace.texts
    return COMPILED in texts and bool((graph.operators["name"] == texts.index(COMPILED)).any())


def compiled_runs(graph: Graph) -> list[int]:
    """The operators that are runs of compiled code, their backwards not counted."""
    if not has_compiled_code(graph):
        return []
    mine = graph.operators["name"] == graph.trace.texts.index(COMPILED)
    found: list[int] = np.flatnonzero(mine & np.isin(graph.operators["phase"], _PHASES)).tolist()
    return found


def is_whole_module(graph: Graph, operator: int) -> bool:
    """Whether a run of compiled code is that of a module; otherwise its arguments name a function."""
    said = graph.trace.texts[int(graph.operators["arguments"][operator])]
    return said.removesuffix(DREW).rstrip(", ") == "" and int(graph.operators["module"][operator]) >= 0


def fold_modules(graph: Graph, other: Graph, modules: dict[int, int]) -> Graph:
    """`graph` with each module as one operator that is compiled in `other`; `modules` leads from there to here."""
    runs: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    steps = other.step_order
    for operator in compiled_runs(other):
        phase = int(other.operators["phase"][operator])
        module = -1
        if phase != columns.OPTIMIZER:
            module = modules.get(int(other.operators["module"][operator]), -1)
            if not is_whole_module(other, operator) or module < 0 or not _same_members(graph, other, operator):
                continue
        runs[steps[int(other.operators["step"][operator])], phase, module].append(operator)
    if not runs:
        return graph
    owner = _owners(graph, {module for _, phase, module in runs if phase != columns.OPTIMIZER})
    members: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    steps = graph.step_order
    table = graph.operators
    for operator, (step, phase, module) in enumerate(zip(*(table[c].tolist() for c in ("step", "phase", "module")))):
        if phase in _PHASES:
            members[steps[step], phase, -1 if phase == columns.OPTIMIZER else owner.get(module, -1)].append(operator)
    own = set(compiled_runs(graph))
    groups, owners = [], []
    for key, ran in runs.items():
        found = [group for group in _calls(graph, members.get(key, []), len(ran)) if not own.issuperset(group)]
        groups += found
        owners += [key[2]] * len(found)
    return folded(graph, groups, owners)


def fold_gaps(graph: Graph, other: Graph, pairs: Iterable[tuple[int, int]], modules: dict[int, int]) -> Graph:
    """`graph` with what stands where `other` has a compiled function as one operator.

    `pairs` are operators that correspond, of `graph` first; `modules` leads from `other` to `graph`.
    """
    matched = sorted((b, a) for a, b in pairs)
    taken = {a for _, a in matched}, {b for b, _ in matched}
    asked = [b for b in compiled_runs(other) if b not in taken[1]]
    if not asked:
        return graph
    places = [b for b, _ in matched]
    steps = graph.step_order, other.step_order
    own = set(compiled_runs(graph))
    free: dict[tuple[int, int], list[int]] = defaultdict(list)
    for a, (step, phase) in enumerate(zip(graph.operators["step"].tolist(), graph.operators["phase"].tolist())):
        if a not in taken[0]:
            free[steps[0][step], phase].append(a)
    found: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    for b in asked:
        key = (steps[1][int(other.operators["step"][b])], int(other.operators["phase"][b]))
        low, high = -1, graph.count
        at = bisect.bisect_left(places, b)
        for near in range(at - 1, -1, -1):
            if _key(other, steps[1], places[near]) == key:
                low = matched[near][1]
                break
        for near in range(at, len(places)):
            if _key(other, steps[1], places[near]) == key:
                high = matched[near][1]
                break
        found[key[0], key[1], low, high].append(b)
    groups, owners = [], []
    for (step, phase, low, high), ran in found.items():
        mine = [a for a in free.get((step, phase), []) if low < a < high]
        if len(ran) == 1 and mine and not own.issuperset(mine):
            groups.append(mine)
            owners.append(modules.get(int(other.operators["module"][ran[0]]), -1))
    return folded(graph, groups, owners)


def _key(graph: Graph, steps: dict[int, int], operator: int) -> tuple[int, int]:
    return steps[int(graph.operators["step"][operator])], int(graph.operators["phase"][operator])


def _same_members(graph: Graph, other: Graph, operator: int) -> bool:
    """Whether most parameters of compiled code are also there in a graph, by their names and shapes."""
    mine, theirs = _members(graph), [m for m in (_member(other, t) for t in other.inputs(operator).tolist()) if m]
    return sum(m in mine for m in theirs) >= _MIN_SHARED * len(theirs)


def _members(graph: Graph) -> set[tuple[str, str]]:
    named = np.flatnonzero(np.isin(graph.tensors["kind"], (columns.PARAMETER, columns.BUFFER)))
    return {m for m in (_member(graph, tensor) for tensor in named.tolist()) if m is not None}


def _member(graph: Graph, tensor: int) -> tuple[str, str] | None:
    if int(graph.tensors["kind"][tensor]) not in (columns.PARAMETER, columns.BUFFER):
        return None
    shape = graph.trace.texts[int(graph.looks["shape"][graph.tensors["look"][tensor]])]
    return member_name(graph, tensor), shape


def member_name(graph: Graph, tensor: int) -> str:
    """The name of a parameter, a buffer or a gradient without what wrappers add, empty for other tensors."""
    name = graph.trace.texts[int(graph.tensors["name"][tensor])]
    module = graph.paths.get(int(graph.tensors["module"][tensor]), "")
    whole = graph.modules.get(int(graph.tensors["module"][tensor]), {}).get("name", "")
    return module + name.removeprefix(whole) if name else ""


def _owners(graph: Graph, modules: set[int]) -> dict[int, int]:
    """For each module inside one of `modules`, the outermost of these."""
    chosen = {graph.paths[module]: module for module in modules}
    found = {}
    for number, path in graph.paths.items():
        words = path.split(".")
        for length in range(1, len(words) + 1):
            owner = chosen.get(".".join(words[:length]))
            if owner is not None:
                found[number] = owner
                break
    return found


def _calls(graph: Graph, members: list[int], times: int) -> list[list[int]]:
    """The operators of each of so many calls of a module; none where they cannot be told apart."""
    if not members or times < 1:
        return []
    if times == 1:
        return [members]
    size, rest = divmod(len(members), times)
    names = graph.operators["name"][members]
    if not rest and all((names[k * size : (k + 1) * size] == names[:size]).all() for k in range(times)):
        return [members[k * size : (k + 1) * size] for k in range(times)]
    ends = [n for n in range(1, len(members)) if members[n] != members[n - 1] + 1]
    if len(ends) + 1 != times:
        return []
    return [members[a:b] for a, b in zip([0, *ends], [*ends, len(members)])]


# -- folding ----------------------------------------------------------------------------------------------


def folded(graph: Graph, groups: list[list[int]], owners: list[int]) -> Graph:
    """A graph with the operators of each group, and with their backwards, as one of the module that owns the group.

    >>> folded(graph, [[3, 4, 5]], [-1])                               # doctest: +SKIP
    """
    if not groups:
        return graph
    numbers: Sequence[int] = range(graph.count)
    within, original = dict[int, list[int]](), graph
    if isinstance(graph, Folded):
        numbers, within, original = graph.numbers, graph.inside, graph.whole
    same = converted(graph)
    backwards = [_backward_of(graph, group, same) for group in groups]
    owners = owners + [owner for owner, backward in zip(owners, backwards) if backward]
    groups = groups + [backward for backward in backwards if backward]
    new, kept = _renumbered(graph.count, groups)
    rows = [int(new[group[-1]]) for group in groups]
    inside: dict[int, list[int]] = {}
    for operator in kept.tolist():
        if operator in within:
            inside[int(new[operator])] = within[operator]
    for row, group in zip(rows, groups):
        inside[row] = [n for member in group for n in within.get(member, [numbers[member]])]
    trace = _trace(graph, groups, owners, rows, new, kept, same)
    return Folded(trace, original, inside, [numbers[n] for n in kept.tolist()])


def converted(graph: Graph) -> dict[int, int]:
    """Gradients that nobody in the trace returned, and what they were: by shapes and fingerprints.

    Autograd converts some between two operators, and hands those of parameters on as tensors of their own.
    """
    rows, where = graph.prints()
    edges = graph.trace["edges"]
    shapes = graph.looks["shape"][graph.tensors["look"]] if len(graph.tensors["look"]) else where
    returned = np.zeros(len(where), bool)
    returned[edges["tensor"][edges["side"] == OUTPUT]] = True
    producer = graph.tensors["producer"]
    lost = (producer < 0) & (graph.tensors["name"] == 0) | (graph.tensors["kind"] == columns.GRADIENT)
    lost &= ~returned & (where >= 0)
    shapes = np.where(np.isin(shapes, shapes[lost]), shapes, -1)
    backward = np.append(graph.operators["phase"] == columns.BACKWARD, False)
    made: dict[tuple[int, bytes], int] = {}
    found = {}
    for tensor in np.flatnonzero((where >= 0) & (shapes >= 0) & (lost | (returned & backward[producer]))).tolist():
        row = rows[where[tensor]]
        key = (int(shapes[tensor]), row.tobytes())
        if not lost[tensor]:
            made[key] = tensor
        elif key in made and row[_NORM] > 0:
            found[tensor] = made[key]
    return found


def _backward_of(graph: Graph, group: list[int], same: dict[int, int]) -> list[int]:
    """The backwards of operators, and what autograd adds up of nothing but what they send."""
    forward = graph.operators["forward"]
    backward = (graph.operators["phase"] == columns.BACKWARD) & np.isin(forward, group)
    mine: list[int] = np.flatnonzero(backward).tolist()
    if not mine:
        return []
    made = {same.get(tensor, tensor) for operator in mine for tensor in graph.outputs(operator).tolist()}
    for operator in range(mine[0], min(mine[-1] + _AFTER, graph.count)):
        if forward[operator] < 0 and graph.names[operator].startswith(SUM):
            came = [same.get(t, t) for t in graph.inputs(operator).tolist()]
            if came and made.issuperset(came):
                mine.append(operator)
                made.update(same.get(t, t) for t in graph.outputs(operator).tolist())
    return sorted(mine)


def _renumbered(count: int, groups: list[list[int]]) -> tuple[Any, Any]:
    """The new number of each operator, and which ones are left: of a group the last one, when all is there."""
    stands = np.arange(count)
    for group in groups:
        stands[group] = group[-1]
    kept = np.flatnonzero(stands == np.arange(count))
    return np.searchsorted(kept, stands), kept


def _trace(
    graph: Graph, groups: list[list[int]], owners: list[int], rows: list[int], new: Any, kept: Any, same: dict[int, int]
) -> Trace:
    """The trace of a graph with groups of operators as one; `rows` are the new numbers of these."""
    trace = graph.trace
    texts = list(trace.texts)
    known = {text: n for n, text in enumerate(texts)}

    def text(word: str) -> int:
        if word not in known:
            known[word] = len(texts)
            texts.append(word)
        return known[word]

    operators = {name: column[kept].copy() for name, column in trace["operators"].items()}
    forward = operators["forward"]
    operators["forward"] = np.where(forward >= 0, new[forward], forward)
    for row, group, module in zip(rows, groups, owners):
        drew = any(draws(graph.names[n], texts[int(trace["operators"]["arguments"][n])]) for n in group)
        first = group[0]
        backward = int(trace["operators"]["phase"][first]) == columns.BACKWARD
        if backward:
            operators["forward"][row] = new[int(trace["operators"]["forward"][first])]
        operators["name"][row], operators["module"][row] = text(COMPILED), module
        operators["arguments"][row] = text(DREW if drew and not backward else "")
        operators["location"][row] = trace["operators"]["location"][first]
        path = graph.modules[module]["name"] if module in graph.modules else ""
        what = f"{len(group)} operators" + (" of the backward" if backward else "")
        operators["title"][row] = text(f"{path} ({what})" if path else what)
    tensors = dict(trace["tensors"])
    producer = tensors["producer"]
    tensors["producer"] = np.where(producer >= 0, new[np.maximum(producer, 0)], producer).astype(producer.dtype)
    tables = {name: trace[name] for name in columns.TABLES}
    tables |= {"operators": operators, "tensors": tensors}
    for name in ("memory", "levels"):
        tables[name] = dict(trace[name])
        at = trace[name]["operator"]
        if len(at):
            there = np.where(at >= graph.count, len(kept), new[np.clip(at, 0, graph.count - 1)])
            tables[name]["operator"] = np.where(at < 0, at, there).astype(np.int32)
    tables["edges"] = _edges(graph, groups, rows, new, same)
    return Trace(tables, texts, trace.facts, trace.path)


def _edges(graph: Graph, groups: list[list[int]], rows: list[int], new: Any, same: dict[int, int]) -> dict[str, Any]:
    edges = graph.trace["edges"]
    member = np.full(graph.count, -1, np.int64)
    for n, group in enumerate(groups):
        member[group] = n
    loose = member[edges["operator"]] < 0
    found = {name: column[loose] for name, column in edges.items()}
    found["operator"] = new[found["operator"]]
    users: dict[int, set[int]] = defaultdict(set)  # of tensors: the groups that use them, -1 for other operators
    mine = edges["side"] == INPUT
    for tensor, by in zip(edges["tensor"][mine].tolist(), member[edges["operator"][mine]].tolist()):
        users[same.get(tensor, tensor)].add(by)
    more: list[tuple[int, int, int, int]] = []
    for n, (row, group) in enumerate(zip(rows, groups)):
        made, known, used, given = dict[int, None](), set[int](), set[int](), dict[int, None]()
        for operator in group:
            for tensor in graph.inputs(operator).tolist():
                before = same.get(tensor, tensor)
                if before not in known:
                    given.setdefault(tensor)
                used.add(before)
            for tensor in graph.outputs(operator).tolist():
                made.setdefault(tensor)
                known.add(same.get(tensor, tensor))
        kinds, bases = graph.tensors["kind"], {int(graph.tensors["base"][tensor]) for tensor in made}
        leaves = [
            tensor
            for tensor in made
            if users[(other := same.get(tensor, tensor))] - {n}
            or other not in used
            or (kinds[tensor] in (columns.BUFFER, columns.PARAMETER) and tensor not in bases)
        ]
        for side, tensors in ((INPUT, list(given)), (OUTPUT, leaves)):
            more += [(row, side, min(place, 32_767), tensor) for place, tensor in enumerate(tensors)]
    added = np.array(more, np.int64).reshape(-1, 4)
    return {
        name: np.concatenate([found[name], added[:, n].astype(found[name].dtype)])
        for n, name in enumerate(("operator", "side", "place", "tensor"))
    }


def told_folds(first: Graph, second: Graph) -> list[str]:
    """What was folded, for the report: a line for each side that has it."""
    found = []
    for word, other, graph in (("A", "B", first), ("B", "A", second)):
        if isinstance(graph, Folded):
            count, runs = sum(map(len, graph.inside.values())), len(graph.inside)
            found.append(f"{count:,} operators of {word} are compared as the {runs:,} runs of compiled code of {other}")
    return found
