"""The Python side of pages: what is packed is read again, and no text of a run can become part of the document."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ditorch_common.page import Column, Page, Table, View, address, blocks, document, read_page, write_page

HOSTILE = "</script><script>alert(1)</script><!-- \"' & \u2028 \x00 \ud800"


def test_numbers_keep_their_values_in_the_narrowest_type() -> None:
    columns = {
        "bytes": (np.arange(200), "uint8"),
        "below": (np.array([-3, 5]).repeat(100), "int16"),
        "wide": (np.arange(0, 20_000_000, 100_000), "uint32"),
        "large": (np.full(200, 1 << 40), "float64"),
        "single": (np.linspace(0, 1, 200, dtype=np.float32), "float32"),
        "double": (np.linspace(0, 1, 200), "float64"),
        "flag": (np.arange(200) % 2 == 0, "uint8"),
        "half": (np.linspace(0, 1, 200).astype(np.float16), "float32"),
    }
    table = Table("numbers", [Column.numbers(name, values) for name, (values, _) in columns.items()])
    again = Table.unpack(table.pack())
    for name, (values, kind) in columns.items():
        assert again[name].values.dtype == kind, name
        np.testing.assert_array_equal(again[name].values, values)
    assert again["flag"].kind == "flag"


def test_differences_wrap_and_come_back() -> None:
    values = np.array([0, 255, 1, 254] * 1000, np.uint8)
    steps = np.cumsum(np.ones(100_000, np.int64)) * 3
    table = Table.unpack(Table("t", [Column.numbers("v", values.repeat(25)), Column.numbers("s", steps)]).pack())
    np.testing.assert_array_equal(table["v"].values, values.repeat(25))
    np.testing.assert_array_equal(table["s"].values, steps)
    assert len(Table("t", [Column.numbers("s", steps)]).pack()) < 2000  # differences are all alike


def test_words() -> None:
    table = Table("t", [Column.words("op", ["b", HOSTILE, "b"], kind="code")])
    again = Table.unpack(table.pack())["op"]
    assert again.texts() == ["b", HOSTILE, "b"]
    assert again.kind == "code"
    with pytest.raises(ValueError, match="a code has no word"):
        Column.words("op", (np.array([0, 2]), ["a", "b"]))
    with pytest.raises(ValueError, match="kind is one of"):
        Column.words("op", ["a"], kind="html")


def test_an_empty_table() -> None:
    table = Table("none", [Column.words("op", []), Column.numbers("n", np.array([], np.float64))])
    assert len(Table.unpack(table.pack())) == 0


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="a has 1, b has 2"):
        Table("t", [Column.words("a", ["x"]), Column.words("b", ["x", "y"])])
    with pytest.raises(ValueError, match="two columns have one name"):
        Table("t", [Column.words("a", ["x"]), Column.words("a", ["x"])])
    with pytest.raises(TypeError, match="numbers are needed"):
        Column.numbers("n", np.array(["x"]))
    with pytest.raises(ValueError, match="cannot be an address"):
        View("a b", "A", [])
    with pytest.raises(ValueError, match="before its parent"):
        blocks.flame([(0, "a", 1.0)])
    with pytest.raises(ValueError, match="not a packed table"):
        Table.unpack(b"something else")
    with pytest.raises(ValueError, match="is not a page"):
        read_page("<html></html>")


def everything(word: str) -> Page:
    """A page with a text in each place that can have one."""
    made: list[dict[str, Any]] = [
        blocks.banner("wrong", word, [{"en": word, "zh": word}]),
        blocks.facts([(word, word)], word),
        blocks.text(word, word),
        blocks.list_of([word], word),
        blocks.code([(1, word)], 1, word, word),
        blocks.command(word, word),
        blocks.histogram([0.0, 1.0], [3], word, 0.5, word),
        blocks.tensor_map(1, 2, [0.0, 1.0], [1, 2], (word, word), word),
        blocks.table("records", title=word, where={word: word}),
        blocks.bars([word], [1.0], word, word),
        blocks.lines([0.0, 1.0], [{"name": word, "y": [1.0, None]}], [{"x": 0.5, "text": word}], word, word, word),
        blocks.heat([word], [word], [math.inf], word, word),
        blocks.flame([(-1, word, 1.0)], word, word),
        blocks.timeline([word], [(0, 0.0, 1.0, word, word)], word, word),
        blocks.tree([{"name": word, "title": word}], [(-1, word, word, [word], 0)], [[blocks.text(word)]], word),
        blocks.pair_tree([{"name": word}], [(-1, word, None, math.nan, [word])], word),
        blocks.group(word, [blocks.text(word)]),
        {"kind": "unheard of", "title": word},
    ]
    table = Table("records", [Column.words(word, [word], word)])
    return Page(word, [View("all", word, made), View("none", word, [], word)], [table], word)


def test_no_text_leaves_its_place() -> None:
    harmless, hostile = everything("word").html(), everything(HOSTILE).html()
    tags = re.compile(r"<[a-zA-Z/!][^>]{0,40}")
    assert len(tags.findall(harmless)) == len(tags.findall(hostile))
    assert "alert(1)</script>" not in hostile
    hostile.encode()  # no half of a character is left
    head, tables = read_page(hostile)
    assert head["views"][0]["blocks"][3]["items"][0].startswith("</script><script>alert(1)")
    assert len(tables) == 1


def test_not_a_number_is_none_and_infinity_has_a_name() -> None:
    head = everything("word").head()
    made = {block["kind"]: block for block in head["views"][0]["blocks"]}
    assert made["heat"]["values"] == ["inf"]
    assert made["pair_tree"]["nodes"][0][3] is None


def test_the_policy_names_the_scripts_by_their_sums() -> None:
    text = everything("word").html()
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert len(policy) == 1
    assert "unsafe" not in policy[0]
    assert policy[0].count("sha256-") == 3
    assert "connect-src &#x27;none&#x27;" in policy[0]
    assert not re.search(r"(?:src|href)=\"(?!data:,)", text.partition("<script")[0])  # nothing from the network


def test_the_live_shell_has_no_data() -> None:
    shell = everything("word").shell("/run")
    assert 'id="data-url">/run<' in shell
    assert 'id="head"' not in shell
    assert "connect-src &#x27;self&#x27;" in shell
    assert Table.unpack(everything("word").table("records")).name == "records"
    with pytest.raises(KeyError):
        everything("word").table("other")


def test_a_page_is_written_whole(tmp_path: Path) -> None:
    path = write_page(everything("word"), tmp_path / "run.html")
    assert [file.name for file in tmp_path.iterdir()] == ["run.html"]
    assert read_page(path.read_text(encoding="utf-8"))[0]["title"] == "word"


def test_modules_share_a_scope() -> None:
    """Joined modules may not declare one name twice, and every module is used."""
    order = document.module_order()
    assert sorted(order) == sorted(
        file.name for file in (document.FOLDER / "js").glob("*.js") if file.name != "types.js"
    )
    declared = re.findall(r"^(?:async )?(?:function\*?|class|const|let) (\w+)", document.script(), re.MULTILINE)
    twice = {name for name in declared if declared.count(name) > 1}
    assert not twice


def test_addresses() -> None:
    assert address("records", {"op": "a b&c"}, "x=1", ("excess", "down")) == (
        "#records?op=a%20b%26c&.q=x%3D1&.sort=excess.down"
    )
