"""Puts the views of a run together."""

from __future__ import annotations

from collections.abc import Callable

from ditorch_common.page import Page, Table, Text, View, blocks

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
    makers: dict[str, Callable[[], View | tuple[View, list[Table]]]] = {
        "verdict": lambda: verdict.view(run),
        "diff": lambda: difference.view(compared_with),
        "graph": lambda: graph.view(run, places),
        "time": lambda: times.view(run, places, perfetto),
        "memory": lambda: memory.view(run),
        "overflow": lambda: overflow.view(run, places),
        "loss": lambda: losses.view(run),
        "captures": lambda: rest.captures(run),
        "ranks": lambda: rest.ranks(run),
        "doctor": lambda: rest.doctor(run),
        "settings": lambda: rest.settings(run),
        "records": lambda: tables.view(run, places),
    }
    views: list[View] = []
    found: list[Table] = []
    for name, make in makers.items():
        made = _made(name, make)
        views.append(made if isinstance(made, View) else made[0])
        found += [] if isinstance(made, View) else made[1]
    return Page(_title(run), views, found, _subtitle(run))


def _made(name: str, make: Callable[[], View | tuple[View, list[Table]]]) -> View | tuple[View, list[Table]]:
    """A view; what damaged files make impossible is said in it, and the others are shown."""
    try:
        return make()
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        headline = both(
            "This view could not be made: a file of the run is damaged", "无法生成此视图：运行的某个文件已损坏"
        )
        return View(name, name, [blocks.banner("unknown", headline, [reason])])


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
