"""How DTensor may split wkv: by batch or by channel, never so that two ranks compute the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def register() -> None:
    """Tell DTensor, once."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    same, batch, channel, summed = Replicate(), Shard(0), Shard(2), Partial()

    @register_sharding(torch.ops.rwkv_v4.wkv.default)
    def _forward(w: Any, u: Any, k: Any, v: Any) -> Any:
        return [
            ([batch] * 2, [same, same, batch, batch]),
            ([channel] * 2, [Shard(0), Shard(0), channel, channel]),
            ([same] * 2, [same] * 4),
        ]

    @register_sharding(torch.ops.rwkv_v4.wkv_backward.default)
    def _backward(w: Any, u: Any, k: Any, v: Any, y: Any, log_total: Any, grad: Any) -> Any:
        return [
            ([summed, summed, batch, batch], [same, same, *[batch] * 5]),
            ([Shard(0), Shard(0), channel, channel], [Shard(0), Shard(0), *[channel] * 5]),
            ([same] * 4, [same] * 7),
        ]
