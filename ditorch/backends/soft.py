"""The software accelerator that ditorch brings along: host memory behind a real device type."""

import importlib
import importlib.util

from ditorch.backend import Backend


def _probe() -> tuple[bool, str]:
    if importlib.util.find_spec("ditorch.soft") is None:
        return False, "ditorch.soft is not part of this installation"
    try:
        _load()
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
    return True, "built"


def _load() -> None:
    importlib.import_module("ditorch.soft").load()


BACKEND = Backend(
    name="soft",
    vendor="software accelerator",
    device_type="soft",
    collective="softccl",
    fallback=True,
    probe=_probe,
    loader=_load,
)
