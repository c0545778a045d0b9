"""op_tools: watch every operator of a PyTorch run; capture, compare, time, move, cast and check it."""

from __future__ import annotations

from .settings import SettingsError
from .tools.capture import OpCapture
from .tools.dtype_cast import OpDtypeCast
from .tools.fallback import OpFallback
from .tools.observe import OpObserve
from .tools.overflow_check import OpOverflowCheck
from .tools.time_measure import OpTimeMeasure

__all__ = [
    "OpCapture",
    "OpDtypeCast",
    "OpFallback",
    "OpObserve",
    "OpOverflowCheck",
    "OpTimeMeasure",
    "SettingsError",
]
