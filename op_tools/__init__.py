"""op_tools: watch every operator of a PyTorch run; capture, compare, time, move, cast and check it."""

from __future__ import annotations

from .call.description import Finding, OpCall, TensorMeta
from .settings import SettingsError
from .tools.auto_compare import OpAutoCompare
from .tools.capture import OpCapture
from .tools.dtype_cast import OpDtypeCast
from .tools.fallback import OpFallback
from .tools.features import FeatureHandle, apply_feature
from .tools.observe import OpObserve
from .tools.overflow_check import OpOverflowCheck
from .tools.time_measure import OpTimeMeasure

__all__ = [
    "OpAutoCompare",
    "OpCapture",
    "OpDtypeCast",
    "OpFallback",
    "OpObserve",
    "OpOverflowCheck",
    "OpTimeMeasure",
    "apply_feature",
    "FeatureHandle",
    "Finding",
    "OpCall",
    "SettingsError",
    "TensorMeta",
]
