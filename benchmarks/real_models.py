"""Models of real size for `real_size`: each function makes one, or a tiny one of its kind, and returns its step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

Step = Callable[[], Any]
TRAINED: list[nn.Module] = []  # the models that were made, for those who look at their parameters


class Block(nn.Module):
    """One block of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (p.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 with tied embeddings."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight
        self.apply(_initialise)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits = self.head(self.ln_f(self.blocks(self.wte(tokens) + self.wpe(places))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    found = list(parameters)
    return torch.optim.AdamW(found, lr=1e-4, fused=all(p.device.type == "cuda" for p in found) or None)


def _trained(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Step:
    optimizer = _adamw(model.parameters())
    TRAINED.append(model)

    def step() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            found = loss()
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        return found.detach()

    return step


def gpt2(tiny: bool) -> Step:
    """124M parameters, 8 x 512 tokens, bfloat16 autocast, fused AdamW."""
    layers, width, heads, vocabulary, length, batch = (2, 64, 2, 512, 32, 2) if tiny else (12, 768, 12, 50257, 512, 8)
    tokens = torch.randint(vocabulary, (batch, length + 1)).cuda()
    try:
        from transformers import GPT2Config, GPT2LMHeadModel

        options = {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": vocabulary, "n_positions": length}
        config = GPT2Config(**options, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        hugging = GPT2LMHeadModel(config).cuda().train()
        return _trained(hugging, lambda: hugging(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss)
    except ImportError:
        model = GPT2(layers, width, heads, vocabulary, length).cuda()
        return _trained(model, lambda: model(tokens[:, :-1], tokens[:, 1:]))


class LlamaLayer(nn.Module):
    """One decoder layer of Llama."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    @staticmethod
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.norm(x, self.norm_1)
        q, k, v = (p(y).view(batch, length, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norm(x, self.norm_2)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def llama(tiny: bool) -> Step:
    """One layer of Llama-7B in bfloat16, 1 x 4096 tokens."""
    width, heads, inner, length = (64, 4, 172, 64) if tiny else (4096, 32, 11008, 4096)
    layer = LlamaLayer(width, heads, inner).cuda().to(torch.bfloat16)
    angles = torch.outer(torch.arange(length), 1e4 ** -(torch.arange(0, width // heads, 2) / (width // heads)))
    turned = torch.cat((angles, angles), -1).cuda()
    cos, sin = turned.cos().to(torch.bfloat16), turned.sin().to(torch.bfloat16)
    x = torch.randn(1, length, width).cuda().to(torch.bfloat16)
    optimizer = _adamw(layer.parameters())

    def step() -> torch.Tensor:
        loss = layer(x, cos, sin).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        short = inside == 4 * width and stride == 1
        self.down = (
            None
            if short
            else nn.Sequential(nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        y += x if self.down is None else self.down(x)
        return F.relu(y, inplace=True)


def resnet50(tiny: bool) -> nn.Module:
    try:
        if not tiny:
            from torchvision.models import resnet50

            model: nn.Module = resnet50()
            return model
    except ImportError:
        pass
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inside = 64
    for number, (width, count) in enumerate(
        ((64, 1 if tiny else 3), (128, 1 if tiny else 4), (256, 1 if tiny else 6), (512, 1 if tiny else 3))
    ):
        for block in range(count):
            layers.append(Bottleneck(inside, width, 2 if number and not block else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


def resnet(tiny: bool) -> Step:
    """ResNet-50, 64 images of 224 x 224, bfloat16 autocast."""
    batch, size = (2, 32) if tiny else (64, 224)
    model = resnet50(tiny).cuda()
    images, labels = torch.randn(batch, 3, size, size).cuda(), torch.randint(1000, (batch,)).cuda()
    return _trained(model, lambda: F.cross_entropy(model(images), labels))


def rwkv(tiny: bool) -> Step:
    """The RWKV-v4 job at its own size: 8 x 1024 tokens."""
    import ditorch  # noqa: F401
    from projects.rwkv_v4.model import GPT
    from projects.rwkv_v4.wkv import prepare

    prepare("cuda")
    length, batch = (32, 2) if tiny else (1024, 8)
    options = {"n_layer": 2, "n_embd": 64, "head_qk": 32} if tiny else {"n_layer": 6, "n_embd": 1024, "head_qk": 256}
    model = GPT(vocab_size=256, ctx_len=length, **options).cuda()
    tokens = torch.randint(256, (batch, length + 1)).cuda()
    return _trained(model, lambda: model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))


MODELS: dict[str, Callable[[bool], Step]] = {"gpt2": gpt2, "llama": llama, "resnet": resnet, "rwkv": rwkv}
