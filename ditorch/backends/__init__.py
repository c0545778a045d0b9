"""One small file per vendor; ``BUILTIN`` is the order in which they are listed."""

from ditorch.backend import Backend
from ditorch.backends import (
    ascend,
    biren,
    cambricon,
    cpu,
    cuda,
    dipu,
    enflame,
    habana,
    intel,
    mps,
    musa,
    soft,
)

BUILTIN: tuple[Backend, ...] = (
    cuda.BACKEND,
    ascend.BACKEND,
    cambricon.BACKEND,
    musa.BACKEND,
    biren.BACKEND_BR,
    biren.BACKEND_SUPA,
    enflame.BACKEND,
    dipu.BACKEND,
    intel.BACKEND,
    habana.BACKEND,
    mps.BACKEND,
    soft.BACKEND,
    cpu.BACKEND,
)
