"""From calls to rows of a trace: names of modules, looks of tensors, texts; a book knows which tensor is which."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from .. import settings
from ..call.description import Described, Tensor, short
from ..call.devices import accelerator_type, module_of
from ..call.graphs import OP as COMPILED_CODE
from ..call.recent import Recent
from ..compat import MODULE_CALL, awaited, cuda_device, cuda_stream
from ..native import book as native
from ..native.ledger import PASSES_ON
from ..watch.compiled import Tally
from . import format as columns
from .book import Book, PythonBook, version_of
from .format import BACKWARD, OPTIMIZER, OUTPUT, TraceWriter
from .places import (
    MAX_TEXT,
    ModuleNames,
    Place,
    Sharding,
    arguments_of,
    kind_of_code,
    sharding_of,
    stack_of_call,
    stream_of,
)
from .printing import PLAIN, Printing

_MAX_KINDS: Final = 5_000


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
        self._looks: dict[Any, int] = {}
        self._accelerator = accelerator_type()
        self._regions: dict[Any, int] = {}
        self._arguments = Recent[int, int](_MAX_KINDS)  # texts of descriptions, by their number
        self._odd_parameters: list[tuple[int, int, Any]] = []  # wrapper tensors: text of the gradient, module, itself
        self._in_function = -1  # the last operator that was compiled code with results that are not known
        self._made_by_function = 0  # results of that which have been seen
        self._awaited: list[tuple[int, int]] = []  # such operators whose backward has not run, and their modules
        self._found_result: Callable[[Tensor], bool] | None = None  # told of the first result of the last of them
        self._backward_function = -1  # the last one in a backward pass
        self.ran_graphs = False  # whether the operators of the present compiled code are recorded one by one
        self.recorded = Tally()  # runs of compiled code whose operators are
        self._by_path: dict[str, int] = {}  # modules
        self._paths: dict[int, str] = {}
        self.modules = ModuleNames(self._register)
        library = native.LIBRARY.get()
        self.native: Any = None
        if library is not None:
            self.native = library.Book(
                self._plain_look, self.launch if prints else None, writer.flush, self._accelerator
            )
            writer.take = self.native.take
            if self._printing is not None:
                self._printing.print_by(self.native)
        self._library = library
        self.book: Book = self.native or PythonBook(writer, self._plain_look, prints, self._accelerator)

    def watch_by_itself(self) -> Any:
        """The book in machine code, which records most calls and their backwards itself; None where there is none."""
        if self.native is not None:
            self._library.set_up(
                *(MODULE_CALL, kind_of_code, self._numbered, self.writer.texts, self.writer.text, self.arguments),
                *(self._arguments.young, self._region, PASSES_ON, self._accelerator),
            )
        return self.native

    def _numbered(self, module: torch.nn.Module, root: torch.nn.Module) -> tuple[int, bool]:
        with self.lock:
            number = self.modules.number(module, root)
            part = self.modules.parts.get(id(module))
            return number, part is not None and part() is module

    @property
    def last_module(self) -> int:
        """Of the last backward: autograd adds up what that sends."""
        return self.book.last_module

    @last_module.setter
    def last_module(self, module: int) -> None:
        self.book.last_module = module

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
                if isinstance(tensor, Tensor) and not is_lazy(tensor):
                    self.book.name(tensor, text(f"{path}.{name}"), kind, number)
                    if kind == columns.PARAMETER and type(tensor) in PLAIN:
                        self.book.parameter(tensor, text(f"{path}.{name}.grad"), number)
                    elif kind == columns.PARAMETER:
                        self._odd_parameters.append((text(f"{path}.{name}.grad"), number, weakref.ref(tensor)))
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
        if self._in_function < 0 and type(tensor) in PLAIN:
            return self.book.number(tensor, tensor, -1, producer, output, module, wrote, True)
        book, tensor = self.book, awaited(tensor)
        sharding = sharding_of(tensor) if type(tensor) not in PLAIN else None
        held = tensor if sharding is None else sharding.local
        of_function = producer < 0 and not wrote and self._in_function >= 0 and _is_compiled(tensor)
        of_function = of_function and not book.knows(tensor)
        if of_function:
            producer, output = self._in_function, self._made_by_function
            found, self._found_result = self._found_result, None
            if found is not None and found(tensor) and self._awaited:
                self._awaited.pop()
        look, count = -1 if sharding is None else self._look(tensor, sharding), book.tensors
        number = book.number(tensor, held, look, producer, output, module, wrote, sharding is None)
        if sharding is not None and number == count and self._printing is not None:
            self._printing.take(number, held, sharding)
        if of_function:
            self._made_by_function += 1
            self.edge(producer, OUTPUT, output, number)
        return number

    def _plain_look(self, tensor: Tensor) -> int:
        return self._look(tensor, None)

    def _look(self, tensor: Tensor, sharding: Sharding | None) -> int:
        has_shape = not tensor.is_nested and not is_lazy(tensor)
        stride = tensor.stride() if has_shape and tensor.layout == torch.strided else None
        shape = tuple(tensor.shape) if has_shape else ()
        placed = ("", "") if sharding is None else (sharding.placements, sharding.mesh)
        key = (shape, stride, tensor.dtype, tensor.device, tensor.requires_grad, placed)
        found = self._looks.get(key)
        if found is None:
            text = self.writer.text
            size = 0 if is_lazy(tensor) else tensor.numel() * tensor.element_size()
            row = (
                *(text(str(list(shape))), text(short(tensor.dtype)), text("" if stride is None else str(list(stride)))),
                *(text(str(tensor.device)), int(tensor.requires_grad), text(placed[0]), text(placed[1]), size),
            )
            found = self._looks[key] = self.writer.add("looks", row)
        return found

    def launch(self) -> None:
        """Print the new tensors of a call, before anybody writes to them."""
        if self._printing is not None:
            with self.lock:
                self._printing.take_all(self.book.take_fresh())

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
        return self.book.operator(
            *(step, phase, text(name), module, text(location), text(stack), arguments, self._region()),
            *(self._stream(), text(group), forward),
        )

    def arguments(self, described: Described) -> int:
        """The number of the text of a call's arguments."""
        number: int | None = self._arguments.get(described.number)
        if number is None:
            number = self.writer.passing_text(arguments_of(described))
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

    def edges(self, operator: int, side: int, tensors: list[int]) -> None:
        """Say which tensors went into an operator, or came out of it; -1 for none at that place."""
        self.book.edges(operator, side, tensors)

    def edge(self, operator: int, side: int, place: int, tensor: int) -> None:
        """Say that a tensor went into an operator, or came out of it."""
        self.book.edge(operator, side, place, tensor)

    def inputs(self, tensors: Sequence[Tensor]) -> list[int]:
        """The numbers of arguments."""
        if self.native is not None and self._in_function < 0:
            found: list[int] | None = self.native.numbers(tensors)
            if found is not None:
                return found
        return [self.tensor(tensor) for tensor in tensors]

    def versions(self, tensors: Sequence[Tensor]) -> list[int]:
        """How often each was written to."""
        if self.native is not None:
            found: list[int] = self.native.versions(tensors)
            return found
        return [version_of(tensor) for tensor in tensors]

    def outputs(
        self, operator: int, module: int, tensors: Sequence[Tensor], written: Sequence[Tensor], phase: int
    ) -> None:
        """Note what an operator returned and what it wrote to."""
        if self.native is not None and self.native.outputs(operator, module, tensors, written, phase):
            return
        numbers: list[int] = []
        for tensor in written:
            self.book.written(tensor, operator)
            numbers.append(self.tensor(tensor, operator, len(numbers), module, wrote=True))
        known = {id(tensor) for tensor in written}
        for tensor in tensors:
            if id(tensor) not in known:
                numbers.append(self.tensor(tensor, operator, len(numbers), module))
                held = tensor if type(tensor) in PLAIN else _local(tensor)
                if phase != BACKWARD and held is not None:
                    kind = columns.STATE if phase == OPTIMIZER else columns.ACTIVATION
                    self.book.allocated(operator, module, held, kind)
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
            self.book.sent(tensor, operator)
            if self.native is not None and type(tensor) in PLAIN:
                # The twin in Python would hold the memory to ask after it, and autograd could not add in place.
                self.book.allocated(operator, module, tensor, columns.GRADIENT)
        self.edges(operator, OUTPUT, numbers)

    # -- compiled code ------------------------------------------------------------------------------------

    def graphs_ran(self, phase: int) -> bool:
        """Whether compiled code that has just run was recorded operator by operator."""
        ran, self.ran_graphs = self.ran_graphs, False
        if ran:
            self.recorded = self.recorded.counting(columns.PHASES[phase])
        return ran

    def await_results(self, function: int, module: int, found: Callable[[Tensor], bool]) -> None:
        """Compiled code has run, and nobody knows what it made: that is known when it is used.

        `found` gets the first result and answers whether it will hear of the backward.
        """
        self._found_result = found
        self._in_function, self._made_by_function, self.last_module = function, 0, module
        if self._backward_function >= 0 or len(self._awaited) >= _MAX_KINDS:
            self._awaited.clear()
        self._awaited.append((function, module))

    def backward_of_awaited(self, step: int) -> None:
        """The backward of compiled code has run whose results were not known: the last one first."""
        if self._awaited:
            function, self.last_module = self._awaited.pop()
            self._backward_function = self.operator(
                COMPILED_CODE, BACKWARD, None, step, "", module=self.last_module, forward=function
            )

    def after_backward(self) -> None:
        """Give the gradients of parameters their names."""
        function, self._backward_function, self._found_result = self._backward_function, -1, None
        for place, (text, module, reference) in enumerate(self._odd_parameters):
            parameter = reference()
            if parameter is not None and parameter.grad is not None:
                grad: Tensor = parameter.grad
                self.book.name(grad, text, columns.GRADIENT, module)
                if not self.book.knows(grad):
                    producer = self.book.sender(grad)
                    producer = function if producer < 0 else producer
                    number = self.tensor(grad, producer, place, wrote=True)
                    if producer == function >= 0:
                        self.edge(function, OUTPUT, place, number)
        self.book.after_backward(function)

    def close(self) -> None:
        """Fetch what waits and complete the file."""
        with self.lock:
            if self._printing is not None:
                self.launch()
                self._printing.land_all()
            facts: dict[str, Any] = {}
            with contextlib.suppress(Exception):
                facts["peak_bytes"] = int(module_of(accelerator_type()).max_memory_allocated())
            self.book.close()
            self.writer.close(**facts)


def writer_world() -> tuple[int, int]:
    """This rank and how many there are (`writer_world() == (0, 1)`)."""
    return settings.rank(), settings.world_size()


def _local(tensor: Tensor) -> Tensor | None:
    """What lies on this rank of a tensor that is spread over ranks; None for other wrappers."""
    sharding = sharding_of(tensor)
    return None if sharding is None or type(sharding.local) not in PLAIN else sharding.local


def _is_compiled(tensor: Tensor) -> bool:
    return type(tensor.grad_fn).__name__.startswith("CompiledFunction")
