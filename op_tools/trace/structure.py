"""What two graphs say without any values: members that nobody uses, work that all ranks do, dtypes and placements."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import format as columns
from .align import Alignment
from .format import INPUT, OUTPUT
from .graph import Graph
from .memory import memory_of
from .oneflow_log import eval_ranks


def members(graph: Graph, kind: int) -> dict[str, list[int]]:
    """Parameters or buffers by name without wrappers: the tensors that they are at different times."""
    found: dict[str, list[int]] = defaultdict(list)
    for tensor in (graph.tensors["kind"] == kind).nonzero()[0].tolist():
        name = graph.trace.texts[int(graph.tensors["name"][tensor])].removesuffix("/out")
        module = graph.paths.get(int(graph.tensors["module"][tensor]), "")
        found[f"{module}.{name.rpartition('.')[2]}" if module else name].append(tensor)
    return found


def unused(graph: Graph, kind: int) -> set[str]:
    """Names of parameters or buffers that go into no operator of the forward pass."""
    forward = graph.operators["phase"] == columns.FORWARD
    edges = graph.trace["edges"]
    variables = np.array([name.endswith(".variable") for name in graph.names], bool)
    inside = (edges["side"] == INPUT) & (forward & ~variables)[edges["operator"]] if graph.count else edges["side"] < 0
    used = set(edges["tensor"][inside].tolist())
    bases = graph.tensors["base"].tolist()
    used |= {bases[t] for t in used if bases[t] >= 0}
    return {name for name, tensors in members(graph, kind).items() if not used.intersection(tensors)}


def replicated(graph: Graph) -> dict[str, int]:
    """By module: operators that every rank does in whole although what they work on comes from a split batch."""
    if not graph.count:
        return {}
    texts, looks = graph.trace.texts, graph.looks
    whole = np.array([texts[n] == "B" for n in looks["placements"].tolist()], bool)
    split = np.array([texts[n].startswith("S(") for n in looks["placements"].tolist()], bool)
    many = np.array([len(eval_ranks(texts[n].partition("ranks=")[2])) > 1 for n in looks["mesh"].tolist()], bool)
    if not whole.any() or not many.any():
        return {}
    look = graph.tensors["look"]
    from_batch = np.zeros(graph.count, bool)
    producers = graph.tensors["producer"]
    found: Counter[str] = Counter()
    phases = graph.operators["phase"]
    modules = graph.operators["module"].tolist()
    for operator in range(graph.count):
        inputs, outputs = graph.inputs(operator), graph.outputs(operator)
        made = producers[inputs]
        from_batch[operator] = bool(
            split[look[inputs]].any() or split[look[outputs]].any() or from_batch[made[made >= 0]].any()
        )
        if from_batch[operator] and len(outputs) and phases[operator] in (columns.FORWARD, columns.BACKWARD):
            kinds = look[outputs]
            first = [int(w) for w in texts[int(looks["shape"][kinds[0]])][1:-1].split(",") if w.strip()]
            if whole[kinds].all() and many[kinds].all() and len(first) > 1:
                found[graph.paths.get(modules[operator], "")] += 1
    return dict(found)


def initialisers(graph: Graph) -> dict[str, str]:
    """How parameters are initialised, where the trace says so."""
    found = {}
    for operator, text in enumerate(graph.operators["arguments"].tolist()):
        words = graph.trace.texts[text]
        if words.startswith("initializer="):
            found[graph.titles[operator]] = words.partition("=")[2]
    return found


def differences(alignment: Alignment) -> Iterator[str]:
    """One line for each way in which dtypes, devices, placements, members and memory differ."""
    one, two = alignment.first, alignment.second
    for kind, word in ((columns.PARAMETER, "parameter"), (columns.BUFFER, "buffer")):
        mine, theirs = members(one, kind), members(two, kind)
        names = _renamed(alignment, mine)
        only_one = [name for name in mine if names[name] not in theirs]
        only_two = sorted(set(theirs) - set(names.values()))
        for side, only in (("A", only_one), ("B", only_two)):
            if only:
                yield f"{word}s only in {side}: {len(only)} ({_some(only)})"
        idle_one, idle_two = unused(one, kind), unused(two, kind)
        for name in sorted(idle_one & set(mine)):
            also = (
                "not in B"
                if names[name] not in theirs
                else "nor in B"
                if names[name] in idle_two
                else "it is used in B"
            )
            yield f"{word} {name} is listed in A and never used ({also})"
        for name in sorted(idle_two - {names[n] for n in idle_one}):
            also = "it is used in A" if name in names.values() else "not in A"
            yield f"{word} {name} is listed in B and never used ({also})"
    for side, graph, other in (("A", one, two), ("B", two, one)):
        twice = replicated(graph)
        if twice:
            total = sum(twice.values())
            ranks = graph.trace.world
            blocks = [f"{m or '(outside)'} ({n})" for m, n in sorted(twice.items(), key=lambda item: -item[1])]
            split = "" if replicated(other) else "; the other run splits them"
            yield (
                f"{side}: {total} operators on a split batch are broadcast: each of {ranks} ranks does all of the work"
                f"{split}: {_some(blocks, 8)}"
            )
        said = initialisers(graph)
        empty = [name for name, how in said.items() if how == "empty"]
        if empty:
            known = "; those of the other run hold values from its first step on" if other.trace.count("prints") else ""
            yield f"{side}: {len(empty)} of {len(said)} parameters have no initialisation in the graph{known}"
    yield from _looks(alignment)
    yield from _memory(one, two)


def _renamed(alignment: Alignment, names: dict[str, list[int]]) -> dict[str, str]:
    """The names of members in the second trace, by the modules that correspond."""
    paths = {
        alignment.first.paths.get(a, ""): alignment.second.paths.get(b, "")
        for a, b in alignment.modules.items()
        if a >= 0
    }
    found = {}
    for name in names:
        module, _, last = name.rpartition(".")
        found[name] = f"{paths.get(module, module)}.{last}" if module else last
    return found


def _looks(alignment: Alignment) -> Iterator[str]:
    one, two = alignment.first, alignment.second
    left, right = (_first_looks(graph)[alignment.pairs[:, n]] for n, graph in enumerate((one, two)))
    good = (left >= 0) & (right >= 0)
    modules = one.operators["module"][alignment.pairs[:, 0]][good]
    kinds, which = np.unique(np.stack([left[good], right[good]], 1), axis=0, return_inverse=True)
    which = which.reshape(-1)
    for word in ("dtype", "device", "placements"):
        texts = [(one.trace.texts[int(one.looks[word][x])], two.trace.texts[int(two.looks[word][y])]) for x, y in kinds]
        changes: dict[tuple[str, str], list[int]] = defaultdict(list)
        for n, pair in enumerate(texts):
            if pair[0] != pair[1]:
                changes[pair].append(n)
        counted = {pair: np.isin(which, numbers) for pair, numbers in changes.items()}
        for pair in sorted(counted, key=lambda pair: -int(counted[pair].sum()))[:4]:
            here = Counter(modules[counted[pair]].tolist())
            places = _some([one.paths.get(m, "") or "(outside)" for m, _ in here.most_common(4)], 3)
            what = f"{word.removesuffix('s')}: {pair[0] or 'local'} in A, {pair[1] or 'local'} in B"
            count = int(counted[pair].sum())
            yield f"{what}, of {count:,} {'operator' if count == 1 else 'operators'} ({places})"


def _first_looks(graph: Graph) -> Any:
    starts, tensors = graph.side(OUTPUT)
    found = np.full(graph.count, -1, np.int64)
    has = starts[1:] > starts[:-1]
    found[has] = graph.tensors["look"][tensors[starts[:-1][has]]]
    return found


def _memory(one: Graph, two: Graph) -> Iterator[str]:
    def needs(graph: Graph) -> float:
        plan = graph.trace["plan"]
        if len(plan["bytes"]):
            return float(plan["bytes"][0])
        return float(memory_of(graph).peak)

    mine, theirs = needs(one), needs(two)
    if max(mine, theirs) and abs(mine - theirs) > 0.01 * max(mine, theirs):
        yield f"memory at its peak: {mine / 2**20:,.2f} MiB in A, {theirs / 2**20:,.2f} MiB in B"


def _some(words: Any, most: int = 5) -> str:
    words = list(words)
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more
