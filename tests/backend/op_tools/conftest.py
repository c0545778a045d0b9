"""These tests run on whichever device ditorch activates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ditorch
from op_tools.native import book
from op_tools.watch.intercept import INTERCEPTOR

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def _quiet_console(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No output unless a test asks for it; no tool survives its test."""
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "off")
    yield
    left = [tool.name for tool in INTERCEPTOR.tools]
    for tool in list(INTERCEPTOR.tools):
        INTERCEPTOR.remove(tool)
    INTERCEPTOR.finished()
    assert not left, f"tools were left active: {left}"
    assert torch._C._len_torch_function_stack() == 0


@pytest.fixture(autouse=True)
def _float32_products() -> Iterator[None]:
    """cuDNN multiplies float32 in TF32 unless told otherwise."""
    if ditorch.backend.name == "cuda":
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield
    else:
        yield


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def faults() -> Iterator[Any]:
    """Faults to plant; none is left afterwards."""
    if ditorch.backend.name != "soft":
        pytest.skip("only the software accelerator can be made to fail on purpose")
    from ditorch.soft import faults as module

    yield module
    module.clear()


@pytest.fixture(params=["python", "native"])
def keeps_book(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What keeps the book of a trace: Python, or machine code."""
    if book.LIBRARY.wait() is None and request.param == "native":
        pytest.skip(f"no compiler here, or it failed: {book.LIBRARY.failure}")
    if request.param == "python":
        monkeypatch.setattr(book.LIBRARY, "loaded", None)
    return str(request.param)
