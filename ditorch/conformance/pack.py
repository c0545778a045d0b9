"""The packed summary of a chip: one CSV with every test case of a run, in a tar that depends on the results alone."""

from __future__ import annotations

import csv
import gzip
import io
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ditorch.conformance.cases import NO_DTYPE, NOT_COMPARABLE, PASS
from ditorch.conformance.native import FAILED, PASSED, SKIPPED, TestResult
from ditorch.conformance.summary import Summary, write_whole

SUFFIX = "_summary_of_pytorch_test_case_testing.csv"
ABOUT = ("backend", "device", "device_name", "framework", "torch", "ditorch", "date")
COLUMNS = (
    *("case", "result", "status", "reason", "ledger", "ledger_reason", "part", "name", "dtype", "check"),
    *ABOUT,
    "run",
)
LONGEST_REASON = 300
_TYPED = re.compile(r"(.+)_cuda(?:_(\w+))?")  # the tests of a device-generic class end in their device and dtype
_DTYPE = re.compile(r"(?:b?float|complex|q?u?int|bool|bits)\w*")


def file_name(about: Mapping[str, Any]) -> str:
    """Name of the packed summary of a run, whatever the backend is called.

    >>> file_name({"backend": "ascend"})
    'ascend_summary_of_pytorch_test_case_testing.csv.tar'
    """
    backend = re.sub(r"[^\w.-]", "_", str(about.get("backend") or "device"))
    return f"{backend}{SUFFIX}.tar"


def write(folder: Path, about: Mapping[str, Any], rows: Iterable[Sequence[str]]) -> Path:
    """Pack rows of `COLUMNS` into a folder; the file appears whole or not at all (`write(folder, about, rows)`)."""
    path = folder / file_name(about)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, _packed(path.stem, rows))
    return path


def case_rows(summary: Summary) -> Iterator[tuple[str, ...]]:
    """One row per case of a run on PyTorch's databases (`list(case_rows(summary))`)."""
    run = _about(summary.about)
    for result in summary.results:
        expectation, known = summary.expectations[result.case]
        outcome = {PASS: PASSED, NOT_COMPARABLE: SKIPPED}.get(result.status, FAILED)
        ledger = expectation or ("known failure" if result.failed else "")
        yield (str(result.case), outcome, result.status, _short(result.message), ledger, known, *result.case, *run)


def native_rows(results: Iterable[TestResult], about: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """One row per test of PyTorch's own test files (`list(native_rows(results, about))`)."""
    run = _about(about)
    for result in results:
        owner, _, test = result.name.rpartition("::")
        found = _TYPED.fullmatch(test)
        dtype = found[2] if found and found[2] and _DTYPE.fullmatch(found[2]) else NO_DTYPE
        name = found[1] if found and dtype != NO_DTYPE else test
        outcome, case = result.outcome, f"{result.file}::{result.name}"
        yield (case, outcome, outcome, _short(result.message), "", "", result.file, name, dtype, owner, *run)


def _about(about: Mapping[str, Any]) -> tuple[str, ...]:
    run = []
    if "complete" in about:  # older pages do not say
        run.append("complete" if about["complete"] else "interrupted")
    if about.get("samples"):
        run.append(f"at most {about['samples']} samples per case")
    return (*(str(about.get(key) or "") for key in ABOUT), ", ".join(run))


def _short(message: str) -> str:
    text = " ".join(message.split())
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"


def _packed(name: str, rows: Iterable[Sequence[str]]) -> bytes:
    """A tar, compressed by gzip, without owner and times: the same rows give the same bytes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows)
    data = text.getvalue().encode()
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o644
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        tar.addfile(member, io.BytesIO(data))
    return packed.getvalue()
