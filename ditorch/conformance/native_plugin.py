"""Pytest plugin for PyTorch's own test files: activates ditorch, runs one shard, and keeps a diary of it.

The diary tells the parent which test was running when the process died, and what had been finished by then.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ditorch  # before any test module is imported, as a user would
from ditorch.conformance.native_names import DIARY, SELECTION


def _leave_cuda_internals_alone() -> None:
    """Run tests on the current stream, and without a count of CUDA's memory.

    PyTorch's test classes for CUDA set a side stream and count memory around each test through private functions of
    torch._C, which are CUDA's alone; the tests themselves use the public names.
    """
    from torch.testing._internal.common_device_type import CUDATestBase

    CUDATestBase._do_cuda_non_default_stream = False
    CUDATestBase._do_cuda_memory_leak_check = False


if not ditorch.backend.native:
    _leave_cuda_internals_alone()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of this shard."""
    file = os.environ.get(SELECTION)
    if not file:
        return
    wanted = set(Path(file).read_text().splitlines())
    kept = [item for item in items if name_of(item.nodeid) in wanted]
    config.hook.pytest_deselected(items=[item for item in items if name_of(item.nodeid) not in wanted])
    items[:] = kept


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Say which tests there are, and on which device."""
    with contextlib.suppress(Exception):  # there is no such question for the CPU and for some vendors
        _note(device_name=str(torch.get_device_module(ditorch.backend.device_type).get_device_name(0)))
    for item in session.items:
        _note(found=name_of(item.nodeid))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Say which test runs now."""
    _note(started=name_of(nodeid))


def pytest_runtest_logreport(report: Any) -> None:
    """Say how it ended; a failure while setting up or cleaning up counts as well."""
    if report.when == "call" or report.outcome != "passed":
        text = str(report.longrepr) if report.longrepr is not None else ""
        outcome = "skipped" if getattr(report, "wasxfail", None) is not None else report.outcome
        _note(ended=name_of(report.nodeid), outcome=outcome, seconds=report.duration, message=text[-1500:])


def name_of(nodeid: str) -> str:
    """Class and test, without the file (`"TestOpsCUDA::test_add"`)."""
    return nodeid.partition("::")[2]


def _note(**entry: Any) -> None:
    path = os.environ.get(DIARY)
    if path:
        with open(path, "a", encoding="utf-8") as diary:
            diary.write(json.dumps(entry) + "\n")
