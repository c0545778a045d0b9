"""The software accelerator that ditorch brings along: host memory behind a real device type."""

import importlib

from ditorch.backend import Backend


def _probe() -> tuple[bool, str]:
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
    package="ditorch.soft",
    module_path="torch.soft",
    visible_devices="DITORCH_SOFT_DEVICES",
    visible_devices_value=lambda text: str(len(text.split(","))),
    profiler_activity="PrivateUse1",
    collective="softccl",
    fallback=True,
    probe=_probe,
    loader=_load,
)
