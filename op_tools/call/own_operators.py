"""Operators of the user's own, in another process: where they come from, and how that process gets them.

An operator of `torch.library` is there once the modules are imported that registered it; one in C++ once its library is
loaded. Modules are imported again only if they are ordinary ones: found by their name, in files that nobody has changed
since this process started. The other process must then have the same registrations, or it does not know the operator.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ..compat import OpOverload, OpOverloadPacket, custom_op_functions, registrations

_KEYS: Final = (
    "schema",
    "CPU",
    "AutogradCPU",
    "ADInplaceOrView",
)  # what golden runs go through, beside aliases of keys
_started: Final = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else None


class NotKnown(LookupError):
    """This process has no operator of that name, or another one."""


class Origin(NamedTuple):
    """How another process gets an operator: what it imports and loads, and the registrations that it then has."""

    modules: tuple[str, ...]
    libraries: tuple[str, ...]
    registered: tuple[tuple[str, str], ...]


def origin_of(function: Any) -> Origin | None:
    """Where an operator comes from; None where no other process can get it (`origin_of(torch.ops.mine.scan)`)."""
    if not isinstance(function, (OpOverload, OpOverloadPacket)):
        return None
    name = "::".join(str(function).split(".")[:2])
    registered = _registered(name)
    files = {place.rpartition(":")[0] for key, place in registered if key != "schema" and place}
    sources = {file for file in files if file.endswith(".py")}
    modules = [_module_in(file) for file in sorted(sources)]
    if not files or any(file.startswith(_homes()) for file in files) or not all(map(_is_ordinary, modules)):
        return None
    libraries = tuple(sorted(torch.ops.loaded_libraries)) if files - sources else ()
    if files - sources and not libraries:  # it came with an extension module of Python
        return None
    if not all(map(_is_unchanged, _packages(modules))):
        return None
    return Origin(tuple([module.__name__ for module in modules if module is not None]), libraries, registered)


@functools.lru_cache(maxsize=256)
def own_operator(name: str, origin: Origin) -> Callable[..., Any]:
    """The operator of this name, from its origin; `NotKnown` where it is not to be had (`own_operator(op, origin)`)."""
    home, packet, *overload = name.split(".")
    qualified = f"{home}::{packet}"
    threads = torch.get_num_threads()
    try:
        if _registered(qualified) != origin.registered:
            for library in origin.libraries:
                torch.ops.load_library(library)
            for module in origin.modules:
                importlib.import_module(module)
    except BaseException as error:  # whatever somebody's module does, an exit as well
        raise NotKnown(f"{name} cannot be had here: {type(error).__name__}: {error}") from error
    finally:
        torch.set_num_threads(threads)
    if _registered(qualified) != origin.registered or torch.get_default_dtype() != torch.float32:
        raise NotKnown(f"{name} is another operator here")
    found = getattr(getattr(torch.ops, home), packet)
    function: Callable[..., Any] = getattr(found, overload[0]) if overload else found
    return function


def _registered(name: str) -> tuple[tuple[str, str], ...]:
    """What golden runs go through, and where in the sources each was registered; of custom operators the functions."""
    found = [(key, place) for key, place in registrations(name).items() if key in _KEYS or key.endswith("[alias]")]
    found = [(key, "" if key != "schema" and place.startswith(_homes()) else place) for key, place in found]
    for number, function in enumerate(custom_op_functions(name)):
        code = getattr(function, "__code__", None)
        place = f"{type(function)}:0" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
        found.append((f"function {number}", place))
    return tuple(sorted(found))


@functools.cache
def _homes() -> tuple[str, ...]:
    """Where those lie that register operators for others."""
    packages = [sys.modules.get(name) for name in ("torch", "ditorch")]
    return tuple([str(Path(p.__file__).parent) + os.sep for p in packages if p is not None and p.__file__])


def _module_in(file: str) -> types.ModuleType | None:
    return next((m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file), None)


def _is_ordinary(module: types.ModuleType | None) -> bool:
    """Whether importing a module again by its name runs the same file: so it is not for a script that was started."""
    spec = getattr(module, "__spec__", None)
    if module is None or spec is None or sys.modules.get(spec.name) is not module or module.__name__ != spec.name:
        return False
    return module is not sys.modules.get("__main__") and spec.origin == module.__file__ and spec.has_location


def _packages(modules: Iterable[types.ModuleType | None]) -> list[types.ModuleType]:
    """All modules that were imported from the packages of some."""
    roots = {module.__name__.partition(".")[0] for module in modules if module is not None}
    return [m for name, m in list(sys.modules.items()) if name.partition(".")[0] in roots]


def _is_unchanged(module: types.ModuleType) -> bool:
    file, since = getattr(module, "__file__", None), _start_of_process()
    try:
        return file is None or (since is not None and os.stat(file).st_mtime <= since)
    except OSError:
        return False


@functools.cache
def _start_of_process() -> float | None:
    """When this process started, by the clock of files."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return None if _started is None else _started + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
