"""PyTorch's database of operators in a process where ditorch is active."""

from __future__ import annotations

import ditorch
from ditorch.conformance import databases


def load() -> None:
    """Import it without the redirection: it makes functions for CUDA when it is imported (`load()`)."""
    ditorch.deactivate()
    try:
        databases.operators()
    finally:
        ditorch.activate()
