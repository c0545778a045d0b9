"""Environment variables of CUDA and the vendors' own, translated before ``import torch``: torch is not imported here.

Several vendors' packages are loaded by ``import torch`` itself and read their variables then.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, MutableMapping
from types import MappingProxyType
from typing import NamedTuple

CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
PLUGIN_DEVICES = ("gcu", "hpu", "mlu", "musa", "npu", "soft", "supa")
"""Device types of the backends that PyTorch itself does not have: the one list, for op_tools too."""


class Variables(NamedTuple):
    """What one vendor's package reads.

    Example: ``Variables("MUSA_VISIBLE_DEVICES", {"CUDA_LAUNCH_BLOCKING": "MUSA_LAUNCH_BLOCKING"})``
    """

    visible_devices: str | None = None
    """Plays the part of ``CUDA_VISIBLE_DEVICES``."""
    same: Mapping[str, str] = MappingProxyType({})
    """CUDA's variable -> the vendor's with the same meaning and the same values."""
    ascending: bool = False
    """Whether the vendor takes device numbers in ascending order alone."""


def _renamed(names: str, *pairs: tuple[str, str]) -> dict[str, str]:
    """Each name under every replacement of one word by another."""
    found = {}
    for name in names.split():
        vendor = name
        for word, other in pairs:
            vendor = vendor.replace(word, other)
        found[name] = vendor
    return found


_NCCL = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_ENABLE_MONITORING "
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_DESYNC_DEBUG TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_TRACE_BUFFER_SIZE"
)
VENDORS: Mapping[str, Variables] = {
    "torch_npu": Variables(
        "ASCEND_RT_VISIBLE_DEVICES",
        {
            "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_NPU_ALLOC_CONF",
            "CUDA_LAUNCH_BLOCKING": "ASCEND_LAUNCH_BLOCKING",
            **_renamed(_NCCL, ("NCCL", "HCCL")),
        },
        ascending=True,
    ),
    "torch_mlu": Variables("MLU_VISIBLE_DEVICES", {"PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_MLU_ALLOC_CONF"}),
    "torch_musa": Variables(
        "MUSA_VISIBLE_DEVICES",
        {
            **_renamed("PYTORCH_CUDA_ALLOC_CONF CUDA_LAUNCH_BLOCKING", ("CUDA", "MUSA")),
            **_renamed(_NCCL, ("NCCL", "MCCL")),
        },
    ),
    "torch_br": Variables("SUPA_VISIBLE_DEVICES"),
    "torch_supa": Variables("SUPA_VISIBLE_DEVICES"),
    "torch_gcu": Variables("TOPS_VISIBLE_DEVICES"),
    "habana_frameworks": Variables("HABANA_VISIBLE_MODULES"),
}
STEERING = ("PYTORCH_CUDA_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING", *_NCCL.split())
"""CUDA's variables that change how a run behaves: named by ``ditorch doctor`` where a vendor has no counterpart."""


def visible_numbers(value: str) -> list[int]:
    """The devices that a value of ``CUDA_VISIBLE_DEVICES`` names; as in CUDA, the first invalid entry ends the list.

    Example: ``visible_numbers("1,0,-1,2") == [1, 0]``
    """
    found: list[int] = []
    for entry in value.split(","):
        text = entry.strip()
        if text.startswith(("GPU-", "MIG-")):
            raise ValueError(f"{CUDA_VISIBLE}={value}: {text} is the UUID of an NVIDIA device; write device numbers")
        if not text.isdigit() or int(text) in found:
            break
        found.append(int(text))
    return found


def hides_all(environment: Mapping[str, str]) -> bool:
    """Whether ``CUDA_VISIBLE_DEVICES`` is set and names no device: CUDA code then sees none.

    Example: ``hides_all({"CUDA_VISIBLE_DEVICES": ""})``
    """
    value = environment.get(CUDA_VISIBLE)
    return value is not None and not visible_numbers(value)


def translated(
    environment: Mapping[str, str], variables: Variables, write: Callable[[str], str] | None = None
) -> dict[str, str]:
    """What to set for a vendor; a variable of the vendor's that the user has set stays.

    Example: ``translated({"CUDA_VISIBLE_DEVICES": "1,0"}, VENDORS["torch_npu"])``
    """
    found: dict[str, str] = {}
    value = environment.get(CUDA_VISIBLE)
    if value is not None and variables.visible_devices and not hides_all(environment):
        numbers = visible_numbers(value)
        if variables.ascending:
            numbers.sort()
        text = ",".join(map(str, numbers))
        found[variables.visible_devices] = write(text) if write else text
    found |= {vendor: environment[cuda] for cuda, vendor in variables.same.items() if cuda in environment}
    return {name: value for name, value in found.items() if name not in environment}


def set_for_installed(environment: MutableMapping[str, str]) -> None:
    """Translate for every vendor's package on this machine; nothing is imported.

    Example: ``set_for_installed(os.environ)`` before ``import torch``
    """
    for package, variables in VENDORS.items():
        try:
            if importlib.util.find_spec(package) is not None:
                environment.update(translated(environment, variables))
        except (ImportError, ValueError):
            continue
