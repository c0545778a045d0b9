"""What a file says about its call besides the tensors: the only place that writes and reads these fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..copies.invocation import Invocation, Region, Site
from . import archive
from .archive import ArchiveError


def header(call: Invocation) -> dict[str, Any]:
    """The fields of a call in the file with its arguments, encoded (`header(call)["name"]`)."""
    site, region = call.site, call.region
    autocast, rounded_to = region.autocast, region.rounded_to
    return {
        "name": call.op,
        "id": call.id,
        "location": site.location,
        "module": site.module,
        "step": site.step,
        "rank": site.rank,
        "device": region.device,
        "grad_enabled": region.grad_enabled,
        "autocast": None if autocast is None else {"device_type": region.device, "dtype": str(autocast)},
        "rounded_to": None if rounded_to is None else str(rounded_to),
        "rng": None if region.rng is None else dict(region.rng),
        "kind": "input",
    }


def content(part: str, value: Any) -> dict[str, Any]:
    """The values of a part, encoded: `input` (args and kwargs), `output`, `grad_outputs` or `grad_inputs`."""
    if part == "input":
        return {"args": archive.encode(value[0]), "kwargs": archive.encode(value[1])}
    return {"result" if part == "output" else part: archive.encode(value)}


def read_header(payload: Mapping[str, Any]) -> tuple[str, Site, Region]:
    """The operator, the site and the region of a call, from every form of the header ever written.

    >>> read_header({"name": "torch.add", "autocast": ["cuda", "bfloat16"]})[2].autocast
    torch.bfloat16
    """
    device, autocast = _autocast(payload.get("autocast"))
    rng = payload.get("rng") if isinstance(payload.get("rng"), dict) else None
    device = str(payload.get("device") or device or (rng or {}).get("type", "")).split(":")[0]
    step, rank = (_number(payload.get(key)) for key in ("step", "rank"))
    site = Site(str(payload.get("location") or ""), str(payload.get("module") or ""), step, rank)
    rounded_to = payload.get("rounded_to")
    region = Region(
        device,
        bool(payload.get("grad_enabled", True)),
        autocast,
        None if rounded_to is None else _dtype(rounded_to, "arguments rounded"),
        rng,
    )
    return str(payload.get("name") or ""), site, region


def _autocast(state: Any) -> tuple[str, torch.dtype | None]:
    """OpCapture wrote a dict, OpAutoCompare a list, before they shared a writer."""
    if isinstance(state, dict):
        return str(state.get("device_type", "")), _dtype(state.get("dtype"), "autocast")
    if isinstance(state, (list, tuple)) and len(state) == 2:
        return str(state[0]), _dtype(state[1], "autocast")
    return "", None


def _dtype(value: Any, what: str) -> torch.dtype:
    dtype = getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ArchiveError(f"{what} to {value!r}")
    return dtype


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0
