"""The loss of the run, with the band in which losscmp expects it, and marks where something was found."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ditorch_common.page import Block, View, blocks

from .. import losscmp
from .empty import EMPTY
from .run import Run
from .verdict import Wrong
from .words import both, short_op

_MAX_POINTS: Final = 20_000
_ZH: Final = {
    "identical": "与 {0} 完全相同",
    "rounding": "与 {0} 的差别只有舍入误差",
    "noise": "与 {0} 的差别在噪声范围内",
    "diverges": "偏离了 {0}",
    "scatters": "的波动与 {0} 不同",
    "coarse": "与 {0} 的差别超出舍入误差",
    "few": "与 {0} 的数据太少，无法判断",
}


def view(run: Run) -> View:
    """Curves over a common axis; the first is the run's, the others are what it is compared with."""
    title = both("Loss", "损失")
    curves = [curve for curve in run.curves if len(curve.steps)]
    if not curves:
        return View("loss", title, [], EMPTY["loss"])
    return View("loss", title, [*_verdicts(curves), _lines(run, curves)])


def _verdicts(curves: list[losscmp.Curve]) -> list[Block]:
    found: list[Block] = []
    for reference in curves[1:]:
        try:
            verdict = losscmp.compare(reference, curves[0])
        except losscmp.LosscmpError as error:
            found.append(blocks.banner("unknown", str(error)))
            continue
        state: Any = "wrong" if verdict.kind in losscmp.APART else "unknown" if verdict.kind == "few" else "right"
        where, where_zh = "", ""
        if verdict.step is not None:
            where, where_zh = f" at iteration {verdict.step}", f"，始于迭代 {verdict.step}"
        said = both(
            f"{curves[0].name} {losscmp.words_of(verdict)} {reference.name}{where}",
            f"{curves[0].name} {_ZH[verdict.kind].format(reference.name)}{where_zh}",
        )
        size = both(
            f"{verdict.points:,} iterations, largest difference {verdict.largest:.2%}",
            f"{verdict.points:,} 次迭代，最大差别 {verdict.largest:.2%}",
        )
        found.append(blocks.banner(state, said, [verdict.detail, size]))
    return found


def _lines(run: Run, curves: list[losscmp.Curve]) -> Block:
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    if len(steps) > _MAX_POINTS:
        steps = steps[np.linspace(0, len(steps) - 1, _MAX_POINTS).astype(np.int64)]
    series: list[Any] = []
    for curve in curves:
        one: dict[str, Any] = {"name": curve.name, "y": _at(steps, curve.steps, curve.losses), "band": None}
        if curve is curves[-1] and len(curves) > 1 and len(curve.steps) >= 3:
            low, high = losscmp.band(curve, curves[0])
            one["band"] = (_at(steps, curve.steps, low), _at(steps, curve.steps, high))
        series.append(one)
    marks: list[Any] = []
    for row in Wrong(run).rows[:1]:
        step = row.get("step")
        op = short_op(row["op"])
        text = both(f"first wrong: {op}", f"第一个错误：{op}")
        marks.append({"x": float(step if isinstance(step, int) else 0), "text": text})
    for row in run.small("findings"):
        if row.get("kind") == "overflow" and isinstance(row.get("step"), int) and len(marks) < 5:
            op = short_op(str(row["op"]))
            marks.append({"x": float(row["step"]), "text": both(f"overflow: {op}", f"溢出：{op}")})
    return blocks.lines(steps.tolist(), series, marks, both("iteration", "迭代"), "", both("Loss", "损失"))


def _at(steps: Any, known: Any, values: Any) -> list[float | None]:
    place = np.searchsorted(known, steps)
    place = np.minimum(place, len(known) - 1)
    hit = known[place] == steps
    return [float(v) if h and np.isfinite(v) else None for v, h in zip(values[place].tolist(), hit.tolist())]
