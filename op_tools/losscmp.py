"""losscmp: puts the losses of several runs side by side and says where they part beyond noise.

A run is a ``metrics.json`` (one JSON object per line, or one list), a folder that holds one, or a training log with
lines like ``iteration: 19/10000 ... total_loss: 9.68``.

Two healthy runs differ too: by rounding when they saw the same data, by the data when they did not. The difference of
the losses, averaged over a window, is held against its own scatter in that window. Runs with the same data share the
ups and downs from batch to batch, which leaves little scatter and makes small drifts visible; runs with different data
do not, and may also be a little ahead of or behind each other, which is allowed for by looking a few steps around.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import console

LINE = re.compile(r"iteration: (\d+)(?:/\d+)?\b.*?total_loss: ([-+.\w]+)")


class LosscmpError(ValueError):
    """A run cannot be read or compared; the message says which and why."""


@dataclass(frozen=True)
class Curve:
    """The losses of one run: per iteration where the run recorded them, otherwise as it printed them."""

    name: str
    steps: np.ndarray
    losses: np.ndarray
    every_step: bool


@dataclass(frozen=True)
class Verdict:
    """What a run is to the reference: the same, within noise, or apart from a step on."""

    kind: str  # "identical", "rounding", "noise", "diverges"
    step: int | None
    paired: bool
    largest: float
    points: int
    detail: str


def read_run(path: Path) -> Curve:
    """The losses of a run.

    >>> read_run(Path("output/enwik8"))  # doctest: +SKIP
    """
    if path.is_dir():
        path = path / "metrics.json"
    if not path.is_file():
        raise LosscmpError(f"{path}: no such file; give a metrics.json, a folder that holds one, or a training log")
    text = path.read_text(encoding="utf-8", errors="replace")
    name = path.parent.name if path.name == "metrics.json" else path.name.removesuffix(".json").removesuffix(".metrics")
    records = _json_records(text)
    if records is None:
        found = [(int(step), float(loss)) for step, loss in LINE.findall(text)]
        if not found:
            raise LosscmpError(
                f"{path}: neither JSON records with a loss nor log lines with iteration: and total_loss:"
            )
        return _curve(name, found, every_step=False)
    with_loss = [r for r in records if "total_loss" in r and "iteration" in r]
    if not with_loss:
        raise LosscmpError(f"{path}: its records hold no iteration and total_loss")
    raw = [
        (int(r["iteration"]) - len(r["losses"]) + 1 + i, float(x))
        for r in with_loss
        for i, x in enumerate(r.get("losses") or [])
    ]
    if raw:
        return _curve(name, raw, every_step=True)
    return _curve(name, [(int(r["iteration"]), float(r["total_loss"])) for r in with_loss], every_step=False)


def _json_records(text: str) -> list[dict[str, Any]] | None:
    try:
        whole = json.loads(text)
        return whole if isinstance(whole, list) else [whole]
    except json.JSONDecodeError:
        pass
    records = []
    lines = [line for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number == len(lines) - 1 and records:
                break  # cut off by a crash
            return None
    return [r for r in records if isinstance(r, dict)] or None


def _curve(name: str, pairs: list[tuple[int, float]], every_step: bool) -> Curve:
    last = dict(pairs)  # a step that was run again after a restart counts as it ended
    steps = np.array(sorted(last))
    return Curve(name, steps, np.array([last[s] for s in steps.tolist()]), every_step)


def printed(path: Path) -> Curve:
    """The losses of a run as it printed them, also where it recorded each step."""
    if path.is_dir():
        path = path / "metrics.json"
    text = path.read_text(encoding="utf-8", errors="replace")
    records = _json_records(text)
    if records is None:
        return read_run(path)
    pairs = [(int(r["iteration"]), float(r["total_loss"])) for r in records if "total_loss" in r]
    return _curve(read_run(path).name, pairs, every_step=False)


def compare(a: Curve, b: Curve, window: int | None = None, sigmas: float = 5.0, tolerance: float = 1e-3) -> Verdict:
    """Where run b parts from run a, the reference.

    >>> steps = np.arange(100); flat = Curve("a", steps, np.ones(100), True)
    >>> compare(flat, Curve("b", steps, np.ones(100), True)).kind
    'identical'
    """
    common, at_a, at_b = np.intersect1d(a.steps, b.steps, return_indices=True)
    if len(common) < 2:
        raise LosscmpError(f"{a.name} and {b.name} have {len(common)} iterations in common; at least 2 are needed")
    x, y = a.losses[at_a], b.losses[at_b]
    bad = np.flatnonzero(np.isfinite(x) != np.isfinite(y))
    if len(bad):
        which = b.name if math.isfinite(x[bad[0]]) else a.name
        return Verdict("diverges", int(common[bad[0]]), False, math.inf, len(common), f"{which} is not finite there")
    good = np.isfinite(x)
    common, x, y = common[good], x[good], y[good]
    gap = y - x
    if not gap.any():
        return Verdict("identical", None, True, 0.0, len(common), "every loss is the same, bit for bit")
    width = window or max(3, min(20, len(common) // 5))
    width = min(width, len(common))
    paired = _share_noise(x, y, width)
    largest = float(np.abs(gap / np.maximum(np.abs(x), 1e-12)).max())
    apart = _parting(common, x, y, width, sigmas, tolerance, paired)
    if apart is not None:
        step, size = apart
        return Verdict("diverges", step, paired, largest, len(common), f"{size:+.2%} on average from there on")
    if paired:
        return Verdict("rounding", None, True, largest, len(common), "same data, differences without a direction")
    return Verdict("noise", None, False, largest, len(common), "different data, the averages agree")


def _share_noise(x: np.ndarray, y: np.ndarray, width: int) -> bool:
    """Whether two runs go up and down together from step to step: they saw the same data."""
    if len(x) < 8:
        return False
    dx, dy = np.diff(x), np.diff(y)  # differences of neighbours: the common trend must not count as agreement
    trend = np.diff(_smooth(x, width)), np.diff(_smooth(y, width))
    dx, dy = dx - trend[0], dy - trend[1]
    size = float(dx.std() * dy.std())
    return size > 0 and float((dx * dy).mean() - dx.mean() * dy.mean()) / size > 0.5


def _smooth(x: np.ndarray, width: int) -> np.ndarray:
    """Running median, as long as x."""
    half = width // 2
    padded = np.pad(x, (half, width - 1 - half), mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=-1)


def _parting(
    steps: np.ndarray, x: np.ndarray, y: np.ndarray, width: int, sigmas: float, tolerance: float, paired: bool
) -> tuple[int, float] | None:
    """First step of a stretch in which the averages differ by more than the scatter explains, and by how much."""
    gap = y - x
    smooth_x, smooth_y = _smooth(x, width), _smooth(y, width)
    noise = gap - (smooth_y - smooth_x)
    count = len(gap)
    beyond = np.zeros(count, dtype=bool)
    for i in range(count):
        low, high = max(0, i - width // 2), min(count, i + (width + 1) // 2)
        # 1.25: a median scatters that much more than a mean. The floor keeps a flat stretch from promising too much.
        scatter = 1.25 * float(np.sqrt(np.mean(np.square(noise[low:high])))) / math.sqrt(high - low)
        if paired:
            distance = abs(smooth_y[i] - smooth_x[i])
        else:
            # A run with other data may be ahead or behind: nearest value of the reference within a tenth of the way.
            reach = width // 2 + i // 10
            near = smooth_x[max(0, i - reach) : i + reach + 1]
            distance = max(near.min() - smooth_y[i], smooth_y[i] - near.max(), 0.0)
        beyond[i] = distance > sigmas * scatter + tolerance * abs(smooth_x[i])
    lasting = 0
    for i in range(count):
        lasting = lasting + 1 if beyond[i] else 0
        if lasting == width:
            first = i - width + 1
            return int(steps[first]), float(np.mean(gap[first:]) / max(abs(float(np.mean(x[first:]))), 1e-12))
    return None


def draw(curves: Sequence[Curve], image: Path) -> None:
    """Draw the curves into an image file."""
    try:
        import matplotlib
    except ImportError:
        raise LosscmpError("--plot needs matplotlib: pip install 'ditorch[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for curve in curves:
        if curve.every_step and len(curve.steps) > 60:
            line = axes.plot(curve.steps, _smooth(curve.losses, 20), linewidth=1.5, label=curve.name)[0]
            axes.plot(curve.steps, curve.losses, linewidth=0.6, alpha=0.25, color=line.get_color())
        else:
            axes.plot(curve.steps, curve.losses, "o-", markersize=3, linewidth=1.2, label=curve.name)
    if all(np.nanmin(curve.losses) > 0 for curve in curves):
        axes.set_yscale("log")
    axes.set(xlabel="iteration", ylabel="loss")
    axes.legend()
    figure.tight_layout()
    figure.savefig(image, dpi=120)
    pyplot.close(figure)


def side_by_side(curves: Sequence[Curve], rows: int = 20) -> list[list[str]]:
    """Iterations that all runs have, at most ``rows`` of them, with the loss of each run."""
    common = set(curves[0].steps.tolist())
    for curve in curves[1:]:
        common &= set(curve.steps.tolist())
    steps = sorted(common)
    if len(steps) > rows:
        steps = [steps[round(i * (len(steps) - 1) / (rows - 1))] for i in range(rows)]
    found = [dict(zip(c.steps.tolist(), c.losses.tolist())) for c in curves]
    return [[str(step), *(f"{losses[step]:.4g}" for losses in found)] for step in steps]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `op_tools losscmp A B ...`; the exit status is 1 if a run diverges from the first."""
    parser = argparse.ArgumentParser(prog="op_tools losscmp", description="Compare the losses of several runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="metrics.json, its folder, or a training log")
    parser.add_argument("--window", type=int, help="iterations to average over (20, fewer for short runs)")
    parser.add_argument("--sigmas", type=float, default=5.0, help="how far beyond the scatter is beyond noise (5)")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="relative difference that never counts (0.001)")
    parser.add_argument("--rows", type=int, default=20, help="rows of the table (20)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves (.png, .svg, .pdf)")
    options = parser.parse_args(arguments)
    try:
        return _report(options)
    except LosscmpError as error:
        console.complain(str(error), who="error")
        return 2


def _report(options: argparse.Namespace) -> int:
    if len(options.runs) < 2:
        raise LosscmpError("one run alone has nothing to be compared with: give at least two")
    curves = [read_run(path) for path in options.runs]
    if any(not curve.every_step for curve in curves):
        curves = [printed(path) for path in options.runs]  # a printed loss is a median: compare like with like
    names = _distinct([curve.name for curve in curves], options.runs)
    curves = [Curve(name, c.steps, c.losses, c.every_step) for name, c in zip(names, curves)]
    table = side_by_side(curves, options.rows)
    widths = [max(len(row[i]) for row in [["iteration", *names], *table]) for i in range(len(names) + 1)]
    for row in [["iteration", *names], *table]:
        console.emit("  ".join(cell.rjust(width) for cell, width in zip(row, widths)))
    console.emit("")
    status = 0
    for curve in curves[1:]:
        verdict = compare(curves[0], curve, options.window, options.sigmas, options.tolerance)
        where = f" at iteration {verdict.step}" if verdict.step is not None else ""
        words = {
            "identical": "is identical to",
            "rounding": "agrees to rounding with",
            "noise": "agrees within noise with",
            "diverges": "DIVERGES from",
        }
        console.emit(
            f"{curve.name} {words[verdict.kind]} {curves[0].name}{where}: {verdict.detail} "
            f"({verdict.points} iterations, largest difference {verdict.largest:.2%})"
        )
        status |= verdict.kind == "diverges"
    if options.plot:
        draw(curves, options.plot)
        console.emit(f"drawn in {options.plot}")
    return int(status)


def _distinct(names: list[str], paths: Sequence[Path]) -> list[str]:
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths)]


if __name__ == "__main__":
    sys.exit(main())
