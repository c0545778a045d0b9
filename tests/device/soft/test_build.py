"""The build of soft: cached, safe when two processes build, clear when it cannot, tidy when it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from ditorch.soft import build
from tests.device.soft.conftest import ROOT

# A stand-in for g++: writes its output file, takes the time it is told to, and counts its calls.
COMPILER = """\
#!/bin/sh
case "$1" in -dumpfullversion) echo 12.0.0; exit 0;; esac
echo call >> "$LOG"
{body}
previous=
for argument in "$@"; do
  if [ "$previous" = -o ]; then echo built > "$argument"; fi
  previous="$argument"
done
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Install a stand-in compiler and an empty cache; returns a function that changes what the compiler does."""

    def install(body: str = "") -> None:
        script = tmp_path / "bin" / "g++"
        script.parent.mkdir(exist_ok=True)
        script.write_text(COMPILER.format(body=body))
        script.chmod(0o755)

    install()
    monkeypatch.setenv("CXX", str(tmp_path / "bin" / "g++"))
    monkeypatch.setenv("LOG", str(tmp_path / "calls"))
    monkeypatch.setenv("DITORCH_CACHE_DIR", str(tmp_path / "cache"))
    return install


def calls(tmp_path: Path) -> int:
    return len((tmp_path / "calls").read_text().splitlines()) if (tmp_path / "calls").exists() else 0


def leftovers(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != "lock")


COMPLETE = len(build.UNITS) + 1  # each unit once, and the link


def test_built_once_then_found(compiler, tmp_path, capsys):
    first = build.library()
    assert first.read_text() == "built\n"
    assert calls(tmp_path) == COMPLETE
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("ditorch: building the software accelerator for torch")
    assert lines[1].startswith("ditorch: built in")
    assert build.library() == first
    assert calls(tmp_path) == COMPLETE
    assert capsys.readouterr().err == ""
    assert leftovers(tmp_path) == ["_ditorch_soft.so"]


def test_the_cache_depends_on_all_that_matters(compiler, tmp_path, monkeypatch):
    seen = {build.library()}
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    for source in build.SOURCES.iterdir():
        (csrc / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "SOURCES", csrc)
    assert build.library() in seen  # the same sources elsewhere are the same
    (csrc / "soft.h").write_text((csrc / "soft.h").read_text() + "// changed\n")
    seen.add(build.library())
    assert len(seen) == 2
    monkeypatch.setattr(build.torch, "__version__", "9.9.9")
    seen.add(build.library())
    assert len(seen) == 3
    script = tmp_path / "bin" / "g++"
    script.write_text(script.read_text().replace("12.0.0", "13.0.0"))
    seen.add(build.library())
    assert len(seen) == 4
    monkeypatch.setattr(build, "OPTIMIZE", dict.fromkeys(build.OPTIMIZE, "-O0"))
    seen.add(build.library())
    assert len(seen) == 5


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "DITORCH_DEVICE": "cpu", "DITORCH_DISABLE_MOCK": "1", **environment},
    )


BUILD = "from ditorch.soft import build; print(build.library())"


def test_two_processes_at_once_build_once(compiler, tmp_path):
    compiler("sleep 2")
    processes = [start(BUILD) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert calls(tmp_path) == COMPLETE
    said = outputs[0][1] + outputs[1][1]
    assert said.count("ditorch: building") == 1
    assert leftovers(tmp_path) == ["_ditorch_soft.so"]


def test_interrupting_leaves_nothing_behind(compiler, tmp_path):
    compiler("exec sleep 60")
    process = start(BUILD)
    deadline = time.monotonic() + 60
    while calls(tmp_path) < len(build.UNITS) and time.monotonic() < deadline:
        time.sleep(0.05)
    started = time.monotonic()
    os.kill(process.pid, signal.SIGINT)  # as Ctrl-C, but the compilers do not get it
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert time.monotonic() - started < 30
    assert leftovers(tmp_path) == []
    running = subprocess.run(["ps", "-o", "args=", "-g", str(process.pid)], capture_output=True, text=True, check=False)
    assert "sleep 60" not in running.stdout
    compiler()
    assert build.library().exists()


def test_what_a_killed_build_left_is_cleared_by_the_next(compiler, tmp_path):
    folder = build.library().parent
    (folder / "_ditorch_soft.so").unlink()
    (folder / "build-old").mkdir()
    (folder / "build-old" / "core.o").write_text("half")
    build.library()
    assert leftovers(tmp_path) == ["_ditorch_soft.so"]
    assert not (folder / "build-old").exists()


def test_no_compiler_names_the_remedies(compiler, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler.*apt-get install g\+\+.*DITORCH_DEVICE=cpu"):
        build.library()


def test_a_library_that_is_there_needs_no_compiler(compiler, tmp_path, monkeypatch):
    built = build.library()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert build.library() == built


def test_a_failed_compilation_shows_what_the_compiler_said(compiler, tmp_path):
    compiler("echo 'core.cpp:1: error: something is wrong here'; exit 1")
    with pytest.raises(build.BuildError, match=r"(?s)g\+\+ failed.*something is wrong here.*DITORCH_DEVICE=cpu"):
        build.library()
    assert leftovers(tmp_path) == []
    compiler()
    assert build.library().exists()


def test_a_broken_source_is_shown_by_the_real_compiler(tmp_path, monkeypatch):
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    for name in {name for unit in build.UNITS.values() for name in unit}:
        (csrc / name).write_text("int broken( { return 0; }\n")
    monkeypatch.setattr(build, "SOURCES", csrc)
    monkeypatch.setenv("DITORCH_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(build.BuildError, match=r"(?s)runtime\.cpp:1.*error"):
        build.library()
    assert leftovers(tmp_path) == []


def test_a_cache_that_cannot_be_written_names_the_variable(compiler, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DITORCH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(build.BuildError, match=r"cannot be written.*Set DITORCH_CACHE_DIR"):
        build.library()


def test_missing_python_headers_name_the_package(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(build.sysconfig, "get_paths", lambda: {"include": str(tmp_path / "none")})
    with pytest.raises(build.BuildError, match=r"Python\.h is not in .*python3-dev.*DITORCH_DEVICE=cpu"):
        build.library()


def test_environments_with_the_same_torch_share_one_build(tmp_path, monkeypatch):
    before = build._fingerprint()
    monkeypatch.setattr(build, "_torch_root", lambda: tmp_path)
    assert build._fingerprint() == before
    monkeypatch.setattr(torch.version, "git_version", "another")
    assert build._fingerprint() != before
