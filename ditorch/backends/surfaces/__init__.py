"""Names and parameters of the vendors' counterparts of ``torch.cuda``, with the commit they were read from.

One JSON file per backend. A parameter list is written as in ``"device=, abbreviated="``: ``=`` marks a default.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Surface:
    """The public Python interface of one vendor's device module."""

    source: str
    commit: str
    functions: Mapping[str, str]
    classes: Mapping[str, Mapping[str, str]]

    def as_module(self) -> Any:
        """An object with these names, to ask what exists; its functions have signatures and cannot be called.

        Example: ``hasattr(recorded("ascend").as_module(), "NPUGraph")``
        """
        names: dict[str, Any] = {name: _named(name, text) for name, text in self.functions.items()}
        names |= {name: type(name, (), {}) for name in self.classes}
        return SimpleNamespace(**names, memory=SimpleNamespace(**names))


@cache
def recorded(name: str) -> Surface | None:
    """The surface kept for the backend of that name, or None where only names are known.

    Example: ``recorded("ascend").commit``
    """
    path = _FOLDER / f"{name}.json"
    return Surface(**json.loads(path.read_text())) if path.is_file() else None


def of_module(module: Any) -> Surface:
    """The surface of a module that is loaded, in the same form.

    Example: ``of_module(torch.xpu).functions["synchronize"] == "device="``
    """
    functions: dict[str, str] = {}
    classes: dict[str, dict[str, str]] = {}
    for name, value in vars(module).items():
        if inspect.isclass(value) and (value.__module__ or "").startswith(module.__name__.partition(".")[0]):
            members = {n: getattr(m, "__func__", m) for n, m in vars(value).items()}  # __new__ is a staticmethod
            members = {n: m for n, m in members.items() if inspect.isfunction(m)}
            classes[name] = {n: write(inspect.signature(m), skip=1) for n, m in members.items() if not _special(n)}
        elif inspect.isroutine(value):
            try:
                functions[name] = write(inspect.signature(value))
            except (TypeError, ValueError):
                continue
    return Surface(module.__name__, "live", functions, classes)


def write(signature: inspect.Signature, skip: int = 0) -> str:
    """A signature as a parameter list, without its first ``skip`` parameters.

    Example: ``write(inspect.signature(torch.cuda.synchronize)) == "device="``
    """
    parts = []
    star = False
    for parameter in list(signature.parameters.values())[skip:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        prefix = "*" * ((parameter.kind is parameter.VAR_POSITIONAL) + 2 * (parameter.kind is parameter.VAR_KEYWORD))
        parts.append(prefix + parameter.name + ("" if parameter.default is parameter.empty else "="))
    return ", ".join(parts)


def source_of(name: str, parameters: str, body: str, first: str = "") -> str:
    """Python source of a function with these parameters.

    Example: ``source_of("f", "a, b=", "return a")`` is ``"def f(a, b=None): return a"``
    """
    listed = ", ".join(part for part in (first, parameters.replace("=", "=None")) if part)
    return f"def {name}({listed}): {body}"


def _named(name: str, parameters: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    exec(source_of(name, parameters, f"raise RuntimeError('{name} is known by its signature alone')"), scope)
    function: Callable[..., Any] = scope[name]
    return function


def _special(name: str) -> bool:
    return name.startswith("__") and name not in ("__new__", "__init__")
