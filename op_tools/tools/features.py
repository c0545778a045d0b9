"""apply_feature: a tool on chosen functions, PyTorch's or anyone's, while a condition holds."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from torch.overrides import get_testing_overrides

from .. import lifecycle
from ..call.functions import name_of, watched_name
from ..call.traits import traits_of
from ..settings import SettingsError, near_misses
from ..watch import patches
from ..watch.compiled import HIDDEN
from ..watch.intercept import INTERCEPTOR
from . import all_tools
from .base import Tool


def features() -> dict[str, type[Tool]]:
    """The tools by their names in `apply_feature` (`features()["fallback"]`)."""
    return {tool.feature: tool for tool in all_tools().values() if tool.feature}


class FeatureHandle:
    """What `apply_feature` returns; `remove()` undoes it, and so does leaving a `with` block.

    >>> handle = op_tools.apply_feature("torch.add", "dump_op_args")  # doctest: +SKIP
    >>> handle.remove()                                               # doctest: +SKIP
    """

    def __init__(self, tool: Tool, ops: list[str], undo: contextlib.ExitStack) -> None:
        self.tool, self.ops = tool, ops
        self._undo = undo
        _handles.append(self)

    def remove(self) -> None:
        """End the feature; calling it twice does no harm."""
        if self in _handles:
            _handles.remove(self)
            self._undo.close()

    undo = remove

    def __enter__(self) -> FeatureHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<{self.tool.name} on {', '.join(self.ops[:5])}{' …' if len(self.ops) > 5 else ''}>"


_handles: list[FeatureHandle] = []


def _remove_all() -> None:
    for handle in list(_handles):
        handle.remove()


lifecycle.at_exit(lifecycle.Exit.TOOLS, _remove_all)


def apply_feature(
    ops: Any,
    feature: str,
    condition_func: Callable[..., Any] = lambda *args, **kwargs: True,
) -> FeatureHandle:
    """Let a tool work on these operators from now on, where `condition_func(*args, **kwargs)` is true.

    `ops` is a name, a function, a module, or a list of these, of PyTorch or of another package.

    >>> op_tools.apply_feature("torch.add", "fallback", lambda a, b: a.dim() == 2)  # doctest: +SKIP
    """
    known = features()
    if feature not in known:
        raise SettingsError(f"feature {feature!r} is unknown; choose one of {', '.join(sorted(known))}")
    if not callable(condition_func):
        raise SettingsError(f"condition_func must be callable, not {type(condition_func).__name__}")
    wanted = _resolve(ops)
    names = {name for name, _ in wanted}
    tool = known[feature]()
    tool.only = lambda traits: traits.name in names
    tool.condition = condition_func
    with contextlib.ExitStack() as undo:
        for name, function in wanted:
            if not _passes_through_mode(name, function):
                undo.callback(_wrap(name, function))
        tool.start()
        undo.callback(tool.stop)
        return FeatureHandle(tool, sorted(names), undo.pop_all())


# -- finding functions --------------------------------------------------------------------------------


def _resolve(ops: Any) -> list[tuple[str, Callable[..., Any]]]:
    if isinstance(ops, str):
        found = _by_name(ops)
        return _resolve(found) if isinstance(found, ModuleType) else [(watched_name(ops), found)]
    if isinstance(ops, ModuleType):
        members = [
            (f"{ops.__name__}.{name}", member)
            for name, member in vars(ops).items()
            if callable(member)
            and not name.startswith("_")
            and not isinstance(member, type)
            and (getattr(member, "__module__", None) or "torch").startswith(ops.__name__.split(".")[0])
        ]
        if not members:
            raise SettingsError(f"module {ops.__name__} has no public functions to apply a feature to")
        return [(name_of(f) if n.startswith("torch.") else n, f) for n, f in members]
    if isinstance(ops, (list, tuple, set, frozenset)):
        return [pair for op in ops for pair in _resolve(op)]
    if callable(ops):
        return [(name_of(ops), ops)]
    raise SettingsError(f"cannot apply a feature to {ops!r}: give a name, a function, a module or a list of these")


def _by_name(name: str) -> Any:
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        module_name = ".".join(parts[:split])
        try:
            found: Any = importlib.import_module(module_name) if module_name != "__main__" else sys.modules["__main__"]
        except ImportError:
            continue
        with contextlib.suppress(AttributeError):
            found = functools.reduce(getattr, parts[split:], found)
            if callable(found) or isinstance(found, ModuleType):
                return found
        break
    known = {name_of(f) for f in get_testing_overrides()} if parts[0] == "torch" else set()
    near = near_misses(name, known)
    hint = f"; did you mean {', '.join(near)}?" if near else "; write the full name, such as torch.nn.functional.linear"
    raise SettingsError(f"there is no function {name!r}{hint}")


def _passes_through_mode(name: str, function: Callable[..., Any]) -> bool:
    if not name.startswith("torch."):
        return False
    if name.startswith("torch.distributed."):
        return True  # the interceptor enters collectives by itself
    if function in get_testing_overrides() or not hasattr(function, "__code__"):
        return True
    return any("torch_function" in used for used in function.__code__.co_names)


# -- functions that no function mode sees -------------------------------------------------------------


def _wrap(name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Replace a function wherever it is referred to by name; the returned function undoes that."""
    with _guard:
        wrapped = _wrapped.get(name)
        if wrapped is None:
            wrapped = _wrapped[name] = _Wrapped(name, function)
        wrapped.users += 1
    return wrapped.release


class _Wrapped:
    """A function that is replaced wherever it is an attribute, for as long as a feature uses it."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.users = name, 0
        traits = traits_of(function, name)
        self._places: list[tuple[Any, str]] = []

        def watched(*args: Any, **kwargs: Any) -> Any:
            return INTERCEPTOR.watch_function(watched, traits, function, args, kwargs)

        functools.update_wrapper(watched, function, updated=())
        self._function, self._watched = function, watched
        for owner in _owners(name):
            for attribute, value in list(vars(owner).items()):
                if value is function:
                    with contextlib.suppress(AttributeError, TypeError):
                        setattr(owner, attribute, watched)
                        self._places.append((owner, attribute))
        if not self._places:
            raise SettingsError(f"{name} cannot be watched: it is not an attribute of any module")
        self._what = f"{name}, for apply_feature"  # the interceptor may patch the same function
        patches.record(self._what, "no mode sees this function", self._undo, original=function)
        HIDDEN.add(self._what, functools.partial(self._put, function), functools.partial(self._put, watched))

    def release(self) -> None:
        with _guard:
            self.users -= 1
            if not self.users and _wrapped.get(self.name) is self:
                patches.undo(self._what)

    def _put(self, now: Callable[..., Any]) -> None:
        """Make the function, or what watches it, the one that callers find."""
        for owner, attribute in self._places:
            if getattr(owner, attribute, None) in (self._function, self._watched):
                setattr(owner, attribute, now)

    def _undo(self) -> None:
        _wrapped.pop(self.name, None)
        HIDDEN.remove(self._what)
        self._put(self._function)


_wrapped: dict[str, _Wrapped] = {}
_guard = threading.RLock()


def _owners(name: str) -> Iterable[Any]:
    """The place a name points to, then every module that may have imported the function by name."""
    with contextlib.suppress(SettingsError):
        if isinstance(owner := _by_name(name.rpartition(".")[0]), type):
            yield owner
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and getattr(module, "__name__", "") != __name__:
            yield module
