"""wkv, the recurrence at the heart of RWKV, as one operator with a kernel per device."""

from .operator import prepare, wkv
from .reference import wkv_reference

__all__ = ["prepare", "wkv", "wkv_reference"]
