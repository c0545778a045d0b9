"""One compiler, one C++ runtime and one build cache for both packages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ditorch_common import toolchain


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DITORCH_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert toolchain.cache_root() == Path("/somewhere/ditorch")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert toolchain.cache_root() == Path.home() / ".cache" / "ditorch"
    monkeypatch.setenv("DITORCH_CACHE_DIR", "~/here")
    assert toolchain.cache_root() == Path.home() / "here"
    assert toolchain.cache_root({"DITORCH_CACHE_DIR": "/there"}) == Path("/there")


def test_the_compiler_is_the_one_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "c++"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert toolchain.find_compiler({"CXX": "mine"}) == str(tmp_path / "mine")
    assert toolchain.find_compiler({"CXX": "missing"}) == str(tmp_path / "c++")
    (tmp_path / "c++").unlink()
    assert toolchain.find_compiler({}) is None


def test_libraries_are_linked_with_the_runtime_that_torch_uses() -> None:
    # A static second copy crashed at the first error message with a number in it.
    assert torch.__version__
    (runtime,) = toolchain.loaded_runtime()
    assert "/libstdc++.so" in runtime
    assert Path(runtime).exists()


def test_both_packages_use_it() -> None:
    from ditorch.soft import build
    from op_tools.native import compiling

    for name in ("cache_root", "find_compiler", "loaded_runtime"):
        assert getattr(build, name) is getattr(compiling, name) is getattr(toolchain, name)
