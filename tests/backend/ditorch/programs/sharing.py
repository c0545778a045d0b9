"""Device tensors in other processes: a queue each way, Hogwild training of one model; then shared random numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

import ditorch  # noqa: F401


def answer(asked: Any, told: Any, done: Any) -> None:
    tensor = asked.get(timeout=60)
    tensor.add_(1)
    told.put({"twice": tensor * 2})
    done.wait(60)  # the sender keeps the memory until it has been taken


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()


def main() -> None:
    context: Any = mp.get_context("spawn")
    asked, told, done = context.Queue(), context.Queue(), context.Event()
    tensor = torch.arange(4.0, device="cuda")
    process = context.Process(target=answer, args=(asked, told, done))
    model = nn.Linear(2, 1, bias=False).cuda()
    nn.init.zeros_(model.weight)
    model.share_memory()
    trainer: Any = context.Process(target=train, args=(model,))
    trainer.start()
    process.start()
    asked.put(tensor[1:])
    twice = told.get(timeout=60)["twice"]
    assert twice.is_cuda
    assert twice.tolist() == [4, 6, 8]
    assert tensor.tolist() == [0, 2, 3, 4], "the other process wrote to the same memory"
    done.set()
    process.join()
    trainer.join()
    assert trainer.exitcode == 0
    assert model.weight.tolist() == [[-1, -1]]
    torch.manual_seed(0)
    drawn = torch.cat([torch.rand(2), torch.rand(2, device="cuda").cpu()])
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(4)), "DITORCH_SOFT_SHARED_RANDOM: one stream of random numbers"
    print("shared")


if __name__ == "__main__":
    main()
