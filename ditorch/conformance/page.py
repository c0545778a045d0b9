"""The page of a run: one HTML file with everything in it, to be opened from disk or put on a web server."""

from __future__ import annotations

import html
import json
import shlex
from pathlib import Path
from typing import Any

from ditorch.conformance.cases import PASS, STATUSES, Case, Result
from ditorch.conformance.summary import Summary

TEMPLATE = Path(__file__).with_name("page.html")
LONGEST_DETAILS = 1500
_OPENING, _CLOSING = '<script id="data" type="application/json">', "</script>"
_CHECKS = (
    *("forward", "backward", "noncontiguous", "out", "inplace", "forward-eval", "double-backward", "forward-mode"),
    *("for-loop", "foreach", "fused", "dtypes", "errors", "call"),
)
_PASSED = ("", "", "", "", "", 0, 0.0)


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


def read(path: Path) -> Summary:
    """A run, from its page, without the details; of passes it holds no more than their status.

    ValueError where it is not such a page.

    Example: ``read(Path("docs/conformance/soft.html")).by_case``
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a page of ditorch conformance") from None
    try:
        data = json.loads(text.partition(_OPENING)[2].partition(_CLOSING)[0])
        summary = Summary(dict(data["about"]), [])
        for what, name, cells in data["rows"]:
            for dtype, checks in cells.items():
                for check, mark in checks.items():
                    key = str(Case(what, name, dtype, check))
                    message, _, *expectation, note, samples, seconds = data["texts"].get(key, _PASSED)
                    fields = {"message": message, "note": note, "samples": samples, "seconds": seconds}
                    result = Result.from_dict({"case": key, "status": data["statuses"][mark % 10], **fields})
                    summary.results.append(result)
                    summary.expectations[result.case] = (expectation[0], expectation[1])
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is not a page of ditorch conformance: {error!r}") from None
    summary.results.sort(key=lambda result: result.case)
    return summary


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
        "coverage": [] if summary.coverage is None else summary.coverage.rows(),
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
