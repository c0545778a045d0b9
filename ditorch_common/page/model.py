"""Pages: views with addresses, made of blocks, and the tables that blocks show."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ditorch_common.page import document
from ditorch_common.page.blocks import Block, Text, plain
from ditorch_common.page.columns import Table, check_name
from ditorch_common.private import complete


@dataclass(frozen=True)
class View:
    """One part of a page, at the address `#id`. Without blocks, `empty` says what to run to fill it."""

    id: str
    title: Text
    blocks: Sequence[Block]
    empty: Text = ""

    def __post_init__(self) -> None:
        check_name(self.id)


@dataclass(frozen=True)
class Page:
    """A page; `extra` is kept in the file for programs that read it, and not shown.

    Example: ``Page("run 7", [View("verdict", "Verdict", [blocks.banner("right", "All is well")])]).html()``
    """

    title: str
    views: Sequence[View]
    tables: Sequence[Table] = ()
    subtitle: Text = ""
    language: str = "en"
    extra: Mapping[str, Any] = field(default_factory=dict)

    def html(self) -> str:
        """The whole page as one HTML text that needs nothing else."""
        data = [document.data("application/json", "head", document.json_text(self.head()))]
        for table in self.tables:
            packed = base64.b64encode(table.pack()).decode()
            data.append(document.data("application/octet-stream", f"table-{table.name}", packed))
        return document.html(self.title, self.language, data)

    def shell(self, data_url: str) -> str:
        """The page without data, which it asks a server for, and again when that says that something is new.

        It gets `DATA_URL/head`, `DATA_URL/table/NAME` and `DATA_URL/events`, each with the query of its own address,
        where a token may be.
        """
        return document.html(self.title, self.language, [document.data("text/plain", "data-url", data_url)], live=True)

    def head(self) -> dict[str, Any]:
        """Everything but the columns of the tables, ready for JSON."""
        views = [
            {"id": view.id, "title": view.title, "blocks": plain(list(view.blocks)), "empty": view.empty}
            for view in self.views
        ]
        about = {"title": self.title, "subtitle": self.subtitle, "language": self.language}
        tables = {table.name: len(table) for table in self.tables}
        return {**about, "views": views, "tables": tables, "extra": plain(dict(self.extra))}

    def table(self, name: str) -> bytes:
        """A packed table, as the server sends it; KeyError where there is none of that name."""
        for table in self.tables:
            if table.name == name:
                return table.pack()
        raise KeyError(name)


def write_page(page: Page, path: str | Path) -> Path:
    """Write a page as one file, complete or not at all.

    Example: ``write_page(page, "run.html")``
    """
    path = Path(path)
    with complete(str(path)) as half:
        Path(half).write_text(page.html(), encoding="utf-8")
    return path


def read_page(text: str) -> tuple[dict[str, Any], dict[str, Table]]:
    """The head of a page and its tables, from its HTML text; ValueError where it is no such page.

    Example: ``head, tables = read_page(Path("run.html").read_text())``
    """
    head, tables = None, {}
    for kind, name, content in document.data_in(text):
        if name == "head":
            head = json.loads(content)
        elif name.startswith("table-") and kind == "application/octet-stream":
            tables[name[6:]] = Table.unpack(base64.b64decode(content))
    if not isinstance(head, dict):
        raise ValueError("this is not a page: it has no head")
    return head, tables
