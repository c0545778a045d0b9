"""Counts and rates of a run, and the files made from them: page, CSV, JSON, badge, news for the ledger."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ditorch.conformance import ledger as ledgers
from ditorch.conformance.cases import NOT_COMPARABLE, PASS, STATUSES, Case, Result
from ditorch.conformance.coverage import Coverage
from ditorch.conformance.ledger import Ledger

COLUMNS = (
    *("what", "name", "dtype", "check", "status", "expectation", "samples", "not_comparable_samples", "seconds"),
    *("message", "note", "known_reason"),
)


@dataclass(frozen=True)
class Rate:
    """How many of those that could be judged are right.

    >>> str(Rate(199, 200))
    '199 of 200 (99.50 %)'
    """

    passed: int
    judged: int

    @property
    def percent(self) -> float:
        """0 to 100; 0 where nothing could be judged."""
        return 100 * self.passed / self.judged if self.judged else 0.0

    def __str__(self) -> str:
        return f"{self.passed:,} of {self.judged:,} ({self.percent:.2f} %)"

    def as_dict(self) -> dict[str, float]:
        """For JSON (`Rate(1, 2).as_dict()`)."""
        return {"passed": self.passed, "judged": self.judged, "percent": round(self.percent, 3)}


@dataclass
class Summary:
    """A run, counted.

    Example: ``Summary.of(results, about, Ledger([], "2.13")).by_case``
    """

    about: dict[str, Any]
    results: list[Result]
    expectations: dict[Case, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, results: Iterable[Result], about: Mapping[str, Any], ledger: Ledger) -> Summary:
        """Count results, sorted by case."""
        found = sorted(results, key=lambda result: result.case)
        expectations = {result.case: ledger.expectation(result) for result in found}
        return cls(dict(about), found, expectations)

    @property
    def statuses(self) -> dict[str, int]:
        """Cases by status."""
        counts = Counter(result.status for result in self.results)
        return {status: counts[status] for status in STATUSES if counts[status]}

    @property
    def failures(self) -> list[Result]:
        """What the device did not do, expected or not."""
        return [result for result in self.results if result.failed]

    def with_expectation(self, *kinds: str) -> list[Result]:
        """Results that relate to the ledger in some way (`summary.with_expectation("unexpected pass")`)."""
        return [result for result in self.results if self.expectations[result.case][0] in kinds]

    @property
    def new_failures(self) -> list[Result]:
        """Failures that the ledger does not know, or knows otherwise."""
        return self.with_expectation(ledgers.NEW_FAILURE, ledgers.OTHER_FAILURE)

    @property
    def new_passes(self) -> list[Result]:
        """Cases that pass although the ledger says they fail."""
        return self.with_expectation(ledgers.NEW_PASS)

    @property
    def by_case(self) -> Rate:
        """Right cases."""
        judged = [result for result in self.results if result.status != NOT_COMPARABLE]
        return Rate(sum(result.status == PASS for result in judged), len(judged))

    def rate(self, *keys: str) -> Rate:
        """Groups of cases that are right as a whole: `rate("what", "name")`, `rate("what", "name", "dtype")`."""
        groups = self._groups(keys)
        return Rate(sum(all(statuses) for statuses in groups.values()), len(groups))

    def rates_by(self, *keys: str) -> dict[str, Rate]:
        """Right cases within each group (`rates_by("dtype")`)."""
        groups = self._groups(keys)
        return {"/".join(key): Rate(sum(statuses), len(statuses)) for key, statuses in sorted(groups.items())}

    def _groups(self, keys: tuple[str, ...]) -> dict[tuple[str, ...], list[bool]]:
        groups: dict[tuple[str, ...], list[bool]] = defaultdict(list)
        for result in self.results:
            if result.status != NOT_COMPARABLE:
                groups[tuple(getattr(result.case, key) for key in keys)].append(result.status == PASS)
        return groups

    def only(self, what: str) -> Summary:
        """The same for one part (`summary.only("ops").rate("name")`)."""
        return Summary(self.about, [r for r in self.results if r.case.what == what], self.expectations)

    @property
    def coverage(self) -> Coverage | None:
        """Which overloads of aten the run exercised; None where no case says so (a run of an earlier version)."""
        seen = {name for result in self.results for name in result.seen}
        return Coverage.of(seen) if seen else None

    @property
    def parts(self) -> list[str]:
        """The parts that were run."""
        return sorted({result.case.what for result in self.results})

    def as_dict(self) -> dict[str, Any]:
        """Everything that summary.json holds."""
        cases: dict[str, Any] = {}
        for result in self.results:
            what, name, dtype, check = result.case
            cases.setdefault(what, {}).setdefault(name, {}).setdefault(dtype, {})[check] = result.status
        return {
            "about": self.about,
            "statuses": self.statuses,
            "rates": {
                "cases": self.by_case.as_dict(),
                "names": self.rate("what", "name").as_dict(),
                "names_and_dtypes": self.rate("what", "name", "dtype").as_dict(),
            },
            "parts": {
                part: {
                    "cases": one.by_case.as_dict(),
                    "names": one.rate("name").as_dict(),
                    "names_and_dtypes": one.rate("name", "dtype").as_dict(),
                }
                for part in self.parts
                for one in [self.only(part)]
            },
            "by_check": {key: rate.as_dict() for key, rate in self.rates_by("what", "check").items()},
            "by_dtype": {key: rate.as_dict() for key, rate in self.rates_by("dtype").items()},
            "by_name": {key: rate.as_dict() for key, rate in self.rates_by("what", "name").items()},
            "unexpected_failures": [str(result.case) for result in self.new_failures],
            "unexpected_passes": [str(result.case) for result in self.new_passes],
            "failures": [result.as_dict() for result in self.failures],
            "coverage": None if self.coverage is None else self.coverage.as_dict(),
            "cases": cases,
        }

    def as_csv(self) -> str:
        """Everything that summary.csv holds: one line per case."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for result in self.results:
            expectation, reason = self.expectations[result.case]
            numbers = (result.samples, result.not_comparable, f"{result.seconds:.4f}")
            message = " ".join(result.message.split())
            writer.writerow([*result.case, result.status, expectation, *numbers, message, result.note, reason])
        return text.getvalue()

    def write(self, folder: Path) -> None:
        """Write the files of a run; each appears whole or not at all (`summary.write(folder)`)."""
        from ditorch.conformance import pack
        from ditorch.conformance.page import page

        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "summary.csv", self.as_csv())
        write_whole(folder / "summary.json", json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n")
        write_whole(folder / "index.html", page(self))
        write_whole(folder / "badge.svg", badge(str(self.about.get("backend", "device")), self.by_case))
        write_whole(folder / "unexpected.txt", ledgers.draft(self.new_failures))
        pack.write(folder, self.about, pack.case_rows(self))


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that appears whole or not at all (`write_whole(folder / "badge.svg", text)`)."""
    half = path.with_name(path.name + ".part")
    half.write_bytes(content.encode() if isinstance(content, str) else content)
    half.replace(path)


def badge(label: str, rate: Rate) -> str:
    """A small picture for a README: the backend and its rate (`badge("soft", Rate(99, 100))`)."""
    left, right = f"PyTorch on {label}", f"{rate.percent:.1f} %"
    colour = "#2e7d32" if rate.percent >= 99 else "#8a6d00" if rate.percent >= 90 else "#b3261e"
    widths = [10 + 6.6 * len(text) for text in (left, right)]
    total = sum(widths)
    escaped = [text.replace("&", "&amp;").replace("<", "&lt;") for text in (left, right)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total:.0f}" height="20" role="img" '
        f'aria-label="{escaped[0]}: {escaped[1]}">'
        f'<clipPath id="r"><rect width="{total:.0f}" height="20" rx="3"/></clipPath>'
        f'<g clip-path="url(#r)"><rect width="{widths[0]:.1f}" height="20" fill="#444"/>'
        f'<rect x="{widths[0]:.1f}" width="{widths[1]:.1f}" height="20" fill="{colour}"/></g>'
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{widths[0] / 2:.1f}" y="14">{escaped[0]}</text>'
        f'<text x="{widths[0] + widths[1] / 2:.1f}" y="14">{escaped[1]}</text></g></svg>\n'
    )


def read_cases(path: Path) -> tuple[dict[str, Any], dict[Case, str]]:
    """What a run was and the status of each case, from its folder or its summary.json.

    Example: ``about, statuses = read_cases(Path("conformance_results/soft"))``
    """
    if (path / "results.jsonl").exists():
        from ditorch.conformance import store

        stored = store.load(path)
        return stored.about, {case: result.status for case, result in stored.results.items()}
    file = path / "summary.json" if path.is_dir() else path
    if not file.exists():
        raise ValueError(f"{path} is no result of a run: neither results.jsonl nor summary.json is there")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        found = {
            Case(what, name, dtype, check): status
            for what, names in data["cases"].items()
            for name, dtypes in names.items()
            for dtype, checks in dtypes.items()
            for check, status in checks.items()
        }
        return data["about"], found
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{file} is not a summary.json of a run: {error}") from None
