"""The errors that ditorch raises on purpose."""

from __future__ import annotations


class UnsupportedError(RuntimeError):
    """A CUDA call that the chosen backend cannot do; says which, where, and what to do instead.

    Example::

        raise UnsupportedError("torch.cuda.power_draw", "Huawei Ascend (npu)", "npu-smi info")
    """

    def __init__(self, call: str, backend: str, instead: str) -> None:
        super().__init__(f"{call} does not exist on {backend}. Instead: {instead}")
        self.call, self.backend, self.instead = call, backend, instead
