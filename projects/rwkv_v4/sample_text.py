"""A small text of our own, made by rule: for trying the trainer out where no corpus is at hand."""

from __future__ import annotations

import random

_WHO = (
    "the gardener",
    "a sailor",
    "the old clock",
    "my neighbour",
    "the mill",
    "a grey cat",
    "the teacher",
    "our train",
)
_DOES = ("waits for", "remembers", "paints", "follows", "counts", "forgets", "visits", "draws")
_WHAT = ("the harbour", "seven apples", "a blue door", "the long winter", "every bridge", "the café", "an empty page")
_WHEN = ("in the morning", "before the rain", "at noon", "after the harvest", "on Sunday", "when the lamps are lit")
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def sample_text(paragraphs: int = 1500, seed: int = 0) -> str:
    """About 150 characters per paragraph: sentences, sums in figures and in words, and lists.

    >>> len(sample_text(10)) > 500
    True
    """
    source = random.Random(seed)

    def pick(options: tuple[str, ...]) -> str:
        # random() alone is promised to give the same numbers in every release of Python.
        return options[int(source.random() * len(options))]

    def sentence() -> str:
        words = f"{pick(_WHO)} {pick(_DOES)} {pick(_WHAT)} {pick(_WHEN)}."
        return words[0].upper() + words[1:]

    def total() -> str:
        a, b = int(source.random() * 100), int(source.random() * 100)
        return f"{a} + {b} = {a + b};"

    def words() -> str:
        a, b = int(source.random() * 5), int(source.random() * 5)
        return f"{_NUMBERS[a]} and {_NUMBERS[b]} make {_NUMBERS[a + b]}."

    makers = (sentence, sentence, total, words)
    lines = []
    for number in range(paragraphs):
        parts = [makers[int(source.random() * len(makers))]() for _ in range(4)]
        lines.append(f"== {number} ==\n" + " ".join(parts) + "\n")
    return "\n".join(lines)
