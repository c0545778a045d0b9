"""What `op_tools settings` prints: every setting with its value, default, origin and help."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from typing import Any

from ditorch_common.settings import DITORCH, Registry

from ..settings import SETTINGS
from .console import emit


def registries() -> list[Registry]:
    """The settings of op_tools, and of ditorch where that is installed; it is not activated."""
    return [SETTINGS, DITORCH] if importlib.util.find_spec("ditorch") else [SETTINGS]


def rows(everything: bool = False) -> list[dict[str, Any]]:
    """One dict per setting, and per variable that is set for a family; `everything` includes internal ones.

    >>> rows()[0]["name"]
    'OP_TOOLS_CONSOLE'
    """
    found = []
    for registry in registries():
        shown = [s for s in registry if everything or not s.internal]
        titles = list(dict.fromkeys(s.group for s in shown))
        for setting in sorted(shown, key=lambda s: titles.index(s.group)):
            for name, text in (registry.variables_of(setting) or {setting.name: ""}).items():
                origin = {"value": text or setting.default, "source": "environment" if text else "default"}
                found.append({**dataclasses.asdict(setting), "package": registry.package, "name": name, **origin})
    return found


def show(as_json: bool = False, everything: bool = False) -> int:
    """Print the settings as tables or JSON, then variables that look misspelt; the result is the exit code."""
    mistakes = [line for registry in registries() for line in registry.misspelt(os.environ)]
    found = rows(everything)
    if as_json:
        emit(json.dumps({"settings": found, "misspelt": mistakes}, indent=2))
        return 0
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for group in dict.fromkeys(row["group"] for row in found):
        table = Table(title=group, title_justify="left", title_style="bold", box=None)
        table.add_column("name", no_wrap=True, min_width=41)
        for column in ("value", "default", "source", "help"):
            table.add_column(column, overflow="fold")
        for row in (row for row in found if row["group"] == group):
            default = row["default"] or f"({row['computed'] or 'none'})"
            options = f" ({', '.join(row['options'])})" if row["options"] else ""
            cells = (row["name"], row["value"], default, row["source"], row["help"] + options)
            table.add_row(*map(escape, cells), style="bold" if row["source"] == "environment" else None)
        console.print(table)
        console.print()
    for line in mistakes:
        console.print(line, markup=False)
    return 0
