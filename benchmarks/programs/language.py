"""Programs on sequences."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from . import Job, Step, program, trained

PAD = 0


def padded(job: Job, count: int = 4, length: int = 16, words: int = 50) -> torch.Tensor:
    """Sentences of several lengths, filled up with a padding token, as a tokenizer makes them."""
    ids = torch.randint(1, words, (count, length))
    for row, used in enumerate(torch.randint(length // 4, length, (count,)).tolist()):
        ids[row, used:] = PAD
    return ids.to(job.device)


class Attention(nn.Module):
    """Causal attention; `kind` is fused (one operator) or plain (products and a softmax)."""

    def __init__(self, width: int, heads: int, dropout: float = 0.1, kind: str = "fused") -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.dropout, self.kind = dropout, kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (h.view(b, t, self.heads, -1).transpose(1, 2) for h in self.qkv(x).split(c, dim=2))
        if self.kind == "fused":
            y = F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
            )
        else:
            scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))
            mask = torch.tril(torch.ones(t, t, device=x.device))
            weights = F.softmax(scores.masked_fill(mask == 0, float("-inf")), dim=-1)
            y = F.dropout(weights, self.dropout, self.training) @ v
        return F.dropout(self.out(y.transpose(1, 2).contiguous().view(b, t, c)), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, width: int = 32, kind: str = "fused") -> None:
        super().__init__()
        self.a, self.b, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, 4, kind=kind)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.a(x))
        return x + self.mlp(self.b(x))


class GPT(nn.Module):
    def __init__(self, kind: str = "fused", tied: bool = True, shared: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.words, self.places, self.drop = nn.Embedding(50, 32), nn.Embedding(64, 32), nn.Dropout(0.1)
        block = Block(kind=kind)
        self.blocks = nn.ModuleList([block, block] if shared else [block, Block(kind=kind)])
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 50, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


def language_model(job: Job, net: nn.Module, ids: torch.Tensor, ignore: int = -100) -> Step:
    job.to(net)

    def loss() -> torch.Tensor:
        logits = net(ids[:, :-1])
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), ignore_index=ignore)

    return trained(job, net, loss, clip=1.0)


@program
def nano_gpt(job: Job) -> Step:
    return language_model(job, GPT(), job.ints(50, 4, 33))


@program
def min_gpt(job: Job) -> Step:
    return language_model(job, GPT("plain", tied=False), job.ints(50, 4, 33))


@program
def gpt_padding(job: Job) -> Step:
    return language_model(job, GPT(), padded(job), ignore=PAD)


@program
def shared_layers(job: Job) -> Step:
    return language_model(job, GPT(shared=True), job.ints(50, 4, 17))


@program
def checkpointed(job: Job) -> Step:
    return language_model(job, GPT(recompute=True), job.ints(50, 4, 17))


@program
def checkpointed_shared(job: Job) -> Step:
    return language_model(job, GPT(shared=True, recompute=True), job.ints(50, 4, 17))


class Llama(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.words, self.head, self.heads = nn.Embedding(50, width), nn.Linear(width, 50, bias=False), heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in ((width, 64), (width, 64), (64, width)))
        self.norm = nn.RMSNorm(width)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        t, d = x.shape[-2:]
        angle = torch.arange(t, device=x.device)[:, None] / 10000 ** (torch.arange(0, d, 2, device=x.device) / d)
        turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angle), angle)
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.norm(x)
        return self.head(x + self.down(F.silu(self.gate(h)) * self.up(h)))


@program
def llama(job: Job) -> Step:
    return language_model(job, Llama(), job.ints(50, 4, 17))


@program
def lora(job: Job) -> Step:
    net = job.to(Llama()).requires_grad_(False)
    a, b = nn.Parameter(job.randn(4, 32) * 0.1), nn.Parameter(torch.zeros(32, 4, device=job.device))
    optimizer, ids = torch.optim.AdamW([a, b], lr=1e-2), job.ints(50, 4, 17)

    def step() -> None:
        with job.autocast():
            x = net.words(ids[:, :-1])
            logits = net.head(x + F.linear(F.linear(F.dropout(x, 0.05), a), b) * 2)
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        job.update(loss, optimizer)

    return step


@program
def dpo(job: Job) -> Step:
    policy, reference = job.to(Llama()), job.to(Llama()).eval()
    chosen, rejected = padded(job), padded(job)

    def score(net: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        words = torch.gather(net(ids[:, :-1]).log_softmax(-1), 2, ids[:, 1:, None]).squeeze(2)
        return (words * (ids[:, 1:] != PAD)).sum(-1)

    def loss() -> torch.Tensor:
        with torch.no_grad():
            base = score(reference, chosen) - score(reference, rejected)
        return -F.logsigmoid(0.1 * (score(policy, chosen) - score(policy, rejected) - base)).mean()

    return trained(job, policy, loss)


@program
def bert_mlm(job: Job) -> Step:
    words, head = nn.Embedding(50, 32, padding_idx=PAD), nn.Linear(32, 50)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
    )
    net = job.to(nn.ModuleList([words, head, encoder]))
    ids = padded(job)

    def loss() -> torch.Tensor:
        hidden = ids.masked_fill((torch.rand(ids.shape) < 0.15).to(ids.device), 49)
        found = head(encoder(words(hidden), src_key_padding_mask=ids == PAD))
        return F.cross_entropy(found.flatten(0, 1), ids.flatten(), ignore_index=PAD)

    return trained(job, net, loss, clip=1.0)


@program
def translation(job: Job) -> Step:
    model = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)
    words, head = nn.Embedding(50, 32), nn.Linear(32, 50)
    net = job.to(nn.ModuleList([model, words, head]))
    source, target = padded(job), padded(job)
    mask = nn.Transformer.generate_square_subsequent_mask(15, device=torch.device(job.device))

    def loss() -> torch.Tensor:
        out = model(words(source), words(target[:, :-1]), tgt_mask=mask, src_key_padding_mask=source == PAD)
        return F.cross_entropy(head(out).flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)

    return trained(job, net, loss)


@program
def relative_bias(job: Job) -> Step:
    bias, words, qkv = nn.Embedding(32, 4), nn.Embedding(50, 32), nn.Linear(32, 96)
    net = job.to(nn.ModuleList([bias, words, qkv]))
    ids = padded(job)

    def loss() -> torch.Tensor:
        t = torch.arange(16, device=ids.device)
        added = bias((t[None] - t[:, None]).clamp(-15, 15) + 15).permute(2, 0, 1)
        x = words(ids)
        q, k, v = qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        keep = (ids != PAD)[:, None, None, :]
        weights = (q @ k.mT + added).masked_fill(~keep, torch.finfo(q.dtype).min).float().softmax(-1)
        y = (F.dropout(weights, 0.1).to(v.dtype) @ v).transpose(1, 2).flatten(2)
        return ((x + y) @ words.weight.T).logsumexp(-1).mean()

    return trained(job, net, loss)


@program
def seq2seq_attention(job: Job) -> Step:
    words, encoder = nn.Embedding(50, 16), nn.LSTM(16, 32, batch_first=True, bidirectional=True)
    cell, bridge, head = nn.LSTMCell(16 + 64, 32), nn.Linear(64, 32), nn.Linear(32, 50)
    net = job.to(nn.ModuleList([words, encoder, cell, bridge, head]))
    source, target = padded(job), padded(job)

    def loss() -> torch.Tensor:
        memory, _ = encoder(words(source))
        h = c = memory.new_zeros(4, 32)
        total = memory.new_zeros(())
        for t in range(8):  # the same layers at each step, in one autocast region
            weights = torch.bmm(bridge(memory), h.unsqueeze(2).to(memory.dtype)).squeeze(2).softmax(1)
            context = torch.bmm(weights.unsqueeze(1).to(memory.dtype), memory).squeeze(1)
            h, c = cell(torch.cat([words(target[:, t]), context], 1), (h, c))
            total = total + F.cross_entropy(head(h), target[:, t + 1])
        return total / 8

    return trained(job, net, loss, clip=1.0)


def recurrent(job: Job, kind: Any, length: int, **more: Any) -> Step:
    words, cells, head = nn.Embedding(50, 16), kind(16, 24, batch_first=True, **more), nn.Linear(24, 50)
    net = job.to(nn.ModuleList([words, cells, head]))
    ids = job.ints(50, 4, length)

    def loss() -> torch.Tensor:
        return F.cross_entropy(head(cells(words(ids[:, :-1]))[0]).flatten(0, 1), ids[:, 1:].flatten())

    return trained(job, net, loss, clip=1.0)


@program
def char_rnn(job: Job) -> Step:
    return recurrent(job, nn.RNN, 120)


@program
def char_gru(job: Job) -> Step:
    return recurrent(job, nn.GRU, 120)


@program
def char_lstm(job: Job) -> Step:
    return recurrent(job, nn.LSTM, 40, num_layers=2, dropout=0.2)


@program
def packed_lstm(job: Job) -> Step:
    words, cells, head = nn.Embedding(50, 16, padding_idx=PAD), nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 2)
    net = job.to(nn.ModuleList([words, cells, head]))
    ids, y = padded(job), job.ints(2, 4)
    lengths = (ids != PAD).sum(1).cpu()

    def loss() -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(words(ids), lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(cells(packed)[0], batch_first=True)
        return F.cross_entropy(head(out.amax(1)), y)

    return trained(job, net, loss)


@program
def bag_of_words(job: Job) -> Step:
    bag, head = nn.EmbeddingBag(50, 16, mode="mean"), nn.Linear(16, 4)
    net = job.to(nn.ModuleList([bag, head]))
    ids, offsets, y = job.ints(50, 40), torch.arange(0, 40, 10).to(job.device), job.ints(4, 4)
    return trained(job, net, lambda: F.cross_entropy(head(bag(ids, offsets)), y))


@program
def word2vec(job: Job) -> Step:
    center, context = nn.Embedding(50, 16), nn.Embedding(50, 16)
    net = job.to(nn.ModuleList([center, context]))
    a, b, negative = job.ints(50, 32), job.ints(50, 32), job.ints(50, 32, 5)

    def loss() -> torch.Tensor:
        h = center(a)
        good = F.logsigmoid((h * context(b)).sum(1))
        bad = F.logsigmoid(-torch.bmm(context(negative), h.unsqueeze(2)).squeeze(2)).sum(1)
        return -(good + bad).mean()

    return trained(job, net, loss)


@program
def speech_ctc(job: Job) -> Step:
    net = job.to(nn.Sequential(nn.Conv1d(20, 32, 5, 2, 2), nn.BatchNorm1d(32), nn.Hardtanh(0, 20, inplace=True)))
    head = job.to(nn.Linear(32, 12))
    x, y = job.put(torch.randn(3, 20, 60)), torch.randint(1, 12, (3, 8)).to(job.device)

    def loss() -> torch.Tensor:
        logs = head(net(x).transpose(1, 2)).float().log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logs, y, torch.full((3,), 30), torch.tensor([8, 6, 5]), zero_infinity=True)

    return trained(job, nn.ModuleList([net, head]), loss)


@program
def mixture_of_experts(job: Job) -> Step:
    gate, experts = (
        nn.Linear(16, 4),
        nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)),
    )
    net = job.to(nn.ModuleList([gate, experts]))
    x, y = job.randn(24, 16), job.randn(24, 16)

    def loss() -> torch.Tensor:
        weights, chosen = torch.topk(gate(x).float().softmax(-1), 2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(experts):
            row, place = torch.where(chosen == number)
            out.index_add_(0, row, (expert(x[row]) * weights[row, place, None]).to(out.dtype))
        balance = F.one_hot(chosen, 4).float().mean((0, 1)) @ gate(x).float().softmax(-1).mean(0)
        return F.mse_loss(out, y) + 0.01 * balance

    return trained(job, net, loss)


@program
def adaptive_softmax(job: Job) -> Step:
    words, head = nn.Embedding(50, 16), nn.AdaptiveLogSoftmaxWithLoss(16, 50, [10, 30])
    net = job.to(nn.ModuleList([words, head]))
    ids = job.ints(50, 64)
    return trained(job, net, lambda: head(words(ids[:-1]), ids[1:]).loss)


@program
def selective_scan(job: Job) -> Step:
    into, steps, out = nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(16, 16)
    mix = nn.Conv1d(16, 16, 4, padding=3, groups=16)
    net = job.to(nn.ModuleList([into, steps, out, mix]))
    decay = -torch.exp(job.randn(16))
    x = job.randn(2, 24, 16)

    def loss() -> torch.Tensor:
        u, gate = into(x).chunk(2, -1)
        u = F.silu(mix(u.transpose(1, 2))[..., :24]).transpose(1, 2)
        delta = F.softplus(steps(u)).float()
        state, found = u.new_zeros(2, 16, dtype=torch.float32), []
        for t in range(24):
            state = state * torch.exp(delta[:, t] * decay) + delta[:, t] * u[:, t]
            found.append(state)
        return (out(torch.stack(found, 1).to(gate.dtype) * F.silu(gate)) - x).square().mean()

    return trained(job, net, loss)


@program
def linear_attention(job: Job) -> Step:
    qkv = job.to(nn.Linear(16, 48))
    x = job.randn(2, 20, 16)

    def loss() -> torch.Tensor:
        q, k, v = qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.cumsum(torch.einsum("btd,bte->btde", k, v), 1)
        top = torch.einsum("btd,btde->bte", q, state)
        return (top / (q * k.cumsum(1)).sum(-1, keepdim=True).clamp_min(1e-3) - x).square().mean()

    return trained(job, qkv, loss)


@program
def key_value_cache(job: Job) -> Step:
    net = job.to(Llama()).eval()
    ids = job.ints(50, 2, 4)

    def step() -> None:
        nonlocal ids
        with torch.no_grad(), job.autocast():
            logits = net(ids)[:, -1].float() / 0.8
            top = torch.topk(logits, 10).values[:, -1:]
            logits = logits.masked_fill(logits < top, float("-inf"))
            word = torch.multinomial(F.softmax(logits, -1), 1)
        ids = torch.cat([ids, word], 1)[:, -12:]

    return step


@program
def left_padding(job: Job) -> Step:
    qkv = job.to(nn.Linear(16, 48))
    x = job.randn(2, 8, 16)
    keep = torch.ones(2, 8, dtype=torch.bool)
    keep[0, :3] = False
    mask = (keep[:, None, None, :] & torch.ones(8, 8, dtype=torch.bool).tril()).to(job.device)

    def loss() -> torch.Tensor:
        q, k, v = qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # some rows see nothing at all
        return y.transpose(1, 2)[keep.to(x.device)].float().square().mean()

    return trained(job, qkv, loss)
