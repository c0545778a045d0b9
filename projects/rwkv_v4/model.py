"""RWKV-v4 with a copy head, written as plain CUDA-style PyTorch; names and shapes as in the training log."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .wkv import wkv


class LayerNorm(nn.LayerNorm):
    """A layer norm that prints as in the training log."""

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class ZeroPad2d(nn.ZeroPad2d):
    """A padding that prints as in the training log."""

    def extra_repr(self) -> str:
        return ""


class Linear1D(nn.Linear):
    """A linear layer without bias that says how tensor parallelism splits it: ``col`` outputs, ``row`` inputs."""

    def __init__(self, in_features: int, out_features: int, parallel: str) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.parallel = parallel

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, parallel={self.parallel}"


class VocabEmbedding(nn.Embedding):
    """An embedding that tensor parallelism splits by vocabulary."""

    def extra_repr(self) -> str:
        return f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}"


def widened(x: Tensor) -> Tensor:
    """In float32 at least: what mixed precision computes with full precision (sigmoid, square, loss)."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def mixed(x: Tensor, shifted: Tensor, share: Tensor) -> Tensor:
    return x * share + shifted * (1 - share)


class RWKV_TimeMix(nn.Module):
    """Mixes over time: wkv of keys and values, gated by the receptance."""

    def __init__(self, n_embd: int, n_layer: int, layer: int) -> None:
        super().__init__()
        ramp = torch.arange(n_embd) / n_embd
        depth, fade = layer / max(n_layer - 1, 1), 1 - layer / n_layer
        speed = torch.arange(n_embd) / max(n_embd - 1, 1)
        zigzag = (torch.arange(n_embd) + 1) % 3 - 1
        self.time_decay = nn.Parameter(-5 + 8 * speed ** (0.7 + 1.3 * depth))
        self.time_first = nn.Parameter(math.log(0.3) + 0.5 * zigzag)
        self.time_mix_k = nn.Parameter((ramp**fade).view(1, 1, -1))
        self.time_mix_v = nn.Parameter((ramp**fade).view(1, 1, -1) + 0.3 * depth)
        self.time_mix_r = nn.Parameter((ramp ** (0.5 * fade)).view(1, 1, -1))
        self.time_shift = ZeroPad2d((0, 0, 1, -1))
        self.key = Linear1D(n_embd, n_embd, "col")
        self.value = Linear1D(n_embd, n_embd, "col")
        self.receptance = Linear1D(n_embd, n_embd, "col")
        self.output = Linear1D(n_embd, n_embd, "row")

    def forward(self, x: Tensor) -> Tensor:
        shifted = self.time_shift(x)
        k = self.key(mixed(x, shifted, self.time_mix_k))
        v = self.value(mixed(x, shifted, self.time_mix_v))
        r = self.receptance(mixed(x, shifted, self.time_mix_r))
        out: Tensor = self.output(torch.sigmoid(widened(r)) * wkv(-torch.exp(self.time_decay), self.time_first, k, v))
        return out


class RWKV_ChannelMix(nn.Module):
    """Mixes over channels: a squared-ReLU network, gated by the receptance."""

    def __init__(self, n_embd: int, n_layer: int, layer: int) -> None:
        super().__init__()
        share = (torch.arange(n_embd) / n_embd) ** (1 - layer / n_layer)
        self.time_mix_k = nn.Parameter(share.view(1, 1, -1).clone())
        self.time_mix_r = nn.Parameter(share.view(1, 1, -1).clone())
        self.time_shift = ZeroPad2d((0, 0, 1, -1))
        self.key = Linear1D(n_embd, 4 * n_embd, "col")
        self.receptance = Linear1D(n_embd, n_embd, "col")
        self.value = Linear1D(4 * n_embd, n_embd, "row")

    def forward(self, x: Tensor) -> Tensor:
        shifted = self.time_shift(x)
        hidden = torch.square(torch.relu(widened(self.key(mixed(x, shifted, self.time_mix_k)))))
        gate = torch.sigmoid(widened(self.receptance(mixed(x, shifted, self.time_mix_r))))
        out: Tensor = gate * self.value(hidden)
        return out


class Block(nn.Module):
    def __init__(self, n_embd: int, n_layer: int, layer: int) -> None:
        super().__init__()
        self.ln1 = LayerNorm(n_embd)
        self.ln2 = LayerNorm(n_embd)
        self.ln0 = LayerNorm(n_embd) if layer == 0 else None
        self.att = RWKV_TimeMix(n_embd, n_layer, layer)
        self.ffn = RWKV_ChannelMix(n_embd, n_layer, layer)

    def forward(self, x: Tensor) -> Tensor:
        if self.ln0 is not None:
            x = self.ln0(x)
        x = x + self.att(self.ln1(x))
        x = x + self.ffn(self.ln2(x))
        return x


class GPT(nn.Module):
    """The language model: token ids (B, T) to logits (B, T, V), or to the mean loss when targets are given.

    ``causal_copy=False`` and ``init="xavier"`` are the defects of the logged run, for reproducing it.

    >>> model = GPT(vocab_size=11, ctx_len=8, n_layer=2, n_embd=16, head_qk=4)
    >>> model(torch.zeros(1, 8, dtype=torch.long)).shape
    torch.Size([1, 8, 11])
    """

    copy_mask: Tensor
    token_ids: Tensor

    def __init__(
        self,
        vocab_size: int,
        ctx_len: int = 1024,
        n_layer: int = 6,
        n_embd: int = 1024,
        head_qk: int = 256,
        causal_copy: bool = True,
        init: str = "rwkv",
        logit_pull: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.vocab_size, self.ctx_len = vocab_size, ctx_len
        self.causal_copy, self.logit_pull, self.head_qk = causal_copy, logit_pull, head_qk
        self.emb = VocabEmbedding(vocab_size, n_embd)
        self.blocks = nn.Sequential(*(Block(n_embd, n_layer, i) for i in range(n_layer)))
        self.ln_out = LayerNorm(n_embd)
        self.head = Linear1D(n_embd, vocab_size, "row")
        self.head_q = Linear1D(n_embd, head_qk, "col")
        self.head_k = Linear1D(n_embd, head_qk, "col")
        self.register_buffer("copy_mask", torch.ones(ctx_len, ctx_len, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("token_ids", torch.arange(vocab_size), persistent=False)
        if init not in ("rwkv", "xavier"):
            raise ValueError(f"init={init!r}: expected 'rwkv' or 'xavier'")
        if not self.emb.weight.is_meta:
            self._initialise(init, torch.Generator().manual_seed(seed))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        if idx.shape[1] > self.ctx_len:
            raise ValueError(f"{idx.shape[1]} tokens do not fit into the context of {self.ctx_len} (model.ctx_len)")
        return self.from_embedding(self.emb(idx), idx, targets)

    def from_embedding(self, x: Tensor, idx: Tensor, targets: Tensor | None) -> Tensor:
        """All but the look-up, which stays out of torch.compile: compiled, its backward adds rows up with atomics,
        in no fixed order and slowly for characters as frequent as a space."""
        x = self.ln_out(self.blocks(x))
        logits: Tensor = self.head(x) + self._copied(x, idx)
        return logits if targets is None else self._loss(logits, targets)

    def _copied(self, x: Tensor, idx: Tensor) -> Tensor:
        """Logits for tokens seen before: similarity of this position to each earlier one, given to its token."""
        scores: Tensor = self.head_q(x) @ self.head_k(x).transpose(-2, -1) * (1 / self.head_qk)
        if self.causal_copy:
            length = idx.shape[1]
            scores = scores * self.copy_mask[:length, :length]
        return scores @ torch.eq(idx.unsqueeze(-1), self.token_ids).to(scores.dtype)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits = widened(logits).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten())
        if self.logit_pull:
            # Pulls the largest logit towards 0 without showing in the loss that is reported.
            # By index: amax looks for its value among the logits again in backward, and does not find it where
            # a compiler keeps them in another precision there.
            pull = 0.5 * self.logit_pull * logits.max(-1).values.square().mean()
            loss = loss + (pull - pull.detach())
        return loss

    @torch.no_grad()
    def _initialise(self, how: str, generator: torch.Generator) -> None:
        for name, module in self.named_modules():
            if isinstance(module, (Linear1D, VocabEmbedding)):
                gain = _gain(name, *module.weight.shape)
                if how == "xavier":
                    nn.init.xavier_normal_(module.weight, generator=generator)
                elif gain == 0:
                    nn.init.zeros_(module.weight)
                else:
                    nn.init.orthogonal_(module.weight, gain, generator=generator)


def _gain(name: str, outputs: int, inputs: int) -> float:
    """Gain of the orthogonal initialisation; zero where a branch starts out silent."""
    if name == "emb":
        return 1e-4 * math.sqrt(max(outputs, inputs))
    gains = {"head": 0.5 * math.sqrt(max(outputs / inputs, 1)), "head_k": 0.1, "att.value": 1.0, "ffn.key": 2.0}
    return gains.get(name.split(".", 2)[-1] if name.startswith("blocks.") else name, 0.0)
