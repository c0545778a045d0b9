"""C++ sources of this package, compiled once with the machine's compiler and kept in the build cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

_SECONDS: Final = 120


def compiled(
    source: Path,
    flags: tuple[str, ...] = (),
    libraries: tuple[str, ...] = (),
    key: str = "",
    first: Callable[[], None] | None = None,
) -> Path | None:
    """The shared library of a source file; None where there is no compiler or OP_TOOLS_NATIVE=0 forbids it.

    `key` names what else the result depends on; `first` is called before the compiler is. Raises OSError or
    SubprocessError when compiling fails.

    >>> compiled(Path("measure.cpp"), ("-O3",))  # doctest: +SKIP
    PosixPath('.../op_tools-3f2a9c.../measure.so')
    """
    compiler = find_compiler()
    if compiler is None or os.environ.get("OP_TOOLS_NATIVE", "1") == "0" or platform.system() != "Linux":
        return None
    path = os.path.realpath(compiler)
    found = os.stat(path)  # asking it for its version takes longer than all the rest
    identity = (flags, libraries, platform.machine(), key, path, found.st_size, int(found.st_mtime))
    parts = (source.read_bytes(), repr(identity).encode())
    target = cache_root() / f"op_tools-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}" / f"{source.stem}.so"
    if target.exists():
        return target
    if first is not None:
        first()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, *flags, "-fPIC", "-shared", "-w", str(source), "-o", str(made), *libraries]
        subprocess.run(command, capture_output=True, check=True, timeout=_SECONDS)
        os.replace(made, target)  # several processes may build it at once: each leaves a whole file
    return target


def against_torch(source: Path, first: Callable[[], None] | None = None) -> Path | None:
    """The shared library of a source file that uses PyTorch's C++ (`against_torch(Path("backward_clock.cpp"))`)."""
    root = Path(torch.__file__).parent
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    flags = (
        "-std=c++20",
        "-O2",
        "-fvisibility=hidden",
        f"-isystem{root / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
    )
    linked = (f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-lc10", "-ltorch_cpu", *_loaded_runtime())
    return compiled(source, flags, linked, str(torch.version.git_version), first)


def find_compiler() -> str | None:
    """Full path of the C++ compiler, or None (`find_compiler() == "/usr/bin/g++"`)."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def cache_root() -> Path:
    """The build cache, which is that of the software accelerator, too (`cache_root().name == "ditorch"`)."""
    explicit = os.environ.get("DITORCH_CACHE_DIR")
    if explicit:
        return Path(explicit).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ditorch"


def _loaded_runtime() -> tuple[str, ...]:
    """The C++ runtime that torch has loaded, by its path: some machines offer the compiler only a static one."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return ()
    return tuple(sorted({line.split()[-1] for line in maps.splitlines() if "/libstdc++.so" in line})[:1])
