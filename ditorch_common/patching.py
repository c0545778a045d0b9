"""A ledger of changes to PyTorch and Python: listed, reversible, applied once."""

from __future__ import annotations

import ctypes
import gc
import inspect
import types
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

_ABSENT = object()
_TARGET = "_ditorch_target"
"""Keyword default in which a redirected function keeps what it calls now."""


@dataclass(frozen=True)
class Patch:
    """One change: what, why, of which kind, and how to undo it.

    Example::

        for patch in ditorch.patches():
            print(patch.what, patch.kind, patch.why)
    """

    what: str
    """Full name of what was changed, ``torch.zeros``."""
    why: str
    kind: str = "mapped"
    """``mapped`` (same meaning on the device), ``emulated`` (done by ditorch), ``hint`` (accepted,
    no effect), ``unsupported`` (raises, says what to do instead), ``watched`` (op_tools sees the calls)."""
    how: str = "replaced"
    """``replaced`` attribute, function ``redirected`` in place, ``registered`` entry, ``native``
    (in C++), ``none``."""
    original: Any = field(default=None, repr=False, compare=False)
    undo: Callable[[], None] | None = field(default=None, repr=False, compare=False)


class Ledger:
    """Applies patches and takes them back in reverse order.

    Example::

        ledger = Ledger()
        ledger.replace(torch, "zeros", my_zeros, "device='cuda'")
        ledger.undo_all()
    """

    def __init__(self) -> None:
        self.patches: list[Patch] = []
        self._seen: set[str] = set()

    def record(self, patch: Patch) -> None:
        """Note a patch that was applied elsewhere, or a hint that needs none.

        Example: ``ledger.record(Patch("torch.backends.cudnn.benchmark", "no cuDNN here", "hint", "none"))``
        """
        if patch.what in self._seen:
            raise ValueError(f"{patch.what} is patched twice")
        self._seen.add(patch.what)
        self.patches.append(patch)

    def __contains__(self, what: str) -> bool:
        return what in self._seen

    def replace(self, owner: Any, name: str, value: Any, why: str, kind: str = "mapped") -> None:
        """Set an attribute of a module or class.

        Example: ``ledger.replace(torch.Tensor, "is_cuda", property(f), "shown as cuda")``
        """
        original = vars(owner).get(name, _ABSENT)

        def undo() -> None:
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

        setattr(owner, name, value)
        before = None if original is _ABSENT else original
        self.record(Patch(f"{full_name(owner)}.{name}", why, kind, "replaced", before, undo))

    def replace_in_c(self, owner: type, name: str, value: Any, why: str) -> None:
        """Set an attribute of a class that is written in C, which Python itself refuses to change.

        Example: ``ledger.replace_in_c(torch.Event, "device", property(f), "shown as cuda")``
        """
        attributes = _attributes(owner)
        original = attributes.get(name, _ABSENT)

        def put(attribute: Any) -> None:
            if attribute is _ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = attribute
            ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))  # forget what lookups have cached

        put(value)
        before = None if original is _ABSENT else original
        self.record(Patch(f"{full_name(owner)}.{name}", why, "mapped", "replaced", before, lambda: put(original)))

    def redirect(
        self,
        function: Any,
        make: Callable[[Callable[..., Any]], Callable[..., Any]],
        why: str,
        kind: str = "mapped",
        what: str | None = None,
    ) -> None:
        """Let a Python function do something else while it stays the same object.

        Names that were imported from the module earlier follow, and so do all its aliases. ``make``
        is given a copy that does what the function did and returns what it should do now.

        Example: ``ledger.redirect(torch.cuda.is_available, lambda original: lambda: True, "...")``
        """
        saved = (function.__code__, function.__defaults__, function.__kwdefaults__)
        attributes = dict(function.__dict__)
        original = copy_function(function)
        # Others read the signature (TorchDynamo binds arguments to that of `autocast`), so it stays.
        signature = inspect.signature(function)
        function.__code__ = _trampoline(function)
        function.__defaults__ = None
        function.__kwdefaults__ = {_TARGET: make(original)}
        function.__signature__ = signature

        def undo() -> None:
            function.__code__, function.__defaults__, function.__kwdefaults__ = saved
            function.__dict__.clear()
            function.__dict__.update(attributes)

        self.record(Patch(what or full_name(function), why, kind, "redirected", original, undo))

    def put(self, table: MutableMapping[Any, Any], key: Any, value: Any, what: str, why: str) -> None:
        """Set an entry of a dictionary that belongs to PyTorch.

        Example: ``ledger.put(os.environ, "ASCEND_RT_VISIBLE_DEVICES", "0", "...", "...")``
        """
        original = table.get(key, _ABSENT)

        def undo() -> None:
            if original is _ABSENT:
                table.pop(key, None)
            else:
                table[key] = original

        table[key] = value
        self.record(Patch(what, why, "mapped", "registered", None if original is _ABSENT else original, undo))

    def undo(self, what: str) -> None:
        """Take back one patch; nothing happens where it was taken back before.

        Example: ``ledger.undo("torch.zeros")``
        """
        patch = self.forget(what)
        if patch is not None and patch.undo is not None:
            patch.undo()

    def forget(self, what: str) -> Patch | None:
        """Take one patch off the list, and leave what it changed as it is.

        Example: ``ledger.forget("torch.zeros")``
        """
        patch = next((patch for patch in self.patches if patch.what == what), None)
        if patch is not None:
            self.patches.remove(patch)
            self._seen.discard(what)
        return patch

    def undo_all(self) -> None:
        """Take back every patch, last one first.

        Example: ``ledger.undo_all()``
        """
        while self.patches:
            self.undo(self.patches[-1].what)


def _attributes(owner: type) -> dict[str, Any]:
    """The dictionary behind the read-only view `vars(owner)`."""
    (found,) = gc.get_referents(vars(owner))
    assert isinstance(found, dict), f"{owner} keeps its attributes elsewhere"
    return found


def full_name(thing: Any) -> str:
    """Dotted name of a module, class or function as users write it.

    Example: ``full_name(torch.Tensor) == "torch.Tensor"``
    """
    if isinstance(thing, types.ModuleType):
        return thing.__name__
    name = f"{thing.__module__}.{thing.__qualname__}"
    return "torch.Tensor" if name == "torch._tensor.Tensor" else name


def copy_function(function: types.FunctionType) -> types.FunctionType:
    """A second function with the same code, so that the first can be redirected.

    Example: ``copy_function(f)(1) == f(1)``
    """
    what = (function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    twin = types.FunctionType(*what)
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__dict__.update(function.__dict__)
    twin.__doc__ = function.__doc__
    twin.__module__ = function.__module__
    twin.__qualname__ = function.__qualname__
    return twin


def _trampoline(function: types.FunctionType) -> types.CodeType:
    # Code can only be exchanged for code with the same free variables, so a function with a closure
    # gets an inner function that names them.
    free = function.__code__.co_freevars
    name = function.__name__ if function.__name__.isidentifier() else "redirected"
    mention = f"        if False: ({', '.join(free)},)\n" if free else ""
    source = (
        f"def make({', '.join(free)}):\n"
        f"    def {name}(*args, {_TARGET}, **kwargs):\n"
        f"{mention}"
        f"        return {_TARGET}(*args, **kwargs)\n"
        f"    return {name}\n"
    )
    scope: dict[str, Any] = {}
    exec(compile(source, "<ditorch redirect>", "exec"), scope)
    code: types.CodeType = scope["make"](*([None] * len(free))).__code__
    return code
