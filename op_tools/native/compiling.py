"""Compiles the C++ sources of this package once, in the background, and keeps the libraries in the build cache."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from ditorch_common.private import is_private, is_trusted
from ditorch_common.toolchain import cache_root, find_compiler, loaded_runtime

from .. import settings

SOURCES: Final = Path(__file__).parent / "csrc"
_BUILD_TIMEOUT: Final = 300  # seconds; half a minute is usual where the machine has nothing else to do
_LOAD_TIMEOUT: Final = 0.5  # seconds: enough to load a library that was built before


def compiled(
    source: Path,
    flags: tuple[str, ...] = (),
    libraries: tuple[str, ...] = (),
    key: str = "",
    before_build: Callable[[], None] | None = None,
) -> Path | None:
    """The shared library of a source file, built if needed; None without a compiler or with OP_TOOLS_NATIVE=0.

    `key` names what else the library depends on; `before_build` is called before the compiler is. Raises OSError or
    SubprocessError if compiling fails.
    """
    environment = settings.environment()
    compiler = find_compiler(environment)
    if compiler is None or not settings.native() or platform.system() != "Linux":
        return None
    path = os.path.realpath(compiler)
    found = os.stat(path)  # to ask the compiler for its version takes longer than all the rest
    identity = (flags, libraries, platform.machine(), key, path, found.st_size, int(found.st_mtime))
    parts = (*_with_included(source).values(), repr(identity).encode())
    folder_name = f"op_tools-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}"
    target = cache_root(environment) / folder_name / f"{source.stem}.so"
    if is_trusted(target):
        return target
    if before_build is not None:
        before_build()
    target.parent.mkdir(parents=True, exist_ok=True)
    if not is_private(target.parent):
        raise OSError(f"others can write to {target.parent}: nothing is loaded from it; see DITORCH_CACHE_DIR")
    folder = tempfile.mkdtemp(prefix="build-", dir=target.parent)
    built = os.path.join(folder, target.name)
    command = [compiler, *flags, "-fPIC", "-shared", "-w", str(source), "-o", built, *libraries]
    started = subprocess.Popen(
        ["/bin/sh", "-c", _BUILD, "sh", folder, built, str(target), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    waiting = getattr(_building, "now", None)
    if waiting is not None:
        waiting.set()  # nobody should wait for a compiler, once it has begun
    try:
        code = started.wait(_BUILD_TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        raise
    if code:
        raise subprocess.CalledProcessError(code, compiler)
    return target


def _with_included(source: Path) -> dict[Path, bytes]:
    """A source file and the headers of ours that it includes, directly or not, with what is in them."""
    found: dict[Path, bytes] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop(0)
        if path not in found:
            found[path] = path.read_bytes()
            waiting += [
                path.parent / name for name in re.findall(r'^#include "(.+)"$', found[path].decode(), re.MULTILINE)
            ]
    return found


# Several processes may build at once: each moves a complete file into place. A shell does it, in a session of its own,
# so that the build goes on if the run ends first; the next run finds the library.
_BUILD: Final = """
folder=$1 built=$2 target=$3; shift 3
"$@" && mv -f "$built" "$target"; code=$?
rm -rf "$folder"; exit $code
"""


class Library:
    """A library that is loaded if it was built before, and built in the background otherwise.

    Callers do not wait for the compiler: `get()` returns None until the library is loaded, and always if it cannot be.
    """

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self._load = load
        self._known = threading.Event()  # it is loaded, or known not to be there yet
        self.loaded: Any = None  # the library, once it is there
        self.failure = ""  # why it could not be built or loaded, where it should have been
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"op_tools-{name}", daemon=True)
        self._thread.op_tools_internal = True  # type: ignore[attr-defined]
        _libraries.append(self)

    def begin(self) -> None:
        """Start loading or building it; nobody waits (`library.begin()`)."""
        with self._lock:
            if not self._thread.ident:
                self._thread.start()

    def get(self) -> Any:
        """The loaded library, or None if it is not ready or cannot be built (`library.get()`)."""
        if self.loaded is None and not self._thread.ident:
            self.begin()
            self._known.wait(_LOAD_TIMEOUT)
        return self.loaded

    @property
    def building(self) -> bool:
        """Whether it is being built or loaded (`library.building`)."""
        return self._thread.is_alive()

    def wait(self) -> Any:
        """The loaded library once the build has ended, or None if it failed (`library.wait() is not None`)."""
        self.get()
        self._thread.join()
        return self.loaded

    def _run(self) -> None:
        _building.now = self._known
        try:
            self.loaded = self._load()
        except (OSError, AttributeError, ImportError, subprocess.SubprocessError) as error:
            self.loaded = None  # the compiler failed, or there is no folder to write to
            self.failure = f"{type(error).__name__}: {str(error)[:200]}"
        finally:
            self._known.set()


_libraries: Final[list[Library]] = []
_building: Final = threading.local()  # `now`: the event of the library that this thread builds


def wait() -> None:
    """Build all libraries of the tools and wait until they are loaded, before a measurement for example (`wait()`)."""
    for library in _libraries:
        library.wait()


def extension(name: str, build: Callable[[str, str], Path | None]) -> Any:
    """An extension module of Python, by what compiles it; None where it cannot be (`extension(name, build)`).

    `build` gets the flag that finds `Python.h` and a key of this Python. Extensions of ours have no lock but the GIL.
    """
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").exists() or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    path = build(f"-I{include}", f"{sys.implementation.cache_tag} {sys.version}")
    if path is None:
        return None
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise OSError(f"{path} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def against_torch(
    source: Path, before_build: Callable[[], None] | None = None, more: tuple[str, ...] = (), key: str = ""
) -> Path | None:
    """The shared library of a source file that uses PyTorch's C++ API (`against_torch(Path("backward_clock.cpp"))`)."""
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    as_built = "-DNDEBUG"  # as PyTorch is: otherwise at::RecordFunction has a member more
    flags = ("-std=c++20", "-O2", "-fvisibility=hidden", f"-isystem{root / 'include'}", abi, as_built, *more)
    linked = (f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-lc10", "-ltorch_cpu", *loaded_runtime())
    return compiled(source, flags, linked, f"{torch.version.git_version}{key}", before_build)
