"""What a records file knows of each run of a tool: who ran, where, with which settings, and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy
import torch

from .. import settings
from ..call.devices import accelerator_type
from .settings_table import registries
from .store import Store

RUNS: Final = {
    "run": "INTEGER",
    "tool": "TEXT",
    "rank": "INTEGER",
    "world": "INTEGER",
    "pid": "INTEGER",
    "started": "REAL",  # seconds since 1970
    "facts": "TEXT",  # JSON: command, folder, versions, settings
}
ENDS: Final = {"run": "INTEGER", "tool": "TEXT", "ended": "REAL", "summary": "TEXT"}  # JSON: the lines
DOCTOR: Final = {"pid": "INTEGER", "found": "TEXT"}  # JSON: what `ditorch doctor` knows of the process
_MAX_COMMAND: Final = 2_000


def begin(store: Store, run: int, tool: str) -> None:
    """Note that a tool starts (`begin(store, 1, "OpAutoCompare")`)."""
    known = "runs" in store.tables
    row = (run, tool, settings.rank(), settings.world_size(), os.getpid(), time.time(), json.dumps(facts()))
    store.table("runs", RUNS).append(row)
    if not known:
        store.table("ends", ENDS)
        found = _doctor()
        if found is not None:
            store.table("doctor", DOCTOR).append((os.getpid(), json.dumps(found, default=str)))


def end(store: Store, run: int, tool: str, summary: Sequence[str]) -> None:
    """Note how a run ended, with the lines of its summary (`end(store, 1, "OpObserve", ["3 calls"])`)."""
    store.table("ends", ENDS).append((run, tool, time.time(), json.dumps(list(summary))))


def facts() -> dict[str, Any]:
    """Command, folder, versions, device and the settings that are set (`facts()["command"]`)."""
    command = " ".join(sys.argv)[:_MAX_COMMAND]
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": numpy.__version__}
    found = {
        variable: text
        for registry in registries()
        for setting in registry
        for variable, text in registry.variables_of(setting).items()
    }
    where = {"command": command, "folder": os.getcwd(), "device": accelerator_type(), "machine": platform.machine()}
    return {**where, "versions": versions, "settings": found}


def _doctor() -> Any:
    """What ditorch's doctor says of this process; None without ditorch, or where asking would start other devices."""
    ditorch = sys.modules.get("ditorch")
    with contextlib.suppress(Exception):  # a diagnosis that fails must not keep a tool from starting
        alone = accelerator_type() == "soft" or getattr(torch, accelerator_type()).device_count() == 1
        return ditorch.doctor().as_dict() if ditorch is not None and alone else None
    return None
