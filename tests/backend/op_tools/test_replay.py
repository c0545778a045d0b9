"""Capture here, replay here: the same bits, forward and backward, for layouts, operators and a training step."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ditorch
import op_tools
from benchmarks.tool_overhead import GPT
from op_tools.files.captures import find
from op_tools.replay.check import replay
from op_tools.replay.outcome import ERROR, IDENTICAL, RIGHT, WRONG, Options, Outcome

from .samples import gradients_of, operators, samples_of, seed

ROOT = Path(__file__).resolve().parents[3]
RESULTS = Path("op_tools_results/op_capture_results")
CHECK = Options(acc_check=True)


def captured_anew(work: Callable[[], Any]) -> list[Path]:
    """The captures of what `work` does, and no others."""
    shutil.rmtree("op_tools_results", ignore_errors=True)
    with op_tools.OpCapture():
        work()
    return find(RESULTS)


def check_all_identical(folders: list[Path]) -> list[Outcome]:
    outcomes = [replay(folder, CHECK) for folder in folders]
    for outcome in outcomes:
        assert outcome.status == IDENTICAL, (outcome.op, outcome.status, outcome.reason, outcome.like_capture)
    return outcomes


# -- a training step ----------------------------------------------------------------------------------


def train_step(device: str, layers: int, width: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model = GPT(width=width, layers=layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens, targets = (torch.randint(0, 256, (2, 32), device=device) for _ in range(2))

    def step() -> None:
        model(tokens, targets).backward()
        optimizer.step()

    return step


def check_step(device: str, layers: int, least: int) -> None:
    folders = captured_anew(train_step(device, layers, 32))
    assert len(folders) >= least
    outcomes = check_all_identical(folders)
    with_gradients = [o for o in outcomes if (o.folder / "grad_inputs.pth").exists()]
    assert len(with_gradients) > 0.8 * len(folders)
    assert all(o.went_backward and any("grad_input" in row.name for row in o.rows) for o in with_gradients)


def test_a_training_step_replays_bit_for_bit(device: str) -> None:
    check_step(device, layers=1, least=30)


@pytest.mark.slow
def test_a_training_step_of_400_calls_replays_bit_for_bit(device: str) -> None:
    check_step(device, layers=20, least=400)


def test_autocast_and_dropout_replay(device: str) -> None:
    x, w = torch.randn(8, 16, device=device), torch.randn(4, 16, device=device, requires_grad=True)

    def work() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            F.dropout(F.linear(x, w), 0.3).float().sum().backward()

    outcomes = check_all_identical(captured_anew(work))
    assert {"torch.nn.functional.linear", "torch.nn.functional.dropout"} <= {o.op for o in outcomes}


# -- layouts ------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int64]


@st.composite
def laid_out(draw: Any) -> torch.Tensor:
    """A tensor that slicing, transposing or expanding made."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    base = (torch.randn([n + 1 for n in shape], generator=generator) * 3).to(dtype)
    base = base[tuple(slice(0, n) for n in shape)]
    if base.dim() and draw(st.booleans()):
        base = base.permute(*draw(st.permutations(range(base.dim()))))
    if base.dim() and draw(st.booleans()):
        base = base[draw(st.integers(0, 2)) :: draw(st.integers(1, 3))]
    if draw(st.booleans()):
        base = base.unsqueeze(0).expand(2, *base.shape)
    return base.conj() if base.is_complex() and draw(st.booleans()) else base


def on_device(x: torch.Tensor, device: str) -> torch.Tensor:
    """The same layout there: a copy of the storage, seen in the same way."""
    flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device)
    moved = flat.as_strided(x.shape, x.stride(), x.storage_offset())
    return moved.conj() if x.is_conj() else moved


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "mul": lambda x, leaf: torch.mul(leaf, x),
    "square": lambda x, leaf: leaf * leaf,
    "with its view": lambda x, leaf: leaf + leaf.view_as(leaf),
    "add_": lambda x, leaf: leaf.clone().add_(x),
    "sum": lambda x, leaf: leaf.sum(-1),
    "cat": lambda x, leaf: torch.cat([leaf.reshape(-1), x.reshape(-1)]),
    "out": lambda x, leaf: torch.neg(x, out=torch.zeros_like(x)),
    "setitem": lambda x, leaf: leaf.clone().__setitem__(..., 1),
    "split": lambda x, leaf: leaf.reshape(-1).split(2),
}


@given(x=laid_out(), call=st.sampled_from(sorted(CALLS)))
@hypothesis_settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_layout_and_dtype_replays_bit_for_bit(device: str, x: torch.Tensor, call: str) -> None:
    placed = on_device(x, device)
    leaf = placed.detach()
    if leaf.is_floating_point() or leaf.is_complex():
        leaf.requires_grad_()

    def work() -> None:
        result = CALLS[call](placed, leaf)
        outputs = [t for t in result if t.requires_grad] if isinstance(result, tuple) else [result]
        if outputs and isinstance(outputs[0], torch.Tensor) and outputs[0].requires_grad:
            torch.autograd.grad(outputs, [leaf], [torch.ones_like(t) for t in outputs], allow_unused=True)

    for folder in captured_anew(work):
        outcome = replay(folder, CHECK)
        returned = outcome.notes != ["it returns nothing"]
        assert outcome.status == (IDENTICAL if returned or outcome.went_backward else RIGHT), outcome


# -- operators ----------------------------------------------------------------------------------------


def sweep(op: Any, device: str, limit: int) -> None:
    for inplace in (False, True):
        for sample in samples_of(op, limit, gradients=True, inplace=inplace):
            args, kwargs, leaves = sample.on(device)

            def work(sample: Any = sample, args: Any = args, kwargs: Any = kwargs, leaves: Any = leaves) -> None:
                seed()
                try:
                    gradients_of(sample.function(*args, **kwargs), leaves)
                except (RuntimeError, NotImplementedError, IndexError):
                    pass  # what the device cannot do (IndexError: in deterministic mode) is not captured, or in part

            for folder in captured_anew(work):
                outcome = replay(folder, CHECK)
                told = (outcome.op, outcome.status, outcome.reason, outcome.like_capture, outcome.notes)
                if outcome.op in _UNCERTAIN:
                    continue
                assert outcome.status not in (ERROR, WRONG), told
                assert outcome.like_capture in ("bit-identical", "", "nothing to compare with"), told


# op: why its captures are not expected to give the same again
_UNCERTAIN = {
    "torch.empty": "uninitialised memory",
    "torch.Tensor.new_empty": "uninitialised memory",
    "torch.nn.functional.linear_cross_entropy": "takes an object that a file cannot hold",
    "torch.Tensor.resize_": "uninitialised memory",
    "torch.resize_as_": "uninitialised memory",
    "torch.Tensor.resize_as_": "uninitialised memory",
}


# CUDA needs its deterministic mode here, and there some are wrong or fail by themselves (torch 2.11)
_ON_CUDA = {
    "gather": "raises IndexError for tensors without dimensions in deterministic mode",
    "topk": "its gradient raises IndexError for tensors without dimensions in deterministic mode",
    "scatter_add": "raises IndexError for tensors without dimensions in deterministic mode",
    "nn_functional_pad_reflect": "its gradient differs from run to run, and from the CPU's, in deterministic mode",
    "nn_functional_scaled_dot_product_attention": "its gradients are over the bound of rounding (cuda_evidence.py)",
}


@pytest.mark.parametrize("op", operators(False), ids=lambda op: op.formatted_name)
def test_operators_replay_bit_for_bit(op: Any, device: str) -> None:
    if ditorch.backend.name == "cuda":
        if op.formatted_name in _ON_CUDA:
            pytest.skip(_ON_CUDA[op.formatted_name])
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        sweep(op, device, 2)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.parametrize("op", operators(True), ids=lambda op: op.formatted_name)
def test_all_operators_replay_bit_for_bit(op: Any, device: str) -> None:
    if op.name.startswith("jiterator") and ditorch.backend.name != "cuda":
        pytest.skip("PyTorch's Jiterator writes kernels for GPUs alone")
    sweep(op, device, 4)


# -- what OpAutoCompare saves -------------------------------------------------------------------------


def test_saved_differences_replay(device: str) -> None:
    if "soft" not in ditorch.framework:
        pytest.skip("only the software accelerator can be wrong on purpose")
    from ditorch.soft import faults

    x = torch.randn(16, device=device, requires_grad=True)
    with faults.plant("exp: noise=1e-2"), op_tools.OpAutoCompare():
        x.exp().sum().backward()
    saved = find(RESULTS)
    assert saved
    assert all(folder.name == "device" for folder in saved)
    (folder,) = [f for f in saved if "torch.Tensor.exp" in str(f)]
    now_right = replay(folder, CHECK)
    assert now_right.status == RIGHT, now_right
    assert now_right.notes == ["the captured result is wrong by the CPU"]
    with faults.plant("exp: noise=1e-2"):
        still_wrong = replay(folder, CHECK)
    assert still_wrong.status == WRONG
    assert "rounding bound" in still_wrong.reason


# -- the command --------------------------------------------------------------------------------------


def test_ctrl_c_ends_processes_and_keeps_results(device: str, tmp_path: Path) -> None:
    x = torch.randn(64, 64, device=device)
    folders = captured_anew(lambda: [x @ x for _ in range(30)])
    script = str(ROOT / "op_tools/run_op_from_data.py")
    arguments = [script, str(RESULTS), "--acc_check", "--jobs", "2", "--run_times", "300", "--json", "r.json"]
    environment = {**os.environ, "OP_TOOLS_CONSOLE": "full", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("torch.Tensor.matmul: "):  # the first capture is done
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers as well
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    assert "interrupted: " in rest
    import json

    written = json.loads(Path("r.json").read_text())
    assert written["interrupted"]
    assert 1 <= written["done"] < len(folders)
    assert _gone(process.pid)


def _gone(group: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
