"""A small character-level GPT, written for one CUDA GPU. Nothing in here knows about ditorch."""

import argparse
import glob
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time_, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time_, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time_, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int = 96, layers: int = 3, heads: int = 4):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def corpus() -> str:
    """The project's own source code is the text: it is always there, and it has structure to learn."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    files = sorted(glob.glob(os.path.join(root, "ditorch", "**", "*.py"), recursive=True))
    return "\n".join(open(name, encoding="utf-8").read() for name in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--amp", action="store_true", help="bfloat16 autocast")
    options = parser.parse_args()

    assert torch.cuda.is_available(), "this script needs a GPU"
    torch.manual_seed(1)
    torch.cuda.manual_seed_all(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.set_device(0)

    text = corpus()
    letters = sorted(set(text))
    index = {letter: i for i, letter in enumerate(letters)}
    data = torch.tensor([index[letter] for letter in text]).pin_memory()
    print(f"{len(text):,} characters, {len(letters)} different; device: {torch.cuda.get_device_name(0)}", flush=True)

    model = GPT(len(letters), options.context).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun = time.time()
    start.record()
    for step in range(1, options.steps + 1):
        at = torch.randint(len(data) - options.context - 1, (options.batch,))
        window = torch.stack([data[i : i + options.context + 1] for i in at.tolist()]).cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=options.amp):
            logits = model(window[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        print(f"step {step}/{options.steps} loss {loss.item():.6f}", flush=True)
    end.record()
    torch.cuda.synchronize()
    print(
        f"{options.steps / (time.time() - begun):.1f} steps/s, {start.elapsed_time(end) / 1e3:.1f} s on the device, "
        f"peak memory {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
