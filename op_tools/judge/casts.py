"""Which dtypes a golden run has: wider ones than the call had, or those that users ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from .. import settings
from ..call import facts
from ..call.description import tensors_in

Cast = Mapping[torch.dtype, torch.dtype]

DOUBLE: Final[dict[torch.dtype, torch.dtype]] = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
SINGLE: Final[dict[torch.dtype, torch.dtype]] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
AS_IS: Final[dict[torch.dtype, torch.dtype]] = {}


def casts_of(op: str) -> dict[torch.dtype, torch.dtype] | None:
    """Casts that the user asked for, or None for double precision (`casts_of("torch.add")`).

    `<OP>_OP_DTYPE_CAST_DICT` wins over `OP_DTYPE_CAST_DICT`.
    """
    for variable in (f"{settings.op_prefix(op)}_OP_DTYPE_CAST_DICT", "OP_DTYPE_CAST_DICT"):
        text = settings.read(variable)
        if text:
            return settings.parse_dtype_map(text, variable)
    return None


def autocast_rounds_to(name: str, low: torch.dtype, result: Any) -> torch.dtype | None:
    """The dtype to which autocast with dtype `low` rounded the arguments of a call, None if it did not.

    Told by the result: `autocast_rounds_to("torch.nn.functional.linear", torch.bfloat16, y)`.
    """
    if facts.last_name(name) not in facts.AUTOCAST_LOW:
        return None
    return low if any(t.dtype == low for t in tensors_in(result)) else None


def map_settings(value: Any, cast: Cast) -> Any:
    """Dtypes follow the cast, devices become the CPU, generators of a device go."""
    kind = type(value)
    if kind is torch.dtype:
        return cast.get(value, value)
    if kind is torch.device:
        return torch.device("cpu")
    if kind is str:
        return "cpu" if facts.names_a_device(value) else value
    if kind is torch.Generator:
        return None
    if kind is list:
        return [map_settings(v, cast) for v in value]
    if kind is tuple:
        return tuple([map_settings(v, cast) for v in value])
    if kind is dict:
        return {k: map_settings(v, cast) for k, v in value.items()}
    return value
