"""Loads the software accelerator for this folder, or skips the folder with the reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def _reason_to_skip() -> str:
    chosen = os.environ.get("DITORCH_DEVICE", "").strip().lower() or "soft"
    if chosen != "soft":
        return f"DITORCH_DEVICE={chosen} selects another device"
    import torch

    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", "soft"):
        return f"the out-of-tree device of this process is {name}"
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX") or "g++", "g++", "c++", "clang++")):
        return "no C++ compiler, which soft is built with"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    if here and (reason := _reason_to_skip()):
        for item in here:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="package")
def plain_soft() -> Iterator[None]:
    """The device under its own name, without the redirect from "cuda"."""
    import ditorch
    import ditorch.soft

    redirected = bool(ditorch.patches())
    ditorch.deactivate()
    ditorch.soft.load()
    yield
    if redirected:
        ditorch.activate()


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    """Each test finds and leaves no faults, no limit, device 0 and a seeded process."""
    import torch

    from ditorch.soft import faults

    torch.manual_seed(0)
    yield
    faults.clear()
    for index in range(torch.soft.device_count()):
        torch.soft.set_memory_limit(None, index)
    torch.soft.set_device(0)


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script in a process of its own, with the device loaded first unless ``load=False``."""

    def run(
        script: str, *, load: bool = True, timeout: float = 120, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        start = "import torch, ditorch.soft\nditorch.soft.load()\n" if load else ""
        return subprocess.run(
            [sys.executable, "-c", start + textwrap.dedent(script)],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=ROOT,
            check=False,
            env={**os.environ, "DITORCH_DEVICE": "soft", "DITORCH_DISABLE_MOCK": "1", **environment},
        )

    return run
