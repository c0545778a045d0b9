"""The book of a trace: which tensor is which, who made it, and what memory it took.

`native/csrc/trace_book.cpp` is the same in machine code, and hears of most calls and their backwards itself.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

from ..call.description import Tensor
from ..compat import allocator_level, devices_in_use, storage_id
from . import format as columns
from .format import TraceWriter

_NO_STORAGE: Final = 0
_UNWRITTEN: Final = -2  # from here down: no operator has written there since the memory was taken
_MOST: Final = 32_767  # places and outputs are small numbers in a trace


class Book(Protocol):
    """What a recorder asks of a book; texts are numbers of the writer."""

    last_module: int

    @property
    def operators(self) -> int:
        """How many there are."""

    @property
    def tensors(self) -> int:
        """How many have got numbers."""

    @property
    def number(self) -> Callable[[Tensor, Tensor, int, int, int, int, bool, bool], int]:
        """The number of a tensor's present contents, by (tensor, held, look, producer, output, module, wrote, printed).

        `held` lies on this rank. A look of -1 is found by the book.
        """

    def knows(self, tensor: Tensor, /) -> bool:
        """Whether a tensor has a number in its present version."""

    def operator(self, *row: int) -> int:
        """Add an operator: the columns of its table up to `forward`."""

    def edge(self, operator: int, side: int, place: int, tensor: int, /) -> None:
        """A tensor went into an operator, or came out of it."""

    def edges(self, operator: int, side: int, tensors: list[int], /) -> None:
        """Tensors went into an operator, or came out of it; -1 for none at that place."""

    def written(self, tensor: Tensor, operator: int, /) -> None:
        """An operator wrote to a tensor's memory."""

    def unwritten(self, tensor: Tensor, /) -> None:
        """Nobody has written yet where a tensor lies."""

    def resized(self, memory: Any, /) -> None:
        """A storage has other memory now, to which nobody has written."""

    def allocated(self, operator: int, module: int, tensor: Tensor, kind: int, /) -> None:
        """Memory of the accelerator that an operator returned; it is noted once, and again when it is freed."""

    def name(self, tensor: Tensor, text: int, kind: int, module: int, /) -> None:
        """A tensor has a role in the model."""

    def parameter(self, tensor: Tensor, grad_text: int, module: int, /) -> None:
        """Its gradient gets a name after each backward pass."""

    def after_backward(self, function: int, /) -> None:
        """Name the gradients of parameters; `function` is compiled code that may have left them, or -1."""

    def sent(self, tensor: Tensor, operator: int, /) -> None:
        """The backward of an operator sent a gradient."""

    def sender(self, tensor: Tensor, /) -> int:
        """Who sent a gradient that lies where this tensor does, or -1."""

    def forget(self) -> None:
        """Any tensor may have been written to, uncounted."""

    def take_fresh(self) -> list[tuple[int, Tensor]]:
        """The tensors that have got numbers, and no fingerprints yet."""

    def write_frees(self) -> None:
        """Note what memory is gone."""

    def close(self) -> None:
        """Nothing more is recorded."""


class _Known(weakref.ref):  # type: ignore[type-arg]
    """A tensor object whose present version has a number."""

    __slots__ = ("address", "key", "memory", "names", "number", "version", "writer")
    address: int
    key: int
    version: int
    writer: int
    number: int
    names: int  # how many members of models were known
    memory: Any


class PythonBook:
    """A book whose rows go to a writer."""

    def __init__(
        self, writer: TraceWriter, find_look: Callable[[Tensor], int], prints: bool, accelerator: str = "cpu"
    ) -> None:
        self._writer, self._find_look, self._prints = writer, find_look, prints
        self._fresh: list[tuple[int, Tensor]] = []
        self._known: dict[int, _Known] = {}
        self._by_memory: dict[Any, _Known] = {}
        self._writers: dict[int, int] = {}  # of storages: the operator that wrote last
        self._blocks: dict[int, tuple[int, int, int, int]] = {}  # storages: number, bytes, kind, module
        self._member_names = 0
        self._of_model = set[int]()  # storages of parameters and buffers
        self._references: dict[int, Any] = {}
        self._block_count = 0
        self._anew = 0  # how often memory was taken that nobody had written to
        # of such storages the versions of tensors there, -1 before one is seen: if it counts up, somebody has
        self._unwritten: dict[int, int] = {}
        self._frees: deque[tuple[int, ...]] = deque()
        self._roles: dict[int, tuple[Any, int, int, int]] = {}  # of tensors with a role: itself, name, kind, module
        self._gradients: dict[Any, int] = {}  # memory of gradients that operators sent in this pass: the operator
        self._parameters: list[tuple[int, int, weakref.ref[Tensor]]] = []
        self._forgotten = 0  # tensors before this one may have been written to since
        self._began = time.perf_counter()
        self.operators = 0
        self.last_module = -1  # of the last backward: autograd adds up what that sends
        # tensors that ended. Python would run a function of ours whenever one does, inside of compiled code as well,
        # where Dynamo compiles it
        self._ended: deque[_Known] = deque()
        self._accelerator = accelerator
        # of the accelerator: on which tensors were seen, or memory was taken before
        self._devices = set[int]() if accelerator == "cpu" else devices_in_use()
        self._level: tuple[int, int] | None = None
        self._note_level(-1)

    # -- tensors --------------------------------------------------------------------------------------

    @property
    def tensors(self) -> int:
        """See `Book`."""
        return self._writer.counts["tensors"]

    def number(
        self,
        tensor: Tensor,
        held: Tensor,
        look: int,
        producer: int,
        output: int,
        module: int,
        wrote: bool,
        printed: bool,
        /,
    ) -> int:
        """See `Book`."""
        key, version = id(tensor), version_of(tensor)
        known = self._known.get(key)
        if known is not None and known() is not tensor:
            known = None
        address, storage = _address(held), storage_of(held)
        writer = self._writers.get(storage, -1)
        if writer <= _UNWRITTEN and not wrote:
            before = self._unwritten[storage]
            self._unwritten[storage] = before = version if before < 0 else before
            if before == version:
                printed = False  # what happens to lie there says nothing
            else:
                del self._writers[storage], self._unwritten[storage]
                writer = -1
        if known is not None and known.version == version and not wrote:
            is_new_member = known.names != self._member_names and self._becomes_member(tensor, storage)
            known.names = self._member_names
            same_place = known.address == address and known.writer == writer
            if same_place and known.number >= self._forgotten and not is_new_member:
                return known.number
            if known.address != address:
                known = None  # `parameter.data = other` changes no version, nor does `parameter.data.add_(1)`
        memory = _memory(held)
        if not wrote and producer < 0 and memory is not None:
            same = self._by_memory.get(memory)
            alive = same is not None and same() is not None and same.number >= self._forgotten
            unchanged = same is not None and alive and same.version == version and same.writer == writer
            if same is not None and unchanged and not self._becomes_member(tensor, storage):
                return same.number
        if producer < 0 and not wrote:
            producer = max(writer, -1)
        base = known.number if known is not None else -1
        if base < 0 and tensor._is_view() and tensor._base is not None:
            seen = self._known.get(id(tensor._base))
            base = seen.number if seen is not None and seen() is tensor._base else -1
        if tensor.device.type == self._accelerator:
            self._devices.add(tensor.device.index)
        if look < 0:
            look = self._find_look(tensor)
        name, kind, owner = self._role(tensor) or (0, columns.GIVEN if producer < 0 else columns.ACTIVATION, module)
        if kind in (columns.PARAMETER, columns.BUFFER):
            self._is_of_the_model(held, storage, kind, owner)
        number = self._writer.add("tensors", (kind, name, look, producer, min(output, _MOST), base, owner))
        if self._ended:
            self._forget_ended()
        reference = _Known(tensor, self._ended.append)
        reference.key, reference.version, reference.number, reference.memory = key, version, number, memory
        reference.address, reference.writer, reference.names = address, writer, self._member_names
        self._known[key] = reference
        if memory is not None:
            self._by_memory[memory] = reference
        if self._prints and printed:
            self._fresh.append((number, tensor))
        return number

    def knows(self, tensor: Tensor, /) -> bool:
        """See `Book`."""
        known = self._known.get(id(tensor))
        if known is None or known() is not tensor or known.number < self._forgotten:
            return False
        return known.version == version_of(tensor)

    def _forget_ended(self) -> None:
        known, by_memory = self._known, self._by_memory
        while self._ended:
            reference = self._ended.popleft()
            if known.get(reference.key) is reference:
                del known[reference.key]
            if by_memory.get(reference.memory) is reference:
                del by_memory[reference.memory]

    def _role(self, tensor: Tensor) -> tuple[int, int, int] | None:
        """Name, kind and module of a parameter, a buffer or a gradient; None for other tensors."""
        found = self._roles.get(id(tensor))
        if found is None or found[0]() is not tensor:
            found = self._roles.get(-_address(tensor)) if _is_leaf(tensor) else None
            owner = None if found is None else found[0]()
            if owner is None or tuple(owner.shape) != tuple(tensor.shape):
                return None
        assert found is not None
        return found[1:]

    def take_fresh(self) -> list[tuple[int, Tensor]]:
        """See `Book`."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def name(self, tensor: Tensor, text: int, kind: int, module: int, /) -> None:
        """See `Book`."""
        self._member_names += kind != columns.GRADIENT
        known = self._roles.get(id(tensor))
        shared = known is not None and known[0]() is tensor and known[2] == kind and known[3] != module
        if shared and kind != columns.GRADIENT:
            return  # of several modules that share it, the first one names it
        role = self._roles[id(tensor)] = (weakref.ref(tensor), text, kind, module)
        if kind != columns.GRADIENT and (address := _address(tensor)):  # `.data` is the parameter, too
            self._roles[-address] = role

    # -- operators and memory -------------------------------------------------------------------------

    def operator(self, *row: int) -> int:
        """See `Book`."""
        self.operators += 1
        self.write_frees()
        number = self._writer.add("operators", (*row, time.perf_counter() - self._began, 0))
        self._note_level(number)
        return number

    def _note_level(self, operator: int) -> None:
        """What the device's allocator has handed out by now, and at most, where that has changed."""
        level = None if self._accelerator == "cpu" else allocator_level(self._devices)
        if level is not None and level != self._level:
            self._level = level
            self._writer.add("levels", (operator, *level))

    def edge(self, operator: int, side: int, place: int, tensor: int, /) -> None:
        """See `Book`."""
        self._writer.add("edges", (operator, side, min(place, _MOST), tensor))

    def edges(self, operator: int, side: int, tensors: list[int], /) -> None:
        """See `Book`."""
        for place, number in enumerate(tensors):
            if number >= 0:
                self.edge(operator, side, place, number)

    def written(self, tensor: Tensor, operator: int, /) -> None:
        """See `Book`."""
        self._writers[storage_of(tensor)] = operator

    def _takes_anew(self, storage: int, memory: Any, version: int) -> None:
        self._anew += 1
        self._writers[storage] = _UNWRITTEN - self._anew
        self._unwritten[storage] = version
        self._await_end(storage, memory)

    def unwritten(self, tensor: Tensor, /) -> None:
        """See `Book`."""
        storage = storage_of(tensor)
        if storage != _NO_STORAGE:
            self._takes_anew(storage, tensor.untyped_storage(), version_of(tensor))

    def resized(self, memory: Any, /) -> None:
        """See `Book`."""
        storage, size = memory._cdata, memory.nbytes()
        self._takes_anew(storage, memory, -1)
        number, before, kind, module = self._blocks.get(storage, (-1, 0, 0, 0))
        if number < 0:
            return
        if before:
            self._writer.add("memory", (self.operators, number, -before, kind, module))
        number = self._block_count
        self._block_count += 1
        self._blocks[storage] = (number, size, kind, module)
        if size:
            self._writer.add("memory", (self.operators, number, size, kind, module))

    def allocated(self, operator: int, module: int, tensor: Tensor, kind: int, /) -> None:
        """See `Book`."""
        storage = storage_of(tensor)
        if storage == _NO_STORAGE or storage in self._blocks or tensor.is_meta:
            return
        memory = tensor.untyped_storage()
        counts = self._accelerator in ("cpu", tensor.device.type)
        number, size = self._block_count, memory.nbytes() if counts else 0  # of others only the end is awaited
        self._block_count += 1
        self._blocks[storage] = (number, size, kind, module)
        if size:
            self._writer.add("memory", (operator, number, size, kind, module))
        self._await_end(storage, memory)

    def _await_end(self, storage: int, memory: Any) -> None:
        if storage not in self._references:
            self._references[storage] = weakref.ref(memory, lambda _: self._freed(storage))

    def _becomes_member(self, tensor: Tensor, storage: int) -> bool:
        """Whether a tensor is a parameter or a buffer over memory that was none before."""
        role = self._role(tensor)
        return role is not None and role[1] in (columns.PARAMETER, columns.BUFFER) and storage not in self._of_model

    def _is_of_the_model(self, held: Tensor, storage: int, kind: int, module: int) -> None:
        """A parameter lies there: memory from before the trace, or that of what an operator returned."""
        if storage == _NO_STORAGE or held.is_meta or storage in self._of_model:
            return
        self._of_model.add(storage)
        if storage not in self._blocks:
            self.allocated(-1, module, held, kind)
            return
        number, size, before, owner = self._blocks[storage]
        if size:
            self._writer.add("memory", (self.operators, number, -size, before, owner))
        self._blocks[storage] = (self._block_count, size, kind, module)
        if size:
            self._writer.add("memory", (self.operators, self._block_count, size, kind, module))
        self._block_count += 1

    def _freed(self, storage: int) -> None:
        """Any thread may free memory, in the middle of anything: what is written, is written with the next operator."""
        number, size, kind, module = self._blocks.pop(storage, (-1, 0, 0, 0))
        for known in (self._references, self._writers, self._unwritten):
            known.pop(storage, None)
        self._of_model.discard(storage)
        if number >= 0 and size:
            self._frees.append((self.operators, number, -size, kind, module))

    def write_frees(self) -> None:
        """See `Book`."""
        while self._frees:
            self._writer.add("memory", self._frees.popleft())

    # -- gradients ------------------------------------------------------------------------------------

    def parameter(self, tensor: Tensor, grad_text: int, module: int, /) -> None:
        """See `Book`."""
        self._parameters.append((grad_text, module, weakref.ref(tensor)))

    def sent(self, tensor: Tensor, operator: int, /) -> None:
        """See `Book`."""
        self._gradients[_memory(tensor)] = operator

    def sender(self, tensor: Tensor, /) -> int:
        """See `Book`."""
        return self._gradients.get(_memory(tensor), -1)

    def after_backward(self, function: int, /) -> None:
        """See `Book`."""
        for place, (text, module, reference) in enumerate(self._parameters):
            parameter = reference()
            if parameter is None or parameter.grad is None:
                continue
            grad: Tensor = parameter.grad
            self.name(grad, text, columns.GRADIENT, module)
            if not self.knows(grad):
                producer = self._gradients.get(_memory(grad), function)
                number = self.number(grad, grad, -1, producer, place, -1, True, True)
                if producer == function >= 0:
                    self.edge(function, columns.OUTPUT, place, number)
            self.allocated(self.operators - 1, module, grad, columns.GRADIENT)
        self._gradients.clear()

    def forget(self) -> None:
        """See `Book`."""
        self._forgotten = self.tensors

    def close(self) -> None:
        """See `Book`."""
        self.write_frees()
        self._note_level(self.operators)
        self._references.clear()


def storage_of(tensor: Tensor) -> int:
    """A number for the memory of a tensor, 0 where it has none (`storage_of(x) == storage_of(x[1:])`)."""
    try:
        found: int = storage_id(tensor)
        return found
    except Exception:
        return _NO_STORAGE


def version_of(tensor: Tensor) -> int:
    """How often it was written to (`version_of(torch.ones(2)) == 0`)."""
    try:
        return tensor._version
    except RuntimeError:  # inference tensors count none
        return 0


def _is_leaf(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view whose base was changed in place
        return False


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except Exception:
        return 0


def _memory(tensor: Tensor) -> Any:
    address = _address(tensor)
    if not address or tensor.layout != torch.strided:
        return None
    return (address, tensor.shape, tensor.stride(), tensor.dtype)
