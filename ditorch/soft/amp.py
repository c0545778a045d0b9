"""Automatic mixed precision for ``torch.soft``: the device-bound spellings of torch.amp."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]

SUPPORTED_DTYPES = [torch.bfloat16, torch.float16]


class autocast(torch.autocast):
    """``torch.autocast("soft", ...)``.

    >>> with torch.soft.amp.autocast(dtype=torch.bfloat16):  # doctest: +SKIP
    ...     y = layer(x)
    """

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("soft", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler("soft", ...)``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("soft", **kwargs)


custom_fwd = functools.partial(torch.amp.custom_fwd, device_type="soft")
custom_bwd = functools.partial(torch.amp.custom_bwd, device_type="soft")
