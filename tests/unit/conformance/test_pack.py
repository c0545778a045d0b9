"""The packed summary: what its rows say, from a run, from a page and from native tests; the file itself."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ditorch.cli import main as ditorch
from ditorch.cli import make_parser
from ditorch.conformance import native, pack, store
from ditorch.conformance.cases import CRASH, ERROR, NOT_COMPARABLE, PASS, WRONG, Case, Result
from ditorch.conformance.command import main
from ditorch.conformance.console import View
from ditorch.conformance.ledger import Ledger, parse
from ditorch.conformance.page import page, read
from ditorch.conformance.summary import Summary
from ditorch_common.page import Table

DOCS = Path(__file__).parents[3] / "docs" / "conformance"
FILE = "soft_summary_of_pytorch_test_case_testing.csv.tar"
ABOUT = {
    "backend": "soft",
    "device": "soft:0",
    "device_name": "software accelerator",
    "framework": "ditorch.soft:0.1",
    "torch": "2.13.0",
    "ditorch": "0.1.0",
    "date": "2026-11-15 09:58 UTC",
    "samples": None,
    "complete": True,
}
STATUSES = {
    "ops/add/float32/forward": PASS,
    "ops/add/float32/backward": WRONG,
    "ops/bmm/float32/forward": PASS,
    "ops/mul/float32/forward": CRASH,
    "ops/mul/int8/forward": ERROR,
    "ops/rand/float32/forward": NOT_COMPARABLE,
}
KNOWN = "ops/mul/int8/*  error  it is known\nops/bmm/*/*  error  it was"


def results() -> list[Result]:
    return [
        Result(Case.parse(case), status, "" if status == PASS else f"about\n <b>{case}</b>, with </script>", 3)
        for case, status in STATUSES.items()
    ]


def summary() -> Summary:
    return Summary.of(results(), ABOUT, Ledger(parse(KNOWN, "x"), "2.13"))


def unpacked(path: Path) -> list[dict[str, str]]:
    with tarfile.open(path) as tar:
        (member,) = tar.getmembers()
        content = tar.extractfile(member)
        assert content is not None
        assert member.name == path.name.removesuffix(".tar")
        return list(csv.DictReader(io.TextIOWrapper(content, encoding="utf-8", newline="")))


def conformance(*arguments: str) -> tuple[int, str]:
    text = io.StringIO()
    return main(
        make_parser().parse_args(["conformance", *arguments]), View(Console(file=text, width=300))
    ), text.getvalue()


def test_a_row_says_what_came_out_why_and_with_which_versions(tmp_path: Path) -> None:
    rows = {row["case"]: row for row in unpacked(pack.write(tmp_path, ABOUT, pack.case_rows(summary())))}
    assert {case: (row["result"], row["status"]) for case, row in rows.items()} == {
        "ops/add/float32/forward": ("passed", PASS),
        "ops/add/float32/backward": ("failed", WRONG),
        "ops/bmm/float32/forward": ("passed", PASS),
        "ops/mul/float32/forward": ("failed", CRASH),
        "ops/mul/int8/forward": ("failed", ERROR),
        "ops/rand/float32/forward": ("skipped", NOT_COMPARABLE),
    }
    assert rows["ops/mul/int8/forward"] == {
        "case": "ops/mul/int8/forward",
        "result": "failed",
        "status": "error",
        "reason": "about <b>ops/mul/int8/forward</b>, with </script>",
        "ledger": "known failure",
        "ledger_reason": "it is known",
        "part": "ops",
        "name": "mul",
        "dtype": "int8",
        "check": "forward",
        **{key: ABOUT[key] for key in ("backend", "device", "device_name", "framework", "torch", "ditorch", "date")},
        "run": "complete",
    }
    assert (rows["ops/add/float32/backward"]["ledger"], rows["ops/bmm/float32/forward"]["ledger"]) == (
        "unexpected failure",
        "unexpected pass",
    )
    assert (rows["ops/rand/float32/forward"]["ledger"], rows["ops/add/float32/forward"]["reason"]) == ("", "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"complete": False}, "interrupted"),
        ({"samples": 2}, "complete, at most 2 samples per case"),
    ],
)
def test_a_run_that_did_less_says_so(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    found = Summary.of(results(), {**ABOUT, **changes}, Ledger([], "2.13"))
    assert {row["run"] for row in unpacked(pack.write(tmp_path, ABOUT, pack.case_rows(found)))} == {said}


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    first = pack.write(tmp_path / "a", ABOUT, pack.case_rows(summary()))
    again = pack.write(tmp_path / "b", ABOUT, pack.case_rows(summary()))
    assert first.name == again.name == FILE
    assert first.read_bytes() == again.read_bytes()
    with tarfile.open(first) as tar:
        (member,) = tar.getmembers()
    assert (member.mtime, member.uid, member.gid, member.uname, member.gname, member.mode) == (0, 0, 0, "", "", 0o644)
    assert first.read_bytes()[4:8] == bytes(4)  # gzip's own time
    assert [path.name for path in (tmp_path / "a").iterdir()] == [FILE]


def test_a_failure_keeps_the_file_that_is_there(tmp_path: Path) -> None:
    path = pack.write(tmp_path, ABOUT, pack.case_rows(summary()))
    before = path.read_bytes()

    def rows() -> Iterator[tuple[str, ...]]:
        yield ("half",)
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        pack.write(tmp_path, ABOUT, rows())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_long_reasons_are_cut(tmp_path: Path) -> None:
    found = Summary.of([Result(Case.parse("ops/a/-/errors"), ERROR, "é" * 9999)], ABOUT, Ledger([], "2.13"))
    (row,) = unpacked(pack.write(tmp_path, ABOUT, pack.case_rows(found)))
    assert row["reason"] == "é" * 299 + "…"


def test_native_tests_have_rows_of_the_same_form(tmp_path: Path) -> None:
    found = [
        native.TestResult("test_ops.py", "TestCommonCUDA::test_out_add_cuda_float32", native.PASSED),
        native.TestResult("test_ops.py", "TestCommonCUDA::test_x_cuda_float8_e4m3fn", native.FAILED, 1.0, "no\nkernel"),
        native.TestResult("nn/test_pool.py", "TestPoolCUDA::test_to_cuda", native.SKIPPED, 0.1, "not today"),
        native.TestResult("test_torch.py", "test_plain", native.NEVER_RUN),
    ]
    rows = unpacked(pack.write(tmp_path, ABOUT, pack.native_rows(found, ABOUT)))
    names = ("case", "result", "part", "check", "name", "dtype", "reason")
    case, owner = "test_ops.py::TestCommonCUDA::test_", "TestCommonCUDA"
    assert [tuple(row[name] for name in names) for row in rows] == [
        (f"{case}out_add_cuda_float32", "passed", "test_ops.py", owner, "test_out_add", "float32", ""),
        (
            f"{case}x_cuda_float8_e4m3fn",
            "failed",
            "test_ops.py",
            "TestCommonCUDA",
            "test_x",
            "float8_e4m3fn",
            "no kernel",
        ),
        (
            *("nn/test_pool.py::TestPoolCUDA::test_to_cuda", "skipped", "nn/test_pool.py", "TestPoolCUDA"),
            *("test_to_cuda", "-", "not today"),
        ),
        ("test_torch.py::test_plain", "never run", "test_torch.py", "", "test_plain", "-", ""),
    ]
    assert {row["torch"] for row in rows} == {"2.13.0"}


def test_a_page_says_the_same_as_the_run(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(page(summary()), encoding="utf-8")
    found = read(tmp_path / "index.html")
    assert list(pack.case_rows(found)) == list(pack.case_rows(summary()))
    assert (found.by_case, found.about, found.statuses) == (summary().by_case, ABOUT, summary().statuses)


def test_the_command_packs_pages_and_folders(tmp_path: Path) -> None:
    with store.Store.create(tmp_path / "run", ABOUT) as kept:
        for result in results():
            kept.add(result)
    (tmp_path / "known.txt").write_text(KNOWN)
    status, text = conformance("report", str(tmp_path / "run"), "--ledger", str(tmp_path / "known.txt"))
    assert (status, FILE in text) == (1, True)
    written = (tmp_path / "run" / FILE).read_bytes()
    for source in (tmp_path / "run", tmp_path / "run" / "index.html"):
        status, text = conformance("pack", str(source), "--out", str(tmp_path / "new"))
        assert (status, "6 cases, 2 of 5 (40.00 %) right" in text) == (0, True), text
        assert (tmp_path / "new" / FILE).read_bytes() == written
    (tmp_path / "run" / FILE).unlink()
    assert conformance("pack", str(tmp_path / "run"))[0] == 0
    assert (tmp_path / "run" / FILE).read_bytes() == written


def fallen(packed: str) -> str:
    """The table of a page, with a status that there is not."""
    table = Table.unpack(base64.b64decode(packed))
    words = ["fell over" if word == "crash" else word for word in table["status"].dictionary]
    columns = [replace(one, dictionary=words) if one.name == "status" else one for one in table.columns]
    return base64.b64encode(Table("cases", columns).pack()).decode()


def test_bad_pages_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = tmp_path / "bad.html", page(summary())
    table = re.search(r'id="table-cases">([^<]*)<', good)
    assert table is not None
    for content, message in [
        (None, "bad.html cannot be read: No such file"),
        (b"", "bad.html is not a page of ditorch conformance"),
        (b"\xff\x00", "bad.html is not a page of ditorch conformance"),
        (good.replace('"conformance":', '"other":').encode(), "of ditorch conformance: KeyError('conformance')"),
        (good.replace("table-cases", "table-others").encode(), "not a page of ditorch conformance: KeyError('cases')"),
        (good.replace(table[1], table[1][40:]).encode(), "not a page of ditorch conformance: ValueError"),
        (good.replace(table[1], fallen(table[1])).encode(), "not a page of ditorch conformance: ValueError"),
    ]:
        if content is not None:
            bad.write_bytes(content)
        assert ditorch(["conformance", "pack", str(bad)]) == 2
        assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"bad.html"}


def test_a_page_cannot_write_elsewhere(tmp_path: Path) -> None:
    hostile = Summary.of(results(), {**ABOUT, "backend": "../soft"}, Ledger([], "2.13"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "index.html").write_text(page(hostile), encoding="utf-8")
    assert conformance("pack", str(tmp_path / "in"))[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"in"}
    assert (tmp_path / "in" / f".._{FILE}").exists()


def test_help_names_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        make_parser().parse_args(["conformance", "--help"])
    text = capsys.readouterr().out
    assert text.count("BACKEND_summary_of_pytorch_test_case_testing.csv.tar") == 2  # what a run leaves, and `pack`


@pytest.mark.parametrize(("name", "chip"), [("soft", "soft"), ("cuda-h200", "cuda")])
def test_the_files_in_docs_say_what_their_pages_say(name: str, chip: str, tmp_path: Path) -> None:
    committed = DOCS / f"{chip}{pack.SUFFIX}.tar"
    assert committed.stat().st_size < 300_000
    found = read(DOCS / f"{name}.html")
    again = pack.write(tmp_path, found.about, pack.case_rows(found))
    assert gzip.decompress(committed.read_bytes()) == gzip.decompress(again.read_bytes())  # zlib's releases differ
