"""Launching without Triton: what the driver reads, and when it is not asked at all."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from op_tools import kernels


class Driver:
    """Stands for the driver: one kernel with parameters of given sizes; remembers what it was launched with."""

    def __init__(self, sizes: list[int], error: int = 0) -> None:
        self.sizes, self.error = sizes, error
        self.launched: list[tuple[Any, ...]] = []

    def cuFuncGetParamInfo(self, function: int, number: int, offset: Any, size: Any) -> int:
        if number >= len(self.sizes):
            return 1
        offset._obj.value, size._obj.value = sum(self.sizes[:number]), self.sizes[number]
        return 0

    def cuLaunchKernel(self, function: int, *rest: Any) -> int:
        *grid, stream, pointers, extra = rest
        assert extra is None
        numbers = [ctypes.c_int64.from_address(pointers[k]).value for k in range(len(self.sizes))]
        self.launched.append((function, tuple(grid), stream, numbers))
        return self.error


def direct(driver: Driver, monkeypatch: pytest.MonkeyPatch, arguments: int = 3, ctas: int = 1) -> Any:
    monkeypatch.setattr(kernels, "_driver", lambda: driver)
    kernel = SimpleNamespace(function=7, metadata=SimpleNamespace(num_warps=8, shared=64, num_ctas=ctas))
    return kernels._direct(kernel, 5, arguments)


@given(numbers=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20), hidden=st.integers(0, 4))
def test_the_driver_reads_all_numbers_and_zeros_behind_them(numbers: list[int], hidden: int) -> None:
    driver = Driver([8] * (len(numbers) + hidden))
    with pytest.MonkeyPatch.context() as patch:
        launch = direct(driver, patch, len(numbers))
    launch(11, *numbers)
    launch(12, *[0] * len(numbers))
    assert driver.launched[0] == (7, (5, 1, 1, 256, 1, 1, 64), 11, [*numbers, *[0] * hidden])
    assert driver.launched[1][2:] == (12, [0] * (len(numbers) + hidden))


@pytest.mark.parametrize("sizes", [[8, 8], [8, 4, 8], [8, 8, 4], [8, 8, 8, 4], [8] * 30], ids=str)
def test_a_kernel_that_takes_something_else_is_left_to_triton(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert direct(Driver(sizes), monkeypatch) is None


def test_a_kernel_in_clusters_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert direct(Driver([8, 8, 8]), monkeypatch, ctas=2) is None
    assert direct(Driver([8, 8, 8]), monkeypatch) is not None


def test_an_error_of_the_driver_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="error 700"):
        direct(Driver([8, 8, 8], error=700), monkeypatch)(0, 1, 2, 3)


def test_wrong_counts_of_numbers_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver([8, 8, 8])
    with pytest.raises(ValueError):
        direct(driver, monkeypatch)(0, 1, 2)
    assert not driver.launched


def test_kernels_know_whether_their_device_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    assert [kernels.Kernels(index, lambda *_: None, 3).current() for index in (0, 1)] == [False, True]


def test_without_a_driver_triton_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_driver", lambda: None)
    assert kernels._direct(SimpleNamespace(), 1, 3) is None
    calls: list[Any] = []
    kernels._launched_by(lambda *numbers, stream: calls.append((numbers, stream)))(9, 1, 2)
    assert calls == [((1, 2), 9)]
