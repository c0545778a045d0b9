"""`torch.autograd.Function`: kernels that are called inside one are no operators of PyTorch's, so no mode sees them.

What a class computes is seen if its results come from operators. A class whose results come from elsewhere (Triton,
ctypes, an extension) is told to the tools; one that a tool can judge as a whole is watched as one operator.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ..call.description import Tensor, tensors_in
from ..call.operators.registry import function_facts
from ..call.traits import OpTraits, traits_of

if TYPE_CHECKING:
    from .intercept import Call, Interceptor

THREAD: Final = threading.local()  # `made`: memory that operators wrote to inside a class; None if unknown
_traits: Final[dict[type, OpTraits]] = {}
_MAX_CLASSES: Final = 10_000


def traits_of_class(kind: type, apply: Callable[..., Any]) -> OpTraits:
    """The traits of a class of functions, which is named as users write it."""
    found = _traits.get(kind)
    if found is None:
        if len(_traits) >= _MAX_CLASSES:  # classes made in a loop must not pile up
            _traits.clear()
        found = _traits[kind] = traits_of(apply, f"{kind.__module__}.{kind.__qualname__}")
    return found


def applied(
    interceptor: Interceptor, kind: type, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `apply` of a class on a watched thread; `apply` is PyTorch's own."""
    tools = interceptor.tools
    listeners = [tool for tool in tools if tool.wants_classes]
    if not listeners:
        return apply(*args, **kwargs)
    if not any(tool.transforms for tool in tools) and any(tool.judges_class(kind) for tool in listeners):
        return interceptor.watch_function(kind, traits_of_class(kind, apply), apply, args, kwargs)
    outer, THREAD.made = getattr(THREAD, "made", None), set()
    try:
        result = apply(*args, **kwargs)
        made = THREAD.made
    finally:
        THREAD.made = outer
    with contextlib.suppress(Exception):  # tensors without memory
        found = {_address(t) for t in tensors_in(result) if t.numel()}
        if outer is not None:
            outer |= found  # what is inside of a class was told
        if made is not None and found - made - {_address(t) for t in tensors_in((args, kwargs))}:
            for tool in listeners:
                tool.unseen(traits_of_class(kind, apply), args, kwargs, result)
    return result


def note(call: Call) -> None:
    """An operator has run inside a class: what it wrote to is known (`if THREAD.made is not None: note(call)`)."""
    if not function_facts(call.op).uninitialised:
        with contextlib.suppress(Exception):
            THREAD.made.update([_address(t) for t in call.results or call.tensors])


def lose_track() -> None:
    """An operator runs that no tool watches: what is made inside a class is not known any more."""
    if getattr(THREAD, "made", None) is not None:
        THREAD.made = None


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
