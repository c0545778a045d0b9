"""Draws docs/trace.svg: how far two runs are apart, operator by operator; one has a fault planted on `soft`.

python -m docs.trace_picture
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 1000, 300, 70, 46, 44
LOW, HIGH = -9.0, 0.5
FAULT = "gelu: noise=1e-3, nth=2"


def picture(values: list[float], allowed: list[float], first: int, title: str, names: list[tuple[int, str]]) -> str:
    """The picture as SVG: differences as dots, what rounding explains as a line."""

    def x(n: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * n / max(len(values) - 1, 1)

    def y(value: float) -> float:
        power = min(max(math.log10(value) if value > 0 else LOW, LOW), HIGH)
        return TOP + (HEIGHT - TOP - BOTTOM) * (HIGH - power) / (HIGH - LOW)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="16" fill="#1f2328">{title}</text>',
    ]
    for power in range(-8, 1, 2):
        at = y(10.0**power)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - 20}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end" fill="#59636e">1e{power}</text>')
    line = " ".join(f"{x(n):.1f},{y(v):.1f}" for n, v in enumerate(allowed))
    parts.append(f'<polyline points="{line}" fill="none" stroke="#1a7f37" stroke-opacity="0.5"/>')
    parts += [f'<circle cx="{x(n):.1f}" cy="{y(v):.1f}" r="2.5" fill="#0969da"/>' for n, v in enumerate(values)]
    parts.append(f'<path d="M{x(first):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#cf222e" stroke-width="2"/>')
    for n, name in names:
        parts.append(f'<text x="{x(n) + 6:.1f}" y="{HEIGHT - 16}" fill="#cf222e">{name}</text>')
    parts.append(
        f'<text x="{LEFT}" y="{HEIGHT - 16}" fill="#59636e">operators in order; green: what rounding explains</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Train twice and draw."""
    import ditorch  # noqa: F401
    from benchmarks.trace_models import build
    from benchmarks.trace_truth import train
    from ditorch.soft import faults
    from op_tools.trace.diff import Diff

    with tempfile.TemporaryDirectory() as folder:
        good, _ = train(Path(folder) / "a", "GPT", build("GPT"), steps=1)
        with faults.plant(FAULT):
            bad, _ = train(Path(folder) / "b", "GPT", build("GPT"), steps=1)
        diff = Diff(good, bad)
    assert diff.divergence is not None
    first = diff.divergence.pair
    name = good.titles[int(diff.alignment.pairs[first][0])]
    title = f"A good run against one with a fault ({FAULT}): distance of the outputs, relative to their norm"
    svg = picture(diff.numbers.outputs.tolist(), diff.numbers.allowed.tolist(), first, title, [(first, name)])
    (Path(__file__).parent / "trace.svg").write_text(svg, encoding="utf-8")
    for line in diff.lines():
        print(line)


if __name__ == "__main__":
    main()
