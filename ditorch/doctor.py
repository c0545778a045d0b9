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
    environment: dict[str, str]
    op_tools_patches: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON.

        Example: ``json.dumps(ditorch.doctor().as_dict())``
        """
        return asdict(self)

    def __str__(self) -> str:
        lines: list[str] = []
        for title, content in self.as_dict().items():
            if title == "op_tools_patches" and not content:
                continue  # no tool is active
            lines.append(title)
            rows = content.items() if isinstance(content, dict) else ((_first(row), _rest(row)) for row in content)
            lines.extend(f"  {name}: {value}" for name, value in rows)
            if not content:
                lines.append("  none")
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


def _ask(module: Any, name: str, *args: Any) -> Any:
    # A diagnosis must come out even where half of the vendor's module fails.
    try:
        return getattr(module, name)(*args)
    except Exception:
        return None


def _first(row: dict[str, Any]) -> Any:
    return next(iter(row.values()))


def _rest(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in list(row.items())[1:])
