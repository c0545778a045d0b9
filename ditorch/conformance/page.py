"""The page of a run: one HTML file with everything in it, to be opened from disk or put on a web server."""

from __future__ import annotations

import html
import json
import shlex
from pathlib import Path
from typing import Any

from ditorch.conformance.cases import PASS, STATUSES, Result
from ditorch.conformance.summary import Summary

TEMPLATE = Path(__file__).with_name("page.html")
LONGEST_DETAILS = 1500
_CHECKS = (
    *("forward", "backward", "noncontiguous", "out", "inplace", "forward-eval", "double-backward", "forward-mode"),
    *("for-loop", "foreach", "fused", "dtypes", "errors", "call"),
)


def page(summary: Summary) -> str:
    """The HTML text of a run.

    Example: ``Path("index.html").write_text(page(summary))``
    """
    backend = str(summary.about.get("backend", "device"))
    data = json.dumps(_data(summary), ensure_ascii=False, separators=(",", ":"))
    # "</script>" inside a string would end the script, and "<!--" would hide what follows.
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    text = TEMPLATE.read_text(encoding="utf-8")
    return text.replace("@TITLE@", html.escape(f"PyTorch on {backend}")).replace("@DATA@", data)


def _data(summary: Summary) -> dict[str, Any]:
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    texts: dict[str, Any] = {}
    for result in summary.results:
        case = result.case
        expectation, reason = summary.expectations[case]
        mark = STATUSES.index(result.status) + (10 if expectation else 0)
        rows.setdefault((case.what, case.name), {}).setdefault(case.dtype, {})[case.check] = mark
        if result.status != PASS or expectation:
            texts[str(case)] = _text(result, expectation, reason)
    return {
        "about": summary.about,
        "statuses": list(STATUSES),
        "checks": list(_CHECKS),
        "rates": {
            "cases": str(summary.by_case),
            "names": str(summary.rate("what", "name")),
            "pairs": str(summary.rate("what", "name", "dtype")),
        },
        "counts": summary.statuses,
        "new_failures": len(summary.new_failures),
        "new_passes": len(summary.new_passes),
        "rows": [[what, name, cells] for (what, name), cells in rows.items()],
        "texts": texts,
        "command": f"ditorch conformance --device {shlex.quote(str(summary.about.get('device', '')))} --case",
    }


def _text(result: Result, expectation: str, reason: str) -> list[Any]:
    details = "\n\n".join(result.details)
    if len(details) > LONGEST_DETAILS:
        details = details[:LONGEST_DETAILS] + "\n…"
    return [result.message, details, expectation, reason, result.note, result.samples, result.seconds]
