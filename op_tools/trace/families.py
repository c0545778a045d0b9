"""Operators that do the same under different names: `torch.matmul`, `Tensor.__matmul__`, `oneflow.broadcast_matmul`."""

from __future__ import annotations

import functools
import re
from typing import Final

from .graph import short_name

_FAMILIES: Final = {
    "matmul": "linear matmul mm bmm addmm baddbmm addbmm einsum batch_matmul broadcast_matmul broadcast_matmul_grad_b "
    "mv dot",
    "attention": "scaled_dot_product_attention multi_head_attention_forward _scaled_dot_product_attention_math",
    "add": "add add_n sub rsub radd iadd isub scalar_add broadcast_add broadcast_sub",
    "mul": "mul rmul imul div truediv rtruediv itruediv scalar_mul broadcast_mul broadcast_div multiply divide",
    "cast": "to cast float half bfloat16 double type type_as _to_copy",
    "view": "view reshape flatten unflatten contiguous squeeze unsqueeze expand expand_as view_as transpose permute t "
    "swapaxes movedim chunk split getitem narrow select clone detach broadcast_like identity boxing repeat "
    "hierarchical_parallel_cast",
    "embedding": "embedding gather",
    "loss": "cross_entropy nll nll_loss cross_entropy_loss",
    "sigmoid": "sigmoid sigmoid_v2",
    "pow": "pow square",
    "sum": "sum reduce_sum reduce_sum_like mean",
    "fill": "zeros ones zeros_like ones_like empty empty_like full full_like zero fill variable state tensor arange",
    "softmax": "softmax log_softmax _softmax _log_softmax",
    "max": "max amax min amin maximum minimum argmax argmin",
    "update": "_fused_adamw _fused_adam _fused_sgd adam",
    "mask": "masked_fill where tril triu",
    "equal": "eq one_hot",
}
_BY_NAME: Final = {word: family for family, words in _FAMILIES.items() for word in words.split()}
MOVES: Final = frozenset({"view", "cast", "fill"})  # make no new values


@functools.lru_cache(maxsize=20_000)
def family(name: str) -> str:
    """What kind of operator it is (`family("torch.nn.functional.linear") == "matmul"`)."""
    last = short_name(name)
    known = _BY_NAME.get(last) or _BY_NAME.get(last.lower())
    if known is None:
        plain = re.sub(r"(_grad(_[a-z]|_param)?|_backward)$", "", re.sub(r"_param_grad$", "", last)).removeprefix("_")
        known = _BY_NAME.get(plain, plain)
    return known
