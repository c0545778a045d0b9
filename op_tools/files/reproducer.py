"""Writes a script that repeats one saved call, on its own: PyTorch and the saved files are all it needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..copies.invocation import Invocation
from . import archive

_TEMPLATE: Final = '''"""{title}

{facts}

usage: python reproduce.py [device]     (exit code 1: the difference is still there, 0: it is gone)
"""

import sys
from pathlib import Path

import torch
{imports}
HERE = Path(__file__).resolve().parent
ROUNDED_TO = {rounded_to}  # what autocast rounds float32 arguments to in this call
LOW = {autocast}  # dtype of the autocast region that the call was made in
GRADIENTS = {gradients}  # names of the gradients of the tensors among the arguments, in order
function = {function}


def plain(value):
    """Values as the call had them."""
    if isinstance(value, (list, tuple)):
        return type(value)(plain(v) for v in value)
    if not isinstance(value, dict):
        return value
    tag, given = value.get("__op_tools__"), plain(value.get("value"))
    if tag is None:
        return {{k: plain(v) for k, v in value.items()}}
    if tag in ("dtype", "constant"):
        return getattr(torch, given.removeprefix("torch."))
    if tag in ("slice", "range"):
        return {{"slice": slice, "range": range}}[tag](*given)
    if tag in ("size", "group", "device"):
        return {{"size": torch.Size, "group": tuple, "device": torch.device}}[tag](given)
    if tag == "ellipsis":
        return Ellipsis
    raise SystemExit(f"an argument of type {{value.get('type')}} was not captured: the call cannot be repeated")


def each(value, change):
    """The same nest of containers with every tensor, dtype and device changed."""
    if isinstance(value, (torch.Tensor, torch.dtype, torch.device)):
        return change(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(each(v, change) for v in value)
    if isinstance(value, dict):
        return {{k: each(v, change) for k, v in value.items()}}
    return value


def tensors(value):
    found = []
    each(value, lambda v: found.append(v) if isinstance(v, torch.Tensor) else None)
    return found


def load(name):
    path = HERE / "device" / f"{{name}}.pth"
    return plain(torch.load(path, map_location="cpu", weights_only=True)) if path.exists() else None


WIDE = {{torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
        torch.complex64: torch.complex128}}


def run(device, wide):
    saved, leaves = load("input"), []

    def place(value):
        if isinstance(value, torch.device):
            return torch.device(device)
        dtype = value if isinstance(value, torch.dtype) else value.dtype
        dtype = WIDE.get(dtype, dtype) if wide else dtype
        if isinstance(value, torch.dtype):
            return dtype
        given = value.detach()
        if wide and ROUNDED_TO is not None and value.dtype == torch.float32:
            given = given.to(ROUNDED_TO)
        copy = torch.empty_strided(value.size(), value.stride(), dtype=dtype, device=device).copy_(given)
        leaves.append(copy.requires_grad_(value.requires_grad))
        return copy

    args, kwargs = each((saved["args"], saved["kwargs"]), place)
    with torch.autocast(torch.device(device).type, dtype=LOW or torch.bfloat16, enabled=LOW is not None and not wide):
        {enter}result = function(*args, **kwargs)
    found = {{f"output[{{i}}]": t.detach() for i, t in enumerate(tensors(result))}}
    sent = load("grad_outputs")
    if sent is not None:
        grads = tensors(result), tensors(sent["grad_outputs"])
        pairs = [(r, g.to(r.device, r.dtype)) for r, g in zip(*grads) if r.requires_grad]
        wanted = [t for t in leaves if t.requires_grad]
        got = torch.autograd.grad([r for r, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        labels = [label for label, t in zip(GRADIENTS, leaves) if t.requires_grad]
        found.update({{label: g for label, g in zip(labels, got) if g is not None}})
    return {{name: t.cpu() for name, t in found.items()}}


def main():
    device = sys.argv[1] if len(sys.argv) > 1 else "{device}"
    mine, exact = run(device, wide=False), run("cpu", wide=True)
    still = False
    for name, t in mine.items():
        want = exact[name].to(t.dtype)
        off = (t.double() - want.double()).abs().nan_to_num(nan=float("inf"))
        off[(t == want) | (t.isnan() & want.isnan())] = 0
        worst = off.flatten().argmax() if off.numel() else None
        size = float(off.max()) if off.numel() else 0.0
        print(f"{{name:<14}} {{device}} against the CPU in float64: max_abs_diff {{size:.6g}}", end="")
        print(f" ({{t.flatten()[worst].item():.9g}} instead of {{want.flatten()[worst].item():.9g}})" if size else "")
        still = still or (name.startswith("{part}") and size >= {observed} / 4 and size > 0)
    print("the difference is still there" if still else "the difference is gone")
    return 1 if still else 0


if __name__ == "__main__":
    raise SystemExit(main())
'''


def write(
    folder: Path,
    call: Invocation,
    *,
    reason: str,
    part: str,
    observed: float,
    writes: bool,
    gradients: Sequence[str] = (),
) -> Path:
    """Write `reproduce.py` into the folder of a saved call (`write(folder, call, reason=..., ...)`).

    `part` is what differed, `observed` by how much, `writes` whether the call changes its arguments; `gradients` are
    the names of the gradients of its tensors.
    """
    op, site, region = call.op, call.site, call.region
    module = op.rsplit(".", 1)[0] if not op.startswith("torch.") else ""
    imports = "import ditorch  # noqa: F401  (the device comes from here)\n" if "ditorch" in sys.modules else ""
    if module:
        imports += f"import {module}\n"
    lines = [site.location, f"module {site.module}" if site.module else "", reason]
    text = _TEMPLATE.format(
        title=f"{op} is wrong on {region.device}: repeats the call and compares it with the CPU in float64.",
        facts="\n".join(line.replace("\\", "\\\\").replace('"""', "'''") for line in lines if line),
        imports=imports,
        rounded_to=region.rounded_to,
        autocast=region.autocast,
        function=op,
        gradients=list(gradients),
        device=region.device,
        part=part,
        observed=repr(observed if observed < float("inf") else 0.0),
        enter="args, kwargs = each((args, kwargs), lambda v: v * 1 if isinstance(v, torch.Tensor) "
        "and v.requires_grad else v)\n        "
        if writes
        else "",
    )
    path = folder / "reproduce.py"
    archive.save_text(str(path), text)
    return path
