"""Comparisons on disk: both sides of a wrong call, what was wrong, and a script that repeats it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import settings
from ..call.arguments import Numbers, numbers_of
from ..call.facts import has_free_vectors
from ..copies.invocation import BACKWARD, FORWARD, Invocation
from ..view.rows import Row
from . import archive, reproducer
from .captures import read
from .header import content, header


def save_comparison(
    folder: Path,
    call: Invocation,
    device: Mapping[str, Any],
    golden: Mapping[str, Any],
    wrong: Sequence[Row],
    given_on: Sequence[str] = (),
    made_on: Sequence[str] = (),
) -> list[Path]:
    """Save what the device and the CPU returned for one phase of a call; returns the files that were written.

    Both sides map parts to values: `input` is (args, kwargs), as they were before on the device, as they are afterwards
    on the CPU; `output` is the result, `grad_outputs` and `grad_inputs` are sequences. Files that are there are kept.
    `wrong` are the rows of what differs, the worst first; `given_on` and `made_on` the devices of the tensors among the
    arguments and results.

    >>> save_comparison(folder, call, {"input": (args, {}), "output": y}, {"output": z}, rows)  # doctest: +SKIP
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
    phase = BACKWARD if "grad_inputs" in device else FORWARD
    numbers = numbers_of(call.op, *device["input"])
    verdict: dict[str, Any] = {"wrong": [_finding(row, numbers) for row in wrong], "rules": _rules()}
    verdict["on_cpu"] = [number for number, device_type in enumerate(given_on) if device_type == "cpu"]
    archive.save(folder / f"{phase}.pth", {"name": call.op, **verdict})
    files = [folder / f"{each}.pth" for each in (FORWARD, BACKWARD)]
    reasons = [text for file in files if file.exists() for text in _reasons(file)]
    where = next((name for name in (*given_on, *made_on) if name != "cpu"), call.region.device)
    return [*written, folder / f"{phase}.pth", reproducer.write(folder, call, where, reasons)]


def _finding(row: Row, numbers: Numbers) -> dict[str, Any]:
    """What `reproduce.py` needs in order to look at one result again; `position` is that among the leaves."""
    position = (numbers.place(row.part, row.index) if row.part == "grad_input" else row.index) or 0
    bound = None if has_free_vectors(row.op) else row.bound  # another device may choose other signs
    facts = {"name": row.label, "part": row.part, "position": position, "place": list(row.where)}
    return {**facts, "reason": row.reason, "excess": row.excess, "bound": bound}


def _rules() -> dict[str, Any]:
    """The settings that decide about a verdict, for a replay elsewhere."""
    casts = dict(settings.Casts.from_environment().texts)
    standard = settings.choice("OP_AUTOCOMPARE_STANDARD")
    return {"standard": standard, "tolerances": settings.tolerances(), "casts": casts}


def _reasons(file: Path) -> list[str]:
    return [f"{found['name']}: {found['reason']}" for found in read(file)["wrong"][:1]]
