"""The tools, one file each.

A new tool is a new file here with a subclass of `base.Tool` that has a `name`; `op_tools run` finds it by itself.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Tool


def all_tools() -> dict[str, type[Tool]]:
    """Every tool that there is, by name, in alphabetical order (`all_tools()["OpObserve"]`)."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    from .base import TOOLS

    return dict(sorted(TOOLS.items()))
