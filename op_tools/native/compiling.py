"""C++ sources of this package, compiled once with the machine's compiler and kept in the build cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

SOURCES: Final = Path(__file__).parent / "csrc"
_SECONDS: Final = 120
_QUICKLY: Final = 0.5  # seconds: long enough to load what was built before


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
    folder = tempfile.mkdtemp(prefix="build-", dir=target.parent)
    made = os.path.join(folder, target.name)
    command = [compiler, *flags, "-fPIC", "-shared", "-w", str(source), "-o", made, *libraries]
    subprocess.run(
        ["/bin/sh", "-c", _BUILD, "sh", folder, made, str(target), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=True,
        timeout=_SECONDS,
    )
    return target


# Several processes may build at once: each puts a whole file in place. A shell does it, on its own: a run that is
# shorter than the compiler's leaves the library to the next one.
_BUILD: Final = """
folder=$1 made=$2 target=$3; shift 3
"$@" && mv -f "$made" "$target"; code=$?
rm -rf "$folder"; exit $code
"""


class Library:
    """A library that is loaded where it was built before, and built in the background where it was not.

    Nobody waits for a compiler: until it is done, and where there is none, those who ask get None and do without.

    >>> library = Library("clock", lambda: ctypes.CDLL(str(compiled(path))))  # doctest: +SKIP
    >>> library.get()                                                         # doctest: +SKIP
    """

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self._load = load
        self._loaded: Any = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"op_tools-{name}", daemon=True)
        self._thread.op_tools_internal = True  # type: ignore[attr-defined]
        _libraries.append(self)

    def get(self) -> Any:
        """What was loaded, or None: not yet, or not here."""
        if self._loaded is None and not self._thread.ident:
            with self._lock:
                if not self._thread.ident:
                    self._thread.start()
            self._thread.join(_QUICKLY)
        return self._loaded

    def wait(self) -> Any:
        """The same once the compiler is through (`library.wait() is not None`)."""
        self.get()
        self._thread.join()
        return self._loaded

    def _work(self) -> None:
        try:
            self._loaded = self._load()
        except (OSError, AttributeError, subprocess.SubprocessError):
            self._loaded = None  # no compiler that can do it, or no folder to write to


_libraries: Final[list[Library]] = []


def wait() -> None:
    """Have every library of the tools built, and wait for it: before something is measured, say (`wait()`)."""
    for library in _libraries:
        library.wait()


def against_torch(source: Path, first: Callable[[], None] | None = None) -> Path | None:
    """The shared library of a source file that uses PyTorch's C++ (`against_torch(Path("backward_clock.cpp"))`)."""
    root = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
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
