"""Aligns two traces: first the trees of modules, then the operators of matched modules, in order.

Modules are matched from the root down, by name where both sides have the same ones, and as sequences where they do not;
classes, settings and the fingerprints of parameters say which layer is which. The operators of two matched modules, of
one step and phase, are two short sequences. Most are equal; the others are aligned by dynamic programming over names,
shapes and fingerprints. So the whole is near-linear in the number of operators. Lines of Python are not asked about.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ..call.graphs import OP as COMPILED
from . import format as columns
from .families import MOVES, family
from .format import INPUT, OUTPUT, PROJECTIONS
from .graph import Graph
from .sequences import aligned, split_aligned
from .settle import settled

_MAX_CELLS: Final = 250_000  # of a table of dynamic programming
_NEVER: Final = -1e9
_RUN: Final = 3.0  # for two runs of compiled code: their order says which is which


@dataclasses.dataclass
class Alignment:
    """Which operators and modules of two traces correspond."""

    first: Graph
    second: Graph
    pairs: Any  # operators, two columns, in the order of the first trace
    modules: dict[int, int]  # of the first trace to those of the second
    replaced: list[tuple[list[int], list[int]]]  # runs of operators that stand in the same place
    only: tuple[list[int], list[int]]  # operators without a counterpart on either side


class Features:
    """What the aligner looks at, one list per question, by operator."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names = graph.names
        self.phases = graph.operators["phase"].tolist()
        by_text = {number: family(text) for number, text in enumerate(graph.trace.texts)}
        self.families = [by_text[number] for number in graph.operators["name"].tolist()]
        starts, tensors = graph.side(OUTPUT)
        has = starts[1:] > starts[:-1]
        first = np.full(graph.count, -1, np.int64)
        first[has] = tensors[starts[:-1][has]]
        looks = np.where(first >= 0, graph.tensors["look"][first] if len(graph.tensors["look"]) else 0, -1)
        shapes = graph.looks["shape"]
        self.shapes = np.where(looks >= 0, shapes[looks] if len(shapes) else 0, -1).tolist()
        self.rows, where = graph.prints()
        printed = np.where(first >= 0, where[first] if len(where) else -1, -1)
        self.printed = printed.tolist()
        self.shape_texts = graph.trace.texts
        self.members = self._first_members(graph)

    def origins(self) -> dict[int, tuple[int, str]]:
        """Of operators of optimizers: the parameter or gradient that its first input is, or was made from."""
        graph, members = self.graph, self.members
        producers = graph.tensors["producer"].tolist()
        roots: list[int] = []  # what a tensor was before anybody wrote to it
        for tensor, base in enumerate(graph.tensors["base"].tolist()):
            roots.append(roots[base] if 0 <= base < tensor else tensor)
        found: dict[int, tuple[int, str]] = {}
        waiting: list[int] = []  # those without inputs make what the next one with inputs is for
        for operator in np.flatnonzero(graph.operators["phase"] == columns.OPTIMIZER).tolist():
            inputs = graph.inputs(operator).tolist()
            if not inputs:
                waiting.append(operator)
                continue
            origin = members.get(operator)
            if origin is None:
                origin = found.get(producers[roots[inputs[0]]])
            if origin is not None:
                found.update((number, origin) for number in (*waiting, operator))
            waiting = []
        return found

    @staticmethod
    def _first_members(graph: Graph) -> dict[int, tuple[int, str]]:
        """Of operators whose first input is a parameter, a buffer or a gradient: its module, and its own name."""
        starts, tensors = graph.side(INPUT)
        has = np.flatnonzero(starts[1:] > starts[:-1])
        first = tensors[starts[:-1][has]]
        named = graph.tensors["name"][first] > 0
        texts = graph.trace.texts
        found = {}
        for operator, tensor in zip(has[named].tolist(), first[named].tolist()):
            own = texts[int(graph.tensors["name"][tensor])].removesuffix("/out")
            module = int(graph.tensors["module"][tensor])
            prefix = graph.modules[module]["name"] + "." if module in graph.modules else ""
            found[operator] = (module, own.removeprefix(prefix))
        return found


def align(first: Graph, second: Graph) -> Alignment:
    """Align two traces (`align(Graph(a), Graph(b)).pairs`)."""
    one, two = Features(first), Features(second)
    modules = match_modules(first, second)
    groups_one, groups_two = _groups(first), _groups(second)
    steps_one, steps_two = first.step_order, second.step_order
    there = {(steps_two[step], phase, module): members for (step, phase, module), members in groups_two.items()}
    pairs: list[tuple[int, int]] = []
    replaced: list[tuple[list[int], list[int]]] = []
    matcher = _Matcher(one, two, modules)
    used: set[tuple[int, int, int]] = set()
    loose_one: dict[tuple[int, int], list[int]] = defaultdict(list)
    loose_two: dict[tuple[int, int], list[int]] = defaultdict(list)
    late = sorted(groups_one.items(), key=lambda group: group[0][1] == columns.BACKWARD)
    led: tuple[set[int], set[int]] | None = None
    for (step, phase, module), mine in late:
        key = (steps_one[step], phase, modules.get(module, -2))
        theirs = there.get(key, [])
        used.add(key)
        if phase == columns.BACKWARD:
            if led is None:  # all forwards are matched by now: the backward of each goes with it
                more = _by_forward(first, second, dict(pairs))
                pairs += more
                led = ({a for a, _ in more}, {b for _, b in more})
            mine, theirs = ([n for n in side if n not in taken] for side, taken in zip((mine, theirs), led))
        if phase == columns.OPTIMIZER:
            more = matcher.by_origin(mine, theirs)
            pairs += more
            known = ({a for a, _ in more}, {b for _, b in more})
            mine, theirs = ([n for n in side if n not in taken] for side, taken in zip((mine, theirs), known))
        found, gaps = matcher.sequences(mine, theirs)
        pairs += found
        for left, right in gaps:
            if left and right:
                replaced.append((left, right))
            loose_one[key[:2]] += left
            loose_two[key[:2]] += right
    for key, members in there.items():
        if key not in used:
            loose_two[key[:2]] += members
    for place, left in loose_one.items():
        right = [b for b in loose_two.get(place, []) if led is None or b not in led[1]]
        if left and right and len(left) * len(right) <= 40 * _MAX_CELLS:
            found, _ = matcher.sequences(sorted(left), sorted(right), strict=True)
            pairs += found
    for _ in range(2):  # backwards of forwards that were matched last
        taken_one, taken_two = {a for a, _ in pairs}, {b for _, b in pairs}
        more = _by_forward(first, second, dict(pairs))
        pairs += [(a, b) for a, b in more if a not in taken_one and b not in taken_two]
        pairs = settled(first, second, sorted(pairs), modules)
    taken_one, taken_two = {a for a, _ in pairs}, {b for _, b in pairs}
    kept = [
        ([a for a in left if a not in taken_one], [b for b in right if b not in taken_two]) for left, right in replaced
    ]
    only = (
        [a for a in range(first.count) if a not in taken_one],
        [b for b in range(second.count) if b not in taken_two],
    )
    array = np.array(pairs, np.int64).reshape(-1, 2)
    return Alignment(first, second, array, modules, [pair for pair in kept if pair[0] and pair[1]], only)


def _by_forward(first: Graph, second: Graph, forward: dict[int, int]) -> list[tuple[int, int]]:
    """Pairs of backward operators whose forwards are a pair."""
    waiting: dict[int, list[int]] = defaultdict(list)
    for b, link in _backwards(second):
        waiting[link].append(b)
    found = []
    for a, link in _backwards(first):
        there = waiting.get(forward.get(link, -1))
        if there:
            found.append((a, there.pop(0)))
    return found


def _backwards(graph: Graph) -> list[tuple[int, int]]:
    """Backward operators, and the forward of each."""
    links = graph.operators["forward"]
    found = np.flatnonzero((links >= 0) & (graph.operators["phase"] == columns.BACKWARD))
    return list(zip(found.tolist(), links[found].tolist()))


def _groups(graph: Graph) -> dict[tuple[int, int, int], list[int]]:
    """Operators by step, phase and module, in order; those of a wrapper stand with those of what it wraps."""
    found: dict[tuple[int, int, int], list[int]] = {}
    table, inner = graph.operators, _inner(graph)[0]
    keys = zip(table["step"].tolist(), table["phase"].tolist(), table["module"].tolist())
    for operator, (step, phase, module) in enumerate(keys):
        key = (step, phase, inner.get(module, module))
        members = found.get(key)
        if members is None:
            found[key] = [operator]
        else:
            members.append(operator)
    return found


# -- modules ----------------------------------------------------------------------------------------------


def match_modules(first: Graph, second: Graph) -> dict[int, int]:
    """Which module of the first trace is which of the second; -1, outside of all, is itself."""
    found = {-1: -1}
    _match_children(_Tree(first), _Tree(second), -1, -1, found)
    return found


def _inner(graph: Graph) -> tuple[dict[int, int], dict[str, int]]:
    """Of each module the innermost one of the same path, which is not a wrapper, and these by path."""
    by_path: dict[str, int] = {}
    own: dict[int, str] = {}
    times: Counter[str] = Counter()
    for number, module in graph.modules.items():
        times[module["name"]] += 1
        again = times[module["name"]] - 1  # several that are made on the fly have one name
        own[number] = graph.paths[number] + (f"#{again}" if again else "")
        by_path[own[number]] = number
    return {number: by_path[own[number]] for number in graph.modules}, by_path


class _Tree:
    """The modules of a trace without wrappers, and the fingerprints of their parameters."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.children: dict[int, list[int]] = defaultdict(list)
        self.class_of = {n: m["class"] for n, m in graph.modules.items()}
        self.settings = {n: m["settings"] for n, m in graph.modules.items()}
        self.same, by_path = _inner(graph)
        for path, number in by_path.items():
            parent = path.rpartition(".")[0]
            self.children[by_path.get(parent, -1) if parent else -1].append(number)
        self.word = {number: path.rpartition(".")[2] for path, number in by_path.items()}
        self._prints = self._parameters(graph)

    @staticmethod
    def _parameters(graph: Graph) -> dict[int, dict[str, Any]]:
        rows, where = graph.prints()
        found: dict[int, dict[str, Any]] = defaultdict(dict)
        for tensor in (graph.tensors["kind"] == columns.PARAMETER).nonzero()[0].tolist():
            module, row = int(graph.tensors["module"][tensor]), int(where[tensor]) if len(where) else -1
            name = graph.trace.texts[int(graph.tensors["name"][tensor])].rpartition(".")[2]
            if row >= 0 and name not in found[module]:
                found[module][name] = rows[row]
        return found

    def values(self, module: int, prefix: str = "") -> dict[str, Any]:
        """The first fingerprints of the parameters in a module and below."""
        found = {f"{prefix}{name}": row for name, row in self._prints.get(module, {}).items()}
        for child in self.children[module]:
            found.update(self.values(child, f"{prefix}{self.word[child]}."))
        return found


def _match_children(one: _Tree, two: _Tree, a: int, b: int, found: dict[int, int]) -> None:
    mine, theirs = one.children[a], two.children[b]
    names, other = {one.word[m]: m for m in mine}, {two.word[m]: m for m in theirs}
    if set(names) == set(other):
        chosen = [(names[word], other[word]) for word in names]
    else:
        values_one = {m: one.values(m) for m in mine}
        values_two = {m: two.values(m) for m in theirs}

        def score(i: int, j: int) -> float:
            m, n = mine[i], theirs[j]
            if one.class_of[m] != two.class_of[n]:
                return 0.5 if one.word[m] == two.word[n] else _NEVER
            looks = 1.0 + float(one.settings[m] == two.settings[n]) + 0.3 * float(one.word[m] == two.word[n])
            return looks + _shared(values_one[m], values_two[n])

        chosen = [(mine[i], theirs[j]) for i, j in aligned(len(mine), len(theirs), score)]
    for m, n in chosen:
        found[m] = n
        for alias, target in one.same.items():
            if target == m:
                found[alias] = n
        _match_children(one, two, m, n, found)


def _shared(first: dict[str, Any], second: dict[str, Any]) -> float:
    """How alike parameters are, from 0 to 3; those that are constant say nothing."""
    votes, alike = 0, 0.0
    for name, row in first.items():
        other = second.get(name)
        if other is None or row[PROJECTIONS + 2] == row[PROJECTIONS + 3]:
            continue
        votes += 1
        apart = np.linalg.norm(row[:PROJECTIONS] - other[:PROJECTIONS])
        size = np.linalg.norm(row[:PROJECTIONS]) + np.linalg.norm(other[:PROJECTIONS])
        alike += float(apart <= 0.05 * size)
    return float(3.0 * alike / votes) if votes else 0.0


# -- sequences --------------------------------------------------------------------------------------------


class _Matcher:
    def __init__(self, one: Features, two: Features, modules: dict[int, int]) -> None:
        self.one, self.two, self._modules = one, two, modules
        texts = {text: number for number, text in enumerate(two.shape_texts)}
        self._shape = {number: texts.get(text, -3) for number, text in enumerate(one.shape_texts)}  # in words of `two`
        self._shape[-1] = -1
        self._comparable: dict[tuple[int, int], bool] = {}
        self._origins: tuple[dict[int, tuple[int, str]], dict[int, tuple[int, str]]] | None = None

    def by_origin(self, mine: Sequence[int], theirs: Sequence[int]) -> list[tuple[int, int]]:
        """Pairs of an optimizer's operators that do the same for the same parameter, in whichever order."""
        if self._origins is None:
            self._origins = (self.one.origins(), self.two.origins())
        sides: tuple[dict[Any, list[int]], ...] = (defaultdict(list), defaultdict(list))
        for side, members, features in zip((0, 1), (mine, theirs), (self.one, self.two)):
            for operator in members:
                origin = self._origins[side].get(operator)
                if origin is not None:
                    module = origin[0] if side else self._modules.get(origin[0], -2)
                    sides[side][features.names[operator], module, origin[1]].append(operator)
        return [
            pair
            for key, here in sides[0].items()
            if len(here) == len(there := sides[1].get(key, []))
            for pair in zip(here, there)
        ]

    def sequences(
        self, mine: Sequence[int], theirs: Sequence[int], strict: bool = False
    ) -> tuple[list[tuple[int, int]], list[tuple[list[int], list[int]]]]:
        """Pairs of operators of two sequences, and what stands between them on either side."""
        if not mine or not theirs:
            return [], [(list(mine), list(theirs))] if mine or theirs else []
        one, two, shape = self.one, self.two, self._shape
        keys_one = [(one.names[a], shape[one.shapes[a]]) for a in mine]
        keys_two = [(two.names[b], two.shapes[b]) for b in theirs]
        if not strict and keys_one == keys_two:
            return list(zip(mine, theirs)), []
        if not strict and [k[0] for k in keys_one] == [k[0] for k in keys_two]:  # other shapes: a part of a batch
            return list(zip(mine, theirs)), []
        chosen = split_aligned(keys_one, keys_two, lambda i, j: self.score(mine[i], theirs[j], strict))
        pairs, gaps, at_one, at_two = [], [], 0, 0
        for i, j in [*chosen, (len(mine), len(theirs))]:
            if i > at_one or j > at_two:
                gaps.append((list(mine[at_one:i]), list(theirs[at_two:j])))
            if i < len(mine):
                pairs.append((mine[i], theirs[j]))
            at_one, at_two = i + 1, j + 1
        return pairs, gaps

    def comparable(self, a: int, b: int) -> bool:
        """Whether a shape may be a part of the other, or the same in another view."""
        key = (a, b)
        found = self._comparable.get(key)
        if found is None:
            x, y = (_shape(f.shape_texts[n]) if n >= 0 else [] for f, n in ((self.one, a), (self.two, b)))
            apart = sum(m != n for m, n in zip(x, y)) if len(x) == len(y) else 9
            found = self._comparable[key] = apart <= 1 or math.prod(x) == math.prod(y)
        return found

    def score(self, a: int, b: int, strict: bool) -> float:
        one, two = self.one, self.two
        if one.names[a] == COMPILED == two.names[b]:
            return _NEVER if strict and self._shape[one.shapes[a]] != two.shapes[b] else _RUN
        same_family = one.families[a] == two.families[b]
        if not same_family:
            return _NEVER
        if one.families[a] in MOVES:  # says little: there are many of them
            points = 0.2 + 0.2 * (one.names[a] == two.names[b])
        else:
            points = 1.0 + 0.5 * (one.names[a] == two.names[b])
        same_shape = self._shape[one.shapes[a]] == two.shapes[b]
        if same_shape:
            points += 0.5
        elif self.comparable(one.shapes[a], two.shapes[b]):
            points -= 0.4
        elif one.families[a] in MOVES or one.phases[a] == columns.OPTIMIZER:
            return _NEVER
        else:
            points -= 1.3
        mine, theirs = one.members.get(a), two.members.get(b)
        if mine is not None and theirs is not None:
            if self._modules.get(mine[0]) == theirs[0] and mine[1] == theirs[1]:
                points += 1.5
            elif one.phases[a] == columns.OPTIMIZER:
                return _NEVER
            else:
                points -= 1.0
        p, q = one.printed[a], two.printed[b]
        if p >= 0 and q >= 0 and same_shape:
            x, y = one.rows[p], two.rows[q]
            apart = float(np.abs(x[:PROJECTIONS] - y[:PROJECTIONS]).max())
            size = float(np.abs(x[:PROJECTIONS]).max() + np.abs(y[:PROJECTIONS]).max())
            if apart <= 1e-5 * size:
                points += 2.0
            elif apart <= 0.05 * size:
                points += 1.5
            elif strict:
                return _NEVER
        elif strict and (not same_shape or one.families[a] in MOVES):
            return _NEVER
        return points


def _shape(text: str) -> list[int]:
    return [int(word) for word in text[1:-1].split(",") if word.strip()]
