"""The page in small, for notebooks: the answer and what belongs to it, as plain HTML without scripts."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any, Final

from ditorch_common.page import Block, Text

from . import overflow, times, verdict
from .places import Places
from .run import ReportError, Run

_COLOURS: Final = {"right": "#1a7f37", "wrong": "#cf222e", "running": "#0969da"}
_MAX_ROWS: Final = 12
_SIGNS: Final = {"right": "✓", "wrong": "✗", "running": "…"}


def html_of_tool(records: Path, run: int, tool: str) -> str:
    """What one run of a tool found, from its records file; empty where there is nothing to say.

    >>> html_of_tool(Path("records.sqlite"), 1, "OpAutoCompare")  # doctest: +SKIP
    """
    try:
        found = Run(records, only=run)
        if tool == "OpTimeMeasure" and found.count("op_time_measure"):
            return _times(found)
        if tool == "OpOverflowCheck":
            view, _ = overflow.view(found, Places(found))
            return _render([block for block in view.blocks if block["kind"] == "banner"])
        if tool == "OpAutoCompare":
            view, _ = verdict.view(found)
            return _render(view.blocks)
    except (ReportError, ValueError, OSError):  # what a notebook shows must not raise
        pass
    return ""


def _times(run: Run) -> str:
    rows = run.joined("op_time_measure", "call_id", "site", "phase", "elapsed_ms")
    table = {column.name: column for column in times.by_operator(run, rows).columns}
    names, phases = table["operator"].texts(), table["phase"].texts()
    totals, calls = table["total"].values.tolist(), table["calls"].values.tolist()
    longest = max(totals, default=0.0) or 1.0
    lines = []
    for n in sorted(range(len(names)), key=lambda n: -totals[n])[:_MAX_ROWS]:
        width = max(1, round(200 * totals[n] / longest))
        bar = f'<div style="background:#0969da;height:0.8em;width:{width}px"></div>'
        cells = (escape(names[n]), escape(phases[n]), f"{calls[n]:,}", f"{totals[n]:.4g} ms", bar)
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


def _render(blocks: Any) -> str:
    return "".join(_RENDERED[block["kind"]](block) for block in blocks if block["kind"] in _RENDERED)


def _words(text: Text) -> str:
    return escape(text if isinstance(text, str) else text.get("en", ""))


def _banner(block: Block) -> str:
    colour = _COLOURS.get(block["state"], "#9a6700")
    lines = "".join(f"<div><code>{_words(line)}</code></div>" for line in block["lines"])
    head = f"{_SIGNS.get(block['state'], '?')} {_words(block['headline'])}"
    style = f"border-left:4px solid {colour};padding:0.3em 0.8em"
    return f'<div style="{style}"><b style="color:{colour}">{head}</b>{lines}</div>'


def _code(block: Block) -> str:
    lines = []
    for number, text in block["lines"]:
        line = f"{number:>5}  {escape(text)}"
        lines.append(f"<b>{line}</b>" if number == block["mark"] else line)
    return f"<pre>{escape(block['file'])}\n" + "\n".join(lines) + "</pre>"


def _command(block: Block) -> str:
    return f"<div>{_words(block['title'])}: <code>{escape(block['text'])}</code></div>"


def _group(block: Block) -> str:
    return f"<details><summary>{_words(block['title'])}</summary>{_render(block['blocks'])}</details>"


def _list(block: Block) -> str:
    return "<ul>" + "".join(f"<li>{_words(item)}</li>" for item in block["items"][:_MAX_ROWS]) + "</ul>"


_RENDERED: Final = {"banner": _banner, "code": _code, "command": _command, "group": _group, "list": _list}
