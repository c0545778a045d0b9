"""Draws curves in the terminal, with braille dots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] in one character cell


def chart(curves: Mapping[str, tuple[str, Sequence[float]]], width: int = 68, height: int = 14) -> Text:
    """Curves over a common axis: ``{name: (colour, values)}``; values that are not finite leave a gap.

    >>> print(chart({"loss": ("green", [3.0, 2.0, 1.5])}, width=20, height=4).plain)  # doctest: +SKIP
    """
    finite = [v for _, values in curves.values() for v in values if v == v and abs(v) != float("inf")]
    if not finite:
        return Text("(nothing to draw)")
    low, high = min(finite), max(finite)
    high = high if high > low else low + 1
    cells = [[0] * width for _ in range(height)]
    colours = [[""] * width for _ in range(height)]
    for colour, values in curves.values():
        for x, y in _points(values, low, high, width * 2, height * 4):
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
            colours[y // 4][x // 2] = colour
    out = Text()
    for row in range(height):
        label = high - (high - low) * row / (height - 1) if height > 1 else high
        out.append(f"{label:8.2f} ┤", style="dim")
        for column in range(width):
            out.append(chr(0x2800 + cells[row][column]), style=colours[row][column] or "")
        out.append("\n")
    longest = max(len(values) for _, values in curves.values())
    out.append(" " * 9 + "└" + "─" * width + "\n", style="dim")
    out.append(f"{'':10}step 1{f'step {longest}':>{width - 6}}\n", style="dim")
    out.append(" " * 10)
    for name, (colour, _) in curves.items():
        out.append("━━ ", style=colour)
        out.append(f"{name}   ")
    return out


def _points(values: Sequence[float], low: float, high: float, width: int, height: int) -> list[tuple[int, int]]:
    """Dots of a polyline; one column at a time, joined vertically."""
    points: list[tuple[int, int]] = []
    previous: int | None = None
    for x in range(width):
        position = x * (len(values) - 1) / max(width - 1, 1)
        left = int(position)
        right = min(left + 1, len(values) - 1)
        value = values[left] + (values[right] - values[left]) * (position - left)
        if value != value or abs(value) == float("inf"):
            previous = None
            continue
        y = min(height - 1, max(0, round((high - value) / (high - low) * (height - 1))))
        start = y if previous is None else previous
        for between in range(min(start, y), max(start, y) + 1):
            points.append((x, between))
        previous = y
    return points
