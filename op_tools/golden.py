"""The reference run: the same API call on the CPU, in higher precision, on private copies of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from . import settings
from .opcall import Tensor, map_tensors, tensors_in
from .snapshot import Staged, Unpacker, has_opaque, rebuild, stage
from .traits import OpTraits

_UPCAST: Final = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_VARIABLE: Final = "OP_DTYPE_CAST_DICT"
_UNDEFINED: Final = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")


class NotComparable(Exception):
    """There is no golden result for this call; the message says why."""


class Inputs(NamedTuple):
    """The arguments of a call as they were before it ran, with the state it ran under."""

    staged: Staged
    grad_enabled: bool


class Golden(NamedTuple):
    """A finished reference run."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[Tensor | None, ...]  # of the tensors among the arguments, those that take gradients
    result: Any
    cast: dict[torch.dtype, torch.dtype]

    def backward(self, grad_outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the inputs for these gradients of the outputs (`golden.backward([g])`)."""
        outputs, grads = [], []
        for tensor, grad in zip(tensors_in(self.result), grad_outputs):
            if grad is not None and tensor.requires_grad:
                outputs.append(tensor)
                grads.append(grad.detach().cpu().to(tensor.dtype))
        wanted = [leaf for leaf in self.leaves if leaf is not None]
        if not outputs or not wanted:
            return [None] * len(self.leaves)
        found = iter(
            torch.autograd.grad(outputs, wanted, grads, allow_unused=True, retain_graph=True)
        )
        return [next(found) if leaf is not None else None for leaf in self.leaves]


def cast_map(op: str) -> dict[torch.dtype, torch.dtype]:
    """Dtypes of the reference run: float64 unless the environment says otherwise (`cast_map("torch.add")`)."""
    variable = f"{settings.op_prefix(op)}_{_VARIABLE}"
    text = settings.read(variable)
    if not text:
        variable, text = _VARIABLE, settings.read(_VARIABLE)
    return settings.parse_dtype_map(text, variable) if text else dict(_UPCAST)


def why_not(traits: OpTraits, kwargs: Mapping[str, Any]) -> str | None:
    """Why a call has no golden result, or None when it has one."""
    if traits.collective:
        return "a collective needs all ranks"
    if traits.name.rsplit(".", 1)[-1] in _UNDEFINED:
        return "its result is uninitialised memory"
    if traits.random and not _is_quiet_random(kwargs):
        return "it draws random numbers"
    return None


def _is_quiet_random(kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("training") is False or kwargs.get("dropout_p") == 0.0 or kwargs.get("p") == 0.0


def take_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Copy the arguments before the operator may write to them (`take_inputs(call.args, call.kwargs)`)."""
    return Inputs(stage((args, kwargs)), torch.is_grad_enabled())


def run(
    function: Callable[..., Any],
    inputs: Inputs,
    cast: Mapping[torch.dtype, torch.dtype],
    mutates: bool,
    unpacker: Unpacker,
) -> Golden:
    """Run `function` on the CPU with the arguments in the dtypes of `cast`."""
    staged = inputs.staged
    odd = has_opaque(staged.tree)
    if odd:
        raise NotComparable(f"arguments of type {', '.join(odd)} cannot be copied")
    raw = rebuild(staged.tree, unpacker.fetch(staged), cast)
    applied = _applied(staged, cast)
    leaves: list[Tensor | None] = []
    seen: dict[int, Tensor] = {}

    def private(tensor: Tensor) -> Tensor:
        takes = tensor.requires_grad and inputs.grad_enabled
        leaves.append(tensor if takes else None)
        # an operator may write to a copy of a leaf, not to the leaf itself
        if takes and mutates:
            return seen.setdefault(id(tensor), tensor.clone())
        return tensor

    with torch.set_grad_enabled(inputs.grad_enabled), torch.autocast("cpu", enabled=False):
        args, kwargs = map_tensors(raw, private)
        kwargs = {k: torch.device("cpu") if k == "device" and v is not None else v for k, v in kwargs.items()}
        args = tuple(torch.device("cpu") if isinstance(a, torch.device) else a for a in args)
        result = function(*args, **kwargs)
    return Golden(args, kwargs, tuple(leaves), result, applied)


def _applied(staged: Staged, cast: Mapping[torch.dtype, torch.dtype]) -> dict[torch.dtype, torch.dtype]:
    from .snapshot import Ref, map_leaves

    found: dict[torch.dtype, torch.dtype] = {}

    def look(leaf: Any) -> Any:
        if isinstance(leaf, Ref) and leaf.dtype in cast:
            found[leaf.dtype] = cast[leaf.dtype]
        return leaf

    map_leaves(staged.tree, look)
    return found
