"""Results of CPU kernels in pinned memory, for threads that ask for it; OpFallback does.

The way back to the device is then one copy, and memory is used again without page faults. Where there is no compiler,
or it has not finished yet, results are copied to pinned memory first, slower.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

from ..native import compiling
from ..view import console

_SOURCE: Final = compiling.SOURCES / "pinned_results.cpp"


class PinnedResults:
    """From `started` to `stop`, kernels of threads that want it have pinned results.

    >>> pinned = PinnedResults.started("cuda")  # doctest: +SKIP
    >>> pinned.run(torch.add, (x, y), {})       # doctest: +SKIP
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._want: Callable[[int], None] = library.op_tools_pinned_want

    @classmethod
    def started(cls, device_type: str) -> PinnedResults | None:
        """None where there is no compiler, or no pinned memory for the device."""
        library = LIBRARY.get()
        if library is None or not library.op_tools_pinned_start(device_type.encode()):
            return None
        return cls(library)

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function whose results are to be pinned."""
        self._want(1)
        try:
            return func(*args, **kwargs)
        finally:
            self._want(0)

    def stop(self) -> None:
        """Memory comes from where it always did; what was given stays valid."""
        self._library.op_tools_pinned_stop()


def _load() -> Any:
    path = compiling.against_torch(
        _SOURCE, lambda: console.note("compiling for pinned results in the background (once); one more copy until then")
    )
    if path is None:
        return None
    library = ctypes.PyDLL(str(path))
    library.op_tools_pinned_start.argtypes = [ctypes.c_char_p]
    library.op_tools_pinned_want.argtypes = [ctypes.c_int]
    library.op_tools_pinned_stop.restype = library.op_tools_pinned_want.restype = None
    return library


LIBRARY: Final = compiling.Library("pinned", _load)
