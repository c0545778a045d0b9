"""What happens when the process exits or forks: one registration of each, and a list of callbacks in order."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
from collections.abc import Callable
from enum import IntEnum

_Callback = Callable[[], None]


class Exit(IntEnum):
    """The order in which things end at exit: tools still hand work to what comes after them."""

    TOOLS = 1
    WORKERS = 2
    WRITERS = 3
    STORE = 4


_at_exit: list[tuple[Exit, _Callback]] = []
_in_child: list[_Callback] = []


def at_exit(stage: Exit, callback: _Callback) -> None:
    """Call something once when the process exits (`at_exit(Exit.STORE, close)`)."""
    _at_exit.append((stage, callback))


def after_fork_in_child(callback: _Callback) -> None:
    """Call something in every forked child, in the order of registration (`after_fork_in_child(forget)`)."""
    _in_child.append(callback)


def ignore_ctrl_c() -> None:
    """In a worker process: Ctrl-C is for its parent, which ends it (`ignore_ctrl_c()`)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run(callbacks: list[_Callback]) -> None:
    with contextlib.ExitStack() as stack:  # one that fails does not keep the others from running
        for callback in reversed(callbacks):
            stack.callback(callback)


atexit.register(lambda: _run([callback for _, callback in sorted(_at_exit, key=lambda pair: pair[0])]))
os.register_at_fork(after_in_child=lambda: _run(_in_child))
