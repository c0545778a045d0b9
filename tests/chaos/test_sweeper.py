"""What the soak removes while OpCapture writes: the files, and the folders that they leave."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.chaos import soak


def _capture(results: Path, number: int, age: float) -> Path:
    """The files of a call that was written so many seconds ago."""
    folder = results / "op_capture_results" / "torch.add" / "1" / str(number) / "now"
    folder.mkdir(parents=True)
    for name in ("input.pth", "output.pth", "metadata.json"):
        (folder / name).write_bytes(b"12345")
    _make_older(folder, age)
    return folder


def _make_older(folder: Path, age: float) -> None:
    then = time.time() - age
    for path in (*folder.iterdir(), folder, folder.parent):
        os.utime(path, (then, then))


def test_removed_captures_leave_no_folders_behind(tmp_path: Path) -> None:
    records = tmp_path / "op_tools_records" / "records.sqlite"
    records.parent.mkdir()
    records.write_bytes(b"")
    sweeper = soak.Sweeper(tmp_path)
    sweeper._over.set()  # only this test sweeps
    sweeper._thread.join()
    old, new = [_capture(tmp_path, number, 3.0) for number in range(20)], _capture(tmp_path, 20, 0.0)
    sweeper._sweep(time.time())
    assert (sweeper.files, sweeper.bytes) == (40, 200)
    assert len([*new.iterdir()]) == 3
    assert all(folder.exists() for folder in old)  # gradients may follow
    for _ in range(2):  # a folder, and the one around it
        for folder in old:
            if folder.exists():
                _make_older(folder, 60.0)
            else:
                os.utime(folder.parent, (0, 0))
        sweeper._sweep(time.time())
    assert [*new.parent.parent.iterdir()] == [new.parent]
    sweeper._sweep(float("inf"))
    assert sweeper.files == 42
    assert [*tmp_path.rglob("*")] == [records.parent, records]
