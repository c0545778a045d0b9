"""Two ranks: one set of files each, collectives seen as operators, no fallback of a collective."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

JOB = """
import os, json
import torch, ditorch
import torch.distributed as dist
from torch.distributed import all_reduce
import op_tools

os.environ["OP_TOOLS_INCLUDE_CPU"] = os.environ.get("JOB_CPU", "0")
dist.init_process_group(os.environ["JOB_BACKEND"])
rank = dist.get_rank()
device = os.environ["JOB_DEVICE"]
if device != "cpu":
    torch.cuda.set_device(rank % torch.cuda.device_count())
x = torch.full((4,), float(rank + 1), device=device, requires_grad=True)
with op_tools.OpTimeMeasure() as timing, op_tools.OpCapture(ranks=[1]) as capture, op_tools.OpFallback(
    ops=["torch.distributed.all_reduce"]
) as fallback:
    (x * 2).sum().backward()
    total = x.detach().clone()
    all_reduce(total)
    dist.broadcast(total, 0)
assert total.tolist() == [3.0] * 4, total
names = [row["op"] for row in timing.records()]
assert names.count("torch.distributed.all_reduce") == names.count("torch.distributed.broadcast") == 1, names
assert any(f.kind == "refused" for f in fallback.findings()), fallback.findings()
assert bool(capture.files_written) == (rank == 1)
original = all_reduce.__closure__ is None or all(
    not getattr(c.cell_contents, "__module__", "").startswith("op_tools.") for c in all_reduce.__closure__
)
assert original, "the collective is left as it was"
open(f"done{rank}", "w").close()
dist.barrier()
dist.destroy_process_group()
"""


def launch(tmp_path: Path, **environment: str) -> None:
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OP_TOOLS_CONSOLE": "off", **environment}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.distributed
@pytest.mark.parametrize("where", [pytest.param("cpu", marks=pytest.mark.slow), "device"])
def test_two_ranks(tmp_path: Path, where: str) -> None:
    if where == "cpu":
        launch(tmp_path, JOB_BACKEND="gloo", JOB_DEVICE="cpu", JOB_CPU="1")
    else:
        import torch

        if torch.cuda.device_count() < 2:
            pytest.skip("needs two devices")
        launch(tmp_path, JOB_BACKEND="nccl", JOB_DEVICE="cuda")
    assert (tmp_path / "done0").exists()
    assert (tmp_path / "done1").exists()
    results = tmp_path / "op_tools_results"
    records = sorted(p.name for p in (results / "op_tools_records").glob("*.sqlite"))
    assert len(records) == 2
    assert ["_rank0_" in records[0] or "_rank0_" in records[1], "_rank1_" in records[0] + records[1]] == [True, True]
    assert len(list((results / "op_time_measure_result").glob("op_elasped_info_*.csv"))) == 2
    folders = {p.name for p in (results / "op_capture_results").glob("*/*")}
    assert len(folders) == 1
    assert folders.pop().endswith("_rank1")
