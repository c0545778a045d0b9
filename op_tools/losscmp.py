"""losscmp: puts the losses of several runs side by side and says where they part beyond noise.

A run is a ``metrics.json`` (one JSON object per line, or one list), a folder that holds one, or a training log with
lines like ``iteration: 19/10000 ... total_loss: 9.68``.

Two healthy runs differ too: by rounding when they saw the same data, by the data when they did not. Runs with the same
data share the ups and downs from batch to batch, which leaves little scatter and makes small drifts visible; runs with
different data do not, and may also be a tenth of the way ahead of or behind each other, which is allowed for. Asked is

- drift: is the difference of the losses, averaged over stretches of the window's length, twice, four times ... as long,
  further from zero than averages of its scatter come? Losses that stay high or low for a while scatter more.
- scatter: do the losses of one run jump more from step to step?
- rounding, of runs with the same data and a known precision: do they differ from the start by more than rounding can?

A few points cannot answer that: where no difference could stand out from noise, the answer is that there are too few.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from .view import console

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
    dtype: str = ""  # the lowest precision that the run computed in, if it says so


@dataclass(frozen=True)
class Verdict:
    """What a run is to the reference: the same, within noise, or apart, from a step on or altogether."""

    kind: str  # a key of _WORDS
    step: int | None
    paired: bool
    largest: float
    points: int
    detail: str


def read_run(path: Path, printed: bool = False) -> Curve:
    """The losses of a run; `printed`: as it printed them, even if it recorded each step.

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
    each_step = [
        (int(r["iteration"]) - len(r["losses"]) + 1 + i, float(x))
        for r in with_loss
        for i, x in enumerate(r.get("losses") or [])
    ]
    if each_step and not printed:
        return replace(_curve(name, each_step, every_step=True), dtype=_precision_of(path.parent))
    return _curve(name, [(int(r["iteration"]), float(r["total_loss"])) for r in with_loss], every_step=False)


def _precision_of(folder: Path) -> str:
    """The lowest precision that the configuration beside a run's metrics names, empty without a configuration."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("config.y*ml")]
    if not texts:
        return ""
    named = {name for text in texts for name in re.findall(r"(?<![a-z0-9])[a-z]+[0-9]+", text.lower())}
    return next((dtype for dtype, short in _SHORT_NAMES.items() if named & {dtype, short}), "float32")


def _json_records(text: str) -> list[dict[str, Any]] | None:
    with contextlib.suppress(json.JSONDecodeError):
        whole = json.loads(text)
        return whole if isinstance(whole, list) else [whole]
    records, lines = [], [line for line in text.splitlines() if line.strip()]
    for line in lines:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if len(lines) != len(records) + 1:  # otherwise, the last one was cut off by a crash
                return None
    return [r for r in records if isinstance(r, dict)] or None


def _curve(name: str, pairs: list[tuple[int, float]], every_step: bool) -> Curve:
    last = dict(pairs)  # a step that was run again after a restart counts as it ended
    steps = np.array(sorted(last))
    return Curve(name, steps, np.array([last[s] for s in steps.tolist()]), every_step)


def compare(
    a: Curve,
    b: Curve,
    window: int | None = None,
    sigmas: float = 5.0,
    tolerance: float = 1e-3,
    dtype: str | None = None,
) -> Verdict:
    """Where run b parts from run a, the reference; `dtype` is what both computed in, if the curves do not say it.

    >>> steps = np.arange(100); flat = Curve("a", steps, np.ones(100), True)
    >>> compare(flat, Curve("b", steps, np.ones(100), True)).kind
    'identical'
    """
    common, at_a, at_b = np.intersect1d(a.steps, b.steps, return_indices=True)
    if not len(common):
        raise LosscmpError(f"{a.name} and {b.name} have 0 iterations in common")
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
    pair = _Pair(common, x, y, _width(len(common), window), sigmas)
    largest = float(np.abs(gap / np.maximum(np.abs(x), 1e-12)).max())
    facts = (pair.paired, largest, len(common))
    dtype = dtype or (max(a.dtype, b.dtype, key=_UNITS.__getitem__) if a.dtype and b.dtype else "")
    level, bound = pair.level(), _ROUNDINGS * _UNITS[dtype] if dtype else math.inf
    coarse = pair.paired and level > max(bound, _resolution(x), _resolution(y))
    makes = f"rounding in {dtype} makes up to {bound:.1g}" if dtype else "whether rounding makes that, --dtype tells"
    rounding = f"differences of {level:.1g} in the first {pair.width} iterations, {makes}"
    found = pair.drift(tolerance)
    if found is not None:
        means = f"{found.mean:+.2%} on average up to iteration {found.last}, {found.mean_to_the_end:+.2%} up to the end"
        data = "same data" if pair.paired else "different data, and more than a tenth of the way ahead or behind"
        why = f"{found.distance:.0f} times what an average over {found.length} iterations scatters"
        more = f"; {rounding}" if coarse else ""
        return Verdict("diverges", found.step, *facts, f"{means}; {data}, {why}{more}")
    if coarse:
        return Verdict("coarse", int(common[0]), *facts, f"same data, {rounding}")
    needed = _points_needed(len(common), window, sigmas * pair.memory)
    found = pair.scatter()
    if found is not None:
        share = min(abs(found.mean_to_the_end), 1.99)  # by which the squares differ, of their mean
        wilder, ratio = b.name if found.mean > 0 else a.name, math.sqrt((2 + share) / (2 - share))
        jumps = f"from there on the losses of {wilder} jump {ratio:.1f} times as far from iteration to iteration"
        return Verdict("scatters", found.step, *facts, jumps)
    if len(common) < needed and largest > tolerance:
        return Verdict("few", None, *facts, f"too few common points, at least {needed} are needed")
    if pair.paired:
        return Verdict("rounding", None, *facts, f"same data, differences without a direction; {rounding}")
    return Verdict("noise", None, *facts, "different data, the averages agree")


_WORDS: Final = {
    "identical": "is identical to",
    "rounding": "agrees to rounding with",
    "noise": "agrees within noise with",
    "diverges": "DIVERGES from",
    "scatters": "SCATTERS unlike",
    "coarse": "DIFFERS BEYOND ROUNDING from",
    "few": "CANNOT BE JUDGED against",
}


def words_of(verdict: Verdict) -> str:
    """What a run is to the reference, in words (`words_of(verdict) == "DIVERGES from"`)."""
    return _WORDS[verdict.kind]


def band(reference: Curve, run: Curve, sigmas: float = 5.0) -> tuple[np.ndarray, np.ndarray]:
    """Between which losses single steps of a run are expected, at the steps of the reference.

    Of the same data: around the reference, as far as the difference scatters from step to step. Of other data: around
    its running median, as far as its own losses scatter.

    >>> low, high = band(*[Curve("a", np.arange(50), np.linspace(5, 4, 50), True)] * 2)
    >>> bool((low <= high).all())
    True
    """
    losses = reference.losses
    width = _width(len(losses), None)
    middle, noise = _smooth(losses, width), losses - _smooth(losses, width)
    common, at, at_run = np.intersect1d(reference.steps, run.steps, return_indices=True)
    if len(common) >= 8 and _share_noise(losses[at], run.losses[at_run], width):
        gap = np.interp(reference.steps, common, run.losses[at_run] - losses[at])
        middle, noise = losses, gap - _smooth(gap, width)
    spread = np.sqrt(_running_mean(np.square(noise), max(3 * width, 15)))
    reach = _threshold(len(losses), sigmas) * spread
    return middle - reach, middle + reach


APART: Final = frozenset({"diverges", "scatters", "coarse"})
_UNITS: Final = {"float32": 2.0**-24, "tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float8": 2.0**-3}
_SHORT_NAMES: Final = {"float8": "fp8", "bfloat16": "bf16", "float16": "fp16", "tf32": "tf32"}  # the coarsest first
_MAX_JUMP: Final = 3.0  # scatters; what a single step can count at most
_ROUNDINGS: Final = 16  # a loss is an average: where each operator rounds once, the losses differ by far less than one


def _width(points: int, window: int | None) -> int:
    """Points to average over, at least: `window`, or a fifth of those that there are."""
    return min(window or max(3, min(20, points // 5)), points)


def _threshold(points: int, sigmas: float) -> float:
    """How far is beyond noise, in scatters, which themselves are known from a few points only in short runs."""
    return sigmas * (1 + 10 / points)


def _points_needed(points: int, window: int | None, sigmas: float) -> int:
    """The first number of points, from `points` on, of which the largest possible drift is found in the noise."""
    for needed in range(points, 100_000):
        width = _width(needed, window)
        longest = width << int(math.log2(needed / width))
        if _MAX_JUMP * math.sqrt(longest) > _threshold(needed, sigmas):
            break
    return needed


def _resolution(losses: np.ndarray) -> float:
    """How much of a loss got lost in printing, relative to it."""
    for digits in range(2, 7):
        if all(float(f"{loss:.{digits}g}") == loss for loss in losses.tolist()):
            return 10.0 ** (1 - digits)
    return 0.0


@dataclass(frozen=True)
class _Shift:
    """A stretch in which a series stays away from zero."""

    step: int
    last: int
    mean: float
    mean_to_the_end: float
    length: int
    distance: float


class _Pair:
    """Two series of losses at the same steps, and what noise looks like in their difference."""

    def __init__(self, steps: np.ndarray, x: np.ndarray, y: np.ndarray, width: int, sigmas: float) -> None:
        self._steps, self._x, self._y, self.width = steps, x, y, width
        self._sigmas = _threshold(len(steps), sigmas)
        self._smooth_x, self._smooth_y = _smooth(x, width), _smooth(y, width)
        self._size = np.maximum(np.abs(self._smooth_x), 1e-12)
        self._gap = (y - x) / self._size
        self.paired = _share_noise(x, y, width)
        self.memory = 1.0  # of the series that was asked about last

    def level(self) -> float:
        """How far the runs are from each other at the start, before training makes more of it."""
        return float(np.sqrt(np.mean(np.square(self._gap[: self.width]))))

    def drift(self, tolerance: float) -> _Shift | None:
        """Where the relative difference of the losses leaves zero."""
        if self.paired:
            return self._first(self._gap, self._local(self._gap - _smooth(self._gap, self.width)), tolerance)
        # A run with other data may be ahead or behind: nearest value of the reference within a tenth of the way.
        # 1.25: a median scatters that much more than a mean.
        noise = ((self._y - self._smooth_y) - (self._x - self._smooth_x)) / self._size
        reach = [self.width // 2 + i // 10 for i in range(len(self._x))]
        near = [self._smooth_x[max(0, i - r) : i + r + 1] for i, r in enumerate(reach)]
        expected = np.clip(self._smooth_y, [n.min() for n in near], [n.max() for n in near])
        return self._first((self._y - expected) / self._size, 1.25 * self._local(noise), tolerance)

    def scatter(self) -> _Shift | None:
        """Where the squares of the jumps around the running median begin to differ."""
        jumps_x, jumps_y = np.square(self._x - self._smooth_x), np.square(self._y - self._smooth_y)
        both = np.maximum(_running_mean(jumps_x + jumps_y, 3 * self.width) / 2, 1e-30)
        share = (jumps_y - jumps_x) / both
        return self._first(share, self._local(share), 0.25)

    def _local(self, noise: np.ndarray) -> np.ndarray:
        """How far a series scatters, along the way; a running median has followed it a little."""
        followed = 1 - 0.43 / self.width
        return np.sqrt(_running_mean(np.square(noise), max(3 * self.width, 15)) / followed) + 1e-30

    def _first(self, series: np.ndarray, scatter: np.ndarray, tolerance: float) -> _Shift | None:
        """The stretch that shows first that a series is not around zero; jumps of single steps count little."""
        units = np.clip(series / scatter, -_MAX_JUMP, _MAX_JUMP)
        self.memory = self._memory(units, np.clip(np.diff(series) / scatter[1:], -2 * _MAX_JUMP, 2 * _MAX_JUMP))
        total = np.concatenate([[0.0], np.cumsum(units)])
        found: list[tuple[int, int, float]] = []
        length = self.width
        while length <= len(series):
            firsts = np.arange(0, len(series) - length + 1, max(1, self.width // 4))
            distances = (total[firsts + length] - total[firsts]) / (self.memory * math.sqrt(length))
            for first in np.flatnonzero(np.abs(distances) > self._sigmas):
                start, distance = int(firsts[first]), float(distances[first])
                if float(np.median(series[start : start + length])) * np.sign(distance) > tolerance:
                    found.append((start + length, length, distance))
                    break
            length *= 2
        if not found:
            return None
        end, length, distance = min(found)
        stretch = units[end - length : end] * np.sign(distance)
        # it begins where the sum of what is above half the mean is least, and only grows from there on
        at = end - length + int(np.argmin(np.concatenate([[0.0], np.cumsum(stretch - stretch.mean() / 2)])[:-1]))
        means = float(np.mean(series[at:end])), float(np.mean(series[at:]))
        return _Shift(int(self._steps[at]), int(self._steps[end - 1]), *means, length, abs(distance))

    def _memory(self, units: np.ndarray, jumps: np.ndarray) -> float:
        """How much further averages scatter than if each step were independent of the last; a drift does not count."""
        if len(jumps) < 24:  # too few to tell; points so far apart are medians, which remember little
            return 1.0
        jumps = jumps - jumps.mean()  # nor does a steady rise
        size = float(np.mean(np.square(jumps)))
        if size == 0:
            return 1.0
        # steps that remember a share of the last one: neighbouring jumps cancel each other to (1 - share) / 2
        share = 1 + 2 * float(np.mean(jumps[1:] * jumps[:-1])) / size
        share = min(max(share, 0.0), 0.97)
        remembered = math.sqrt((1 + share) / (1 - share))
        count = len(units) // self.width
        if count < 4:
            return remembered
        # and, whatever else it remembers, from one window to the next; the largest change may be where a drift begins
        means = units[: count * self.width].reshape(count, self.width).mean(axis=1)
        changes = np.sort(np.square(np.diff(means)))[:-1]
        return max(remembered, math.sqrt(self.width * float(changes.mean()) / 2))


def _running_mean(x: np.ndarray, width: int) -> np.ndarray:
    """Mean of the neighbours, as long as x."""
    half = min(width, len(x)) // 2
    total = np.concatenate([[0.0], np.cumsum(x)])
    low, high = (np.clip(np.arange(len(x)) + by, 0, len(x)) for by in (-half, half + 1))
    return np.asarray((total[high] - total[low]) / (high - low))


def _share_noise(x: np.ndarray, y: np.ndarray, width: int) -> bool:
    """Whether two runs go up and down together from step to step: they saw the same data."""
    if len(x) < 8:
        return False
    # differences of neighbours: the common trend must not count as agreement
    dx, dy = (_without_spikes(np.diff(losses) - np.diff(_smooth(losses, width))) for losses in (x, y))
    size = float(dx.std() * dy.std())
    if size <= 0:
        return False
    together = min(float((dx * dy).mean() - dx.mean() * dy.mean()) / size, 1 - 1e-12)
    # more than half, and more than chance makes of so few steps
    return together > 0.5 and math.atanh(together) * math.sqrt(len(dx) - 3) > 4


def _without_spikes(x: np.ndarray) -> np.ndarray:
    most = 8 * float(np.median(np.abs(x)))
    return np.clip(x, -most, most) if most else x


def _smooth(x: np.ndarray, width: int) -> np.ndarray:
    """Running median, as long as x."""
    half = width // 2
    padded = np.pad(x, (half, width - 1 - half), mode="edge")
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=-1))


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
    steps = sorted(set.intersection(*(set(curve.steps.tolist()) for curve in curves)))
    if len(steps) > rows:
        steps = [steps[round(i * (len(steps) - 1) / (rows - 1))] for i in range(rows)]
    found = [dict(zip(c.steps.tolist(), c.losses.tolist())) for c in curves]
    return [[str(step), *(f"{losses[step]:.4g}" for losses in found)] for step in steps]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `op_tools losscmp A B ...`; the result is the exit code."""
    parser = argparse.ArgumentParser(
        prog="op_tools losscmp",
        description="Compare the losses of several runs with those of the first.",
        epilog="exit code: 0 all agree, 1 a run is apart from the first, 2 a mistake in the command, "
        "3 too few common points to judge a run (and none is apart)",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="metrics.json, its folder, or a training log")
    parser.add_argument("--window", type=int, help="iterations to average over (20, fewer for short runs)")
    parser.add_argument("--sigmas", type=float, default=5.0, help="how far beyond the scatter is beyond noise (5)")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="relative difference that never counts (0.001)")
    parser.add_argument("--dtype", choices=list(_UNITS), help="precision of the runs (default: as their config says)")
    parser.add_argument("--rows", type=int, default=20, help="rows of the table (20)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves (.png, .svg, .pdf)")
    options = parser.parse_args(arguments)
    try:
        return _report(options)
    except LosscmpError as error:
        console.print_error(str(error), who="error")
        return 2


def _report(options: argparse.Namespace) -> int:
    if len(options.runs) < 2:
        raise LosscmpError("one run alone has nothing to be compared with: give at least two")
    curves = [read_run(path) for path in options.runs]
    if any(not curve.every_step for curve in curves):  # a printed loss is a median: compare like with like
        curves = [read_run(path, printed=True) for path in options.runs]
    names = [curve.name for curve in curves]
    names = [name if names.count(name) == 1 else str(path) for name, path in zip(names, options.runs)]
    curves = [replace(curve, name=name) for name, curve in zip(names, curves)]
    table = [["iteration", *names], *side_by_side(curves, options.rows)]
    widths = [max(map(len, column)) for column in zip(*table)]
    for row in table:
        console.emit("  ".join(cell.rjust(width) for cell, width in zip(row, widths)))
    console.emit("")
    kinds = set()
    for curve in curves[1:]:
        verdict = compare(curves[0], curve, options.window, options.sigmas, options.tolerance, options.dtype)
        where = f" at iteration {verdict.step}" if verdict.step is not None else ""
        console.emit(
            f"{curve.name} {words_of(verdict)} {curves[0].name}{where}: {verdict.detail} "
            f"({verdict.points} iterations, largest difference {verdict.largest:.2%})"
        )
        kinds.add(verdict.kind)
    if options.plot:
        draw(curves, options.plot)
        console.emit(f"drawn in {options.plot}")
    return 1 if kinds & APART else 3 if "few" in kinds else 0


if __name__ == "__main__":
    sys.exit(main())
