"""The blocks that views are made of: one function per kind, each returns a plain dict for the page.

A `Text` is a text, or the same in several languages: ``{"en": "wrong", "zh": "错误"}``. Everything is shown as text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

Block: TypeAlias = dict[str, Any]
Text: TypeAlias = "str | dict[str, str]"
State = Literal["right", "wrong", "unknown", "running"]


class Series(TypedDict, total=False):
    """A curve of `lines`: `y` has a number or None for each x, `band` the low and the high ends of what is expected."""

    name: str
    y: Sequence[float | None]
    band: tuple[Sequence[float | None], Sequence[float | None]] | None


class Mark(TypedDict):
    """A place on the x axis that has a name."""

    x: float
    text: Text


class TreeColumn(TypedDict, total=False):
    """A column of `tree` and `pair_tree`; its values are numbers, texts or None."""

    name: str
    title: Text
    unit: str


Value: TypeAlias = "float | str | None"
TreeNode: TypeAlias = "tuple[int, str, str, Sequence[Value], int]"
"""Parent (-1: none), label, kind, one value per column, index into `details` or -1."""
PairNode: TypeAlias = "tuple[int, str | None, str | None, float | None, Sequence[Value]]"
"""Parent, label on the left, label on the right (None: only the other has it), distance in rounding bounds, values."""


def plain(value: Any) -> Any:
    """The same for JSON: arrays become lists, numbers that JSON lacks become None, "inf" or "-inf".

    >>> plain([1.5, float("nan"), float("inf"), (True, None)])
    [1.5, None, 'inf', [True, None]]
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # arrays and their numbers
        return plain(value.tolist())
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return str(value)


def banner(state: State, headline: Text, lines: Sequence[Text] = ()) -> Block:
    """The answer at the top of a view: whether the run is right, in one line, and what else matters at once.

    >>> banner("wrong", "linear is wrong", ["model.py:7"])["state"]
    'wrong'
    """
    return {"kind": "banner", "state": state, "headline": headline, "lines": list(lines)}


def facts(rows: Sequence[tuple[Text, Text]], title: Text = "") -> Block:
    """Names with their values: ``facts([("module", "encoder.0"), ("dtype", "bfloat16")])``."""
    return {"kind": "facts", "rows": [list(row) for row in rows], "title": title}


def text(content: Text, title: Text = "") -> Block:
    """A paragraph; lines stay lines."""
    return {"kind": "text", "text": content, "title": title}


def list_of(items: Sequence[Text], title: Text = "") -> Block:
    """Points, one per line."""
    return {"kind": "list", "items": list(items), "title": title}


def code(lines: Sequence[tuple[int, str]], mark: int | None = None, file: str = "", title: Text = "") -> Block:
    """Lines of source with their numbers; `mark` is the number of the one that matters."""
    return {"kind": "code", "lines": [list(line) for line in lines], "mark": mark, "file": file, "title": title}


def command(content: str, title: Text = "") -> Block:
    """A command line that can be copied."""
    return {"kind": "command", "text": content, "title": title}


def histogram(
    edges: Sequence[float], counts: Sequence[int], unit: Text = "", mark: float | None = None, title: Text = ""
) -> Block:
    """Counts between edges, of which there is one more; `mark` is the bound."""
    if len(edges) != len(counts) + 1:
        raise ValueError(f"histogram: {len(counts)} counts need {len(counts) + 1} edges, not {len(edges)}")
    return {"kind": "histogram", "edges": edges, "counts": counts, "unit": unit, "mark": mark, "title": title}


def tensor_map(
    rows: int,
    columns: int,
    cells: Sequence[float],
    shape: Sequence[int],
    labels: tuple[Text, Text] = ("", ""),
    title: Text = "",
) -> Block:
    """Where in a tensor the wrong elements are: shares from 0 to 1, row by row; `shape` is that of the tensor."""
    if rows * columns != len(cells):
        raise ValueError(f"tensor_map: {rows} x {columns} cells are needed, not {len(cells)}")
    keys = {"rows": rows, "columns": columns, "cells": cells, "shape": list(shape), "labels": list(labels)}
    return {"kind": "tensor_map", **keys, "title": title}


def table(
    name: str,
    columns: Sequence[str] | None = None,
    filters: Sequence[str] = (),
    sort: tuple[str, Literal["down", "up"]] | None = None,
    where: Mapping[str, Any] | None = None,
    title: Text = "",
    rows_link: str | None = None,
    matrix: Matrix | None = None,
    row_title: str = "",
    command: str = "",
) -> Block:
    """Rows of a table of the page. `columns` are those shown (a row's details have all), `filters` those with a menu.

    `where` keeps the rows in which each column has the value, or one of several; `rows_link` names the column
    whose value is the address that a row leads to. In the title of a row's details
    and in a command that they offer, ``{column}`` stands for the row's text, quoted for a shell in the command.
    """
    shown = None if columns is None else list(columns)
    keys = {"table": name, "columns": shown, "filters": list(filters), "sort": list(sort) if sort else None}
    rest = {"where": dict(where) if where else None, "title": title, "rows_link": rows_link, "matrix": matrix}
    return {"kind": "table", **keys, **rest, "row_title": row_title, "command": command}


class Matrix(TypedDict, total=False):
    """A second look at the rows of a table: names down, one column per value of `across`, a letter for each row."""

    down: str
    within: str  # names are the same only where this column is, too
    across: str
    cell: str
    verdict: str
    strange: str  # a column whose text is not empty where a row is not as expected
    letters: dict[str, str]  # value of `cell` -> letter; their order is that of the letters
    order: list[str]  # of the columns


def bars(labels: Sequence[str], values: Sequence[float], unit: str = "", title: Text = "") -> Block:
    """Horizontal bars, longest first."""
    if len(labels) != len(values):
        raise ValueError(f"bars: {len(labels)} labels, {len(values)} values")
    return {"kind": "bars", "labels": list(labels), "values": values, "unit": unit, "title": title}


def lines(
    x: Sequence[float],
    series: Sequence[Series],
    marks: Sequence[Mark] = (),
    x_title: Text = "",
    unit: str = "",
    title: Text = "",
) -> Block:
    """Curves over a common x, which goes up: ``lines(steps, [{"name": "loss", "y": losses}])``."""
    for one in series:
        if len(one["y"]) != len(x):
            raise ValueError(f"lines: {one['name']} has {len(one['y'])} values for {len(x)} places")
    kept = [{"name": one["name"], "y": one["y"], "band": one.get("band")} for one in series]
    keys = {"x": x, "series": kept, "marks": [dict(mark) for mark in marks]}
    return {"kind": "lines", **keys, "x_title": x_title, "unit": unit, "title": title}


def heat(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[float | None],
    unit: str = "",
    title: Text = "",
    scale: Literal["linear", "log"] = "linear",
) -> Block:
    """A map of numbers, row by row; None where there is none."""
    if len(rows) * len(columns) != len(values):
        raise ValueError(f"heat: {len(rows)} x {len(columns)} values are needed, not {len(values)}")
    keys = {"rows": list(rows), "columns": list(columns), "values": values}
    return {"kind": "heat", **keys, "unit": unit, "title": title, "scale": scale}


def flame(nodes: Sequence[tuple[int, str, float]], unit: str = "", title: Text = "") -> Block:
    """What a whole is made of: parent (-1: none), name and value of each part, parents first."""
    _check_parents("flame", [node[0] for node in nodes])
    return {"kind": "flame", "nodes": [list(node) for node in nodes], "unit": unit, "title": title}


def timeline(
    rows: Sequence[str], spans: Sequence[tuple[int, float, float, str, str]], unit: str = "", title: Text = ""
) -> Block:
    """Spans on rows: row, start, length, name and group, which has a colour."""
    if any(not 0 <= span[0] < len(rows) for span in spans):
        raise ValueError("timeline: a span is on a row that is not there")
    keys = {"rows": list(rows), "spans": [list(span) for span in spans]}
    return {"kind": "timeline", **keys, "unit": unit, "title": title}


def tree(
    columns: Sequence[TreeColumn],
    nodes: Sequence[TreeNode],
    details: Sequence[Sequence[Block]] = (),
    title: Text = "",
) -> Block:
    """A tree that opens step by step, with columns and search; a node may have blocks, shown when it is chosen."""
    _check_parents("tree", [node[0] for node in nodes])
    if any(len(node[3]) != len(columns) or not -1 <= node[4] < len(details) for node in nodes):
        raise ValueError("tree: a node needs one value per column, and details that are there or -1")
    keys = {"columns": [dict(column) for column in columns], "nodes": [list(node) for node in nodes]}
    return {"kind": "tree", **keys, "details": [list(blocks) for blocks in details], "title": title}


def pair_tree(columns: Sequence[TreeColumn], nodes: Sequence[PairNode], title: Text = "") -> Block:
    """Two trees side by side, aligned, coloured by how far they are apart in rounding bounds."""
    _check_parents("pair_tree", [node[0] for node in nodes])
    if any(len(node[4]) != len(columns) for node in nodes):
        raise ValueError("pair_tree: a node needs one value per column")
    keys = {"columns": [dict(column) for column in columns], "nodes": [list(node) for node in nodes]}
    return {"kind": "pair_tree", **keys, "title": title}


def group(title: Text, blocks: Sequence[Block], open: bool = True) -> Block:
    """Blocks under one title that can be closed."""
    return {"kind": "group", "title": title, "blocks": list(blocks), "open": open}


def _check_parents(kind: str, parents: Sequence[int]) -> None:
    for place, parent in enumerate(parents):
        if not -1 <= parent < place:
            raise ValueError(f"{kind}: node {place} comes before its parent {parent}")
