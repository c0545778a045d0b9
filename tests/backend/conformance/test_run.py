"""A run from end to end on the active device: files, resumption, single cases, planted faults, several devices."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

import ditorch
from ditorch.cli import make_parser
from ditorch.conformance import store
from ditorch.conformance.cases import CRASH, ERROR, PASS, TIMEOUT, WRONG, Case, Unit
from ditorch.conformance.command import INTERRUPTED, main
from ditorch.conformance.console import Bar, View
from ditorch.conformance.engines import LocalEngine
from ditorch.conformance.slot import Settings

DEVICE = ditorch.backend.name
SMALL = ("--jobs", "1", "--samples", "2", "--timeout", "60")
only_soft = pytest.mark.skipif(DEVICE != "soft", reason="faults are planted in the software accelerator")


def run(*arguments: str) -> tuple[int, str]:
    """The command in this process: exit status and what it printed."""
    text = io.StringIO()
    view = View(Console(file=text, width=200))
    return main(make_parser().parse_args(["conformance", "--device", DEVICE, *arguments]), view), text.getvalue()


def statuses(folder: Path) -> dict[str, str]:
    return {str(case): result.status for case, result in store.load(folder).results.items()}


def test_a_small_run_and_its_continuation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    chosen = ("--what", "ops,autograd,modules,optimizers", "--ops", "sin,nn.Linear,SGD", "--dtypes", "float32")
    seen = 0

    def interrupt(self: Bar, failed: bool) -> None:
        nonlocal seen
        seen += 1
        if seen == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Bar, "add", interrupt)
        status, text = run(*SMALL, *chosen, "--out", str(out))
    assert status == INTERRUPTED, text
    assert "--resume goes on" in text
    first = statuses(out)
    assert len(first) == 4
    data = json.loads((out / "summary.json").read_text())  # a valid result, though not a complete one
    assert data["about"]["complete"] is False
    assert sum(data["statuses"].values()) == 4

    with pytest.raises(ValueError, match="holds results already"):
        run(*SMALL, *chosen, "--out", str(out))
    status, text = run(*SMALL, *chosen, "--out", str(out), "--resume")
    assert status == 0, text
    found = statuses(out)
    assert {case: found[case] for case in first} == first
    assert {case.split("/")[0] for case in found} == {"ops", "autograd", "modules", "optimizers"}
    assert {case.split("/")[3] for case in found if case.startswith("ops/")} == {
        *("forward", "backward", "noncontiguous", "out", "inplace")
    }
    assert set(found.values()) == {PASS}
    rows = list(csv.DictReader((out / "summary.csv").open()))
    assert {"/".join(row[key] for key in ("what", "name", "dtype", "check")) for row in rows} == set(found)
    assert len((out / store.FILE).read_text().splitlines()) == len(found) + 1  # nothing ran twice
    packed = f"{DEVICE}_summary_of_pytorch_test_case_testing.csv.tar"
    for name in ("index.html", "badge.svg", "summary.json", packed):
        assert (out / name).stat().st_size > 200


@only_soft
@pytest.mark.slow
def test_planted_faults_show_up_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("add", "cos", "atan", "asinh", "acosh", "digamma")
    units = [Unit("ops", name, "float32", ("forward",)) for name in names]
    units += [Unit("ops", "atan", "float32", ("backward",))]  # does not use atan
    faults = "atan: element=1e-2; asinh: missing; acosh: hang; digamma: abort"
    expected = {"atan": WRONG, "asinh": ERROR, "acosh": TIMEOUT, "digamma": CRASH}
    sound = results_of(units, timeout=30.0)
    assert set(sound.values()) == {PASS}
    monkeypatch.setenv("DITORCH_SOFT_FAULTS", faults)
    found = results_of(units, timeout=15.0)
    assert {case: status for case, status in found.items() if status != PASS} == {
        Case("ops", name, "float32", "forward"): status for name, status in expected.items()
    }


def results_of(units: Sequence[Unit], timeout: float) -> dict[Case, str]:
    engine = LocalEngine([Settings("soft", "soft:0", samples=3, timeout=timeout)])
    try:
        return {result.case: result.status for result in engine.run(units)}
    finally:
        engine.close()


@only_soft
@pytest.mark.slow
def test_one_case_alone_shows_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DITORCH_SOFT_FAULTS", "atan: element=1e-2, device=1")
    status, text = run("--case", "ops/atan/float32/forward", "--samples", "2")
    assert (status, "ops/atan/float32/forward: pass" in text) == (0, True), text
    monkeypatch.setenv("DITORCH_SOFT_FAULTS", "atan: element=1e-2")
    status, text = run("--case", "ops/atan/float32/forward", "--samples", "2")
    assert status == 1
    assert "times what rounding explains" in text


@pytest.mark.slow
def test_choices_that_a_device_may_make() -> None:
    """Results in place of another dtype, statistics that are not saved, vectors that are not determined."""
    units = [
        Unit("ops", "eq", "float32", ("inplace",)),
        Unit("ops", "logical_xor", "complex64", ("inplace",)),
        Unit("ops", "native_batch_norm", "float32", ("forward", "out", "noncontiguous")),
        Unit("ops", "linalg.svd", "float32", ("out",)),
        Unit("ops", "nonzero", "float32", ("out",)),
        Unit("ops", "linspace", "int16", ("forward",)),
        Unit("ops", "mode", "int16", ("forward",)),
        Unit("ops", "linalg.lstsq", "float32", ("forward", "backward")),
        Unit("ops", "linalg.lu_factor", "complex64", ("forward", "backward", "out")),
        Unit("ops", "where", "-", ("errors",)),
        Unit("autograd", "nn.functional.max_unpool1d", "float32", ("forward-mode",)),
    ]
    engine = LocalEngine([Settings(DEVICE, f"{ditorch.backend.device_type}:0", timeout=60)])
    try:
        results = list(engine.run(units))
    finally:
        engine.close()
    assert len(results) == sum(len(unit.checks) for unit in units)
    assert [f"{result.case}: {result.message}" for result in results if result.failed] == []


def test_the_cuda_surface(tmp_path: Path) -> None:
    chosen = (
        "--what",
        "api",
        "--ops",
        "torch.cuda.*synchronize,torch.cuda.Event,Tensor.to*,torch.cuda.memory_allocated",
    )
    status, text = run(*SMALL, *chosen, "--out", str(tmp_path / "api"))
    assert status == 0, text
    assert statuses(tmp_path / "api") == {
        f"api/{name}/-/call": PASS
        for name in ("Tensor.to('cuda')", "torch.cuda.Event", "torch.cuda.memory_allocated", "torch.cuda.synchronize")
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--what", "ops,opps"), "opps is not one of ops, modules"),
        (("--samples", "0"), "--samples 0: expected a number, 1 or more, or all"),
        (("--jobs", "0"), "--jobs 0: at least 1"),
        (("--timeout", "0"), "--timeout 0: expected seconds"),
        (("--case", "add"), "'add' is not a case"),
        (("--resume", "--fresh"), "exclude each other"),
        (("--device", f"{DEVICE}:x"), "expected a backend, or devices"),
        (("--device", "soft:0,cpu"), "one backend at a time"),
        (("--ledger", "missing.txt"), "there is no such file"),
        (("--pytorch-src", "nowhere"), "expected a checkout of PyTorch"),
        (("diff", "a", "b"), "a is no result of a run"),
    ],
)
def test_bad_input_is_named(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(*arguments)
