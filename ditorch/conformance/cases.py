"""Plain data of a conformance run: what a case is, what is asked of a worker at once, what came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

PARTS = ("ops", "modules", "optimizers", "autograd", "api")
"""The parts of PyTorch that a plain run asks for."""
WHAT = (*PARTS, "hunt")
"""And what is asked for by name."""

PASS = "pass"
WRONG = "wrong"
ERROR = "error"
CRASH = "crash"
TIMEOUT = "timeout"
NOT_COMPARABLE = "not comparable"
STATUSES = (PASS, WRONG, ERROR, CRASH, TIMEOUT, NOT_COMPARABLE)
FAILURES = frozenset({WRONG, ERROR, CRASH, TIMEOUT})
NO_DTYPE = "-"


class Case(NamedTuple):
    """One question to the device; its text names it everywhere: on the page, in ledgers, on the command line.

    >>> str(Case("ops", "nn.functional.linear", "float32", "backward"))
    'ops/nn.functional.linear/float32/backward'
    """

    what: str
    name: str
    dtype: str
    check: str

    def __str__(self) -> str:
        return "/".join(self)

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that a text names; ValueError where it names none.

        >>> Case.parse("ops/add/float32/forward").name
        'add'
        """
        parts = text.split("/")
        if len(parts) != 4 or not all(parts) or parts[0] not in WHAT:
            raise ValueError(
                f"{text!r} is not a case: expected WHAT/NAME/DTYPE/CHECK, as in ops/add/float32/forward, "
                f"with WHAT one of {', '.join(WHAT)}"
            )
        return cls(*parts)


@dataclass(frozen=True)
class Unit:
    """Cases that share their inputs and so go to a worker together; each is still lost alone.

    >>> [str(case) for case in Unit("ops", "add", "int8", ("forward", "out")).cases()]
    ['ops/add/int8/forward', 'ops/add/int8/out']
    """

    what: str
    name: str
    dtype: str
    checks: tuple[str, ...]

    def cases(self) -> list[Case]:
        """The cases of this unit, in the order in which they run."""
        return [Case(self.what, self.name, self.dtype, check) for check in self.checks]

    def without(self, checks: set[str]) -> Unit:
        """The same unit with some checks left out (`unit.without({"forward"})`)."""
        return Unit(self.what, self.name, self.dtype, tuple(c for c in self.checks if c not in checks))


@dataclass(frozen=True)
class Result:
    """What became of one case: its status and why, on how many samples, in which time.

    >>> Result(Case("ops", "add", "int8", "forward"), PASS).failed
    False
    """

    case: Case
    status: str
    message: str = ""
    samples: int = 0
    not_comparable: int = 0
    seconds: float = 0.0
    note: str = ""
    details: tuple[str, ...] = field(default=())
    seen: tuple[str, ...] = field(default=())
    """Overloads of aten that reached the device in this case, and in none that its worker did before."""

    @property
    def failed(self) -> bool:
        """Whether the device did not do what was asked."""
        return self.status in FAILURES

    def as_dict(self) -> dict[str, Any]:
        """For JSON (`json.dumps(result.as_dict())`)."""
        return {**asdict(self), "case": str(self.case)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Result:
        """Back from JSON; ValueError where it is none of ours (`Result.from_dict(json.loads(line))`)."""
        try:
            known = {key: data[key] for key in cls.__dataclass_fields__ if key in data}
            known["case"] = Case.parse(data["case"])
            known["details"], known["seen"] = (tuple(data.get(key, ())) for key in ("details", "seen"))
            result = cls(**known)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a result of a case: {dict(data)!r:.200}") from error
        if result.status not in STATUSES:
            raise ValueError(f"{result.case}: unknown status {result.status!r}")
        return result


@dataclass(frozen=True)
class Limits:
    """How much of each case is done: samples of the database, and seconds.

    >>> Limits(samples=None, timeout=60.0).sampling_seconds
    30.0
    """

    samples: int | None = None
    timeout: float = 60.0
    hunt_seconds: float = 2.0
    """For one operator in one round of a hunt; those with many arguments get three times as much."""

    @property
    def sampling_seconds(self) -> float:
        """After this time a worker takes no further sample, so that only a hang meets the time limit."""
        return self.timeout / 2
