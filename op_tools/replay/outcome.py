"""How to replay captures, and what came of each."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch

from ..call.description import Described, TensorMeta
from ..judge.verdict import Row

IDENTICAL: Final = "bit-identical"
RIGHT: Final = "right within rounding"
WRONG: Final = "wrong"
NOT_COMPARABLE: Final = "not comparable"
RAN: Final = "ran"
ERROR: Final = "error"
STATUSES: Final = (IDENTICAL, RIGHT, RAN, NOT_COMPARABLE, WRONG, ERROR)


@dataclasses.dataclass(frozen=True)
class Options:
    """How to replay.

    >>> Options(acc_check=True, run_times=3).forward
    True
    """

    device: str | None = None
    dtype: torch.dtype | None = None
    contiguous: bool = False
    acc_check: bool = False
    time: bool = False
    run_times: int = 1
    forward: bool = True  # measured and judged; it always runs
    backward: bool = True
    describe: bool = False  # keep what the tables of arguments show
    trusted: bool = False  # whether the captures are one's own: no limits, and operators that trust their arguments
    time_limit: float = 300.0  # seconds that a capture may take in a worker process; 0 for any
    memory_limit: int = 0  # bytes that a capture may take; 0 for a limit that depends on its size

    def __post_init__(self) -> None:
        if self.run_times < 1:
            raise ValueError(f"run_times={self.run_times}: an operator must run at least once")
        if not (self.forward or self.backward):
            raise ValueError("only forward and only backward exclude each other")


@dataclasses.dataclass
class Shown:
    """The rows of the table of one pass, and the addresses of its tensors."""

    rows: list[tuple[str, TensorMeta | str]] = dataclasses.field(default_factory=list)
    pointers: list[int] = dataclasses.field(default_factory=list)
    cast: str = ""

    def add(self, rows: list[tuple[str, TensorMeta | str]], described: Described) -> None:
        """More rows, and what they were made from."""
        self.rows += rows
        self.pointers += described.data_ptrs


@dataclasses.dataclass
class Outcome:
    """What came of one capture.

    >>> Outcome(Path("x"), "torch.add", IDENTICAL).passed
    True
    """

    folder: Path
    op: str
    status: str
    reason: str = ""
    like_capture: str = ""  # how the result compares with the captured one
    repeatable: bool = True
    notes: list[str] = dataclasses.field(default_factory=list)
    location: str = ""
    device: str = ""
    went_backward: bool = False
    forward_ms: list[float] = dataclasses.field(default_factory=list)
    backward_ms: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    rows: tuple[Row, ...] = ()
    out_of_memory: bool = False
    device_is_lost: bool = False  # nothing runs on it any more in the process that replayed this
    shown_forward: Shown | None = None
    shown_backward: Shown | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong with it (`outcome.passed`)."""
        return self.status not in (WRONG, ERROR)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able values (`json.dumps(outcome.as_dict())`)."""
        facts = {name: value for name, value in vars(self).items() if name not in _NOT_TOLD}
        return {**facts, "folder": str(self.folder), "rows": [row.as_dict() for row in self.rows]}


_NOT_TOLD: Final = ("shown_forward", "shown_backward", "out_of_memory", "device_is_lost")


def op_from(folder: Path) -> str:
    """The operator by the path of a capture that cannot even be read (`op_from(Path("torch.add/1/2"))`)."""
    return next((part for part in reversed(folder.parts) if part.startswith("torch.")), "")


def counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many captures came to each status (`counts(outcomes)["wrong"]`)."""
    found = Counter(outcome.status for outcome in outcomes)
    return {status: found[status] for status in STATUSES if found[status]}
