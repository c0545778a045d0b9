"""Writes a script that repeats one saved call, on its own: PyTorch and the saved files are all it needs."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ..call.functions import name_of
from ..compat import OpOverload, OpOverloadPacket, registering_file
from ..copies.invocation import Invocation
from . import archive

_TEMPLATE: Final = Path(__file__).with_name("reproduce_template.py")
_FLAGS: Final = {
    "backends.cuda.matmul.allow_tf32": False,
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction": True,
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": True,
    "backends.cudnn.allow_tf32": True,
    "backends.cudnn.enabled": True,
    "backends.cudnn.deterministic": False,
    "backends.cudnn.benchmark": False,
}
_START, _END = "# --- the call ---\n", "# --- what is done with it; the same for every call ---\n"

_TITLE: Final = '''"""{op} is wrong on {device}: repeats the call and compares it with the CPU.

{facts}

usage: python reproduce.py [device] [--times N] [--plain] [--import MODULE]

exit code 0  the difference is gone: every result is within its bound
          1  the difference is still there: a result exceeds its bound again
          2  it could not be tried, so nothing is known; one line says why

The arguments are in device/, the reference in cpu/, verdicts and bounds in forward.pth and backward.pth. It needs only
PyTorch and what drives the device. Where op_tools is installed, the judgement of the run decides again; without it, or
with --plain, each element is compared with the reference and with the bound that was recorded for it.
"""
'''


def write(folder: Path, call: Invocation, device: str, reasons: Sequence[str]) -> Path:
    """Write `reproduce.py` into the folder of a saved call (`write(folder, call, "npu", ["output: NaN"])`)."""
    region, site = call.region, call.site
    expression, defined_in, modules = _expression(call.op, call.function)
    facts = [site.location, f"module {site.module}" if site.module else "", *reasons]
    title = (
        _TITLE.format(
            op=call.op,
            device=device,
            facts="\n".join(line.replace("\\", "\\\\").replace('"""', "'''") for line in facts if line),
        )
        .encode(errors="replace")
        .decode()
    )
    constants = (
        f"OP = {call.op!r}\n"
        f"FUNCTION = {expression!r}\n"
        f"DEFINED_IN = {defined_in!r}\n"
        f"DEVICE = {device!r}\n"
        f"AUTOCAST = {region.autocast}  # dtype of the autocast region that the call was made in\n"
        f"GRAD = {region.grad_enabled}  # whether autograd recorded the call\n"
        f"IMPORTS = {(*_device_modules(device), *modules)!r}  # what brings the device and the operator\n"
        f"FLAGS = {_flags()!r}  # of PyTorch, which change what kernels compute\n"
    )
    head, tail = _parts()
    path = folder / "reproduce.py"
    archive.save_text(str(path), title + head + constants + tail)
    return path


@functools.cache
def _parts() -> tuple[str, str]:
    """The template before and after the constants, without its docstring."""
    head, start, rest = _TEMPLATE.read_text().partition(_START)
    _, end, tail = rest.partition(_END)
    return head.partition("\n")[2] + start, end + tail


def _flags() -> dict[str, Any]:
    """The settings of PyTorch that change results, where they are not the defaults, by the name that sets them."""
    found: dict[str, Any] = {}
    for name, default in _FLAGS.items():
        with contextlib.suppress(AttributeError, RuntimeError):  # not in this release, or set in another way
            value = operator.attrgetter(name)(torch)
            if value != default:
                found[name] = value
    if torch.are_deterministic_algorithms_enabled():
        found["use_deterministic_algorithms"] = True
    if torch.get_default_dtype() != torch.float32:
        found["set_default_dtype"] = torch.get_default_dtype()
    return found


def _device_modules(device: str) -> list[str]:
    """The packages that bring a device which PyTorch itself does not have, such as `torch_npu`."""
    home: str = getattr(getattr(torch, device, None), "__name__", "torch").partition(".")[0]
    return [module for module in dict.fromkeys(("ditorch", home)) if module in sys.modules and module != "torch"]


def _expression(op: str, function: Callable[..., Any]) -> tuple[str, str, list[str]]:
    """How to find a function in another process: the expression, what defines it, and modules to import first."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        name = str(function)
        if name.startswith("aten."):
            return f"torch.ops.{name}", "", []
        file = registering_file("::".join(name.split(".")[:2]))
        found = [n for n, m in list(sys.modules.items()) if file and getattr(m, "__file__", None) == file]
        return f"torch.ops.{name}", file, [n for n in found if n != "__main__"]
    if op.startswith("autograd."):  # an addition that autograd made itself
        op = name_of(function)
    if _resolves(torch, op.removeprefix("torch.")) and op.startswith("torch."):
        return op, "", []
    module = getattr(function, "__module__", None) or op.rpartition(".")[0]
    name = getattr(function, "__qualname__", op.rpartition(".")[2])
    file = getattr(sys.modules.get(module), "__file__", None) or module
    return f"{module}:{name}", file, []


def _resolves(home: Any, name: str) -> bool:
    try:
        return callable(operator.attrgetter(name)(home))
    except (AttributeError, RuntimeError):
        return False
