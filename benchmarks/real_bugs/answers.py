"""What one way of looking says about one bug, and the table of all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.real_bugs.bugs import Bug


@dataclass
class Answer:
    """What was said about a bug.

    >>> str(Answer(hits=4, found=True, right=True, placed=True))
    'yes'
    """

    hits: int = 0  # calls that the planted fault changed
    found: bool = False
    right: bool = False  # the operator and the phase that are to be blamed
    placed: bool = True  # the module and the line, where the way names them
    others: list[str] = field(default_factory=list)  # what was blamed besides
    reproduced: str = ""  # exit status of the script, with the fault and without
    note: str = ""
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """Found, blamed on the right operator at the right place, and nothing else blamed."""
        return self.found and self.right and self.placed and not self.others

    def __str__(self) -> str:
        if self.note and not self.found:
            return self.note
        if not self.found:
            return "no" if self.hits else "not met"
        parts = ["yes" if self.right else "wrong blame"]
        parts += [] if self.placed else ["other place"]
        parts += [f"+{len(self.others)}"] if self.others else []
        parts += ["script fails"] if self.reproduced not in ("", "1/0") else []
        return ", ".join(parts)


def read(path: Path) -> dict[tuple[int, str], Answer]:
    """The answers in a file by number of the bug and way."""
    found: dict[tuple[int, str], Answer] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        row: dict[str, Any] = json.loads(line)
        key = (row.pop("number"), row.pop("way"))
        found[key] = Answer(**row)
    return found


def add(path: Path, number: int, way: str, answer: Answer) -> None:
    """Write one answer to the end of a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"number": number, "way": way, **asdict(answer)}) + "\n")


def table(bugs: Sequence[Bug], ways: Sequence[str], found: Mapping[tuple[int, str], Answer]) -> Iterator[str]:
    """The lines of a table for the documents."""
    yield "| # | operator and condition | reported | " + " | ".join(ways) + " |"
    yield "| ---: | --- | --- |" + " --- |" * len(ways)
    for bug in bugs:
        cells = [str(found[bug.number, way]) if (bug.number, way) in found else "" for way in ways]
        yield f"| {bug.number} | {bug.title} | {bug.reported} | " + " | ".join(cells) + " |"
    counts = [_count(answer for (_, w), answer in found.items() if w == way) for way in ways]
    yield f"| | **found, of {len(bugs)}** | | " + " | ".join(f"**{count}**" for count in counts) + " |"


def _count(answers: Iterable[Answer]) -> int:
    return sum(answer.found and answer.right for answer in answers)
