"""In which module each recorded call was made: as a tool noted it, or as the same call of another step was."""

from __future__ import annotations

import numpy as np

from ..trace import format as trace_format
from .columns import Array, Words, occurrences
from .run import Run


class Places:
    """Modules of calls. A tool that sees every call notes modules in one step; others make the same calls in order.

    >>> Places(run).of(rank, call_id, step, op, location)  # doctest: +SKIP
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._words = run.words.setdefault("module", Words())
        self._empty = self._words.code("")
        self._direct: dict[int, int] = {}
        self._by_order: dict[tuple[int, int, int], int] = {}
        self._note_compared()
        self._note_places()
        self._note_traced()

    @property
    def known(self) -> bool:
        """Whether any module is known."""
        return bool(self._direct or self._by_order)

    def _note_compared(self) -> None:
        for process in self._run.processes:
            rows = process.growing["op_autocompare"]
            named = np.flatnonzero(rows["module"] != self._empty)
            calls, first = np.unique(rows["call_id"][named], return_index=True)
            modules = rows["module"][named][first]
            base = process.rank << 40
            self._direct.update(zip((calls + base).tolist(), modules.tolist()))

    def _note_places(self) -> None:
        for process in self._run.processes:
            rows = [row for row in process.small["places"] if isinstance(row.get("call_id"), int)]
            if not rows:
                continue
            sites = np.array([row["site"] if isinstance(row.get("site"), int) else -1 for row in rows], np.int64)
            op, location = (process.of_site(sites, name) for name in ("op", "location"))
            modules = self._words.codes([row.get("module") for row in rows])
            base = process.rank << 40
            self._direct.update((row["call_id"] + base, int(m)) for row, m in zip(rows, modules))
            self._order(op, location, modules)

    def _note_traced(self) -> None:
        for graph in self._run.graphs[:1]:
            operators, texts = graph.operators, graph.trace.texts
            if not graph.count:
                continue
            first = int(operators["step"].min())
            mine = np.flatnonzero((operators["phase"] != trace_format.BACKWARD) & (operators["step"] == first))
            op, location = (
                self._run.words.setdefault(name, Words()).codes([texts[n] for n in operators[column][mine]])
                for name, column in (("op", "name"), ("location", "location"))
            )
            modules = self._words.codes([graph.paths.get(m, "") for m in operators["module"][mine].tolist()])
            self._order(op, location, modules)

    def _order(self, op: Array, location: Array, modules: Array) -> None:
        keys = zip(op.tolist(), location.tolist(), occurrences(op, location).tolist())
        for key, module in zip(keys, modules.tolist()):
            self._by_order.setdefault(key, module)

    def of(self, rank: Array, call_id: Array, step: Array, op: Array, location: Array) -> Array:
        """The code of the module of each row; rows of one call have one module."""
        keys = (rank.astype(np.int64) << 40) + call_id
        calls, first, back = np.unique(keys, return_index=True, return_inverse=True)
        found = np.array([self._direct.get(key, -1) for key in calls.tolist()], np.int64)
        if self._by_order and (found < 0).any():
            order = occurrences(rank[first], step[first], op[first], location[first])
            open_ones = np.flatnonzero(found < 0)
            triples = zip(op[first][open_ones].tolist(), location[first][open_ones].tolist(), order[open_ones].tolist())
            found[open_ones] = [self._by_order.get(triple, -1) for triple in triples]
        return np.where(found < 0, self._empty, found)[back]
