"""One compiler, one C++ runtime and one build cache for both packages."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch

from ditorch_common import private, toolchain


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DITORCH_CACHE_DIR", raising=False)
    monkeypatch.setattr(private, "is_private", lambda folder: True)
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


def test_without_a_home_a_private_temporary_folder_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("DITORCH_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    found = toolchain.cache_root()
    assert found == tmp_path / f"ditorch-{os.geteuid()}"
    assert stat.S_IMODE(found.stat().st_mode) == 0o700


def test_a_shared_cache_folder_is_not_trusted(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    environment = {"DITORCH_CACHE_DIR": str(shared)}
    assert toolchain.cache_root(environment) == shared
    for mode in (0o777, 0o1777):
        shared.chmod(mode)
        own = toolchain.cache_root(environment)
        assert own.parent == (shared if mode & 0o1000 else Path(tempfile.gettempdir()))
        assert private.is_private(own)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_planted_is_not_loaded(tmp_path: Path) -> None:
    library = tmp_path / "x.so"
    library.touch(0o755)
    assert private.is_trusted(library)
    library.chmod(0o777)
    assert not private.is_trusted(library)
    library.chmod(0o755)
    os.chown(library, 12345, 12345)
    assert not private.is_trusted(library)
    os.chown(library, 0, 0)
    (tmp_path / "link.so").symlink_to(library)
    assert not private.is_trusted(tmp_path / "link.so")
    os.chown(tmp_path, 12345, 12345)
    assert not private.is_trusted(library)
    os.chown(tmp_path, 0, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("through", ["link/cache", "mine/cache", "up/../link/cache"])
def test_a_link_of_another_user_on_the_way_is_not_trusted(tmp_path: Path, through: str) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "real/cache").mkdir(parents=True, mode=0o700)
    (tmp_path / "up").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "mine").symlink_to("up/../link")
    wanted = Path(f"{tmp_path}/{through}")
    assert private.is_private(wanted)
    os.lchown(tmp_path / "link", 12345, 12345)  # who can lead it elsewhere once it was looked at
    assert not private.is_private(wanted)


def test_links_that_lead_in_circles_are_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b/x")
    (tmp_path / "b").symlink_to("a")
    assert not private.is_private(tmp_path / "a")
    assert not private.is_private(tmp_path / "a/b/c")


def test_a_lock_that_is_a_link_leaves_its_target_alone(tmp_path: Path) -> None:
    from ditorch.soft import build

    (tmp_path / "precious").write_text("kept")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"), build._lock(tmp_path / "lock"):
        pass
    assert (tmp_path / "precious").read_text() == "kept"


@pytest.mark.parametrize("nameless", [True, False])
def test_a_file_is_complete_or_not_there(tmp_path: Path, nameless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not nameless:
        monkeypatch.setattr(private, "_O_TMPFILE", 0)
    target = tmp_path / "x.csv"
    for text in ("first", "second"):
        with private.complete(str(target)) as place:
            Path(place).write_text(text)
            assert not target.exists() or target.read_text() == "first"
        assert target.read_text() == text
    with pytest.raises(OSError, match="No space"), private.complete(str(target)):
        Path("/dev/full").write_text("thi")
    assert target.read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]
