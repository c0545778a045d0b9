"""Whether the rows of a trace that was read belong together: they point to others by their numbers."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

Tables = dict[str, dict[str, Any]]  # columns by table and name
Pointers = dict[str, dict[str, str]]  # by table and column, the table whose rows it numbers
Limits = dict[tuple[str, str], int]  # by table and column, how many kinds there are
_ALWAYS: Final = {("tensors", "look"), ("edges", "operator"), ("edges", "tensor"), ("prints", "tensor")}


def points_nowhere(tables: Tables, pointers: Pointers, limits: Limits) -> str:
    """The first column that points to a row, or says a kind, that does not exist; empty where there is none."""
    counts = {name: len(next(iter(columns.values()))) for name, columns in tables.items()}
    for name, points in pointers.items():
        for column, target in points.items():
            if name not in tables or not counts.get(target) or not counts[name]:
                continue
            values = tables[name][column]
            least, most = (-1, counts[target]) if name in ("memory", "levels") else (-1, counts[target] - 1)
            least = 0 if (name, column) in _ALWAYS else least
            if values.min() < least or values.max() > most:
                return f"the {column} of a row of {name}"
    for (name, column), most in limits.items():
        if name in tables and counts[name] and tables[name][column].max() >= most:
            return f"the {column} of a row of {name}"
    if counts.get("modules"):
        known = np.append(np.unique(tables["modules"]["id"]), -1)
        for name, column in (
            ("operators", "module"),
            ("tensors", "module"),
            ("memory", "module"),
            ("modules", "parent"),
        ):
            if name in tables and not np.isin(np.unique(tables[name][column]), known).all():
                return f"the {column} of a row of {name}"
    return ""


def drop_loose(tables: Tables, pointers: Pointers) -> None:
    """Leave out rows that point to rows which a run that was killed did not come to write."""
    counts = {name: len(next(iter(columns.values()))) for name, columns in tables.items()}
    for name, points in pointers.items():
        for column, target in points.items():
            if name not in tables or target not in tables:
                continue
            whole = tables[name][column] < counts[target]
            if whole.all():
                continue
            if name in ("tensors", "operators"):  # others point to them by their numbers: what follows is left out
                whole[int(whole.argmin()) :] = False
            tables[name] = {each: values[whole] for each, values in tables[name].items()}
            counts[name] = int(whole.sum())
