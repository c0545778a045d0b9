"""Trains the tiny model with every strategy on two ranks and alone, and counts what each rank computes."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import ditorch  # noqa: F401
from projects.rwkv_v4.config import Config, get_config
from projects.rwkv_v4.events import start_log
from projects.rwkv_v4.parallel import Ranks
from projects.rwkv_v4.trainer import Trainer

STEPS = 20


class LocalWork(TorchDispatchMode):
    """Multiplications in matrix products, and elements that wkv walks through, on this rank's own tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.done: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # the operators on its local parts come by here too
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::mm", "aten::bmm"):
            self.done["matmul"] += out.numel() * args[0].shape[-1]
        elif name in ("rwkv_v4::wkv", "rwkv_v4::wkv_backward"):
            self.done["wkv"] += args[2].numel()
        return out


def trained(ranks: Ranks, strategy: str) -> dict[str, Any]:
    config = Config(get_config("configs/tiny.py"))
    config.override([f"train.dist.strategy={strategy}", "model.n_embd=32", "train.ctx_len=32", "train.final_lr=null"])
    trainer = Trainer(config, ranks)
    trainer.build()
    trainer._data_seconds, losses = 0.0, []
    for i in range(STEPS):
        trainer._step_started = time.perf_counter()
        if i == STEPS - 1:
            with LocalWork() as work:
                losses.append(trainer.step(i))
        else:
            losses.append(trainer.step(i))
    found = torch.stack(losses)
    if strategy != "tensor":
        found = ranks.mean(found)
    return {"losses": found.tolist(), **work.done}


def main() -> None:
    ranks = Ranks.join()
    start_log(1, Path())
    alone = Ranks(0, 1, ranks.device)
    results = {"alone": trained(alone, "ddp")}
    for strategy in ("ddp", "fsdp", "tensor"):
        results[strategy] = trained(ranks, strategy)
    Path(sys.argv[1], f"rank{ranks.rank}.json").write_text(json.dumps(results))
    ranks.leave()


if __name__ == "__main__":
    main()
