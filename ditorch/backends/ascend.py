"""Huawei Ascend through ``torch_npu``."""

from ditorch.backend import Backend
from ditorch_common.environment import VENDORS


def capability(name: str) -> tuple[int, int]:
    """The NVIDIA generation with a chip's abilities: bfloat16 came with the 910B, 8-bit floats with the 950.

    Example: ``capability("Ascend910B4") == (8, 0)``
    """
    chip = name.lower().replace(" ", "").removeprefix("ascend")
    if chip.startswith(("950", "910_95")):
        return (9, 0)
    if chip.startswith(("910b", "910_93", "910c")):
        return (8, 0)
    return (7, 0)  # 910A, 310P, 310B: float16 alone


BACKEND = Backend(
    name="ascend",
    vendor="Huawei Ascend",
    device_type="npu",
    package="torch_npu",
    collective="hccl",
    variables=VENDORS["torch_npu"],
    capability=capability,
    grad_scaler="amp.GradScaler",
    compilers=("npu",),
    profiler_activity="PrivateUse1",
)
