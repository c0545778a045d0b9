"""Encoded values as JSON and back: what `archive.encode` returns, with tensors as places in storages.

JSON has no tuples, complex numbers, infinities or keys other than text: such a value is an object whose `$` names it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from ..call.description import Tensor
from ..compat import conj_view, neg_view
from ..copies.operands import Ref
from .archive import ArchiveError, NotPlain

_KIND: Final = "$"
_MAX_BITS: Final = 2_040  # of a number in decimal digits: Python limits how many it reads
_MAX_VALUES: Final = 1_000_000  # in one text
_MAX_DIMS: Final = 64


def dumps(value: Any) -> str:
    """An encoded value as JSON; NotPlain for tensors that are not places in storages (`dumps((1, None))`)."""
    return json.dumps(_plain(value), separators=(",", ":"))


def _plain(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if value.bit_length() <= _MAX_BITS else {_KIND: "int", "of": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {_KIND: "float", "of": _bits(value)}
    if kind is complex:
        return {_KIND: "complex", "of": [_bits(value.real), _bits(value.imag)]}
    if kind is list:
        return [_plain(member) for member in value]
    if kind is tuple:
        return {_KIND: "tuple", "of": [_plain(member) for member in value]}
    if kind is dict:
        if _KIND not in value and all(type(key) is str for key in value):
            return {key: _plain(member) for key, member in value.items()}
        return {_KIND: "dict", "of": [[_plain(key), _plain(member)] for key, member in value.items()]}
    if kind is Ref:
        return {_KIND: "tensor", **value._asdict(), "dtype": str(value.dtype).removeprefix("torch.")}
    raise NotPlain


def loads(value: Any, storages: Sequence[torch.UntypedStorage]) -> Any:
    """The inverse of `dumps`, given what `json.loads` makes of its text; tensors lie over the storages.

    >>> loads(json.loads(dumps((1, 2j))), [])
    (1, 2j)
    """
    return _Reader(storages).value(value)


class _Reader:
    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self._storages = storages
        self._seen = 0

    def value(self, value: Any) -> Any:
        self._seen += 1
        if self._seen > _MAX_VALUES:
            raise ArchiveError(f"holds more than {_MAX_VALUES:,} values: no operator takes that many")
        if isinstance(value, list):
            return [self.value(member) for member in value]
        if not isinstance(value, dict):
            return value
        if _KIND not in value:
            return {key: self.value(member) for key, member in value.items()}
        kind = value[_KIND]
        if kind == "tensor":
            return self._tensor(value)
        if kind not in _KINDS:
            raise ArchiveError(f"unknown kind of value {kind!r}; it was written by a newer version")
        return _KINDS[kind](self, value["of"])

    def _tensor(self, facts: dict[str, Any]) -> Tensor:
        dtype = getattr(torch, str(facts["dtype"]), None)
        shape, stride = (_whole_numbers(facts[key]) for key in ("shape", "stride"))
        offset, number = _whole_numbers([facts["offset"], facts["storage"]])
        if not isinstance(dtype, torch.dtype) or len(shape) != len(stride) or number >= len(self._storages):
            raise ArchiveError("a tensor in it makes no sense")
        storage = self._storages[number]
        last = offset + sum([(n - 1) * step for n, step in zip(shape, stride)]) if 0 not in shape else -1
        if (last + 1) * dtype.itemsize > storage.nbytes():
            raise ArchiveError("a tensor in it is larger than its storage")
        tensor = torch.empty(0, dtype=dtype)
        tensor.set_(storage, offset if last >= 0 else 0, shape, stride)
        if facts["conjugated"]:
            tensor = conj_view(tensor)
        if facts["negated"]:
            tensor = neg_view(tensor)
        return tensor.requires_grad_() if facts["requires_grad"] else tensor


def _whole_numbers(found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or len(found) > _MAX_DIMS or not all(type(n) is int and n >= 0 for n in found):
        raise ArchiveError("a tensor in it makes no sense")
    return tuple(found)


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _from_bits(text: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return value


_KINDS: Final[dict[str, Callable[[_Reader, Any], Any]]] = {
    "tuple": lambda reader, of: tuple([reader.value(member) for member in of]),
    "dict": lambda reader, of: {reader.value(key): reader.value(member) for key, member in of},
    "int": lambda reader, of: int(of, 16),
    "float": lambda reader, of: _from_bits(of),
    "complex": lambda reader, of: complex(*map(_from_bits, of)),
}
