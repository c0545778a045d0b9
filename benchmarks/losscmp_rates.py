"""How often `op_tools losscmp` takes noise for divergence, and how small a divergence it finds: simulated runs.

Losses fall from 4.8 to 1.5, with 3 % of noise from batch to batch. Two devices see the same batches and differ by noise
of their own; two seeds see different ones, and one may be up to 6 % of the way ahead. Noise may remember: each step
keeps a share of the last one (AR(1)).

    python benchmarks/losscmp_rates.py --pairs 200
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from op_tools.losscmp import APART, Curve, compare

Pair = tuple[Curve, Curve]
BATCH = 0.03


def remembering(rng: np.random.Generator, count: int, share: float, size: float) -> np.ndarray:
    """Noise of which each step keeps a share of the last (`remembering(rng, 300, 0.5, 1e-3)`)."""
    fresh = rng.standard_normal(count + 1) * np.sqrt(1 - share**2)
    noise, last = np.empty(count), rng.standard_normal()
    for i in range(count):
        noise[i] = last = share * last + fresh[i]
    return size * noise


def falling(count: int, ahead: float = 0.0) -> np.ndarray:
    """A loss without noise (`falling(300)`)."""
    step = np.arange(count) * (1 + ahead)
    return 1.3 + 2.7 * np.exp(-step / 60) + 0.8 * np.exp(-step / 400)


def two_seeds(rng: np.random.Generator, count: int, share: float, wilder: float = 1.0, shift: float = 0.0) -> Pair:
    """Different batches; the second run is `shift` higher from a third of the way on (`two_seeds(rng, 300, 0.0)`)."""
    first = falling(count) * (1 + remembering(rng, count, share, BATCH))
    second = falling(count, rng.uniform(-0.06, 0.06)) * (1 + remembering(rng, count, share, BATCH * wilder))
    return _curve(first), _curve(second * (1 + shift * _later(count)))


def two_devices(
    rng: np.random.Generator, count: int, share: float, level: float, shift: float = 0.0, rise: float = 0.0
) -> Pair:
    """The same batches; the second run is off by `level`, and by a fault (`two_devices(rng, 300, 0.0, 1e-3)`)."""
    first = falling(count) * (1 + BATCH * rng.standard_normal(count))
    off = remembering(rng, count, share, level) + shift * _later(count) + rise * np.arange(count) / count
    return _curve(first), _curve(first * (1 + off))


def _later(count: int) -> np.ndarray:
    return np.where(np.arange(count) >= count // 3, 1.0, 0.0)


def _curve(losses: np.ndarray) -> Curve:
    return Curve("run", np.arange(len(losses)), losses, True)


def rate(make: Callable[..., Pair], pairs: int, *how: float, **more: float) -> float:
    """Share of simulated pairs that are said to be apart (`rate(two_seeds, 200, 300, 0.0)`)."""
    return sum(compare(*make(np.random.default_rng(s), *how, **more)).kind in APART for s in range(pairs)) / pairs


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    pairs = parser.parse_args().pairs
    print(f"{pairs} pairs each; said to be apart, by how much of a step's noise is remembered: 0, 0.5, 0.8, 0.9")
    for count in (15, 60, 300, 1000):
        found = [rate(two_seeds, pairs, count, share) for share in (0, 0.5, 0.8, 0.9)]
        print(f"healthy, two seeds, {count:4d} iterations             ", *[f"{f:7.1%}" for f in found])
    for count in (60, 300, 1000):
        found = [rate(two_devices, pairs, count, share, 3e-3) for share in (0, 0.5, 0.8, 0.9)]
        print(f"healthy, two devices, {count:4d} iterations, 0.3 % off", *[f"{f:7.1%}" for f in found])
    for name, sizes in (("shift", (1e-3, 2e-3, 3e-3, 5e-3, 1e-2)), ("rise", (2e-3, 5e-3, 1e-2))):
        for share in (0, 0.5, 0.8):
            found = [rate(two_devices, pairs, 300, share, 1e-3, **{name: size}) for size in sizes]
            told = ", ".join(f"{s:.1%}: {f:.0%}" for s, f in zip(sizes, found))
            print(f"{name} of one of two devices, 300 iterations, 0.1 % off, remembers {share}: {told}")
    for count in (300, 1000):
        found = [rate(two_seeds, pairs, count, 0, shift=size) for size in (0.02, 0.05, 0.1)]
        print(f"shift of 2, 5, 10 % of one of two seeds, {count} iterations:", *[f"{f:.0%}" for f in found])
        found = [rate(two_seeds, pairs, count, 0, wilder=times) for times in (1.2, 1.5, 2)]
        print(f"1.2, 1.5, 2 times the noise of one of two seeds, {count} iterations:", *[f"{f:.0%}" for f in found])


if __name__ == "__main__":
    main()
