"""What happens when the process exits, forks or is told to end: one registration of each, and callbacks in order."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
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


def leave_signals_to_parent() -> None:
    """In a worker process: Ctrl-C and SIGTERM are for its parent, which ends it (`leave_signals_to_parent()`)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Terminated(SystemExit):
    """SIGTERM came: `finally` and `with` blocks run, tools write what they have, and the signal ends the process."""


def finish_on_sigterm() -> None:
    """From now on SIGTERM ends the process as Ctrl-C does, with everything written (`finish_on_sigterm()`).

    A handler of the program's own is left alone, as are threads other than the main one, which cannot set any.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: object) -> None:
    global _is_terminated
    _is_terminated = os.getpid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
    raise Terminated(128 + number)


def _default_in_child() -> None:
    if signal.getsignal(signal.SIGTERM) is _terminate:  # whoever forked it ends it that way
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_terminated() -> bool:
    """Whether this process was told to end (`is_terminated()`)."""
    return _is_terminated == os.getpid()


_is_terminated = 0  # the process that was told to end


def _hand_on() -> None:
    """End by the signal that came, so that whoever sent it sees what they would have seen without tools."""
    if is_terminated():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os.kill(os.getpid(), signal.SIGTERM)


def _run(callbacks: list[_Callback]) -> None:
    with contextlib.ExitStack() as stack:  # one that fails does not keep the others from running
        for callback in reversed(callbacks):
            stack.callback(callback)


def _exit() -> None:
    try:
        _run([callback for _, callback in sorted(_at_exit, key=lambda pair: pair[0])])
    finally:
        _hand_on()


atexit.register(_exit)
os.register_at_fork(after_in_child=lambda: _run(_in_child))
after_fork_in_child(_default_in_child)
