"""Gathers what one needs to know when something does not run: versions, devices, patches, gaps."""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ditorch.backend import Backend, package_version
from ditorch.discovery import candidates, without_effect
from ditorch.patching import Patch


@dataclass(frozen=True)
class Diagnosis:
    """The state of this machine and process; printing it shows it as text.

    Example: ``print(ditorch.doctor())``
    """

    versions: dict[str, str]
    backend: dict[str, Any]
    candidates: list[dict[str, Any]]
    devices: list[dict[str, Any]]
    collectives: dict[str, Any]
    patched: dict[str, int]
    emulated: dict[str, str]
    hints: dict[str, str]
    missing: dict[str, str]
    gaps: dict[str, str]
    """What this backend cannot do, or does in another way, beyond single functions."""
    environment: dict[str, str]
    op_tools_patches: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON.

        Example: ``json.dumps(ditorch.doctor().as_dict())``
        """
        return asdict(self)

    def __str__(self) -> str:
        return self.text()

    def text(self, verbose: bool = False) -> str:
        """What one needs first; `verbose` lists every function that is emulated, ignored or missing, too.

        Example: ``print(ditorch.doctor().text(verbose=True))``
        """
        lines: list[str] = []
        head = {
            "versions": [f"{name} {value}" for name, value in self.versions.items()],
            "backend": [f"{name}: {value}" for name, value in self.backend.items()],
            "devices": [_device_line(device) for device in self.devices],
            "collectives": [f"{name}: {value}" for name, value in self.collectives.items()],
            "gaps": [f"{name}: {why}" for name, why in self.gaps.items()],
            "environment": [f"{name}={value}" for name, value in self.environment.items()],
            "patched": [", ".join(f"{count} {kind}" for kind, count in self.patched.items()) or "nothing"],
        }
        for title, rows in head.items():
            lines += [title, *(f"  {row}" for row in rows or ["none"])]
        rest: dict[str, dict[str, str]] = {
            "other backends": {row["name"]: row["reason"] for row in self.candidates},
            "emulated": self.emulated,
            "hints, without effect": self.hints,
            "missing": self.missing,
        }
        if self.op_tools_patches:
            lines += ["op_tools_patches", *(f"  {name}: {why}" for name, why in self.op_tools_patches.items())]
        if verbose:
            for title, listed in rest.items():
                lines += [title, *(f"  {name}: {why}" for name, why in listed.items())]
        else:
            counted = ", ".join(f"{len(listed)} {title}" for title, listed in rest.items())
            lines.append(f"ditorch doctor --verbose lists {counted}")
        return "\n".join(lines)


def diagnose(backend: Backend, patches: list[Patch]) -> Diagnosis:
    """Look at the machine, the backend and the ledger.

    Example: ``diagnose(ditorch.backend, ditorch.patches()).missing``
    """
    of_kind: dict[str, dict[str, str]] = {"emulated": {}, "hint": {}, "unsupported": {}}
    for patch in patches:
        of_kind.setdefault(patch.kind, {})[patch.what] = patch.why
    return Diagnosis(
        versions={
            "ditorch": package_version("ditorch"),
            "framework": backend.framework,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        backend={
            "name": backend.name,
            "vendor": backend.vendor,
            "device type": backend.device_type,
            "module": backend.where_module(),
            "redirected": bool(patches),
        },
        candidates=[
            {"name": c.backend.name, "usable": c.usable, "reason": c.reason} for c in candidates_beside(backend)
        ],
        devices=_devices(backend),
        collectives=_collectives(backend),
        patched=dict(Counter(patch.kind for patch in patches)),
        emulated=of_kind["emulated"],
        hints=of_kind["hint"],
        missing=of_kind["unsupported"],
        gaps=_gaps(backend, of_kind["emulated"]),
        environment={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("DITORCH_") or name in ("CUDA_VISIBLE_DEVICES", backend.visible_devices)
        }
        | without_effect(backend),
        op_tools_patches=_op_tools_patches(),
    )


def candidates_beside(backend: Backend) -> list[Any]:
    """All backends with their state; the software accelerator is not built just to be listed.

    Example: ``[c.backend.name for c in candidates_beside(ditorch.backend)]``
    """
    return candidates(skip_building=backend.name != "soft")


def _op_tools_patches() -> dict[str, str]:
    loaded = sys.modules.get("op_tools.watch.patches")
    return {} if loaded is None else {patch.what: patch.why for patch in loaded.listed()}


def _devices(backend: Backend) -> list[dict[str, Any]]:
    module = backend.find_module()
    found = []
    for index in range(_ask(module, "device_count") or 0):
        if not backend.native:
            # torch_npu aborts in a later backward where a device was asked that holds no tensor yet.
            _ask(torch, "empty", 1, device=torch.device(backend.device_type, index))
        free, total = _ask(module, "mem_get_info", index) or (None, None)
        capability = _ask(torch.cuda, "get_device_capability", index)  # what CUDA code sees
        found.append(
            {
                "device": f"{backend.device_type}:{index}",
                "name": _ask(module, "get_device_name", index),
                "memory free": free,
                "memory total": total,
                "capability": None if capability is None else list(capability),
            }
        )
    return found


def _collectives(backend: Backend) -> dict[str, Any]:
    available = torch.distributed.is_available()
    registered = available and backend.collective in torch.distributed.Backend.backend_list
    return {
        "nccl means": backend.collective,
        "registered": bool(registered),
        "filled by ditorch": sorted(backend.collective_gaps),
    }


def _ask(module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    # A diagnosis must come out even where half of the vendor's module fails.
    try:
        return getattr(module, name)(*args, **kwargs)
    except Exception:
        return None


_NOTABLE = {
    "torch.compile": "torch.compile",
    "torch.cuda.CUDAGraph": "torch.cuda.CUDAGraph",
    "torch.distributed.distributed_c10d.split_group": "torch.distributed.split_group",
}


def _gaps(backend: Backend, emulated: dict[str, str]) -> dict[str, str]:
    found = {shown: emulated[what] for what, shown in _NOTABLE.items() if what in emulated}
    found.update({name: f"not there. Instead: {instead}" for name, instead in backend.gaps.items()})
    found.update(getattr(backend.find_module(), "_gaps", {}))
    return found


def _device_line(device: dict[str, Any]) -> str:
    free, total = (readable(device[key]) for key in ("memory free", "memory total"))
    capability = device["capability"]
    able = "" if capability is None else f", capability {capability[0]}.{capability[1]}"
    return f"{device['device']}: {device['name']}, {free} of {total} free{able}"


def readable(size: int | None) -> str:
    """A number of bytes for people.

    Example: ``readable(3 * 2**30) == "3.0 GiB"``
    """
    if size is None:
        return "an unknown size"
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
