"""torch.distributed on soft: every collective, DDP and FSDP2, on two ranks that torchrun starts."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.soft.collective_worker import CHECKS
from tests.device.soft.conftest import ROOT

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank found. The ranks run once, however many pytest workers share these tests."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "soft-collectives"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "log").exists():
            (folder / "log").write_text(_run(folder))
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    if not all(file.exists() for file in files):
        pytest.fail(f"the ranks did not finish:\n{(folder / 'log').read_text()[-6000:]}")
    return [json.loads(file.read_text()) for file in files]


def _run(folder: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.device.soft.collective_worker", str(folder)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        check=False,
        env={**os.environ, "DITORCH_DEVICE": "soft", "DITORCH_DISABLE_MOCK": "1", "OMP_NUM_THREADS": "1"},
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", list(CHECKS))
def test_on_two_ranks(results, name):
    for rank, found in enumerate(results):
        assert found[name] == "", f"rank {rank}:\n{found[name]}"
