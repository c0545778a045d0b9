"""The one place where the device layer speaks to the user: short lines on standard error."""

from __future__ import annotations

import sys

from ditorch_common.settings import DITORCH


def say(message: str) -> None:
    """Write one line, prefixed with the package name, unless ``DITORCH_QUIET=1``.

    >>> say("building the software accelerator")  # ditorch: building the ...
    """
    if DITORCH.read("DITORCH_QUIET") != "0":
        return
    sys.stderr.write(f"ditorch: {message}\n")
    sys.stderr.flush()
