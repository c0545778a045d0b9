"""Why an operator is said to part, in words."""

from __future__ import annotations

from typing import Any

from .edges import INF, NAN


def strange(row: Any) -> str:
    """How many NaN and Inf a tensor has, from its fingerprint."""
    words = [f"{int(row[k])} {name}" for k, name in ((NAN, "NaN"), (INF, "Inf")) if row[k]]
    return " and ".join(words) or "all finite"


def shortened(one: str, two: str, most: int = 60) -> tuple[str, str]:
    """Two texts of arguments from a little before where they differ (`shortened("_, 1", "_, 2")`)."""
    same = next((n for n, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))
    start = 0 if max(len(one), len(two)) <= most else max(0, same - most // 3)
    found = []
    for text in (one, two):
        part = text[start : start + most]
        found.append(f"({'… ' * (start > 0)}{part or 'none'}{' …' * (len(text) > start + most)})")
    return found[0], found[1]
