"""What ditorch has to know about one vendor's PyTorch: a frozen description, no behaviour."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from ditorch_common.environment import Variables


@dataclass(frozen=True)
class Backend:
    """One accelerator and how PyTorch reaches it.

    Example::

        Backend("ascend", "Huawei Ascend", "npu", package="torch_npu", collective="hccl")
    """

    name: str
    """How the user names it in ``DITORCH_DEVICE``; the device type works there too."""
    vendor: str
    device_type: str
    """What ``tensor.device.type`` really is."""
    package: str | None = None
    """The Python package that adds the device to PyTorch; ``None`` when PyTorch itself has it."""
    module_path: str | None = None
    """Where the vendor's counterpart of ``torch.cuda`` lives; by default ``torch.<device_type>``."""
    collective: str | None = None
    """Name of its collective backend in ``torch.distributed``: what ``nccl`` turns into."""
    variables: Variables = field(default_factory=Variables)
    """The environment variables that play the part of ``CUDA_VISIBLE_DEVICES`` and others of CUDA's."""
    visible_devices_value: Callable[[str], str] | None = None
    """Turns the value of ``CUDA_VISIBLE_DEVICES`` into that variable's; by default it is the same."""
    capability: tuple[int, int] | Callable[[str], tuple[int, int]] | None = None
    """Answer of ``torch.cuda.get_device_capability``, which CUDA code compares with NVIDIA's numbers: the
    generation whose abilities the device has, or a function of the device's name. Without it the vendor's
    module is asked."""
    native: bool = False
    """True where ``cuda`` already means this device, so that nothing is patched."""
    fallback: bool = False
    """True for devices that every machine has: chosen only when there is no accelerator."""
    shows_as_cuda: bool = True
    """Whether its tensors can be told apart from CPU tensors, and so be shown as ``cuda:N``."""
    gaps: Mapping[str, str] = field(default_factory=dict)
    """CUDA name -> what to do instead, for calls that this backend cannot do."""
    collective_gaps: frozenset[str] = frozenset()
    """What its collectives lack; ``avg`` (ReduceOp.AVG) is filled by ditorch."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Name below ``torch.cuda`` -> the vendor's name for the same, where the two differ."""
    grad_scaler: str | None = None
    """The vendor's own ``GradScaler`` below its module, for chips that saturate where others make infinities."""
    compilers: tuple[str, ...] = ()
    """Dynamo backends that the vendor registers, best first: used where inductor does not know the device."""
    one_device_per_process: bool = False
    """True where a process owns one device, which every index means."""
    distribution: str | None = None
    """The installed package whose version is the vendor's, where ``package`` has none."""
    profiler_activity: str | None = None
    """Name of the ``ProfilerActivity`` that stands for the device; ``None``: host activity only."""
    probe: Callable[[], tuple[bool, str]] | None = None
    """Says whether the device can be used here and why not; by default asks package and module."""
    loader: Callable[[], None] | None = None
    """Makes the device known to PyTorch; by default imports ``package``."""
    make_module: Callable[[], Any] | None = None
    """Builds the counterpart of ``torch.cuda`` where the vendor has none as a module."""

    def installed(self) -> bool:
        """Whether the vendor's package is on this machine; never imports it.

        Example: ``BACKENDS["ascend"].installed()`` is False on a machine without ``torch_npu``.
        """
        if self.package is None:
            return True
        try:
            return importlib.util.find_spec(self.package) is not None
        except (ImportError, ValueError):
            return False

    def load(self) -> None:
        """Make the device known to PyTorch (imports the vendor's package).

        Example: ``backend.load(); torch.empty(1, device=backend.device_type)``
        """
        if self.loader is not None:
            self.loader()
        elif self.package is not None:
            importlib.import_module(self.package)

    def usable(self) -> tuple[bool, str]:
        """Whether a tensor can be put there now, and the reason when it cannot.

        Example: ``usable, why = backend.usable()``
        """
        if not self.installed():
            return False, f"package {self.package} is not installed"
        if self.probe is not None:
            return self.probe()
        try:
            self.load()
        except Exception as error:
            return False, f"import {self.package} failed: {type(error).__name__}: {error}"
        module = self.find_module()
        if module is None:
            return False, f"{self.where_module()} does not exist after import {self.package}"
        return ask_module(module)

    def where_module(self) -> str:
        """Full name of the vendor's counterpart of ``torch.cuda``.

        Example: ``"torch.npu"``
        """
        return self.module_path or f"torch.{self.device_type}"

    def find_module(self) -> Any | None:
        """The vendor's counterpart of ``torch.cuda``, or None.

        Example: ``backend.find_module().synchronize()``
        """
        if self.make_module is not None:
            return self.make_module()
        path = self.where_module()
        if path.startswith("torch."):
            found: Any = torch
            for part in path.split(".")[1:]:
                found = getattr(found, part, None)
            return found
        try:
            return importlib.import_module(path)
        except ImportError:
            return None

    @property
    def module(self) -> Any:
        """The vendor's counterpart of ``torch.cuda``; raises when there is none.

        Example: ``ditorch.backend.module.memory_allocated()``
        """
        found = self.find_module()
        if found is None:
            raise RuntimeError(f"ditorch: {self.name} has no module {self.where_module()}")
        return found

    @property
    def framework(self) -> str:
        """Name and version of the package that drives the device.

        Example: ``"torch_npu:2.1.0.post3"``
        """
        package = self.package or "torch"
        return f"{package}:{package_version(package, self.distribution)}"

    @property
    def visible_devices(self) -> str | None:
        """The variable that plays the part of ``CUDA_VISIBLE_DEVICES``.

        Example: ``"ASCEND_RT_VISIBLE_DEVICES"``
        """
        return self.variables.visible_devices


def ask_module(module: ModuleType | Any) -> tuple[bool, str]:
    """Ask a ``torch.cuda``-like module whether it has a device.

    Example: ``ask_module(torch.xpu)`` gives ``(False, "...is_available() is False")`` without one.
    """
    label = getattr(module, "__name__", type(module).__name__)
    try:
        if hasattr(module, "is_available") and not module.is_available():
            return False, f"{label}.is_available() is False"
        if hasattr(module, "device_count") and module.device_count() < 1:
            return False, f"{label}.device_count() is 0"
    except Exception as error:
        return False, f"{label} failed: {type(error).__name__}: {error}"
    return True, "available"


def package_version(package: str, distribution: str | None = None) -> str:
    """Version of an installed package, from its attribute or its metadata.

    Example: ``package_version("torch")``
    """
    try:
        module = importlib.import_module(package)
        version = getattr(module, "__version__", None)
        if version is not None:
            return str(version)
    except Exception:
        pass
    try:
        return importlib.metadata.version(distribution or package.partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
