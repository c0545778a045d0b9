"""``import ditorch`` makes PyTorch code written for CUDA run on the accelerator of this machine."""

from __future__ import annotations

import os
import sys
from functools import partial

import ditorch_common.versions  # noqa: F401  (first: it refuses a PyTorch that is too old)
from ditorch import backend as _backend_module
from ditorch.backend import Backend
from ditorch.console import say
from ditorch.discovery import MAPPED, NoBackendError, choose, mapped_variables
from ditorch.doctor import Diagnosis, diagnose
from ditorch.errors import UnsupportedError
from ditorch.patching import Ledger, Patch
from ditorch_common.environment import CUDA_VISIBLE, hides_all
from ditorch_common.settings import DITORCH

__version__ = "0.1.0"
__all__ = [
    "Backend",
    "Diagnosis",
    "NoBackendError",
    "Patch",
    "UnsupportedError",
    "activate",
    "backend",
    "deactivate",
    "doctor",
    "framework",
    "patches",
]

del _backend_module
backend: Backend
"""The chosen backend."""
framework: str
"""Name and version of the package that drives the device, as in ``torch_npu:2.1.0.post3``."""

_ledger = Ledger()


def activate(device: str | None = None) -> Backend:
    """Choose a backend and let ``cuda`` mean its device; ``import ditorch`` has done this already.

    Example: ``ditorch.deactivate(); ditorch.activate("cpu")``
    """
    global backend, framework
    for mistake in DITORCH.new_mistakes():
        say(mistake)
    chosen = choose(device)
    if _ledger.patches:
        if chosen is backend:
            return chosen
        raise RuntimeError(
            f"ditorch is active on {backend.name}: call ditorch.deactivate() before activate({chosen.name!r})"
        )
    chosen.load()
    backend, framework = chosen, chosen.framework
    if not chosen.native and not _flag("DITORCH_DISABLE_MOCK"):
        from ditorch import redirect

        if chosen.visible_devices and hides_all(os.environ):
            why = "names no device: torch.cuda is left as it is and has none, as on CUDA"
            _ledger.record(Patch(CUDA_VISIBLE, why, "hint", "none"))
            return chosen
        added = MAPPED.pop(chosen.name, set())
        try:
            for variable, own in mapped_variables(chosen).items():
                undo = partial(_unset, own) if own in added else None
                _ledger.record(Patch(variable, f"means {own}={os.environ[own]}", "mapped", "registered", None, undo))
            redirect.install(_ledger, chosen, _flag("DITORCH_SHOW_DEVICE_AS_CUDA"))
        except BaseException:
            _ledger.undo_all()
            raise
    return chosen


def deactivate() -> None:
    """Give PyTorch back its original objects; the device stays usable under its own name.

    Example: ``ditorch.deactivate(); assert not ditorch.patches()``
    """
    _ledger.undo_all()


def patches() -> list[Patch]:
    """Everything that ditorch changed in PyTorch, in the order in which it was done.

    Example: ``{patch.what for patch in ditorch.patches()}``
    """
    return list(_ledger.patches)


def doctor() -> Diagnosis:
    """Versions, devices, memory, collectives, what is patched and what is missing.

    Example: ``print(ditorch.doctor())``
    """
    return diagnose(backend, patches())


def _is_command() -> bool:
    """Whether this process is the ``ditorch`` command, which chooses the device itself."""
    started = sys.orig_argv[1:3] if sys.orig_argv[1:2] == ["-m"] else []
    return started == ["-m", "ditorch"] or os.path.basename(sys.argv[0] if sys.argv else "") == "ditorch"


def _unset(variable: str) -> None:
    os.environ.pop(variable, None)


def _flag(name: str) -> bool:
    text = DITORCH.read(name).lower()
    if text in ("1", "true", "on", "yes"):
        return True
    if text in ("0", "false", "off", "no"):
        return False
    raise ValueError(f"{name}={text!r}: expected 0 or 1")


if not _is_command():
    activate()
