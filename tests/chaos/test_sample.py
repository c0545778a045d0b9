"""A small sample of `make test-chaos`, with a fixed seed."""

from __future__ import annotations

import random
from pathlib import Path

from . import hostile


def test_hostile_captures_are_answered(tmp_path: Path) -> None:
    found = hostile.captured(40, tmp_path, random.Random(7), jobs=1)
    assert found["captures"] == 40
    assert found["refused"] > 10
    assert not any(found[bad] for bad in ("unanswered", "code executed", "over the memory limit"))


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    assert hostile.flipped(100, tmp_path, random.Random(7)) == {"noticed": 100}


def test_damaged_records_and_fault_strings_are_refused_or_read(tmp_path: Path) -> None:
    assert not hostile.recorded(40, tmp_path, random.Random(7))["raised"]
    assert not hostile.planted(300, random.Random(7))["raised"]
