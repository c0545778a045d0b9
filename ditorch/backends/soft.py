"""The software accelerator that ditorch brings along: host memory behind a real device type."""

import importlib

from ditorch.backend import Backend
from ditorch_common.environment import Variables


def _probe() -> tuple[bool, str]:
    try:
        _load()
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
    return True, "built"


def _load() -> None:
    importlib.import_module("ditorch.soft").load()


def _count(visible: str) -> str:
    """The devices are all alike, so how many are visible is all that matters; it cannot be none."""
    named = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return str(len(named)) if named else ""


BACKEND = Backend(
    name="soft",
    vendor="software accelerator",
    device_type="soft",
    package="ditorch.soft",
    module_path="torch.soft",
    variables=Variables("DITORCH_SOFT_DEVICES"),
    visible_devices_value=_count,
    profiler_activity="PrivateUse1",
    collective="softccl",
    collective_gaps=frozenset({"avg"}),
    capability=(8, 0),
    fallback=True,
    probe=_probe,
    loader=_load,
)
