"""Storages that get other memory: FSDP gives that of parameters back after use, and takes it again before the next."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from . import patches

_WHAT: Final = "torch.UntypedStorage.resize_"

Resized = Callable[[torch.UntypedStorage], None]


class Storages:
    """Tells listeners of storages that are resized, from the first `add` to the last `remove`.

    >>> STORAGES.add(lambda storage: print(storage.nbytes()))          # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._listeners: list[Resized] = []

    def add(self, listener: Resized) -> None:
        """Tell a listener from now on."""
        if not self._listeners:
            self._install()
        self._listeners = [*self._listeners, listener]

    def remove(self, listener: Resized) -> None:
        """Tell it no more; nothing happens where it is not told."""
        if listener in self._listeners:
            self._listeners = [other for other in self._listeners if other != listener]
            if not self._listeners:
                patches.undo(_WHAT)

    def _install(self) -> None:
        kind: Any = torch.UntypedStorage
        before, original = vars(kind).get("resize_"), kind.resize_

        @functools.wraps(original)
        def resize_(storage: Any, size: Any) -> Any:
            found = original(storage, size)
            for listener in self._listeners:
                listener(storage)
            return found

        def undo() -> None:
            if vars(kind).get("resize_") is not resize_:
                return
            if before is None:
                del kind.resize_
            else:
                kind.resize_ = before

        kind.resize_ = resize_
        patches.record(_WHAT, "memory that was taken anew holds nothing", undo)


STORAGES: Final = Storages()
