"""Measures what ditorch costs: a training step and single calls, with the redirect and written by hand.

Both variants run in one process, interleaved: "ditorch" is CUDA code with ditorch active, "by hand" is the
same code with the real device written out and ditorch deactivated.

    python benchmarks/redirect_cost.py --device soft --rounds 30
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def make_step(device: str, layers: int, width: int, batch: int) -> Callable[[str], None]:
    """One GPT-like training step as people write it: data to the device, autocast, backward, AdamW."""
    import torch

    torch.manual_seed(0)
    vocabulary, length = 256, 64
    block = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, device=device)
    body = torch.nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
    embed = torch.nn.Embedding(vocabulary, width, device=device)
    head = torch.nn.Linear(width, vocabulary, device=device)
    parameters = [*body.parameters(), *embed.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    tokens = torch.randint(0, vocabulary, (batch, length + 1))

    def step(device: str) -> None:
        data = tokens.to(device)
        mask = torch.triu(torch.full((length, length), float("-inf"), device=device), 1)
        positions = torch.arange(length, device=device)
        x = embed(data[:, :-1]) + positions[:, None] * 1e-3
        logits = head(body(x, mask=mask))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        loss.item()

    return step


def seconds(action: Callable[[], Any], repeat: int = 1) -> float:
    begin = time.perf_counter()
    for _ in range(repeat):
        action()
    return (time.perf_counter() - begin) / repeat


def measure_step(ditorch: Any, real: str, rounds: int, sizes: tuple[int, int, int]) -> dict[str, float]:
    """Alternate between the two ways on one model, so that memory layout and warm-up are the same."""
    step = make_step(real, *sizes)
    wall: dict[str, list[float]] = {"ditorch": [], "by hand": []}
    cpu: dict[str, list[float]] = {"ditorch": [], "by hand": []}
    for index in range(rounds + 3):
        for name in list(wall) if index % 2 else list(reversed(wall)):
            if not ditorch.backend.native:
                ditorch.activate() if name == "ditorch" else ditorch.deactivate()
            device = "cuda" if name == "ditorch" else real
            step(device)
            busy = time.process_time()
            took = seconds(lambda device=device: step(device), 3)  # type: ignore[misc]
            if index >= 3:
                wall[name].append(took)
                cpu[name].append((time.process_time() - busy) / 3)
    return {
        "step by hand ms": 1e3 * statistics.median(wall["by hand"]),
        "step ditorch ms": 1e3 * statistics.median(wall["ditorch"]),
        "step ratio, median of pairs": statistics.median(a / b for a, b in zip(wall["ditorch"], wall["by hand"])),
        "step ratio, minima": min(wall["ditorch"]) / min(wall["by hand"]),
        "step ratio, CPU time": statistics.median(cpu["ditorch"]) / statistics.median(cpu["by hand"]),
    }


def count_calls(ditorch: Any, real: str, sizes: tuple[int, int, int]) -> int:
    """How many Python calls of ditorch's own one step makes: free of timing noise."""
    step = make_step(real, *sizes)
    folder = os.path.dirname(ditorch.__file__)
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        name = frame.f_code.co_filename
        count += event == "call" and (name.startswith(folder) or name == "<ditorch redirect>")

    if not ditorch.backend.native:
        ditorch.activate()
    step("cuda")
    threading.setprofile(see)
    sys.setprofile(see)
    step("cuda")
    sys.setprofile(None)
    threading.setprofile(None)
    return count


def measure_calls(ditorch: Any, real: str, repeat: int) -> dict[str, float]:
    import torch

    host = torch.ones(8)
    made = torch.ones(8, device=real)

    def calls(device: Any) -> dict[str, Callable[[], Any]]:
        return {
            "torch.empty(device)": lambda: torch.empty(8, device=device),
            "torch.zeros(device)": lambda: torch.zeros(8, device=device),
            "torch.empty()": lambda: torch.empty(8),
            "Tensor.to(device), no copy": lambda: made.to(device),
            "Tensor.to(dtype), no copy": lambda: host.to(torch.float32),
            "Tensor.new_empty": lambda: made.new_empty(8),
            "Tensor.device": lambda: made.device,
        }

    best: dict[str, dict[str, float]] = {"ditorch": {}, "by hand": {}}
    for _ in range(40):
        for name in best:
            if not ditorch.backend.native:
                ditorch.activate() if name == "ditorch" else ditorch.deactivate()
            for call, action in calls(torch.device("cuda:0" if name == "ditorch" else real)).items():
                took = seconds(action, repeat)
                best[name][call] = min(took, best[name].get(call, took))
    return {f"{call} µs": 1e6 * (best["ditorch"][call] - best["by hand"][call]) for call in best["ditorch"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="backend (DITORCH_DEVICE)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeat", type=int, default=500)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    if options.device:
        os.environ["DITORCH_DEVICE"] = options.device
    import torch

    import ditorch

    patches = len(ditorch.patches())
    kind = ditorch.backend.device_type
    real = kind if kind == "cpu" else f"{kind}:0"
    sizes = (options.layers, options.width, options.batch)
    result: dict[str, Any] = {"backend": ditorch.backend.name, "torch": torch.__version__, "patches": patches}
    result |= measure_step(ditorch, real, options.rounds, sizes)
    result["calls of ditorch in one step"] = count_calls(ditorch, real, sizes)
    result |= measure_calls(ditorch, real, options.repeat)
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}
    print(json.dumps(rounded, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
