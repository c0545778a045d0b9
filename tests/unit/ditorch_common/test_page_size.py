"""A page of a million records: its file, the first view, every filter and sort, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import page_size


@pytest.mark.slow
def test_a_million_records(chromium: Any, tmp_path: Path) -> None:
    table = page_size.write(tmp_path / "run.html", 1_000_000)
    found = page_size.measure(chromium, tmp_path / "run.html", table)
    assert found.rounds[0].file <= 15
    assert min(one.first_view for one in found.rounds) <= 2000
    assert max(one.memory for one in found.rounds) <= 500
    assert found.slowest <= 30, found  # about 6 at a load of 5; guards against regressions, no more


def test_records_take_few_bytes(tmp_path: Path) -> None:
    page_size.write(tmp_path / "run.html", 100_000)
    assert (tmp_path / "run.html").stat().st_size <= 1.6e6
