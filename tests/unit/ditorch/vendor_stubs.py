"""Writes stand-ins for the vendors' packages: the Python surface of each, recording its calls, no device behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MAKE = """
import torch
from tests.unit.ditorch.stand_ins import recorded
__version__ = "9.8.7"
module = recorded("{backend}", "{device_type}", "torch.{device_type}")
"""
REGISTER = """
torch.utils.rename_privateuse1_backend("{device_type}")
torch._register_device_module("{device_type}", module)
"""


def write_package(folder: Path, package: str, device_type: str, backend: str = "names only") -> None:
    """Write a vendor's package; the places where its device module appears differ from vendor to vendor."""
    home = folder / package
    home.mkdir(parents=True)
    make = MAKE.format(backend=backend, device_type=device_type)
    if package == "torch_dipu":
        (home / "__init__.py").write_text(make + "dipu = module\n")
        (home / "dipu.py").write_text("import sys, torch_dipu\nsys.modules[__name__] = torch_dipu.module\n")
    elif package == "habana_frameworks":
        (home / "torch").mkdir()
        (home / "__init__.py").write_text("")
        (home / "torch" / "__init__.py").write_text("")
        (home / "torch" / "core.py").write_text("")
        (home / "torch" / "hpu.py").write_text(make + "torch.hpu = module\n")
        info = folder / "habana_torch_plugin-9.8.7.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: habana-torch-plugin\nVersion: 9.8.7\n")
    else:
        (home / "__init__.py").write_text(make + REGISTER.format(device_type=device_type))


def write_live(folder: Path, device_type: str) -> None:
    """Make torch.xpu or torch.mps answer as if a device were there, under the signatures they have in this PyTorch."""
    folder.mkdir(parents=True, exist_ok=True)
    more = ""
    if device_type == "mps":
        more = "import torch.mps.event\n"
        more += "torch.mps.event.Event = make(surfaces.of_module(torch.mps.event), 'mps', 'torch.mps').Event\n"
        more += "torch.backends.mps.is_built = torch.backends.mps.is_available = lambda: True\n"
    (folder / f"stub_{device_type}.py").write_text(
        "import torch\nfrom tests.unit.ditorch.stand_ins import make, surfaces\n"
        f"module = make(surfaces.of_module(torch.{device_type}), '{device_type}', 'torch.{device_type}')\n"
        "for name, value in vars(module).items():\n"
        f"    if not name.startswith('__'): setattr(torch.{device_type}, name, value)\n" + more
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
