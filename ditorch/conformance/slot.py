"""A place where cases run: keeps one worker process alive, limits its time, and replaces it when it is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ditorch.conformance.cases import CRASH, TIMEOUT, Case, Result, Unit

START_SECONDS = 300.0
STARTS = 3
WORKER = (sys.executable, "-m", "ditorch.conformance.worker")
PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


_LOG_BYTES = 16_000  # the interpreter ends its report of a crash with a list of all modules, which may be long


class StartError(RuntimeError):
    """No worker could be started; the message shows what its process wrote."""


class Stopped(Exception):
    """The run was ended while this slot was busy."""


@dataclass(frozen=True)
class Settings:
    """What a worker has to know, all plain data, so that it can travel to another machine.

    >>> Settings("soft", "soft:0").mode
    'plain'
    """

    backend: str
    device: str
    mode: str = "plain"
    """`plain`: the device under its own name. `api`: with "cuda" redirected, for the CUDA surface."""
    samples: int | None = None
    timeout: float = 60.0
    hunt_seconds: float | None = None
    """Of all workers together for one hunt through all operators; None where each gets its full time."""

    def environment(self) -> dict[str, str]:
        """Environment of the worker process (`settings.environment()["OMP_NUM_THREADS"] == "1"`)."""
        paths = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        found = {
            **os.environ,
            "DITORCH_DEVICE": self.backend,
            "PYTHONPATH": os.pathsep.join([*paths, PACKAGE_PARENT]),
            # Workers are the parallelism; sums that are split over threads are not repeatable.
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTORCH_JIT": "0",
        }
        if self.mode == "plain":
            # PyTorch's databases ask torch.cuda what there is: they must hear the truth.
            found["DITORCH_DISABLE_MOCK"] = "1"
        else:
            found.pop("DITORCH_DISABLE_MOCK", None)
        return found

    def argument(self) -> str:
        """The same for the worker's command line."""
        names = ("device", "mode", "samples", "timeout", "hunt_seconds")
        return json.dumps({name: getattr(self, name) for name in names})


class Slot:
    """Runs units in a worker process of its own; whatever happens there costs one case.

    Example: ``Slot(Settings("soft", "soft:0")).do(unit, print)``
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.replaced = 0
        self.device_name = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._stopped = False
        self._folder = tempfile.TemporaryDirectory(prefix="ditorch_conformance_", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name) / "worker.log"

    def list(self, what: list[str]) -> list[Unit]:
        """Ask a worker which units there are (`slot.list(["ops"])`)."""
        self._ready()
        self._send(do="list", what=what)
        message = self._receive(START_SECONDS)
        if message is None or "listed" not in message:
            raise StartError(f"a worker for {self.settings.device} could not list the cases:\n{self._written()}")
        self.device_name = message.get("device_name", "")
        self._receive(START_SECONDS)  # idle
        return [Unit(w, name, dtype, tuple(checks)) for w, name, dtype, checks in message["listed"]]

    def do(self, unit: Unit, emit: Callable[[Result], None]) -> None:
        """Run a unit to its end, over as many workers as it takes, and emit one result per case."""
        while unit.checks:
            self._ready()
            done = self._attempt(unit, emit)
            unit = unit.without(done)

    def stop(self) -> None:
        """End the worker at once, from any thread; the slot is of no further use."""
        self._stopped = True
        self._kill()

    def close(self) -> None:
        """End the worker and forget its files."""
        self.stop()
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        self._folder.cleanup()

    # --- one worker

    def _attempt(self, unit: Unit, emit: Callable[[Result], None]) -> set[str]:
        """Give a unit to the worker; the checks that have a result afterwards, at least one."""
        done: set[str] = set()
        current, since = unit.checks[0], time.monotonic()
        self._send(do="unit", what=unit.what, name=unit.name, dtype=unit.dtype, checks=list(unit.checks))
        while True:
            left = self.settings.timeout - (time.monotonic() - since)
            message = self._receive(max(left, 0.0))
            case = Case(unit.what, unit.name, unit.dtype, current)
            if message is None:
                alive = self._process is not None and self._process.poll() is None
                seconds = round(time.monotonic() - since, 3)
                if alive and seconds >= self.settings.timeout:
                    emit(Result(case, TIMEOUT, f"took longer than {self.settings.timeout:g} s", seconds=seconds))
                else:
                    emit(Result(case, CRASH, self._how_it_ended(), seconds=seconds, details=(self._written(),)))
                self._replace()
                return {*done, current}
            if "started" in message:
                current, since = message["started"], time.monotonic()
            elif "result" in message:
                result = Result.from_dict(message["result"])
                done.add(result.case.check)
                emit(result)
                since = time.monotonic()
                current = next((c for c in unit.checks if c not in done), current)
            elif "lost" in message:
                self._replace()
                return done
            elif "idle" in message:
                return done

    def _ready(self) -> None:
        """Have a worker that waits for a request."""
        if self._stopped:
            raise Stopped
        if self._process is not None and self._process.poll() is None:
            return
        for _ in range(STARTS):
            self._start()
            message = self._receive(START_SECONDS)
            if self._stopped:
                raise Stopped
            if message is not None and "idle" in message:
                return
            self._kill()
        raise StartError(f"no worker could be started for {self.settings.device}:\n{self._written()}")

    def _start(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        ours, theirs = socket.socketpair()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*WORKER, str(theirs.fileno()), self.settings.argument()],
                env=self.settings.environment(),
                cwd=self._folder.name,  # nothing in the user's folder can shadow a module
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the parent
            )
        theirs.close()
        self._pipe = Connection(ours.detach())

    def _send(self, **message: Any) -> None:
        assert self._pipe is not None
        with contextlib.suppress(OSError):  # a worker that died while idle: the next receive says so
            self._pipe.send_bytes(json.dumps(message).encode())

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None when the time is over or the worker has gone."""
        assert self._pipe is not None
        try:
            if not self._pipe.poll(seconds):
                return None
            return dict(json.loads(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            if self._stopped:
                raise Stopped from None
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(10)
            return None

    def _replace(self) -> None:
        self.replaced += 1
        self._kill()

    def _kill(self) -> None:
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)

    def _how_it_ended(self) -> str:
        code = self._process.returncode if self._process is not None else None
        if code is None:
            return "the worker closed its pipe"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the process was ended by {signal.Signals(-code).name}"
        return f"the process ended with exit status {code}"

    def _written(self) -> str:
        """The last lines that the worker process wrote."""
        try:
            text = self._log.read_bytes()[-_LOG_BYTES:].decode(errors="replace")
        except OSError:
            return ""
        lines = [line for line in text.strip().splitlines() if not line.startswith("Extension modules:")]
        return "\n".join(lines[-25:])
