"""Common to all tests: nothing is left behind in the working folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.browser import browser, chromium  # noqa: F401 - fixtures

os.environ.setdefault("DITORCH_SOFT_DEVICES", "2")  # before torch is imported: some tests go from one to another


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools write below the current folder: give each test one of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _no_start_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are those of the last start of a tool: each test begins without one."""
    if "op_tools.settings" in sys.modules:
        monkeypatch.setattr(sys.modules["op_tools.settings"], "_at_start", None)
