"""`python -m tests.matrix [--torch 2.10,2.13] [--python 3.11]`: a table of versions, every cell run or with its reason.

Each pair gets a virtual environment in a temporary folder, which is removed before the next one: PyTorch's wheels with
CUDA take 6 GB. They work without a GPU. Pythons are looked for on the PATH and among those of pyenv.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
TORCH: Final = ("2.6.0", "2.8.0", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "newest")
PYTHON: Final = ("3.10", "3.11", "3.12", "3.13")
NEEDED: Final = ("numpy", "rich", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "expecttest", "setuptools")
SOFT_FROM: Final = (2, 10)  # the software accelerator is for this release and newer ones
MIN_FREE: Final = 12 << 30  # bytes on the disk

# Each part of the project once: formats, replay in processes, tools, verdicts; and on soft the device itself.
ANYWHERE: Final = ("tests/unit/ditorch_common", "tests/unit/op_tools/test_plain_archive.py")
ANYWHERE_TOO: Final = ("tests/unit/op_tools/test_replay.py", "tests/unit/op_tools/test_store_and_writer.py")
ON_SOFT: Final = ("tests/device/soft/test_autograd.py", "tests/backend/op_tools/test_bounded.py")


def interpreter(version: str) -> str | None:
    """The Python of this version, if there is one (`interpreter("3.11")`)."""
    found = shutil.which(f"python{version}")
    if found is not None and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
        return found
    places = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    return str(places[-1]) if places else None


def cell(torch: str, python: str, log: Path) -> str:
    """What became of one pair: passed with counts, or the reason why not."""
    command = interpreter(python)
    if command is None:
        return "no such Python here"
    if shutil.disk_usage(tempfile.gettempdir()).free < MIN_FREE:
        return "not enough disk here"
    with tempfile.TemporaryDirectory(prefix="ditorch-matrix-") as folder, log.open("a") as output:
        print(f"\n=== torch {torch}, Python {python}", file=output, flush=True)
        own = Path(folder) / "venv"
        subprocess.run([command, "-m", "venv", str(own)], check=True, stdout=output, stderr=output)
        wanted = "torch" if torch == "newest" else f"torch=={torch}"
        install = [str(own / "bin/python"), "-m", "pip", "install", "--quiet", "--no-cache-dir", wanted, *NEEDED]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        print(done.stderr, file=output, flush=True)
        if done.returncode:
            missing = re.search(r"No matching distribution.*|No space left.*", done.stderr)
            return missing[0].strip() if missing else "could not be installed"
        asked = subprocess.run(
            [str(own / "bin/python"), "-c", "import torch; print(torch.__version__)"],
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.returncode:
            print(asked.stderr, file=output, flush=True)
            return "torch cannot be imported"
        version = asked.stdout.strip()
        has_soft = tuple(map(int, version.split(".")[:2])) >= SOFT_FROM
        tests = [*ANYWHERE, *ANYWHERE_TOO, *(ON_SOFT if has_soft else ())]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "DITORCH_CACHE_DIR": f"{folder}/cache",
            "DITORCH_DEVICE": "soft" if has_soft else "cpu",
        }
        options = ["-q", "-m", "not slow", "--timeout", "300", "-p", "no:cacheprovider", "-x", "--maxfail", "20"]
        ran = subprocess.run(
            [str(own / "bin/python"), "-m", "pytest", *options, *tests],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        print(ran.stdout[-20_000:], ran.stderr[-5_000:], file=output, flush=True)
        last = (ran.stdout.strip().splitlines() or ["no output"])[-1]
        counts = ", ".join(re.findall(r"\d+ (?:passed|failed|errors?|skipped)", last)) or last[:60]
        return f"{counts}{'' if has_soft else ' (without soft)'}{f' [{version}]' if torch == 'newest' else ''}"


def main() -> int:
    """Print the table as the cells are done; the exit code is 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--torch", default=",".join(TORCH))
    parser.add_argument("--python", default=",".join(PYTHON))
    parser.add_argument("--log", type=Path, default=Path("test-matrix.log"))
    given = parser.parse_args()
    torches, pythons = given.torch.split(","), given.python.split(",")
    failed = False
    print("| torch | " + " | ".join(f"Python {python}" for python in pythons) + " |")
    print("| --- |" + " --- |" * len(pythons), flush=True)
    for torch in torches:
        cells = []
        for python in pythons:
            started = time.monotonic()
            cells.append(cell(torch, python, given.log))
            failed |= "failed" in cells[-1] or "error" in cells[-1]
            print(f"{torch}, {python}: {cells[-1]} ({time.monotonic() - started:.0f} s)", file=sys.stderr, flush=True)
        print(f"| {torch} | " + " | ".join(cells) + " |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
