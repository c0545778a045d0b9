"""Settings are parsed once, and mistakes are named."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from op_tools import settings
from op_tools.call.filter import OpFilter
from op_tools.call.functions import name_of
from op_tools.settings import SETTINGS, SettingsError

names = st.from_regex(r"torch\.(Tensor\.|nn\.functional\.)?[a-z_]{1,12}", fullmatch=True)
dtypes = st.sampled_from(["torch.float16", "torch.half", "bfloat16", "torch.float32", "torch.double", "torch.int8"])


@given(st.lists(names, max_size=6))
def test_lists_of_names_come_back(entries: list[str]) -> None:
    assert settings.split_list(", ".join(entries)) == entries


@given(st.lists(names, min_size=1, max_size=5, unique=True), names)
def test_a_list_of_full_names_matches_exactly_these(entries: list[str], other: str) -> None:
    chosen = OpFilter([re.escape(e) for e in entries])
    assert all(chosen.matches(e) for e in entries)
    assert chosen.matches(other) == (other in entries)


@given(st.text(max_size=40))
def test_any_text_is_a_filter_or_a_named_error(text: str) -> None:
    try:
        OpFilter(settings.split_list(text), include_from="OP_CAPTURE_LIST").matches("torch.add")
    except SettingsError as error:
        message = str(error)
    else:
        message = "OP_CAPTURE_LIST"
    assert "OP_CAPTURE_LIST" in message


@given(st.dictionaries(dtypes, dtypes, min_size=1))
def test_dtype_maps_come_back(mapping: dict[str, str]) -> None:
    text = ",".join(f"{a}->{b}" for a, b in mapping.items())
    parsed = settings.parse_dtype_map(text, "X")
    last = {settings.parse_dtype(a, "X"): settings.parse_dtype(b, "X") for a, b in mapping.items()}
    assert parsed == last


@given(st.text(max_size=30))
def test_any_text_is_a_dtype_map_or_a_named_error(text: str) -> None:
    try:
        settings.parse_dtype_map(text, "OP_DTYPE_CAST_DICT")
    except SettingsError as error:
        message = str(error)
    else:
        message = "OP_DTYPE_CAST_DICT"
    assert "OP_DTYPE_CAST_DICT" in message


@given(st.floats(0, 1e3), st.floats(0, 1e3))
def test_tolerances_come_back(atol: float, rtol: float) -> None:
    assert settings.parse_tolerance(f"{atol!r},{rtol!r}", "X") == (atol, rtol)


@pytest.mark.parametrize("text", ["1e-3", "a,b", "1,2,3", "-1,0", "nan,0", ""])
def test_bad_tolerances_are_named(text: str) -> None:
    with pytest.raises(SettingsError, match="LINEAR_AUTOCOMPARE"):
        settings.parse_tolerance(text, "LINEAR_AUTOCOMPARE_ERROR_TOLERANCE_FLOAT16")


def test_regular_expressions_and_exclusion() -> None:
    chosen = OpFilter([r"torch\.Tensor\.(add|sub)_?"], ["torch.Tensor.sub"])
    assert chosen.matches("torch.Tensor.add")
    assert chosen.matches("torch.Tensor.sub_")
    assert not chosen.matches("torch.Tensor.sub")
    assert not chosen.matches("torch.Tensor.address")
    assert settings.split_list("torch.add{1,2},torch.sub") == ["torch.add{1,2}", "torch.sub"]


@pytest.mark.parametrize(
    ("written", "function"),
    [
        ("torch.functional.norm", torch.norm),
        (r"torch\.functional\.einsum", torch.einsum),
        ("torch.conv2d", torch.nn.functional.conv2d),
        ("torch.relu_", torch.nn.functional.relu_),
        ("torch.spmm", torch.mm),
        ("torch._C._nn.linear", torch.nn.functional.linear),
        ("torch._C._linalg.linalg_inv", torch.linalg.inv),
    ],
)
def test_every_name_of_a_function_means_that_function(written: str, function: Callable[..., object]) -> None:
    included, excluded = OpFilter([written]), OpFilter([], [written])
    assert included.matches(name_of(function))
    assert not excluded.matches(name_of(function))
    assert included.unused() == excluded.unused() == []
    assert not included.matches("torch.Tensor.norm")


@pytest.mark.parametrize("written", ["torch.functional.nrom", "torch.classes.no.such", "torch.", "norm"])
def test_a_name_that_pytorch_lacks_matches_nothing_and_is_reported(written: str) -> None:
    chosen = OpFilter([written], include_from="OP_CAPTURE_LIST")
    assert not chosen.matches("torch.norm")
    assert chosen.unused()[0].startswith(f"OP_CAPTURE_LIST: {written!r} matched no operator")


def test_a_bad_regular_expression_is_named() -> None:
    with pytest.raises(SettingsError, match=r"OP_CAPTURE_LIST: '\(torch' is not a valid regular expression"):
        OpFilter(["(torch"], include_from="OP_CAPTURE_LIST")


def test_unused_patterns_are_reported_with_near_misses() -> None:
    chosen = OpFilter(["torch.nn.functional.linera"], ["torch.mul"], "OP_X_LIST", "OP_X_DISABLE_LIST")
    chosen.matches("torch.nn.functional.linear")
    first, second = chosen.unused()
    assert first == (
        "OP_X_LIST: 'torch.nn.functional.linera' matched no operator; did you mean torch.nn.functional.linear?"
    )
    assert second.startswith("OP_X_DISABLE_LIST: 'torch.mul'")


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_CAPTURE_LIST", "torch.sub")
    assert OpFilter.from_environment("OP_CAPTURE").matches("torch.sub")
    assert not OpFilter.from_environment("OP_CAPTURE", ops=["torch.add"]).matches("torch.sub")


def test_flags_numbers_and_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, wrong, message in [
        ("OP_TOOLS_INCLUDE_CPU", "Perhaps", "OP_TOOLS_INCLUDE_CPU='perhaps' is neither yes nor no; use 1 or 0"),
        ("OP_CAPTURE_WRITERS", "many", "OP_CAPTURE_WRITERS='many' is not a number"),
        ("OP_CAPTURE_WRITERS", "0", "OP_CAPTURE_WRITERS='0' must be at least 1"),
        ("OP_AUTOCOMPARE_THREADS", "-3", "OP_AUTOCOMPARE_THREADS='-3' must be at least 0"),
        ("OP_CAPTURE_WHEN_FULL", "a", "OP_CAPTURE_WHEN_FULL='a' is unknown; choose one of block, drop"),
        ("OP_TOOLS_CONSOLE", "loud", "OP_TOOLS_CONSOLE='loud' is unknown; choose one of full, summary, off"),
    ]:
        read = {"flag": settings.flag, "number": settings.number, "choice": settings.choice}[SETTINGS[name].kind]
        monkeypatch.setenv(name, wrong)
        with pytest.raises(SettingsError, match=f"^{re.escape(message)}$"):
            read(name)
        monkeypatch.setenv(name, " ")
        assert str(read(name)).removesuffix(".0") in (SETTINGS[name].default, "False", "0")
    monkeypatch.setenv("OP_TOOLS_CONSOLE", " Summary ")
    assert settings.console_level() == "summary"
    assert settings.number("OP_AUTOCOMPARE_THREADS", 3) == 3
    with pytest.raises(KeyError):
        settings.read("OP_NOT_DECLARED")
    assert settings.parse_dtype("half", "X") is torch.float16
    assert settings.op_prefix("torch.nn.functional.linear") == "LINEAR"


def test_files_are_named_after_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    assert settings.process_label() == str(os.getpid())
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert settings.process_label() == f"{os.getpid()}_rank1"
