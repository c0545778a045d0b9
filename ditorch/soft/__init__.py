"""The software accelerator: a PyTorch device named ``soft`` on every machine.

``load()`` makes ``torch.device("soft")`` and ``torch.soft`` exist. Importing this package does
nothing else, so that machines with real hardware never build or load it.

>>> import torch, ditorch.soft
>>> ditorch.soft.load()
>>> torch.ones(2, device="soft").sum().item()
2.0
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import threading
from types import ModuleType
from typing import Any

from ditorch_common.settings import DITORCH

__all__ = ["is_loaded", "load", "faults"]

_lock = threading.RLock()
_native: ModuleType | None = None


def is_loaded() -> bool:
    """Whether the device exists in this process."""
    return _native is not None


def native() -> ModuleType:
    """The compiled extension; an error tells how to load it if it is not there yet."""
    if _native is None:
        raise RuntimeError(
            "the software accelerator is not loaded: `import ditorch` (with DITORCH_DEVICE=soft), "
            "or ditorch.soft.load()"
        )
    return _native


def load() -> None:
    """Build (first time only) and register the device; later calls do nothing."""
    global _native
    with _lock:
        if _native is not None:
            return
        import torch

        name = torch._C._get_privateuse1_backend_name()
        if name not in ("privateuseone", "soft"):
            raise RuntimeError(
                f"the software accelerator cannot be loaded beside the device {name!r}: PyTorch has room for one "
                f"out-of-tree device per process. Use DITORCH_DEVICE to choose one of them."
            )
        devices, limit = _device_count(), _memory_limit()
        from .build import MODULE, library

        path = str(library())
        loader = importlib.machinery.ExtensionFileLoader(MODULE, path)
        spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
        assert spec is not None
        extension = importlib.util.module_from_spec(spec)
        loader.exec_module(extension)

        extension.set_device_count(devices)
        for index in range(devices if limit else 0):
            extension.set_memory_limit(index, limit)
        if DITORCH.flag("DITORCH_SOFT_SHARED_RANDOM"):
            extension.share_random()
        _native = extension
        _register()

        from . import faults

        faults.from_environment()


def _pin_for_this_device() -> None:
    """Storages are pinned for the accelerator that is here; until 2.12 PyTorch pins them for CUDA unless told."""
    from torch import TypedStorage, UntypedStorage

    for kind in (UntypedStorage, TypedStorage):
        for name in ("is_pinned", "pin_memory"):
            method: Any = getattr(kind, name)
            if method.__defaults__ == ("cuda",):
                method.__defaults__ = (None,)


def _register() -> None:
    import torch

    _pin_for_this_device()
    from torch.utils import backend_registration

    from ..imports import AfterImport
    from . import collectives, cuda_only, dtensor, module, threads

    backend_registration.rename_privateuse1_backend("soft")
    torch._register_device_module("soft", module)
    backend_registration.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    module.fill_in()
    cuda_only.register()
    collectives.register()
    AfterImport("torch.distributed.tensor._random", dtensor.install).install()
    threads.finish_at_exit()


def _device_count() -> int:
    # One, since programs share their work among all that they find; one for each rank that torchrun starts here.
    text = DITORCH.read("DITORCH_SOFT_DEVICES") or os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise ValueError(f"DITORCH_SOFT_DEVICES must be a number from 1 to 64, got {text!r}")
    return int(text)


def _memory_limit() -> int:
    from .memory import parse_bytes

    text = DITORCH.read("DITORCH_SOFT_MEMORY_LIMIT")
    if not text:
        return 0
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"DITORCH_SOFT_MEMORY_LIMIT: {error}") from None


def __getattr__(name: str) -> Any:
    if name == "faults":
        return importlib.import_module(".faults", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
