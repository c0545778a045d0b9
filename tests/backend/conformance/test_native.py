"""PyTorch's own kind of test files, from a checkout made up here: every outcome is counted, and none is lost."""

from __future__ import annotations

import collections
import csv
import io
import tarfile
from pathlib import Path

import pytest
import torch
from rich.console import Console

import ditorch
from ditorch.cli import make_parser
from ditorch.conformance import native
from ditorch.conformance.command import main
from ditorch.conformance.console import View

pytest.importorskip("expecttest", reason="PyTorch's test files need expecttest")

FILE = """
import os, time
import torch
from torch.testing._internal.common_device_type import dtypes, instantiate_device_type_tests
from torch.testing._internal.common_utils import TestCase, run_tests


class TestSmall(TestCase):
    def test_add(self, device):
        x = torch.ones(3, device=device)
        self.assertEqual((x + x).cpu(), torch.full((3,), 2.0))
        self.assertEqual(torch.device(device).type, "cuda")

    @dtypes(torch.float32, torch.int64)
    def test_typed(self, device, dtype):
        self.assertEqual(torch.arange(3, dtype=dtype, device=device).sum().item(), 3)

    def test_fails(self, device):
        self.assertEqual(torch.ones(1, device=device).item(), 2)

    def test_skips(self, device):
        self.skipTest("not today")

    def test_aborts(self, device):
        os.abort()

    def test_last(self, device):
        self.assertTrue(torch.cuda.is_available())


instantiate_device_type_tests(TestSmall, globals())
if __name__ == "__main__":
    run_tests()
"""


def checkout(folder: Path) -> Path:
    (folder / "test" / "nn").mkdir(parents=True)
    (folder / "test" / "test_small.py").write_text(FILE)
    (folder / "test" / "nn" / "test_inner.py").write_text("instantiate_device_type_tests(")
    (folder / "test" / "test_plain.py").write_text("def test_not_device_generic():\n    assert False\n")
    return folder


def test_only_device_generic_files_are_taken(tmp_path: Path) -> None:
    source = checkout(tmp_path)
    assert [file.name for file in native.find_files(source)] == ["test_inner.py", "test_small.py"]
    assert [file.name for file in native.find_files(source, "nn/*")] == ["test_inner.py"]
    with pytest.raises(ValueError, match=r"no device-generic test file that test_ops\.py matches"):
        native.find_files(source, "test_ops.py")
    with pytest.raises(ValueError, match="expected a checkout of PyTorch"):
        native.find_files(tmp_path / "nowhere")


@pytest.mark.slow
@pytest.mark.skipif(not ditorch.backend.shows_as_cuda, reason="PyTorch's test files ask for a cuda device")
def test_a_file_is_run_to_its_end(tmp_path: Path) -> None:
    source = checkout(tmp_path / "pytorch")
    run = native.NativeRun(source, ditorch.backend.name, tmp_path / "out", jobs=1, timeout=60)
    results = run.run(source / "test" / "test_small.py")
    outcomes = {result.name.removeprefix("TestSmallCUDA::"): result.outcome for result in results}
    assert outcomes == {
        "test_aborts_cuda": "failed",
        "test_add_cuda": "passed",
        "test_fails_cuda": "failed",
        "test_last_cuda": "passed",
        "test_skips_cuda": "skipped",
        "test_typed_cuda_float32": "passed",
        "test_typed_cuda_int64": "passed",
    }
    aborted = next(result for result in results if "aborts" in result.name)
    assert "SIGABRT" in aborted.message
    summaries = native.write_csv(tmp_path / "out", results)
    assert summaries == [native.FileSummary("test_small.py", 7, 4, 2, 1, 0)]
    rows = list(csv.DictReader((tmp_path / "out" / "native_cases.csv").open()))
    assert len(rows) == 7
    assert (tmp_path / "out" / "native_files.csv").read_text().splitlines()[1] == "test_small.py,7,4,2,1,0"


@pytest.mark.slow
@pytest.mark.skipif(not ditorch.backend.shows_as_cuda, reason="PyTorch's test files ask for a cuda device")
def test_the_command_packs_what_came_out(tmp_path: Path) -> None:
    source, out, text = checkout(tmp_path / "pytorch"), tmp_path / "out", io.StringIO()
    arguments = ["--device", ditorch.backend.name, "--pytorch-src", str(source), "--files", "test_small.py"]
    options = make_parser().parse_args(["conformance", *arguments, "--jobs", "1", "--out", str(out)])
    assert main(options, View(Console(file=text, width=300))) == 1, text.getvalue()
    packed = out / "native" / f"{ditorch.backend.name}_summary_of_pytorch_test_case_testing.csv.tar"
    assert f"{packed} is the summary to hand on" in text.getvalue()
    with tarfile.open(packed) as tar:
        content = tar.extractfile(packed.name.removesuffix(".tar"))
        assert content is not None
        rows = list(csv.DictReader(io.TextIOWrapper(content, encoding="utf-8")))
    assert collections.Counter(row["result"] for row in rows) == {"passed": 4, "failed": 2, "skipped": 1}
    assert {(row["name"], row["dtype"]) for row in rows} >= {("test_typed", "float32"), ("test_typed", "int64")}
    assert {(row["device_name"], row["torch"], row["run"]) for row in rows} == {
        (torch.cuda.get_device_name(), torch.__version__, "complete")
    }


def test_what_never_ran_is_counted() -> None:
    results = [
        native.TestResult("a.py", "T::one", native.PASSED),
        native.TestResult("a.py", "T::two", native.NEVER_RUN),
    ]
    assert native.FileSummary.of("a.py", results) == native.FileSummary("a.py", 2, 1, 0, 0, 1)


def test_the_xml_is_read(tmp_path: Path) -> None:
    (tmp_path / "r.xml").write_text(
        '<testsuites><testsuite><testcase classname="test_small.TestSmallCUDA" name="test_a" time="0.5"/>'
        '<testcase classname="test_small.TestSmallCUDA" name="test_b"><failure message="no">trace</failure></testcase>'
        '<testcase classname="test_small.TestSmallCUDA" name="test_c"><error message="setup"/></testcase>'
        '<testcase classname="test_small.TestSmallCUDA" name="test_d"><skipped message="why"/></testcase>'
        '<testcase classname="test_small" name="test_plain"/></testsuite></testsuites>'
    )
    found = native.read_xml(tmp_path / "r.xml", "test_small.py")
    assert [(r.name, r.outcome, r.seconds) for r in found] == [
        ("TestSmallCUDA::test_a", "passed", 0.5),
        ("TestSmallCUDA::test_b", "failed", 0.0),
        ("TestSmallCUDA::test_c", "failed", 0.0),
        ("TestSmallCUDA::test_d", "skipped", 0.0),
        ("test_plain", "passed", 0.0),
    ]
    assert found[1].message == "no\ntrace"
    assert found[3].message == "why"
