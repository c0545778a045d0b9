"""Settings of the Python interpreter while tools are on: how often it collects garbage and hands the GIL over."""

from __future__ import annotations

import gc
import sys
from typing import Final

_MORE: Final = 16  # objects of the tools for each one of the training, about
_SWITCH_SECONDS: Final = 5e-4
_FROZEN: Final = 2_000  # objects: Python 3.12 itself freezes some hundred, a program all that it has


class Interpreter:
    """Keeps the tools' objects from setting the pace of the garbage collector, and their threads from holding the GIL.

    The collector runs after so many new objects, most of which would be the tools'; a full run over what a large
    library has imported takes 0.2 to 0.4 s, as long as ten steps. And a thread of the tools may keep the training
    waiting for 5 ms each time that this calls a kernel. What the program itself sets in the meantime stays.

    >>> interpreter = Interpreter()
    >>> interpreter.ease(), interpreter.restore()
    (None, None)
    """

    def __init__(self) -> None:
        self._collect: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # before, and ours
        self._switch: tuple[float, float] | None = None

    def ease(self) -> None:
        """Tools are on."""
        if self._collect is None:
            before = gc.get_threshold()
            gc.set_threshold(before[0] * _MORE, before[1], before[2] * _MORE)  # none at all where the first is 0
            self._collect = before, gc.get_threshold()
        if self._switch is None:
            seconds = sys.getswitchinterval()
            sys.setswitchinterval(min(seconds, _SWITCH_SECONDS))
            self._switch = seconds, sys.getswitchinterval()

    def restore(self) -> None:
        """No tool is on any more."""
        if self._collect is not None and gc.get_threshold() == self._collect[1]:
            # the counts begin anew: they are over the limits, and a full run would follow
            if gc.get_freeze_count() < _FROZEN:
                gc.freeze()
                gc.unfreeze()
            gc.set_threshold(*self._collect[0])
        if self._switch is not None and sys.getswitchinterval() == self._switch[1]:
            sys.setswitchinterval(self._switch[0])
        self._collect = self._switch = None
