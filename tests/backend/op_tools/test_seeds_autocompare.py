"""OpAutoCompare and the offline check, held against the documented console blocks: lines, order, columns, row names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from op_tools.cli import run_from_data

from .test_seeds import COMPARE_HEADER, HEADER, run, tables

CALLS = """
import torch.nn.functional as F

def forward():
    half = torch.bfloat16
    weight = torch.randn(16, device="cuda", dtype=half, requires_grad=True)
    my_input = torch.randn(1, 8, 16, device="cuda", dtype=half)
    with torch.no_grad():
        weight * my_input
    q = torch.randn(1, 8, 2, 2, 4, device="cuda", dtype=half)
    q.reshape((1, 8, 4, 4))
    F.linear(my_input, torch.randn(4, 16, device="cuda", dtype=half), None)
    t = torch.arange(6, device="cuda", dtype=torch.float32)
    freqs = torch.outer(t, t)
    total = freqs + freqs
    out2 = torch.zeros(6, 6, device="cuda", dtype=half)
    out2.copy_(total)
    torch.tensor([4, 8, 12, 16], device="cuda", dtype=torch.int32).tolist()
    x = torch.randn(1, 8, 16, device="cuda", requires_grad=True)
    variance = x.mean((-1,), keepdim=True)
    logits = torch.randn(6, 5, device="cuda", requires_grad=True)
    logits.argmax(dim=-1)
    loss_list = F.cross_entropy(logits, torch.tensor([0, 1, 2, 3, 4, 0], device="cuda"), reduction="none")
    loss = loss_list.sum()
    loss /= 2
    loss += torch.zeros((), device="cuda", dtype=half)
    loss = torch.ones(1, device="cuda") * loss
    loss.backward()
    return variance

with op_tools.OpAutoCompare():
    forward()
"""

TWO = "inputs[0] inputs[1] outputs inputs(cpu)[0] inputs(cpu)[1] outputs(cpu)"
BOTH = "grad_output(cpu) grad_inputs[0] grad_inputs[1] grad_inputs(cpu)[0] grad_inputs(cpu)[1]"
ONE = "grad_output(cpu) grad_inputs grad_inputs(cpu)"


class Block(NamedTuple):
    """What is documented of one call: its casts, the rows of both tables, and whether there is a column `value`."""

    op: str
    cast: str
    rows: str
    compared: str
    value: bool = False


# in the order of the calls; a row name with a space in it is written with "~"
BLOCKS = [
    Block("torch.Tensor.mul", "bfloat16", TWO, "input[0] input[1] output"),
    Block(
        "torch.Tensor.reshape",
        "bfloat16",
        "inputs[0] inputs~[1][0] inputs~[1][1] inputs~[1][2] inputs~[1][3] outputs inputs(cpu)[0] inputs(cpu)~[1][0] "
        "inputs(cpu)~[1][1] inputs(cpu)~[1][2] inputs(cpu)~[1][3] outputs(cpu)",
        "input[0] input[1] input[2] input[3] input[4] output",
        value=True,
    ),
    Block(
        "torch.nn.functional.linear",
        "bfloat16",
        "inputs[0] inputs[1] inputs[2] outputs inputs(cpu)[0] inputs(cpu)[1] inputs(cpu)[2] outputs(cpu)",
        "input[0] input[1] input[2] output",
        value=True,
    ),
    Block("torch.outer", "float32", TWO, "input[0] input[1] output"),
    Block("torch.Tensor.add", "float32", TWO, "input[0] input[1] output"),
    Block("torch.Tensor.copy_", "bfloat16 float32", TWO, "input[0] input[1] output"),
    Block(
        "torch.Tensor.tolist",
        "",
        "inputs outputs~[0][0] outputs~[0][1] outputs~[0][2] outputs~[0][3] inputs(cpu) outputs(cpu)~[0][0] "
        "outputs(cpu)~[0][1] outputs(cpu)~[0][2] outputs(cpu)~[0][3]",
        "input output[0] output[1] output[2] output[3]",
        value=True,
    ),
    Block(
        "torch.Tensor.mean",
        "float32",
        "inputs[0] inputs~[1][0] inputs~keepdim outputs inputs(cpu)[0] inputs(cpu)~[1][0] inputs(cpu)~keepdim "
        "outputs(cpu)",
        "input[0] input[1] output",
        value=True,
    ),
    Block(
        "torch.Tensor.argmax",
        "float32",
        "inputs inputs~dim outputs inputs(cpu) inputs(cpu)~dim outputs(cpu)",
        "input output",
        value=True,
    ),
    Block("torch.Tensor.mul", "float32", BOTH, "grad[0] grad[1]", value=True),
    Block("torch.Tensor.add_", "bfloat16 float32", BOTH, "grad[0] grad[1]", value=True),
    Block("torch.Tensor.div_", "float32", BOTH, "grad[0] grad[1]", value=True),
    Block("torch.Tensor.sum", "float32", ONE, "grad"),
    Block("torch.nn.functional.cross_entropy", "float32", ONE, "grad"),
]


def blocks(text: str) -> list[tuple[str, str, str, list[Any]]]:
    """The calls of a console output: operator, casts, place, and the tables that follow."""
    first = r"(?m)^(torch\S+) forward_id: \d+(?:    cpu_dtype_cast_info\(from:to\): \{(.*)\})?\n(\S+:\d+ \S+: .*)\n"
    parts = re.split(first, text)[1:]
    return [
        (op, " ".join(re.findall(r"torch\.(\w+): torch\.float64", cast or "")), where, tables(body))
        for op, cast, where, body in zip(*[parts[n::4] for n in range(4)])
    ]


def names(rows: list[list[str]], op: str) -> str:
    return " ".join([row[0].removeprefix(f"{op} ").replace(" ", "~") for row in rows])


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("seeds")
    before = os.getcwd()
    os.chdir(folder)
    try:
        return run(CALLS, folder)
    finally:
        os.chdir(before)


def test_each_documented_block_is_printed_in_its_place(shown: str) -> None:
    found = iter(blocks(shown))
    for block in BLOCKS:
        op, cast, where, (described, compared, *_) = next(
            b for b in found if (b[0], names(b[3][0][1], b[0])) == (block.op, block.rows)
        )
        assert cast == block.cast
        assert "snippet.py:" in where, where
        assert described[0] == [*HEADER, "value"] if block.value else HEADER
        assert compared[0][: len(COMPARE_HEADER)] == COMPARE_HEADER
        assert names(compared[1], op) == block.compared


def test_gradients_are_numbered_by_argument_and_shown_where_the_device_has_them(shown: str) -> None:
    backward = {op: made for op, _, _, made in blocks(shown) if made[0][1][0][0].endswith("grad_output(cpu)")}
    for op, absent in (("torch.Tensor.mul", 0), ("torch.Tensor.add_", 1), ("torch.Tensor.div_", 1)):
        described, compared, *_ = backward[op]
        none = [row[0].removeprefix(f"{op} ") for row in described[1] if row[-1] == "None"]
        assert none == [f"grad_inputs[{absent}]", f"grad_inputs(cpu)[{absent}]"]
        row = compared[1][absent]
        assert row[1:7] == ["True", *["0.000000000"] * 4, ""]
    for op, (described, *_) in backward.items():
        places = {row[0].removeprefix(f"{op} ").split("[")[0]: row[5] for row in described[1] if row[5]}
        assert (places["grad_output(cpu)"], places["grad_inputs(cpu)"]) == ("cpu", "cpu")
        assert places["grad_inputs"] != "cpu", op
        assert all(int(row[8]) > 0 for row in described[1] if row[5])


def test_the_golden_run_requires_grad_where_the_device_has_a_graph(shown: str) -> None:
    found = {op: made[0] for op, _, _, made in reversed(blocks(shown)) if "grad_" not in made[0][1][0][0]}
    for op, expected in (
        ("torch.Tensor.mean", ["True", "", "", "True"]),
        ("torch.Tensor.argmax", ["False", "", "False"]),
    ):
        described = found[op]
        assert [row[6] for row in described[1]][len(expected) :] == expected


def test_the_last_table_has_every_row_with_its_forward_id(shown: str) -> None:
    whole = [t for t in tables(shown) if t[0][: len(COMPARE_HEADER) + 1] == ["forward_id", *COMPARE_HEADER]]
    assert len(whole) == 1
    listed = [row[1] for row in whole[0][1]]
    single = [row[0] for *_, made in blocks(shown) for row in made[1][1]]
    assert listed == single
    ids = {row[0] for row in whole[0][1] if row[1] in ("torch.Tensor.div_ output", "torch.Tensor.div_ grad[1]")}
    assert len(ids) == 1, "forward and backward of a call have one number"


CANCELLING = """
torch.manual_seed(0)
x = 1000 * torch.randn(256, 2048, device="cuda")
with op_tools.OpAutoCompare():
    torch.nn.functional.linear(x, x)
"""


def test_what_is_right_but_not_allclose_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = run(CANCELLING, tmp_path)
    row = next(row for *_, made in blocks(out) for row in made[1][1] if row[0] == "torch.nn.functional.linear output")
    assert (row[1], row[-1]) == ("False", "right")
    assert re.fullmatch(
        r"Inconsistent dtypes: torch.float32 torch.float64; within rounding \(\d+% of its bound\)", row[6]
    )
    assert re.search(
        r"1 comparisons?, 0 wrong; .*\n +1 not allclose but within rounding \(OP_AUTOCOMPARE_STANDARD=seed ", out
    )
    assert not list(tmp_path.rglob("*.pth"))

    out = run(CANCELLING, tmp_path, OP_AUTOCOMPARE_STANDARD="seed")
    folder = r"op_tools_results/op_capture_results/torch\.nn\.functional\.linear/\d+/autocompare/\d+/[\d-]+"
    sides = [f"{side}/{part}" for side in ("device", "cpu") for part in ("input", "output")]
    assert re.search("\n".join(rf"{folder}/{side}\.pth saved" for side in sides), out)
    assert "within rounding" not in out


# -- offline ------------------------------------------------------------------------------------------

CAPTURE = """
x = torch.randn(12, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
y = torch.randn(3, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
with op_tools.OpCapture(), torch.autocast("cuda", enabled=False):
    torch.nn.functional.normalize(x, p=2.0, dim=1, eps=1e-12, out=None).sum().backward()
    torch.nn.functional.linear(x.detach(), y, None).sum().backward()
"""
NORMALIZE = (
    "inputs inputs~p inputs~dim inputs~eps inputs~out outputs inputs(cpu) inputs(cpu)~p inputs(cpu)~dim "
    "inputs(cpu)~eps inputs(cpu)~out outputs(cpu)"
)


def test_offline_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    run(CAPTURE, tmp_path)
    folder = tmp_path / "op_tools_results/op_capture_results"
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "full")
    assert run_from_data([f"{folder}/", "--acc_check", "--run_times", "1"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("ditorch.framework: ")
    assert lines[1].startswith(str(folder))
    assert lines[2:4] == ["", ""]
    found = {(op, "grad" in names(made[0][1], op)): (cast, where, made) for op, cast, where, made in blocks(out)}
    op = "torch.nn.functional.normalize"
    for backward, rows, compared in ((False, NORMALIZE, "input output"), (True, ONE, "grad")):
        cast, where, made = found[(op, backward)]
        assert cast == "bfloat16"
        assert re.match(r"\S+replay/captured\.py:\d+ run_forward: self\.result = self\.function\(", where)
        assert made[0][0] == ([*HEADER, "value"] if not backward else HEADER)
        assert names(made[0][1], op) == rows
        assert made[1][0][: len(COMPARE_HEADER)] == COMPARE_HEADER
        assert names(made[1][1], op) == compared
        first = made[1][1][0]
        assert first[4] == "0.001000000"
        assert first[6].startswith("Inconsistent dtypes: torch.bfloat16 torch.float64")
    devices = {row[0].removeprefix(f"{op} "): row[5] for row in found[(op, True)][2][0][1]}
    assert devices["grad_output(cpu)"] == devices["grad_inputs(cpu)"] == "cpu" != devices["grad_inputs"]
    op = "torch.nn.functional.linear"
    assert names(found[(op, False)][2][1][1], op) == "input[0] input[1] input[2] output"
    assert names(found[(op, True)][2][0][1], op) == BOTH
    assert names(found[(op, True)][2][1][1], op) == "grad[0] grad[1]"
    between = out.split(f"{op} forward_id: ")[1].splitlines()
    assert between[-1] == "", "an empty line before the backward pass"
    assert between[-2].startswith("+-"), "and not more"
