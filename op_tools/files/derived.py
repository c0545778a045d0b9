"""Contents that are one exactly rounded operation on other contents: a store keeps the operation instead of the bytes.

Sums, differences, products and conversions of floating-point numbers are rounded once, and IEEE 754 says how, so every
machine gets the same bits. A store writes such a content as its operation only after that has been repeated on the
device and the fingerprints agree; whoever reads it repeats it on the CPU and compares the fingerprint again. NaNs are
left out: their bits are not the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from ..call.description import Tensor
from ..call.operators.registry import last_name

MIN_BYTES: Final = 1 << 20  # smaller contents are written as they are
MAX_DEPTH: Final = 12  # of contents that are derived from derived ones
_EXACT_DEVICES: Final = frozenset({"cuda", "soft"})  # their arithmetic is that of IEEE 754, subnormal numbers included
DTYPES: Final = {
    str(d).removeprefix("torch."): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_ARITHMETIC: Final = {
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), "mul"),
    **dict.fromkeys(("add", "__add__", "__radd__"), "add"),
    **dict.fromkeys(("sub", "subtract", "__sub__"), "sub"),
}
_OPERATIONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {"mul": torch.mul, "add": torch.add, "sub": torch.sub}
_CASTS: Final = frozenset({"to", "type", "float", "half", "bfloat16", "double"})

Operand = Tensor | float


class Recipe(NamedTuple):
    """How a result may have come about: `do` is "mul", "add", "sub" or "cast"."""

    do: str
    operands: tuple[Operand, ...]
    result: Tensor

    def described(self) -> dict[str, Any]:
        """The operation, for the index of a store; what the operands hold is not in it."""
        operands = [_NAMES[o.dtype] if isinstance(o, Tensor) else o.hex() for o in self.operands]
        return {"do": self.do, "dtype": _NAMES[self.result.dtype], "operands": operands}

    def sources(self) -> list[Tensor]:
        """The operands that are tensors."""
        return [o for o in self.operands if isinstance(o, Tensor)]


def of_call(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> list[Recipe]:
    """How the result of a call may have come about, from its arguments (`of_call("torch.mul", (x, 2.0), {}, y)`)."""
    name = last_name(op)
    do = _ARITHMETIC.get(name)
    if do is not None and len(args) == 2 and not kwargs:
        found = Recipe(do, tuple([float(a) if type(a) is int else a for a in args]), result)
    elif name in _CASTS and args:
        found = Recipe("cast", args[:1], result)
    else:
        return []
    return [found] if _is_possible(found) else []


def factor_of(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float | None:
    """The number that a call multiplies gradients with, 1.0 where it only converts them; None for other calls.

    >>> factor_of("torch.mul", (torch.ones(2), 3), {})
    3.0
    """
    name = last_name(op)
    numbers = [float(a) for a in args[:2] if type(a) in (int, float)]
    if _ARITHMETIC.get(name) == "mul" and len(args) == 2 and len(numbers) == 1 and not kwargs:
        return numbers[0]
    is_sum = _ARITHMETIC.get(name) == "add" and len(args) == 2 and not kwargs
    return 1.0 if is_sum or name in _CASTS else None


def of_gradients(factor: float | None, grad_outputs: Sequence[Any], grad_inputs: Sequence[Any]) -> list[Recipe]:
    """How gradients to the inputs may have come about from the one to the only output of such a call."""
    if factor is None or len(grad_outputs) != 1:
        return []
    sent = grad_outputs[0]
    found = [
        Recipe("cast", (sent,), grad) if factor == 1.0 else Recipe("mul", (sent, factor), grad) for grad in grad_inputs
    ]
    return [recipe for recipe in found if _is_possible(recipe)]


def _is_possible(recipe: Recipe) -> bool:
    """Whether all are floating-point tensors of one layout that fill their memory, on a device that is exact."""
    result = recipe.result
    if not _fills_memory(result) or result.device.type not in _EXACT_DEVICES or torch.version.hip is not None:
        return False
    layout = (result.shape, result.stride(), result.device)
    for operand in recipe.operands:
        if isinstance(operand, Tensor):
            same = (operand.shape, operand.stride(), operand.device) == layout
            if not (same and _fills_memory(operand)) or operand.data_ptr() == result.data_ptr():
                return False
        elif type(operand) is not float:
            return False
    return bool(recipe.sources())


def _fills_memory(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or tensor.dtype not in _NAMES or tensor.layout != torch.strided:
        return False
    nbytes = tensor.numel() * tensor.element_size()
    whole = tensor.storage_offset() == 0 and nbytes == tensor.untyped_storage().nbytes()
    return whole and nbytes >= MIN_BYTES and not tensor.is_neg()


def computed(do: str, operands: Sequence[Operand], dtype: torch.dtype) -> Tensor:
    """The result of an operation, rounded once in float32 or float64, and once more where `dtype` is narrower.

    >>> computed("mul", (torch.full((2,), 3.0, dtype=torch.bfloat16), 0.5), torch.bfloat16).tolist()
    [1.5, 1.5]
    """
    if do == "cast":
        (only,) = operands
        assert isinstance(only, Tensor)
        return only.detach().to(dtype, copy=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    first, second = [o.detach().to(wide) if isinstance(o, Tensor) else o for o in operands]
    if not isinstance(first, Tensor):
        assert isinstance(second, Tensor)
        first = torch.full_like(second, first) if do == "sub" else first
        if not isinstance(first, Tensor):  # both others commute
            first, second = second, first
    found: Tensor = _OPERATIONS[do](first, second)
    return found.to(dtype)


class Trial(NamedTuple):
    """A recipe that was followed on the device, and whether there are NaNs in what came of it."""

    recipe: Recipe
    found: Tensor
    nans: Tensor


def tried(recipes: Sequence[Recipe]) -> list[Trial]:
    """Follow recipes on the device; nobody waits for it."""
    trials = []
    for recipe in recipes:
        found = computed(recipe.do, recipe.operands, recipe.result.dtype)
        if found.stride() == recipe.result.stride():
            trials.append(Trial(recipe, found, found.isnan().any()))
    return trials


def read(facts: Mapping[str, Any], sources: Sequence[Tensor]) -> Tensor:
    """The bytes of a derived content from those of its sources; ValueError where the facts make no sense."""
    dtype, do, rest = DTYPES[facts["dtype"]], facts["do"], list(sources)
    operands: list[Operand] = []
    for operand in facts["operands"]:
        known = DTYPES.get(operand)
        operands.append(float.fromhex(operand) if known is None else rest.pop(0).view(known))
    sizes = {o.numel() for o in operands if isinstance(o, Tensor)}
    arity = 1 if do == "cast" else 2 if do in _OPERATIONS else 0
    if rest or len(sizes) != 1 or len(operands) != arity:
        raise ValueError(f"no such operation: {do}")
    return computed(do, operands, dtype).view(torch.uint8)
