"""From calls to rows of a trace: which tensor is which, who made it, what it holds, and what memory it took."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from .. import settings
from ..call.description import Described, Tensor, short
from ..call.devices import accelerator_type, module_of
from ..compat import cuda_device, cuda_stream, storage_id
from . import format as columns
from .format import BACKWARD, FORWARD, INPUT, OPTIMIZER, OUTPUT, TraceWriter
from .places import MAX_TEXT, ModuleNames, Place, Sharding, arguments_of, sharding_of, stack_of_call, stream_of
from .printing import PLAIN, Printing

_NO_STORAGE: Final = 0


class _Known(weakref.ref):  # type: ignore[type-arg]
    """A tensor object whose present version has a number."""

    __slots__ = ("key", "memory", "number", "version")
    key: int
    version: int
    number: int
    memory: Any


class Recorder:
    """Writes what happens in a run to a trace.

    >>> recorder = Recorder(TraceWriter(path, {}))                     # doctest: +SKIP
    """

    def __init__(self, writer: TraceWriter, prints: bool = True, stacks: int = 1, user_only: bool = True) -> None:
        self.writer = writer
        self.lock = threading.RLock()
        self._stacks, self._user_only = stacks, user_only
        self.world = writer_world()
        self._printing = Printing(writer, self.world) if prints else None
        self._known: dict[int, _Known] = {}
        self._by_memory: dict[Any, _Known] = {}
        self._writers: dict[int, int] = {}  # of storages: the operator that wrote last
        self._looks: dict[Any, int] = {}
        self._blocks: dict[int, tuple[int, int, int, int]] = {}  # storages: number, bytes, kind, module
        self._references: dict[int, Any] = {}
        self._block_count = 0
        self._frees: deque[tuple[int, ...]] = deque()
        self._names: dict[int, tuple[Any, str, int, int]] = {}  # of tensors with a role: itself, name, kind, module
        self._gradients: dict[Any, int] = {}  # memory of gradients that operators sent in this pass: the operator
        self._parameters: list[tuple[str, int, weakref.ref[Tensor]]] = []
        self._began = time.perf_counter()
        self._accelerator = accelerator_type()
        self._regions: dict[Any, int] = {}
        self._arguments: dict[int, int] = {}  # texts of descriptions, by their number
        self._in_function = -1  # the last operator that was compiled code
        self._made_by_function = 0  # results of that which have been seen
        self._backward_function = -1  # the last one in a backward pass
        self.ran_graphs = False  # whether the operators of the present compiled code are recorded one by one
        self._by_path: dict[str, int] = {}  # modules
        self._paths: dict[int, str] = {}
        self.modules = ModuleNames(self._register)
        self.operators = 0
        self.last_module = -1  # of the last backward: autograd adds up what that sends
        # tensors that ended. Python would run a function of ours whenever one does, inside of compiled code as well,
        # where Dynamo compiles it
        self._ended: deque[_Known] = deque()

    # -- modules --------------------------------------------------------------------------------------

    def _register(self, number: int, parent: int, path: str, module: torch.nn.Module) -> None:
        text = self.writer.text
        self._by_path[path], self._paths[number] = number, path
        settings = ""
        with contextlib.suppress(Exception):  # the user's code
            settings = " ".join(module.extra_repr().split())[:MAX_TEXT]
        self.writer.add("modules", (number, parent, text(path), text(type(module).__name__), text(settings)))
        groups: tuple[tuple[int, Iterable[tuple[str, Any]]], ...] = (
            (columns.PARAMETER, module.named_parameters(recurse=False)),
            (columns.BUFFER, module.named_buffers(recurse=False)),
        )
        for kind, members in groups:
            for name, tensor in members:
                if isinstance(tensor, Tensor):
                    full = f"{path}.{name}"
                    self._names[id(tensor)] = (weakref.ref(tensor), full, kind, number)
                    if address := _address(tensor):  # `.data` is the parameter, too
                        self._names[-address] = self._names[id(tensor)]
                    if kind == columns.PARAMETER:
                        self._parameters.append((full, number, weakref.ref(tensor)))
                    self.tensor(tensor)

    def module_of(self, place: Place) -> int:
        """The number of the module at a place, -1 outside of all."""
        return -1 if place.module is None or place.root is None else self.modules.number(place.module, place.root)

    def module_below(self, module: int, path: str) -> int:
        """The number of a module by its name inside another one, without what `torch.compile` puts around it."""
        base = self._paths.get(module, "")
        words = [base, "_orig_mod", path] if f"{base}._orig_mod" in self._by_path else [base, path]
        return self._by_path.get(".".join(word for word in words if word), module)

    # -- tensors --------------------------------------------------------------------------------------

    def tensor(self, tensor: Tensor, producer: int = -1, output: int = 0, module: int = -1, wrote: bool = False) -> int:
        """The number of a tensor's present contents; `producer` made it, or wrote to it just now."""
        key = id(tensor)
        known = self._known.get(key)
        version = _version(tensor)
        if known is not None and known() is tensor:
            if known.version == version and not wrote:
                return known.number
        else:
            known = None
        sharding = sharding_of(tensor) if type(tensor) not in PLAIN else None
        held = tensor if sharding is None else sharding.local
        storage = storage_of(held)
        memory = _memory(held)
        if known is None and not wrote and producer < 0 and memory is not None:
            same = self._by_memory.get(memory)
            if same is not None and same() is not None and same.version == version:
                return same.number
        if producer < 0 and not wrote:
            producer = self._writers.get(storage, -1)
        of_function = producer < 0 and self._in_function >= 0 and _is_compiled(tensor)
        if of_function:
            producer, output = self._in_function, self._made_by_function
        number = self._add(tensor, sharding, known, producer, output, module)
        if self._ended:
            self._forget_ended()
        reference = _Known(tensor, self._ended.append)
        reference.key, reference.version, reference.number, reference.memory = key, version, number, memory
        self._known[key] = reference
        if memory is not None:
            self._by_memory[memory] = reference
        if self._printing is not None:
            self._printing.take(number, held, sharding)
        if of_function:
            self._made_by_function += 1
            self.edge(producer, OUTPUT, output, number)
        return number

    def _forget_ended(self) -> None:
        known, by_memory = self._known, self._by_memory
        while self._ended:
            reference = self._ended.popleft()
            if known.get(reference.key) is reference:
                del known[reference.key]
            if by_memory.get(reference.memory) is reference:
                del by_memory[reference.memory]

    def _add(
        self, tensor: Tensor, sharding: Sharding | None, known: _Known | None, producer: int, output: int, module: int
    ) -> int:
        text = self.writer.text
        name, kind, owner = self._role(tensor) or ("", columns.GIVEN if producer < 0 else columns.ACTIVATION, module)
        base = known.number if known is not None else -1
        if base < 0 and tensor._is_view() and tensor._base is not None:
            seen = self._known.get(id(tensor._base))
            base = seen.number if seen is not None and seen() is tensor._base else -1
        return self.writer.add(
            "tensors", (kind, text(name), self._look(tensor, sharding), producer, min(output, 32_767), base, owner)
        )

    def _role(self, tensor: Tensor) -> tuple[str, int, int] | None:
        """Name, kind and module of a parameter, a buffer or a gradient; None for other tensors."""
        found = self._names.get(id(tensor))
        if found is None or found[0]() is not tensor:
            found = self._names.get(-_address(tensor)) if tensor.is_leaf else None
            owner = None if found is None else found[0]()
            if owner is None or tuple(owner.shape) != tuple(tensor.shape):
                return None
        assert found is not None
        return found[1:]

    def _look(self, tensor: Tensor, sharding: Sharding | None) -> int:
        strided = tensor.layout == torch.strided and not tensor.is_nested
        stride = tensor.stride() if strided else None
        shape = tuple(tensor.shape) if not tensor.is_nested else ()
        placed = ("", "") if sharding is None else (sharding.placements, sharding.mesh)
        key = (shape, stride, tensor.dtype, tensor.device, tensor.requires_grad, placed)
        found = self._looks.get(key)
        if found is None:
            text = self.writer.text
            size = tensor.numel() * tensor.element_size()
            row = (
                *(text(str(list(shape))), text(short(tensor.dtype)), text("" if stride is None else str(list(stride)))),
                *(text(str(tensor.device)), int(tensor.requires_grad), text(placed[0]), text(placed[1]), size),
            )
            found = self._looks[key] = self.writer.add("looks", row)
        return found

    def launch(self) -> None:
        """Print the new tensors of a call that lie on GPUs, before anybody writes to them."""
        if self._printing is not None and self._printing.fresh:
            self._printing.launch()

    # -- operators ------------------------------------------------------------------------------------

    def operator(
        self,
        name: str,
        phase: int,
        place: Place | None,
        step: int,
        location: str,
        *,
        module: int | None = None,
        forward: int = -1,
        arguments: int = 0,
        group: str = "",
    ) -> int:
        """Add an operator; its edges follow."""
        text = self.writer.text
        if module is None:
            module = -1 if place is None else self.module_of(place)
        stack = ""
        if self._stacks > 1 and phase != BACKWARD:
            stack = stack_of_call(self._stacks, self._user_only)
        row = (
            *(step, phase, text(name), module, text(location), text(stack), arguments, self._region()),
            *(self._stream(), text(group), forward, time.perf_counter() - self._began, 0),
        )
        self.operators += 1
        if self._frees:
            self._write_frees()
        return self.writer.add("operators", row)

    def arguments(self, described: Described) -> int:
        """The number of the text of a call's arguments."""
        number = self._arguments.get(described.number)
        if number is None:
            number = self.writer.text(arguments_of(described))
            if described.number:
                self._arguments[described.number] = number
        return number

    def _region(self) -> int:
        """The number of the text that says which modes are on: grad, inference, autocast."""
        kinds = (self._accelerator, "cpu")
        on = tuple([torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds])
        key = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), on)
        number = self._regions.get(key)
        if number is None:
            words = [] if key[0] else ["inference" if key[1] else "no_grad"]
            words += [
                f"autocast({k}, {short(dtype)})" for k, dtype in dict(zip(kinds, on)).items() if dtype is not None
            ]
            number = self._regions[key] = self.writer.text(" ".join(words))
        return number

    def _stream(self) -> int:
        if self._accelerator == "cuda":
            return cuda_stream(cuda_device()) if torch.cuda.is_initialized() else 0
        return 0 if self._accelerator == "cpu" else stream_of(self._accelerator)

    def edges(self, operator: int, side: int, tensors: Sequence[int]) -> None:
        """Say which tensors went into an operator, or came out of it; -1 for none at that place."""
        self.writer.extend(
            "edges", [(operator, side, min(place, 32_767), n) for place, n in enumerate(tensors) if n >= 0]
        )

    def edge(self, operator: int, side: int, place: int, tensor: int) -> None:
        """Say that a tensor went into an operator, or came out of it."""
        self.writer.add("edges", (operator, side, min(place, 32_767), tensor))

    def inputs(self, tensors: Sequence[Tensor]) -> list[int]:
        """The numbers of arguments."""
        return [self.tensor(tensor) for tensor in tensors]

    def outputs(
        self, operator: int, module: int, tensors: Sequence[Tensor], written: Sequence[Tensor], phase: int
    ) -> None:
        """Note what an operator returned and what it wrote to."""
        numbers: list[int] = []
        for tensor in written:
            storage = storage_of(tensor)
            self._writers[storage] = operator
            numbers.append(self.tensor(tensor, operator, len(numbers), module, wrote=True))
        known = {id(tensor) for tensor in written}
        for tensor in tensors:
            if id(tensor) not in known:
                numbers.append(self.tensor(tensor, operator, len(numbers), module))
                if phase != BACKWARD:
                    self._allocated(operator, module, tensor, phase)
        self.edges(operator, OUTPUT, numbers)

    def gradients(self, operator: int, module: int, tensors: Sequence[Tensor | None]) -> None:
        """Note the gradients that the backward of a call sent to its inputs."""
        self.last_module = module
        numbers = []
        for place, tensor in enumerate(tensors):
            if tensor is None:
                numbers.append(-1)
                continue
            numbers.append(self.tensor(tensor, operator, place, module))
            self._gradients[_memory(tensor)] = operator
        self.edges(operator, OUTPUT, numbers)

    def compiled(self, place: Place, step: int, backward: bool, given: Sequence[Tensor]) -> None:
        """Compiled code ran in a module; what it made is known when it is used."""
        if self.ran_graphs:
            self.ran_graphs = False
            return
        inputs = self.inputs(given)
        self._known.clear()
        self._by_memory.clear()
        if backward:
            self._backward_function = self.operator(
                "torch.compile", BACKWARD, None, step, "", module=self.last_module, forward=self._in_function
            )
            return
        self._in_function = self.operator("torch.compile", FORWARD, place, step, "")
        self.last_module = self.module_of(place)
        self._made_by_function = 0
        self.edges(self._in_function, INPUT, inputs)

    def after_backward(self) -> None:
        """Give the gradients of parameters their names."""
        function, self._backward_function = self._backward_function, -1
        for place, (name, module, reference) in enumerate(self._parameters):
            parameter = reference()
            if parameter is not None and parameter.grad is not None:
                grad: Tensor = parameter.grad
                self._names[id(grad)] = (weakref.ref(grad), f"{name}.grad", columns.GRADIENT, module)
                known = self._known.get(id(grad))
                if known is None or known() is not grad or known.version != _version(grad):
                    producer = self._gradients.get(_memory(grad), function)
                    number = self.tensor(grad, producer, place, wrote=True)
                    if producer == function >= 0:
                        self.edge(function, OUTPUT, place, number)
                self._allocated(self.operators - 1, module, grad, BACKWARD, columns.GRADIENT)
        self._gradients.clear()

    # -- memory ---------------------------------------------------------------------------------------

    def _allocated(self, operator: int, module: int, tensor: Tensor, phase: int, kind: int | None = None) -> None:
        if type(tensor) not in PLAIN or tensor.is_meta:
            return
        storage = storage_of(tensor)
        if storage == _NO_STORAGE or storage in self._blocks:
            return
        memory = tensor.untyped_storage()
        if kind is None:
            kind = columns.STATE if phase == OPTIMIZER else columns.ACTIVATION
        number, size = self._block_count, memory.nbytes()
        self._block_count += 1
        self._blocks[storage] = (number, size, kind, module)
        self.writer.add("memory", (operator, number, size, kind, module))
        self._references[storage] = weakref.ref(memory, lambda _: self._freed(storage, number))

    def _freed(self, storage: int, number: int) -> None:
        """Any thread may free memory, in the middle of anything: what is written, is written with the next operator."""
        found = self._blocks.get(storage)
        if found is not None and found[0] == number:
            del self._blocks[storage]
            self._references.pop(storage, None)
            self._writers.pop(storage, None)
            self._frees.append((self.operators, number, -found[1], found[2], found[3]))

    def _write_frees(self) -> None:
        while self._frees:
            self.writer.add("memory", self._frees.popleft())

    def close(self) -> None:
        """Fetch what waits and complete the file."""
        with self.lock:
            if self._printing is not None:
                self._printing.land_all()
            self._write_frees()
            facts: dict[str, Any] = {}
            with contextlib.suppress(Exception):
                facts["peak_bytes"] = int(module_of(accelerator_type()).max_memory_allocated())
            self._references.clear()
            self.writer.close(**facts)


def writer_world() -> tuple[int, int]:
    """This rank and how many there are (`writer_world() == (0, 1)`)."""
    return settings.rank(), settings.world_size()


def storage_of(tensor: Tensor) -> int:
    """A number for the memory of a tensor, 0 where it has none (`storage_of(x) == storage_of(x[1:])`)."""
    try:
        found: int = storage_id(tensor)
        return found
    except Exception:
        return _NO_STORAGE


def _is_compiled(tensor: Tensor) -> bool:
    return type(tensor.grad_fn).__name__.startswith("CompiledFunction")


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors count none
        return 0


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
