"""Does something right after a module has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, done: Callable[[ModuleType], None]) -> None:
        self._inner, self._done = inner, done

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        # The module must look as if nobody had been here: its loader is what tools inspect.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._done(module)


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``action(module)`` once, when the module called ``name`` has been imported; ``before()`` right before.

    Example::

        hook = AfterImport("torch", lambda torch: print(torch.__version__))
        hook.install()
    """

    def __init__(
        self, name: str, action: Callable[[ModuleType], None], before: Callable[[], None] | None = None
    ) -> None:
        self._name, self._action, self._before = name, action, before
        self._looking = False

    def install(self) -> None:
        """Act now if the module is there already, else when it is imported.

        Example: ``AfterImport("torch", action).install()``
        """
        loaded = sys.modules.get(self._name)
        if loaded is not None:
            self._action(loaded)
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Forget the action if it has not happened yet.

        Example: ``hook.remove()``
        """
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return None
        if self._before is not None:
            self._before()
        spec.loader = _Loader(spec.loader, self._done)
        return spec

    def _done(self, module: ModuleType) -> None:
        self.remove()
        self._action(module)
