"""What a comparing tool tells of its run: at its end, while it goes on, and to whoever asks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import settings
from ..compare import wrong_elements
from ..compare.blame import Blame
from ..compare.choose import Chooser
from ..compare.judges.collectives import Collectives
from ..compare.judging import Judging
from ..compare.ladder import Judge
from ..compare.regions import CompiledRegions
from ..compare.second_look import SecondLooks
from ..compare.teller import Teller
from ..copies.operands import Fetcher
from ..judge.verdict import WRONG
from ..view import console
from ..watch.compiled import Tally
from ..watch.intercept import INTERCEPTOR, Call
from .base import Tool


class Comparing(Tool):
    """A tool whose calls are judged in the background and told in their order.

    >>> comparison.blames[0].module  # doctest: +SKIP
    """

    _judging: Judging
    _teller: Teller
    _chooser: Chooser
    _second_looks: SecondLooks
    _collectives: Collectives | None
    _regions: CompiledRegions
    compares_compiled = True
    csv_path: Path | None

    def accepts_call(self, call: Call) -> bool:
        """Whether a call is among those that the tool was told to watch, whatever the budget says."""
        return Tool.accepts(self, call)

    def in_background(self, nbytes: int, work: Callable[[Fetcher], None]) -> None:
        """Have a worker thread do something with so many bytes of copies."""
        self._judging.in_background(nbytes, work)

    # -- tell, at the end -----------------------------------------------------------------------------

    def finish(self) -> None:
        teller = self._teller
        self._regions.stop()
        try:
            left = teller.numbered - teller.told
            if left > 50 and self.view.on and sys.stderr.isatty():
                console.wait_with_progress("comparing", left, lambda: teller.numbered - teller.told)
            self.wait()
        except KeyboardInterrupt:
            teller.abandoned = True  # what is queued is dropped; what was found is kept
            raise
        finally:
            self._judging.close()
            assert self._store is not None
            after = self._store.table("consequences", wrong_elements.CONSEQUENCES)
            after.extend((self._run_key, *row) for row in teller.consequences())
            self.csv_path = teller.write_table(self._store, self.table_name, self._run_key, self.only is None)

    def release(self) -> None:
        self._regions.stop()
        if self._collectives is not None:
            self._collectives.close()

    def summary(self) -> list[str]:
        notes = [line for judge in self._judging.ladder for line in judge.summary()]
        notes += [self._chooser.describe(), self._second_looks.describe(), INTERCEPTOR.sums.why_unheard()]
        told = self._teller.summary(self._chooser.left_out, notes, self.compiled)
        return [*told, f"comparisons in {self.csv_path and settings.shown_path(self.csv_path)}"]

    def _compiled_runs(self, wait: bool = False) -> Tally:
        return INTERCEPTOR.regions.unseen(wait)

    def _compiled_fact(self) -> list[str]:
        return []  # the coverage says it

    def progress(self) -> str:
        told, verdicts = self._teller.told, self._teller.verdicts
        return f"{super().progress()}, {told:,} comparisons, {verdicts[WRONG]:,} wrong"

    def note_wrong(self, *row: Any) -> None:
        """Store what is known of a wrong call (`op_tools report` shows it)."""
        assert self._store is not None
        self._store.table(wrong_elements.TABLE, wrong_elements.COLUMNS).append((self._run_key, *row))

    @property
    def blames(self) -> Sequence[Blame]:
        """The wrong events in program order (`comparison.blames[0].module`)."""
        return tuple(sorted(self._teller.blames, key=lambda b: b.event))

    def judge(self, kind: type[Judge]) -> Any:
        """The judge of that class in this run's ladder, or None (`comparison.judge(Workers)`)."""
        return self._judging.judge(kind)

    def wait(self) -> None:
        """Wait until every call so far is compared (`comparison.wait()`)."""
        self._judging.wait()

    def records(self) -> list[dict[str, Any]]:
        """All rows so far, in the order of the calls (`comparison.records()[0]["verdict"]`)."""
        if self.active:
            self.wait()
        return super().records()

    def findings(self) -> list[Any]:
        """What was found since the last start (`comparison.findings()`)."""
        if self.active:
            self.wait()
        return super().findings()

    def decode_row(self, row: dict[str, Any]) -> None:
        row.pop("described", None)
        row["allclose"] = bool(row["allclose"])
