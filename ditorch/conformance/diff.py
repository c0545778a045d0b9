"""Two runs side by side: what was gained and what was lost between two devices or two versions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ditorch.conformance.cases import FAILURES, PASS, Case
from ditorch.conformance.summary import read_cases


@dataclass
class Difference:
    """Cases that changed, by how: (case, status before, status after).

    Example: ``compare(Path("a"), Path("b")).lost``
    """

    before: dict[str, Any]
    after: dict[str, Any]
    gained: list[tuple[Case, str, str]] = field(default_factory=list)
    """Failed or could not be judged, and passes now."""
    lost: list[tuple[Case, str, str]] = field(default_factory=list)
    """Passed or could not be judged, and fails now."""
    changed: list[tuple[Case, str, str]] = field(default_factory=list)
    """Other changes: fails otherwise, or can no longer be judged."""
    only_before: list[tuple[Case, str]] = field(default_factory=list)
    only_after: list[tuple[Case, str]] = field(default_factory=list)
    same: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON (`json.dumps(difference.as_dict())`)."""
        found: dict[str, Any] = {"before": self.before, "after": self.after, "same": self.same}
        for name in ("gained", "lost", "changed"):
            found[name] = [{"case": str(c), "before": b, "after": a} for c, b, a in getattr(self, name)]
        for name in ("only_before", "only_after"):
            found[name] = dict(Counter(f"{case.what}: {status}" for case, status in getattr(self, name)))
        return found


def compare(before: Path, after: Path) -> Difference:
    """Compare two runs, each a folder or a summary.json.

    Example: ``compare(Path("results/soft-2.11"), Path("results/soft-2.13"))``
    """
    (about_before, old), (about_after, new) = read_cases(before), read_cases(after)
    found = Difference(about_before, about_after)
    for case in sorted({*old, *new}):
        if case not in new:
            found.only_before.append((case, old[case]))
        elif case not in old:
            found.only_after.append((case, new[case]))
        elif old[case] == new[case]:
            found.same += 1
        else:
            _kind(found, old[case], new[case]).append((case, old[case], new[case]))
    return found


def _kind(found: Difference, old: str, new: str) -> list[tuple[Case, str, str]]:
    if new == PASS:
        return found.gained
    if new in FAILURES and old not in FAILURES:
        return found.lost
    return found.changed
