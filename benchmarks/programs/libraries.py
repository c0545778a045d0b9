"""Small models of transformers and timm, where these are installed."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from . import PROGRAMS, Job, Step, trained

SIZES = {
    "vocab_size": 200,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
CAUSAL = {"num_key_value_heads": 2, "max_position_embeddings": 64}


def _text(hf: Any) -> dict[str, Callable[[], Any]]:
    bart = {"vocab_size": 200, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "decoder_ffn_dim": 64}
    bart |= {"encoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return {
        "hf_gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=200, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        ),
        "hf_llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **CAUSAL)),
        "hf_qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, **CAUSAL)),
        "hf_mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, **CAUSAL, sliding_window=8)),
        "hf_mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, **CAUSAL, num_local_experts=4)),
        "hf_gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**SIZES, **CAUSAL, head_dim=8)),
        "hf_bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES)),
        "hf_albert": lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(**SIZES, embedding_size=16)),
        "hf_roberta": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**SIZES, pad_token_id=0)),
        "hf_distilbert": lambda: hf.DistilBertForMaskedLM(
            hf.DistilBertConfig(vocab_size=200, dim=32, n_layers=2, n_heads=4, hidden_dim=64)
        ),
        "hf_electra": lambda: hf.ElectraForMaskedLM(hf.ElectraConfig(**SIZES, embedding_size=16)),
        "hf_deberta": lambda: hf.DebertaV2ForMaskedLM(
            hf.DebertaV2Config(**SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"])
        ),
        "hf_t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=200, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
            )
        ),
        "hf_bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**bart, max_position_embeddings=64)),
        "hf_mamba": lambda: hf.MambaForCausalLM(
            hf.MambaConfig(vocab_size=200, hidden_size=32, num_hidden_layers=2, state_size=4)
        ),
        "hf_gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES, max_position_embeddings=64)),
        "hf_opt": lambda: hf.OPTForCausalLM(
            hf.OPTConfig(
                vocab_size=200,
                hidden_size=32,
                num_hidden_layers=2,
                ffn_dim=64,
                num_attention_heads=4,
                word_embed_proj_dim=32,
            )
        ),
        "hf_bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=200, hidden_size=32, n_layer=2, n_head=4)),
    }


def _text_program(job: Job, make: Callable[[], Any]) -> Step:
    net = job.to(make().train())
    ids = torch.randint(5, 200, (2, 24))
    mask = torch.ones_like(ids)
    mask[0, 18:] = 0
    ids, mask = ids.to(job.device), mask.to(job.device)
    labels = ids.masked_fill(mask == 0, -100)
    more = {} if "Mamba" in type(net).__name__ else {"attention_mask": mask}
    return trained(job, net, lambda: net(input_ids=ids, labels=labels, **more).loss, clip=1.0)


def _images(hf: Any) -> dict[str, Callable[[], Any]]:
    sizes = {k: v for k, v in SIZES.items() if k != "vocab_size"}
    return {
        "hf_vit": lambda: hf.ViTForImageClassification(
            hf.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10)
        ),
        "hf_deit": lambda: hf.DeiTForImageClassification(
            hf.DeiTConfig(**sizes, image_size=32, patch_size=8, num_labels=10)
        ),
        "hf_swin": lambda: hf.SwinForImageClassification(
            hf.SwinConfig(
                image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4, num_labels=10
            )
        ),
        "hf_convnext": lambda: hf.ConvNextForImageClassification(
            hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=10)
        ),
        "hf_resnet": lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=10)
        ),
        "hf_segformer": lambda: hf.SegformerForImageClassification(
            hf.SegformerConfig(hidden_sizes=[8, 16, 16, 16], depths=[1] * 4, decoder_hidden_size=16, num_labels=10)
        ),
    }


def _image_program(job: Job, make: Callable[[], Any]) -> Step:
    net = job.to(make().train())
    x, y = job.randn(2, 3, 32, 32), job.ints(10, 2)
    return trained(job, net, lambda: F.cross_entropy(net(pixel_values=x).logits, y), clip=1.0)


def _clip_program(job: Job) -> Step:
    import transformers as hf

    sizes = {k: v for k, v in SIZES.items() if k != "vocab_size"}
    text = {**SIZES, "max_position_embeddings": 32, "eos_token_id": 199, "bos_token_id": 198, "pad_token_id": 0}
    config = hf.CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 32, "patch_size": 8})
    net = job.to(hf.CLIPModel(config))
    ids, x = job.ints(199, 4, 12), job.randn(4, 3, 32, 32)
    ids[:, -1] = 199
    return trained(job, net.train(), lambda: net(input_ids=ids, pixel_values=x, return_loss=True).loss)


def _whisper_program(job: Job) -> Step:
    import transformers as hf

    sizes = {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    }
    more = {
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_mel_bins": 16,
        "max_source_positions": 20,
        "vocab_size": 200,
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    net = job.to(
        hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes, **more, **tokens, max_target_positions=32)).train()
    )
    sound, labels = job.put(torch.randn(2, 16, 40)), job.ints(200, 2, 10)
    return trained(job, net, lambda: net(input_features=sound, labels=labels).loss)


def _wav2vec_program(job: Job) -> Step:
    import transformers as hf

    convs = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_conv_pos_embeddings": 8}
    sizes = {
        "vocab_size": 20,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    config = hf.Wav2Vec2Config(
        **sizes, **convs, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, num_feat_extract_layers=2
    )
    net = job.to(hf.Wav2Vec2ForCTC(config).train())
    sound, labels = job.put(torch.randn(2, 800)), torch.randint(1, 20, (2, 5)).to(job.device)
    return trained(job, net, lambda: net(input_values=sound, labels=labels).loss)


TIMM = (
    "resnet18",
    "resnet50",
    "convnext_atto",
    "efficientnet_b0",
    "mobilenetv3_small_050",
    "vit_tiny_patch16_224",
    "regnetx_002",
    "mixer_s32_224",
)


def _timm_program(job: Job, name: str) -> Step:
    import timm

    size = {"img_size": 64} if name.startswith(("vit", "mixer")) else {}
    net: nn.Module = job.to(timm.create_model(name, pretrained=False, num_classes=10, **size).train())
    x, y = job.randn(2, 3, 64, 64), job.ints(10, 2)
    return trained(job, net, lambda: F.cross_entropy(net(x), y))


if importlib.util.find_spec("transformers") is not None:
    import transformers

    for _name, _make in _text(transformers).items():
        PROGRAMS[_name] = functools.partial(_text_program, make=_make)
    for _name, _make in _images(transformers).items():
        PROGRAMS[_name] = functools.partial(_image_program, make=_make)
    PROGRAMS.update(hf_clip=_clip_program, hf_whisper=_whisper_program, hf_wav2vec2=_wav2vec_program)
if importlib.util.find_spec("timm") is not None:
    for _name in TIMM:
        PROGRAMS[f"timm_{_name}"] = functools.partial(_timm_program, name=_name)
