"""Names of a function's parameters: which argument is the `running_var` of a call."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..compat import OpOverloadPacket
from .description import Described, Group, Part, Tensor, TensorMeta
from .functions import function_of, overloads_of
from .operators.registry import function_facts, last_name
from .site import name_of_parameter


class Leaf(NamedTuple):
    """One argument that is not a container."""

    name: str
    is_tensor: bool
    requires_grad: bool = False
    place: int | None = None  # in a list of arguments
    positional: bool = True


def leaves(function: Callable[..., Any], op: str, inputs: Described) -> list[Leaf]:
    """The arguments of a call in order, each with the name of its parameter; numbers where that has none.

    >>> import torch
    >>> from op_tools.call.description import describe
    >>> [leaf.name for leaf in leaves(torch.addmm, "torch.addmm", describe((torch.ones(1), torch.ones(1, 1))))]
    ['self', 'mat1']
    """
    names = _names(function, op, tuple([_kind(part) for part in inputs.args]))
    found: list[Leaf] = []
    for number, part in enumerate(inputs.args):
        found += _walk(names[number] if number < len(names) else f"input[{number}]", part)
    named = inputs.kwargs
    for key, part in zip(named.keys or (), named.items) if named is not None else ():
        found += [leaf._replace(positional=False) for leaf in _walk(key, part)]
    return found


def bound(function: Callable[..., Any], op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of their parameters, and its operator as `op`.

    >>> import torch
    >>> bound(torch.add, "torch.add", (1, 2), {"alpha": 3})
    {'op': 'torch.add', 'alpha': 3, 'self': 1, 'other': 2}
    """
    kinds = tuple(["tensor" if isinstance(a, Tensor) else "list" if isinstance(a, (list, tuple)) else "" for a in args])
    return {"op": op, **kwargs, **dict(zip(_names(function, op, kinds), args))}


def updated(function: Callable[..., Any], op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The running statistics that a call writes to, which no version counts.

    >>> import torch
    >>> mean, var = torch.zeros(3), torch.ones(3)
    >>> call = (torch.ones(2, 3), mean, var)
    >>> len(updated(torch.nn.functional.batch_norm, "torch.nn.functional.batch_norm", call, {"training": True}))
    2
    >>> updated(torch.nn.functional.batch_norm, "torch.nn.functional.batch_norm", call, {"training": False})
    []
    """
    names = function_facts(op).updates
    if not names:
        return []
    given = bound(function, op, args, kwargs)
    frozen = given.get("training", given.get("use_input_stats", True)) is False
    if frozen or ("training" not in given and op == "torch.nn.functional.batch_norm"):  # it is off by default there
        return []
    return [value for name in names if isinstance(value := given.get(name), Tensor)]


def leaves_of_record(op: str, inputs: Sequence[tuple[str, Any]]) -> list[Leaf]:
    """The same from a record's description: labels (`inputs[1]`) with the fields of tensors, or texts."""
    labels = [re.match(r"inputs ?(?:\[(\d+)\])?(.*)", label) for label, _ in inputs]
    places = [None if m is None or m[2][:1].isalpha() else int(m[1] or 0) for m in labels]
    kinds: dict[int, str] = {}
    for place, match, (_, part) in zip(places, labels, inputs):
        if place is not None and match is not None:
            kinds[place] = "list" if match[2] else "tensor" if isinstance(part, dict) else ""
    try:
        names = _names(function_of(op), op, tuple([kinds.get(n, "") for n in range(max(kinds, default=-1) + 1)]))
    except LookupError:
        names = ()
    found = []
    for place, match, (label, part) in zip(places, labels, inputs):
        rest = match[2] if match is not None else label
        own = rest if place is None else (names[place] if place < len(names) else f"input[{place}]") + rest
        fields = part if isinstance(part, dict) else {}
        found.append(Leaf(own, bool(fields), bool(fields.get("requires_grad")), positional=place is not None))
    return found


def leaf_of_row(known: Sequence[Leaf], part: str, index: int | None) -> Leaf | None:
    """The argument that a row of a comparison is about."""
    if part not in ("input", "grad_input"):
        return None
    # what is compared of the arguments: positional ones, and tensors given by keyword; gradients have their numbers
    known = [leaf for leaf in known if leaf.positional or leaf.is_tensor]
    if index is None and part == "grad_input":
        known = [leaf for leaf in known if leaf.requires_grad]
    number = 0 if index is None and len(known) == 1 else index
    return None if number is None or number >= len(known) else known[number]


def name_of_row(function: Callable[..., Any], op: str, inputs: Described, part: str, index: int | None) -> str:
    """What a row of a comparison is about, in the function's own words; empty where it has none.

    >>> import torch
    >>> from op_tools.call.description import describe
    >>> made = describe(tuple(torch.ones(2) for _ in range(3)))
    >>> name_of_row(torch.nn.functional.batch_norm, "torch.nn.functional.batch_norm", made, "input", 2)
    'running_var'
    """
    leaf = leaf_of_row(leaves(function, op, inputs), part, index)
    if leaf is None:
        return ""
    owner = _parameter(inputs, leaf.place) if leaf.place is not None else ""
    name = f"{leaf.name} of {owner}" if owner else leaf.name
    return f"gradient of {name}" if part == "grad_input" else name


def _parameter(inputs: Described, place: int) -> str:
    """The model's parameter that lists of an optimizer are about, at this place."""
    pointers = iter(inputs.data_ptrs)
    for part in inputs.args:
        own = [next(pointers, 0) for leaf in _walk("", part) if leaf.is_tensor]
        if isinstance(part, Group) and place < len(own):
            name = name_of_parameter(own[place])
            if name:
                return name
    return ""


def _walk(name: str, part: Part, place: int | None = None) -> Iterator[Leaf]:
    if not isinstance(part, Group):
        tensor = part if isinstance(part, TensorMeta) else None
        yield Leaf(name, tensor is not None, tensor is not None and tensor.requires_grad, place)
        return
    for number, member in enumerate(part.items):
        key = part.keys[number] if part.keys is not None else number
        yield from _walk(f"{name}[{key}]", member, number if place is None else place)


def _kind(part: Part) -> str:
    return "tensor" if isinstance(part, TensorMeta) else "list" if isinstance(part, Group) else ""


@functools.lru_cache(maxsize=10_000)
def _names(function: Callable[..., Any], op: str, kinds: tuple[str, ...]) -> Sequence[str]:
    """Names of the first parameters, from the signature or from the schema that fits these kinds of arguments."""
    try:
        declared = inspect.signature(function).parameters.values()
        plain = [p.name for p in declared if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(plain) >= len(kinds):
            return plain
    except (TypeError, ValueError):  # a function in C++
        pass
    if isinstance(function, OpOverloadPacket):
        overloads = [getattr(function, overload) for overload in function.overloads()]
    else:
        overloads = [function] if hasattr(function, "_schema") else overloads_of(last_name(op))
    for overload in overloads:
        arguments = overload._schema.arguments
        if len(arguments) >= len(kinds) and all(_fits(kind, str(a.type)) for kind, a in zip(kinds, arguments)):
            return [argument.name for argument in arguments]
    return ()


def _fits(kind: str, declared: str) -> bool:
    is_list = declared.startswith(("List[", "Optional[List["))
    return kind == "" or ((kind == "list") == is_list and (kind == "list" or "Tensor" in declared))
