"""What happens when the process exits, forks or is told to end: one registration of each, and callbacks in order."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, Final, NoReturn

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


def wait_for_children(wanted: bool) -> None:
    """In a process that forks workers: whether somebody waits for those that end (`wait_for_children(False)`)."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL if wanted else signal.SIG_IGN)


class Terminated(SystemExit):
    """SIGTERM came: `finally` and `with` blocks run, tools write what they have, and the signal ends the process."""

    def __init__(self, code: int = 128 + signal.SIGTERM) -> None:
        super().__init__(code)


def finish_on_sigterm() -> None:
    """From now on SIGTERM ends the process as Ctrl-C does, with everything written (`finish_on_sigterm()`).

    A handler of the program's own is left alone, as are threads other than the main one, which cannot set any.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """While a tool writes its files, SIGTERM waits until they are complete (`with finishing(): write()`).

    A second SIGTERM does not: it ends the process at once. Only the main thread hears signals.
    """
    global _finishing, _waits
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _finishing += 1
    try:
        yield
    finally:
        _finishing -= 1
        if _waits and not _finishing:
            _waits = False
            _end_main_thread()


_finishing = 0  # how many `finishing` blocks the main thread is in
_waits = False  # whether SIGTERM came meanwhile


def _terminate(number: int, frame: object) -> None:
    global _is_terminated, _waits
    _is_terminated = os.getpid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
    _waits = _finishing > 0
    if not _waits:
        _end_main_thread()


def _end_main_thread() -> NoReturn:
    report = sys.unraisablehook
    sys.unraisablehook = lambda found: None if isinstance(found.exc_value, Terminated) else report(found)
    threading.Thread(target=_insist, name="op_tools-end", daemon=True).start()
    raise Terminated


_INSIST_SECONDS: Final = 0.5
_INSIST_TIMES: Final = 3


def _insist() -> None:
    """Raise again in the main thread: what is raised in a destructor, or under C++, may be dropped there."""
    for _ in range(_INSIST_TIMES):
        _is_dropped.clear()
        time.sleep(_INSIST_SECONDS)
        ctypes.pythonapi.Py_AddPendingCall(_look_in_main_thread, None)
        if _is_dropped.wait(_INSIST_SECONDS) and not _is_ending:
            thread = ctypes.c_ulong(threading.main_thread().ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Terminated))


def _look(_: Any) -> int:
    """In the main thread, between two instructions: is the end under way, in `finally` blocks say?"""
    error: BaseException | None = sys.exc_info()[1]
    while error is not None and not isinstance(error, Terminated):
        error = error.__context__
    if error is None and not _is_ending:
        _is_dropped.set()
    return 0


_look_in_main_thread = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_look)
_is_dropped = threading.Event()
_is_ending = False


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
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _run(callbacks: list[_Callback]) -> None:
    with contextlib.ExitStack() as stack:  # one that fails does not keep the others from running
        for callback in reversed(callbacks):
            stack.callback(callback)


def _exit() -> None:
    global _is_ending
    _is_ending = True
    try:
        _run([callback for _, callback in sorted(_at_exit, key=lambda pair: pair[0])])
    finally:
        _hand_on()


atexit.register(_exit)
os.register_at_fork(after_in_child=lambda: _run(_in_child))
after_fork_in_child(_default_in_child)
