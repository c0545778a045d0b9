"""Settings of the tools: declared here, read and validated at start, with errors that name the variable."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch

from ditorch_common.settings import Registry
from ditorch_common.settings import SettingsError as SettingsError

# -- declarations -----------------------------------------------------------------------------------------

_TOOLS: Final = {  # by the prefix of their variables
    "OP_OBSERVE": "OpObserve",
    "OP_CAPTURE": "OpCapture",
    "OP_TIME_MEASURE": "OpTimeMeasure",
    "OP_OVERFLOW_CHECK": "OpOverflowCheck",
    "OP_AUTOCOMPARE": "OpAutoCompare",
    "OP_FALLBACK": "OpFallback",
    "OP_DTYPE_CAST": "OpDtypeCast",
    "OP_TRACE": "OpTrace",
}
_DTYPES: Final = sorted({str(d).removeprefix("torch.").upper() for d in vars(torch).values() if type(d) is torch.dtype})
_CASTS: Final = "OP_DTYPE_CAST_DICT"
SETTINGS: Final = Registry("op_tools", [*_TOOLS, "OP_TOOL", "AUTOCOMPARE_"], {"DTYPE": _DTYPES})

_declare = SETTINGS.group("All tools", "docs/op_tools.md")
_declare("OP_TOOLS_CONSOLE", "choice", "full", "print each call, the summary, nothing", ("full", "summary", "off"))
_declare("OP_TOOLS_RESULTS_DIR", "path", "op_tools_results", "where results are written")
_declare("OP_TOOLS_INCLUDE_CPU", "flag", 0, "watch operators on the CPU, too")
_declare("OP_TOOLS_MAX_RECORDS", "number", 5_000_000, "records to keep; further ones are dropped")
_declare("OP_TOOLS_NATIVE", "flag", 1, "compile and use the parts in C++ and CUDA")
for _prefix, _tool in _TOOLS.items():
    _declare = SETTINGS.group(_tool, "docs/op_tools.md")
    _declare(f"{_prefix}_LIST", "list", "", "only these operators: names or regular expressions, separated by commas")
    _declare(f"{_prefix}_DISABLE_LIST", "list", "", "not these operators")
_declare = SETTINGS.group("OpCapture", "docs/op_tools.md")
_declare("OP_CAPTURE_FORMAT", "choice", "seed", "files per call, or a store of each content", ("seed", "store"))
_declare("OP_CAPTURE_MAX_GB", "number", "", "GB that a run may capture", computed="by free space")
_declare("OP_CAPTURE_QUEUE_MB", "number", "", "MiB of copies that may wait", minimum=1, computed="by free memory")
_declare("OP_CAPTURE_WHEN_FULL", "choice", "block", "what to do when the queue is full", ("block", "drop"))
_declare("OP_CAPTURE_WRITERS", "number", 2, "threads that write", minimum=1)
_declare = SETTINGS.group("OpAutoCompare", "docs/op_tools.md")
_declare("OP_AUTOCOMPARE_MODE", "choice", "every", "compare every call, or each kind of call once", ("every", "once"))
_declare("OP_AUTOCOMPARE_BUDGET", "factor", "", "compare as much as keeps the run within this factor (2x)")
_declare(
    "OP_AUTOCOMPARE_COVERAGE", "choice", "auto", "elements of a result: all, some, by size", ("auto", "full", "sample")
)
_declare("OP_AUTOCOMPARE_FIRST_LOOK", "choice", "cpu", "where to check a call like an earlier one", ("cpu", "device"))
_declare("OP_AUTOCOMPARE_STANDARD", "choice", "ulp", "the standard that decides", ("ulp", "torch", "dual", "seed"))
_declare("OP_AUTOCOMPARE_KNOWN", "choice", "note", "TF32 that is allowed, and known weak kernels", ("note", "blame"))
_declare("OP_AUTOCOMPARE_REFERENCES", "list", "", "modules that name references (op_tools.reference), module:function")
_declare("OP_AUTOCOMPARE_PROCESSES", "number", "", "worker processes; 0 for none", computed="by cores, in long runs")
_declare("OP_AUTOCOMPARE_THREADS", "number", "", "threads that compare; 0: the run itself", computed="by cores, 1 to 4")
_declare("OP_AUTOCOMPARE_QUEUE_BYTES", "number", 2**30, "bytes of copies that may wait to be compared")
_declare("OP_AUTOCOMPARE_MAX_BYTES", "number", 8 * 2**30, "bytes that the golden run of one call may need")
_declare("OP_AUTOCOMPARE_MAX_SECONDS", "number", 10, "seconds for the probes of one call")
_declare("OP_AUTOCOMPARE_RANK_SECONDS", "number", 30, "seconds to wait for what other ranks tell of a collective")
for _name, _of in (("", "all operators"), ("<OP>_", "one operator")):
    _tolerance = f"{_name}AUTOCOMPARE_ERROR_TOLERANCE"
    _declare(_tolerance, "atol,rtol", "", f"the tolerance that decides for {_of}", computed="the standard decides")
    _declare(f"{_tolerance}_<DTYPE>", "atol,rtol", "", f"the same for {_of} and one dtype", computed="as without dtype")
_declare = SETTINGS.group("OpDtypeCast, and golden runs of OpAutoCompare", "docs/op_tools.md")
_declare(_CASTS, "casts", "", "dtypes to compute in: from->to, separated by commas", computed="16 bits->float32")
_declare(f"<OP>_{_CASTS}", "casts", "", "the same for one operator", computed="as for all operators")

# -- reading ----------------------------------------------------------------------------------------------

read = SETTINGS.read
flag = SETTINGS.flag
number = SETTINGS.number
choice = SETTINGS.choice
_at_start: Mapping[str, str] | None = None


def begin() -> list[str]:
    """Keep the environment as it is now, at the start of a tool; returns one line per misspelt variable, once."""
    global _at_start
    _at_start = MappingProxyType(dict(os.environ))
    native()  # a mistake in it is an error now, not in a thread
    return SETTINGS.new_mistakes()


def environment() -> Mapping[str, str]:
    """The environment when the last tool started, for what is read later; before that, the one of now."""
    return os.environ if _at_start is None else _at_start


def options(variable: str) -> tuple[str, ...]:
    """What a choice may be (`options("OP_AUTOCOMPARE_MODE") == ("every", "once")`)."""
    return SETTINGS[variable].options


@contextlib.contextmanager
def run_defaults(console: str | None) -> Iterator[None]:
    """What holds for tools that `op_tools run` starts: this console level, and its own defaults of some variables."""
    defaults = {"OP_TOOLS_CONSOLE": "summary", "OP_CAPTURE_FORMAT": "store"}
    before = {variable: os.environ.get(variable) for variable in defaults}
    for variable, default in defaults.items():
        os.environ[variable] = before[variable] or default
    os.environ["OP_TOOLS_CONSOLE"] = console or os.environ["OP_TOOLS_CONSOLE"]
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value


def console_level() -> str:
    """`OP_TOOLS_CONSOLE`: full (the default), summary or off, in any case (`console_level() == "full"`)."""
    return choice("OP_TOOLS_CONSOLE", {"OP_TOOLS_CONSOLE": read("OP_TOOLS_CONSOLE").lower()})


def native() -> bool:
    """Whether compiled parts may be built and used, as of the last start (`OP_TOOLS_NATIVE=0` forbids it)."""
    return flag("OP_TOOLS_NATIVE", environment())


def results_dir() -> Path:
    """`OP_TOOLS_RESULTS_DIR` (default `op_tools_results`), checked to be writable (`results_dir() / "x"`).

    The path is absolute: scripts change their folder while tools write.
    """
    folder = Path(read("OP_TOOLS_RESULTS_DIR"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder.absolute()
    except (OSError, RecursionError) as error:  # the second for a path of a thousand folders
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(
            f"OP_TOOLS_RESULTS_DIR={str(folder)[-200:]!r} cannot be written ({reason}); "
            "set OP_TOOLS_RESULTS_DIR to a folder you may write to"
        ) from None


def shown_path(path: Path) -> Path:
    """A path of results as users wrote `OP_TOOLS_RESULTS_DIR`: relative where that is (`shown_path(path)`)."""
    if not Path(read("OP_TOOLS_RESULTS_DIR")).is_absolute():
        with contextlib.suppress(OSError, ValueError):  # the script has gone to another folder
            return path.relative_to(Path.cwd())
    return path


def rank() -> int:
    """Rank of this process, 0 when nothing is distributed (`rank() == 0`)."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


def world_size() -> int:
    """How many ranks there are, 1 when nothing is distributed (`world_size() == 1`)."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdigit() else 1


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
    entries, depth, previous = [""], 0, ""
    for char in text:
        if previous != "\\":
            depth = max(0, depth + (char in "([{") - (char in ")]}"))
        if char == "," and depth == 0:
            entries.append("")
        else:
            entries[-1] += char
        previous = char
    return [e.strip() for e in entries if e.strip()]


def read_list(variable: str) -> list[str]:
    """The entries of a list, which a tool of the user's need not declare (`read_list("OP_CAPTURE_LIST")`)."""
    return split_list(os.environ.get(variable, ""))


def near_misses(pattern: str, names: Iterable[str]) -> list[str]:
    """Up to three names that look like the pattern (`near_misses("torch.adds", {"torch.add"})`)."""
    candidates = sorted(names)
    last = pattern.rsplit(".", 1)[-1].strip("\\$^*+?").lower()
    near = difflib.get_close_matches(pattern, candidates, n=3, cutoff=0.75)
    if last:
        near += [n for n in candidates if n.rsplit(".", 1)[-1].strip("_").lower() == last.strip("_") and n not in near]
    return near[:3]


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
    for entry in filter(str.strip, text.split(",")):
        sides = entry.split("->")
        if len(sides) != 2:
            raise SettingsError(
                f"{source}: {entry.strip()!r} is malformed; write from->to, for example torch.float16->torch.float32"
            )
        mapping[parse_dtype(sides[0], source)] = parse_dtype(sides[1], source)
    return mapping


@dataclasses.dataclass(frozen=True)
class Casts:
    """The dtypes to compute operators in: texts by variable, `<OP>_OP_DTYPE_CAST_DICT` and `OP_DTYPE_CAST_DICT`.

    >>> Casts({"OP_DTYPE_CAST_DICT": "torch.half->torch.float32"}).of("torch.add")
    {torch.float16: torch.float32}
    """

    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_environment(cls) -> Casts:
        """Read all of them; a mistake in any is an error now (`Casts.from_environment()`)."""
        texts = {v: t.strip() for v, t in os.environ.items() if v.endswith(_CASTS) and SETTINGS.find(v) and t.strip()}
        for variable, text in texts.items():
            parse_dtype_map(text, variable)
        return cls(texts)

    def text(self, op: str) -> tuple[str, str]:
        """The variable that counts for an operator, and its text (`casts.text("torch.add")`)."""
        own = f"{op_prefix(op)}_{_CASTS}"
        text = self.texts.get(own, "").strip()
        return (own, text) if text else (_CASTS, self.texts.get(_CASTS, "").strip())

    def of(self, op: str) -> dict[torch.dtype, torch.dtype] | None:
        """The casts for an operator, None where nothing is set (`casts.of("torch.add")`)."""
        variable, text = self.text(op)
        return parse_dtype_map(text, variable) if text else None


def tolerances() -> dict[str, tuple[float, float]]:
    """The tolerances that are set, by variable (`tolerances() == {"AUTOCOMPARE_ERROR_TOLERANCE": (1e-4, 1e-5)}`)."""
    return {
        variable: parse_tolerance(text, variable)
        for variable, text in os.environ.items()
        if "AUTOCOMPARE_ERROR_TOLERANCE" in variable and text.strip()
    }


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
