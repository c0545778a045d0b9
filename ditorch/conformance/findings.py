"""What a hunt found, for those who read it: one line each in a file, and a script each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from ditorch.conformance.cases import CRASH, ERROR, TIMEOUT, WRONG, Case, Result
from ditorch.conformance.ledger import Ledger

FILE: Final = "findings.txt"
_CHECKS: Final = {"plain": "forward", "out": "out", "in place": "inplace", "backward": "backward"}
_OFF: Final = re.compile(r"largest difference (\S+?),.*?, (\S+) times what rounding explains")
_LONGEST: Final = 240


class Found(NamedTuple):
    """One call that is wrong: the round that found it, what is wrong, how far it is off, and its script.

    >>> Found(Case("hunt", "add", "-", "round-1"), "backward, float32, (2, 3): off", "0.5, 9 times the bound").operator
    'add'
    """

    case: Case
    message: str
    off: str = ""
    script: str = ""

    @property
    def operator(self) -> str:
        """Its name in PyTorch's database."""
        return self.case.name

    @property
    def file(self) -> str:
        """The name of its script."""
        way = re.sub(r"\W+", "-", self.message.partition(",")[0])
        return f"{self.operator}-{self.case.check}-{way}.py".replace("/", "_")

    def known(self, ledger: Ledger) -> str:
        """What the ledger says about this operator called in this way, in the hunt or in a plain run."""
        way, _, rest = self.message.partition(", ")
        dtype = rest.partition(",")[0]
        for case in (self.case, Case("ops", self.operator, dtype, _CHECKS.get(way, "forward"))):
            entry = ledger.entry_for(Result(case, WRONG))
            if entry is not None and WRONG in entry.statuses:
                return entry.reason
        return ""

    def line(self, ledger: Ledger) -> str:
        """Operator, call, how far it is off, and what is known of it, on one line."""
        known = self.known(ledger)
        parts = [self.operator, _short(self.message), self.off, f"known: {known}" if known else "new", self.case.check]
        return " | ".join(part for part in parts if part)


def of(result: Result) -> Iterator[Found]:
    """The findings of one round (`list(of(result))`); a device that was lost, a crash and a hang are findings too."""
    if result.status in (ERROR, CRASH, TIMEOUT):
        script = result.details[1] if result.status == ERROR and len(result.details) == 2 else ""
        yield Found(result.case, f"{result.status}: {result.message}", "", script)
    if result.status != WRONG:
        return
    pairs = list(zip(result.details[::2], result.details[1::2])) or [("", "")]
    messages = result.message.split(" | ") if len(pairs) > 1 else [result.message]
    for message, (details, script) in zip(messages, pairs):
        off = _OFF.search(details)
        yield Found(result.case, message, f"off by {off[1]}, {off[2]} x the bound" if off else "", script)


def write(folder: Path, results: Iterable[Result], ledger: Ledger) -> int:
    """Write the lines and the scripts of a hunt; how many findings there are (`write(folder, results, ledger)`)."""
    found = sorted((one for result in results for one in of(result)), key=lambda one: (one.operator, one.case.check))
    lines = [one.line(ledger) for one in found]
    (folder / FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for one in found:
        if one.script:
            path = folder / "scripts" / one.file
            path.parent.mkdir(exist_ok=True)
            path.write_text(one.script, encoding="utf-8")
    return len(found)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."
