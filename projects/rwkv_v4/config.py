"""Configurations as Python files: lazy objects, dotted overrides, one yaml file with everything in it.

A config file defines ``model``, ``data``, ``optim`` and ``train``; ``LazyCall(f)(...)`` writes a call down without
making it. omegaconf and hydra-core do the work where they are installed. Without them, a few lines below do the part
that these configs use (dotted overrides, ``${a.b}`` references, ``_target_`` calls): a bare machine can train too.
A file in the notation of the training log is read by ``libai_config`` instead, without running it.
"""

from __future__ import annotations

import ast
import copy
import difflib
import importlib
import json
import math
import os
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

SECTIONS = ("model", "data", "optim", "train")
TARGET = "_target_"


class ConfigError(ValueError):
    """A config file or an override cannot be used; the message names it and the remedy."""


def LazyCall(target: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Write a call down instead of making it.

    >>> LazyCall(dict)(a=1)
    {'_target_': 'builtins.dict', 'a': 1}
    """
    name = f"{target.__module__}.{target.__qualname__}"
    return lambda **arguments: {TARGET: name, **arguments}


def load(path: str | Path, options: list[str]) -> Config:
    """The configuration of a run: a config file of either kind, with the changes of the command line.

    >>> load("configs/tiny.py", ["train.lr=4e-4"]).optim.lr
    0.0004
    """
    from . import libai_config

    found = find_config(path)
    if libai_config.recognises(found.read_text(encoding="utf-8")):
        return libai_config.load(found, options, int(os.environ.get("WORLD_SIZE", 1)))
    config = Config(get_config(found))
    config.override(options)
    return config


def get_config(path: str | Path) -> dict[str, Any]:
    """The sections of a config file, as plain data to change and reuse in another config file.

    >>> get_config("configs/enwik8.py")["train"]["lr"]
    0.0008
    """
    found = find_config(path)
    namespace = runpy.run_path(str(found))
    missing = [name for name in SECTIONS if name not in namespace]
    if missing:
        raise ConfigError(f"{found} defines no {' and no '.join(missing)}; a config has {', '.join(SECTIONS)}")
    return {name: copy.deepcopy(namespace[name]) for name in SECTIONS}


def find_config(path: str | Path) -> Path:
    """A config file, looked for here and in the project."""
    for base in (Path(), Path(__file__).parent, Path(__file__).parent / "configs"):
        if (base / path).is_file():
            return base / path
    known = sorted(p.name for p in (Path(__file__).parent / "configs").glob("*.py") if p.name != "__init__.py")
    raise ConfigError(f"no config file {path}; the project has configs/ {', '.join(known)}")


class Config:
    """The configuration of a run: read with attributes, changed with dotted overrides.

    >>> config = Config({"train": {"lr": 1.0}, "optim": {"lr": "${train.lr}"}})
    >>> config.override(["train.lr=4e-4"])
    >>> config.optim.lr
    0.0004
    """

    def __init__(self, sections: dict[str, Any], library: ModuleType | bool | None = True) -> None:
        self._omegaconf = _optional("omegaconf") if library is True else (library or None)
        self._tree: Any = self._omegaconf.OmegaConf.create(sections) if self._omegaconf else copy.deepcopy(sections)
        self.source: Config | None = None
        """The options under the names of the file, where these are not this trainer's own."""
        self.notes: list[str] = []
        """What the user should know about how the file was read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Node(self.plain()[name]) if name in self._tree else _missing(name, self._tree)

    def override(self, options: list[str]) -> None:
        """Apply ``a.b=value`` options; a key that does not exist is an error that names the nearest one."""
        known = dict(leaves(self.plain(resolve=False)))
        for option in options:
            key, equals, value = option.partition("=")
            key = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", key)
            key = "train.graph_debug" if key == "train.graph.debug" else key
            if not equals:
                raise ConfigError(f"{option!r}: an override is key=value, as in train.lr=4e-4")
            if key not in known:
                near = difflib.get_close_matches(key, known, n=3) or sorted(known)[:8]
                raise ConfigError(f"{key!r} is not in the configuration; did you mean {', '.join(near)}?")
            if self._omegaconf:
                self._omegaconf.OmegaConf.update(self._tree, key, _value(value))
            else:
                *path, last = [int(p) if p.isdigit() else p for p in re.findall(r"[^.\[\]]+", key)]
                place = self._tree
                for part in path:
                    place = place[part]
                place[last] = _value(value)

    def plain(self, resolve: bool = True) -> dict[str, Any]:
        """As dicts, lists and numbers; with references replaced by what they refer to."""
        if self._omegaconf:
            tree: dict[str, Any] = self._omegaconf.OmegaConf.to_container(self._tree, resolve=resolve)
        else:
            tree = _resolved(self._tree, self._tree) if resolve else copy.deepcopy(self._tree)
        return tree

    def build(self, section: str, **more: Any) -> Any:
        """Make the call that a section writes down, with more arguments than it names."""
        arguments = self.plain()[section]
        hydra = _optional("hydra.utils") if self._omegaconf else None
        if hydra:
            partial = hydra.instantiate({**arguments, "_partial_": True}, _convert_="all")
            return partial(**more)
        target = arguments.pop(TARGET)
        module, _, name = target.rpartition(".")
        return getattr(importlib.import_module(module), name)(**{**arguments, **more})

    def yaml(self) -> str:
        """As yaml text, references resolved; under the names of the file."""
        return self.source.yaml() if self.source else "".join(_yaml_lines(self.plain()))


class _Node:
    """Attribute access to a part of the configuration."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = self._values[name] if name in self._values else _missing(name, self._values)
        return _Node(value) if isinstance(value, dict) else value


def _missing(name: str, among: Any) -> Any:
    raise ConfigError(f"the configuration has no {name!r} here, only {', '.join(map(str, among))}")


def _optional(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The options of a configuration, with dotted names.

    >>> list(leaves({"a": {"b": 1}, "c": [{"d": 2}], "e": [3, 4]}))
    [('a.b', 1), ('c[0].d', 2), ('e', [3, 4])]
    """
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for i, item in enumerate(value):
                yield from leaves(item, f"{prefix}{key}[{i}].")
        else:
            yield prefix + key, value


def _value(text: str) -> Any:
    """Python's literals, yaml's words for true, false and none, and otherwise a string."""
    words = {"true": True, "false": False, "null": None, "none": None, "": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return list(value) if isinstance(value, tuple) else value


def _resolved(value: Any, root: Any) -> Any:
    if isinstance(value, dict):
        return {k: _resolved(v, root) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_resolved(v, root) for v in value]
    if isinstance(value, str) and value.startswith("${") and value.endswith("}"):
        found = root
        for part in value[2:-1].split("."):
            found = found[part] if part in found else _missing(part, found)
        return _resolved(found, root)
    return value


def _yaml_lines(tree: dict[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:\n"
            yield from _yaml_lines(value, indent + "  ")
        else:
            yield f"{indent}{key}: {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        text = repr(value)  # yaml 1.1 takes 8e-05 for a string: it wants the dot
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    return json.dumps(value, ensure_ascii=False)
