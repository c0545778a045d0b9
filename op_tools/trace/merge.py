"""Puts the traces of ranks together, by logical tensor.

The first rank's graph stands for all. A tensor that is spread by placements gets the sum of the fingerprints of its
parts; one that every rank holds in whole keeps its own. Of a tensor without placements the sum of the fingerprints "as
a part of a batch" is kept beside its own: whichever fits the shape in another run counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .align import align
from .format import PRINT_COLUMNS, TABLES, Trace, TraceError, TraceWriter
from .graph import Graph


def merged(traces: Sequence[Trace]) -> Trace:
    """One trace of a run from those of its ranks (`merged([read(a), read(b)])`)."""
    first = traces[0]
    worlds = {trace.world for trace in traces}
    if len(worlds) > 1:
        raise TraceError(f"{first.path.parent}: traces of runs with {sorted(worlds)} ranks lie in one folder")
    if lacking := sorted(set(range(first.world)) - {trace.rank for trace in traces}):
        told = ", ".join(map(str, lacking[:8])) + (", …" if len(lacking) > 8 else "")
        raise TraceError(f"{first.path.parent}: of {first.world} ranks these have left no trace: {told}")
    maps = [_tensors(first, other) for other in traces]
    tables: dict[str, dict[str, Any]] = {name: first[name] for name in TABLES}
    rows, where = _rows(first, 0)
    weight = _replication(first)
    total = np.zeros((first.count("tensors"), len(PRINT_COLUMNS)))
    parts = np.zeros_like(total)
    seen_parts = np.zeros(len(total), np.int64)
    seen = np.zeros(len(total), np.int64)
    for trace, mapping in zip(traces, maps):
        for part, into, counter in ((0, total, seen), (1, parts, seen_parts)):
            table, place = _rows(trace, part)
            theirs = mapping
            known = (theirs >= 0) & (place[np.where(theirs >= 0, theirs, 0)] >= 0)
            values = table[place[theirs[known]]]
            at = np.flatnonzero(known)
            _add(into, at, values, counter)
    spread = weight > 0
    own = np.where(where >= 0, where, 0)
    base = rows[own] if len(rows) else total
    whole = seen == len(traces)
    sums = total.copy()
    sums[spread, :9] /= weight[spread, None]
    found = np.where((spread & whole)[:, None], sums, base)
    # without placements: where ranks differ, their mean is what one rank gets from the whole batch (losses, gradients)
    own_part = ~spread & whole & (np.abs(total[:, :9] - len(traces) * base[:, :9]).max(1) > 0)
    found[own_part, :9] = total[own_part, :9] / len(traces)
    have = where >= 0
    both = (seen_parts == len(traces)) & ~spread & _equal_parts(traces, maps)
    numbers = np.concatenate([np.flatnonzero(have), np.flatnonzero(both)])
    values = np.concatenate([found[have], parts[both]])
    prints = {name: values[:, i] for i, name in enumerate(PRINT_COLUMNS)}
    kinds = np.concatenate([np.zeros(int(have.sum()), np.int16), np.ones(int(both.sum()), np.int16)])
    tables["prints"] = {"tensor": numbers.astype(np.int32), **prints, "part": kinds}
    return Trace(tables, first.texts, {**first.facts, "ranks": [t.rank for t in traces]}, first.path.parent)


def _add(into: Any, at: Any, values: Any, counter: Any) -> None:
    """Add up projections, sums and counts; norms by their squares; the least and the largest."""
    norm, low, high = 9, 10, 11
    fresh = counter[at] == 0
    squares = into[at, norm] ** 2 + values[:, norm] ** 2
    into[at, low] = np.where(fresh, values[:, low], np.minimum(into[at, low], values[:, low]))
    into[at, high] = np.where(fresh, values[:, high], np.maximum(into[at, high], values[:, high]))
    for column in (*range(9), 12, 13):
        into[at, column] += values[:, column]
    into[at, norm] = np.sqrt(squares)
    counter[at] += 1


def _rows(trace: Trace, part: int) -> tuple[Any, Any]:
    table = trace["prints"]
    mine = table["part"] == part
    rows = np.stack([table[name][mine].astype(np.float64) for name in PRINT_COLUMNS], axis=1)
    where = np.full(trace.count("tensors"), -1, np.int64)
    where[table["tensor"][mine]] = np.arange(len(rows))
    return rows, where


def _tensors(first: Trace, other: Trace) -> Any:
    """For each tensor of the first rank its number on another one, -1 where it has none: the same place of an edge."""
    if first is other:
        return np.arange(first.count("tensors"))
    found = np.full(first.count("tensors"), -1, np.int64)
    edges = []
    for trace in (first, other):
        table = trace["edges"]
        edges.append(
            dict(zip(zip(*(table[c].tolist() for c in ("operator", "side", "place"))), table["tensor"].tolist()))
        )
    there = _operators(first, other)
    for (operator, side, place), tensor in edges[0].items():
        theirs = edges[1].get((there.get(operator, -1), side, place), -1)
        if theirs >= 0 and found[tensor] < 0:  # later, other memory may have the same number on one rank alone
            found[tensor] = theirs
    by_name = {n: t for t, n in reversed(list(enumerate(other.words("tensors", "name")))) if n}
    for tensor, name in reversed(list(enumerate(first.words("tensors", "name")))):
        if name and found[tensor] < 0:
            found[tensor] = by_name.get(name, -1)
    return found


def _operators(first: Trace, other: Trace) -> dict[int, int]:
    """For each operator of the first rank its number on another one; one of the two may log, say, or save."""
    names = [trace.words("operators", "name") for trace in (first, other)]
    if names[0] == names[1]:
        return {operator: operator for operator in range(len(names[0]))}
    mine, theirs = align(Graph(first), Graph(other)).pairs.T.tolist()
    return dict(zip(mine, theirs))


def _equal_parts(traces: Sequence[Trace], maps: Sequence[Any]) -> Any:
    """For each tensor of the first rank whether it has one shape on all: a part lies where so many equal ones end."""
    numbers: dict[str, int] = {}
    equal, first = None, None
    for trace, mapping in zip(traces, maps):
        words = trace.words("looks", "shape") or [""]
        codes = np.array([numbers.setdefault(text, len(numbers)) for text in words])
        mine = codes[trace["tensors"]["look"][mapping]] if trace.count("tensors") else np.zeros(len(mapping), np.int64)
        first = mine if first is None else first
        equal = (mine == first) if equal is None else equal & (mine == first)
    return equal


def _replication(trace: Trace) -> Any:
    """For tensors with placements, on how many ranks each part lies; 0 for others."""
    looks, texts = trace["looks"], trace.texts
    found = []
    for placements, mesh in zip(looks["placements"].tolist(), looks["mesh"].tolist()):
        words = [w.strip() for w in texts[placements].split(",")] if texts[placements] else []
        sizes = [int(n) for n in texts[mesh].partition(" ")[0].split("x") if n.isdigit()]
        copies = 1
        for word, size in zip(words, sizes):
            if word == "B":
                copies *= size
        found.append(float(copies) if words and len(words) == len(sizes) else 0.0)
    return np.array(found)[trace["tensors"]["look"]] if found else np.zeros(trace.count("tensors"))


def write_merged(trace: Trace, path: Path) -> Path:
    """Write a merged trace as one file."""
    with TraceWriter(path, {**trace.facts, "world": trace.world}) as writer:
        numbers = [writer.text(text) for text in trace.texts]
        for table, names in TABLES.items():
            texts = {name for name, kind in names.items() if kind == "text"}
            columns = [
                [numbers[n] for n in trace[table][name].tolist()] if name in texts else trace[table][name].tolist()
                for name in names
            ]
            for row in zip(*columns):
                writer.add(table, row)
    return path
