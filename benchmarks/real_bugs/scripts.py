"""Run scripts in forks of one process that has imported PyTorch: alone, each would take seconds to start."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path


class Scripts:
    """A process that runs scripts, each in a fork of its own.

    Example: ``Scripts().run(Path("reproduce.py"), DITORCH_SOFT_FAULTS="mm: zero") == 1``
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, script: Path, **environment: str) -> int:
        """The exit status of a script."""
        if self._process is None:
            command = [sys.executable, "-m", "benchmarks.real_bugs.scripts"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(script), environment]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


def _serve() -> None:
    from benchmarks.real_bugs import bugs  # noqa: F401  # PyTorch, and operators of a library that faults may name

    for line in sys.stdin:
        script, environment = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_run(script, environment))
        status = os.waitpid(child, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(script: str, environment: dict[str, str]) -> int:
    os.environ.update(environment)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    sys.argv[:] = [script]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        return 3
    return 0


if __name__ == "__main__":
    _serve()
