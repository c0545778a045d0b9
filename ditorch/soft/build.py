"""Builds the C++ side of the software accelerator once, and finds it again afterwards.

The result is cached by everything that could make it wrong to load: the sources,
the flags, the compiler, and the versions of torch and Python. Several processes may
ask at once; one builds, the others wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ditorch_common.private import is_private, is_trusted
from ditorch_common.toolchain import cache_root, find_compiler, loaded_runtime

from ..console import say

MODULE = "_ditorch_soft"
OLDEST_TORCH = (2, 10)  # before it, composite operators of modules do not reach a PrivateUse1 device
SOURCES = Path(__file__).parent / "csrc"

# Sources that include the same headers are compiled together: parsing those headers is most of the work.
UNITS = {
    # rnn.cpp comes before fallback.cpp, which looks for kernels of the CPU when it is loaded.
    "core": (
        *("runtime.cpp", "memory.cpp", "generator.cpp", "rnn.cpp", "sparse.cpp", "fallback.cpp", "kernels.cpp"),
        "autocast.cpp",
    ),
    "python": ("module.cpp", "collectives.cpp", "profiler.cpp"),
}
# Nothing in "python" runs often enough to be worth the optimizer's time.
OPTIMIZE = {"core": "-O2", "python": "-O1"}


class BuildError(RuntimeError):
    """The software accelerator could not be built; the message says what to install or set."""


def library() -> Path:
    """Path of the compiled library, built now if this is the first use.

    >>> library()  # doctest: +SKIP
    PosixPath('.../soft-torch2.13.0+cpu-cpython-311-3f2a...-g++-12.2.0/_ditorch_soft.so')
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        raise BuildError(
            f"the software accelerator needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer, this is "
            f"{torch.__version__}. DITORCH_DEVICE=cpu works with this one."
        )
    compiler = find_compiler()
    name = f"soft-torch{torch.__version__}-{_python_tag()}-{_fingerprint()}"
    if compiler is None:
        for there in sorted(cache_root().glob(f"{name}-*/{MODULE}.so")):
            if is_trusted(there):
                return there  # built when there was one
        raise BuildError(
            "no C++ compiler found (looked for $CXX, g++, c++ and clang++), which the software accelerator "
            "is built with on first use. Install one (Debian, Ubuntu: apt-get install g++ python3-dev), "
            "or set DITORCH_DEVICE=cpu, which works without."
        )
    folder = Path("DITORCH_CACHE_DIR")
    try:
        folder = cache_root() / f"{name}-{_compiler_version(compiler)}"
        built = folder / f"{MODULE}.so"
        if is_trusted(built):
            return built
        _check_python_headers()
        folder.mkdir(parents=True, exist_ok=True)
        if not is_private(folder):
            raise OSError("others can write to it")
    except OSError as error:
        raise BuildError(
            f"the build cache {folder} cannot be written ({error}). Set DITORCH_CACHE_DIR to a folder that can."
        ) from error
    with _lock(folder / "lock"):
        if not is_trusted(built):
            _build(compiler, built)
    return built


def _python_tag() -> str:
    return sysconfig.get_config_var("SOABI") or platform.python_version()


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    # where torch lies is left out: environments with the same torch share one build
    flags = [flag for flag in _flags() if not flag.startswith("-isystem")]
    digest.update(repr((UNITS, OPTIMIZE, flags, torch.version.git_version, platform.machine())).encode())
    return digest.hexdigest()[:16]


def _compiler_version(compiler: str) -> str:
    asked = subprocess.run([compiler, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, check=False)
    return re.sub(r"[^\w.+]+", "-", f"{os.path.basename(compiler)}-{asked.stdout.strip()}")


def _torch_root() -> Path:
    return Path(torch.__file__).parent


def _flags() -> list[str]:
    root = _torch_root()
    includes = [
        root / "include",
        root / "include" / "torch" / "csrc" / "api" / "include",
        Path(sysconfig.get_paths()["include"]),
    ]
    flags = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-w"]
    flags += [f"-isystem{path}" for path in includes]
    flags += [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-DTORCH_EXTENSION_NAME={MODULE}",
    ]
    # Older releases of torch fix the pybind11 ABI by these names; types are shared only if they agree.
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):
        value = getattr(torch._C, f"_PYBIND11_{name}", None)
        if value is not None:
            flags.append(f'-DPYBIND11_{name}="{value}"')
    return flags


def _check_python_headers() -> None:
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").exists():
        raise BuildError(
            f"Python.h is not in {include}; the software accelerator needs it to build. Install the Python headers "
            "(Debian, Ubuntu: apt-get install python3-dev), or set DITORCH_DEVICE=cpu, which works without."
        )


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel frees it if this process dies."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(opened, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building the software accelerator; waiting for it ...")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(compiler: str, built: Path) -> None:
    say(f"building the software accelerator for torch {torch.__version__} (once, up to a minute) ...")
    started = time.monotonic()
    for abandoned in built.parent.glob("build-*"):  # by a process that was killed: the lock is ours
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=built.parent) as scratch:
        folder = Path(scratch)
        running: set[subprocess.Popen[str]] = set()
        jobs = min(len(UNITS), len(os.sched_getaffinity(0)))
        pool = ThreadPoolExecutor(max_workers=jobs)
        try:
            objects = list(pool.map(lambda unit: _compile(compiler, unit, folder, running), UNITS))
            target = folder / built.name
            _link(compiler, objects, target, running)
            os.replace(target, built)
        except BaseException:  # Ctrl-C too: leave neither compilers nor half a library behind
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.kill()
            raise
        finally:
            pool.shutdown(wait=True)
    say(f"built in {time.monotonic() - started:.0f} s; kept in {built.parent}")


def _compile(compiler: str, unit: str, folder: Path, running: set[subprocess.Popen[str]]) -> Path:
    source, target = folder / f"{unit}.cpp", folder / f"{unit}.o"
    source.write_text("".join(f'#include "{SOURCES / name}"\n' for name in UNITS[unit]))
    _call([compiler, *_flags(), OPTIMIZE[unit], "-c", str(source), "-o", str(target)], running)
    return target


def _link(compiler: str, objects: list[Path], target: Path, running: set[subprocess.Popen[str]]) -> None:
    libraries = _torch_root() / "lib"
    _call(
        [
            compiler,
            "-shared",
            *map(str, objects),
            "-o",
            str(target),
            *loaded_runtime(),
            f"-L{libraries}",
            f"-Wl,-rpath,{libraries}",
            "-lc10",
            "-ltorch_cpu",
            "-ltorch",
            "-ltorch_python",
        ],
        running,
    )


def _call(command: list[str], running: set[subprocess.Popen[str]]) -> None:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    running.add(process)
    output, _ = process.communicate()
    running.discard(process)
    if process.returncode != 0:
        shown = "\n".join(line for line in output.splitlines() if "error" in line.lower())[:4000] or output[-4000:]
        raise BuildError(
            f"{os.path.basename(command[0])} failed while building the software accelerator for torch "
            f"{torch.__version__}:\n{shown}\nA C++20 compiler is needed (g++ 10 or newer); CXX= chooses another one. "
            "DITORCH_DEVICE=cpu works without."
        )
