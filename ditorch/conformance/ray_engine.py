"""Slots on the machines of a Ray cluster: Ray places them and carries units and results; a slot is the same as here."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ditorch.conformance.cases import CRASH, Result, Unit
from ditorch.conformance.engines import GRACE
from ditorch.conformance.slot import Settings, Slot

IN_FLIGHT = 2
"""Units that wait at each actor, so that it is not idle while its results travel."""


class _Remote:
    """What runs in a Ray actor: one slot, whose worker is a child process of the actor."""

    def __init__(self, settings: Settings) -> None:
        self._slot = Slot(settings)

    def listed(self, what: Sequence[str]) -> tuple[Sequence[Unit], str]:
        return self._slot.list(list(what)), self._slot.device_name

    def do(self, unit: Unit) -> list[dict[str, Any]]:
        found: list[Result] = []
        self._slot.do(unit, found.append)
        return [result.as_dict() for result in found]

    def close(self) -> None:
        self._slot.close()


class RayEngine:
    """One actor per worker, on whichever machines of the cluster have room.

    Example: ``RayEngine([Settings("cuda", "cuda:0")] * 8, "auto")``
    """

    def __init__(self, settings: Sequence[Settings], address: str | None = None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ValueError("--engine ray needs Ray: pip install 'ditorch[ray]'")
        import ray

        self._ray: Any = ray
        self._started = not ray.is_initialized()
        if self._started:
            self._connect(address, len(settings))
        gpus = _share_of_a_gpu(ray, settings)
        # A new process for each actor: the device is loaded by the worker below it, never in Ray's own processes.
        make = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=-1, max_task_retries=0)(_Remote)
        self._actors = [make.remote(one) for one in settings]
        self._name = ""

    def _connect(self, address: str | None, workers: int) -> None:
        # Machines that have ditorch installed use theirs; this checkout's folder helps where they share a disk.
        paths = [str(Path(__file__).resolve().parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        carried = {key: value for key, value in os.environ.items() if key.startswith("DITORCH_")}
        environment = {
            # `import ditorch` in Ray's processes must not choose and load a device.
            "env_vars": {
                **carried,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "DITORCH_DEVICE": "cpu",
                "DITORCH_DISABLE_MOCK": "1",
            }
        }
        options: dict[str, Any] = {"address": address} if address else {"num_cpus": workers, "include_dashboard": False}
        self._ray.init(runtime_env=environment, log_to_driver=False, logging_level="ERROR", **options)

    def list(self, what: list[str]) -> list[Unit]:
        """Ask the first actor."""
        units, self._name = self._ray.get(self._actors[0].listed.remote(what))
        return list(units)

    def device_name(self) -> str:
        """As the first actor found it."""
        return self._name

    def run(self, units: Sequence[Unit], ends: float | None = None) -> Iterator[Result]:
        """Run units on all actors; an actor that is lost with its machine costs one case, and is started again."""
        todo = collections.deque((unit, 0) for unit in units)
        running: dict[Any, tuple[int, Unit, int]] = {}

        def give(number: int) -> None:
            if todo and (ends is None or time.monotonic() < ends):
                unit, tries = todo.popleft()
                running[self._actors[number].do.remote(unit)] = (number, unit, tries)

        for _ in range(IN_FLIGHT):
            for number in range(len(self._actors)):
                give(number)
        while running:
            left = None if ends is None else max(0.0, ends + GRACE - time.monotonic())
            ready, _ = self._ray.wait(list(running), num_returns=1, timeout=left)
            if not ready:
                return
            number, unit, tries = running.pop(ready[0])
            try:
                results = self._ray.get(ready[0])
            except self._ray.exceptions.RayActorError as error:
                if tries == 0:
                    todo.append((unit, 1))  # perhaps it only waited behind the one that was lost
                else:
                    case = unit.cases()[0]
                    yield Result(case, CRASH, f"its machine was lost twice: {str(error).splitlines()[0]}")
                    rest = unit.without({case.check})
                    if rest.checks:
                        todo.append((rest, 0))
                results = []
            give(number)
            for result in results:
                yield Result.from_dict(result)

    def close(self) -> None:
        """End all actors, and the cluster where this engine started it."""
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.get(actor.close.remote(), timeout=20)
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        if self._started:
            self._ray.shutdown()


def _share_of_a_gpu(ray: Any, settings: Sequence[Settings]) -> float:
    """Actors that share the cluster's GPUs evenly; 0 where Ray knows of none."""
    known = float(ray.cluster_resources().get("GPU", 0))
    return min(1.0, known / len(settings)) if known else 0.0
