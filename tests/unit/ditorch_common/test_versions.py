"""A PyTorch that is not promised to work is refused in one line."""

from __future__ import annotations

import runpy
import sys

import pytest

from ditorch_common import versions


@pytest.mark.parametrize("version", ["2.6.0", "2.13.0+cpu", "2.15.0.dev20261101", "3.0", "mine"])
def test_promised_versions_are_taken(version: str) -> None:
    versions.check(version)


@pytest.mark.parametrize("version", ["1.13.1", "2.5.1+cu121"])
def test_older_ones_are_refused_with_the_remedy(version: str) -> None:
    with pytest.raises(ImportError, match=r"need torch 2\.6 or newer, this is torch .*: pip install -U torch"):
        versions.check(version)


@pytest.mark.parametrize("version", [(3, 9, 18), (3, 14, 0)])
def test_a_python_that_was_not_run_is_refused_before_anything_fails_in_it(
    version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(ImportError, match=r"need Python 3\.10 to 3\.13, this is Python \d"):
        runpy.run_path(str(versions.__file__))
