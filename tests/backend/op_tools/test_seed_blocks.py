"""The documented output, block by block: its lines, their order, columns, rows and blank lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ditorch
import op_tools
from op_tools.cli import run_from_data
from op_tools.replay.captured import CapturedOp

from .test_seeds import FEATURES, cells, run, tables

CAPTURE_HEADER = "| name device dtype numel shape stride requires_grad layout data_ptr"
HEADER = "| name shape stride numel dtype device requires_grad layout data_ptr"
CAST_HEADER = "| name target action config"


def outline(text: str) -> list[str]:
    """The lines of a text without what varies: numbers, places, dates, the cells of rows, the width of tables."""
    lines = text.splitlines()
    found = []
    for number, line in enumerate(lines):
        if line.startswith("+"):
            line = "+"
        elif line.startswith("|"):
            of_header = not lines[number - 2].startswith("|") if number > 1 else True
            of_header = of_header and lines[number - 1].startswith("+")
            line = "| " + (" ".join(cells(line)) if of_header else cells(line)[0])
        line = re.sub(r"\S+\.py:\d+ \S+: .*", "SITE", line)
        line = re.sub(r"\d{4}-\d\d-\d\d-\d\d-\d\d-\d\d", "DATE", line)
        found.append(re.sub(r"(?<=[/:])\d+(?=/|$)|(?<=forward_id: )\d+", "N", line))
    return found


def table(header: str, *rows: str) -> list[str]:
    return ["+", header, "+", *[f"| {row}" for row in rows], "+"]


# -- OpCapture ----------------------------------------------------------------------------------------


def captured(op: str, *rows: str, value: bool = False) -> list[str]:
    path = f"op_tools_results/op_capture_results/{op}/N/N/DATE"
    return [
        f"apply OpCaptureHook on {op}",
        f"{path}/input.pth saved",
        f"{path}/output.pth saved",
        f"{op}    forward_id:N/DATE    SITE",
        *table(CAPTURE_HEADER + " value" * value, *[f"{op} {row}" for row in rows]),
        *[""] * 4,
    ]


def captured_gradients(op: str) -> list[str]:
    path = f"op_tools_results/op_capture_results/{op}/N/N/DATE"
    return [
        f"{path}/grad_inputs.pth saved",
        f"{path}/grad_outputs.pth saved",
        f"{op} forward_id:N/DATE",
        *table(CAPTURE_HEADER, f"{op} grad_output", f"{op} grad_inputs"),
        *[""] * 4,
    ]


def test_capture(tmp_path: Path) -> None:
    code = """
variance, weight = torch.rand(1, 8, 1, device="cuda"), torch.ones(1, 8, 4, device="cuda", requires_grad=True)
with op_tools.OpCapture():
    weight.mul(torch.rsqrt(variance.add(1e-05)))
"""
    expected = [
        *captured("torch.Tensor.add", "inputs[0]", "inputs[1]", "outputs", value=True),
        *captured("torch.rsqrt", "inputs", "outputs"),
        *captured("torch.Tensor.mul", "inputs[0]", "inputs[1]", "outputs"),
    ]
    assert outline(run(code, tmp_path))[: len(expected)] == expected


def test_capture_of_one_operator_names_the_others_in_the_order_of_the_calls(tmp_path: Path) -> None:
    code = """
e = torch.rand(10, 20, device="cuda", requires_grad=True)
with op_tools.OpCapture():
    for _ in range(2):
        sorted, indices = e.mul(2).div(3).sort()
        sorted[2:4].sum().backward()
"""
    out = run(code, tmp_path, OP_CAPTURE_LIST="torch.Tensor.sort", OP_CAPTURE_WRITERS="1")
    once = [
        "skip OpCaptureHook on torch.Tensor.mul",
        "skip OpCaptureHook on torch.Tensor.div",
        *captured("torch.Tensor.sort", "inputs", "outputs [0][0]", "outputs [0][1]"),
        "skip OpCaptureHook on torch.Tensor.__getitem__",
        "skip OpCaptureHook on torch.Tensor.sum",
        *captured_gradients("torch.Tensor.sort"),
    ]
    assert outline(out)[: 2 * len(once)] == once * 2


def test_capture_of_all_but_some_operators(tmp_path: Path) -> None:
    code = """
a = torch.rand(3, 4, device="cuda")
with op_tools.OpCapture():
    a.to(torch.float16).mul(2).add(1).sub(1).div(3).sort()[0].sum()
"""
    out = run(code, tmp_path, OP_CAPTURE_DISABLE_LIST="torch.Tensor.add,torch.Tensor.sub")
    said = [line for line in out.splitlines() if line.startswith(("apply", "skip", "op_tools_results"))]
    assert [re.sub(r".*/(\S+)/\d+/\d+/\S+/(\w+\.pth)", r"\1 \2", line) for line in said if "getitem" not in line] == [
        line
        for op in ("to", "mul", "add", "sub", "div", "sort", "sum")
        for line in (
            [f"skip OpCaptureHook on torch.Tensor.{op}"]
            if op in ("add", "sub")
            else [
                f"apply OpCaptureHook on torch.Tensor.{op}",
                f"torch.Tensor.{op} input.pth saved",
                f"torch.Tensor.{op} output.pth saved",
            ]
        )
    ]


# -- OpTimeMeasure ------------------------------------------------------------------------------------


def timed(op: str, *rows: str, value: bool = False) -> list[str]:
    return [
        *["", "", "", "SITE"],
        *table(HEADER + " value" * value, *[f"{op} {row}" for row in rows]),
        *table("| name forward_id forward_elasped unit", op),
        *["", "", ""],
    ]


def timed_backward(op: str, *rows: str) -> list[str]:
    return [
        *table(HEADER, *[f"{op} {row}" for row in rows]),
        *table("| name forward_id backward_elasped unit", op),
    ]


def test_time_measure(tmp_path: Path) -> None:
    code = """
x, cos = torch.rand(1, 6, 8, 4, device="cuda", requires_grad=True), torch.rand(6, 1, 4, device="cuda")
with op_tools.OpTimeMeasure():
    x.mul(cos).sub(x.detach()).unsqueeze(0).sum().backward()
"""
    binary = ("inputs[0]", "inputs[1]", "outputs")
    gradients = ("grad_outputs [0][0]", "grad_inputs [0][0]")
    expected = [
        *timed("torch.Tensor.mul", *binary),
        *timed("torch.Tensor.detach", "inputs", "outputs"),
        *timed("torch.Tensor.sub", *binary),
        *timed("torch.Tensor.unsqueeze", *binary, value=True),
        *timed("torch.Tensor.sum", "inputs", "outputs"),
        *timed_backward("torch.Tensor.sum", *gradients),
        *timed_backward("torch.Tensor.unsqueeze", *gradients),
        *timed_backward("torch.Tensor.sub", *gradients),
        *timed_backward("torch.Tensor.mul", *gradients),
    ]
    found = outline(run(code, tmp_path))
    assert found[: len(expected)] == expected
    assert found[len(expected) + 1] == "| name forward_id forward_elasped backward_elasped unit"


def test_time_measure_names_other_operators_in_the_order_of_the_calls(tmp_path: Path) -> None:
    code = """
x = torch.rand(3, device="cuda")
with op_tools.OpTimeMeasure():
    x.mul(2).sub(1).add(1)
"""
    found = outline(run(code, tmp_path, OP_TIME_MEASURE_LIST="torch.Tensor.sub"))
    expected = timed("torch.Tensor.sub", "inputs[0]", "inputs[1]", "outputs", value=True)
    assert found[0] == "skip OpTimeMeasureHook on torch.Tensor.mul"
    assert found[1 : 1 + len(expected)] == expected
    assert found[1 + len(expected)] == "skip OpTimeMeasureHook on torch.Tensor.add"


def test_offline_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("OP_TOOLS_CONSOLE")
    folder = tmp_path / "op_capture_result/torch.Tensor.div/2278281/5"
    save(folder, "torch.Tensor.div", torch.ones(3, requires_grad=True), 3)
    assert run_from_data([str(folder), "--run_times", "3", "--sync_time_measure"]) == 0
    op, gradients = "torch.Tensor.div", ("grad_outputs [0][0]", "grad_inputs [0][0]")
    once = [
        *timed(op, "inputs[0]", "inputs[1]", "outputs", value=True),
        *timed_backward(op, *gradients),
    ]
    times = table("| name forward_id forward_elasped backward_elasped unit", op, op, op)
    found = outline(capsys.readouterr().out)
    found = found[found[0].startswith("ditorch.framework") :]
    assert found[0].endswith("/torch.Tensor.div/N/N")
    assert found[1 : 3 * len(once) + len(times)] == [*once * 3, *times][1:]
    assert found[3 * len(once) + len(times)].startswith("op elasped info saved to ")


# -- OpFallback ---------------------------------------------------------------------------------------


def fallen_back(op: str, inputs: list[str], value: bool = False) -> list[str]:
    shown = [
        f"{op} {what}({side}){row}"
        for what, rows in (("input", inputs), ("output", [""]))
        for side in ("device", "cpu")
        for row in rows
    ]
    return [
        *["", "", ""],
        f"{op}    forward_id: N",
        "SITE",
        *table(HEADER + " value" * value, *shown),
        *["", "", ""],
    ]


def test_fallback(tmp_path: Path) -> None:
    code = """
params = torch.rand(8, 4, device="cuda", dtype=torch.bfloat16, requires_grad=True)
with op_tools.OpFallback():
    params.to(dtype=torch.float64).std()
    torch.exp(params.detach()[:1, 0]).item()
    params.max().int().float()
    params.cpu()
"""
    out = run(code, tmp_path)
    found = outline(out)
    expected = [
        *fallen_back("torch.Tensor.to", ["", " dtype"], value=True),
        *fallen_back("torch.Tensor.std", [""]),
        *fallen_back("torch.Tensor.detach", [""]),
        *fallen_back("torch.Tensor.__getitem__", ["[0]", " [1][0]", " [1][1]"], value=True),
        *fallen_back("torch.exp", [""]),
        *fallen_back("torch.Tensor.item", [""], value=True),
        *fallen_back("torch.Tensor.max", [""]),
        *fallen_back("torch.Tensor.int", [""]),
        *fallen_back("torch.Tensor.float", [""]),
    ]
    assert found[: len(expected)] == expected
    assert found[len(expected)] == "OpFallback summary", "a move to another device is no operator"
    converted = tables(out)[0][1]
    assert [(row[4], row[5] == "cpu") for row in converted if row[4]] == [
        ("bfloat16", False),
        ("bfloat16", True),
        ("float64", False),
        ("float64", True),
    ]
    assert all(int(row[8]) for _, rows in tables(out)[:9] for row in rows if row[8]), "an address of a copy is missing"


def test_fallback_only_some(tmp_path: Path) -> None:
    code = """
x = torch.rand(2, 3, device="cuda")
with op_tools.OpFallback():
    x.float().add(1).div(2).unbind()
    torch.nn.functional.linear(x, x, None).sub(1).max()
"""
    found = outline(run(code, tmp_path, OP_FALLBACK_LIST="torch.nn.functional.linear"))
    assert found[: found.index("OpFallback summary")] == [
        *[f"skip OpFallbackHook on torch.Tensor.{op}" for op in ("float", "add", "div", "unbind")],
        *fallen_back("torch.nn.functional.linear", ["[0]", "[1]", "[2]"], value=True),
        *[f"skip OpFallbackHook on torch.Tensor.{op}" for op in ("sub", "max")],
    ]


@pytest.mark.parametrize(
    "convert",
    [
        lambda x, like: x.to(torch.float16),
        lambda x, like: x.to(dtype=torch.float64),
        lambda x, like: x.to(like),
        lambda x, like: x.to(x.device, torch.float16),
        lambda x, like: x.type(torch.bfloat16),
        lambda x, like: x.type_as(like),
        lambda x, like: x.half(),
        lambda x, like: x.to(torch.float32),
    ],
)
def test_conversions_of_the_dtype_fall_back(device: str, convert: Any) -> None:
    x, like = torch.rand(3, device=device), torch.rand(3, device=device).half()
    expected = convert(x, like)
    with op_tools.OpFallback() as tool:
        result = convert(x, like)
    assert sum(tool.calls.values()) == 1
    assert result.device == x.device
    assert torch.equal(result, expected)


def test_moves_between_devices_do_not_fall_back(device: str) -> None:
    x = torch.rand(3, device=device)
    with op_tools.OpFallback() as tool:
        moved = [x.cpu(), x.to("cpu"), x.to("cpu", torch.float64), x.cuda(), x.to(device), x.type("torch.FloatTensor")]
        assert x.type().endswith("FloatTensor")
    assert not tool.calls
    assert [t.device.type for t in moved].count("cpu") == 4


def test_the_name_of_a_type_is_not_compared(device: str) -> None:
    with op_tools.OpAutoCompare() as compared:
        torch.ones(3, device=device).type()
    assert not compared.findings()


def test_fallback_shows_what_the_cpu_was_given(tmp_path: Path) -> None:
    code = """
with op_tools.OpFallback():
    torch.randn(2, device="cuda").to(torch.device("cuda"), torch.float16)
"""
    by_name = {row[0]: row for _, rows in tables(run(code, tmp_path)) for row in rows}
    assert by_name["torch.randn input(device) device"][-1] != "cpu"
    assert by_name["torch.randn input(cpu) device"][-1] == "cpu"
    assert by_name["torch.Tensor.to input(cpu)[1]"][-1] == "cpu"


def test_fallback_names_dtypes_that_the_cpu_cannot_compute_in(tmp_path: Path) -> None:
    code = """
x = torch.rand(4, 3, device="cuda")
loss = lambda x: torch.nn.functional.multi_margin_loss(x, torch.zeros(4, dtype=torch.int64, device="cuda"))
with op_tools.OpFallback(ops=["torch.nn.functional.multi_margin_loss"]):
    loss(x.half())
    loss(x)
"""
    out = run(code, tmp_path)
    assert out.count("+\ndtype_convert_back_dict:{torch.float32: torch.float16}\n\n\n\n") == 1
    rows = {row[0].removeprefix("torch.nn.functional.multi_margin_loss "): row[4] for row in tables(out)[0][1]}
    assert rows["input(device)[0]"] == rows["output(device)"] == "float16"
    assert rows["input(cpu)[0]"] == rows["output(cpu)"] == "float32"


WARNING = "Warning: Device do not support double dtype now, dtype cast repalce with float.\n"


def test_a_device_without_float64_gets_float32(tmp_path: Path) -> None:
    if ditorch.backend.name != "soft":
        pytest.skip("only the software accelerator can be made to fail on purpose")
    code = """
from ditorch.soft import faults
x = torch.rand(4, device="cuda")
with faults.plant("*: no_float64"):
    with op_tools.OpFallback():
        print(x.to(torch.float64).dtype, x.double().sum().dtype)
    os.environ["OP_DTYPE_CAST_DICT"] = "torch.float16->torch.float64"
    with op_tools.OpDtypeCast():
        print(x.half().add(1).dtype)
    print(x)
"""
    out = run(code, tmp_path)
    fallback, cast = out.split("OpFallback summary")
    assert fallback.count(WARNING) == cast.count(WARNING) == 1
    assert "\n\n\n" + WARNING in fallback
    assert "torch.float32 torch.float32\n" in fallback
    assert "torch.float16\n" in cast
    assert "\ntensor([" in cast, "a tensor cannot be printed"
    actions = [row[:3] for _, rows in tables(cast) for row in rows]
    assert ["torch.Tensor.add", "input[0]", "torch.float16 -> torch.float32"] in actions


# -- OpDtypeCast --------------------------------------------------------------------------------------


def cast(op: str, *targets: str) -> list[str]:
    return table(CAST_HEADER, *[op for _ in targets])


@pytest.mark.parametrize("tools", [("OpDtypeCast", "OpFallback"), ("OpFallback", "OpDtypeCast")])
def test_cast_and_fallback(tmp_path: Path, tools: tuple[str, str]) -> None:
    code = f"""
x, w = (torch.rand(4, 4, device="cuda", dtype=torch.bfloat16) for _ in range(2))
with op_tools.{tools[0]}(), op_tools.{tools[1]}():
    torch.nn.functional.silu(torch.nn.functional.linear(x, w, None), inplace=False)
"""
    out = run(code, tmp_path)
    linear, silu = "torch.nn.functional.linear", "torch.nn.functional.silu"
    expected = [
        f"apply OpDtypeCastHook on {linear}",
        *fallen_back(linear, ["[0]", "[1]", "[2]"], value=True),
        *cast(linear, "input[0]", "input[1]", "output[0]"),
        f"apply OpDtypeCastHook on {silu}",
        *fallen_back(silu, ["", " inplace"], value=True),
        *cast(silu, "input[0]", "output[0]"),
    ]
    assert outline(out)[: len(expected)] == expected
    shown = [t for t in tables(out) if "dtype" in t[0]]
    assert {row[4] for _, rows in shown for row in rows} == {"float32", ""}, "the fallback gets what the cast made"


# -- apply_feature ------------------------------------------------------------------------------------


def test_apply_feature(tmp_path: Path) -> None:
    parts = re.split(r"=== \w+\n", run(FEATURES, tmp_path))
    fallback, compared, capture, casts = (outline(part) for part in parts[:4])
    enabled = "hook enable because a.dtype is float16"
    assert fallback == [
        *[enabled, "apply OpFallbackHook on torch.add"],
        *fallen_back("torch.add", ["[0]", "[1]"]),
    ]
    names = [f"torch.sub {row}" for row in ("inputs[0]", "inputs[1]", "outputs")]
    on_cpu = [f"torch.sub {row}" for row in ("inputs(cpu)[0]", "inputs(cpu)[1]", "outputs(cpu)")]
    assert compared[:2] == ["hook enable because a.dim() is 2", "apply OpAutoCompareHook on torch.sub"]
    assert compared[2:5] == ["", "", ""]
    assert compared[5].startswith("torch.sub forward_id: ")
    assert compared[6:17] == ["SITE", *table(HEADER, *names, *on_cpu)]
    assert compared[-2:] == ["hook disable", "skip OpAutoCompareHook on torch.sub"]
    assert capture == [enabled, *captured("torch.mul", "inputs[0]", "inputs[1]", "outputs")]
    assert casts == ["hook enable because a.dim() is 2", *cast("torch.div", "input[0]", "input[1]", "output[0]")]


@pytest.mark.parametrize(
    ("written", "call"),
    [
        ("torch.functional.norm", lambda x: torch.norm(x)),
        ("torch.conv2d", lambda x: torch.nn.functional.conv2d(x[None, None], x[None, None])),
    ],
)
def test_apply_feature_knows_functions_by_all_their_names(device: str, written: str, call: Any) -> None:
    with op_tools.apply_feature(written, "dump_op_args") as handle:
        call(torch.rand(4, 4, device=device))
    assert sum(handle.tool.calls.values()) == 1


# -- captures of ditorch 2024 -------------------------------------------------------------------------


def save(folder: Path, op: str, *args: Any, **kwargs: Any) -> None:
    """Save a call as ditorch did: every part as the arguments of the function that saved it."""
    folder.mkdir(parents=True, exist_ok=True)

    def part(name: str, *args: Any, **kwargs: Any) -> None:
        saved = {"name": op, "args": args, "kwargs": kwargs, "identifier": f"{folder.name}/{name}"}
        torch.save(saved, folder / f"{name}.pth")

    function: Any = torch
    for step in op.split(".")[1:]:
        function = getattr(function, step)
    part("input", *args, **kwargs)
    result = function(*args, **kwargs)
    part("output", result)
    first = result[0] if isinstance(result, tuple) else result
    if isinstance(first, torch.Tensor) and first.grad_fn is not None:

        def saved(to_inputs: Any, of_outputs: Any) -> None:
            part("grad_inputs", *to_inputs)
            part("grad_outputs", *of_outputs)

        first.grad_fn.register_hook(saved)
        first.float().pow(2).sum().backward()


def test_captures_of_ditorch(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OP_TOOLS_CONSOLE")
    x = torch.rand(3, 4, device=device, requires_grad=True)
    weight = torch.nn.Parameter(torch.rand(5, 4, device=device))
    labels = torch.tensor([0, 1, 2], device=device)
    old, new = tmp_path / "op_capture_result", tmp_path / "op_tools_results/op_capture_results"
    save(old / "0/2024-08-06--11-46/torch.Tensor.to/29", "torch.Tensor.to", x, dtype=torch.float64)
    save(old / "0/2024-08-06--11-46/torch.Tensor.sort/32", "torch.Tensor.sort", x)
    save(old / "torch.Tensor.div/2278281/5", "torch.Tensor.div", x * 1, 3.0)
    save(old / "torch.Tensor.__getitem__/2278281/6", "torch.Tensor.__getitem__", x, (slice(0, 2), ...))
    save(old / "torch.functional.norm/93/device", "torch.functional.norm", x)
    save(old / "torch.functional.norm/93/cpu", "torch.functional.norm", x.detach().cpu())
    for op, *args in (("linear", x[None], weight, None), ("cross_entropy", x, labels)):
        name = f"torch.nn.functional.{op}"
        save(new / name / "283699/161/2024-10-09-11-42-15", name, *args)
    code = run_from_data([str(tmp_path), "--acc_check"])
    out = capsys.readouterr().out
    assert code == 0, out[-2000:]
    assert out.count(": bit-identical\n") == 7
    assert "torch.nn.functional.linear grad" in out


def test_a_pair_of_arguments_of_the_first_version(tmp_path: Path) -> None:
    saved = {"name": "torch.add", "args": ((torch.ones(2), 1), {"alpha": 2}), "kwargs": {}, "identifier": "3/input"}
    torch.save(saved, tmp_path / "input.pth")
    op = CapturedOp(tmp_path, "cpu")
    op.prepare()
    assert op.run_forward().tolist() == [3, 3]
