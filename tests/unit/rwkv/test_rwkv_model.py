"""The model has the log's shapes and initialisation, and sees the past only."""

from __future__ import annotations

import math

import pytest
import torch

from projects.rwkv_v4.config import Config, get_config
from projects.rwkv_v4.model import GPT

ATT = {
    "time_decay": (1024,),
    "time_first": (1024,),
    **{f"time_mix_{x}": (1, 1, 1024) for x in "kvr"},
    **{f"{x}.weight": (1024, 1024) for x in ("key", "value", "receptance", "output")},
}
FFN = {
    "time_mix_k": (1, 1, 1024),
    "time_mix_r": (1, 1, 1024),
    "key.weight": (4096, 1024),
    "receptance.weight": (1024, 1024),
    "value.weight": (1024, 4096),
}


def logged_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"emb.weight": (6064, 1024), "head.weight": (6064, 1024)}
    shapes |= {f"head_{x}.weight": (256, 1024) for x in "qk"}
    norms = ["ln_out", "blocks.0.ln0", *(f"blocks.{i}.ln{j}" for i in range(6) for j in (1, 2))]
    shapes |= {f"{norm}.{part}": (1024,) for norm in norms for part in ("weight", "bias")}
    for i in range(6):
        shapes |= {f"blocks.{i}.att.{name}": shape for name, shape in ATT.items()}
        shapes |= {f"blocks.{i}.ffn.{name}": shape for name, shape in FFN.items()}
    return shapes


@pytest.mark.parametrize("config", ["enwik8", "seed_log"])
def test_full_size_has_the_parameters_of_the_log(config: str) -> None:
    with torch.device("meta"):
        model = Config(get_config(f"configs/{config}.py")).build("model", vocab_size=6064)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == logged_shapes()
    assert len(shapes) == 116
    assert sum(p.numel() for p in model.parameters()) == 94_803_968
    text = str(model)
    assert "(output): Linear1D(in_features=1024, out_features=1024, bias=False, parallel=row)" in text
    assert "(emb): VocabEmbedding(num_embeddings=6064, embedding_dim=1024)" in text


def small(config: str) -> GPT:
    chosen = Config(get_config(f"configs/{config}.py"))
    chosen.override(["model.n_layer=2", "model.n_embd=32", "model.head_qk=16", "train.ctx_len=24"])
    model = chosen.build("model", vocab_size=29)
    torch.manual_seed(0)
    with torch.no_grad():  # silent branches must speak, or a leak through them would not show
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def leaks(model: GPT) -> list[int]:
    """Positions whose change shows in an earlier logit."""
    idx = torch.randint(29, (1, 24), generator=torch.Generator().manual_seed(1))
    before = model(idx)
    found = []
    for t in range(1, 24):
        changed = idx.clone()
        changed[0, t] = (changed[0, t] + 1) % 29
        if not torch.equal(model(changed)[0, :t], before[0, :t]):
            found.append(t)
    return found


def test_the_honest_model_is_causal() -> None:
    assert leaks(small("enwik8")) == []


def test_the_logged_model_is_not() -> None:
    assert leaks(small("seed_log")) == list(range(1, 24))


def test_initialisation() -> None:
    model = GPT(vocab_size=300, n_layer=3, n_embd=64, head_qk=16, ctx_len=8)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for name in ("att.key", "att.receptance", "att.output", "ffn.value", "ffn.receptance"):
        assert not weights[f"blocks.1.{name}.weight"].any()
    assert not weights["head_q.weight"].any()
    gains = {"emb": 1e-4 * math.sqrt(300), "head": 0.5 * math.sqrt(300 / 64), "head_k": 0.1}
    gains |= {"blocks.2.att.value": 1.0, "blocks.0.ffn.key": 2.0}
    for name, gain in gains.items():
        values = torch.linalg.svdvals(weights[f"{name}.weight"])
        torch.testing.assert_close(values, torch.full_like(values, gain), rtol=1e-4, atol=1e-6)
    decay = weights["blocks.1.att.time_decay"]
    assert decay[0] == -5
    assert decay[-1] == 3
    assert decay[21].item() == pytest.approx(-5 + 8 * (21 / 63) ** (0.7 + 1.3 * 0.5))
    assert weights["blocks.2.att.time_first"][:3].tolist() == pytest.approx([math.log(0.3) + x for x in (0, 0.5, -0.5)])
    assert weights["blocks.1.att.time_mix_v"][0, 0, 16].item() == pytest.approx(0.25 ** (2 / 3) + 0.15)
    assert weights["blocks.1.att.time_mix_r"][0, 0, 16].item() == pytest.approx(0.25 ** (1 / 3))
    assert weights["blocks.1.ffn.time_mix_k"][0, 0, 16].item() == pytest.approx(0.25 ** (2 / 3))


def test_the_pull_on_logits_changes_gradients_and_not_the_loss() -> None:
    idx = torch.randint(11, (2, 8))
    losses, grads = [], []
    for pull in (0.0, 0.1):
        model = GPT(vocab_size=11, n_layer=1, n_embd=16, head_qk=4, ctx_len=8, logit_pull=pull)
        loss = model(idx, idx)
        loss.backward()
        losses.append(loss.item())
        grads.append(model.head.weight.grad)
    assert losses[0] == losses[1]
    assert not torch.equal(*grads)


def test_too_long_an_input_says_so() -> None:
    model = GPT(vocab_size=11, n_layer=1, n_embd=16, head_qk=4, ctx_len=8)
    with pytest.raises(ValueError, match=r"9 tokens do not fit into the context of 8"):
        model(torch.zeros(1, 9, dtype=torch.long))
