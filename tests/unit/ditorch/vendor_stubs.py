"""Writes stand-ins for the vendors' packages: the Python surface of each, recording its calls, no device behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# What the device modules of out-of-tree backends offer under the same names as torch.cuda.
SURFACE = (
    "set_device synchronize empty_cache memory_allocated max_memory_allocated memory_reserved "
    "reset_peak_memory_stats manual_seed manual_seed_all get_rng_state set_rng_state current_stream "
    "default_stream set_stream get_device_name mem_get_info"
)
MODULE = """
import os, types
import torch
def make(device_type, name, count=2):
    module = types.ModuleType(name)
    module.calls = []
    def recorder(called):
        def call(*args, **kwargs):
            module.calls.append((called, args, kwargs))
        return call
    for called in SURFACE.split():
        setattr(module, called, recorder(called))
    module.is_available = lambda: True
    module.device_count = lambda: count
    module.current_device = lambda: 0
    module.mem_get_info = lambda device=None: (1, 2)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module._is_in_bad_fork = lambda: False
    module.get_device_name = lambda device=None: "stub"
    module.get_device_properties = lambda device=None: types.SimpleNamespace(name="stub", total_memory=2)
    class Stream:
        def __init__(self, *args, **kwargs):
            module.calls.append(("Stream", args, kwargs))
    class Event:
        def __init__(self, *args, **kwargs):
            module.calls.append(("Event", args, kwargs))
    module.Stream, module.Event = Stream, Event
    module.visible = {k: v for k, v in os.environ.items() if "VISIBLE" in k}
    return module
""".replace("SURFACE", repr(SURFACE))
OUT_OF_TREE = (
    MODULE
    + """
__version__ = "9.8.7"
torch.utils.rename_privateuse1_backend("{device_type}")
torch._register_device_module("{device_type}", make("{device_type}", "torch.{device_type}"))
"""
)
IN_TREE = (
    MODULE
    + """
__version__ = "9.8.7"
module = make("{device_type}", "torch.{device_type}")
"""
)


def write_package(folder: Path, package: str, device_type: str) -> None:
    """Write a vendor's package; the places where its device module appears differ from vendor to vendor."""
    home = folder / package
    home.mkdir(parents=True)
    if package == "torch_dipu":
        (home / "__init__.py").write_text(IN_TREE.replace("{device_type}", device_type) + "dipu = module\n")
        (home / "dipu.py").write_text("import sys, torch_dipu\nsys.modules[__name__] = torch_dipu.module\n")
    elif package == "habana_frameworks":
        (home / "torch").mkdir()
        (home / "__init__.py").write_text("__version__ = '9.8.7'\n")
        (home / "torch" / "__init__.py").write_text("")
        (home / "torch" / "core.py").write_text("")
        (home / "torch" / "hpu.py").write_text(IN_TREE.replace("{device_type}", "hpu") + "torch.hpu = module\n")
    else:
        (home / "__init__.py").write_text(OUT_OF_TREE.replace("{device_type}", device_type))


def write_xpu(folder: Path) -> None:
    """Make torch.xpu, which is part of PyTorch, answer as if an Intel GPU were there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stub_xpu.py").write_text(
        IN_TREE.replace("{device_type}", "xpu")
        + "for name, value in vars(module).items():\n"
        + "    if not name.startswith('__'): setattr(torch.xpu, name, value)\n"
    )


def run(code: str, *folders: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that finds the stand-ins and the project, on no chosen device."""
    project = Path(__file__).resolve().parents[3]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DITORCH_") and k != "CUDA_VISIBLE_DEVICES"}
    paths = os.pathsep.join([*map(str, folders), str(project)])
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**clean, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
