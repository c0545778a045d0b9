"""What a backend is known not to do, one line each, read both ways: a new failure and a new pass are both news.

    CASE  STATUS  [torch<2.12]  REASON

CASE is WHAT/NAME/DTYPE/CHECK with the wildcards * and ?; STATUS is one or several, joined by commas, and `pass` among
them says that it depends on the order of events; a condition on the version of PyTorch may follow; the rest of the line
is the reason.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ditorch.conformance.cases import FAILURES, PASS, WHAT, Result

FOLDER = Path(__file__).with_name("ledgers")

EXPECTED = ""
NEW_FAILURE = "unexpected failure"
NEW_PASS = "unexpected pass"
OTHER_FAILURE = "fails otherwise than expected"


@dataclass(frozen=True)
class Entry:
    """One line: which cases, how they fail, in which versions of PyTorch, and why.

    >>> parse("ops/to_sparse/*/*  error  torch>=2.12  no sparse tensors", "soft.txt")[0].reason
    'no sparse tensors'
    """

    pattern: str
    statuses: frozenset[str]
    reason: str
    condition: str = ""

    def applies_to(self, torch_version: str) -> bool:
        """Whether the condition holds (`entry.applies_to("2.13.0+cpu")`)."""
        if not self.condition:
            return True
        relation, wanted = re.fullmatch(r"torch(<|>=)(\d+\.\d+)", self.condition).groups()  # type: ignore[union-attr]
        older = _version(torch_version) < _version(wanted)
        return older if relation == "<" else not older


class Ledger:
    """The lines that hold for one version of PyTorch, applied to results.

    Example: ``Ledger(parse(text, "soft.txt"), torch.__version__).expectation(result)``
    """

    def __init__(self, entries: Iterable[Entry], torch_version: str) -> None:
        self.entries = [entry for entry in entries if entry.applies_to(torch_version)]
        self._patterns = [(re.compile(fnmatch.translate(entry.pattern)), entry) for entry in self.entries]

    def entry_for(self, result: Result) -> Entry | None:
        """The first line that covers a case."""
        text = str(result.case)
        return next((entry for pattern, entry in self._patterns if pattern.match(text)), None)

    def expectation(self, result: Result) -> tuple[str, str]:
        """How a result relates to the ledger, and the reason that the ledger gives for a known failure.

        Example: ``ledger.expectation(result) == ("unexpected pass", "no sparse tensors")``
        """
        if result.status not in FAILURES and result.status != PASS:
            return EXPECTED, ""
        entry = self.entry_for(result)
        if result.status == PASS:
            return (NEW_PASS, entry.reason) if entry and PASS not in entry.statuses else (EXPECTED, "")
        if entry is None:
            return NEW_FAILURE, ""
        return (EXPECTED if result.status in entry.statuses else OTHER_FAILURE), entry.reason


def load(backend: str, path: Path | None = None) -> list[Entry]:
    """The ledger of a backend, empty where there is none; `path` names another file.

    Example: ``load("soft")``
    """
    file = path or FOLDER / f"{backend}.txt"
    if not file.exists():
        if path is not None:
            raise ValueError(f"--ledger {path}: there is no such file")
        return []
    return parse(file.read_text(), file.name)


def parse(text: str, where: str) -> list[Entry]:
    """Lines of a ledger; ValueError with file and line where one cannot be understood.

    Example: ``parse("ops/add/*/out  wrong  it is slow", "mine.txt")``
    """
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            entries.append(_entry(line.split(None, 2), f"{where}:{number}"))
    return entries


def _entry(parts: Sequence[str], where: str) -> Entry:
    if len(parts) != 3:
        raise ValueError(f"{where}: expected CASE STATUS REASON, found {' '.join(parts)!r}")
    pattern, statuses, rest = parts[0], frozenset(parts[1].split(",")), parts[2].strip()
    if pattern.count("/") != 3 or not (pattern.split("/")[0] in WHAT or "*" in pattern.split("/")[0]):
        raise ValueError(f"{where}: {pattern!r} is not WHAT/NAME/DTYPE/CHECK")
    unknown = sorted(statuses - FAILURES - {PASS}) or sorted(statuses - FAILURES if not statuses & FAILURES else ())
    if unknown:
        raise ValueError(f"{where}: {', '.join(unknown)} is no failure; these are: {', '.join(sorted(FAILURES))}")
    condition = ""
    first, _, reason = rest.partition(" ")
    if first.startswith("torch"):
        if not re.fullmatch(r"torch(<|>=)\d+\.\d+", first):
            raise ValueError(f"{where}: {first!r} is no condition; write torch<2.12 or torch>=2.12")
        condition, rest = first, reason.strip()
    if not rest:
        raise ValueError(f"{where}: the reason is missing")
    return Entry(pattern, statuses, rest, condition)


def _version(text: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def draft(results: Iterable[Result]) -> str:
    """Lines for failures that no ledger explains yet, for somebody to give reasons to (`draft(new_failures)`)."""
    return "".join(f"{r.case}  {r.status}  {' '.join(r.message.split())[:200] or 'no message'}\n" for r in results)
