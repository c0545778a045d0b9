"""Captures with the commands that replay them, ranks side by side, the doctor's findings, settings and environment."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ditorch_common.page import Block, Column, Table, Text, View, blocks

from .records import read_json
from .run import Run
from .verdict import Wrong
from .words import both, shell, short_op, size_of

_MAX_STORES: Final = 100
_NO_CAPTURES: Final = both(
    "Nothing was captured. To keep inputs and outputs of operators: op_tools run OpCapture --ops torch.add train.py",
    "没有采集数据。要保存算子的输入输出：op_tools run OpCapture --ops torch.add train.py",
)
_NO_DOCTOR: Final = both(
    "The run left no diagnosis. To see one of this machine: ditorch doctor",
    "本次运行没有诊断信息。要诊断本机：ditorch doctor",
)
_NO_SETTINGS: Final = both("The records do not say how the run was started.", "记录中没有运行的启动信息。")
_SEVERAL: Final = "op_tools run OpTimeMeasure -m torch.distributed.run --nproc-per-node 2 train.py"
_ONE_RANK: Final = both(
    f"The run had one process. Several are shown side by side: {_SEVERAL}",
    f"本次运行只有一个进程。多进程时在此并列显示：{_SEVERAL}",
)


def captures(run: Run) -> tuple[View, list[Table]]:
    """Captured calls by operator, and wrong calls that were saved, each with its command."""
    title = both("Captures", "采集")
    found: list[Block] = []
    tables: list[Table] = []
    if run.count("op_capture"):
        tables.append(_captured(run))
        found.append(blocks.table("captures", None, (), ("bytes", "down"), None, both("By operator", "按算子")))
    stores = _stores(run.folder)
    commands = [shell("op_tools", "replay", str(store), "--acc_check") for store in stores]
    if commands:
        listed = [blocks.command(text) for text in commands]
        found.append(blocks.group(both("Replay all of a store", "重放整个存储"), listed))
    saved = [row for row in Wrong(run).rows if isinstance(row.get("folder"), str) and row["folder"]]
    if saved:
        tables.append(_saved(saved))
        title_saved = both("Wrong calls that were saved", "已保存的错误调用")
        found.append(blocks.table("saved", None, ["operator"], None, None, title_saved))
    return View("captures", title, found, _NO_CAPTURES), tables


def _captured(run: Run) -> Table:
    rows = run.joined("op_capture", "call_id", "site", "path", "bytes")
    ops, back = np.unique(rows["op"], return_inverse=True)
    sizes = np.bincount(back, rows["bytes"], len(ops))
    calls = [len(np.unique(rows["call_id"][back == n])) for n in range(len(ops))]
    paths = run.words["op_capture.path"].known
    first = [paths[int(rows["path"][np.argmax(back == n)])] for n in range(len(ops))]
    commands = [shell("op_tools", "replay", _folder_of(path, run.words["op"].known[op]), "--acc_check")
                for path, op in zip(first, ops.tolist())]  # fmt: skip
    return Table(
        "captures",
        [
            Column.words("operator", [run.words["op"].known[op] for op in ops.tolist()], both("operator", "算子")),
            Column.numbers("calls", np.array(calls, np.int64), both("calls", "次数")),
            Column.numbers("bytes", sizes, both("bytes", "字节"), "B"),
            Column.words("replay", commands, both("replay", "重放"), "code"),
        ],
    )


def _folder_of(path: str, op: str) -> str:
    """The folder of an operator's captures, from the path of one of their files."""
    before, found, _ = path.partition(f"/{op}/")
    return f"{before}/{op}" if found else str(Path(path).parent)


def _stores(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [file.parent for file in sorted(folder.glob("op_capture_results/*.store/calls.jsonl"))[:_MAX_STORES]]


def _saved(rows: list[dict[str, Any]]) -> Table:
    return Table(
        "saved",
        [
            Column.words("operator", [row["op"] for row in rows], both("operator", "算子")),
            Column.words("phase", [str(row.get("phase") or "") for row in rows], both("phase", "阶段")),
            Column.words("module", [str(row.get("module") or "") for row in rows], both("module", "模块")),
            Column.words(
                "command",
                [shell("python", f"{row['folder']}/reproduce.py") for row in rows],
                both("repeat it", "重现"),
                "code",
            ),
        ],
    )


# -- ranks ---------------------------------------------------------------------------------------------------


def ranks(run: Run) -> tuple[View, list[Table]]:
    """What each rank did, and how its times differ."""
    title = both("Ranks", "各 rank")
    if len(run.processes) < 2:
        return View("ranks", title, [], _ONE_RANK), []
    wrong = Counter(row["rank"] for row in Wrong(run).rows)
    overflow = Counter(row["rank"] for row in run.small("findings") if row.get("kind") == "overflow")
    ended = {row["rank"] for row in run.small("ends")}
    timed = [p.growing["op_time_measure"] for p in run.processes]

    def numbers(name: str, values: Sequence[float], title: Text, unit: str = "") -> Column:
        return Column.numbers(name, np.array(values), title, unit, 5 if unit else None)

    state = ["ended" if p.rank in ended else "not ended" for p in run.processes]
    compared = [len(p.growing["op_autocompare"]) for p in run.processes]
    table = Table(
        "ranks",
        [
            numbers("rank", [p.rank for p in run.processes], "rank"),
            Column.words("state", state, both("state", "状态")),
            numbers("compared", compared, both("tensors compared", "比较的张量")),
            numbers("wrong", [wrong[p.rank] for p in run.processes], both("wrong calls", "错误调用")),
            numbers("overflow", [overflow[p.rank] for p in run.processes], both("overflows", "溢出")),
            numbers("calls", [len(rows) for rows in timed], both("timed", "计时次数")),
            numbers("ms", [float(np.nansum(rows["elapsed_ms"])) for rows in timed], both("time", "时间"), "ms"),
            Column.words("file", [p.path.name for p in run.processes], both("records", "记录文件"), "code"),
        ],
    )
    return View("ranks", title, [blocks.table("ranks"), *_rank_times(run)]), [table]


def _rank_times(run: Run) -> list[Block]:
    """Time of the costliest operators on each rank."""
    if not run.count("op_time_measure"):
        return []
    rows = run.joined("op_time_measure", "call_id", "site", "elapsed_ms")
    count = len(run.words["op"].known)
    whole = np.bincount(rows["op"], np.nan_to_num(rows["elapsed_ms"]), count)
    ops = np.argsort(-whole)[: min(20, int((whole > 0).sum()))]
    values: list[float] = []
    for op in ops.tolist():
        mine = rows["op"] == op
        sums = np.bincount(rows["rank"][mine], np.nan_to_num(rows["elapsed_ms"][mine]), max(run.ranks) + 1)
        values += [float(sums[rank]) for rank in run.ranks]
    names = [short_op(run.words["op"].known[op]) for op in ops.tolist()]
    title = both("Time of operators, rank by rank", "各 rank 的算子时间")
    return [blocks.heat(names, [f"rank {r}" for r in run.ranks], values, "ms", title, "log")]


# -- doctor, settings ------------------------------------------------------------------------------------------


def doctor(run: Run) -> View:
    """What ditorch's doctor said of the run's process."""
    title = both("Doctor", "诊断")
    found = next((d for p in run.processes if (d := p.doctor())), None)
    if found is None:
        return View("doctor", title, [], _NO_DOCTOR)
    shown: list[Block] = []
    for key, name in (
        ("versions", both("Versions", "版本")),
        ("backend", both("Backend", "后端")),
        ("collectives", both("Collectives", "集合通信")),
        ("environment", both("Environment", "环境变量")),
    ):
        if isinstance(found.get(key), dict) and found[key]:
            shown.append(blocks.facts([(str(k), _short(v)) for k, v in found[key].items()], name))
    devices = found.get("devices")
    for device in devices if isinstance(devices, list) else []:
        if isinstance(device, dict):
            shown.append(blocks.facts([(str(k), _size(str(k), v)) for k, v in device.items()], both("Device", "设备")))
    for key, name in (
        ("gaps", both("What this backend cannot do, or does in another way", "该后端做不到或以其他方式实现的功能")),
        ("missing", both("Functions that are missing", "缺失的函数")),
        ("emulated", both("Functions that are emulated", "模拟的函数")),
        ("hints", both("Functions that have no effect", "不起作用的函数")),
    ):
        if isinstance(found.get(key), dict) and found[key]:
            items: list[Text] = [f"{k}: {_short(v)}" for k, v in found[key].items()]
            shown.append(blocks.group(name, [blocks.list_of(items)], open=key == "gaps"))
    return View("doctor", title, shown, _NO_DOCTOR)


def _dict(row: dict[str, Any], name: str) -> dict[str, Any]:
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def _short(value: Any) -> str:
    return str(value)[:2_000]


def _size(key: str, value: Any) -> str:
    return size_of(value) if "memory" in key and isinstance(value, (int, float)) else _short(value)


def settings(run: Run) -> View:
    """How the run was started, which tools ran, with which settings, and which files this page was made of."""
    title = both("Settings", "设置")
    found: list[Block] = []
    facts = run.facts()
    if facts:
        rows: list[tuple[Text, str]] = [(str(k), _short(v)) for k, v in facts.items() if not isinstance(v, dict)]
        rows += [(str(k), _short(v)) for k, v in _dict(facts, "versions").items()]
        found.append(blocks.facts(rows, both("The run", "运行")))
    chosen = {k: v for row in run.small("runs") for k, v in _dict(read_json(row.get("facts")), "settings").items()}
    if chosen:
        listed: list[tuple[Text, str]] = [(str(k), _short(v)) for k, v in sorted(chosen.items())]
        found.append(blocks.facts(listed, both("Settings that were set", "已设置的变量")))
    tools = _tools(run)
    if tools:
        found.append(blocks.list_of(tools, both("Tools", "工具")))
    for row in run.small("ends"):
        lines = [str(line) for line in _lines(row)]
        if lines:
            text = blocks.text("\n".join(lines))
            found.append(blocks.group(f"{row.get('tool')} summary (rank {row['rank']})", [text], open=False))
    files: list[Text] = [*[str(p.path) for p in run.processes], *[str(g.trace.path) for g in run.graphs]]
    if run.earlier:
        files.append(
            both(
                f"and {run.earlier} files of other runs in this folder, not shown",
                f"另有该目录中其他运行的 {run.earlier} 个文件，未显示",
            )
        )
    found.append(blocks.list_of([*files, *run.problems], both("Files", "文件")))
    return View("settings", title, found, _NO_SETTINGS)


def _tools(run: Run) -> list[Text]:
    ended = {(row["rank"], row.get("run")): row.get("ended") for row in run.small("ends")}
    lines: list[Text] = []
    for row in run.small("runs"):
        began, end = row.get("started"), ended.get((row["rank"], row.get("run")))
        if isinstance(began, (int, float)):
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(min(max(began, 0), 4e9)))
            took = f", {end - began:.1f} s" if isinstance(end, (int, float)) else ", not ended"
            lines.append(f"{row.get('tool')} (rank {row['rank']}, pid {row.get('pid')}): {stamp} UTC{took}")
    return lines


def _lines(row: dict[str, Any]) -> list[Any]:
    found = read_json(f'{{"lines": {row.get("summary") or "[]"}}}').get("lines")
    return found if isinstance(found, list) else []
