"""op_tools: watch every operator of a PyTorch run; capture, compare, time, move, cast and check it."""

from __future__ import annotations

from .settings import SettingsError
from .tools.observe import OpObserve

__all__ = ["OpObserve", "SettingsError"]
