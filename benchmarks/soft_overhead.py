"""What the software accelerator costs over the CPU whose kernels it runs: a small add, and a GPT training step.

Both sides run in one process, in turns, so that the machine's load falls on both; the figure is the
median of the ratios of neighbouring turns. ``python -m benchmarks.soft_overhead [--rounds N]``
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import ditorch.soft
from demo.train_gpt import GPT

VOCABULARY, CONTEXT, BATCH = 256, 128, 4


def add_time(device: str, calls: int) -> float:
    """Seconds for one add of two small tensors."""
    a, b = torch.randn(8, device=device), torch.randn(8, device=device)
    started = time.perf_counter()
    for _ in range(calls):
        a + b
    return (time.perf_counter() - started) / calls


def trainer(device: str) -> Callable[[int], tuple[float, list[float]]]:
    """A GPT and its AdamW on a device; call it to train some steps: seconds per step and the losses."""
    torch.manual_seed(0)
    model = GPT(VOCABULARY, CONTEXT, width=256, layers=4, heads=4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    numbers = torch.Generator().manual_seed(1)

    def train(steps: int) -> tuple[float, list[float]]:
        losses = []
        batches = [torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=numbers).to(device) for _ in range(steps)]
        started = time.perf_counter()
        for window in batches:
            optimizer.zero_grad(set_to_none=True)
            logits = model(window[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        values = [loss.item() for loss in losses]
        return (time.perf_counter() - started) / steps, values

    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    ditorch.soft.load()

    for device in ("cpu", "soft"):
        add_time(device, 5000)
    adds = [(add_time("cpu", 5000), add_time("soft", 5000)) for _ in range(options.rounds * 2)]
    overhead = statistics.median(soft - cpu for cpu, soft in adds) * 1e6
    print(
        f"add of 8 numbers: cpu {statistics.median(cpu for cpu, _ in adds) * 1e6:.2f} us, "
        f"soft {statistics.median(soft for _, soft in adds) * 1e6:.2f} us, overhead {overhead:.2f} us"
    )

    on_cpu, on_soft = trainer("cpu"), trainer("soft")
    first = on_cpu(20), on_soft(20)
    identical = first[0][1] == first[1][1]
    print(f"20 AdamW steps: losses {'bit-identical' if identical else 'DIFFER'}, last {first[1][1][-1]:.6f}")
    steps = [(on_cpu(4)[0], on_soft(4)[0]) for _ in range(options.rounds)]
    ratio = statistics.median(soft / cpu for cpu, soft in steps)
    print(f"GPT training step: soft / cpu = {ratio:.3f}")


if __name__ == "__main__":
    main()
