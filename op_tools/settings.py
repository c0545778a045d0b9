"""Settings of the tools: read once at start, validated, with errors that name the variable."""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch


class SettingsError(ValueError):
    """A setting is wrong; the message names the variable, the value and what would be right."""


CONSOLE_LEVELS = ("full", "summary", "off")


def read(variable: str, default: str = "") -> str:
    """The value of an environment variable, stripped (`read("OP_TOOLS_CONSOLE", "full")`)."""
    return os.environ.get(variable, default).strip()


def console_level() -> str:
    """`OP_TOOLS_CONSOLE`: full (the default), summary or off (`console_level() == "full"`)."""
    level = read("OP_TOOLS_CONSOLE", "full").lower() or "full"
    if level not in CONSOLE_LEVELS:
        raise SettingsError(f"OP_TOOLS_CONSOLE={level!r} is unknown; choose one of {', '.join(CONSOLE_LEVELS)}")
    return level


def flag(variable: str, default: bool = False) -> bool:
    """A yes/no variable (`flag("OP_TOOLS_INCLUDE_CPU")`)."""
    text = read(variable).lower()
    if text in ("", "0", "false", "no", "off"):
        return default if text == "" else False
    if text in ("1", "true", "yes", "on"):
        return True
    raise SettingsError(f"{variable}={text!r} is neither yes nor no; use 1 or 0")


def number(variable: str, default: float, minimum: float = 0) -> float:
    """A number of at least `minimum` (`number("OP_CAPTURE_QUEUE_MB", 1024)`)."""
    text = read(variable)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise SettingsError(f"{variable}={text!r} is not a number") from None
    if not value >= minimum:
        raise SettingsError(f"{variable}={text!r} must be at least {minimum:g}")
    return value


def choice(variable: str, options: Sequence[str]) -> str:
    """One of a few words; the first is the default (`choice("OP_CAPTURE_WHEN_FULL", ("block", "drop"))`)."""
    text = read(variable, options[0]) or options[0]
    if text not in options:
        raise SettingsError(f"{variable}={text!r} is unknown; choose one of {', '.join(options)}")
    return text


def results_dir(create: bool = True) -> Path:
    """`OP_TOOLS_RESULTS_DIR` (default `op_tools_results`), checked to be writable (`results_dir() / "x"`)."""
    folder = Path(read("OP_TOOLS_RESULTS_DIR", "op_tools_results") or "op_tools_results")
    if create:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise SettingsError(
                f"OP_TOOLS_RESULTS_DIR={str(folder)!r} cannot be written ({error.strerror or error}); "
                "set OP_TOOLS_RESULTS_DIR to a folder you may write to"
            ) from None
    return folder


def rank() -> int:
    """Rank of this process, 0 when nothing is distributed (`rank() == 0`)."""
    dist = getattr(torch, "distributed", None)
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


def process_label() -> str:
    """Names this process in file names: its pid, with the rank where there are several (`"4711"`)."""
    world = os.environ.get("WORLD_SIZE", "1")
    if world.isdigit() and int(world) > 1:
        return f"{os.getpid()}_rank{rank()}"
    return str(os.getpid())


def split_list(text: str) -> list[str]:
    """Comma-separated entries; commas inside brackets belong to a regular expression.

    >>> split_list("torch.add, torch.sub{1,2}")
    ['torch.add', 'torch.sub{1,2}']
    """
    entries, depth, current = [], 0, ""
    previous = ""
    for char in text:
        if previous != "\\":
            if char in "([{":
                depth += 1
            elif char in ")]}":
                depth = max(0, depth - 1)
        if char == "," and depth == 0:
            entries.append(current)
            current = ""
        else:
            current += char
        previous = char
    entries.append(current)
    return [e.strip() for e in entries if e.strip()]


class OpFilter:
    """Which operators a tool applies to: full names or regular expressions, to include and to leave out.

    >>> OpFilter(["torch.add"], []).matches("torch.add")
    True
    """

    def __init__(
        self,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        include_from: str = "ops",
        exclude_from: str = "disable",
    ) -> None:
        self.include = _compile(include, include_from)
        self.exclude = _compile(exclude, exclude_from)
        self.include_from, self.exclude_from = include_from, exclude_from
        self._used: set[str] = set()
        self._seen: set[str] = set()

    @classmethod
    def from_environment(
        cls, prefix: str, ops: Iterable[str] | None = None, disable: Iterable[str] | None = None
    ) -> OpFilter:
        """Arguments win over `<PREFIX>_LIST` and `<PREFIX>_DISABLE_LIST` (`from_environment("OP_CAPTURE")`)."""
        include_from, exclude_from = f"{prefix}_LIST", f"{prefix}_DISABLE_LIST"
        include = split_list(read(include_from)) if ops is None else _names(ops)
        exclude = split_list(read(exclude_from)) if disable is None else _names(disable)
        return cls(include, exclude, include_from, exclude_from)

    def matches(self, name: str) -> bool:
        """Whether the tool applies to the operator of this name (`f.matches("torch.Tensor.add")`)."""
        self._seen.add(name)
        wanted = not self.include
        for pattern in self.include:
            if pattern.pattern == name or pattern.fullmatch(name):
                self._used.add(pattern.pattern)
                wanted = True
        for pattern in self.exclude:
            if pattern.pattern == name or pattern.fullmatch(name):
                self._used.add(pattern.pattern)
                return False
        return wanted

    def unused(self) -> list[str]:
        """One line for each pattern that matched nothing, with the nearest names that were seen."""
        lines = []
        for source, patterns in ((self.include_from, self.include), (self.exclude_from, self.exclude)):
            for pattern in patterns:
                if pattern.pattern in self._used:
                    continue
                near = near_misses(pattern.pattern, self._seen)
                hint = f"; did you mean {', '.join(near)}?" if near else "; no operator with a similar name ran"
                lines.append(f"{source}: {pattern.pattern!r} matched no operator{hint}")
        return lines


def near_misses(pattern: str, names: Iterable[str]) -> list[str]:
    """Up to three names that look like the pattern (`near_misses("torch.adds", {"torch.add"})`)."""
    candidates = sorted(names)
    last = pattern.rsplit(".", 1)[-1].strip("\\$^*+?").lower()
    near = difflib.get_close_matches(pattern, candidates, n=3, cutoff=0.75)
    for name in candidates:
        if len(near) >= 3:
            break
        if last and name.rsplit(".", 1)[-1].strip("_").lower() == last.strip("_") and name not in near:
            near.append(name)
    return near


def _names(ops: Iterable[str] | str) -> list[str]:
    return split_list(ops) if isinstance(ops, str) else list(ops)


def _compile(patterns: Iterable[str], source: str) -> list[re.Pattern[str]]:
    compiled = []
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise SettingsError(f"{source}: {pattern!r} is not the name of an operator (a string is needed)")
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise SettingsError(f"{source}: {pattern!r} is not a valid regular expression: {error}") from None
    return compiled


def parse_dtype(text: str, source: str) -> torch.dtype:
    """A dtype by its name, with or without `torch.` (`parse_dtype("torch.half", "X") is torch.float16`)."""
    name = text.strip().removeprefix("torch.")
    dtype = getattr(torch, name, None) if name else None
    if not isinstance(dtype, torch.dtype):
        known = [n for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype)]
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"; did you mean {', '.join('torch.' + n for n in near)}?" if near else ""
        raise SettingsError(f"{source}: {text.strip()!r} is not a torch dtype{hint}")
    return dtype


def parse_dtype_map(text: str, source: str) -> dict[torch.dtype, torch.dtype]:
    """`torch.float16->torch.float32,...` as a dict.

    >>> parse_dtype_map("torch.half->torch.float32", "OP_DTYPE_CAST_DICT")
    {torch.float16: torch.float32}
    """
    mapping: dict[torch.dtype, torch.dtype] = {}
    for entry in text.split(","):
        if not entry.strip():
            continue
        sides = entry.split("->")
        if len(sides) != 2:
            raise SettingsError(
                f"{source}: {entry.strip()!r} is malformed; write from->to, for example torch.float16->torch.float32"
            )
        mapping[parse_dtype(sides[0], source)] = parse_dtype(sides[1], source)
    return mapping


def op_prefix(name: str) -> str:
    """The part of an operator's name that its own variables start with (`"torch.add"` gives `"ADD"`)."""
    return name.rsplit(".", 1)[-1].upper()


def parse_tolerance(text: str, source: str) -> tuple[float, float]:
    """`atol,rtol` as two numbers (`parse_tolerance("1e-3,1e-4", "X") == (1e-3, 1e-4)`)."""
    try:
        atol, rtol = (float(part) for part in text.split(","))
    except ValueError:
        raise SettingsError(f"{source}={text!r} is malformed; write atol,rtol, for example 1e-3,1e-4") from None
    if not (atol >= 0 and rtol >= 0):
        raise SettingsError(f"{source}={text!r}: tolerances must not be negative")
    return atol, rtol
