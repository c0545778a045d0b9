"""`python -m tests.matrix [--torch 2.10.0,2.13.0] [--python 3.11]`: a table of versions, every cell run or its reason.

Each pair gets a virtual environment in a temporary folder, which is removed afterwards. PyTorch's wheels with CUDA work
without a GPU; NVIDIA's packages, which are 3 GB more, are not installed: `stubs.py` puts empty libraries of their names
in their place (`--full` installs them). uv does the installing; UV_CACHE_DIR and UV_FIND_LINKS name downloads to share
between runs, `--objects` a folder for what was compiled. Pythons are looked for on the PATH and among those of pyenv.
Cells are kept in a file (`--results`), so that a table can be filled in several runs: what is in it is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from . import stubs

ROOT: Final = Path(__file__).resolve().parents[2]
TORCH: Final = ("2.6.0", "2.8.0", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "newest")
PYTHON: Final = ("3.10", "3.11", "3.12", "3.13")
NEEDED: Final = ("numpy", "rich", "pytest", "pytest-timeout", "hypothesis", "expecttest", "setuptools")
SOFT_FROM: Final = (2, 10)  # the software accelerator is for this release and newer ones
MIN_FREE: Final = 6 << 30  # bytes on the disk
# What PyTorch needs where it is imported without NVIDIA's libraries.
_REQUIREMENTS: Final = """
import importlib.metadata, re
for line in importlib.metadata.requires("torch"):
    if "extra ==" not in line and not re.match("nvidia|cuda|triton", line):
        print(line)
"""

# Each part of the project once: the device layer, every tool, formats, replay in processes, verdicts, machine code.
_UNIT: Final = ("test_compat", "test_front", "test_plain_archive")
ANYWHERE: Final = (
    "tests/matrix/quick.py",
    "tests/unit/ditorch_common",
    *(f"tests/unit/op_tools/{name}.py" for name in _UNIT),
)
_DEVICE: Final = ("test_pinned", "test_aliasing", "test_streams_events", "test_random", "test_memory", "test_sparse")
ON_SOFT: Final = tuple(f"tests/device/soft/{name}.py" for name in _DEVICE)


def interpreter(version: str) -> str | None:
    """The Python of this version, if there is one with pip (`interpreter("3.11")`)."""
    found = shutil.which(f"python{version}")
    if (
        found is not None
        and subprocess.run([found, "-c", "import ensurepip"], capture_output=True, check=False).returncode == 0
    ):
        return found
    places = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    return str(places[-1]) if places else None


class Row:
    """The cells of one release of PyTorch, which share downloads and compiled objects."""

    def __init__(self, torch: str, folder: Path, log: Path, full: bool, objects: Path | None) -> None:
        self._torch, self._folder, self._log, self._full = torch, folder, log, full
        self._objects = objects or folder / "objects"
        found = shutil.which("uv")
        self._tool = Path(found) if found else folder / "tool/bin/uv"
        self._environment = {"UV_CACHE_DIR": str(folder / "wheels"), **os.environ, "UV_LINK_MODE": "hardlink"}
        self._environment["UV_HTTP_TIMEOUT"] = "300"

    def cell(self, python: str) -> str:
        """What became of one pair: counts, or the reason why it was not run."""
        command = interpreter(python)
        if command is None:
            return "no such Python here"
        if shutil.disk_usage(self._folder).free < MIN_FREE:
            return "not enough disk here"
        with self._log.open("a") as output:
            print(f"\n=== torch {self._torch}, Python {python}", file=output, flush=True)
            if not self._tool.exists():
                self._run([command, "-m", "venv", str(self._folder / "tool")], check=True)
                self._run([str(self._folder / "tool/bin/pip"), "install", "--quiet", "uv"], check=True)
            if not (self._folder / "g++").exists():
                self._make_compiler()
            own = self._folder / f"venv-{python}"
            try:
                return self._in(own, command, output)
            finally:
                shutil.rmtree(own, ignore_errors=True)

    def _in(self, own: Path, command: str, output: object) -> str:
        self._run([str(self._tool), "venv", "--quiet", "-p", command, str(own)], check=True)
        mine = str(own / "bin/python")
        done = self._install(mine)
        print(done.stderr, file=output, flush=True)  # type: ignore[call-overload]
        if done.returncode:
            missing = re.search(r"has no wheels with a matching.*|no version of torch.*|No space left.*", done.stderr)
            return missing[0].strip() if missing else "could not be installed"
        compiled = {"PYTHONPYCACHEPREFIX": str(own / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
        asked = self._run([mine, "-c", "import torch; print(torch.__version__)"], {**self._environment, **compiled})
        if asked.returncode:
            print(asked.stderr, file=output, flush=True)  # type: ignore[call-overload]
            return "torch cannot be imported"
        version = asked.stdout.strip()
        has_soft = tuple(map(int, version.split(".")[:2])) >= SOFT_FROM
        options = ["-q", "-m", "not slow", "--timeout", "600", "-p", "no:cacheprovider", "--durations", "12"]
        options += ["--disable-warnings", "--maxfail", "30", "--basetemp", str(own / "scratch")]
        environment = {
            **self._environment,
            "PYTHONPATH": str(ROOT),
            **compiled,
            "OMP_NUM_THREADS": "1",
            "CXX": str(self._folder / "g++"),
            "DITORCH_CACHE_DIR": str(own / "cache"),
            "DITORCH_DEVICE": "soft" if has_soft else "cpu",
        }
        ran = self._run([mine, "-m", "pytest", *options, *ANYWHERE, *(ON_SOFT if has_soft else ())], environment)
        print(ran.stdout[-40_000:], ran.stderr[-5_000:], file=output, flush=True)  # type: ignore[call-overload]
        last = (ran.stdout.strip().splitlines() or ["no output"])[-1]
        counts = ", ".join(re.findall(r"\d+ (?:passed|failed|errors?|skipped)", last)) or last[:60]
        return f"{counts}{'' if has_soft else ' (without soft)'}{f' [{version}]' if self._torch == 'newest' else ''}"

    def _install(self, python: str) -> subprocess.CompletedProcess[str]:
        wanted = "torch" if self._torch == "newest" else f"torch=={self._torch}"
        install = [str(self._tool), "pip", "install", "--quiet", "-p", python]
        if self._full:
            return self._run([*install, wanted, *NEEDED])
        done = self._run([*install, "--no-deps", wanted])
        if done.returncode:
            return done
        asked = self._run([python, "-c", _REQUIREMENTS], check=True)
        done = self._run([*install, *NEEDED, *asked.stdout.splitlines()])
        stubs.make(next(Path(python).parents[1].glob("lib/python*/site-packages/torch/lib")))
        return done

    def _make_compiler(self) -> None:
        self._objects.mkdir(parents=True, exist_ok=True)
        wrapper = self._folder / "g++"
        script = Path(__file__).with_name("compiler.py")
        wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} {script} {self._objects} /usr/bin/g++ "$@"\n')
        wrapper.chmod(0o700)

    def _run(
        self, command: list[str], environment: dict[str, str] | None = None, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=ROOT, env=environment or self._environment, capture_output=True, text=True, check=check
        )


def _table(found: dict[str, dict[str, str]]) -> str:
    lines = [
        "| torch | " + " | ".join(f"Python {python}" for python in PYTHON) + " |",
        "| --- |" + " --- |" * len(PYTHON),
    ]
    for torch, cells in found.items():
        lines.append(f"| {torch} | " + " | ".join(cells.get(python, "not run") for python in PYTHON) + " |")
    return "\n".join(lines)


def main() -> int:
    """Fill the table and print it; the exit code is 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--torch", default=",".join(TORCH))
    parser.add_argument("--python", default=",".join(PYTHON))
    parser.add_argument("--log", type=Path, default=Path("test-matrix.log"))
    parser.add_argument("--results", type=Path, default=Path("test-matrix.json"), help="the cells that were run")
    parser.add_argument("--full", action="store_true", help="with NVIDIA's libraries")
    parser.add_argument("--objects", type=Path, help="where compiled objects are kept between runs")
    given = parser.parse_args()
    found: dict[str, dict[str, str]] = json.loads(given.results.read_text()) if given.results.exists() else {}
    for torch in given.torch.split(","):
        with tempfile.TemporaryDirectory(prefix="ditorch-matrix-") as folder:
            row = Row(torch, Path(folder), given.log.absolute(), given.full, given.objects)
            for python in given.python.split(","):
                if python in found.setdefault(torch, {}):
                    continue
                started = time.monotonic()
                found[torch][python] = row.cell(python)
                given.results.write_text(json.dumps(found, indent=1))
                seconds = time.monotonic() - started
                print(f"{torch}, {python}: {found[torch][python]} ({seconds:.0f} s)", file=sys.stderr, flush=True)
    print(_table(found))
    return int(any("failed" in cell or "error" in cell for cells in found.values() for cell in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
