"""Samples of PyTorch's operator database on the device under test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

import ditorch
from ditorch.conformance.databases import import_test_helpers
from op_tools.call.description import map_tensors, tensors_in

# The database compiles a CUDA function while it is imported, which only real CUDA allows.
ditorch.deactivate()
try:
    import_test_helpers()
    from torch.testing._internal.common_methods_invocations import op_db
finally:
    ditorch.activate()

# name: why its result is not a function of its inputs
UNDEFINED = {
    "empty": "uninitialised memory",
    "empty_like": "uninitialised memory",
    "empty_strided": "uninitialised memory",
    "empty_permuted": "uninitialised memory",
    "new_empty": "uninitialised memory",
    "new_empty_strided": "uninitialised memory",
}
SAMPLED = [
    "add",
    "mul",
    "div",
    "matmul",
    "nn.functional.linear",
    "nn.functional.cross_entropy",
    "nn.functional.layer_norm",
    "softmax",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.dropout",
    "split",
    "sort",
    "topk",
    "cat",
    "index_put",
    "masked_fill",
    "nn.functional.conv2d",
    "nn.functional.batch_norm",
    "nn.functional.embedding",
    "nn.functional.gelu",
    "std",
    "var_mean",
    "cumsum",
    "gather",
    "scatter_add",
    "einsum",
    "linalg.norm",
    "linalg.qr",
    "fft.fft",
    "norm",
    "nn.functional.normalize",
    "bernoulli",
    "clone",
    "contiguous",
    "reshape",
    "transpose",
    "expand",
    "unbind",
    "where",
    "nn.functional.interpolate",
    "nn.functional.max_pool2d",
    "logsumexp",
    "nn.functional.multi_head_attention_forward",
    "nn.functional.group_norm",
    "__getitem__",
    "view_as_complex",
    "mean",
    "sum",
    "nn.functional.pad",
    "kron",
    "tensordot",
    "nn.functional.mse_loss",
    "histc",
    "unique",
    "nonzero",
    "normal",
    "rsub",
    "__rpow__",
    "copysign",
    "nn.functional.rrelu",
    "cdist",
    "linalg.svd_lowrank",
    "lu",
    "resize_",
    "special.i0e",
    "nn.functional.nll_loss",
]


@dataclasses.dataclass
class Sample:
    """One call: an operator and arguments on the CPU, to be copied to the device for each run."""

    name: str
    variant: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inplace: bool = False

    def on(self, device: str) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
        """Fresh leaves on the device, and the arguments made of them."""
        leaves: list[torch.Tensor] = []
        known: dict[int, torch.Tensor] = {}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in known:
                leaf = tensor.detach().to(device).requires_grad_(tensor.requires_grad)
                leaves.append(leaf)
                known[id(tensor)] = leaf.clone() if self.inplace and leaf.requires_grad else leaf
            return known[id(tensor)]

        args = map_tensors(self.args, move)
        kwargs = {k: device if k == "device" else map_tensors(v, move) for k, v in self.kwargs.items()}
        return args, kwargs, leaves


def operators(all_of_them: bool) -> list[Any]:
    return [op for op in op_db if op.name not in UNDEFINED and (all_of_them or op.name in SAMPLED)]


def samples_of(op: Any, limit: int, gradients: bool, inplace: bool = False) -> Iterator[Sample]:
    dtype = torch.float32
    if not op.supports_dtype(dtype, "cpu"):
        dtype = next((d for d in (torch.int64, torch.bool, torch.complex64) if op.supports_dtype(d, "cpu")), None)
        if dtype is None:
            return
        gradients = False
    gradients = gradients and op.supports_autograd
    function = op.inplace_variant if inplace else op.op
    if function is None:
        return
    torch.manual_seed(0)
    # the last samples of a database entry tend to be the odd ones: take some from both ends
    found = list(op.sample_inputs("cpu", dtype, requires_grad=gradients))
    picked = found if len(found) <= limit else found[: limit - limit // 2] + found[-(limit // 2) :]
    for sample in picked:
        if inplace and (sample.broadcasts_input or not isinstance(sample.input, torch.Tensor)):
            continue
        if any(t.layout != torch.strided for t in tensors_in((sample.input, sample.args, sample.kwargs))):
            continue
        yield Sample(
            op.name, op.variant_test_name, function, (sample.input, *sample.args), dict(sample.kwargs), inplace
        )


def seed() -> None:
    torch.manual_seed(1234)


def gradients_of(result: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients of all differentiable results with fixed, uneven output gradients."""
    outputs = [t for t in tensors_in(result) if t.requires_grad]
    wanted = [t for t in leaves if t.requires_grad]
    if not outputs or not wanted:
        return []
    grads = []
    for tensor in outputs:
        steps = torch.linspace(0.5, 1.5, max(tensor.numel(), 1))[: tensor.numel()].reshape(tensor.shape)
        grads.append(steps.to(tensor.dtype).to(tensor.device))
    return list(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
