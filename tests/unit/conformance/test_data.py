"""Cases, units, results and their store: what goes out comes back, and bad input is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ditorch.conformance import store
from ditorch.conformance.cases import PASS, STATUSES, WHAT, Case, Limits, Result, Unit
from ditorch.conformance.trial import nearly_same

names = st.text(st.characters(codec="utf-8", exclude_characters="/", exclude_categories=["Cc", "Cs"]), min_size=1)
cases = st.builds(Case, st.sampled_from(WHAT), names, names, names)
texts = st.text(st.characters(exclude_categories=["Cs"]))
results = st.builds(
    Result,
    cases,
    st.sampled_from(STATUSES),
    texts,
    st.integers(0, 100),
    st.integers(0, 100),
    st.floats(0, 1e6),
    texts,
    st.lists(texts).map(tuple),
)
ABOUT = {"backend": "soft", "device": "soft:0", "torch": "2.13.0", "samples": None}


@given(cases)
def test_a_case_is_its_text(case: Case) -> None:
    assert Case.parse(str(case)) == case


@given(st.text())
def test_other_text_is_refused_or_a_case(text: str) -> None:
    parts = text.split("/")
    if len(parts) == 4 and all(parts) and parts[0] in WHAT:
        assert str(Case.parse(text)) == text
    else:
        with pytest.raises(ValueError, match="WHAT/NAME/DTYPE/CHECK"):
            Case.parse(text)


@given(results)
def test_a_result_survives_json(result: Result) -> None:
    assert Result.from_dict(json.loads(json.dumps(result.as_dict()))) == result


def test_results_of_others_are_refused() -> None:
    with pytest.raises(ValueError, match="not a result of a case"):
        Result.from_dict({"status": "pass"})
    with pytest.raises(ValueError, match="unknown status 'fine'"):
        Result.from_dict({"case": "ops/add/int8/forward", "status": "fine"})


def test_a_unit_loses_checks_not_cases() -> None:
    unit = Unit("ops", "add", "int8", ("forward", "out", "inplace"))
    assert unit.without({"out"}).checks == ("forward", "inplace")
    assert [str(case) for case in unit.cases()][1] == "ops/add/int8/out"
    assert Limits(timeout=10).sampling_seconds < 10


def result(name: str, status: str = PASS) -> Result:
    return Result(Case("ops", name, "float32", "forward"), status)


def test_what_is_stored_is_there_after_a_crash(tmp_path: Path) -> None:
    with store.Store.create(tmp_path / "run", ABOUT) as kept:
        kept.add(result("add"))
        kept.add(result("mul", "wrong"))
    file = tmp_path / "run" / store.FILE
    file.write_bytes(file.read_bytes() + b'{"case": "ops/exp/float32/forw')  # the process died here
    assert [str(case) for case in store.load(tmp_path / "run").results] == [
        "ops/add/float32/forward",
        "ops/mul/float32/forward",
    ]
    kept, stored = store.Store.resume(tmp_path / "run", ABOUT)
    with kept:
        kept.add(result("exp"))
    assert len(stored.results) == 2
    assert len(store.load(tmp_path / "run").results) == 3


def test_a_run_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    store.Store.create(tmp_path, ABOUT).close()
    with pytest.raises(ValueError, match="--resume goes on with them, --fresh replaces them"):
        store.Store.create(tmp_path, ABOUT)
    store.Store.create(tmp_path, ABOUT, fresh=True).close()
    assert store.load(tmp_path).results == {}


def test_another_run_is_not_continued(tmp_path: Path) -> None:
    store.Store.create(tmp_path, ABOUT).close()
    with pytest.raises(ValueError, match=r"torch was 2.13.0, is 2.11.0"):
        store.Store.resume(tmp_path, {**ABOUT, "torch": "2.11.0"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{}\nnonsense\n", "results.jsonl:2: not JSON"),
        ("{}\n[1]\n", "results.jsonl:2: expected an object"),
        ('{}\n{"case": "add", "status": "pass"}\n', "results.jsonl:2: 'add' is not a case"),
    ],
)
def test_damage_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / store.FILE).write_text(text)
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        store.load(tmp_path)


def test_no_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no results"):
        store.load(tmp_path)


def test_tracebacks_do_not_tell_folders_of_the_machine() -> None:
    from ditorch.conformance.trial import failed

    try:
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 5))
    except Exception as error:
        outcome = failed(error)
    assert str(Path(torch.__file__).parents[1]) not in str(outcome.details)
    assert "Traceback" in str(outcome.details)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.bool, torch.complex64])
def test_the_same_bits_in_any_layout(dtype: torch.dtype) -> None:
    x = (torch.arange(12).reshape(3, 4) - 5).to(dtype)
    strided = torch.zeros(3, 4, 2).to(dtype)
    strided[..., 0] = x
    assert nearly_same([x, None, x[0, 0]], [strided[..., 0], x[0, 0]])
    assert nearly_same(x[:, :0], x[:, :0].clone())
    assert nearly_same(x[:1, :1], strided[:1, :1, 0])  # whose strides do not matter
    other = x.clone()
    other[2, 3] = 0
    assert not nearly_same(x, other)
    assert not nearly_same(x, x.reshape(4, 3))
    assert not nearly_same(x, [x, x])
    assert not nearly_same(torch.tensor([0.0]), torch.tensor([-0.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bits_that_differ_in_rounding_alone(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -3.0, 1e-3]).to(dtype)
    wide = dtype in (torch.float32, torch.float64)  # a half type's last place is no small thing
    assert nearly_same(torch.nextafter(x, x * 2), x) is wide
    assert not nearly_same(x * (1 + 8 * torch.finfo(dtype).eps), x)
    assert not nearly_same(-x, x)
