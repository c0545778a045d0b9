"""Two ranks with torchrun: ``nccl`` by name, the backend's collectives underneath."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ditorch

PROGRAMS = Path(__file__).parent / "programs"
PROJECT = Path(__file__).resolve().parents[3]

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(ditorch.backend.module.device_count() < 2, reason="needs two devices"),
]


def torchrun(program: Path, **environment: str) -> str:
    paths = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH", "")]))
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(program)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def test_collectives_ddp_fsdp_and_tensor_parallel() -> None:
    output = torchrun(PROGRAMS / "collectives.py")
    assert "rank 0 done" in output
    assert "rank 1 done" in output


def test_sums_in_float32_on_request() -> None:
    assert "rank 1 done" in torchrun(PROGRAMS / "collectives.py", DITORCH_REDUCE_FP32="1")
