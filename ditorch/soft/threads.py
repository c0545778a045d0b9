"""Lets the threads of backward finish before the interpreter does."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

import torch

from . import native

_kept: list[Any] = []


def finish_at_exit() -> None:
    """Wait at exit for what the device's backward threads still have to clean up.

    A backward thread hands over its result before it drops its own references to it. Dropping a Python object
    needs the interpreter; if that has ended meanwhile, Python ends the thread, and with it the process (SIGABRT).
    """
    atexit.register(_finish)


def _finish() -> None:
    if not _running():
        return
    # A thread takes its next task only when the last one is gone. This one owns nothing that needs Python: the
    # engine is called directly, because `backward()` itself hands each task a Python object (its context).
    engine: Any = torch.autograd.Variable._execution_engine
    for index in range(native().device_count()):
        x = torch.zeros((), device=f"soft:{index}", requires_grad=True)
        y, grad = x * 1, torch.ones((), device=x.device)
        _kept.extend((x, y, grad))
        engine.run_backward((y,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _running() -> bool:
    """Whether backward ever ran here: its threads carry names, and never end."""
    try:
        return any(name.read_text().startswith("pt_autograd_") for name in Path("/proc/self/task").glob("*/comm"))
    except OSError:  # a thread that ended meanwhile
        return True
