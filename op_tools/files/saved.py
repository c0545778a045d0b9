"""Comparisons on disk: both sides of a wrong call, and a script that repeats it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..call.arguments import numbers_of
from ..copies.invocation import Invocation
from . import archive, reproducer
from .header import content, header


def save_comparison(
    folder: Path,
    call: Invocation,
    device: Mapping[str, Any],
    golden: Mapping[str, Any],
    *,
    reason: str,
    observed: float,
) -> list[Path]:
    """Save what the device and the CPU returned for one call; returns the files that were written.

    Both sides map parts to values: `input` is (args, kwargs), as they were before on the device, as they are afterwards
    on the CPU; `output` is the result, `grad_outputs` and `grad_inputs` are sequences. Files that are there are kept.
    `reason` and `observed` say what differs, and by how much.

    >>> save_comparison(folder, call, {"input": (args, {}), "output": y}, {"output": z}, reason="", observed=1.0)
    ... # doctest: +SKIP
    """
    written = []
    for side, parts in (("device", device), ("cpu", golden)):
        (folder / side).mkdir(parents=True, exist_ok=True)
        for part, value in parts.items():
            path = folder / side / f"{part}.pth"
            if path.exists():
                continue
            facts = header(call) if part == "input" and side == "device" else {"name": call.op}
            archive.save(path, {**facts, **content(part, value)})
            written.append(path)
    writes = bool(call.traits.mutates) or "out" in device["input"][1]
    part = "grad" if "grad_outputs" in device else "output"
    labels = numbers_of(call.op, *device["input"]).labels("grad")
    script = reproducer.write(
        folder, call, reason=reason, part=part, observed=observed, writes=writes, gradients=labels
    )
    written.append(script)
    return written
