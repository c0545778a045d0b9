"""The page with the curves: ``python -m projects.rwkv_v4.report RUN... --out docs/rwkv.md``.

A RUN is a folder with ``metrics.json``, or one with the files that ``run_gpu.sh`` leaves (``seed_log.metrics.json``,
``enwik8.metrics.json``, ``wkv*.json``, ``step.json``, ``autocompare.txt``). Every number of the page that was measured
comes from these files; the text around them is in ``report_page.md`` beside this module.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .events import Window, read_metrics

# The table of the training log: iteration, loss as printed (a median over the last 200 iterations).
LOGGED = {
    19: 9.68, 39: 5.177, 59: 3.965, 79: 3.216, 99: 2.893, 119: 2.754, 139: 2.608, 159: 2.426, 179: 2.22,
    199: 1.967, 219: 1.461, 239: 1.008, 259: 0.8413, 279: 0.5917, 299: 0.4054, 319: 0.2196, 339: 0.1112, 359: 0.05964,
}  # fmt: skip
LOGGED_SAMPLES_PER_SECOND = 49.78
TEMPLATE = Path(__file__).with_name("report_page.md")


class Run:
    """The records of one run."""

    def __init__(self, path: Path) -> None:
        self.records = read_metrics(path)
        self.events = [r for r in self.records if "total_loss" in r]
        if not self.events:
            raise ValueError(f"{path} holds no event with a total_loss")
        self.losses = {
            r["iteration"] - len(r["losses"]) + 1 + i: x for r in self.events for i, x in enumerate(r["losses"])
        }

    def median(self, iteration: int, window: int) -> float | None:
        """Median of the losses up to an iteration, or None if the run did not get there."""
        if iteration not in self.losses:
            return None
        values = [self.losses[i] for i in range(max(0, iteration - window + 1), iteration + 1) if i in self.losses]
        return Window(window, values).median()

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [r for r in self.records if "bits_per_character" in r]


def collect(paths: Iterable[Path]) -> tuple[dict[str, Run], dict[str, Any]]:
    """Runs by name, and the other measurements by name."""
    runs, other = {}, {}
    for folder in paths:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder")
        if (folder / "metrics.json").exists():
            runs[folder.name] = Run(folder / "metrics.json")
        for file in folder.glob("*.metrics.json"):
            runs[file.name.removesuffix(".metrics.json")] = Run(file)
        if (folder / "step.json").exists():
            other["step"] = json.loads((folder / "step.json").read_text())
        for file in sorted(folder.glob("wkv*.json")):
            other.setdefault("wkv", []).append(json.loads(file.read_text()))
        if (folder / "autocompare.txt").exists():
            other["autocompare"] = (folder / "autocompare.txt").read_text().splitlines()
    return runs, other


def loss_table(runs: dict[str, Run]) -> list[str]:
    """The log's table beside the same run here, the same run as a median of 20, and the honest run."""
    seed, honest = runs.get("seed_log"), runs.get("enwik8")
    lines = [
        "| iteration | the log | `seed_log.py` | `seed_log.py`, median of 20 | `enwik8.py`, median of 20 |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for iteration, logged in LOGGED.items():
        cells = [seed and seed.median(iteration, 200), seed and seed.median(iteration, 20)]
        cells += [honest and honest.median(iteration, 20)]
        lines.append(
            f"| {iteration} | {logged:g} | " + " | ".join("" if c is None else f"{c:.4g}" for c in cells) + " |"
        )
    return lines


def later_table(run: Run) -> list[str]:
    """The honest run beyond the log's last iteration, in a few steps."""
    last = max(run.losses)
    marks = [m for m in (359, 1000, 2000, 5000, 10000, 20000, 30000, 40000, 50000, 80000) if m - 1 < last]
    rows = [f"| {m} | {run.median(min(m, last), 200):.4f} |" for m in [*marks, last] if run.median(min(m, last), 200)]
    return ["| iteration | loss, median of 200 |", "| ---: | ---: |", *dict.fromkeys(rows)]


def speed_lines(runs: dict[str, Run], other: dict[str, Any]) -> list[str]:
    """Samples per second of each run, of the bare step, and what wkv takes of it."""
    lines = []
    for name, run in runs.items():
        event = run.events[-1]
        rate = event["total_throughput"]
        lines.append(
            f"- `{name}`: {rate:.1f} samples/s ({event['time'] * 1e3:.2f} ms per iteration), "
            f"{rate / LOGGED_SAMPLES_PER_SECOND:.1f} times the log's {LOGGED_SAMPLES_PER_SECOND} on two GPUs."
        )
    step = other.get("step")
    if step:
        lines.append(
            f"- The step alone: {step['step_seconds'] * 1e3:.2f} ms, {step['samples_per_second']:.1f} samples/s."
        )
        if "wkv_share" in step:
            lines[-1] += f" wkv takes {step['wkv_seconds'] * 1e3:.2f} ms of it, {step['wkv_share']:.1%}."
            lines[-1] += f" Peak memory {step['peak_memory'] / 2**30:.1f} GiB."
    return lines


def wkv_tables(runs: list[dict[str, Any]]) -> list[str]:
    """One table for each run of the kernels' benchmark."""
    return [line for run in runs for line in (*wkv_lines(run), "")][:-1]


def wkv_lines(wkv: dict[str, Any]) -> list[str]:
    """The variants of wkv by time; a `note` in the file is printed with them."""
    shape = ", ".join(f"{n} = {x}" for n, x in zip("BTC", wkv["shape"]))
    lines = [
        f"On {wkv['device']}, torch {wkv['torch']}, {shape}, k and v in {wkv['dtype'].removeprefix('torch.')}; a copy "
        f"moves {wkv['copy_bandwidth'] / 1e9:.0f} GB/s there. "
        + wkv.get("note", f"The operator uses `{wkv['used']}`."),
        "",
        "| variant | forward ms | backward ms | sum ms | GB/s | of copy | error | at extreme decays |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    done = {n: r for n, r in wkv["variants"].items() if "failed" not in r}
    for name, row in sorted(done.items(), key=lambda item: item[1]["total"]):
        lines.append(
            f"| {name} | {row['forward'] * 1e3:.3f} | {row['backward'] * 1e3:.3f} | {row['total'] * 1e3:.3f} "
            f"| {row['bytes'] / row['total'] / 1e9:.0f} | {row['share_of_copy']:.1%} "
            f"| {max(row['errors'].values()):.0e} | {max(row['errors_extreme'].values()):.0e} |"
        )
    absent = {**{n: r["failed"] for n, r in wkv["variants"].items() if "failed" in r}, **wkv["missing"]}
    return lines + ["", *(f"Not measured: {name} ({why.splitlines()[0][:120]})." for name, why in absent.items())]


def draw(runs: dict[str, Run], image: Path) -> None:
    """Both curves and the log's points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    left.plot(list(LOGGED), list(LOGGED.values()), "ko", markersize=4, label="the log (median of 200)")
    for name, style in (("seed_log", "C3"), ("enwik8", "C0")):
        run = runs.get(name)
        if run is None:
            continue
        early = sorted(i for i in run.losses if i < 360)
        left.plot(early, [run.losses[i] for i in early], color=style, alpha=0.25, linewidth=0.7)
        if name == "seed_log":
            left.plot(early, [run.median(i, 200) for i in early], style, label="seed_log.py (median of 200)")
        left.plot(early, [run.median(i, 20) for i in early], style, linestyle="--", label=f"{name}.py (median of 20)")
    left.set(xlabel="iteration", ylabel="loss (nats per character)", yscale="log", title="the first 360 iterations")
    left.legend(fontsize=8)
    honest = runs.get("enwik8")
    if honest:
        steps = [r["iteration"] for r in honest.events]
        right.plot(steps, [honest.median(i, 20) for i in steps], color="C0", alpha=0.3, linewidth=0.7)
        right.plot(steps, [honest.median(i, 400) for i in steps], "C0", label="enwik8.py (median of 400)")
        for evaluation in honest.evaluations:
            right.plot(evaluation["iteration"], evaluation["valid_loss"], "k*", label=f"{evaluation['split']} loss")
        middle = honest.median(max(honest.losses), 400) or 1.0
        right.set(xlabel="iteration", ylim=(0.85 * middle, 2.2 * middle), title="the honest run to its end")
        right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(image, dpi=120)
    pyplot.close(figure)


def page(runs: dict[str, Run], other: dict[str, Any], image: str, origin: str) -> str:
    """The page as Markdown."""
    honest = runs.get("enwik8")
    parts = {
        "origin": [origin],
        "losses": loss_table(runs),
        "later": later_table(honest) if honest else ["(not measured yet)"],
        "validation": [
            f"On the {e['split']} part ({e['characters']} characters that training never saw), after iteration "
            f"{e['iteration']}: **{e['bits_per_character']:.4f} bits per character**, "
            f"{e['bits_per_byte']:.4f} bits per byte."
            for e in (honest.evaluations[-1:] if honest else [])
        ]
        or ["(not measured yet)"],
        "speed": speed_lines(runs, other) or ["(not measured yet)"],
        "wkv": wkv_tables(other.get("wkv", [])) or ["(not measured yet)"],
        "autocompare": [f"- `{line}`" for line in other.get("autocompare", [])[:2]] or ["(not measured yet)"],
        "image": [f"![both curves beside the log]({image})"],
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, lines in parts.items():
        text = text.replace("{{" + name + "}}", "\n".join(lines))
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the page about the reference run from the files of the runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, help="the page; its picture is written beside it")
    parser.add_argument("--origin", default="", help="where and when this was measured, as a sentence")
    parser.add_argument("--text", action="store_true", help="only print the numbers")
    args = parser.parse_args(arguments)
    runs, other = collect(args.runs)
    if args.text or args.out is None:
        blocks = [loss_table(runs), speed_lines(runs, other), wkv_tables(other.get("wkv", []))]
        blocks += [[json.dumps(e) for r in runs.values() for e in r.evaluations], other.get("autocompare", [])[:20]]
        print("\n\n".join("\n".join(block) for block in blocks))
        return 0
    image = args.out.with_suffix(".png")
    draw(runs, image)
    args.out.write_text(page(runs, other, image.name, args.origin), encoding="utf-8")
    print(f"wrote {args.out} and {image}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
