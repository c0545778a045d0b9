"""Launching without Triton: what the driver reads, and when it is not asked at all."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from op_tools.native import kernels


class Driver:
    """Stands for the driver: one kernel with parameters of given sizes; remembers what it was launched with."""

    def __init__(self, sizes: list[int], error: int = 0) -> None:
        self.sizes, self.error = sizes, error
        self.launched: list[tuple[Any, ...]] = []
        self.loaded: list[bytes] = []

    def cuFuncGetParamInfo(self, function: int, number: int, offset: Any, size: Any) -> int:
        if number >= len(self.sizes):
            return 1
        offset._obj.value, size._obj.value = sum(self.sizes[:number]), self.sizes[number]
        return 0

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        module._obj.value = 5
        self.loaded.append(code)
        return 0 if code.startswith(b"ELF") else 200

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = 7
        return 0 if (module.value, name) == (5, b"look") else 500

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
    monkeypatch.setattr(kernels, "cuda_device", lambda: 1)
    assert [kernels.Kernels(index, "nothing", 3).current() for index in (0, 1)] == [False, True]


def test_without_a_driver_triton_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_driver", lambda: None)
    assert kernels._direct(SimpleNamespace(), 1, 3) is None
    calls: list[Any] = []
    kernels._launched_by(lambda *numbers, stream: calls.append((numbers, stream)))(9, 1, 2)
    assert calls == [((1, 2), 9)]


# -- kept from one process to the next ------------------------------------------------------------------


class Compiled:
    """Stands for what Triton compiles."""

    function = 9

    def __init__(self, code: bytes = b"ELF \n\x00 code", name: str = "look", shared: int = 64) -> None:
        self.asm = {"cubin": code}
        self.metadata = SimpleNamespace(name=name, num_warps=8, shared=shared, num_ctas=1)


def test_a_kernel_is_kept_for_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver([8, 8, 8])
    monkeypatch.setattr(kernels, "_driver", lambda: driver)
    path = tmp_path / "new" / "look.cubin"
    assert kernels._load_cached(path) is None
    kernels._save_to_cache(Compiled(), path)
    kept = kernels._load_cached(path)
    assert kept is not None
    assert driver.loaded == [b"ELF \n\x00 code"]
    launch = kernels._direct(kept, 5, 3)
    assert launch is not None
    launch(11, 1, 2, 3)
    assert driver.launched == [(7, (5, 1, 1, 256, 1, 1, 64), 11, [1, 2, 3])]
    assert [file.name for file in path.parent.iterdir()] == ["look.cubin"]


@pytest.mark.parametrize("kernel", [Compiled(b"other"), Compiled(name="another")], ids=["not loaded", "not found"])
def test_what_the_driver_refuses_is_compiled_again(
    kernel: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_driver", lambda: Driver([8, 8, 8]))
    kernels._save_to_cache(kernel, tmp_path / "k")
    assert (tmp_path / "k").exists()
    assert kernels._load_cached(tmp_path / "k") is None


@given(damage=st.integers(0, 200), flipped=st.integers(1, 255), cut=st.booleans())
def test_damaged_files_never_reach_the_driver(
    damage: int, flipped: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    driver, path = Driver([8, 8, 8]), tmp_path_factory.mktemp("kept") / "k"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_driver", lambda: driver)
        kernels._save_to_cache(Compiled(bytes(range(64, 128))), path)
        whole = path.read_bytes()
        at = damage % len(whole)
        path.write_bytes(whole[:at] if cut else whole[:at] + bytes([whole[at] ^ flipped]) + whole[at + 1 :])
        assert kernels._load_cached(path) is None
        assert not driver.loaded


@pytest.mark.parametrize("kernel", [Compiled(shared=65_536), SimpleNamespace(metadata=None)], ids=["large", "unknown"])
def test_what_cannot_be_launched_so_is_not_kept(kernel: Any, tmp_path: Path) -> None:
    kernels._save_to_cache(kernel, tmp_path / "k")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kernels._save_to_cache(Compiled(), tmp_path / "file" / "k")


def test_another_gpu_source_or_triton_has_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_driver", lambda: Driver([]))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(kernels.importlib.metadata, "version", lambda name: "3.6")
    cases = [("triton_measures.py", torch.float32, 0), ("triton_measures.py", torch.float16, 0)]
    cases += [("triton_measures.py", torch.float32, 1), ("triton_statistics.py", torch.float32, 0)]
    places = [kernels._cache_path(*case) for case in cases]
    monkeypatch.setattr(kernels.importlib.metadata, "version", lambda name: "3.7")
    places += [kernels._cache_path(*cases[0])]
    assert None not in places
    assert len(set(places)) == 5
    monkeypatch.setenv("OP_TOOLS_NATIVE", "0")
    assert kernels._cache_path(*cases[0]) is None


def test_a_kept_kernel_that_takes_something_else_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_driver", lambda: Driver([8, 4, 8]))
    monkeypatch.setattr(kernels, "_cache_path", lambda *_: tmp_path / "k")
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    kernels._save_to_cache(Compiled(), tmp_path / "k")
    ran: list[Any] = []

    class ByTriton(Compiled):
        def __getitem__(self, grid: Any) -> Any:
            return lambda *numbers, stream: ran.append((grid, numbers, stream))

    source = SimpleNamespace(compiled=lambda dtype, device: ByTriton())
    monkeypatch.setattr(kernels.importlib, "import_module", lambda *_: source)
    kernels.Kernels(0, "some", 3).launch(torch.float32, 4)(11, 1, 2, 3)
    assert ran == [((4, 1, 1), (1, 2, 3), 11)]
