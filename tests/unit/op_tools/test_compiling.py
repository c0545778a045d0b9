"""Libraries are built in the background: nobody waits for a compiler, and a short run leaves one to the next."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from op_tools.native import compiling
from op_tools.native.compiling import Library

with_compiler = pytest.mark.skipif(compiling.find_compiler() is None, reason="no C++ compiler")


def test_who_asks_does_not_wait() -> None:
    go_on = threading.Event()
    made: list[int] = []

    def load() -> str:
        go_on.wait(60)
        made.append(1)
        return "loaded"

    library = Library("slow", load)
    began = time.monotonic()
    assert library.get() is None
    assert library.get() is None
    assert time.monotonic() - began < 30
    go_on.set()
    assert library.wait() == library.get() == "loaded"
    assert made == [1]


@pytest.mark.parametrize(
    "error", [OSError("no folder"), subprocess.CalledProcessError(1, "g++"), AttributeError("old")]
)
def test_what_cannot_be_built_is_done_without(error: Exception) -> None:
    def load() -> Any:
        raise error

    library = Library("broken", load)
    assert library.wait() is None
    assert library.get() is None


@pytest.mark.slow
@with_compiler
def test_a_run_that_ends_first_leaves_the_library_to_the_next(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\nsleep 3\nexec g++ "$@"\n'.replace("g++", str(compiling.find_compiler())))
    slow.chmod(0o755)
    environment = {**os.environ, "DITORCH_CACHE_DIR": str(tmp_path / "cache"), "CXX": str(slow), "OP_TOOLS_NATIVE": "1"}
    command = [
        sys.executable,
        "-c",
        "from op_tools.native import measuring; measuring.prepare(); assert measuring._built.get() is None",
    ]
    subprocess.run(command, env=environment, check=True, timeout=120)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list((tmp_path / "cache").rglob("measure.so")):
        time.sleep(0.2)
    assert list((tmp_path / "cache").rglob("measure.so"))
    time.sleep(0.5)
    assert not list((tmp_path / "cache").rglob("build-*"))


@with_compiler
def test_a_source_that_does_not_compile_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DITORCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("OP_TOOLS_NATIVE", raising=False)
    source = tmp_path / "bad.cpp"
    source.write_text("this is no C++")
    with pytest.raises(subprocess.CalledProcessError):
        compiling.compiled(source)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert not list((tmp_path / "cache").rglob("build-*"))
