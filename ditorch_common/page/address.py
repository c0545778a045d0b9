"""Addresses inside a page: the fragment that shows one view, with the filters and the sort of its first table."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

_KEPT = "-_.~*'()!:,/"


def address(
    view: str,
    where: Mapping[str, object] | None = None,
    search: str = "",
    sort: tuple[str, str] | None = None,
    row: int | None = None,
) -> str:
    """The fragment of a view: `where` sets filters of its first table, `row` opens the details of one row.

    >>> address("records", {"op": "linear", "step": 3}, sort=("excess", "down"))
    '#records?op=linear&step=3&.sort=excess.down'
    >>> address("records", search="a & b", row=7)
    '#records?.q=a%20%26%20b&.row=7'
    """
    parts = [(name, str(value)) for name, value in (where or {}).items()]
    if search:
        parts.append((".q", search))
    if sort:
        parts.append((".sort", ".".join(sort)))
    if row is not None:
        parts.append((".row", str(row)))
    query = "&".join(f"{quote(name, _KEPT)}={quote(value, _KEPT)}" for name, value in parts)
    return "#" + quote(view, _KEPT) + ("?" + query if query else "")
