"""What a run says and writes down: log lines in the format of the training log, ``metrics.json``, the loss plot."""

from __future__ import annotations

import datetime
import json
import logging
import statistics
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOGGER = "rwkv"


def start_log(rank: int, folder: Path) -> None:
    """Rank 0 writes to the console and to ``log.txt``; other ranks stay silent."""
    root = logging.getLogger(LOGGER)
    root.setLevel(logging.INFO)
    root.propagate = False
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    if rank != 0:
        root.addHandler(logging.NullHandler())
        return
    folder.mkdir(parents=True, exist_ok=True)
    form = logging.Formatter("[%(asctime)s %(name)s]: %(message)s", datefmt="%m/%d %H:%M:%S")
    for handler in (logging.StreamHandler(sys.stdout), logging.FileHandler(folder / "log.txt", encoding="utf-8")):
        handler.setFormatter(form)
        root.addHandler(handler)


def say(text: str, end: str = "\n") -> None:
    """A line without time and name, as the training log has some; on every rank, and on rank 0 into ``log.txt`` too."""
    # In one piece: ranks share a file, and `print` without a buffer writes the text and its end one after the other.
    sys.stdout.write(text + end)
    sys.stdout.flush()
    for handler in logging.getLogger(LOGGER).handlers:
        if isinstance(handler, logging.FileHandler) and handler.stream:
            handler.stream.write(text + end)
            handler.flush()


@dataclass
class Event:
    """The state of a run after some iterations."""

    iteration: int
    train_iter: int
    consumed_samples: int
    total_loss: float
    seconds: float
    data_seconds: float
    samples_per_second: float
    lr: float
    losses: list[float] = field(default_factory=list)

    def line(self) -> str:
        """As the training log prints it.

        >>> Event(19, 10000, 160, 9.68, 0.16, 0.0022, 50.0, 8e-4).line()[:44]
        ' eta: 0:26:36  iteration: 19/10000  consumed'
        """
        eta = datetime.timedelta(seconds=int(self.seconds * (self.train_iter - self.iteration - 1)))
        return (
            f" eta: {eta}  iteration: {self.iteration}/{self.train_iter}  consumed_samples: {self.consumed_samples}"
            f"  total_loss: {self.total_loss:.4g}  time: {self.seconds:.4f} s/iter"
            f"  data_time: {self.data_seconds:.4f} s/iter total_throughput: {self.samples_per_second:.2f} samples/s"
            f" lr: {self.lr:.2e}  "
        )

    def record(self) -> dict[str, Any]:
        """As ``metrics.json`` holds it: one object per line."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "total_loss": self.total_loss,
            "time": self.seconds,
            "data_time": self.data_seconds,
            "total_throughput": self.samples_per_second,
            "lr": self.lr,
            "losses": self.losses,
        }


class Metrics:
    """``metrics.json`` of a run, one object per line; continues a file from a given iteration on."""

    def __init__(self, path: Path | None, start: int = 0) -> None:
        self.path = path
        if path is None:
            return
        kept = [record for record in read_metrics(path) if record.get("iteration", 0) < start] if path.exists() else []
        path.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")

    def add(self, record: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.json``; a last line cut off by a crash is left out."""
    records = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines) - 1:
                raise ValueError(f"{path}, line {number + 1} is not JSON: {line[:80]!r}") from None
    return records


class Window:
    """The median of the last losses, as printed."""

    def __init__(self, length: int, values: list[float] | None = None) -> None:
        self.values: deque[float] = deque(values or [], maxlen=length)

    def median(self) -> float:
        return statistics.median(self.values)


def plot_losses(metrics: Path, image: Path) -> bool:
    """Draw the losses of a run; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = [r for r in read_metrics(metrics) if "total_loss" in r]
    raw = [(r["iteration"] - len(r["losses"]) + 1 + i, x) for r in records for i, x in enumerate(r["losses"])]
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    if raw:
        axes.plot(*zip(*raw), color="0.8", linewidth=0.8, label="each iteration")
        axes.plot([r["iteration"] for r in records], [r["total_loss"] for r in records], label="as printed")
        axes.legend()
    axes.set(xlabel="iteration", ylabel="loss (nats per character)", yscale="log")
    figure.tight_layout()
    figure.savefig(image, dpi=120)
    pyplot.close(figure)
    return True
