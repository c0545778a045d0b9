"""Where in the model a call is made, read off the stack, and where a part of a sharded tensor lies in the whole."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ..call.description import Described, Group, TensorMeta, held_by
from ..call.devices import module_of
from ..call.site import is_user_code, text_of
from ..compat import MODULE_CALL

_MAX_FRAMES: Final = 256
MAX_TEXT: Final = 200  # characters of settings and arguments
_MAX_KNOWN: Final = 50_000
_OPTIMIZERS: Final = "/torch/optim/"
_PLAIN, _MODULE, _OPTIMIZER = range(3)
_kinds: dict[CodeType, int] = {}


class Place(NamedTuple):
    """The innermost and the outermost module that are being called, and whether an optimizer steps.

    The outermost one is not looked for where the innermost is known as a part of a model.
    """

    module: torch.nn.Module | None
    root: torch.nn.Module | None
    optimizer: bool


def place_of_call(depth: int, parts: dict[int, weakref.ref[torch.nn.Module]]) -> Place:
    """Where the present call is made; `parts` are modules that are known as parts of models, by id."""
    frame: FrameType | None = sys._getframe(depth)
    innermost = outermost = None
    optimizer = False
    known = _kinds.get
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        kind = known(code, -1)
        if kind < 0:
            kind = kind_of_code(code)
        if kind == _MODULE:
            outermost = frame.f_locals.get("self")
            if innermost is None:
                innermost = outermost
                part = parts.get(id(innermost))
                if part is not None and part() is innermost:
                    break
        elif kind == _OPTIMIZER:
            optimizer = True
        frame = frame.f_back
    return Place(innermost, outermost, optimizer)


def kind_of_code(code: CodeType) -> int:
    """1 for the frame in which a module is called, 2 for those of optimizers (`kind_of_code(MODULE_CALL) == 1`)."""
    if len(_kinds) > _MAX_KNOWN:
        _kinds.clear()
    found = _PLAIN
    if code is MODULE_CALL:
        found = _MODULE
    elif _OPTIMIZERS in code.co_filename.replace("\\", "/") and "zero_grad" not in code.co_name:
        found = _OPTIMIZER
    _kinds[code] = found
    return found


def stack_of_call(depth: int, user_only: bool = True) -> str:
    """The frames of the present call, innermost first, one line each."""
    frame: FrameType | None = sys._getframe(1)
    lines: list[str] = []
    while frame is not None and len(lines) < depth:
        owner = is_user_code(frame.f_code)
        if owner or (owner is not None and not user_only):
            lines.append(text_of(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return "\n".join(lines)


class Sharding(NamedTuple):
    """How a tensor is spread over ranks: `S(0)`, `B`, `P`, one per dimension of the mesh, and where this part lies."""

    placements: str
    mesh: str
    local: torch.Tensor
    whole: tuple[int, ...] | None  # None where this rank holds all of it
    at: tuple[int, ...]


def sharding_of(tensor: torch.Tensor) -> Sharding | None:
    """How a DTensor is spread; None for other tensors (`sharding_of(torch.ones(2)) is None`)."""
    placements = getattr(tensor, "placements", None)
    mesh: Any = getattr(tensor, "device_mesh", None)
    if placements is None or mesh is None:
        return None
    (local,) = held_by(tensor)
    coordinate: Sequence[int] = mesh.get_coordinate() or [0] * mesh.ndim
    at, size = [0] * tensor.dim(), list(tensor.shape)
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            dim, ranks = placement.dim % tensor.dim(), mesh.size(axis)
            share = -(-size[dim] // ranks)
            start = min(share * coordinate[axis], size[dim])
            at[dim] += start
            size[dim] = min(share, size[dim] - start)
    words = ", ".join(f"S({p.dim})" if p.is_shard() else "P" if p.is_partial() else "B" for p in placements)
    ranks = mesh.mesh.flatten().tolist()
    shape = "x".join(str(mesh.size(axis)) for axis in range(mesh.ndim))
    whole = tuple(tensor.shape) if tuple(local.shape) == tuple(size) != tuple(tensor.shape) else None
    return Sharding(words, f"{shape} ranks={ranks}", local, whole, tuple(at))


class ModuleNames:
    """The modules that were called, each with a number and a path that begins at its model."""

    def __init__(self, register: Any) -> None:
        self._register = register  # called with number, parent, path, module
        self._numbers: dict[int, tuple[weakref.ref[torch.nn.Module], int]] = {}
        self.parts: dict[int, weakref.ref[torch.nn.Module]] = {}  # those that are inside of another one
        self._lazy: dict[int, tuple[int, int, str]] = {}  # modules with members to come: number, parent and path
        self._models = 0
        self._next = 0

    def number(self, module: torch.nn.Module, root: torch.nn.Module) -> int:
        """The number of a module inside a model."""
        known = self._numbers.get(id(module))
        if id(module) in self._lazy and not _has_lazy_members(module):  # its members are there now
            self._register(*self._lazy.pop(id(module)), module)
        above = self._numbers.get(id(root))
        inside = above is not None and above[0]() is root  # a part that recomputation, or a wrapper, calls by itself
        if known is not None and known[0]() is module and inside:
            return known[1]
        if not inside:
            self._add_model(root)
        known = self._numbers.get(id(module))
        if known is None or known[0]() is not module:  # made on the fly
            return self._new(module, self._numbers[id(root)][1], f"({type(module).__name__})")
        return known[1]

    def living(self) -> Iterator[tuple[torch.nn.Module, int]]:
        """The modules that are still there, with their numbers."""
        for reference, number in list(self._numbers.values()):
            module = reference()
            if module is not None:
                yield module, number

    def _add_model(self, root: torch.nn.Module) -> None:
        has_parts = next(root.children(), None) is not None or next(root.parameters(), None) is not None
        if has_parts:
            self._models += 1
            name = "model" if self._models == 1 else f"model_{self._models}"
        else:
            name = type(root).__name__.lower()
        numbers = {"": -1}
        for path, module in root.named_modules():
            parent = numbers.get(path.rpartition(".")[0], -1) if path else -1
            numbers[path] = self._new(module, parent, f"{name}.{path}" if path else name)

    def _new(self, module: torch.nn.Module, parent: int, path: str) -> int:
        known = self._numbers.get(id(module))
        if known is not None and known[0]() is module:  # called by itself before: it gets its longer name
            number = known[1]
        else:
            number = self._next
            self._next += 1
            self._numbers[id(module)] = (weakref.ref(module), number)
        if parent >= 0:
            self.parts[id(module)] = self._numbers[id(module)][0]
        if _has_lazy_members(module):
            self._lazy[id(module)] = (number, parent, path)
        self._register(number, parent, path, module)
        return number


def _has_lazy_members(module: torch.nn.Module) -> bool:
    return any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False))))


def stream_of(kind: str) -> int:
    """The number of the current stream of a device type, 0 where it has none (`stream_of("soft")`)."""
    try:
        return int(module_of(kind).current_stream().stream_id)
    except Exception:
        return 0


def arguments_of(described: Described) -> str:
    """The arguments that are no tensors, as text (`dim=1, keepdim=True`)."""

    def shown(part: Any) -> str:
        if isinstance(part, TensorMeta):
            return "_"
        if isinstance(part, Group):
            return "[" + ", ".join(shown(p) for p in part.items[:8]) + "]"
        return str(part)

    words = [shown(part) for part in described.args]
    if described.kwargs is not None:
        words += [f"{key}={shown(part)}" for key, part in zip(described.kwargs.keys or (), described.kwargs.items)]
    while words and words[-1] == "_":
        words.pop()
    return ", ".join(words)[:MAX_TEXT]
