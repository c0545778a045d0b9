"""One call while it happens, and what the interceptor asks of a tool that wants to see it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

from ..call.description import Described, Tensor, TensorMeta, tensors_in
from ..call.devices import names_device
from ..call.traits import OpTraits
from ..view.console import View

_NOTHING: Final = Described((), None, ())
_NO_TENSORS: Final[list[Tensor]] = []


class Call:
    """One call while it happens: what tools get to see in `before` and `after`."""

    __slots__ = (
        "__weakref__",
        "args",
        "function",
        "id",
        "inputs",
        "kwargs",
        "location",
        "notes",
        "op",
        "outputs",
        "result",
        "results",
        "step",
        "tensors",
        "traits",
    )

    def __init__(
        self, traits: OpTraits, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.id = 0
        self.traits = traits
        self.op = traits.name
        self.function = function
        self.args, self.kwargs = args, kwargs
        self.result: Any = None
        self.location = ""
        self.step = 0
        self.inputs: Described = _NOTHING
        self.outputs: Described = _NOTHING
        self.tensors: list[Tensor] = []  # all among the arguments, in order
        self.results: list[Tensor] = []  # all in the result, in order
        self.notes: dict[Any, Any] = {}  # what tools remember between before and after

    def release(self) -> None:
        """Let go of the user's tensors; the description stays."""
        self.args, self.kwargs, self.result = (), {}, None
        self.tensors = self.results = _NO_TENSORS

    @property
    def device(self) -> torch.device:
        """The device of the call: that of the first tensor that is not on the CPU, or the one it names."""
        for tensor in self.tensors:
            if not tensor.is_cpu:
                return tensor.device
        if self.tensors and self.result is None:
            return self.tensors[0].device
        seen = False
        for tensor in itertools.chain(tensors_in(self.args), tensors_in(self.kwargs), tensors_in(self.result)):
            if not tensor.is_cpu:
                return tensor.device
            seen = True
        for part in self.inputs.args:  # of a call that has let go of its tensors
            if type(part) is TensorMeta and part.device.type != "cpu":
                return part.device
        wanted = self.kwargs.get("device")
        if wanted is not None and names_device(wanted):
            return torch.device(wanted)
        if not seen and self.traits.factory and wanted is None:
            return torch.get_default_device()
        return torch.device("cpu")


class ToolProtocol(Protocol):
    """What the interceptor needs of a tool; `op_tools.tools.base.Tool` has it all."""

    view: View

    @property
    def hook(self) -> str: ...
    @property
    def order(self) -> int: ...
    @property
    def transforms(self) -> bool: ...
    @property
    def gated(self) -> bool: ...
    @property
    def names_skips(self) -> bool: ...
    @property
    def wants_pointers(self) -> bool: ...
    @property
    def wants_backward(self) -> bool: ...
    @property
    def wants_backward_start(self) -> bool: ...
    @property
    def wants_gradients(self) -> bool: ...
    def wants(self, traits: OpTraits) -> bool: ...
    def accepts(self, call: Call) -> bool: ...
    def before(self, call: Call) -> None: ...
    def transform(self, call: Call, run: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any: ...
    def after(self, call: Call) -> None: ...
    def before_node(self, call: Call, node: int) -> Any: ...
    def after_node(self, call: Call, started: Any) -> None: ...
    def after_backward(
        self, call: Call, grad_outputs: list[Tensor | None], grad_inputs: list[Tensor | None]
    ) -> None: ...
    def after_passes(self, graph_is_kept: bool) -> None: ...
    def failed(self, call: Call, error: BaseException, what: str = ...) -> None: ...
