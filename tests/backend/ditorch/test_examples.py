"""The examples know nothing of ditorch; ``ditorch run`` runs them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ditorch

PROJECT = Path(__file__).resolve().parents[3]
EXAMPLES = PROJECT / "examples"
pytestmark = pytest.mark.slow


def ditorch_run(*arguments: str, folder: Path, **environment: str) -> str:
    # From another folder, as a user would: nothing may depend on the checkout being the current one.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **environment}
    result = subprocess.run(
        [sys.executable, str(PROJECT / "ditorch" / "__main__.py"), "run", *arguments],
        cwd=folder,
        env={**env, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_do_not_mention_ditorch_in_code(example: Path) -> None:
    code = re.sub(r'""".*?"""', "", example.read_text(), flags=re.DOTALL)
    assert "ditorch" not in code


def test_gpt_learns_and_restores_its_checkpoint(tmp_path: Path) -> None:
    script = str(EXAMPLES / "train_gpt.py")
    output = ditorch_run(script, "--steps", "12", "--checkpoint", str(tmp_path / "cuda.pt"), folder=tmp_path)
    first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", output)[0])
    assert last < first
    assert "trained on cuda:0" in output


def test_image_classifier_with_amp_and_workers(tmp_path: Path) -> None:
    output = ditorch_run(str(EXAMPLES / "classify_images.py"), "--steps", "12", folder=tmp_path)
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 12
    assert min(losses[-3:]) < losses[0]


@pytest.mark.distributed
@pytest.mark.skipif(ditorch.backend.module.device_count() < 2, reason="needs two devices")
def test_ddp_under_torchrun(tmp_path: Path) -> None:
    module = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    output = ditorch_run(*module, str(EXAMPLES / "train_ddp.py"), "--steps", "4", folder=tmp_path)
    assert "trained on 2 x cuda" in output


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_hugging_face_trainer(tmp_path: Path) -> None:
    output = ditorch_run(str(EXAMPLES / "train_transformers.py"), "--steps", "3", folder=tmp_path)
    assert "trained on cuda:0" in output
