"""The records of a tool: rows in the store while it runs, data for users afterwards."""

from __future__ import annotations

from typing import Any, ClassVar

from ..call.description import Finding, TensorMeta, labelled
from ..view import console, store
from ..watch.call import Call

_FINDING_COLUMNS = {
    "tool": "TEXT",
    "run": "INTEGER",
    "op": "TEXT",
    "kind": "TEXT",
    "message": "TEXT",
    "call_id": "INTEGER",
    "location": "TEXT",
}
_MAX_SITES = 20_000
_MAX_SHOWN = 200  # rows in a notebook


class Records:
    """A tool's table in the store; `Tool` is one.

    >>> with op_tools.OpObserve() as tool:  # doctest: +SKIP
    ...     torch.add(x, y)
    >>> tool.records()[0]["op"]             # doctest: +SKIP
    'torch.add'
    """

    name: ClassVar[str] = "Tool"
    prefix: ClassVar[str] = "OP_TOOL"
    columns: ClassVar[dict[str, str]] = {}
    _store: store.Store | None = None

    def _open(self, run: int) -> None:
        """Get a table for the rows of a run, which has a number of its own in it."""
        self._run_key = run
        self._store = store.current()
        self._add_row = self._store.table(self.table_name, {"run": "INTEGER", **self.columns})
        self._findings = self._store.table("findings", _FINDING_COLUMNS)
        self._sites: dict[tuple[str, str, int, int], int] = {}

    def _add_finding(self, found: Finding) -> None:
        if self._store is not None:
            self._findings(
                (found.tool, self._run_key, found.op, found.kind, found.message, found.call_id, found.location)
            )

    @property
    def table_name(self) -> str:
        """The tool's table in the store."""
        return self.prefix.lower()

    def site(self, call: Call) -> int:
        """Number of the call's place and signature in the store; its description is stored once."""
        inputs, outputs = call.inputs, call.outputs
        quick = (call.op, call.location, inputs.number, outputs.number)
        found = self._sites.get(quick)
        if found is None:
            assert self._store is not None
            key = (call.op, call.location, inputs.args, inputs.kwargs, outputs.args)
            found = self._store.site(key, call.op, call.location, lambda: _describe_site(call))
            if inputs.number and outputs.number:
                if len(self._sites) >= _MAX_SITES:
                    self._sites.clear()
                self._sites[quick] = found
        return found

    def record(self, *row: Any) -> None:
        """Append one row to the tool's table."""
        self._add_row((self._run_key, *row))

    def records(self) -> list[dict[str, Any]]:
        """What was recorded since the last start, one dict per row (`tool.records()[0]["op"]`)."""
        if self._store is None:
            return []
        joined = "site" in self.columns
        what = "r.*, s.op, s.location, s.described" if joined else "r.*"
        join = "LEFT JOIN sites s ON s.site = r.site" if joined else ""
        rows = self._store.rows(
            f"SELECT {what} FROM {self.table_name} r {join} WHERE r.run = ? ORDER BY r.rowid", (self._run_key,)
        )
        for row in rows:
            row.pop("run", None)
            row.pop("site", None)
            self.polish(row)
        return rows

    def polish(self, row: dict[str, Any]) -> None:
        """Turn one stored row into what users get."""
        row.pop("described", None)

    def to_pandas(self) -> Any:
        """The records as a DataFrame; needs pandas (`tool.to_pandas().groupby("op")`)."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_pandas() needs pandas: pip install pandas, or use records()") from None
        return pandas.DataFrame(self.records())

    def _first_rows(self) -> tuple[list[str], list[list[Any]]]:
        rows = self.records()[:_MAX_SHOWN]
        header = [k for k in rows[0] if k != "described"] if rows else []
        return header, [[row.get(k, "") for k in header] for row in rows]

    def _repr_html_(self) -> str:
        header, rows = self._first_rows()
        return console.html_table(header, rows) if rows else f"<p>{self.name}: no records</p>"

    def __rich__(self) -> Any:
        from rich.table import Table

        header, rows = self._first_rows()
        shown = Table(*header, title=self.name)
        for row in rows:
            shown.add_row(*map(str, row))
        return shown


def _describe_site(call: Call) -> dict[str, Any]:
    return {
        "inputs": _plain(labelled(call.inputs, "inputs")),
        "outputs": _plain(labelled(call.outputs, "outputs")),
    }


def _plain(rows: list[tuple[str, TensorMeta | str]]) -> list[Any]:
    return [[label, part.as_dict() if isinstance(part, TensorMeta) else part] for label, part in rows]
