"""Warnings name the user's line: the frames of the redirect in between are not theirs."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

from ditorch.patching import Ledger
from ditorch.redirect.devices import Devices

_HERE = str(Path(__file__).parent)


def install(ledger: Ledger, devices: Devices) -> None:
    """Redirect the function through which Python shows a warning.

    Example: ``install(ledger, devices); torch.tensor(torch.ones(1), device="cuda")``
    """
    if not hasattr(warnings, "_showwarnmsg"):
        return

    def make(original: Any) -> Any:
        def show(message: Any) -> None:
            frame = _caller() if _ours(message.filename) else None
            if frame is None:
                original(message)
                return
            warnings.warn_explicit(  # so that filters and "once per line" go by the user's module, too
                message.message,
                message.category,
                frame.f_code.co_filename,
                frame.f_lineno,
                frame.f_globals.get("__name__", "<unknown>"),
                frame.f_globals.setdefault("__warningregistry__", {}),
            )

        return show

    ledger.redirect(warnings._showwarnmsg, make, "warnings name the user's line")


def _ours(filename: str) -> bool:
    return filename.startswith(_HERE) or filename == "<ditorch redirect>"


def _caller() -> Any:
    """The frame that called the innermost redirected function."""
    frame: Any = sys._getframe(2)
    while frame is not None and (not _ours(frame.f_code.co_filename) or _is_warning(frame)):
        frame = frame.f_back
    while frame is not None and _ours(frame.f_code.co_filename):
        if frame.f_globals.get("__name__", "").startswith("ditorch."):
            frame.f_globals.pop("__warningregistry__", None)  # where Python notes that it was told for our line
        frame = frame.f_back
    return frame


def _is_warning(frame: Any) -> bool:
    return bool(frame.f_code.co_filename == __file__ or frame.f_globals.get("__name__") == "warnings")
