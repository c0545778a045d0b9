"""Plain, frozen descriptions of operator calls: what flows from the interceptor to the store."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from ..compat import no_torch_function
from .recent import Recent

Tensor = torch.Tensor


class TensorMeta(NamedTuple):
    """What a tensor looks like, without its data or its address."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    numel: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    layout: torch.layout

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-able values (`meta.as_dict()["dtype"] == "float32"`)."""
        return {
            "shape": list(self.shape),
            "stride": None if self.stride is None else list(self.stride),
            "numel": self.numel,
            "dtype": short(self.dtype),
            "device": str(self.device),
            "requires_grad": self.requires_grad,
            "layout": str(self.layout),
        }


class Group(NamedTuple):
    """A container among the arguments: its parts in order, with names where they have any."""

    keys: tuple[str, ...] | None
    items: tuple[Part, ...]


# A described argument: a tensor, the text of any other value, or a container of these.
Part: TypeAlias = "TensorMeta | str | Group"


class Described(NamedTuple):
    """All arguments of a call: what is the same for calls that look alike, and the addresses, which vary."""

    args: tuple[Part, ...]
    kwargs: Group | None
    data_ptrs: tuple[int, ...]
    number: int = 0  # the same for descriptions that came out of a cache as equal; 0 when none did


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something worth telling the user, found by a tool or about a tool.

    >>> Finding("OpCapture", "torch.add", "tool-failure", "disk full").kind
    'tool-failure'
    """

    tool: str
    op: str
    kind: str
    message: str
    call_id: int = 0
    location: str = ""
    phase: str = ""
    module: str = ""
    step: int = 0
    size: float = 0.0  # how bad it is, among findings of its kind: the excess of a difference


_SHORT: dict[Any, str] = {}


def short(thing: Any) -> str:
    """Text of a dtype without its `torch.` prefix (`short(torch.float32) == "float32"`)."""
    text = _SHORT.get(thing)
    if text is None:
        text = _SHORT[thing] = str(thing).removeprefix("torch.")
    return text


_MAX_TEXT = 120
_LEAF_TYPES = frozenset(
    [int, float, bool, complex, type(None), type(Ellipsis)]
    + [torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size]
)
_new_meta = tuple.__new__


def _tensor_meta(tensor: Tensor, ptrs: list[int]) -> TensorMeta:
    try:
        if tensor.is_nested:
            raise TypeError("some of its sizes are symbols")
        layout = (tensor.shape, tensor.stride(), tensor.numel())
        meta = _new_meta(TensorMeta, (*layout, tensor.dtype, tensor.device, tensor.requires_grad, tensor.layout))
        ptrs.append(tensor.data_ptr())
        shared: TensorMeta = _shared(_metas, meta)
        return shared
    except Exception:  # sparse, nested, fake and functorch tensors lack some of these
        ptrs.append(pointer_of(tensor))
        shape = tuple(int(n) for n in tensor.size()) if not tensor.is_nested else ()
        return TensorMeta(shape, None, tensor.numel(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.layout)


_MAX_SHARED = 20_000
_metas: dict[TensorMeta, TensorMeta] = {}


def _shared(known: dict[Any, Any], value: Any) -> Any:
    """An equal object that there is already: tensors of one shape are described a thousand times."""
    if len(known) >= _MAX_SHARED:
        known.clear()
    return known.setdefault(value, value)


def _describe_part(value: Any, ptrs: list[int]) -> Part:
    kind = type(value)
    if kind in _LEAF_TYPES:
        return str(value)
    if isinstance(value, Tensor):
        return _tensor_meta(value, ptrs)
    if kind is tuple or kind is list:
        return Group(None, tuple([_describe_part(v, ptrs) for v in value]))
    parts = None if kind is str else children(value)
    if parts is not None:
        keys, values = parts
        return Group(keys, tuple([_describe_part(v, ptrs) for v in values]))
    try:
        text = str(value)
    except Exception:
        text = f"<{kind.__name__}>"
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"


def describe(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Described:
    """Describe arguments or results.

    >>> describe((torch.ones(2), 1), {"alpha": 2}).kwargs.keys
    ('alpha',)
    """
    ptrs: list[int] = []
    parts = tuple([_describe_part(a, ptrs) for a in args])
    named = Group(tuple(kwargs), tuple([_describe_part(v, ptrs) for v in kwargs.values()])) if kwargs else None
    return Described(parts, named, tuple(ptrs))


# What describes itself by its text and may be part of a dict key; floats are not: -0.0 == 0.0, nan != nan.
PLAIN_TYPES = frozenset(_LEAF_TYPES - {float, complex} | {str})
_SLICE_ENDS = {int, type(None)}
_AT_ONCE = 20_000  # parts of keys: the kinds of calls in a first step have room; later ones must come twice
_MAX_PARTS = 100_000
_MAX_ONCE = 4_096
_numbers = itertools.count(1)


class Descriptions:
    """Descriptions of calls that look like earlier ones: a dict lookup, and nothing new to keep.

    An optimizer gives other numbers to some calls in every step. Such a call never comes again: it gets no number, so
    nobody keeps anything of it. One that `recalls` asks `native.front` first, which remembers those of one only.

    >>> seen = Descriptions()
    >>> seen.of((torch.ones(2),), {}, [], False) is seen.of((torch.zeros(2),), {}, [], False)
    True
    """

    __slots__ = ("_kept", "_once", "_parts", "_recalls", "_room", "known")

    def __init__(self, recalls: bool = False) -> None:
        self._recalls = recalls
        self._kept = Recent[tuple[Any, ...], Described](_MAX_PARTS)
        self.known = self._kept.young  # for `native.front`
        self._once = Recent[int, None](_MAX_ONCE)  # hashes of keys
        self._parts: dict[Any, Any] = {}
        self._room = _AT_ONCE

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], pointers: bool) -> Described:
        """Describe arguments and append their tensors to `tensors`; addresses only where they are asked for."""
        found = recall(args, kwargs, tensors) if self._recalls else None
        if found is not None:
            return self._with_addresses(found, tensors) if pointers else found
        try:
            key = key_of(args, kwargs, tensors)
            found = None if key is None else self.known.get(key) or self._kept.get(key)
        except Exception:  # tensors without strides, symbolic numbers
            key = found = None
        if key is None:
            del tensors[:]
            tensors.extend(tensors_in(args))
            tensors.extend(tensors_in(kwargs))
            return describe(args, kwargs)
        if found is None:
            found = _described_by(key, args, kwargs)
            if self._is_worth_it(key):
                found = found._replace(number=next(_numbers))
                if len(self._parts) >= _MAX_SHARED:
                    self._parts.clear()
                self._kept.keep(tuple(map(self._parts.setdefault, key, key)), found, len(key))
        elif self._recalls:
            retain(args, kwargs, found)
        return self._with_addresses(found, tensors) if pointers else found

    @staticmethod
    def _with_addresses(found: Described, tensors: list[Tensor]) -> Described:
        try:
            addresses = tuple([t.data_ptr() for t in tensors])
        except Exception:
            addresses = tuple(map(pointer_of, tensors))
        return Described(found.args, found.kwargs, addresses, found.number)

    def make_room(self) -> None:
        """A tool starts: the kinds of calls of its first step get numbers when they come (`seen.make_room()`)."""
        self._room = _AT_ONCE

    def _is_worth_it(self, key: tuple[Any, ...]) -> bool:
        """Whether a key that is new is kept: while there is room, and later when it comes a second time."""
        if self._room > 0:
            self._room -= len(key)
            return True
        number = hash(key)
        if number in self._once:
            return True
        self._once[number] = None
        return False

    def of_result(self, result: Any, tensors: list[Tensor]) -> Described:
        """Describe what a call returned, for `native.front`; its tensors replace those in `tensors`."""
        del tensors[:]
        with no_torch_function():
            return self.of((result,), {}, tensors, False)


def pointer_of(tensor: Tensor) -> int:
    """The address of a tensor's first element, 0 where it has none (`pointer_of(x)`)."""
    try:
        return tensor.data_ptr()
    except Exception:  # sparse, fake and functorch tensors have none
        return 0


def recall(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Described | None:
    """What `native.front` remembers of arguments that look alike, with their tensors; nothing until it is there."""
    return None


def retain(args: tuple[Any, ...], kwargs: dict[str, Any], found: Described) -> None:
    """Have `native.front` remember a description until tools start or stop (`retain((x,), {}, found)`)."""


def key_of(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> tuple[Any, ...] | None:
    """A tuple that is equal for arguments that look alike, None where there is no such key; collects their tensors.

    `native.front` puts its twin in machine code in this place.
    """
    key: list[Any] = []
    for value in args:
        if not _add_to_key(value, key, tensors):
            return None
    for name, value in kwargs.items():
        key.append(name)
        if not _add_to_key(value, key, tensors):
            return None
    return tuple(key)


def _add_to_key(value: Any, key: list[Any], tensors: list[Tensor]) -> bool:
    """Add to the key all that a description shows; False when the value has no such key."""
    if isinstance(value, Tensor):
        tensors.append(value)
        key += (value.shape, value.stride(), value.dtype, value.device, value.requires_grad, value.layout)
        return True
    kind = type(value)
    if kind in PLAIN_TYPES:
        key += (kind, value)  # the kind as well: 1 == True
    elif kind is float:
        key += (kind, repr(value))
    elif kind is tuple or kind is list:
        key += (kind, len(value))
        return all(_add_to_key(member, key, tensors) for member in value)
    elif kind is slice and {type(value.start), type(value.stop), type(value.step)} <= _SLICE_ENDS:
        key += (kind, value.start, value.stop, value.step)
    else:
        return False
    return True


_looks: dict[tuple[Any, ...], TensorMeta] = {}  # of tensors, by their parts of a key
_PARTS_OF_A_TENSOR = 6


def _described_by(key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Described:
    """As `describe` without addresses, from a key of `key_of`: of the 700 tensors of an optimizer few look alone."""
    if len(_looks) >= _MAX_SHARED:
        _looks.clear()
    members, at = _parts_by(key, 0, args)
    if not kwargs:
        return Described(members, None, ())
    named: list[Part] = []
    for value in kwargs.values():
        some, at = _parts_by(key, at + 1, (value,))
        named += some
    return Described(members, Group(tuple(kwargs), tuple(named)), ())


def _parts_by(key: tuple[Any, ...], at: int, values: Iterable[Any]) -> tuple[tuple[Part, ...], int]:
    """Descriptions of values whose parts of the key begin at `at`, and where those end."""
    parts: list[Part] = []
    for value in values:
        kind = type(value)
        if isinstance(value, Tensor):
            look = key[at : at + _PARTS_OF_A_TENSOR]
            meta = _looks.get(look)
            if meta is None:
                meta = _looks[look] = _tensor_meta(value, [])
            parts.append(meta)
            at += _PARTS_OF_A_TENSOR
        elif kind is tuple or kind is list:
            members, at = _parts_by(key, at + 2, value)
            parts.append(Group(None, members))
        else:
            parts.append(_describe_part(value, []))
            at += 4 if kind is slice else 2
    return tuple(parts), at


def children(value: Any) -> tuple[tuple[str, ...] | None, list[Any]] | None:
    """Names (if any) and members of a container, or None when `value` is a leaf.

    >>> children({"a": 1})
    (('a',), [1])
    """
    kind = type(value)
    if kind is torch.Size:
        return None
    if isinstance(value, (list, tuple)):
        fields = getattr(kind, "_fields", None)
        return (tuple(fields) if fields else None), list(value)
    if isinstance(value, dict):
        return tuple(str(k) for k in value), list(value.values())
    if isinstance(value, (set, frozenset)):
        return None, list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(f.name for f in dataclasses.fields(value))
        return names, [getattr(value, n) for n in names]
    return None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers, in order (`list(tensors_in(([x], {"y": y})))`)."""
    found: list[Tensor] = []
    _collect(value, found)
    return iter(found)


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
        return
    kind = type(value)
    if kind is tuple or kind is list:
        members = value
    else:
        parts = None if kind in _LEAF_TYPES or kind is str else children(value)
        members = () if parts is None else parts[1]
    for member in members:
        if isinstance(member, Tensor):
            found.append(member)
        elif type(member) not in _LEAF_TYPES:
            _collect(member, found)


def held_by(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a wrapper tensor holds, itself where it is none (`held_by(torch.ones(2))`)."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    members = [getattr(tensor, name) for name in flatten()[0]]
    return [part for member in members if isinstance(member, Tensor) for part in held_by(member)]


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A copy of `value` with every tensor replaced by `change(tensor)`; containers keep their types.

    >>> map_tensors([torch.ones(1)], lambda t: t + 1)
    [tensor([2.])]
    """
    if isinstance(value, Tensor):
        return change(value)
    kind = type(value)
    if kind in _LEAF_TYPES or kind is str:
        return value
    if kind is list or kind is tuple:
        found = [change(v) if isinstance(v, Tensor) else map_tensors(v, change) for v in value]
        return found if kind is list else tuple(found)
    if kind is slice:
        return slice(*(map_tensors(v, change) for v in (value.start, value.stop, value.step)))
    parts = children(value)
    if parts is None or not parts[1] or next(tensors_in(value), None) is None:
        return value
    return rebuild_container(value, kind, [map_tensors(v, change) for v in parts[1]])


def rebuild_container(value: Any, kind: type, members: list[Any]) -> Any:
    """A container of this kind, like `value`, with other members (`rebuild_container((1,), tuple, [2]) == (2,)`)."""
    if isinstance(value, dict):
        if kind is dict:
            return dict(zip(value, members))
        copy = kind(value.default_factory) if hasattr(value, "default_factory") else kind()
        copy.update(zip(value, members))
        return copy
    if isinstance(value, tuple):
        # torch.return_types.* take one sequence, named tuples take their fields
        return kind(*members) if hasattr(kind, "_fields") else kind(members)
    if dataclasses.is_dataclass(value):
        copy = object.__new__(kind)
        for field, member in zip(dataclasses.fields(value), members):
            object.__setattr__(copy, field.name, member)
        return copy
    return kind(members)


def labelled(described: Described, what: str, style: str = "inputs") -> list[tuple[str, TensorMeta | str]]:
    """Rows of a table: a lone argument is `inputs`, several are `inputs[i]`, nested ones `inputs [i][j]`.

    >>> [label for label, _ in labelled(describe((1, [2])), "inputs")]
    ['inputs[0]', 'inputs [1][0]']
    """
    rows: list[tuple[str, TensorMeta | str]] = []
    for i, part in enumerate(described.args):
        if isinstance(part, Group):
            label = f"{what} [{i}]"
        elif style == "gradients":
            label = f"{what} [0][{i}]"
        else:
            label = what if len(described.args) == 1 else f"{what}[{i}]"
        rows += _labelled_part(label, part)
    named = described.kwargs
    for key, part in zip(named.keys or (), named.items) if named is not None else ():
        rows += _labelled_part(f"{what} {key}", part)
    return rows


def golden_pair(inputs: Described, outputs: Described, cpu: tuple[Described, Described]) -> tuple[Described, Described]:
    """The arguments and results of a golden run, with `requires_grad` as on the device where that has a graph."""
    graph = any(type(part) is TensorMeta and part.requires_grad for _, part in labelled(outputs, ""))
    return (_flagged(cpu[0], inputs), _flagged(cpu[1], outputs)) if graph else cpu


def _flagged(described: Described, like: Described) -> Described:
    def flagged(part: Any, model: Any) -> Any:
        if type(part) is type(model) is TensorMeta:
            return part._replace(requires_grad=model.requires_grad)
        if type(part) is type(model) is Group and len(part.items) == len(model.items):
            return part._replace(items=tuple(map(flagged, part.items, model.items)))
        return part

    args = flagged(Group(None, described.args), Group(None, like.args)).items
    return described._replace(args=args, kwargs=flagged(described.kwargs, like.kwargs))


def _labelled_part(label: str, part: Part) -> Iterator[tuple[str, TensorMeta | str]]:
    if not isinstance(part, Group):
        yield label, part
        return
    for key, member in zip(part.keys or itertools.count(), part.items):
        yield from _labelled_part(f"{label}[{key}]", member)
