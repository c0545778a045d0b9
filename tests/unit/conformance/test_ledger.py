"""The ledger is read strictly and both ways."""

from __future__ import annotations

import pytest

from ditorch.conformance import ledger
from ditorch.conformance.cases import CRASH, ERROR, NOT_COMPARABLE, PASS, WRONG, Case, Result
from ditorch.conformance.ledger import EXPECTED, NEW_FAILURE, NEW_PASS, OTHER_FAILURE, Ledger, parse

TEXT = """
# known
ops/to_sparse/*/*        error        no sparse tensors
ops/matrix_exp/float16/* wrong,crash  torch<2.12  the CPU's kernel returns NaN
"""


def found(text: str, status: str, version: str = "2.11.0+cu128") -> tuple[str, str]:
    return Ledger(parse(TEXT, "soft.txt"), version).expectation(Result(Case.parse(text), status))


def test_both_ways() -> None:
    assert found("ops/to_sparse/int8/forward", ERROR) == (EXPECTED, "no sparse tensors")
    assert found("ops/to_sparse/int8/forward", PASS) == (NEW_PASS, "no sparse tensors")
    assert found("ops/to_sparse/int8/forward", WRONG) == (OTHER_FAILURE, "no sparse tensors")
    assert found("ops/to_sparse/int8/forward", NOT_COMPARABLE) == (EXPECTED, "")
    assert found("ops/add/int8/forward", ERROR) == (NEW_FAILURE, "")
    assert found("ops/add/int8/forward", PASS) == (EXPECTED, "")


def test_versions() -> None:
    assert found("ops/matrix_exp/float16/forward", CRASH)[0] == EXPECTED
    assert found("ops/matrix_exp/float16/forward", WRONG, "2.12.0")[0] == NEW_FAILURE
    assert found("ops/matrix_exp/float16/forward", PASS, "2.13.0a0")[0] == EXPECTED


def test_what_depends_on_the_order_of_events_may_pass() -> None:
    known = Ledger(parse("ops/grid/*/*  wrong,pass  added up in any order", "x"), "2.13.0")
    case = Case.parse("ops/grid/float16/backward")
    assert known.expectation(Result(case, WRONG)) == (EXPECTED, "added up in any order")
    assert known.expectation(Result(case, PASS)) == (EXPECTED, "")
    assert known.expectation(Result(case, ERROR))[0] == OTHER_FAILURE


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ops/add/*/*  error", "mine.txt:1: expected CASE STATUS REASON"),
        ("ops/add  error  because", "is not WHAT/NAME/DTYPE/CHECK"),
        ("opps/add/*/*  error  because", "is not WHAT/NAME/DTYPE/CHECK"),
        ("ops/add/*/*  pass  because", "pass is no failure"),
        ("ops/add/*/*  error,oops  because", "oops is no failure"),
        ("ops/add/*/*  error  torch~2.1 because", "is no condition"),
        ("ops/add/*/*  error  torch<2.1", "the reason is missing"),
    ],
)
def test_bad_lines_are_named(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        parse(line, "mine.txt")


def test_a_file_that_was_named_must_exist(tmp_path) -> None:
    assert ledger.load("a backend without a ledger") == []
    with pytest.raises(ValueError, match="there is no such file"):
        ledger.load("soft", tmp_path / "missing.txt")


@pytest.mark.parametrize("file", sorted(ledger.FOLDER.glob("*.txt")), ids=lambda file: file.stem)
def test_our_own_ledgers_can_be_read(file) -> None:
    entries = ledger.load(file.stem)
    assert len({(entry.pattern, entry.condition) for entry in entries}) == len(entries)


def test_a_draft_is_a_ledger() -> None:
    text = ledger.draft([Result(Case("ops", "add", "int8", "out"), WRONG, "1 instead\nof 2")])
    assert parse(text, "draft")[0].pattern == "ops/add/int8/out"
    assert parse(text, "draft")[0].reason == "1 instead of 2"
