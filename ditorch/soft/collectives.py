"""Registers ``softccl``: torch.distributed on soft tensors, over gloo on the same memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from . import native

NAME = "softccl"


def register() -> None:
    """Make ``init_process_group("softccl")`` work and ``softccl`` the default for soft tensors."""
    if not torch.distributed.is_available() or NAME in torch.distributed.Backend.backend_list:
        return
    torch.distributed.Backend.register_backend(NAME, _create, devices=["soft"])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return native().make_collectives(torch.distributed.ProcessGroupGloo(store, rank, size, timeout))
