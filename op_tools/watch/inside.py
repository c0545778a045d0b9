"""Calls on wrapper tensors (DTensor, jagged NestedTensor, ...), watched as the calls on plain tensors inside them.

A wrapper tensor has a `__torch_dispatch__` of its own and no memory: its operators run others on the tensors that it
holds. While such a call runs, and while the nodes of its backward run, a dispatch mode is on. It lets wrapper tensors
pass and hands each call on plain tensors to the tools, with the place of the call around it. What is seen there is
below autograd and autocast: it has no backward of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from ..call.description import Tensor
from ..call.site import module_path
from ..compat import (
    DispatchMode,
    count_dispatch_modes,
    dispatch_mode_at,
    in_fake_mode,
    no_torch_function,
    pop_dispatch_mode,
    push_dispatch_mode,
)
from .hooks import Hooks

if TYPE_CHECKING:
    from .intercept import Call, Interceptor

PLAIN_TYPES: Final = frozenset({Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", Tensor)})


@functools.lru_cache(maxsize=1_000)
def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class have operators of their own (`is_wrapper(DTensor)`)."""
    return getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__


def enter(interceptor: Interceptor, call: Call, observers: tuple[Hooks, ...]) -> Inside | None:
    """The mode that shows tools what happens inside a call on wrapper tensors; None for other calls."""
    tools = tuple([t for t in observers if t.looks_inside])
    if not tools or not any(is_wrapper(type(t)) for t in call.tensors):
        return None
    return Inside(interceptor, call, tools)


class Inside(DispatchMode):
    """Hands the calls on plain tensors inside one call on wrapper tensors to the tools, and knows that call.

    >>> with Inside(interceptor, call, tools):  # doctest: +SKIP
    ...     torch.mm(dtensor, dtensor)
    """

    def __init__(self, interceptor: Interceptor, call: Call, tools: tuple[Hooks, ...]) -> None:
        super().__init__()
        self._interceptor, self.tools = interceptor, tools
        self.module = module_path(4)
        self.location = f"{call.location} [inside {call.op}]".lstrip()
        self.backward = False  # of that call
        self.seen = False  # a call on plain tensors, whether or not a tool wanted it

    def in_backward(self) -> Inside:
        """The same for the backward of the call."""
        other = object.__new__(Inside)
        vars(other).update(vars(self), backward=True)
        return other

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if count_dispatch_modes() and in_fake_mode():  # nothing is computed
            return func(*args, **kwargs)
        if any(map(is_wrapper, types)):
            return NotImplemented  # its own `__torch_dispatch__` is next, with this mode on
        self.seen = True
        with no_torch_function():  # in a backward pass the interceptor is on
            plan = self._interceptor.plan_inside(func, self.tools)
            return func(*args, **kwargs) if plan is None else self._interceptor.watch(plan, func, args, kwargs, self)

    # Below the other modes of the thread: these see the calls on wrapper tensors as they would without this one.

    def __enter__(self) -> Inside:
        above = [pop_dispatch_mode(None) for _ in range(count_dispatch_modes())]
        for mode in (self, *reversed(above)):
            push_dispatch_mode(mode)
        return self

    def __exit__(self, *error: object) -> None:
        above = [pop_dispatch_mode(None) for _ in range(count_dispatch_modes())]
        for mode in reversed(above):
            if mode is not self:
                push_dispatch_mode(mode)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Leave this thread's modes for a while."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def around(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """The function with this mode on (`inside.around(torch.mm)(a, b)`)."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return func(*args, **kwargs)

        return run

    def others(self, tools: Iterable[Hooks]) -> tuple[Hooks, ...]:
        """Those of these tools that do not look inside: they see the call itself."""
        return tuple([tool for tool in tools if tool not in self.tools])

    def tell(self, call: Call) -> None:
        """Tell the tools that the call on wrapper tensors is over."""
        for tool in self.tools:
            try:
                tool.looked_inside(call, self.seen)
            except Exception as error:
                tool.failed(call, error)


class Nodes(Hooks):
    """Has the mode on while the backward nodes of a call run."""

    name = "Inside"
    wants_backward = wants_backward_start = True
    wants_gradients = False

    def __init__(self, inside: Inside) -> None:
        self._inside = inside.in_backward()

    def before_node(self, call: Call, node: int) -> Inside:
        return self._inside.__enter__()

    def after_node(self, call: Call, started: Inside) -> None:
        # where the node raises an error, the engine sets the modes of the thread back
        started.__exit__()

    def failed(self, call: Call, error: BaseException, what: str = "the tool failed on this operator") -> None:
        for tool in self._inside.tools:
            tool.failed(call, error, what)


def active() -> Inside | None:
    """The mode that is on in this thread; asked only where there is some dispatch mode."""
    modes: Sequence[Any] = [dispatch_mode_at(index) for index in range(count_dispatch_modes())]
    return next((mode for mode in reversed(modes) if type(mode) is Inside), None)
