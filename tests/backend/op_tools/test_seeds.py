"""The documented snippets and commands run as written, and print what is documented."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from op_tools.tools import features
from op_tools.watch import intercept

ROOT = Path(__file__).resolve().parents[3]

CAPTURE_HEADER = ["name", "device", "dtype", "numel", "shape", "stride", "requires_grad", "layout", "data_ptr"]
HEADER = ["name", "shape", "stride", "numel", "dtype", "device", "requires_grad", "layout", "data_ptr"]
COMPARE_HEADER = ["name", "allclose", "max_abs_diff", "max_relative_diff", "atol", "rtol", "error_info"]

PRELUDE = """
import os
import torch
import ditorch
import op_tools

def code_snippet():
    a = torch.randn(10, 20, device="cuda", requires_grad=True)
    b = a.add(1e-5)
    c = torch.rsqrt(b.abs())
    d = torch.nn.functional.linear(c, torch.randn(4, 20, device="cuda", dtype=c.dtype), None)
    e = b.mul(2).div(3)
    sorted, indices = e.sort()  # return torch.return_type.sort
    f = d.mean([-1], keepdim=True).argmax(dim=-1)
    loss = sorted[2:4].sum() + d.sub(1).sum()
    loss.backward()

code_snippet_to_capture = code_snippet_to_autocompare = code_snippet
code_snippet_to_time_measure = code_snippet_op_to_be_fallbacked = code_snippet

def f():
    a = torch.randn(4, 5, device="cuda", dtype=torch.float16, requires_grad=True)
    b = a.add(a).sub(1)
    torch.nn.functional.silu(b).sort()[0].sum().backward()
"""


def run(code: str, folder: Path, **environment: str) -> str:
    """Run a script in a folder of its own, with the defaults of the tools."""
    script = folder / "snippet.py"
    script.write_text(PRELUDE + code)
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        for variable in list(os.environ):
            if variable.startswith(("OP_", "AUTOCOMPARE")):
                patch.delenv(variable)
        for variable, value in environment.items():
            patch.setenv(variable, value)
        for variable in ("OP_DTYPE_CAST_DICT", "OP_DTYPE_CAST_LIST", "OP_DTYPE_CAST_DISABLE_LIST"):
            if variable not in environment:
                patch.setenv(variable, "")  # undone afterwards, also where the snippet sets it
        patch.setattr(intercept, "ids", itertools.count(1))
        try:
            runpy.run_path(str(script))
            printed.write("=== exit\n")
        finally:
            features._remove_all()
    return printed.getvalue()


def command(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OP_", "AUTOCOMPARE"))}
    env |= {"OMP_NUM_THREADS": "2", "OP_TOOLS_RESULTS_DIR": str(folder / "op_tools_results")}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)


def tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """Headers and rows of the boxed tables in a text."""
    found = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if re.fullmatch(r"\+[-+]+\+", line) and number + 2 < len(lines) and lines[number + 2] == line:
            header = cells(lines[number + 1])
            rows = []
            for row in lines[number + 3 :]:
                if not row.startswith("|"):
                    break
                assert len(row) == len(line), "a row is not as wide as its rule"
                rows.append(cells(row))
            if header and rows:  # the rule below a header is no table of its own
                found.append((header, rows))
    return found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []


def snippets(tool: str, code: str, name: str, end: str) -> list[str]:
    """The two documented ways to use a tool."""
    return [
        f"with op_tools.{tool}():\n    {code}()\n",
        f"{name} = op_tools.{tool}()\n{name}.start()\n{code}()\n{name}.{end}()\n",
    ]


# -- OpCapture ----------------------------------------------------------------------------------------

CAPTURE = snippets("OpCapture", "code_snippet_to_capture", "capture", "stop")


@pytest.mark.parametrize("snippet", CAPTURE, ids=["with", "start_stop"])
def test_capture(tmp_path: Path, snippet: str) -> None:
    out = run(snippet, tmp_path)
    block = re.search(
        r"apply OpCaptureHook on torch\.Tensor\.add\n"
        r"(op_tools_results/op_capture_results/torch\.Tensor\.add/\d+/(\d+)/([\d-]+)/)input\.pth saved\n"
        r"\1output\.pth saved\n"
        r"torch\.Tensor\.add    forward_id:\2/\3    \S+snippet\.py:\d+ code_snippet: b = a\.add\(1e-5\)\n\+",
        out,
    )
    assert block, out[:2000]
    header, rows = next(t for t in tables(out) if t[1][0][0] == "torch.Tensor.add inputs[0]")
    assert header == [*CAPTURE_HEADER, "value"]
    assert [row[0] for row in rows] == [
        "torch.Tensor.add inputs[0]",
        "torch.Tensor.add inputs[1]",
        "torch.Tensor.add outputs",
    ]
    assert rows[0][2:8] == ["float32", "200", "(10, 20)", "(20, 1)", "True", "torch.strided"]
    assert rows[1][-1] == "1e-05"
    header, rows = next(t for t in tables(out) if t[1][0][0] == "torch.rsqrt inputs")
    assert header == CAPTURE_HEADER, "no value column where all arguments are tensors"
    for name in ("input", "output", "grad_inputs", "grad_outputs"):
        path = next((tmp_path / "op_tools_results/op_capture_results/torch.rsqrt").rglob(f"{name}.pth"))
        assert torch.load(path, weights_only=True)
    assert list((tmp_path / "op_tools_results/op_capture_results/torch.rsqrt").rglob("*.json"))


def test_capture_only_sort(tmp_path: Path) -> None:
    out = run(CAPTURE[0], tmp_path, OP_CAPTURE_LIST="torch.Tensor.sort")
    assert "skip OpCaptureHook on torch.Tensor.mul\nskip OpCaptureHook on torch.Tensor.div\n" in out
    assert "skip OpCaptureHook on torch.Tensor.__getitem__" in out
    assert os.listdir(tmp_path / "op_tools_results/op_capture_results") == ["torch.Tensor.sort"]
    names = [row[0] for header, rows in tables(out) for row in rows if header[0] == "name"]
    assert names == [
        "torch.Tensor.sort inputs",
        "torch.Tensor.sort outputs [0][0]",
        "torch.Tensor.sort outputs [0][1]",
        "torch.Tensor.sort grad_output",
        "torch.Tensor.sort grad_inputs",
    ]
    assert re.search(r"/grad_inputs\.pth saved\n\S+/grad_outputs\.pth saved\ntorch\.Tensor\.sort forward_id:", out)


def test_capture_all_but_some(tmp_path: Path) -> None:
    out = run(CAPTURE[0], tmp_path, OP_CAPTURE_DISABLE_LIST="torch.Tensor.add,torch.Tensor.sub")
    assert "apply OpCaptureHook on torch.Tensor.mul" in out
    assert "skip OpCaptureHook on torch.Tensor.add" in out
    assert "skip OpCaptureHook on torch.Tensor.sub" in out
    assert "apply OpCaptureHook on torch.Tensor.add" not in out


# -- OpAutoCompare ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "snippet",
    snippets("OpAutoCompare", "code_snippet_to_autocompare", "autocompare", "stop"),
    ids=["with", "start_stop"],
)
def test_autocompare(tmp_path: Path, snippet: str) -> None:
    out = run(
        snippet,
        tmp_path,
        AUTOCOMPARE_ERROR_TOLERANCE_FLOAT16="1e-3,1e-4",
        AUTOCOMPARE_ERROR_TOLERANCE_BFLOAT16="1e-2,1e-3",
        AUTOCOMPARE_ERROR_TOLERANCE="1e-4,1e-5",
    )
    assert re.search(
        r"torch\.Tensor\.mul forward_id: \d+    cpu_dtype_cast_info\(from:to\): \{torch\.float32: torch\.float64\}\n"
        r"\S+snippet\.py:\d+ code_snippet: e = b\.mul\(2\)\.div\(3\)\n\+",
        out,
    )
    shown = tables(out)
    header, rows = next(t for t in shown if t[1][0][0] == "torch.Tensor.mul inputs[0]")
    assert header == [*HEADER, "value"]
    assert [row[0].removeprefix("torch.Tensor.mul ") for row in rows] == [
        "inputs[0]",
        "inputs[1]",
        "outputs",
        "inputs(cpu)[0]",
        "inputs(cpu)[1]",
        "outputs(cpu)",
    ]
    compared = [t for t in shown if t[0][: len(COMPARE_HEADER)] == COMPARE_HEADER]
    first = next(t for t in compared if t[1][0][0] == "torch.Tensor.mul input[0]")
    assert [row[0] for row in first[1]] == [
        "torch.Tensor.mul input[0]",
        "torch.Tensor.mul input[1]",
        "torch.Tensor.mul output",
    ]
    assert first[1][0][1:7] == [
        "True",
        "0.000000000",
        "0.000000000",
        "0.000100000",
        "0.000010000",
        "Inconsistent dtypes: torch.float32 torch.float64",
    ]
    assert any([row[0] for row in t[1]] == ["torch.Tensor.mul grad[0]", "torch.Tensor.mul grad[1]"] for t in compared)
    last = [t for t in shown if t[0][: len(COMPARE_HEADER) + 1] == ["forward_id", *COMPARE_HEADER]]
    assert len(last) == 1, "one table of everything at the end"


# -- OpTimeMeasure ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "snippet",
    snippets("OpTimeMeasure", "code_snippet_to_time_measure", "timemeasure", "end"),
    ids=["with", "start_end"],
)
def test_time_measure(tmp_path: Path, snippet: str) -> None:
    out = run(snippet, tmp_path)
    shown = tables(out)
    headers = [t[0] for t in shown]
    assert ["name", "forward_id", "forward_elasped", "unit"] in headers
    assert ["name", "forward_id", "backward_elasped", "unit"] in headers
    _, rows = next(t for t in shown if t[0][:2] == ["name", "forward_id"] and t[1][0][0] == "torch.Tensor.div")
    assert re.fullmatch(r"\d+\.\d{8}", rows[0][2])
    assert rows[0][3] == "ms"
    assert re.search(r"snippet\.py:\d+ code_snippet: b = a\.add\(1e-5\)\n\+", out)
    grads = [row[0] for t in shown for row in t[1] if "grad_" in row[0]]
    assert "torch.Tensor.sort grad_outputs [0][0]" in grads
    assert "torch.Tensor.sort grad_inputs [0][0]" in grads
    saved = re.search(
        r"op elasped info saved to (op_tools_results/op_time_measure_result/op_elasped_info_pid\d+_[\d-]+\.csv)", out
    )
    assert saved
    with (tmp_path / saved[1]).open() as handle:
        table = list(csv.reader(handle))
    assert table[0] == ["name", "forward_id", "forward_elasped", "backward_elasped", "unit"]
    assert sum(row[0] == "name" for row in table) == 1, "one header"
    by_name = {row[0]: row for row in table[1:]}
    assert float(by_name["torch.Tensor.sort"][2]) > 0
    assert float(by_name["torch.Tensor.sort"][3]) > 0


# -- OpFallback ---------------------------------------------------------------------------------------

FALLBACK = snippets("OpFallback", "code_snippet_op_to_be_fallbacked", "fallback", "end")


@pytest.mark.parametrize("snippet", FALLBACK, ids=["with", "start_end"])
def test_fallback(tmp_path: Path, snippet: str) -> None:
    out = run(snippet, tmp_path)
    assert re.search(r"torch\.rsqrt    forward_id: \d+\n\S+snippet\.py:\d+ code_snippet: c = torch", out)
    header, rows = next(t for t in tables(out) if t[1][0][0] == "torch.rsqrt input(device)")
    assert header == HEADER
    assert [row[0].removeprefix("torch.rsqrt ") for row in rows] == [
        "input(device)",
        "input(cpu)",
        "output(device)",
        "output(cpu)",
    ]
    assert [row[5] for row in rows][1::2] == ["cpu", "cpu"]
    assert all(int(row[8]) > 0 for row in rows), "addresses of both copies are shown"


def test_fallback_only_linear(tmp_path: Path) -> None:
    out = run(FALLBACK[0], tmp_path, OP_FALLBACK_LIST="torch.nn.functional.linear")
    assert "skip OpFallbackHook on torch.Tensor.add\n" in out
    assert "torch.nn.functional.linear    forward_id: " in out
    assert "torch.rsqrt    forward_id: " not in out


def test_fallback_all_but_linear(tmp_path: Path) -> None:
    out = run(FALLBACK[0], tmp_path, OP_FALLBACK_DISABLE_LIST="torch.nn.functional.linear")
    assert "skip OpFallbackHook on torch.nn.functional.linear\n" in out
    assert "torch.rsqrt    forward_id: " in out


# -- OpDtypeCast --------------------------------------------------------------------------------------

CAST = """
dtype_caster = op_tools.OpDtypeCast()
dtype_caster.start()
for i in range(3):
    f()
dtype_caster.stop()
print("=== usage3")
os.environ["OP_DTYPE_CAST_DISABLE_LIST"] = "torch.Tensor.add,torch.Tensor.sub"
dtype_caster.start()
f()
dtype_caster.stop()
print("=== usage4")
os.environ["OP_DTYPE_CAST_DISABLE_LIST"] = ""
os.environ["OP_DTYPE_CAST_LIST"] = "torch.Tensor.sort,torch.Tensor.add"  # only cast these op
os.environ["OP_DTYPE_CAST_DICT"] = "torch.half->torch.bfloat16"
dtype_caster.start()
f()
dtype_caster.stop()
"""


def test_dtype_cast(tmp_path: Path) -> None:
    config = "torch.float16->torch.float32,torch.bfloat16->torch.float32"
    out = run(CAST, tmp_path, OP_DTYPE_CAST_DICT=config)
    usage2, rest = out.split("=== usage3")
    usage3, usage4 = rest.split("=== usage4")
    header, rows = next(t for t in tables(usage2) if t[1][0][0] == "torch.nn.functional.silu")
    assert header == ["name", "target", "action", "config"]
    assert rows == [
        ["torch.nn.functional.silu", "input[0]", "torch.float16 -> torch.float32", config],
        ["torch.nn.functional.silu", "output[0]", "torch.float32 -> torch.float16", config],
    ]
    assert "apply OpDtypeCastHook on torch.nn.functional.silu" in usage2
    assert "skip OpDtypeCastHook on torch.Tensor.add" in usage3
    assert "apply OpDtypeCastHook on torch.Tensor.add" not in usage3
    assert {row[0] for t in tables(usage4) for row in t[1]} == {"torch.Tensor.sort", "torch.Tensor.add"}
    assert "torch.float16 -> torch.bfloat16" in usage4


def test_dtype_cast_usage1(tmp_path: Path) -> None:
    out = run("\nwith op_tools.OpDtypeCast():\n    f()\n", tmp_path)
    assert "apply OpDtypeCastHook on torch.Tensor.sub" in out


# -- apply_feature ------------------------------------------------------------------------------------

FEATURES = """
def custom_condition(a, b):
    if a.dtype == torch.float16:
        print("hook enable because a.dtype is float16")
        return True
    elif a.dim() == 2:
        print("hook enable because a.dim() is 2")
        return True
    else:
        print("hook disable")
        return False

x = torch.randn(2, 3, 4, dtype=torch.float16).cuda()
y = torch.randn(4, 2, dtype=torch.float).cuda()
z = torch.randn(2, 3, 4, dtype=torch.float).cuda()
op_tools.apply_feature("torch.add", feature="fallback", condition_func=custom_condition)
torch.add(x, x)
print("=== 2")
op_tools.apply_feature("torch.sub", feature="autocompare", condition_func=custom_condition)
torch.sub(y, y)
torch.sub(z, z)
print("=== 3")
op_tools.apply_feature("torch.mul", feature="op_capture", condition_func=custom_condition)
torch.mul(x, x)
print("=== 4")
op_tools.apply_feature("torch.div", feature="cast_dtype", condition_func=custom_condition)
os.environ["OP_DTYPE_CAST_DICT"] = "torch.float32->torch.float16"
torch.div(y, y)
print("=== end")
"""


def test_apply_feature(tmp_path: Path) -> None:
    out = run(FEATURES, tmp_path)
    one, two = out.split("=== 2\n")
    two, three = two.split("=== 3\n")
    three, four = three.split("=== 4\n")
    four, _ = four.split("=== end\n")
    assert one.startswith(
        "hook enable because a.dtype is float16\napply OpFallbackHook on torch.add\n\n\n\ntorch.add    forward_id: 1\n"
    )
    assert two.startswith(
        "hook enable because a.dim() is 2\napply OpAutoCompareHook on torch.sub\n\n\n\ntorch.sub forward_id: 2"
    )
    assert two.rstrip().endswith("hook disable\nskip OpAutoCompareHook on torch.sub")
    assert re.match(
        r"hook enable because a\.dtype is float16\napply OpCaptureHook on torch\.mul\n"
        r"op_tools_results/op_capture_results/torch\.mul/\d+/3/[\d-]+/input\.pth saved\n\S+/output\.pth saved\n",
        three,
    )
    (header, rows) = tables(four)[0]
    assert header == ["name", "target", "action", "config"]
    config = "torch.float32->torch.float16"
    assert rows == [
        ["torch.div", "input[0]", "torch.float32 -> torch.float16", config],
        ["torch.div", "input[1]", "torch.float32 -> torch.float16", config],
        ["torch.div", "output[0]", "torch.float16 -> torch.float32", config],
    ]


# -- offline ------------------------------------------------------------------------------------------


def test_offline_commands(tmp_path: Path) -> None:
    run(CAPTURE[0], tmp_path)
    folder = tmp_path / "op_tools_results/op_capture_results/torch.nn.functional.linear"
    done = command(["op_tools/run_op_from_data.py", f"{folder}/", "--acc_check", "--run_times", "1"], tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[0].startswith("ditorch.framework: ")
    assert lines[1].startswith(str(folder))
    assert lines[2].startswith("torch.nn.functional.linear forward_id: 1    cpu_dtype_cast_info(from:to): ")
    assert "replay/captured.py" in lines[3]
    assert "run_forward" in lines[3]
    assert any(t[0][: len(COMPARE_HEADER)] == COMPARE_HEADER for t in tables(done.stdout))
    assert "torch.nn.functional.linear grad" in done.stdout

    done = command(["op_tools/run_op_from_data.py", f"{folder}/", "--sync_time_measure", "--run_times", "3"], tmp_path)
    assert done.returncode == 0, done.stderr
    whole = next(t for t in tables(done.stdout) if "backward_elasped" in t[0] and "forward_elasped" in t[0])
    assert [row[:2] for row in whole[1]] == [["torch.nn.functional.linear", str(i)] for i in (1, 2, 3)]
    assert "op elasped info saved to " in done.stdout

    one = next(folder.rglob("input.pth")).parent
    done = command(
        ["op_tools/run_op_from_data.py", str(one), "--run_times", "3", "--only_run_forward", "--sync_time_measure"],
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "forward_elasped" in done.stdout
    assert not any(t[0] == ["name", "forward_id", "backward_elasped", "unit"] for t in tables(done.stdout))
