"""Small models for `benchmarks.trace_truth`: a GPT, a ResNet and an RWKV, with an operator written out if asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

EMBD, HEADS, TOKENS, VOCAB = 32, 4, 16, 50


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.fused = nn.Linear(EMBD, 3 * EMBD), nn.Linear(EMBD, EMBD), fused

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).split(EMBD, dim=2)
        q = q.view(b, t, HEADS, -1).transpose(1, 2)
        k = k.view(b, t, HEADS, -1).transpose(1, 2)
        v = v.view(b, t, HEADS, -1).transpose(1, 2)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            score = q @ k.transpose(-2, -1)
            score = score * (EMBD // HEADS) ** -0.5
            mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
            score = score.masked_fill(~mask, float("-inf"))
            y = score.softmax(-1) @ v
        y = y.transpose(1, 2).reshape(b, t, c)
        out: Tensor = self.proj(y)
        return out


class GPTBlock(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(EMBD), Attention(fused), nn.LayerNorm(EMBD)
        self.up, self.down = nn.Linear(EMBD, 4 * EMBD), nn.Linear(4 * EMBD, EMBD)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        h = F.gelu(self.up(self.ln2(x)))
        return x + self.down(h)


class GPT(nn.Module):
    def __init__(self, layers: int = 3, written: bool = False, remat: bool = False) -> None:
        super().__init__()
        self.remat = remat
        self.emb, self.pos = nn.Embedding(VOCAB, EMBD), nn.Embedding(TOKENS, EMBD)
        self.blocks = nn.ModuleList([GPTBlock(not written) for _ in range(layers)])
        self.ln, self.head = nn.LayerNorm(EMBD), nn.Linear(EMBD, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.remat else block(x)
        out: Tensor = self.head(self.ln(x))
        return out


class ResBlock(nn.Module):
    def __init__(self, written: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.written:
            y = x + y
            return y * (y > 0)
        return F.relu(x + y)


class ResNet(nn.Module):
    def __init__(self, layers: int = 3, written: bool = False, remat: bool = False) -> None:
        super().__init__()
        self.remat = remat
        self.stem, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList([ResBlock(written) for _ in range(layers)])
        self.head = nn.Linear(8, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.remat else block(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class TimeMix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(EMBD))
        self.decay, self.first = nn.Parameter(-torch.rand(EMBD)), nn.Parameter(torch.rand(EMBD))
        self.key, self.value, self.receptance, self.output = (nn.Linear(EMBD, EMBD, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shifted = F.pad(x, (0, 0, 1, -1))
        x = x * self.mix + shifted * (1 - self.mix)
        k, v, r = self.key(x), self.value(x), torch.sigmoid(self.receptance(x))
        w, first = torch.exp(self.decay), torch.exp(self.first)
        number, total, out = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), []
        for t in range(0, x.shape[1], 4):
            e = torch.exp(k[:, t])
            out.append((number + first * e * v[:, t]) / (total + first * e + 1e-3))
            number, total = number * torch.exp(-w) + e * v[:, t], total * torch.exp(-w) + e
        y = torch.stack(out, 1).repeat_interleave(4, 1)
        result: Tensor = self.output(r * y)
        return result


class RWKVBlock(nn.Module):
    def __init__(self, written: bool) -> None:
        super().__init__()
        self.ln1, self.ln2, self.att = nn.LayerNorm(EMBD), nn.LayerNorm(EMBD), TimeMix()
        self.key, self.value = nn.Linear(EMBD, 2 * EMBD, bias=False), nn.Linear(2 * EMBD, EMBD, bias=False)
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.ln1(x))
        if self.written:
            centred = x - x.mean(-1, keepdim=True)
            spread = centred.square().mean(-1, keepdim=True)
            h = centred * (spread + 1e-5).rsqrt() * self.ln2.weight + self.ln2.bias
        else:
            h = self.ln2(x)
        h = torch.relu(self.key(h)).square()
        return x + self.value(h)


class RWKV(GPT):
    def __init__(self, layers: int = 3, written: bool = False, remat: bool = False) -> None:
        super().__init__(0, False, remat)
        self.blocks = nn.ModuleList([RWKVBlock(written) for _ in range(layers)])


MODELS: dict[str, Any] = {"GPT": GPT, "ResNet": ResNet, "RWKV": RWKV}


def batch(kind: str, device: str, size: int = 4) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(7)
    if kind == "ResNet":
        x = torch.randn(size, 3, 8, 8, generator=draw)
        return x.to(device), torch.randint(VOCAB, (size,), generator=draw).to(device)
    ids = torch.randint(VOCAB, (size, TOKENS), generator=draw)
    return ids.to(device), torch.randint(VOCAB, (size * TOKENS,), generator=draw).to(device)


def build(kind: str, seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = MODELS[kind](**options)
    return model
