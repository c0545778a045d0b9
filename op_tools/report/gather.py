"""Puts the views of a run together."""

from __future__ import annotations

from ditorch_common.page import Page, Table, Text

from ..trace.diff import Diff
from . import difference, graph, losses, memory, overflow, rest, tables, times, verdict
from .places import Places
from .run import Run
from .words import both


def page_of(run: Run, compared_with: Diff | None = None, perfetto: str = "") -> Page:
    """The page of a run, the most important view first.

    >>> page_of(Run(Path("op_tools_results"))).views[0].id  # doctest: +SKIP
    'verdict'
    """
    places = Places(run)
    first, wrong = verdict.view(run)
    timed, by_op = times.view(run, places, perfetto)
    overflowed, statistics = overflow.view(run, places)
    captured, replays = rest.captures(run)
    by_rank, ranks = rest.ranks(run)
    records, everything = tables.view(run, places)
    views = [
        first,
        difference.view(compared_with),
        graph.view(run, places),
        timed,
        memory.view(run),
        overflowed,
        losses.view(run),
        captured,
        by_rank,
        rest.doctor(run),
        rest.settings(run),
        records,
    ]
    found: list[Table] = [*wrong, *by_op, *statistics, *replays, *ranks, *everything]
    return Page(_title(run), views, found, _subtitle(run))


def _title(run: Run) -> str:
    name = run.folder.resolve().name or "run"
    return f"op_tools: {name}"


def _subtitle(run: Run) -> Text:
    facts = run.facts()
    device, command = str(facts.get("device") or ""), str(facts.get("command") or "")
    count = len(run.ranks)
    ranks_en, ranks_zh = (f", {count} ranks", f"，{count} 个 rank") if count > 1 else ("", "")
    on_en, on_zh = (f" on {device}", f"，设备 {device}") if device else ("", "")
    return both(f"{command}{on_en}{ranks_en}", f"{command}{on_zh}{ranks_zh}")
