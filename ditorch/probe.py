"""Tries the surface of an unknown device's package and writes the backend file to start from."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ditorch.backend import ask_module, package_version
from ditorch.backends.surfaces import Surface, of_module, write
from ditorch.redirect.cuda_module import CLASSES, functions
from ditorch.redirect.signatures import match, signature_of

TEMPLATE = '''"""{vendor} through ``{package}``: written by ``ditorch probe``; read every line before you trust it."""

from ditorch.backend import Backend
from ditorch_common.environment import Variables

BACKEND = Backend(
    name="{name}",
    vendor="{vendor}",
    device_type="{device_type}",
    package="{package}",
    collective={collective!r},
    variables=Variables({visible!r}),  # the vendor's CUDA_VISIBLE_DEVICES
    capability={capability!r},
    profiler_activity={activity!r},
    collective_gaps=frozenset({gaps!r}),
)
'''


@dataclass
class Findings:
    """What was tried on a device module, and how it went."""

    package: str
    device_type: str
    version: str
    tried: dict[str, str] = field(default_factory=dict)
    """What -> "works" or the error."""
    absent: list[str] = field(default_factory=list)
    """Names of ``torch.cuda`` that the module lacks."""
    adapted: dict[str, str] = field(default_factory=dict)
    """Names whose parameters differ from CUDA's: "CUDA's -> the vendor's"."""
    collective: str | None = None
    capability: tuple[int, int] | None = None

    def source(self) -> str:
        """The text of a backend file.

        Example: ``Path("acme.py").write_text(findings.source())``
        """
        name = self.package.removeprefix("torch_")
        return TEMPLATE.format(
            name=name,
            vendor=name.capitalize(),
            device_type=self.device_type,
            package=self.package,
            collective=self.collective,
            visible=f"{self.device_type.upper()}_VISIBLE_DEVICES",
            capability=self.capability or (8, 0),
            activity="PrivateUse1" if self.tried.get("profiler") == "works" else None,
            gaps=[] if self.tried.get("collective AVG") == "works" else ["avg"],
        )

    def lines(self) -> list[str]:
        """The findings for a reader.

        Example: ``print("\\n".join(findings.lines()))``
        """
        found = [f"{self.package} {self.version}: device type {self.device_type}", ""]
        found += [f"  {what:<24} {outcome}" for what, outcome in self.tried.items()]
        found += ["", f"  absent ({len(self.absent)}): {', '.join(self.absent)}"]
        found += [f"  adapted: {name}({change})" for name, change in sorted(self.adapted.items())]
        return found


def probe(package: str) -> Findings:
    """Import a vendor's package and try what the device layer needs of it.

    Example: ``print(probe("torch_acme").source())``
    """
    importlib.import_module(package)
    device_type = torch._C._get_privateuse1_backend_name()
    module = getattr(torch, device_type, None)
    if module is None:
        raise RuntimeError(f"after import {package} there is no torch.{device_type}: it is no PrivateUse1 package")
    found = Findings(package, device_type, package_version(package))
    _compare_surface(found, module)
    usable, reason = ask_module(module)
    found.tried["device"] = "works" if usable else reason
    if usable:
        for what, attempt in _attempts(module, device_type).items():
            found.tried[what] = _try(attempt)
        _try_collectives(found)
        answer = _value(lambda: module.get_device_capability())
        found.capability = answer if isinstance(answer, tuple) else None
    return found


def surface_of(package: str) -> Surface:
    """The package's surface in the form of ``ditorch/backends/surfaces``.

    Example: ``surface_of("torch_acme").functions["synchronize"]``
    """
    importlib.import_module(package)
    found = of_module(getattr(torch, torch._C._get_privateuse1_backend_name()))
    return Surface(package, package_version(package), found.functions, found.classes)


def _compare_surface(found: Findings, module: Any) -> None:
    pairs = [(name, function) for name, function in functions() if "." not in name and not name.startswith("_")]
    pairs += [(name, getattr(torch.cuda, name)) for name in CLASSES if hasattr(torch.cuda, name)]
    for name, function in pairs:
        theirs = getattr(module, name, None)
        if theirs is None:
            found.absent.append(name)
            continue
        cuda, vendor = signature_of(function), signature_of(theirs)
        if cuda is not None and vendor is not None and match(cuda, vendor) is not None:
            found.adapted[name] = f"{write(cuda)} -> {write(vendor)}"


def _attempts(module: Any, device_type: str) -> dict[str, Callable[[], Any]]:
    def streams() -> None:
        stream, event = module.Stream(), module.Event(enable_timing=True)
        event.record(stream)
        stream.synchronize()

    def generator() -> None:
        module.manual_seed(3)
        first = torch.rand(4, device=device_type)
        module.manual_seed(3)
        if not torch.equal(first.cpu(), torch.rand(4, device=device_type).cpu()):
            raise RuntimeError("the same seed gave other numbers")

    def autocast() -> None:
        with torch.autocast(device_type, dtype=torch.float16):
            torch.ones(2, 2, device=device_type) @ torch.ones(2, 2, device=device_type)

    def profiler() -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.PrivateUse1]):
            torch.ones(2, device=device_type) + 1

    def memory() -> None:
        before = module.memory_allocated()
        kept = torch.empty(1 << 20, device=device_type)
        if module.memory_allocated() <= before:
            raise RuntimeError("an allocation is not counted")
        del kept

    return {
        "tensors": lambda: torch.ones(2, device=device_type).add_(1).cpu(),
        "pinned memory": lambda: torch.ones(2).pin_memory(),
        "memory counters": memory,
        "memory info": lambda: module.mem_get_info(),
        "streams and events": streams,
        "random state": lambda: module.set_rng_state(module.get_rng_state()),
        "generator": generator,
        "autocast": autocast,
        "profiler": profiler,
        "default generators": lambda: module.default_generators[0],
        "properties": lambda: module.get_device_properties(0).total_memory,
    }


def _try_collectives(found: Findings) -> None:
    dist: Any = torch.distributed
    if not dist.is_available():
        found.tried["collectives"] = "torch.distributed is not built"
        return
    known = {"gloo", "nccl", "ucc", "mpi", "xccl", "undefined", "fake"}
    table = getattr(dist.Backend, "backend_capability", {})
    mine = [name for name, types in table.items() if found.device_type in types and name not in known]
    found.collective = mine[0] if mine else None
    if found.collective is None:
        found.tried["collectives"] = f"no collective backend is registered for {found.device_type}"
        return

    def run(operation: Any) -> None:
        dist.init_process_group(found.collective, store=dist.HashStore(), rank=0, world_size=1)
        try:
            dist.all_reduce(torch.ones(2, device=found.device_type), op=operation)
        finally:
            dist.destroy_process_group()

    found.tried[f"collectives ({found.collective})"] = _try(lambda: run(dist.ReduceOp.SUM))
    found.tried["collective AVG"] = _try(lambda: run(dist.ReduceOp.AVG))


def _try(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except Exception as error:
        text = str(error).splitlines()
        return f"{type(error).__name__}: {text[0] if text else ''}"[:160]
    return "works"


def _value(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception:
        return None
