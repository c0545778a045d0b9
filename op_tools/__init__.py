"""op_tools: watch every operator of a PyTorch run; capture, compare, time, move, cast and check it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ditorch_common.versions  # noqa: F401  (first: it refuses a PyTorch that is too old)

from .call.description import Finding, TensorMeta
from .judge.references import reference
from .settings import SettingsError
from .tools import all_tools
from .tools.auto_compare import OpAutoCompare
from .tools.base import Tool
from .tools.capture import OpCapture
from .tools.dtype_cast import OpDtypeCast
from .tools.fallback import OpFallback
from .tools.features import FeatureHandle, apply_feature
from .tools.observe import OpObserve
from .tools.overflow_check import OpOverflowCheck
from .tools.time_measure import OpTimeMeasure
from .tools.trace import OpTrace

if not TYPE_CHECKING:  # a misspelt name stays an error for type checkers

    def __getattr__(name: str) -> type[Tool]:
        """Tools in files that were added to `op_tools/tools` (`op_tools.OpMine`)."""
        if name.startswith("Op") and name in (known := all_tools()):
            return known[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "OpAutoCompare",
    "OpCapture",
    "OpDtypeCast",
    "OpFallback",
    "OpObserve",
    "OpOverflowCheck",
    "OpTimeMeasure",
    "OpTrace",
    "apply_feature",
    "reference",
    "FeatureHandle",
    "Finding",
    "SettingsError",
    "TensorMeta",
]
