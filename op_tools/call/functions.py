"""Functions by name."""

from typing import Any


def function_of(name: str) -> Any:
    from ..replay.captured import function_of as find

    return find(name)
