"""The page about the runs takes its numbers from their files."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from projects.rwkv_v4 import report


def write(folder: Path, name: str, start: float, evaluation: bool = False) -> None:
    losses = [start / (1 + i / 50) for i in range(400)]
    with (folder / f"{name}.metrics.json").open("w") as file:
        for i in range(19, 400, 20):
            record = {"iteration": i, "total_loss": losses[i], "losses": losses[i - 19 : i + 1]}
            file.write(json.dumps({**record, "time": 0.01, "total_throughput": 800.0}) + "\n")
        if evaluation:
            found = {"valid_loss": 1.0, "bits_per_character": 1.4427, "bits_per_byte": 1.44, "characters": 123}
            file.write(json.dumps({"iteration": 399, "split": "valid", **found}) + "\n")


def test_the_page_and_its_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path, "seed_log", 10.0)
    write(tmp_path, "enwik8", 8.0, evaluation=True)
    (tmp_path / "step.json").write_text(json.dumps({"step_seconds": 0.012, "samples_per_second": 666.7}))
    (tmp_path / "autocompare.txt").write_text("787 comparisons, 0 with differences\n")
    page = tmp_path / "rwkv.md"
    assert report.main([str(tmp_path), "--out", str(page), "--origin", "Measured on a test."]) == 0
    text = page.read_text()
    losses = [10 / (1 + i / 50) for i in range(360)]
    of_200, of_20 = statistics.median(losses[-200:]), statistics.median(losses[-20:])
    assert f"| 359 | 0.05964 | {of_200:.4g} | {of_20:.4g} |" in text
    for part in ("Measured on a test.", "1.4427 bits per character", "16.1 times the log's 49.78", "787 comparisons"):
        assert part in text
    assert "{{" not in text
    assert page.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


def test_the_log_s_table_is_whole() -> None:
    assert list(report.LOGGED) == list(range(19, 360, 20))


def test_folders_without_a_run_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder"):
        report.collect([tmp_path / "gone"])
    (tmp_path / "metrics.json").write_text('{"iteration": 1}\n')
    with pytest.raises(ValueError, match="holds no event"):
        report.collect([tmp_path])
