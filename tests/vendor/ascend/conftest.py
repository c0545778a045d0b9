"""Runs only where the wheel of torch_npu is: everything else is skipped with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vendor.ascend.build import build, missing

PROJECT = Path(__file__).resolve().parents[3]
RUN_WITH = os.environ.get("TEST_ASCEND", "")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    reason = missing() if RUN_WITH else "make test-ascend runs these in an environment of their own"
    if reason:
        here = Path(__file__).parent
        for item in items:
            if here in Path(item.fspath).parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def ascend(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that runs code in a fresh process on the host's "Ascend" and returns what it printed."""
    libraries = build(Path(RUN_WITH).resolve() if RUN_WITH != "1" else tmp_path_factory.mktemp("acl"))

    def run(*arguments: str, **environment: str) -> str:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("DITORCH_", "CUDA_", "TORCH_DEVICE_"))}
        environment = {
            **clean,
            "LD_LIBRARY_PATH": str(libraries),
            "TASK_QUEUE_ENABLE": "0",
            "PYTHONPATH": str(PROJECT),
            "DITORCH_DEVICE": "ascend",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        command = [sys.executable, "-W", "ignore", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=PROJECT)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return run
