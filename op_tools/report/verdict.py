"""The first view: is this run right? If not, the first wrong operator, and what to do about it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from ditorch_common.page import Block, Column, Table, Text, View, blocks

from ..view.rows import WRONG
from .columns import groups
from .records import read_json
from .run import Run
from .words import both, line_of, reason, shell, short_op, source_of, times_bound

_MAX_WRONG: Final = 20_000
_LOW: Final = ("float16", "bfloat16", "float8")
_UNITS: Final = {
    "bound": both("error ÷ rounding bound", "误差 ÷ 舍入界"),
    "ulp": both("error in ulp (the bound is not known)", "误差（ulp；舍入界未知）"),
    "half": both("error ÷ ½ (whole numbers)", "误差 ÷ ½（整数）"),
}
_STATES: Final = {
    "running": both("The run is still going on.", "运行仍在进行。"),
    "stopped": both(
        "The run was stopped before its end; this is what it left.", "运行在结束前被终止；以下是它留下的记录。"
    ),
}


class Wrong:
    """The wrong calls of a run, the first one first."""

    def __init__(self, run: Run) -> None:
        rows = [row for row in run.small("wrong") if isinstance(row.get("op"), str)]
        if not rows:  # records of earlier versions
            rows = [_from_finding(f) for f in run.small("findings") if f.get("kind") == "difference"]
        if not rows:
            rows = list(_from_comparisons(run))
        self.rows = sorted(rows, key=lambda row: (_whole(row, "step"), _whole(row, "event"), row["rank"]))
        after = {(row["rank"], row.get("run"), row.get("event")): row for row in run.small("consequences")}
        for row in self.rows:
            row["after"] = after.get((row["rank"], row.get("run"), row.get("event")))

    @property
    def first(self) -> dict[str, Any] | None:
        """The first of them."""
        return self.rows[0] if self.rows else None


def _from_finding(finding: dict[str, Any]) -> dict[str, Any]:
    found = {k: finding.get(k) for k in ("rank", "run", "op", "call_id", "phase", "location", "module", "step")}
    return {**found, "op": str(finding.get("op")), "event": finding.get("call_id"), "excess": finding.get("size"),
            "name": str(finding.get("op")), "reason": finding.get("message"), "folder": ""}  # fmt: skip


def _from_comparisons(run: Run) -> Iterator[dict[str, Any]]:
    """Wrong rows of the comparisons themselves, one for each call, where nothing else says what is wrong."""
    for process in run.processes:
        rows, words = process.growing["op_autocompare"], run.words
        if not len(rows):
            continue
        wrong = np.flatnonzero(rows["verdict"] == words["verdict"].code(WRONG))[:_MAX_WRONG]
        ops, places = (process.of_site(rows["site"][wrong], name).tolist() for name in ("op", "location"))
        seen: set[int] = set()
        for row, op, place in zip(wrong.tolist(), ops, places):
            call = int(rows["call_id"][row])
            if call not in seen:
                seen.add(call)
                texts = {
                    name: words[name].known[int(rows[name][row])] for name in ("phase", "name", "reason", "module")
                }
                numbers = {"excess": float(rows["excess"][row]), "step": int(rows["step"][row]), "event": call}
                yield {**texts, **numbers, "op": words["op"].known[op], "location": words["location"].known[place],
                       "call_id": call, "rank": process.rank, "run": None, "folder": ""}  # fmt: skip


def _whole(row: dict[str, Any], name: str) -> int:
    value = row.get(name)
    return value if isinstance(value, int) else 0


def _list(row: dict[str, Any], name: str) -> list[Any]:
    value = row.get(name)
    return value if isinstance(value, list) else []


def _is_line(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int) and isinstance(pair[1], str)


def _text(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    return value if isinstance(value, str) else ""


def _number(row: dict[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else math.nan


def view(run: Run) -> tuple[View, list[Table]]:
    """The view and the table of wrong calls."""
    wrong = Wrong(run)
    found: list[Block] = [_banner(run, wrong)]
    tables: list[Table] = []
    if wrong.first is not None:
        found += _first(run, wrong.first)
    else:
        found += _overflow(run)
    found += _coverage(run)
    if len(wrong.rows) > 1:
        tables.append(_table(wrong.rows[:_MAX_WRONG]))
        found += [_by("op", wrong, both("Wrong calls by operator", "按算子统计的错误调用"))]
        shown = ["step", "operator", "phase", "module", "line", "tensor", "excess", "rank"]
        title = both("All wrong calls, in order", "全部错误调用，按先后排列")
        found.append(blocks.table("wrong", shown, ["operator", "module", "phase"], None, None, title))
    found += _findings(run)
    return View("verdict", both("Verdict", "结论"), found), tables


# -- the answer -------------------------------------------------------------------------------------------


def _banner(run: Run, wrong: Wrong) -> Block:
    state = run.state
    lines: list[Text] = [_STATES[state]] if state in _STATES else []
    first = wrong.first
    overflow = [f for f in run.small("findings") if f.get("kind") == "overflow"]
    if first is not None:
        op, module, location = first["op"], _text(first, "module"), _text(first, "location")
        where_en, where_zh = (f" in {module}", f"，位于 {module}") if module else ("", "")
        phase = _text(first, "phase") or "forward"
        headline = both(f"Wrong: {op} ({phase}){where_en}", f"错误：{op}（{_phase(phase)}）{where_zh}")
        if location:
            lines.append(f"{line_of(location)}   {source_of(location)}".rstrip())
        lines += [reason(_text(first, "reason")), _next_line(run, first)]
        return blocks.banner("wrong", headline, [line for line in lines if line])
    if overflow:
        made = overflow[0]
        headline = both(f"Overflow: {made['op']} made NaN or Inf", f"溢出：{made['op']} 产生了 NaN 或 Inf")
        place = f"{line_of(_text(made, 'location'))}   {source_of(_text(made, 'location'))}"
        lines += [place, _text(made, "message")]
        return blocks.banner("wrong", headline, lines)
    compared = run.count("op_autocompare")
    if compared:
        right = both("Nothing wrong was found", "没有发现错误")
        return blocks.banner("running" if state == "running" else "right", right, [*lines, *_covered(run)])
    lines.append(both("To compare every operator with the CPU:", "要将每个算子与 CPU 比较："))
    lines.append(f"op_tools run OpAutoCompare {run.command()}")
    headline = both(
        "Whether this run is right is not known: nothing was compared", "未作比较，无法判断这次运行是否正确"
    )
    return blocks.banner("running" if state == "running" else "unknown", headline, lines)


def _phase(phase: str) -> str:
    return {"forward": "前向", "backward": "反向"}.get(phase, phase)


def _next_line(run: Run, first: dict[str, Any]) -> Text:
    command = f"op_tools run OpFallback --ops {first['op']} {run.command()}"
    return both(f"Next: run it on the CPU meanwhile — {command}", f"下一步：先让它在 CPU 上运行 — {command}")


def _covered(run: Run) -> list[Text]:
    """What OpAutoCompare said about how much it compared."""
    for row in run.small("ends"):
        if row.get("tool") == "OpAutoCompare":
            lines = [line for line in _summary(row) if "comparison" in line or "COMPARED" in line]
            return list(lines[:1])
    return []


def _summary(row: dict[str, Any]) -> list[str]:
    try:
        found = json.loads(row.get("summary") or "[]")
    except (ValueError, TypeError, RecursionError):
        return []
    return [str(line) for line in found] if isinstance(found, list) else []


# -- the first wrong call -----------------------------------------------------------------------------------


def _first(run: Run, first: dict[str, Any]) -> list[Block]:
    found: list[Block] = []
    source = read_json(first.get("source"))
    lines = [(pair[0], pair[1]) for pair in _list(source, "lines") if _is_line(pair)]
    if lines:
        found.append(blocks.code(lines, _whole(source, "line"), _text(source, "file"), both("Where", "位置")))
    found.append(blocks.facts(_numbers(run, first), both("Numbers", "数值")))  # beside the lines, where there is room
    found.append(_next_steps(run, first))
    picture = read_json(first.get("picture"))
    if picture:
        found += _picture(picture)
    else:
        why = both(
            "No picture of the errors: its values were not on the host when it was judged, or the records are older.",
            "没有误差图：判定时数值不在主机上，或记录来自较早的版本。",
        )
        found.append(blocks.text(why))
    return found


def _numbers(run: Run, first: dict[str, Any]) -> list[tuple[Text, Text]]:
    row, excess = _row_of(run, first), _number(first, "excess")
    largest = times_bound(excess)
    facts: list[tuple[Text, Text]] = [
        (both("tensor", "张量"), _text(first, "name")),
        (both("largest error", "最大误差"), both(f"{largest} × rounding bound", f"舍入界的 {largest} 倍")),
    ]
    if row:
        facts += [
            (both("largest difference", "最大差值"), f"{row['max_abs_diff']:.6g}"),
            (both("largest relative difference", "最大相对差值"), f"{row['max_relative_diff']:.6g}"),
            (both("largest difference in ulp", "最大差值（ulp）"), f"{row['max_ulp']:.3g}"),
            (both("cosine", "余弦相似度"), f"{row['cosine']:.6f}"),
        ]
    after = first.get("after")
    if after:
        inputs = both("nothing wrong went in", "输入没有错误")
        if after.get("from_wrong"):
            inputs = both("wrong results went in", "输入中含有错误结果")
        facts.append((both("its inputs", "它的输入"), inputs))
        facts.append((both("later calls that used it", "受其影响的后续调用"), f"{_whole(after, 'reached'):,}"))
    call, step, rank = _whole(first, "call_id"), _whole(first, "step"), first["rank"]
    facts.append(
        (both("call", "调用"), both(f"{call}, step {step}, rank {rank}", f"{call}，第 {step} 步，rank {rank}"))
    )
    return facts


def _row_of(run: Run, first: dict[str, Any]) -> dict[str, float]:
    """The comparison of the first wrong call's worst tensor."""
    for process in run.processes:
        rows = process.growing["op_autocompare"]
        if process.rank != first["rank"] or not len(rows):
            continue
        verdict = rows.words["verdict"].code(WRONG)
        mine = np.flatnonzero((rows["call_id"] == _whole(first, "call_id")) & (rows["verdict"] == verdict))
        if len(mine):
            worst = int(mine[np.argmax(np.nan_to_num(rows["excess"][mine], nan=np.inf))])
            names = ("max_abs_diff", "max_relative_diff", "max_ulp", "cosine")
            return {name: float(rows[name][worst]) for name in names}
    return {}


def _picture(picture: dict[str, Any]) -> list[Block]:
    found: list[Block] = []
    try:
        elements, wrong, nan = (int(picture[key]) for key in ("elements", "wrong", "nan"))
        shape = [int(n) for n in picture["shape"]]
        share = f"{wrong:,} of {elements:,} elements are wrong" + (f", {nan:,} are NaN" if nan else "")
        share_zh = f"{elements:,} 个元素中有 {wrong:,} 个错误" + (f"，{nan:,} 个为 NaN" if nan else "")
        unit = _UNITS.get(picture["unit"], _UNITS["bound"])
        edges, counts = [float(e) for e in picture["edges"]], [int(c) for c in picture["counts"]]
        found.append(blocks.histogram(edges, counts, unit, 1.0, both("How large the errors are", "误差的大小")))
        cells = [min(1.0, max(0.0, float(c))) for c in picture["cells"]]
        rows, columns = int(picture["rows"]), int(picture["columns"])
        across = str(shape[-1]) if shape else "1"
        labels = (both("all other dimensions", "其余各维"), both(f"last dimension ({across})", f"最后一维（{across}）"))
        title = both(f"Where they are: {share}", f"错误元素的位置：{share_zh}")
        found.append(blocks.tensor_map(rows, columns, cells, shape, labels, title))
    except (KeyError, TypeError, ValueError):  # of a damaged record
        return found
    return found


def _next_steps(run: Run, first: dict[str, Any]) -> Block:
    op, command, folder = first["op"], run.command(), _text(first, "folder")
    steps: list[Block] = []
    if folder:
        steps.append(
            blocks.command(
                shell("python", f"{folder}/reproduce.py"), both("Repeat this call alone", "单独重现这次调用")
            )
        )
    moved = f"op_tools run OpFallback --ops {op} {command}"
    steps.append(
        blocks.command(moved, both("Go on meanwhile: this operator on the CPU", "暂时绕过：让该算子在 CPU 上运行"))
    )
    if _is_low(run, first):
        cast = f"op_tools run OpDtypeCast --ops {op} {command}"
        steps.append(
            blocks.command(
                cast, both("Or in float32, to see whether it is the precision", "或改用 float32，看是否精度所致")
            )
        )
    every = f"op_tools run OpAutoCompare --ops {op} {command}"
    steps.append(blocks.command(every, both("Compare every call of this operator", "比较该算子的每一次调用")))
    return blocks.group(both("What to do next", "下一步"), steps)


def _is_low(run: Run, first: dict[str, Any]) -> bool:
    """Whether the call has tensors of few bits."""
    for process in run.processes:
        words = process.sites.words
        if process.rank == first["rank"] and len(process.sites):
            op, location = words["op"].code(first["op"]), words["location"].code(_text(first, "location"))
            mine = (process.sites["op"] == op) & (process.sites["location"] == location)
            texts = [words["described"].known[code] for code in process.sites["described"][mine].tolist()]
            return any(name in text for text in texts for name in _LOW)
    return False


# -- the rest -----------------------------------------------------------------------------------------------


def _overflow(run: Run) -> list[Block]:
    made = next((f for f in run.small("findings") if f.get("kind") == "overflow"), None)
    if made is None:
        return []
    op, command = str(made["op"]), run.command()
    steps = [
        blocks.command(f"op_tools run OpDtypeCast --ops {op} {command}", both("In float32", "改用 float32")),
        blocks.command(f"op_tools run OpAutoCompare --ops {op} {command}", both("Is it right?", "它算得对吗？")),
    ]
    return [blocks.group(both("What to do next", "下一步"), steps)]


def _coverage(run: Run) -> list[Block]:
    """How much was compared: what the tool said at its end, or counts where it had none."""
    said: list[str] = []
    for row in run.small("ends"):
        if row.get("tool") == "OpAutoCompare":
            prefix = f"rank {row['rank']}: " if len(run.processes) > 1 else ""
            said += [prefix + line.strip() for line in _told(_summary(row))]
    if not said and run.count("op_autocompare"):
        rows = run.joined("op_autocompare", "call_id", "site", "verdict")
        calls = len(groups(rows["call_id"], rows["rank"])[0])
        verdicts = run.words["verdict"].known
        counts = Counter(verdicts[code] for code in rows["verdict"].tolist())
        said = [f"{calls:,} calls compared so far, {len(rows['op']):,} tensors: "
                + ", ".join(f"{n:,} {verdict}" for verdict, n in counts.most_common())]  # fmt: skip
    return [blocks.list_of(list(said), both("How much was compared", "比较了多少"))] if said else []


def _told(lines: list[str]) -> list[str]:
    """The lines of a summary about coverage: those before the first wrong call and the files."""
    found = []
    for line in lines:
        if line.startswith(("first wrong", "comparisons in")):
            break
        found.append(line)
    return [line for line in found if line][:12]


def _findings(run: Run) -> list[Block]:
    """Findings of other kinds: failures of tools, what was left alone, slower ways."""
    kinds: Counter[tuple[str, str, str, str]] = Counter()
    for found in run.small("findings"):
        if found.get("kind") not in ("difference", "overflow"):
            kinds[str(found.get("tool")), str(found.get("kind")), str(found.get("op")), str(found.get("message"))] += 1
    if not kinds:
        return []
    items: list[Text] = [
        f"{tool}, {kind}: {op}: {message}" + (f" ({count} times)" if count > 1 else "")
        for (tool, kind, op, message), count in kinds.most_common(50)
    ]
    return [blocks.group(both("Other findings", "其他发现"), [blocks.list_of(items)], open=len(items) <= 5)]


def _by(column: str, wrong: Wrong, title: Text) -> Block:
    counts = Counter(str(row.get(column) or "") for row in wrong.rows)
    return blocks.bars([name for name, _ in counts.most_common(12)], [n for _, n in counts.most_common(12)], "", title)


def _table(rows: list[dict[str, Any]]) -> Table:
    def words(name: str, key: str, title: Text) -> Column:
        return Column.words(name, [_text(row, key) for row in rows], title)

    return Table(
        "wrong",
        [
            Column.numbers("step", np.array([_whole(r, "step") for r in rows], np.int64), both("step", "步")),
            Column.numbers("call", np.array([_whole(r, "call_id") for r in rows], np.int64), both("call", "调用")),
            words("operator", "op", both("operator", "算子")),
            words("phase", "phase", both("phase", "阶段")),
            words("module", "module", both("module", "模块")),
            Column.words("line", [line_of(_text(r, "location")) for r in rows], both("line", "代码行"), "code"),
            words("tensor", "name", both("tensor", "张量")),
            Column.numbers(
                "excess", np.array([_number(r, "excess") for r in rows]), both("× bound", "× 舍入界"), digits=4
            ),
            words("reason", "reason", both("reason", "原因")),
            Column.words("folder", [_text(r, "folder") for r in rows], both("saved in", "保存于"), "code"),
            Column.numbers("rank", np.array([r["rank"] for r in rows], np.int64), "rank"),
        ],
    )


def tensor_of(name: str, op: str) -> str:
    """The part of a row's name that follows the operator (`tensor_of("torch.add output", "torch.add") == "output"`)."""
    return name[len(op) + 1 :] if name.startswith(f"{op} ") else name


def one_line(run: Run) -> str:
    """The answer in one line, for the console (`one_line(run)`)."""
    first = Wrong(run).first
    if first is None:
        return "nothing wrong was found" if run.count("op_autocompare") else "nothing was compared"
    module = f" in {first['module']}" if _text(first, "module") else ""
    return (
        f"first wrong: {short_op(first['op'])} ({_text(first, 'phase')}){module}, {line_of(_text(first, 'location'))}"
    )
