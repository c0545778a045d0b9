"""Huawei Ascend through ``torch_npu``."""

from ditorch.backend import Backend

BACKEND = Backend(
    name="ascend",
    vendor="Huawei Ascend",
    device_type="npu",
    package="torch_npu",
    collective="hccl",
    visible_devices="ASCEND_RT_VISIBLE_DEVICES",
    capability=(8, 0),
    collective_gaps=frozenset({"avg"}),
    gaps={
        "torch.cuda.CUDAGraph": "torch.npu.NPUGraph of a recent torch_npu, or run without graph capture",
    },
)
