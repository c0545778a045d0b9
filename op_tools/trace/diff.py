"""The answer of `op_tools diff`: where two runs part, how it grew, and what else differs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from . import format as columns
from .align import Alignment
from .behaviour import behaviour, draws
from .diverge import Numbers, numbers_of
from .fold import align_folded, told_folds, whole_of
from .format import TraceError, files_of, read
from .graph import Graph, short_name
from .merge import merged
from .parted import Divergence, first_divergence, growth
from .structure import differences

_MIN_COMMON: Final = 0.05  # of the operators of the shorter trace: with less, the runs have nothing in common
_MAX_LINES: Final = 12
_AGREE: Final = 1e-4  # relative to the norm: inputs that agree
_APART: Final = 0.05  # results that do not


class Diff:
    """Two runs, aligned and measured.

    >>> print("\\n".join(compare(Path("a"), Path("b")).lines()))  # doctest: +SKIP
    """

    def __init__(self, first: Graph, second: Graph, names: tuple[str, str] = ("A", "B")) -> None:
        self.names = names
        self.alignment: Alignment = align_folded(first, second)
        self.numbers: Numbers = numbers_of(self.alignment)
        self.divergence: Divergence | None = first_divergence(self.alignment, self.numbers)

    @property
    def parted(self) -> tuple[int, int] | None:
        """The operators of both runs where they part, or None."""
        if self.divergence is None or self.divergence.operators is not None:
            return None if self.divergence is None else self.divergence.operators
        a, b = self.alignment.pairs[self.divergence.pair].tolist()
        return a, b

    @property
    def valued(self) -> bool:
        """Whether any fingerprints could be compared."""
        return bool(self.numbers.compared.any())

    def lines(self, most: int = _MAX_LINES) -> Iterator[str]:
        """The report, line by line."""
        one, two = self.alignment.first, self.alignment.second
        pairs = len(self.alignment.pairs)
        for word, graph, name in (("A", one, self.names[0]), ("B", two, self.names[1])):
            ranks = f", {graph.trace.world} ranks" if graph.trace.world > 1 else ""
            yield f"{word}: {name} ({whole_of(graph).count:,} operators{ranks})"
        matched = sum(a >= 0 for a in self.alignment.modules)
        yield f"{pairs:,} operators correspond, {matched:,} of {len(one.modules):,} and {len(two.modules):,} modules"
        yield from told_folds(one, two)
        yield ""
        yield from self._first()
        yield from self._growth(most)
        yield from self._structure(most)
        found = list(differences(self.alignment))
        if found:
            yield ""
            yield "What else differs"
            for line in found:
                yield f"  {line}"

    def _first(self) -> Iterator[str]:
        given = self.given()
        if given:
            yield f"The runs start from different values: {_some(given)}"
        if not self.valued:
            yield "No values to compare: one of the traces has no fingerprints"
            return
        found, parted = self.divergence, self.parted
        if found is None or parted is None:
            yield self.nothing_found()
            unjudged = [f"{self.alignment.first.titles[a]} ({apart:.2g} apart)" for a, apart in self.unjudged()]
            if unjudged:
                yield f"Not judged, with inputs that agree and other results: {_some(unjudged)}"
            return
        one, two = self.alignment.first, self.alignment.second
        a, b = parted
        phase = columns.PHASES[int(one.operators["phase"][a])]
        yield f"First divergence: step {int(one.operators['step'][a])}, {phase}: {one.names[a]}"
        for word, graph, operator in (("A", one, a), ("B", two, b)):
            module = graph.modules.get(int(graph.operators["module"][operator]))
            inside = f" in {module['name']} ({module['class']})" if module else ""
            yield f"  {word}  {graph.titles[operator]}{inside}  {_location(graph, operator)}"
        yield f"  {found.reason}"
        times = f", {found.outputs / found.allowed:,.3g} times that" if found.allowed else ""
        if found.of_inputs:
            if math.isfinite(found.inputs):
                explained = f"what they are made of explains {found.allowed:.2g}"
                yield f"  these are {found.inputs:.2g} of their norm apart; {explained}"
            else:
                yield "  one of these has NaN or Inf where the other has not"
            return
        yield (
            f"  inputs are {found.inputs:.2g} of their norm apart; rounding may make {found.allowed:.2g} of that, "
            f"the outputs are {found.outputs:.2g} apart{times}"
        )

    def nothing_found(self) -> str:
        """What is said where no operator parts, and how much of the runs that is about."""
        judged, compared = int(self.numbers.judged.sum()), int(self.numbers.compared.sum())
        but = f"; {compared - judged:,} more could not be judged" if compared > judged else ""
        beyond = " beyond that" if self.given() else ""
        return f"No divergence{beyond}: rounding explains every difference of {judged:,} operators{but}"

    def unjudged(self) -> list[tuple[int, float]]:
        """Operators of the first run that were not judged, and how far their results are apart: inputs agree.

        `topk` may take other ones of equal elements, say; what follows works on others then.
        """
        found: list[tuple[int, float]] = []
        numbers, draw_alike = self.numbers, False
        chosen = ~numbers.parted & (numbers.inputs <= _AGREE) & (numbers.unjudged > _APART)
        if not chosen.any():
            return found
        exact = numbers.compared & (numbers.inputs == 0) & (numbers.outputs == 0)
        for pair in np.flatnonzero(chosen | exact).tolist():
            a = int(self.alignment.pairs[pair][0])
            arguments = self.alignment.first.trace.texts[int(self.alignment.first.operators["arguments"][a])]
            name = self.alignment.first.names[a]
            drew = draws(name, arguments)
            draw_alike |= drew and not chosen[pair]  # up to here both runs draw the same numbers
            if chosen[pair] and not behaviour(name).free and (draw_alike or not drew):
                found.append((a, float(numbers.unjudged[pair])))
        return found

    def given(self) -> list[str]:
        """Names of parameters, buffers and inputs that differ from the beginning."""
        return self.numbers.origins.given()

    def _growth(self, most: int) -> Iterator[str]:
        rows = [row for row in growth(self.alignment, self.numbers) if row[3] > 0]
        if not rows:
            return
        yield ""
        yield "How the difference grew, by module (relative to the norm)"
        yield f"  {'module':40} {'phase':10} {'inputs':>9} {'outputs':>9}"
        shown = rows if len(rows) <= most else rows[: most // 2] + rows[-(most - most // 2) :]
        for n, (module, phase, came, went) in enumerate(shown):
            if len(rows) > most and n == most // 2:
                yield f"  ... {len(rows) - most} more"
            yield f"  {module or '(outside)':40} {phase:10} {came:9.2g} {went:9.2g}"

    def _structure(self, most: int) -> Iterator[str]:
        one, two = self.alignment.first, self.alignment.second
        replaced: Counter[tuple[str, str, str]] = Counter()
        for left, right in self.alignment.replaced:
            module = re.sub(r"\.\d+(?=\.|$)", ".*", one.paths.get(int(one.operators["module"][left[0]]), ""))
            phase = columns.PHASES[int(one.operators["phase"][left[0]])]
            words = tuple(", ".join(_short(graph, ops)) for graph, ops in ((one, left), (two, right)))
            replaced[words[0], words[1], f"{module or '(outside)'}, {phase}"] += 1
        if replaced:
            yield ""
            yield "Operators that take the place of others"
            for (left_words, right_words, place), count in replaced.most_common(most):
                yield f"  {left_words} ↔ {right_words}  ({count} times, {place})"
        for word, graph, only, in_gaps in (
            ("A", one, self.alignment.only[0], {a for left, _ in self.alignment.replaced for a in left}),
            ("B", two, self.alignment.only[1], {b for _, right in self.alignment.replaced for b in right}),
        ):
            places: Counter[tuple[str, str]] = Counter()
            for operator in only:
                if operator not in in_gaps:
                    phase = columns.PHASES[int(graph.operators["phase"][operator])]
                    places[graph.paths.get(int(graph.operators["module"][operator]), ""), phase] += 1
            if places:
                yield ""
                yield f"Only in {word}: {sum(places.values()):,} operators"
                for (module, phase), count in places.most_common(most):
                    yield f"  {module or '(outside)'}, {phase}: {count:,}"
                if len(places) > most:
                    yield f"  and {len(places) - most} more places"

    def as_dict(self) -> dict[str, Any]:
        """The same as data."""
        one, two = self.alignment.first, self.alignment.second
        found = None
        if self.divergence is not None and self.parted is not None:
            a, b = self.parted
            sides = {
                word: {"operator": g.numbers[n], "title": g.titles[n], "name": g.names[n], "location": _location(g, n)}
                for word, g, n in (("A", one, a), ("B", two, b))
            }
            numbers: dict[str, Any] = {"reason": self.divergence.reason}
            for name in ("inputs", "outputs", "allowed"):
                value = getattr(self.divergence, name)
                numbers[name] = value if math.isfinite(value) else None  # JSON has no infinity
            found = {**sides, **numbers, "phase": columns.PHASES[int(one.operators["phase"][a])]}
        return {
            "operators": [whole_of(one).count, whole_of(two).count],
            "pairs": [[one.numbers[a], two.numbers[b]] for a, b in self.alignment.pairs.tolist()],
            "divergence": found,
            "given": self.given(),
            "unjudged": [[one.numbers[a], apart if math.isfinite(apart) else None] for a, apart in self.unjudged()],
            "growth": growth(self.alignment, self.numbers),
            "only": [[g.numbers[n] for n in side] for g, side in zip((one, two), self.alignment.only)],
            "replaced": [
                [[g.numbers[n] for n in side] for g, side in zip((one, two), both)] for both in self.alignment.replaced
            ],
            "differences": list(differences(self.alignment)),
        }


def compare(first: Path, second: Path, partial: bool = False) -> Diff:
    """Read, align and measure two runs; one clear line where that makes no sense (`compare(Path("a"), Path("b"))`)."""
    graphs = [Graph(load(path, partial)) for path in (first, second)]
    for path, graph in zip((first, second), graphs):
        if not graph.count:
            raise TraceError(f"{path}: no operators in it")
    found = Diff(graphs[0], graphs[1], (str(first), str(second)))
    one, two = found.alignment.first, found.alignment.second
    least = min(one.count, two.count)
    inside = one.operators["module"][found.alignment.pairs[:, 0]] >= 0
    pairs = len(found.alignment.pairs)
    apart = bool(one.modules and two.modules and not inside.any())
    lopsided = bool(one.modules) != bool(two.modules) and pairs < _MIN_COMMON * max(one.count, two.count)
    if pairs < _MIN_COMMON * least or apart or lopsided:
        counts = f"{pairs:,} of {one.count:,} and {two.count:,} operators"
        why = "; operators of the CPU are recorded with OP_TOOLS_INCLUDE_CPU=1" if lopsided else ""
        raise TraceError(f"{first} and {second} have nothing in common: {counts}{why}")
    return found


def load(run: Path, partial: bool = False) -> Any:
    """The trace of a run: of its only rank, or of all ranks put together."""
    files = files_of(run)
    traces = [read(file, partial=partial) for file in files]
    return traces[0] if len(traces) == 1 else merged(traces)


def _location(graph: Graph, operator: int) -> str:
    return graph.trace.texts[int(graph.operators["location"][operator])]


def _short(graph: Graph, operators: Sequence[int]) -> list[str]:
    names = [short_name(graph.names[operator]) for operator in operators]
    return names if len(names) <= 10 else [*names[:9], f"… {len(names) - 9} more"]


def _some(words: Sequence[str], most: int = 4) -> str:
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more
