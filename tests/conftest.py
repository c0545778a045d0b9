"""Common to all tests: nothing is left behind in the working folder."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools write below the current folder: give each test one of its own."""
    monkeypatch.chdir(tmp_path)
