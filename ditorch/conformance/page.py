"""The page of a run: one HTML file with everything in it, to be opened from disk or put on a web server."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np

from ditorch.conformance.cases import NO_DTYPE, NOT_COMPARABLE, PASS, Case, Result
from ditorch.conformance.summary import Summary
from ditorch_common.page import Block, Column, Page, Table, View, blocks, read_page

LONGEST_DETAILS = 1500
_CHECKS = (
    *("forward", "backward", "noncontiguous", "out", "inplace", "forward-eval", "double-backward", "forward-mode"),
    *("for-loop", "foreach", "fused", "dtypes", "errors", "call"),
)
_LETTERS = dict(zip(_CHECKS, "FBNOIE2JLMUDRA"))
_DTYPES = (
    *(NO_DTYPE, "float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("complex64", "complex128", "complex32"),
)
_WORDS = ("part", "name", "dtype", "check", "status", "ledger", "message", "reason", "note", "details")
_TITLES: dict[str, dict[str, str]] = {
    "part": {"en": "part", "zh": "部分"},
    "name": {"en": "name", "zh": "名称"},
    "check": {"en": "check", "zh": "检查"},
    "status": {"en": "status", "zh": "状态"},
    "ledger": {"en": "unexpected", "zh": "意外"},
    "message": {"en": "message", "zh": "信息"},
    "reason": {"en": "ledger", "zh": "台账"},
    "note": {"en": "note", "zh": "备注"},
    "details": {"en": "details", "zh": "详情"},
    "samples": {"en": "samples", "zh": "样本数"},
    "seconds": {"en": "time", "zh": "时间"},
}


def page(summary: Summary) -> str:
    """The HTML text of a run.

    Example: ``Path("index.html").write_text(page(summary))``
    """
    backend = str(summary.about.get("backend", "device"))
    coverage = _coverage(summary)
    views = [View("cases", {"en": "Cases", "zh": "用例"}, _blocks(summary)), _coverage_view(bool(coverage))]
    about = [summary.about.get(key) for key in ("device_name", "framework", "date", "machine")]
    subtitle = " · ".join(str(one) for one in (f"torch {summary.about.get('torch', '')}", *about) if one)
    extra = {"conformance": summary.about}
    return Page(f"PyTorch on {backend}", views, [_table(summary), *coverage], subtitle, extra=extra).html()


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
        head, tables = read_page(text)
        summary = Summary(dict(head["extra"]["conformance"]), [])
        for row in _rows(tables["cases"]):
            case = Case.parse("/".join(row[name] for name in ("part", "name", "dtype", "check")))
            fields = {name: row[name] for name in ("status", "message", "note", "samples", "seconds")}
            result = Result.from_dict({"case": str(case), **fields})
            summary.results.append(result)
            summary.expectations[case] = (row["ledger"], row["reason"])
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is not a page of ditorch conformance: {error!r}") from None
    summary.results.sort(key=lambda result: result.case)
    return summary


def _coverage(summary: Summary) -> list[Table]:
    if summary.coverage is None:
        return []
    rows = summary.coverage.rows()
    known = Column.numbers("known", np.array([row[1] for row in rows]), {"en": "overloads", "zh": "重载数"})
    seen = np.array([np.nan if row[2] is None else row[2] for row in rows])  # not a number: none is asked for
    columns = [
        Column.words("kind", [row[0] for row in rows], {"en": "what it is to a device", "zh": "对设备而言"}),
        known,
        Column.numbers("seen", seen, {"en": "exercised by this run", "zh": "本次运行用到"}),
    ]
    return [Table("coverage", columns)]


def _coverage_view(is_known: bool) -> View:
    empty = {
        "en": "This run does not say which overloads it came to; a new run will.",
        "zh": "此运行没有记录用到的重载。",
    }
    title = {"en": "Overloads of aten", "zh": "aten 重载"}
    return View("coverage", title, [blocks.table("coverage")] if is_known else [], empty)


def _rows(table: Table) -> list[dict[str, Any]]:
    columns: dict[str, list[Any]] = {name: table[name].texts() for name in _WORDS}
    columns["samples"] = table["samples"].values.tolist()
    columns["seconds"] = [round(value, 4) for value in table["seconds"].values.tolist()]
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def _table(summary: Summary) -> Table:
    rows = [_row(result, *summary.expectations[result.case]) for result in summary.results]
    columns = [
        Column.words(
            name, [row[place] for row in rows], _TITLES.get(name, name), "verdict" if name == "status" else "text"
        )
        for place, name in enumerate(_WORDS)
    ]
    numbers = np.array([row[-2:] for row in rows], np.float64).reshape(-1, 2)
    columns.append(Column.numbers("samples", numbers[:, 0].astype(np.int64), _TITLES["samples"]))
    columns.append(Column.numbers("seconds", numbers[:, 1], _TITLES["seconds"], "s", 3))
    return Table("cases", columns)


def _row(result: Result, expectation: str, reason: str) -> tuple[Any, ...]:
    if result.status == PASS and not expectation:
        return (*result.case, result.status, *[""] * 5, 0, 0.0)
    details = "\n\n".join(result.details)
    if len(details) > LONGEST_DETAILS:
        details = details[:LONGEST_DETAILS] + "\n…"
    texts = (expectation, result.message, reason, result.note, details)
    return (*result.case, result.status, *texts, result.samples, result.seconds)


def _blocks(summary: Summary) -> list[Block]:
    new = len(summary.new_failures)
    complete = summary.about.get("complete") is not False
    headline = {"en": f"Right: {summary.by_case} cases", "zh": f"正确的用例：{summary.by_case}"}
    failures, unclear = len(summary.failures), summary.statuses.get(NOT_COMPARABLE, 0)
    lines: list[blocks.Text] = [
        {
            "en": f"{failures:,} failures, {new:,} of them not in the ledger; {unclear:,} cases are not comparable",
            "zh": f"{failures:,} 个失败，其中 {new:,} 个不在台账中；{unclear:,} 个用例无法比较",
        }
    ]
    if not complete:
        lines.append({"en": "INTERRUPTED: not all cases ran", "zh": "已中断：并非所有用例都已运行"})
    state: blocks.State = "wrong" if new else "right" if complete else "unknown"
    command = f"ditorch conformance --device {shlex.quote(str(summary.about.get('device', '')))} --case "
    return [
        blocks.banner(state, headline, lines),
        blocks.group({"en": "The run in numbers", "zh": "运行数据"}, [_facts(summary)], open=False),
        blocks.table(
            "cases",
            columns=["part", "name", "dtype", "check", "status", "ledger", "message"],
            filters=["part", "dtype", "check", "status", "ledger"],
            matrix=blocks.Matrix(
                down="name",
                within="part",
                across="dtype",
                cell="check",
                verdict="status",
                strange="ledger",
                letters=_LETTERS,
                order=list(_DTYPES),
            ),
            row_title="{part}/{name}/{dtype}/{check}",
            command=command.replace("{", "{{") + "{part}/{name}/{dtype}/{check}",
        ),
    ]


def _facts(summary: Summary) -> Block:
    about = summary.about
    rows: list[tuple[blocks.Text, str]] = [
        ({"en": "right cases", "zh": "正确的用例"}, str(summary.by_case)),
        ({"en": "right as a whole: names", "zh": "整体正确：名称"}, str(summary.rate("what", "name"))),
        ({"en": "names and dtypes", "zh": "名称与类型"}, str(summary.rate("what", "name", "dtype"))),
        ({"en": "failures", "zh": "失败"}, f"{len(summary.failures):,}"),
        ({"en": "not comparable", "zh": "无法比较"}, f"{summary.statuses.get(NOT_COMPARABLE, 0):,}"),
        ({"en": "not in the ledger", "zh": "不在台账中"}, f"{len(summary.new_failures):,}"),
        ({"en": "unexpected passes", "zh": "意外通过"}, f"{len(summary.new_passes):,}"),
    ]
    if about.get("seconds"):
        rows.append(({"en": "time", "zh": "时间"}, f"{about['seconds']:.0f} s, {about.get('jobs')} workers"))
    if about.get("samples"):
        rows.append(({"en": "samples per case, at most", "zh": "每个用例的样本上限"}, str(about["samples"])))
    return blocks.facts(rows)
