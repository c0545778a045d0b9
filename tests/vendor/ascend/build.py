"""Builds the libraries that torch_npu asks for: ours over host memory, weak stubs for what else it leaves undefined.

python -m tests.vendor.ascend.build FOLDER
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
SHELLS = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "fmk_parser", "ascend_protobuf", "atb")
SHELLS += ("mspti", "msprofiler")
"""Libraries that torch_npu names and that need hold nothing: every symbol is in libascendcl."""


def missing() -> str | None:
    """Why the suite cannot run here, or None.

    Example: ``missing() or build(folder)``
    """
    if importlib.util.find_spec("torch_npu") is None:
        return "the package torch_npu is not installed (make test-ascend installs it)"
    for tool in ("g++", "nm"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    return None


def build(folder: Path) -> Path:
    """Make the libraries, unless they are newer than their source; returns the folder for ``LD_LIBRARY_PATH``.

    Example: ``build(Path(".venv-ascend/host_acl"))``
    """
    sources, library = [HERE / "host_acl.cpp", HERE / "host_hccl.cpp"], folder / "libascendcl.so"
    if library.exists() and library.stat().st_mtime > max(p.stat().st_mtime for p in (*sources, Path(__file__))):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    package = _home("torch_npu")
    headers = package / "include"
    stubs = folder / "stubs.c"
    stubs.write_text(_stubs(undefined(package)))
    include = [f"-I{headers}", f"-I{headers / 'third_party'}", f"-I{headers / 'third_party' / 'acl' / 'inc'}"]
    common = ["-shared", "-fPIC", "-O1", "-w"]
    _run("gcc", "-c", "-fPIC", "-w", str(stubs), "-o", str(folder / "stubs.o"))
    _run("g++", *common, "-std=c++17", *include, *map(str, sources), str(folder / "stubs.o"), "-o", str(library))
    for name in SHELLS:
        link = ["-Wl,--no-as-needed", f"-L{folder}", "-lascendcl"]
        _run("gcc", *common, "-x", "c", "/dev/null", *link, "-o", str(folder / f"lib{name}.so"))
    return folder


def undefined(package: Path) -> set[str]:
    """Symbols that torch_npu's libraries use and that neither they, PyTorch, Python nor the system define."""
    own = [*(package / "lib").glob("*.so"), *package.glob("_C*.so")]
    torch_libraries = (_home("torch") / "lib").glob("*.so")
    wanted = {name for name in _symbols(own, "--undefined-only") if "@" not in name}
    wanted -= _symbols([*own, *torch_libraries], "--defined-only")
    return {name for name in wanted if not name.startswith(("Py", "_Py", "_ITM_", "__gmon", "__cxa_finalize"))}


def _stubs(names: Iterable[str]) -> str:
    lines = ["/* Generated: what torch_npu leaves undefined and this suite does not use. */"]
    for name in sorted(names):
        if name.startswith(("_ZTI", "_ZTV", "_ZTS", "_ZGV")):
            lines.append(f"__attribute__((weak)) char {name}[256];")
        else:
            lines.append(f"__attribute__((weak)) long {name}(void) {{ return 0; }}")
    return "\n".join(lines) + "\n"


def _symbols(libraries: Iterable[Path], which: str) -> set[str]:
    text = _run("nm", "-D", which, *map(str, libraries))
    fields = (line.split() for line in text.splitlines())
    return {parts[-1].partition("@@")[0] for parts in fields if len(parts) >= 2 and not parts[-1].endswith(":")}


def _home(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ... failed:\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    reason = missing()
    if reason:
        sys.exit(f"cannot build: {reason}")
    print(build(Path(sys.argv[1]).resolve()))
