"""Counts, rates, files and differences of runs."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from ditorch.cli import make_parser
from ditorch.conformance import store
from ditorch.conformance.cases import CRASH, ERROR, NOT_COMPARABLE, PASS, WRONG, Case, Result
from ditorch.conformance.command import main
from ditorch.conformance.console import View
from ditorch.conformance.diff import compare
from ditorch.conformance.ledger import Ledger, parse
from ditorch.conformance.page import page
from ditorch.conformance.summary import Rate, Summary, badge, read_cases
from ditorch_common.page import read_page

ABOUT = {"backend": "soft", "device": "soft:0", "torch": "2.13.0"}


def results(**changes: str) -> list[Result]:
    statuses = {
        "ops/add/float32/forward": PASS,
        "ops/add/float32/backward": WRONG,
        "ops/add/int8/forward": PASS,
        "ops/mul/float32/forward": PASS,
        "ops/rand/float32/forward": NOT_COMPARABLE,
        "ops/to_sparse/int8/forward": ERROR,
        "api/torch.cuda.Event/-/call": PASS,
    }
    statuses.update({key.replace("__", "/"): value for key, value in changes.items()})
    return [Result(Case.parse(case), status, f"about {case} </script>") for case, status in statuses.items()]


def summary(ledger: str = "", **changes: str) -> Summary:
    return Summary.of(results(**changes), ABOUT, Ledger(parse(ledger, "x"), "2.13.0"))


def test_rates_leave_out_what_nobody_can_judge() -> None:
    found = summary()
    assert found.by_case == Rate(4, 6)
    assert found.only("ops").rate("name") == Rate(1, 3)  # mul; not add, not to_sparse; rand does not count
    assert found.only("ops").rate("name", "dtype") == Rate(2, 4)
    assert found.rates_by("dtype")["int8"] == Rate(1, 2)
    assert found.statuses == {PASS: 4, WRONG: 1, ERROR: 1, NOT_COMPARABLE: 1}
    assert str(Rate(0, 0)) == "0 of 0 (0.00 %)"


def test_news_against_the_ledger() -> None:
    found = summary("ops/to_sparse/*/*  error  none here\nops/mul/*/*  wrong  long ago")
    assert [str(r.case) for r in found.new_failures] == ["ops/add/float32/backward"]
    assert [str(r.case) for r in found.new_passes] == ["ops/mul/float32/forward"]


def test_files(tmp_path: Path) -> None:
    found = summary()
    found.write(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {
        *("summary.csv", "summary.json", "index.html", "badge.svg", "unexpected.txt"),
        "soft_summary_of_pytorch_test_case_testing.csv.tar",
    }
    rows = list(csv.DictReader(io.StringIO((tmp_path / "summary.csv").read_text())))
    assert len(rows) == 7
    assert [row["status"] for row in rows if row["name"] == "add"] == [WRONG, PASS, PASS]
    data = json.loads((tmp_path / "summary.json").read_text())
    assert data["rates"]["names_and_dtypes"]["judged"] == 5
    assert data["by_name"]["ops/add"] == {"passed": 2, "judged": 3, "percent": 66.667}
    assert data["unexpected_failures"] == ["ops/add/float32/backward", "ops/to_sparse/int8/forward"]
    about, statuses = read_cases(tmp_path)
    assert about == ABOUT
    assert statuses == {r.case: r.status for r in found.results}


def test_the_files_are_written_again_after_a_change_of_the_ledger(tmp_path: Path) -> None:
    out, known = tmp_path / "run", tmp_path / "known.txt"
    with store.Store.create(out, {**ABOUT, "torch": "2.11.0+cu130"}) as kept:
        for result in results():
            kept.add(result)

    def report(ledger: str) -> tuple[int, str]:
        known.write_text(ledger)
        text = io.StringIO()
        options = make_parser().parse_args(["conformance", "report", str(out), "--ledger", str(known)])
        return main(options, View(Console(file=text, width=200))), text.getvalue()

    status, text = report("ops/to_sparse/*/*  error  torch<2.12  none here")
    assert status == 1, text
    assert (out / "unexpected.txt").read_text().startswith("ops/add/float32/backward")
    before = (out / "results.jsonl").read_bytes()
    status, text = report("ops/to_sparse/*/*  error  torch<2.12  none here\nops/add/float32/backward  wrong  a reason")
    assert status == 0, text
    assert (out / "unexpected.txt").read_text() == ""
    assert "a reason" in (out / "summary.csv").read_text()
    assert "a reason" in read_page((out / "index.html").read_text())[1]["cases"]["reason"].dictionary
    assert (out / "results.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="holds no results"):
        main(make_parser().parse_args(["conformance", "report", str(tmp_path)]), View(Console(file=io.StringIO())))


def test_the_page_holds_its_data_safely() -> None:
    text = page(summary())
    _, tables = read_page(text)
    assert any(message.endswith("</script>") for message in tables["cases"]["message"].dictionary)
    assert set(re.findall(r"https?://[\w./]+", text)) == {
        "http://www.w3.org/2000/svg",
        "https://github.com/leeoniya/uPlot",
    }


@pytest.mark.parametrize("percent", [0, 95, 100])
def test_the_badge_is_a_picture(percent: int) -> None:
    root = ElementTree.fromstring(badge("a<b&c", Rate(percent, 100)))
    assert root.tag.endswith("svg")
    assert f"{percent}.0 %" in "".join(root.itertext())


def kept(folder: Path, found: list[Result]) -> Path:
    with store.Store.create(folder, ABOUT) as file:
        for result in found:
            file.add(result)
    return folder


def test_difference(tmp_path: Path) -> None:
    changed = {
        "ops__add__float32__backward": PASS,
        "ops__mul__float32__forward": CRASH,
        "ops__to_sparse__int8__forward": WRONG,
        "ops__new__int8__forward": PASS,
    }
    before = kept(tmp_path / "a", results())
    after = kept(tmp_path / "b", [r for r in results(**changed) if r.case.name != "rand"])
    found = compare(before, after)
    assert [(str(c), *rest) for c, *rest in found.gained] == [("ops/add/float32/backward", WRONG, PASS)]
    assert [(str(c), *rest) for c, *rest in found.lost] == [("ops/mul/float32/forward", PASS, CRASH)]
    assert [(str(c), *rest) for c, *rest in found.changed] == [("ops/to_sparse/int8/forward", ERROR, WRONG)]
    assert ([str(c) for c, _ in found.only_before], [str(c) for c, _ in found.only_after]) == (
        ["ops/rand/float32/forward"],
        ["ops/new/int8/forward"],
    )
    assert found.same == 3
    assert json.loads(json.dumps(found.as_dict()))["lost"][0]["after"] == CRASH
    nothing = compare(before, before)
    assert (nothing.same, nothing.lost, nothing.gained) == (7, [], [])


def test_bad_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither results\.jsonl nor summary\.json"):
        read_cases(tmp_path)
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(ValueError, match=r"is not a summary\.json of a run"):
        read_cases(tmp_path)
