"""The attention operators that PyTorch has for CUDA alone, as plain matrix products.

Libraries and DTensor call them by name on what looks like a CUDA device. Half precision is computed in float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor
Causal = tuple[int | None, int | None]
"""Keys to the left and right of its own position that a query sees; None: all of them."""


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, window: Causal, scale: float, corner: bool) -> Tensor:
    """Scaled products with the mask applied; `corner`: the last query sees the last key (flash), else the first the
    first."""
    scores = (query @ key.transpose(-2, -1)) * scale
    if bias is not None:
        scores = scores + bias
    left, right = window
    if left is not None or right is not None:
        rows = torch.arange(query.size(-2), device=query.device)[:, None]
        columns = torch.arange(key.size(-2), device=query.device)[None, :]
        distance = columns - rows - (key.size(-2) - query.size(-2) if corner else 0)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if right is not None:
            hidden |= distance > right
        if left is not None:
            hidden |= distance < -left
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _grouped(tensor: Tensor, heads: int) -> Tensor:
    """Keys and values that several heads of the query share, repeated for each."""
    return tensor if tensor.size(-3) == heads else tensor.repeat_interleave(heads // tensor.size(-3), -3)


def _ungrouped(gradient: Tensor, heads: int) -> Tensor:
    if gradient.size(-3) == heads:
        return gradient
    summed: Tensor = gradient.unflatten(-3, (heads, -1)).sum(-3)
    return summed


def _kept(scores: Tensor, dropout: float, seed: Tensor) -> Tensor | None:
    """What dropout leaves, drawn again from the seed in the backward pass."""
    if dropout <= 0:
        return None
    generator = torch.Generator(device=scores.device)
    generator.manual_seed(int(seed.item()))
    return torch.rand(scores.shape, device=scores.device, generator=generator) >= dropout


def _new_seed(dropout: float, device: torch.device) -> Tensor:
    if dropout <= 0:
        return torch.zeros((), dtype=torch.int64, device=device)
    return torch.randint(2**62, (), dtype=torch.int64, device=device)


class _Parts(NamedTuple):
    """Attention up to its weights, which forward and backward share."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    weights: Tensor
    share: Tensor | None  # of each weight that dropout leaves
    scale: float


def _parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout: float,
    window: Causal,
    scale: float | None,
    seed: Tensor,
    *,
    corner: bool = False,
) -> _Parts:
    heads, scale = query.size(-3), scale or 1 / math.sqrt(query.size(-1))
    q, k, v = _wide(query), _grouped(_wide(key), heads), _grouped(_wide(value), heads)
    scores = _scores(q, k, bias, window, scale, corner)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)  # a query that sees no key
    kept = _kept(scores, dropout, seed)
    return _Parts(q, k, v, scores, weights, None if kept is None else kept / (1 - dropout), scale)


def _forward(query: Tensor, *given: Any, corner: bool = False) -> tuple[Tensor, Tensor]:
    """The result and the logarithms of the sums; `given` is what `_parts` takes."""
    parts = _parts(query, *given, corner=corner)
    weights = parts.weights if parts.share is None else parts.weights * parts.share
    return (weights @ parts.v).to(query.dtype), torch.logsumexp(parts.scores, -1).float()


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *given: Any, corner: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and scores; `given` is the rest of what `_parts` takes."""
    q, k, v, _, weights, share, scale = _parts(query, key, value, *given, corner=corner)
    grad, share = _wide(grad), torch.ones_like(weights) if share is None else share
    grad_value = (weights * share).transpose(-2, -1) @ grad
    grad_weights = (grad @ v.transpose(-2, -1)) * share
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True))
    grad_query = (grad_scores @ k) * scale
    grad_key = (grad_scores.transpose(-2, -1) @ q) * scale
    return (
        grad_query.to(query.dtype),
        _ungrouped(grad_key, key.size(-3)).to(key.dtype),
        _ungrouped(grad_value, value.size(-3)).to(value.dtype),
        grad_scores,
    )


def _window(causal: bool) -> Causal:
    return (None, 0) if causal else (None, None)


def _summed_to(gradient: Tensor, shape: torch.Size) -> Tensor:
    return gradient.sum_to_size(shape)


def _by_position(tensor: Tensor) -> Tensor:
    """In memory by (batch, length, heads, width), as the memory-efficient kernels leave it and DTensor expects it."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _like(tensor: Tensor, model: Tensor) -> Tensor:
    """In memory in the order of `model`, as the other kernels leave it."""
    order = sorted(range(tensor.dim()), key=model.stride, reverse=True)
    places = [order.index(dimension) for dimension in range(tensor.dim())]
    return tensor.permute(order).contiguous().permute(places)


# --- scaled_dot_product_attention by (batch, heads, length, width) ---------------------------------


def efficient(q: Tensor, k: Tensor, v: Tensor, attn_bias: Any, compute_log_sumexp: bool, dropout_p: float = 0.0,
              is_causal: bool = False, *, scale: float | None = None) -> Any:  # fmt: skip
    seed = _new_seed(dropout_p, q.device)
    out, logs = _forward(q, k, v, attn_bias, dropout_p, _window(is_causal), scale, seed)
    logs = logs if compute_log_sumexp else logs.new_empty(*logs.shape[:2], 0)
    return _by_position(out), logs, seed, torch.zeros_like(seed)


def efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, attn_bias: Any, out: Tensor, logsumexp: Tensor,
                       philox_seed: Tensor, philox_offset: Tensor, dropout_p: float, grad_input_mask: list[bool],
                       is_causal: bool = False, *, scale: float | None = None) -> Any:  # fmt: skip
    *grads, scores = _backward(grad, q, k, v, attn_bias, dropout_p, _window(is_causal), scale, philox_seed)
    found = map(_by_position, grads)
    of_bias = _summed_to(scores, attn_bias.shape).to(attn_bias.dtype) if attn_bias is not None else None
    return tuple(gradient if wanted else None for gradient, wanted in zip((*found, of_bias), grad_input_mask))


def flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
          return_debug_mask: bool = False, *, scale: float | None = None) -> Any:  # fmt: skip
    seed = _new_seed(dropout_p, q.device)
    out, logs = _forward(q, k, v, None, dropout_p, _window(is_causal), scale, seed)
    none = q.new_empty(0, dtype=torch.int32)
    return _like(out, q), logs, none, none, q.size(2), k.size(2), seed, torch.zeros_like(seed), q.new_empty(0)


def flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor,
                   cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Tensor,
                   philox_offset: Tensor, *, scale: float | None = None) -> Any:  # fmt: skip
    found = _backward(grad, q, k, v, None, dropout_p, _window(is_causal), scale, philox_seed)
    return tuple(map(_like, found, (q, k, v)))


def cudnn(q: Tensor, k: Tensor, v: Tensor, attn_bias: Any, compute_log_sumexp: bool, dropout_p: float = 0.0,
          is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None) -> Any:  # fmt: skip
    seed = _new_seed(dropout_p, q.device)
    out, logs = _forward(q, k, v, attn_bias, dropout_p, _window(is_causal), scale, seed)
    none = q.new_empty(0, dtype=torch.int32)
    logs = logs[..., None]  # as cuDNN leaves it
    return _like(out, q), logs, none, none, q.size(2), k.size(2), seed, torch.zeros_like(seed), q.new_empty(0)


def cudnn_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, philox_seed: Tensor,
                   philox_offset: Tensor, attn_bias: Any, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
                   dropout_p: float, is_causal: bool, *, scale: float | None = None) -> Any:  # fmt: skip
    found = _backward(grad, q, k, v, attn_bias, dropout_p, _window(is_causal), scale, philox_seed)
    return tuple(map(_like, found, (q, k, v)))


# --- flash attention by (batch, length, heads, width), or by packed sequences ----------------------


def _sequences(cum_q: Tensor | None, cum_k: Tensor | None, q: Tensor, k: Tensor) -> list[tuple[Any, Any]]:
    """Which part of the queries belongs to which part of the keys, one pair for each sequence."""
    if cum_q is None or cum_q.numel() == 0:
        return [(index, index) for index in range(q.size(0))]
    assert cum_k is not None
    starts, others = cum_q.tolist(), cum_k.tolist()
    return [
        (slice(a, b), slice(c, d)) for a, b, c, d in zip(starts[:-1], starts[1:], others[:-1], others[1:], strict=True)
    ]


def _flash_window(causal: bool, left: int | None, right: int | None) -> Causal:
    def bound(size: int | None) -> int | None:
        return None if size is None or size < 0 else size

    return bound(left), 0 if causal else bound(right)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int,
                  dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
                  window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Any = None,
                  alibi_slopes: Any = None, block_table: Any = None, num_splits: Any = None) -> Any:  # fmt: skip
    if seqused_k is not None or alibi_slopes is not None or block_table is not None:
        raise NotImplementedError("soft: _flash_attention_forward without seqused_k, alibi_slopes and block_table only")
    seed, window = _new_seed(dropout_p, q.device), _flash_window(is_causal, window_size_left, window_size_right)
    out, logs = torch.empty_like(q[..., : v.size(-1)]), []
    for number, (mine, theirs) in enumerate(_sequences(cum_seq_q, cum_seq_k, q, k)):
        parts = (q[mine].transpose(0, 1), k[theirs].transpose(0, 1), v[theirs].transpose(0, 1))
        one, log = _forward(*parts, None, dropout_p, window, scale, seed + number, corner=True)
        out[mine] = one.transpose(0, 1)
        logs.append(log)
    packed = cum_seq_q is not None and cum_seq_q.numel() > 0
    return out, torch.cat(logs, 1) if packed else torch.stack(logs), seed, torch.zeros_like(seed), q.new_empty(0)


def flash_forward_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
                           cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float,
                           is_causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float | None = None,
                           window_size_left: int | None = None,
                           window_size_right: int | None = None) -> Any:  # fmt: skip
    window = _flash_window(is_causal, window_size_left, window_size_right)
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for number, (mine, theirs) in enumerate(_sequences(cum_seq_q, cum_seq_k, q, k)):
        g, a, b, c = (part.transpose(0, 1) for part in (grad[mine], q[mine], k[theirs], v[theirs]))
        found = _backward(g, a, b, c, None, dropout_p, window, scale, rng_state + number, corner=True)
        for target, where, gradient in zip(grads, (mine, theirs, theirs), found, strict=False):
            target[where] += gradient.transpose(0, 1)
    return grads


KERNELS = {
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_forward_backward,
}
