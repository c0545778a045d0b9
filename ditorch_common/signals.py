"""A second Ctrl-C or SIGTERM ends a process at once, also while a kernel keeps Python from hearing the first."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final

_GRACE_SECONDS: Final = 1.0  # for Python's own handler of the second signal
_ENDING: Final = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def ends_at_second_signal(repeats: float = 0.0) -> Iterator[None]:
    """Within it, a second SIGINT or SIGTERM ends the process, even inside a kernel that takes minutes.

    Python runs its handlers between instructions only. Here the system writes each signal to a pipe, and a thread
    counts them. A signal within `repeats` seconds of the first is the same one, sent again by a launcher.

    >>> with ends_at_second_signal():  # doctest: +SKIP
    ...     train()
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before != -1:  # somebody else listens: asyncio
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
        yield
        return
    left = threading.Event()
    thread = threading.Thread(target=_listen, args=(reader, left, repeats), name="second-signal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(-1)
        os.close(writer)  # ends the thread
        thread.join(timeout=5)
        os.close(reader)


def _listen(reader: int, left: threading.Event, repeats: float) -> None:
    first = 0.0
    while heard := os.read(reader, 64):
        for number in heard:
            if number not in _ENDING:
                continue
            now = time.monotonic()
            if not first:
                first = now
            elif now - first >= repeats and not left.wait(_GRACE_SECONDS):
                print(f"ended at once by a second {signal.Signals(number).name}", file=sys.stderr, flush=True)
                os._exit(128 + number)
