"""`reproduce.py` tells the truth: 1 while the fault is there, 0 without it, 2 where it cannot be tried."""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ditorch
import op_tools

from .findings import CASES

ROOT = Path(__file__).resolve().parents[3]
SAMPLED = (
    "batch_norm statistics", "fused AdamW", "mm out= not written", "exp out= resized", "one tensor twice", "unscale",
    "grouped_mm", "add of expanded", "exp backward, stride 0", "mm backward, one asked", "linear under autocast",
    "operator of torch.library", "dropout", "argmax", "sum of nothing", "complex mm", "cat", "cpu index",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_faults_are_left() -> Iterator[None]:
    if ditorch.backend.name != "soft":
        pytest.skip("only the software accelerator can be made to fail on purpose")
    from ditorch.soft import faults

    yield
    faults.clear()


@contextlib.contextmanager
def planted(text: str) -> Iterator[None]:
    from ditorch.soft import faults

    with contextlib.ExitStack() as all_of_them:
        for fault in faults.parse(text):
            all_of_them.enter_context(faults.plant(fault))
        yield


def blames(name: str) -> list[Any]:
    with planted(CASES[name].fault), op_tools.OpAutoCompare() as compared:
        CASES[name].work()
    assert compared.blames, compared.findings()
    return list(compared.blames)


def answer(capsys: pytest.CaptureFixture[str], folder: str, *options: str, fault: str = "") -> tuple[Any, str]:
    """Exit code and output of a script, run in this process."""
    with pytest.MonkeyPatch.context() as patch, planted(fault):
        patch.setattr(sys, "argv", ["reproduce.py", *options])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(Path(folder) / "reproduce.py"), run_name="__main__")
    return ended.value.code, capsys.readouterr().out


def check(name: str, capsys: pytest.CaptureFixture[str]) -> set[tuple[str, str]]:
    """Every finding of a case: with the fault and without, judged by op_tools and by the recorded bound."""
    case, found = CASES[name], blames(name)
    for blame in found:
        for options in ((), ("--plain",)):
            faulty = answer(capsys, blame.folder, *options, fault=case.fault)
            healthy = answer(capsys, blame.folder, *options)
            assert "cannot judge" not in faulty[1] + healthy[1]
            if options and case.needs_op_tools:
                assert faulty[0] in (1, 2), (name, blame.op, faulty)
                assert healthy[0] in (0, 2), (name, blame.op, healthy)
            else:
                assert (faulty[0], healthy[0]) == (1, 0), (name, blame.op, blame.phase, options, faulty, healthy)
    return {(b.op, b.phase) for b in found}


@pytest.mark.parametrize("name", SAMPLED)
def test_still_there_and_gone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(name, capsys)


@pytest.mark.slow
def test_a_hundred_findings(capsys: pytest.CaptureFixture[str]) -> None:
    found = [finding for name in CASES for finding in check(name, capsys)]
    assert len(found) >= 100
    assert len({op for op, _ in found}) >= 40


def test_both_phases_of_one_call_are_tried(capsys: pytest.CaptureFixture[str]) -> None:
    forward, backward = blames("forward and backward")
    assert forward.folder == backward.folder
    for fault, told in (("gelu: noise=0.1", "(forward)"), ("gelu_backward: noise=0.1", "(backward)")):
        code, text = answer(capsys, forward.folder, fault=fault)
        assert code == 1
        (wrong,) = [line for line in text.splitlines() if "instead of" in line]
        assert told in wrong
    assert answer(capsys, forward.folder)[0] == 0


def test_arguments_lie_as_they_did(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides, sharing and gradients of stride 0 come back; only gradients that were asked for are asked for."""
    (blame,) = blames("mm backward, one asked")
    asked: list[tuple[int, Any]] = []
    grad = torch.autograd.grad

    def spy(outputs: Any, inputs: Any, grads: Any, **options: Any) -> Any:
        asked.append((len(inputs), grads[0].stride()))
        return grad(outputs, inputs, grads, **options)

    monkeypatch.setattr(torch.autograd, "grad", spy)
    answer(capsys, blame.folder)
    (blame,) = blames("exp backward, stride 0")
    answer(capsys, blame.folder)
    assert asked == [(1, (5, 1)), (1, (0, 0))]


def test_what_cannot_be_tried_exits_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    (blame,) = blames("cat")
    folder = Path(blame.folder)
    fault = "cat: missing"
    for options, given in (((), fault), (("--import", "no_such_module"), ""), (("no_such_device",), "")):
        code, text = answer(capsys, blame.folder, *options, fault=given)
        assert (code, text.count("\n")) == (2, 1)
        assert text.startswith("could not be tried: ")
    whole = (folder / "device" / "input.pth").read_bytes()
    (folder / "device" / "input.pth").write_bytes(whole[:100])
    assert answer(capsys, blame.folder)[0] == 2
    (folder / "device" / "input.pth").write_bytes(whole)
    assert answer(capsys, blame.folder)[0] == 0
    (folder / "forward.pth").unlink()
    assert answer(capsys, blame.folder)[0] == 2


def test_settings_of_the_run_decide_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("OP_AUTOCOMPARE_STANDARD", "seed")
        (blame,) = blames("gelu")
    tiny = "gelu: noise=1e-6"
    assert answer(capsys, blame.folder, fault=CASES["gelu"].fault)[0] == 1
    assert answer(capsys, blame.folder, fault=tiny)[0] == answer(capsys, blame.folder, "--plain", fault=tiny)[0] == 0


def run(script: Path | str, folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script as a process that finds modules in `folder` first."""
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OP_TOOLS_CONSOLE": "off", **environment}
    command = [sys.executable, str(script), *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, cwd=folder)


@pytest.mark.slow
def test_alone_without_op_tools(tmp_path: Path) -> None:
    """A vendor has PyTorch and the device's plugin, nothing else."""
    (blame,) = blames("batch_norm statistics")
    script, fault = Path(blame.folder).resolve() / "reproduce.py", "native_batch_norm: noise=0.1"
    vendor = tmp_path / "vendor"
    vendor.mkdir()
    (vendor / "op_tools.py").write_text("raise ImportError('op_tools is not here')")
    healthy = run(script, vendor)
    assert (healthy.returncode, healthy.stderr) == (0, ""), healthy.stdout
    assert "the difference is gone" in healthy.stdout
    (blame,) = blames("batch_norm")
    faulty = run(Path(blame.folder).resolve() / "reproduce.py", vendor, DITORCH_SOFT_FAULTS=fault)
    assert (faulty.returncode, faulty.stderr) == (1, ""), faulty.stdout
    (vendor / "ditorch.py").write_text("raise ImportError('ditorch is not here')")
    without = run(script, vendor)
    assert (without.returncode, without.stderr) == (2, "")
    assert "could not be tried: " in without.stdout
    assert "soft" in without.stdout


def test_without_pytorch(tmp_path: Path) -> None:
    (blame,) = blames("cat")
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: cannot open')")
    found = run(Path(blame.folder).resolve() / "reproduce.py", tmp_path)
    assert (found.returncode, found.stderr) == (2, "")
    assert found.stdout == "could not be tried: libtorch.so: cannot open\n"


@pytest.mark.slow
def test_an_operator_of_another_module(tmp_path: Path) -> None:
    defines = """
        import torch
        @torch.library.custom_op("{0}::third", mutates_args=(), device_types="cpu")
        def third(x: torch.Tensor) -> torch.Tensor:
            return x / 3
    """
    calls = """
        import ditorch, op_tools
        with op_tools.OpAutoCompare():
            torch.ops.{0}.third(torch.ones(4, device="cuda"))
    """
    (tmp_path / "its_module.py").write_text(textwrap.dedent(defines).format("imported"))
    (tmp_path / "imports.py").write_text("import torch, its_module" + textwrap.dedent(calls).format("imported"))
    (tmp_path / "defines.py").write_text(textwrap.dedent(defines + calls).format("inline"))
    fault = "{0}::third: noise=0.1"
    # the fault is planted once the operator is there
    for job, name in (("imports.py", "imported"), ("defines.py", "inline")):
        text = (tmp_path / job).read_text()
        plant = f"from ditorch.soft import faults; faults.plant({fault.format(name)!r})\nwith op_tools"
        (tmp_path / job).write_text(text.replace("with op_tools", plant))
        made = run(tmp_path / job, tmp_path)
        assert made.returncode == 0, made.stderr
    imported, inline = (next(tmp_path.rglob(f"{name}.third*/**/reproduce.py")) for name in ("imported", "inline"))
    found = run(imported, tmp_path)
    assert (found.returncode, found.stderr) == (0, ""), found.stdout
    found = run(inline, tmp_path)
    assert (found.returncode, found.stderr) == (2, "")
    assert "defines.py" in found.stdout
    (tmp_path / "inline_module.py").write_text(textwrap.dedent(defines).format("inline"))
    assert run(inline, tmp_path, "--import", "inline_module").returncode == 0
