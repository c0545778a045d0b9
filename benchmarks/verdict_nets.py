"""Trains small networks under OpAutoCompare and prints every call that is called wrong: with correct kernels, none.

A GPT, a ResNet, an LSTM, a GRU, a transformer encoder and, where `transformers` is installed, GPT-2, Llama and BERT;
forward, backward, gradient clipping and optimizer, in float32 and under autocast. What is known of a device's own
inaccuracies is in ditorch/conformance/ledgers.

    python benchmarks/verdict_nets.py --device cuda            # TF32 is off
    python benchmarks/verdict_nets.py --device cuda --tf32     # products in TF32 are wrong for float32, and named so
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.tool_overhead import GPT

Net = tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]  # and its loss


class Residual(nn.Module):
    """Two convolutions around which the input passes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.m, self.n = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.n(self.b(F.relu(self.m(self.a(x)), inplace=True))))


class ResNet(nn.Module):
    """A stem, two residual blocks and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 7, 2, 3), nn.MaxPool2d(3, 2, 1))
        self.blocks, self.head = nn.Sequential(Residual(32), Residual(32)), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


class Recurrent(nn.Module):
    """An embedding, a recurrent network and a linear layer."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.table, self.cells, self.head = nn.Embedding(100, 32), kind(32, 64, 2, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(self.table(x))[0][:, -1])


class Encoder(nn.Module):
    """A transformer layer whose hidden result is changed in place, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.up, self.head = nn.Linear(32, 48), nn.Linear(48 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.up(self.layer(x)).relu_().flatten(1))


def nets(device: str) -> Iterator[tuple[str, Callable[[], Net]]]:
    """Names, and how to make each network with its loss."""

    def classifier(make: Callable[[], nn.Module], data: Callable[[], torch.Tensor]) -> Callable[[], Net]:
        def build() -> Net:
            torch.manual_seed(1)
            x = data().to(device)
            y = torch.randint(0, 10, (len(x),)).to(device)
            return make().to(device), lambda net: F.cross_entropy(net(x), y)

        return build

    def gpt() -> Net:
        torch.manual_seed(0)
        x, y = (torch.randint(0, 256, (4, 128)).to(device) for _ in range(2))
        return GPT().to(device), lambda net: net(x, y)

    yield "GPT", gpt
    yield "ResNet", classifier(ResNet, lambda: torch.randn(4, 3, 32, 32))
    yield "LSTM", classifier(lambda: Recurrent(nn.LSTM), lambda: torch.randint(0, 100, (4, 12)))
    yield "GRU", classifier(lambda: Recurrent(nn.GRU), lambda: torch.randint(0, 100, (4, 12)))
    yield "encoder", classifier(Encoder, lambda: torch.randn(3, 16, 32))
    yield from hugging_face(device)


def hugging_face(device: str) -> Iterator[tuple[str, Callable[[], Net]]]:
    """Three small models of the transformers library, if it is there."""
    try:
        import transformers as hf
    except ImportError:
        return
    same = {"vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    made: dict[str, Callable[[], Any]] = {
        "GPT-2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=500, n_embd=128, n_layer=2, n_head=4, n_positions=128)
        ),
        "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**same, intermediate_size=256, num_key_value_heads=2)),
        "BERT": lambda: hf.BertForMaskedLM(hf.BertConfig(**same, intermediate_size=256)),
    }
    for name, make in made.items():

        def build(make: Callable[[], Any] = make) -> Net:
            torch.manual_seed(0)
            ids = torch.randint(0, 500, (2, 64)).to(device)
            return make().to(device).train(), lambda net: net(input_ids=ids, labels=ids).loss

        yield name, build


def compare(build: Callable[[], Net], low: torch.dtype | None, steps: int) -> Any:
    """Some steps of training under the tool."""
    import op_tools

    net, loss = build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with op_tools.OpAutoCompare() as comparison:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=low or torch.bfloat16, enabled=low is not None):
                result = loss(net)
            result.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    return comparison


def main() -> int:
    """Print a line for each network and dtype, and what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", default="", help="comma-separated names")
    parser.add_argument("--tf32", action="store_true", help="let products of float32 be in TF32")
    options = parser.parse_args()
    os.environ["OP_TOOLS_CONSOLE"] = "off"
    os.environ["OP_TOOLS_RESULTS_DIR"] = tempfile.mkdtemp(prefix="verdict-nets-")
    if not torch.cuda.is_available():
        import ditorch  # noqa: F401  makes "cuda" the software accelerator
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = options.tf32
    total = 0
    for name, build in nets(options.device):
        if options.only and name not in options.only.split(","):
            continue
        for low in (None, torch.bfloat16, torch.float16):
            comparison = compare(build, low, options.steps)
            verdicts = Counter(row["verdict"] for row in comparison.records())
            what = "float32" if low is None else f"{str(low).removeprefix('torch.')} autocast"
            print(f"{name:8s} {what:18s} {verdicts['right']:6d} right, {verdicts['wrong']} wrong", flush=True)
            reasons = Counter(
                (blame.op, blame.phase, "TF32" in blame.reason, blame.module) for blame in comparison.blames
            )
            for (op, phase, tf32, module), count in reasons.items():
                print(f"    {op} {phase} in {module}: {count}{' (named TF32)' if tf32 else ''}")
            for blame in comparison.blames[:1]:
                print(f"    the first: {blame.reason}"[:220])
            total += verdicts["wrong"]
    print(f"{total} wrong; torch {torch.__version__}")
    return 0 if not total else 1


if __name__ == "__main__":
    sys.exit(main())
