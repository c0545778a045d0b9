"""Log lines in the format of the training log, metrics, and checkpoints that are whole or absent."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from projects.rwkv_v4 import checkpoint
from projects.rwkv_v4.events import Event, Metrics, Window, plot_losses, read_metrics, say

ROOT = Path(__file__).parents[3]

# Two lines of the log, from after the logger's name on.
FIRST = (
    " eta: 0:26:36  iteration: 19/10000  consumed_samples: 160  total_loss: 9.68  time: 0.1600 s/iter"
    "  data_time: 0.0022 s/iter total_throughput: 50.00 samples/s lr: 8.00e-04  "
)
LAST = (
    " eta: 0:25:49  iteration: 359/10000  consumed_samples: 2880  total_loss: 0.05964  time: 0.1607 s/iter"
    "  data_time: 0.0021 s/iter total_throughput: 49.78 samples/s lr: 8.00e-04  "
)


@pytest.mark.parametrize(
    ("line", "event"),
    [
        (FIRST, Event(19, 10000, 160, 9.68, 0.16, 0.0022, 50.0, 8e-4)),
        (LAST, Event(359, 10000, 2880, 0.059641, 0.16071, 0.0021, 49.78, 8e-4)),
    ],
)
def test_event_lines_are_those_of_the_log(line: str, event: Event) -> None:
    assert event.line() == line


def test_metrics_continue_where_the_checkpoint_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    first = Metrics(path)
    for i in (19, 39, 59):
        first.add(Event(i, 100, 8 * i, 1.0, 1, 1, 1, 1, [2.0, 1.0]).record())
    with path.open("a") as file:
        file.write('{"iteration": 79, "total')  # killed while writing
    assert [r["iteration"] for r in read_metrics(path)] == [19, 39, 59]
    Metrics(path, start=45).add({"iteration": 59, "again": True})
    assert [r["iteration"] for r in read_metrics(path)] == [19, 39, 59]
    assert read_metrics(path)[-1] == {"iteration": 59, "again": True}
    path.write_text("no json\n{}\n")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        read_metrics(path)


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    Metrics(tmp_path / "metrics.json").add(Event(3, 9, 8, 1.0, 1, 1, 1, 1, [2.0, 1.5, 1.2, 1.0]).record())
    assert plot_losses(tmp_path / "metrics.json", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_the_window_is_a_median_of_the_last() -> None:
    window = Window(3, [9.0, 9.0, 9.0])
    window.values.extend([1.0, 3.0])
    assert window.median() == 3.0


def test_only_the_newest_checkpoints_stay_and_a_broken_one_is_passed_over(tmp_path: Path) -> None:
    for i in range(5):
        checkpoint.save(tmp_path, {"iteration": i, "x": torch.full((3,), float(i))}, keep=2)
    assert [p.name for p in checkpoint.found(tmp_path)] == ["checkpoint_0000003.pt", "checkpoint_0000004.pt"]
    newest = checkpoint.found(tmp_path)[-1]
    newest.write_bytes(newest.read_bytes()[:100])
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded is not None
    assert loaded[1]["iteration"] == 3
    assert checkpoint.load_latest(tmp_path / "empty") is None


def test_checkpoints_survive_kill_9(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from pathlib import Path
from projects.rwkv_v4 import checkpoint
for i in range(1, 100000):
    checkpoint.save(Path({str(tmp_path)!r}), {{"iteration": i, "x": torch.full((300_000,), float(i))}}, keep=2)
"""
    writer = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 120
        while len(checkpoint.found(tmp_path)) < 2 and time.monotonic() < deadline and writer.poll() is None:
            time.sleep(0.05)
        time.sleep(0.37)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    paths = checkpoint.found(tmp_path)
    assert paths
    for path in paths:  # every one that has its name is whole
        state = checkpoint.load(path)
        assert torch.equal(state["x"], torch.full((300_000,), float(state["iteration"])))
    left = {"iteration": 10**6, "x": torch.zeros(1)}
    checkpoint.save(tmp_path, left, keep=2)
    assert all(re.fullmatch(r"checkpoint_\d+\.pt", p.name) for p in tmp_path.iterdir()), "leftovers are cleaned up"


def test_a_line_of_one_rank_reaches_a_shared_file_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = []

    class Shared(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: object) -> int:
            pieces.append(bytes(data))  # type: ignore[call-overload]
            return len(pieces[-1])

    # What a rank's standard output is: torchrun starts it with `python -u`.
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(Shared(), write_through=True))  # type: ignore[type-var]
    say("building token list...", end=" ")
    say("data has 5 tokens, 3 unique.")
    assert pieces == [b"building token list... ", b"data has 5 tokens, 3 unique.\n"]
