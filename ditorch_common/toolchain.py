"""The C++ compiler of this machine, the C++ runtime that torch loaded, and the build cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from .private import private_folder
from .settings import DITORCH


def find_compiler(environment: Mapping[str, str] = os.environ) -> str | None:
    """Full path of the C++ compiler, or None (`find_compiler() == "/usr/bin/g++"`)."""
    for name in (environment.get("CXX"), "g++", "c++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """The build cache: `DITORCH_CACHE_DIR`, or `ditorch` in the user's cache folder (`cache_root() / "soft"`).

    Libraries in it are executed: where others can write to that folder, a folder of this user's in it is taken, and
    without a home one in the temporary directory. OSError if there is none, or if the one asked for cannot be made.
    """
    explicit = DITORCH.read("DITORCH_CACHE_DIR", environment) or ""
    try:
        found: Path | None = Path(explicit or environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:  # HOME is unset, and this user has no entry in the password database
        found = None
    if explicit and found is not None:
        return private_folder(
            found, "ditorch", elsewhere=found.is_dir()
        )  # one that cannot be made is a mistake to tell
    return private_folder(found and found / "ditorch", "ditorch")


def loaded_runtime() -> tuple[str, ...]:
    """Path of the C++ runtime that this process has loaded, to link against; empty if unknown.

    Some machines offer the compiler only a static one. A second copy of it would not share its tables with torch's,
    and the first error message with a number in it would crash.
    """
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return ()
    return tuple(sorted({line.split()[-1] for line in maps.splitlines() if "/libstdc++.so" in line})[:1])
