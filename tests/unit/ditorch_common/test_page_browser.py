"""Pages in a real browser: each view, filters, keys, addresses, themes, languages, hostile texts, small screens."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ditorch_common.page import Column, Page, Table, View, blocks, document, write_page
from tests.browser import Browser
from tests.unit.ditorch_common.page_samples import HOSTILE, everything, records, written

VIEWS = [view.id for view in everything(1).views]
SHOWN = {
    "verdict": ".banner.wrong, .line.marked, .chart .beyond, .command-line",
    "diff": ".grid-row.far, .grid-row.one-sided",
    "graph": ".grid-row[aria-expanded]",
    "time": ".bars-list .bar, .flame-box, canvas.timeline-canvas",
    "overflow": "canvas.heat-canvas, canvas.strip",
    "loss": ".uplot canvas, .marks li",
    "captures": ".empty",
    "records": ".grid-row .verdict",
    "two": "[data-table=records] .grid-row",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("page"))


def count(view: Any) -> int:
    return int(re.sub(r"\D", "", view.inner_text(".filters .count").partition(" of ")[0]))


def cells(view: Any, column: int) -> list[str]:
    """The texts of a column that can be seen, from the top."""
    script = "(rows, column) => rows.map(row => row.children[column].textContent)"
    found: list[str] = view.eval_on_selector_all(".grid-row", script, column)
    return found


def test_each_view_shows_what_it_has_and_runs_nothing(file: Path, browser: Browser) -> None:
    view = browser.open(file)
    for name in VIEWS:
        view.evaluate("name => { location.hash = name }", name)
        view.wait_for_selector(f"nav [aria-current=page][href='#{name}']")
        for selector in SHOWN[name].split(", "):
            view.wait_for_selector(f"main {selector}", state="attached")
        assert view.title() != "run"
        assert view.locator("main img, main script, header img").count() == 0
        assert view.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    assert HOSTILE in view.inner_text("h1")


def test_a_newcomer_sees_operator_line_and_next_step_at_once(file: Path, browser: Browser) -> None:
    view = browser.open(file, viewport={"width": 1000, "height": 700})
    for text in ("torch.softmax is wrong", "a = torch.softmax(q, -1)", "Let the CPU do it", "python reproduce.py"):
        box = view.get_by_text(text).first.bounding_box()
        assert box["y"] + box["height"] <= 700, text


def test_filters_search_and_sort_agree_with_the_data(file: Path, browser: Browser) -> None:
    table = records(3000)
    ops, steps, excess = table["op"].texts(), table["step"].values, table["excess"].values
    modules, verdicts = table["module"].texts(), table["verdict"].texts()
    view = browser.open(file, "#records")
    view.wait_for_selector(".grid-row")
    view.select_option("select[aria-label=operator]", "torch.bmm")
    assert count(view) == ops.count("torch.bmm")
    view.select_option("select[aria-label=verdict]", "*wrong")
    assert count(view) == sum(pair == ("torch.bmm", "wrong") for pair in zip(ops, verdicts))
    view.click("button.clear")
    view.fill("input[aria-label=module]", "layers.7.")
    view.wait_for_selector(f".count:text('{sum('layers.7.' in one for one in modules)} of 3')")
    view.fill("input[aria-label=module]", "")
    view.fill("input[aria-label='error ÷ bound']", ">3")
    view.wait_for_selector(f".count:text('{int((excess > 3).sum())} of 3')")
    view.fill("input[aria-label='error ÷ bound']", "nonsense")
    view.wait_for_selector("[aria-invalid=true]")
    assert "No row passes the filters." in view.inner_text("main")
    view.click("button.clear")
    view.fill("input.search", "SOFTMAX layers.23.mlp")
    wanted = sum("softmax" in op and "layers.23.mlp" in one for op, one in zip(ops, modules))
    view.wait_for_selector(f".count:text-is('{wanted} of 3\u202f000 rows')")
    view.click("button.clear")
    view.click(".grid-head button:has-text('error')")
    order = sorted(range(3000), key=lambda row: -excess[row])
    assert cells(view, 0)[:10] == [ops[row] for row in order[:10]]
    view.click(".grid-head button:has-text('error')")
    assert cells(view, 0)[:10] == [ops[row] for row in reversed(order[-10:])]
    view.click(".grid-head button:has-text('step')")
    assert cells(view, 2)[0] == str(steps.max())


@pytest.mark.slow
def test_every_type_of_column_arrives_and_is_sorted(tmp_path: Path, browser: Browser) -> None:
    rows = 400
    draw = np.random.default_rng(1)
    columns = {
        "uint8": draw.integers(0, 200, rows),
        "uint16": draw.integers(0, 60_000, rows),
        "int16": draw.integers(-30_000, 30_000, rows),
        "uint32": draw.integers(0, 1 << 32, rows),
        "int32": draw.integers(-(1 << 31), 1 << 31, rows),
        "float64": np.where(np.arange(rows) % 7 == 0, np.nan, draw.normal(0, 1e3, rows)),
        "stamps": 1.7e9 + draw.integers(0, 300, rows) / 1024,  # their high halves are the same
        "float32": np.where(np.arange(rows) == 5, -np.inf, draw.normal(0, 1, rows)).astype(np.float32),
        "rising": np.arange(rows) * 1000,
    }
    table = Table("t", [Column.numbers(name, values) for name, values in columns.items()])
    numbers = Column.words("word", [f"item {value}" for value in columns["uint8"].tolist()])
    page = Page("types", [View("t", "T", [blocks.table("t")])], [Table("t", [numbers, *table.columns])])
    view = browser.open(write_page(page, tmp_path / "types.html"))
    view.wait_for_selector(".grid-row")
    for place, (name, values) in enumerate([("word", columns["uint8"]), *columns.items()]):
        ways = ["up", "down"] if name == "word" else ["down", "up"]  # numbers begin with the largest
        for way in ways:
            view.eval_on_selector(f".grid-head [title='{name}'] button", "button => button.click()")
            key = np.where(np.isnan(values), np.inf, -values if way == "down" else values)
            order = np.argsort(key.astype(np.float64), kind="stable")
            found = [_number(text) for text in cells(view, place)[:15]]
            wanted = values[order[:15]].astype(np.float64)
            np.testing.assert_allclose(found, wanted, rtol=2e-3, err_msg=f"{name} {way}")
            top = cells(view, len(columns))[:15]
            assert [int(_number(text)) for text in top] == (order[:15] * 1000).tolist(), f"{name} {way}"


def _number(text: str) -> float:
    return float(text.replace("item ", "").replace("\u202f", "").replace("∞", "inf").replace("\u2212", "-"))


def test_columns_are_sorted_by_keys(file: Path, browser: Browser) -> None:
    view = browser.open(file, "#records")
    view.wait_for_selector(".grid-row")
    view.focus(".grid-head button:has-text('step')")
    view.keyboard.press("Enter")
    assert cells(view, 2)[0] == "49"
    view.keyboard.press("Enter")  # the focus has stayed
    assert cells(view, 2)[0] == "0"
    assert view.locator("dialog").count() == 0


def test_only_visible_rows_are_in_the_document(file: Path, browser: Browser) -> None:
    view = browser.open(file, "#records")
    view.wait_for_selector(".grid-row")
    assert view.locator(".grid-row").count() < 60
    view.eval_on_selector(".grid", "grid => { grid.scrollTop = grid.scrollHeight }")
    view.wait_for_selector(".grid-row[aria-rowindex='3000']")
    assert view.locator(".grid-row").count() < 60


def test_keys(file: Path, browser: Browser) -> None:
    view = browser.open(file, "#records")
    view.wait_for_selector(".grid-row")
    view.focus(".grid")
    for key, row in [
        ("ArrowDown", 1),
        ("ArrowDown", 2),
        ("j", 3),
        ("k", 2),
        ("End", 3000),
        ("ArrowUp", 2999),
        ("Home", 1),
    ]:
        view.keyboard.press(key)
        assert view.locator(".grid-row[aria-selected=true]").get_attribute("aria-rowindex") == str(row), key
    view.keyboard.press("Enter")
    assert view.locator("dialog").is_visible()
    assert ".row=0" in view.url
    view.keyboard.press("Escape")
    view.wait_for_selector("dialog", state="detached")
    assert ".row" not in view.url
    view.keyboard.press("/")
    assert view.evaluate("document.activeElement.className").startswith("search")
    view.keyboard.press("Escape")
    view.keyboard.press("[")
    view.wait_for_selector(".empty")
    view.keyboard.press("?")
    assert "previous, next view" in view.inner_text("dialog")


def test_an_address_brings_the_same_view(file: Path, browser: Browser) -> None:
    view = browser.open(file, "#records")
    view.wait_for_selector(".grid-row")
    view.select_option("select[aria-label=operator]", HOSTILE)
    view.select_option("select[aria-label=step]", "7")
    view.click(".grid-head button:has-text('time')")
    again = browser.open(view.url)
    again.wait_for_selector(".grid-row")
    assert count(again) == count(view)
    assert cells(again, 6) == cells(view, 6)
    assert set(cells(again, 0)) == {HOSTILE}
    two = browser.open(file, "#two?2:op=torch.add&2:.sort=step.up")
    second = two.locator(".table-block").nth(1)
    second.locator(".grid-row").first.wait_for()
    assert second.locator(".grid-row").first.inner_text().split() == ["torch.add", "0"]
    assert "absent" in two.inner_text("main")
    lost = browser.open(file, "#nowhere")
    assert "There is no view “nowhere”" in lost.inner_text("main")


def test_trees_open_lazily_and_are_searched(file: Path, browser: Browser) -> None:
    view = browser.open(file, "#graph")
    view.wait_for_selector(".grid-row")
    assert view.locator(".grid-row:has-text('softmax')").count() == 1  # the wrong one
    view.click(".grid-row:has-text('layers.3')")
    assert view.locator(".grid-row:has-text('softmax')").count() == 0
    view.click(".grid-row:has-text('layers.3')")
    assert view.locator(".grid-row:has-text('softmax') .verdict.wrong").count() == 1
    view.keyboard.press("ArrowLeft")
    assert view.locator(".grid-row:has-text('softmax')").count() == 0
    view.fill("input.search", "softmax")
    view.wait_for_selector(".count:text('24 found')")
    view.click("button:text('next')")
    view.wait_for_selector(".grid-row.hit[aria-selected=true]")
    assert HOSTILE in view.inner_text(".tree-details")


def test_a_tree_is_open_where_something_is_wrong(tmp_path: Path, browser: Browser) -> None:
    nodes: list[Any] = []
    for layer in range(40):
        nodes.append((-1, f"layers.{layer}", "module", ["wrong" if layer == 30 else "right"], -1))
        nodes.append((len(nodes) - 1, "mlp", "module", [nodes[-1][3][0]], -1))
        nodes += [(len(nodes) - 1, f"op {layer}", "forward", [nodes[-1][3][0]], -1)]
    view_of = View("graph", "Graph", [blocks.tree([{"name": "verdict"}], nodes, [])])
    view = browser.open(
        write_page(Page("tree", [view_of], []), tmp_path / "tree.html"), viewport={"width": 900, "height": 2000}
    )
    view.eval_on_selector(".grid", "grid => { grid.style.height = '1900px' }")
    view.wait_for_selector(".grid-row:has-text('op 30') .verdict.wrong")
    assert view.locator(".grid-row:has-text('op 29')").count() == 0


@pytest.mark.parametrize("width", [1000, 390])
def test_heads_are_above_their_columns(tmp_path: Path, browser: Browser, width: int) -> None:
    columns: list[Any] = [{"name": "verdict"}, {"name": "time", "unit": "s"}, {"name": "dtype"}]
    label = "norm LayerNorm((96,), eps=1e-05, elementwise_affine=True, bias=True) " * 3
    nodes = [(-1, label, "module", ["right", 1.0, "float32"], -1), (0, "add", "forward", ["right", 1.0, "int64"], -1)]
    page = Page("heads", [View("graph", "Graph", [blocks.tree(columns, nodes, [])])], [])
    view = browser.open(write_page(page, tmp_path / "heads.html"), viewport={"width": width, "height": 800})
    script = "all => all.map(one => [...one.children].map(cell => Math.round(cell.getBoundingClientRect().left)))"
    head, *rows = view.eval_on_selector_all(".grid-head, .grid-row", script)
    assert rows == [head, head]


def test_a_command_is_not_broken_inside_an_option(tmp_path: Path, browser: Browser) -> None:
    command = "op_tools run OpFallback --ops torch.nn.functional.linear train.py --steps 100 --a-very-long-option"
    page = Page("command", [View("v", "V", [blocks.command(command)])], [])
    view = browser.open(write_page(page, tmp_path / "command.html"))
    assert view.inner_text("pre") == command
    for width in range(320, 700, 20):
        view.set_viewport_size({"width": width, "height": 700})
        lines = view.eval_on_selector_all("pre .option", "all => all.map(one => one.getClientRects().length)")
        assert lines == [1, 1, 1], width


def test_counts_above_bars_do_not_overlap(tmp_path: Path, browser: Browser) -> None:
    counts = [9_999, 98_765, 999_600, 9_996_000, 123_456_789, 5, 999, 2_000] * 3
    page = Page("bars", [View("v", "V", [blocks.histogram(list(range(25)), counts)])], [])
    view = browser.open(write_page(page, tmp_path / "bars.html"))
    texts = view.eval_on_selector_all(".chart text.middle.small", "all => all.slice(0, 24).map(one => one.textContent)")
    assert texts[:8] == ["10k", "99k", "1M", "10M", "123M", "5", "999", "2k"]
    script = """all => all.slice(0, 24).map(one => {
        const { left, right, top, bottom } = one.getBoundingClientRect();
        return { left, right, top, bottom };
    })"""
    for one, other in itertools.pairwise(view.eval_on_selector_all(".chart text.middle.small", script)):
        beside = one["right"] <= other["left"] + 1
        assert beside or one["bottom"] <= other["top"] + 3 or other["bottom"] <= one["top"] + 3


def test_markdown_of_a_view(file: Path, browser: Browser) -> None:
    view = browser.open(file, "#verdict", permissions=["clipboard-read", "clipboard-write"])
    texts = {}
    for name in VIEWS:
        view.evaluate("name => { location.hash = name }", name)
        view.wait_for_selector(f"nav [aria-current=page][href='#{name}']")
        view.wait_for_selector(f"main {SHOWN[name].split(', ')[0]}", state="attached")
        view.evaluate("navigator.clipboard.writeText('')")
        view.click("#copy-markdown")
        texts[name] = view.evaluate("""async () => {
            let text = "";
            for (let i = 0; i < 100 && !text; i++) {
                text = await navigator.clipboard.readText();
                if (!text) await new Promise(done => setTimeout(done, 20));
            }
            return text;
        }""")
    assert "## ✗ torch.softmax is wrong" in texts["verdict"]
    assert ">    41          a = torch.softmax(q, -1)" in texts["verdict"]
    assert "OpCapture" in texts["captures"]
    assert texts["records"].count("\n| ") == 102  # a head, a rule and the first 100 rows
    for name, text in texts.items():
        plain = re.sub(r"(`{1,}).*?\1", "", text, flags=re.DOTALL)  # without code
        assert not re.search(r"(?<!\\)<(img|script)", plain), name


def test_languages_and_themes(file: Path, browser: Browser) -> None:
    view = browser.open(file, color_scheme="dark")
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = view.evaluate(colour)
    view.select_option("#theme", "light")
    light = view.evaluate(colour)
    assert (dark, light) == ("rgb(20, 23, 26)", "rgb(255, 255, 255)")
    view.select_option("#language", "zh")
    assert "torch.softmax 错误" in view.inner_text("main")
    assert view.evaluate("document.documentElement.lang") == "zh-CN"
    assert "复制为 Markdown" in view.inner_text("header")
    view.evaluate("location.hash = '#records'")
    view.wait_for_selector(".verdict.right:text('✓ 正确')")
    view.evaluate("location.hash = '#verdict'")
    view.reload()
    view.wait_for_selector("html[data-ready]")
    assert "torch.softmax 错误" in view.inner_text("main")
    assert view.evaluate(colour) == light


def test_a_phone_scrolls_only_inside_tables(file: Path, browser: Browser) -> None:
    view = browser.open(file, viewport={"width": 390, "height": 780})
    for name in VIEWS:
        view.evaluate("name => { location.hash = name }", name)
        view.wait_for_selector(f"main {SHOWN[name].split(', ')[0]}", state="attached")
        assert view.evaluate("document.documentElement.scrollWidth <= innerWidth"), name


SHIFTS = """
    window.shifted = 0;
    new PerformanceObserver(list => { for (const one of list.getEntries()) window.shifted += one.value; })
        .observe({ type: "layout-shift", buffered: true });
"""


@pytest.mark.parametrize("width", [1000, 390])
def test_nothing_jumps_while_a_view_is_filled(file: Path, browser: Browser, width: int) -> None:
    context = browser.context(viewport={"width": width, "height": 800})
    context.add_init_script(SHIFTS)
    for name in VIEWS:
        view = context.new_page()
        view.goto(f"{file.as_uri()}#{name}")
        view.wait_for_selector(f"main {SHOWN[name].split(', ')[0]}", state="attached")
        view.wait_for_selector(".waiting", state="detached")
        view.wait_for_timeout(50)
        assert view.evaluate("window.shifted") == 0, name
        view.close()


def test_print_leaves_the_tools_out(file: Path, browser: Browser) -> None:
    view = browser.open(file, "#verdict", color_scheme="dark")
    view.emulate_media(media="print")
    assert view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not view.locator("nav").is_visible()
    assert not view.locator("button.copy").first.is_visible()
    assert view.locator(".banner").is_visible()


COUNT_AS_PRINTED = """() => window.addEventListener("beforeprint", () => {
    window.printed = {
        rows: document.querySelectorAll("main .grid-row").length,
        last: [...document.querySelectorAll("main .grid-row")].at(-1).getAttribute("aria-rowindex"),
        note: [...document.querySelectorAll(".unprinted:not([hidden])")].map(one => one.textContent).join(),
    };
})"""


def test_print_gives_the_rows_that_are_not_on_the_screen(file: Path, browser: Browser) -> None:
    view = browser.open(file, "#records")
    view.wait_for_selector(".grid-row")
    view.evaluate(COUNT_AS_PRINTED)
    view.eval_on_selector(".grid", "grid => { grid.scrollTop = 26 * 1500 }")
    view.wait_for_selector(".grid-row[aria-rowindex='1502']")
    long = view.pdf(format="A4")
    assert view.evaluate("window.printed") == {
        "rows": 2000,
        "last": "2000",
        "note": "Printed: the first 2\u202f000 of 3\u202f000 rows; 1\u202f000 were left out. "
        "Filters choose which, and the page on screen has all.",
    }
    assert len(re.findall(rb"/Type /Page\b", long)) > 10
    assert view.locator(".grid-row").count() < 60  # the screen is as before
    assert view.eval_on_selector(".grid", "grid => grid.scrollTop") == 26 * 1500
    assert view.locator(".unprinted").is_hidden()
    view.select_option("select[aria-label=step]", "7")
    few = count(view)
    assert 50 < few < 2000
    assert len(view.pdf(format="A4")) < len(long)
    assert view.evaluate("window.printed") == {"rows": few, "last": str(few), "note": ""}


@pytest.mark.parametrize("name", ["records", "graph", "diff"])
def test_printed_rows_are_as_wide_as_the_paper(file: Path, browser: Browser, name: str) -> None:
    view = browser.open(file, f"#{name}", viewport={"width": 720, "height": 1000})
    view.wait_for_selector(".grid-row")
    view.emulate_media(media="print")
    view.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert view.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ends = view.eval_on_selector_all(
        ".grid-row", "rows => rows.slice(0, 50).map(row => row.getBoundingClientRect().bottom)"
    )
    assert ends == sorted(set(ends))  # one below the other
    space = view.locator(".grid").first.bounding_box()
    last = view.locator(".grid-row").last.bounding_box()
    assert last["y"] + last["height"] <= space["y"] + space["height"] + 1


def test_no_function_is_long() -> None:
    begin = re.compile(r"^(\s*)(?:export |async |static |get |set )*(?:function\b.*|[\w#]+\([^;]*\)|.*=>) \{$")
    for file in (document.FOLDER / "js").glob("*.js"):
        lines = file.read_text(encoding="utf-8").splitlines()
        assert len(lines) < 500, file.name
        for first, line in enumerate(lines):
            found = begin.match(line)
            if found and not line.lstrip().startswith(("if ", "for ", "while ", "*", "}")):
                ends = (place for place in range(first, len(lines)) if re.match(rf"^{found[1]}\}}", lines[place]))
                assert next(ends) - first < 60, f"{file.name}:{first + 1}"
