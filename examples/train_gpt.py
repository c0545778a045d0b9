"""A small GPT trainer as people write it for CUDA: nothing in it knows about ditorch.

ditorch run examples/train_gpt.py --steps 5
"""

import argparse
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--checkpoint", default="")
args = parser.parse_args()

batch_size, block_size, gradient_accumulation_steps = 8, 64, 2
learning_rate, warmup, grad_clip = 1e-3, 5, 1.0
device = "cuda"
dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float16"

torch.manual_seed(1337)
torch.cuda.manual_seed_all(1337)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
device_type = "cuda" if "cuda" in device else "cpu"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, dtype=ptdtype)

text = "the quick brown fox jumps over the lazy dog. " * 400
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text], dtype=torch.long)


def get_batch():
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    if device_type == "cuda":
        # pin arrays x,y, which allows us to move them to GPU asynchronously
        x, y = x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    else:
        x, y = x.to(device), y.to(device)
    return x, y


@dataclass
class Config:
    vocab: int = len(chars)
    layers: int = 2
    heads: int = 4
    width: int = 64


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.heads
        self.norm1, self.norm2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv, self.proj = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)
        self.mlp = nn.Sequential(nn.Linear(c.width, 4 * c.width), nn.GELU(), nn.Linear(4 * c.width, c.width))

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab, c.width), nn.Embedding(block_size, c.width)
        self.blocks = nn.ModuleList([Block(c) for _ in range(c.layers)])
        self.norm, self.head = nn.LayerNorm(c.width), nn.Linear(c.width, c.vocab, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, idx, targets=None):
        device = idx.device
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1)) if targets is not None else None
        return logits, loss


model = GPT(Config())
model.to(device)
scaler = torch.cuda.amp.GradScaler(enabled=(dtype == "float16"))
use_fused = device_type == "cpu"
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), fused=use_fused)
if args.compile:
    model = torch.compile(model)

torch.cuda.reset_peak_memory_stats()
X, Y = get_batch()
first = last = None
t0 = time.time()
for step in range(args.steps):
    lr = learning_rate * min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / max(args.steps, 1)))
    for group in optimizer.param_groups:
        group["lr"] = lr
    for _ in range(gradient_accumulation_steps):
        with ctx:
            _, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    last = loss.item() * gradient_accumulation_steps
    first = last if first is None else first
    print(f"iter {step}: loss {last:.4f}, time {(time.time() - t0) * 1000 / (step + 1):.1f}ms, lr {lr:.2e}")

if args.checkpoint:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.checkpoint)
    model.load_state_dict(torch.load(args.checkpoint, map_location=device)["model"])
name = torch.cuda.get_device_name(torch.cuda.current_device())
print(f"trained on {next(model.parameters()).device} ({name}): loss {first:.3f} -> {last:.3f}")
print(f"peak memory {torch.cuda.max_memory_allocated() / 1e6:.1f} MB")
