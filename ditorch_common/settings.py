"""Settings in environment variables: declared once, read by name, listed; a misspelt variable is reported.

The settings of ditorch are declared here, so that they can be listed without activating it.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

_TYPO: Final = 2  # adjacent letters that one mistake concerns: two are swapped, say
_TAIL_TYPO: Final = 3  # the same after the name of an operator: LINEAR_DTYPE_CAST_DICT lacks "OP_"
_MAX_DISTANCE: Final = 3  # edits; a name that is further away is not suggested
_MAX_SUGGESTIONS: Final = 3


class SettingsError(ValueError, AssertionError):
    """A setting is wrong; the message names the variable, the value and what would be right.

    An AssertionError as well, which the first releases raised.
    """


@dataclasses.dataclass(frozen=True)
class Setting:
    """One variable, or a family of them: `<OP>` in a name stands for any operator, `<DTYPE>` for any dtype.

    `default` is written as in the environment. Where it depends on the machine, it is empty and `computed` explains it.
    """

    name: str
    kind: str  # text, flag, number, choice, list, path, ...
    default: str
    help: str
    group: str
    documented: str  # the file that documents it, from the root of the repository
    options: tuple[str, ...] = ()
    minimum: float = 0.0
    computed: str = ""
    internal: bool = False  # between processes of ours: not listed, not documented

    @property
    def is_family(self) -> bool:
        """Whether the name is a pattern (`SETTINGS["<OP>_OP_DTYPE_CAST_DICT"].is_family`)."""
        return "<" in self.name


class Registry:
    """The settings of one package.

    >>> registry = Registry("demo", ["DEMO_"])
    >>> declare = registry.group("All", "README.md")
    >>> declare("DEMO_SIZE", "number", 3, "how large")
    >>> registry.number("DEMO_SIZE", environment={"DEMO_SIZE": "4"})
    4.0
    >>> registry.misspelt(["DEMO_SZIE", "PATH"])
    ['DEMO_SZIE is not a setting of demo; did you mean DEMO_SIZE?']
    """

    def __init__(
        self, package: str, prefixes: Sequence[str], values: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        """`prefixes` belong to the package: what begins with one must be declared. `values` are those of `<DTYPE>`."""
        self.package = package
        self._prefixes = tuple(prefixes)
        self._values = dict(values or {})
        self._settings: dict[str, Setting] = {}
        self._families: list[tuple[re.Pattern[str], Setting]] = []
        self._reported: set[str] = set()

    def __iter__(self) -> Iterator[Setting]:
        return iter(self._settings.values())

    def __getitem__(self, name: str) -> Setting:
        return self._settings[name]

    def group(self, title: str, documented: str) -> Callable[..., None]:
        """A function that declares settings under one title (`declare = registry.group("OpCapture", "docs/x.md")`)."""

        def declare(
            name: str, kind: str, default: object, help: str, options: tuple[str, ...] = (), **more: Any
        ) -> None:
            self.declare(Setting(name, kind, str(default), help, title, documented, options, **more))

        return declare

    def declare(self, setting: Setting) -> None:
        """Add a setting; a second one of the same name is refused."""
        if setting.name in self._settings:
            raise ValueError(f"{setting.name} is declared twice")
        self._settings[setting.name] = setting
        if setting.is_family:
            self._families.append((re.compile(self._expression(setting.name)), setting))

    def _expression(self, name: str) -> str:
        def one(part: str) -> str:
            if not part.startswith("<"):
                return re.escape(part)
            values = self._values.get(part[1:-1])
            return f"(?:{'|'.join(values)})" if values else r"(?P<op>[A-Z0-9_]+)"

        return "".join(map(one, re.split(r"(<\w+>)", name)))

    def find(self, variable: str) -> Setting | None:
        """The setting that a variable sets, or None (`registry.find("LINEAR_OP_DTYPE_CAST_DICT")`)."""
        if variable in self._settings:
            return self._settings[variable]
        for pattern, setting in self._families:
            match = pattern.fullmatch(variable)
            # OP_AUTOCOMPARE_ERROR_TOLERANCE is a mistake, not the tolerance of an operator OP
            if match and match.groupdict().get("op") != "OP":
                return setting
        return None

    def variables_of(self, setting: Setting, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The variables that are set for a setting; a family may have several (`registry.variables_of(setting)`)."""
        names = environment if setting.is_family else [setting.name]
        found = {name: environment.get(name, "").strip() for name in sorted(names) if self.find(name) is setting}
        return {name: text for name, text in found.items() if text}

    # -- reading ----------------------------------------------------------------------------------------

    def read(self, variable: str, environment: Mapping[str, str] = os.environ) -> str:
        """The value, stripped, or the default where there is none (`registry.read("DEMO_SIZE")`)."""
        default = self._settings[variable].default
        return environment.get(variable, "").strip() or default

    def flag(self, variable: str, environment: Mapping[str, str] = os.environ) -> bool:
        """A yes/no setting (`SETTINGS.flag("OP_TOOLS_INCLUDE_CPU")`)."""
        text = self.read(variable, environment).lower()
        if text in ("0", "false", "no", "off"):
            return False
        if text in ("1", "true", "yes", "on"):
            return True
        raise SettingsError(f"{variable}={text!r} is neither yes nor no; use 1 or 0")

    def number(self, variable: str, computed: float = 0.0, environment: Mapping[str, str] = os.environ) -> float:
        """A number, not below the declared minimum; `computed` where no default is declared."""
        text = self.read(variable, environment)
        if not text:
            return computed
        minimum = self._settings[variable].minimum
        try:
            value = float(text)
        except ValueError:
            raise SettingsError(f"{variable}={text!r} is not a number") from None
        if not value >= minimum:
            raise SettingsError(f"{variable}={text!r} must be at least {minimum:g}")
        return value

    def choice(self, variable: str, environment: Mapping[str, str] = os.environ) -> str:
        """One of the declared options (`SETTINGS.choice("OP_CAPTURE_WHEN_FULL")`)."""
        text, options = self.read(variable, environment), self._settings[variable].options
        if text not in options:
            raise SettingsError(f"{variable}={text!r} is unknown; choose one of {', '.join(options)}")
        return text

    # -- misspelt variables -----------------------------------------------------------------------------

    def misspelt(self, variables: Iterable[str]) -> list[str]:
        """One line for each undeclared variable that seems to be meant for the package (`misspelt(os.environ)`)."""
        spellings, tails = self._spellings()
        lines = []
        for variable in sorted(variables):
            if self.find(variable) is not None:
                continue
            splits = [(variable[:i], variable[i + 1 :]) for i, letter in enumerate(variable) if letter == "_" and i]
            near = [name for name in _similar(variable, spellings, _TYPO) if _distance(variable, name) == 1]
            for op, rest in splits:
                if set(op.split("_")) != {"OP"}:
                    near += [f"{op}_{tail}" for tail in _similar(rest, tails, _TAIL_TYPO)]
            ours = variable.startswith(self._prefixes) or any(rest.startswith(tails) for _, rest in splits)
            if near or ours:
                lines.append(f"{variable} is not a setting of {self.package}; {_hint(variable, near or spellings)}")
        return lines

    def _spellings(self) -> tuple[list[str], tuple[str, ...]]:
        """All names, with the values that `<DTYPE>` may have, and what may follow the name of an operator."""
        names = []
        for setting in self._settings.values():
            holders = re.findall(r"<(\w+)>", setting.name)
            known = [holder for holder in holders if holder in self._values]
            if not known:
                names.append(setting.name)
            for holder in known:
                names += [setting.name.replace(f"<{holder}>", value) for value in self._values[holder]]
        return [n for n in names if "<" not in n], tuple(n.partition("_")[2] for n in names if n.startswith("<"))

    def new_mistakes(self) -> list[str]:
        """What `misspelt` finds in the environment, each variable once, in the first process of a run only."""
        if os.environ.get("RANK", "0") not in ("", "0") or multiprocessing.parent_process() is not None:
            return []
        new = set(os.environ) - self._reported
        self._reported |= new
        return self.misspelt(new)


def _similar(name: str, others: Iterable[str], letters: int) -> list[str]:
    """Those that differ from a name in one place only, in at most so many letters."""
    least, most, first, last = len(name) - letters, len(name) + letters, name[:1], name[-1:]
    # what differs in one place has the same beginning or the same end: most need no closer look
    likely = [b for b in others if least <= len(b) <= most and (b[:1] == first or b[-1:] == last or len(b) <= letters)]
    return [other for other in likely if _differing(name, other) <= letters]


def _differing(a: str, b: str) -> int:
    """How many letters lie between the same beginning and the same end of two names."""
    start = _same_start(a, b)
    end = _same_start(a[start:][::-1], b[start:][::-1])
    return max(len(a), len(b)) - start - end


def _same_start(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _distance(a: str, b: str) -> int:
    """How many letters must be changed, inserted, removed or swapped with the next one."""
    before, row = [0] * (len(b) + 1), list(range(len(b) + 1))
    for i, x in enumerate(a):
        last, before, row = before, row, [i + 1]
        for j, y in enumerate(b):
            row.append(min(before[j + 1] + 1, row[j] + 1, before[j] + (x != y)))
            if i and j and x == b[j - 1] and a[i - 1] == y:
                row[-1] = min(row[-1], last[j - 1] + 1)
    return row[-1]


def _hint(variable: str, names: Iterable[str]) -> str:
    alike = [name for name in dict.fromkeys(names) if abs(len(name) - len(variable)) <= _MAX_DISTANCE]
    distances = {name: _distance(variable, name) for name in alike}
    least = min(distances.values(), default=_MAX_DISTANCE + 1)
    if least > _MAX_DISTANCE:
        return "`op_tools settings` lists them"
    nearest = [name for name, distance in distances.items() if distance == least]
    return f"did you mean {' or '.join(nearest[:_MAX_SUGGESTIONS])}?"


# -- the settings of ditorch ------------------------------------------------------------------------------

DITORCH: Final = Registry("ditorch", ["DITORCH_"])

_declare = DITORCH.group("ditorch", "docs/device-layer.md")
_declare(
    "DITORCH_DEVICE", "text", "", "the backend to use, by its name or device type", computed="the only accelerator"
)
_declare("DITORCH_DISABLE_MOCK", "flag", 0, "load the vendor's package, patch nothing")
_declare("DITORCH_SHOW_DEVICE_AS_CUDA", "flag", 1, "tensors show their device as cuda")
_declare("DITORCH_REDUCE_FP32", "flag", 0, "sum half-precision tensors in float32 in collectives")
_declare("DITORCH_QUIET", "flag", 0, "write no lines to standard error")

_declare = DITORCH.group("ditorch: the software accelerator", "ditorch/soft/README.md")
_declare(
    "DITORCH_SOFT_DEVICES", "number", "", "number of devices, 1 to 64", computed="1, or torchrun's ranks", minimum=1
)
_declare("DITORCH_SOFT_MEMORY_LIMIT", "bytes", "", "bytes that each device may hold", computed="the host's memory")
_declare("DITORCH_SOFT_SHARED_RANDOM", "flag", 0, "draw from the CPU's generator: a run repeats the CPU's to the digit")
_declare("DITORCH_SOFT_FAULTS", "faults", "", "faults to plant", computed="none")
_declare("DITORCH_CACHE_DIR", "path", "", "where compiled libraries are kept", computed="~/.cache/ditorch")

_declare = DITORCH.group("ditorch: between its own processes", "ditorch/conformance/native_names.py")
_declare("DITORCH_CONFORMANCE_DIARY", "path", "", "where a test run notes what it did", internal=True)
_declare("DITORCH_CONFORMANCE_SELECTION", "path", "", "the file that names the tests to run", internal=True)
