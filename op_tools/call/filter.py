"""Which operators a tool applies to."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..settings import SettingsError, near_misses, read_list, split_list
from .functions import watched_name


class OpFilter:
    """Full names or regular expressions of operators, to include and to leave out.

    >>> OpFilter(["torch.add", "torch.functional.norm"]).matches("torch.norm")
    True
    """

    def __init__(
        self,
        include: Iterable[str] | str = (),
        exclude: Iterable[str] | str = (),
        include_from: str = "ops",
        exclude_from: str = "disable",
    ) -> None:
        self.include = _compile(include, include_from)
        self.exclude = _compile(exclude, exclude_from)
        self._sources = ((include_from, self.include), (exclude_from, self.exclude))
        self._used: set[str] = set()
        self._seen: set[str] = set()

    @classmethod
    def from_environment(
        cls, prefix: str, ops: Iterable[str] | str | None = None, disable: Iterable[str] | str | None = None
    ) -> OpFilter:
        """Arguments win over `<PREFIX>_LIST` and `<PREFIX>_DISABLE_LIST` (`from_environment("OP_CAPTURE")`)."""
        include_from, exclude_from = f"{prefix}_LIST", f"{prefix}_DISABLE_LIST"
        ops = read_list(include_from) if ops is None else ops
        disable = read_list(exclude_from) if disable is None else disable
        return cls(ops, disable, include_from, exclude_from)

    def matches(self, name: str) -> bool:
        """Whether the tool applies to the operator of this name (`f.matches("torch.Tensor.add")`)."""
        included = self._fitting(self.include, name)
        return not self.excludes(name) and bool(included or not self.include)

    def could_match(self, name: str) -> bool:
        """The same of an operator that may never run: it does not count as seen (`f.could_match("torch.add")`)."""
        included, excluded = (_fitting(patterns, name) for patterns in (self.include, self.exclude))
        return not excluded and bool(included or not self.include)

    def excludes(self, name: str) -> bool:
        """Whether the operator of this name is left out (`f.excludes("torch.Tensor.add")`)."""
        return bool(self._fitting(self.exclude, name))

    def _fitting(self, patterns: dict[str, tuple[str, re.Pattern[str]]], name: str) -> set[str]:
        self._seen.add(name)
        found = _fitting(patterns, name)
        self._used |= found
        return found

    def unused(self) -> list[str]:
        """One line for each pattern that matched nothing, with the nearest names that were seen."""
        lines = []
        for source, patterns in self._sources:
            for text in [t for t in patterns if t not in self._used]:
                near = near_misses(text, self._seen)
                hint = f"; did you mean {', '.join(near)}?" if near else "; no operator with a similar name ran"
                lines.append(f"{source}: {text!r} matched no operator{hint}")
        return lines


def _fitting(patterns: dict[str, tuple[str, re.Pattern[str]]], name: str) -> set[str]:
    return {text for text, (meant, p) in patterns.items() if name in (text, meant) or p.fullmatch(name)}


def _compile(texts: Iterable[str] | str, source: str) -> dict[str, tuple[str, re.Pattern[str]]]:
    """By the text of an entry: the name that it means if it is the name of a function, and its regular expression."""
    compiled = {}
    for text in split_list(texts) if isinstance(texts, str) else texts:
        if not isinstance(text, str):
            raise SettingsError(f"{source}: {text!r} is not the name of an operator (a string is needed)")
        try:
            compiled[text] = watched_name(text), re.compile(text)
        except re.error as error:
            raise SettingsError(f"{source}: {text!r} is not a valid regular expression: {error}") from None
    return compiled
