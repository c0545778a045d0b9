"""Who is to blame, which calls are compared, where in the model a call was made."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from op_tools.call.site import module_path
from op_tools.compare import choose
from op_tools.compare.blame import Blame, report
from op_tools.compare.choose import Chooser, kind_of, parse_budget
from op_tools.compare.teller import Lineage
from op_tools.settings import SettingsError


def test_errors_are_told_from_their_consequences() -> None:
    lineage = Lineage()
    good = lineage.made_from([1], [2])
    bad = lineage.made_from([2], [3])
    heir = lineage.made_from([3], [4])
    other = lineage.made_from([1], [5])
    wrong = {bad, heir}
    assert lineage.ancestors_among(heir, wrong) == {bad}
    assert lineage.ancestors_among(bad, wrong) == set()
    assert lineage.ancestors_among(other, wrong) == set()
    assert lineage.reached_by(bad) == 1
    assert lineage.reached_by(good) == 2
    blames = [
        Blame(heir, 3, "torch.mul", "forward", "off", 90.0, "b.py:2 f: y", "b"),
        Blame(bad, 2, "torch.add", "forward", "off", 5.0, "a.py:1 f: x", "blocks.3.attn.qkv", 1, "folder"),
    ]
    lines = report(blames, lineage, Counter({"torch.add": 4, "torch.mul": 2}))
    text = "\n".join(lines)
    assert lines[0] == "first wrong: torch.add (forward), module blocks.3.attn.qkv, call 2, step 1"
    assert "a.py:1 f: x" in text
    assert "python folder/reproduce.py" in text
    assert "nothing wrong went into them" in text
    assert "largest error: torch.mul" in text
    assert "on inputs that come from torch.add (call 2)" in text
    assert "torch.add 1 of 4" in text
    assert report([], lineage, Counter()) == []


def test_an_address_belongs_to_its_last_maker() -> None:
    lineage = Lineage()
    first = lineage.made_from([], [7])
    second = lineage.made_from([], [7])
    reader = lineage.made_from([7], [8])
    assert lineage.ancestors_among(reader, {first, second}) == {second}
    assert first != second


def test_memory_of_the_past_is_bounded() -> None:
    lineage = Lineage(most=10)
    for i in range(100):
        lineage.made_from([i], [i + 1])
    assert len(lineage._parents) <= 10
    assert len(lineage._maker) <= 10


@pytest.mark.parametrize(("text", "factor"), [("2x", 2.0), ("1.5X", 1.5), (" 3 ", 3.0)])
def test_budgets(text: str, factor: float) -> None:
    assert parse_budget(text, "V") == factor


@given(st.text(max_size=8))
def test_a_budget_is_a_factor_or_a_clear_error(text: str) -> None:
    try:
        factor = parse_budget(text, "OP_AUTOCOMPARE_BUDGET")
    except SettingsError as error:
        said = str(error)
    else:
        said = "OP_AUTOCOMPARE_BUDGET, 2x" if factor > 1 else ""
    assert "OP_AUTOCOMPARE_BUDGET" in said
    assert "2x" in said


def test_kinds_of_calls() -> None:
    x = torch.ones(2, 3)
    same = kind_of("torch.add", (x, 1), {})
    assert same == kind_of("torch.add", (torch.zeros(2, 3), 1), {})
    assert hash(same) is not None
    for other in (torch.ones(3, 2), torch.ones(2, 3).half(), torch.ones(3, 2).t(), x.clone().requires_grad_()):
        assert kind_of("torch.add", (other, 1), {}) != same
    assert kind_of("torch.sub", (x, 1), {}) != same
    assert kind_of("torch.add", (x, 2), {}) != same
    assert kind_of("torch.cat", ([x, x],), {}) != kind_of("torch.cat", ([x],), {})


def test_once_takes_each_kind_once_and_says_what_it_left_out() -> None:
    chooser = Chooser("once")
    assert [chooser.take(("a",)), chooser.take(("b",)), chooser.take(("a",))] == [True, True, False]
    assert chooser.describe() == (
        "1 calls left out (each kind of call once); every kind of call was compared at least once"
    )
    assert Chooser().describe() == ""
    assert not Chooser().chooses


def test_once_looks_again_at_a_call_of_each_doubling() -> None:
    chooser = Chooser("once")
    taken = [number for number in range(1024) if chooser.take("a")]
    assert taken[0] == 0
    assert [number.bit_length() for number in taken[1:]] == [4, 5, 6, 7, 8, 9, 10]  # one of 8 to 15, of 16 to 31, ...
    assert any(number & (number - 1) for number in taken)  # not always the first of them
    assert chooser.left_out["a"] == 1024 - len(taken)
    chooser.look_again("a")
    assert chooser.left_out["a"] == 1024 - len(taken) - 1
    assert Chooser("once").looks_again
    assert not Chooser("once", 2.0).looks_again


def test_a_budget_keeps_the_run_within_its_factor_and_looks_at_everything() -> None:
    now = 0.0
    chooser = Chooser("every", 2.0, clock=lambda: now)
    done: Counter[str] = Counter()
    for _ in range(2_000):  # steps of 10 calls that take 1 ms each; a comparison takes 20 ms
        for call in range(10):
            now += 0.001
            if chooser.take((f"op{call}",)):
                done[f"op{call}"] += 1
                now += 0.020
                chooser.spend((f"op{call}",), 0.020)
                chooser.settle((f"op{call}",))
    bare = 2_000 * 10 * 0.001
    assert now <= 2.05 * bare + 0.5
    assert now >= 1.7 * bare, "the budget is used"
    assert len(done) == 10
    assert max(done.values()) <= min(done.values()) + 4, done
    assert "budget of 2x" in chooser.describe()


def test_kinds_that_vanish_do_not_hold_the_others_up() -> None:
    now = 0.0
    chooser = Chooser("every", 2.0, clock=lambda: now)
    for name in ["warmup"] + ["op"] * 5_000:
        now += 0.01
        if chooser.take((name,)):
            now += 0.01
            chooser.spend((name,), 0.01)
            chooser.settle((name,))
    assert chooser._done[("op",)] > 1_000


def test_comparisons_that_are_not_done_yet_count() -> None:
    """They end long after they are begun: a first step must not take everything before anything is paid for."""
    now = 0.0
    chooser = Chooser("every", 2.0, clock=lambda: now)
    taken = [kind for kind in range(1_000) if chooser.take((f"op{kind}",))]
    assert 1 <= len(taken) <= choose._FIRST_DEBT / choose._FIRST_COST
    for kind in taken:
        chooser.spend((f"op{kind}",), 0.001)
        chooser.settle((f"op{kind}",))
    assert chooser.take(("another",)), "they were cheaper than was thought"
    assert chooser._reserved == pytest.approx(0.001), "what is set aside is what such calls cost"


def test_new_kinds_without_end_do_not_break_the_budget() -> None:
    now = 0.0
    chooser = Chooser("every", 1.5, clock=lambda: now)
    for i in range(3_000):
        now += 0.001
        if chooser.take((f"op{i}",)):
            now += 0.01
            chooser.spend((f"op{i}",), 0.01)
            chooser.settle((f"op{i}",))
    assert now <= 1.5 * 3.0 + choose._FIRST_DEBT + 0.05
    assert "never compared" in chooser.describe()


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = Probe()

    def forward(self, x: str) -> str:
        return self.qkv(x)


class Probe(torch.nn.Module):
    def forward(self, x: str) -> str:
        return module_path()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Attention() for _ in range(4)])
        self.path_of_own = ""

    def forward(self, number: int) -> str:
        self.path_of_own = module_path()
        return self.blocks[number]("x")


def test_module_paths() -> None:
    model = Model()
    assert model(3) == "blocks.3.qkv"
    assert model(0) == "blocks.0.qkv"
    assert model.path_of_own == "Model"
    assert module_path() == ""
    assert Probe()("x") == "Probe"
    model.blocks.append(Attention())  # a model that grows
    assert model(4) == "blocks.4.qkv"
    stranger = Probe()
    model.blocks[0].qkv = stranger
    assert model(0) == "blocks.0.qkv"


def test_the_path_of_a_module_that_is_gone_is_not_that_of_the_next_one() -> None:
    class Outer(torch.nn.Module):
        def forward(self, kind: type[torch.nn.Module]) -> tuple[int, str]:
            made = kind()  # no part of the model
            return id(made), made("x")

    class First(Probe):
        pass

    class Second(Probe):
        pass

    outer = Outer()
    ids: dict[int, type[torch.nn.Module]] = {}
    for number in range(200):
        kind = (First, Second)[number // 3 % 2]
        place, path = outer(kind)
        assert path == f"({kind.__name__})"
        if ids.setdefault(place, kind) is not kind:
            return
    pytest.skip("no two modules had the same address")
