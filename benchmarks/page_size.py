"""Measures a page of very many records in a real browser: its file, the first view, each filter and sort, memory.

Times of filters and sorts are ratios to a plain pass: one loop per column that reads every value, on as many rows,
in the same browser. The page is opened several times, and each action is done once in each, since the order of a sort
is kept; the quickest counts, as others may use the cores meanwhile, and the slowest is shown beside it. Playwright is
needed (`pip install 'ditorch[browser]'`), and Chromium.

    python -m benchmarks.page_size --rows 1000000
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ditorch_common.page import Column, Page, Table, View, blocks, write_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
VERDICTS = ["right", "wrong", "known weakness", "not comparable"]
PLAIN_PASS = """([type, rows]) => {
    const array = new globalThis[type](rows).fill(1), times = [];
    let sum = 0;
    for (let round = 0; round < 9; round++) {
        const start = performance.now();
        for (let i = 0; i < array.length; i++) sum += array[i];
        times.push(performance.now() - start);
    }
    return sum ? times.sort((a, b) => a - b)[4] : 0;
}"""
ARRAYS = {"uint8": "Uint8Array", "uint16": "Uint16Array", "uint32": "Uint32Array", "float32": "Float32Array"}


def records(rows: int, seed: int = 0) -> Table:
    """Comparisons as a long run leaves them; the numbers are random, so nothing about them packs well."""
    draw = np.random.default_rng(seed)
    operators = [f"torch.nn.functional.operator_{i}" for i in range(200)]
    modules = [
        f"model.layers.{layer}.{part}" for layer in range(48) for part in ("attn.q", "attn.k", "mlp.up", "mlp.down")
    ]
    lines = [f"model/part_{i % 7}.py:{10 + i}" for i in range(400)]
    kinds = draw.zipf(1.3, rows) % len(operators)  # few operators make most calls
    return Table(
        "records",
        [
            Column.words("op", (kinds, operators), "operator", "code"),
            Column.words("module", (np.arange(rows) // 5 % len(modules), modules)),
            Column.words("line", (kinds % len(lines), lines)),
            Column.numbers("step", np.arange(rows) * 100 // max(1, rows)),
            Column.numbers("rank", draw.integers(0, 8, rows)),
            Column.words("phase", (draw.integers(0, 2, rows), ["forward", "backward"])),
            Column.words("verdict", (draw.choice(4, rows, p=[0.97, 0.01, 0.01, 0.01]), VERDICTS), kind="verdict"),
            Column.numbers("excess", draw.lognormal(-1, 1, rows), "error ÷ bound", digits=3),
            Column.numbers("seconds", draw.lognormal(-9, 1, rows), "time", "s", 3),
        ],
    )


def write(path: Path, rows: int) -> Table:
    """Writes a page with a verdict and all records."""
    table = records(rows)
    names = ["op", "module", "step", "rank", "phase", "verdict", "excess"]
    views = [
        View("verdict", "Verdict", [blocks.banner("right", f"{rows:,} calls were compared")]),
        View("records", "All records", [blocks.table("records", filters=names)]),
    ]
    write_page(Page("page_size", views, [table]), path)
    return table


@dataclass
class Measured:
    """What a browser needed; times in milliseconds, memory in MB."""

    file: float
    first_view: float = 0.0
    table_view: float = 0.0
    plain_pass: float = 0.0
    memory: float = 0.0
    actions: dict[str, float] = field(default_factory=dict)


@dataclass
class Rounds:
    """Several measurements of one page."""

    rounds: list[Measured]

    def best(self, action: str) -> float:
        """The quickest time of an action."""
        return min(one.actions[action] for one in self.rounds)

    def worst(self, action: str) -> float:
        """Its slowest time."""
        return max(one.actions[action] for one in self.rounds)

    @property
    def plain_pass(self) -> float:
        """The quickest plain pass."""
        return min(one.plain_pass for one in self.rounds)

    @property
    def slowest(self) -> float:
        """The slowest filter or sort, in plain passes; the quickest time of each."""
        return max(self.best(action) for action in self.rounds[0].actions) / self.plain_pass


def launch(api: Any) -> Any:
    """Chromium of the system, or the one that Playwright has."""
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    return api.chromium.launch(**({"executable_path": path} if path else {}), args=["--no-sandbox"])


def memory_of(browser: Any) -> float:
    """Resident memory of the page's process, in MB: the largest of the browser's renderers."""
    found = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    sizes = [0.0]
    for process in found:
        if process["type"] == "renderer":
            status = Path(f"/proc/{process['id']}/status").read_text()
            sizes.append(int(status.partition("VmRSS:")[2].split()[0]) / 1000)
    return max(sizes)


def _act(page: Any, name: str, action: Any) -> float:
    """How long the table took for what an action asked of it."""
    page.evaluate("performance.clearMeasures('table')")
    action()
    page.wait_for_function("() => performance.getEntriesByName('table').length > 0")
    taken: float = page.evaluate("performance.getEntriesByName('table')[0].duration")
    return taken


def measure(browser: Any, path: Path, table: Table, rounds: int = 3) -> Rounds:
    """Opens the page some times, each time in a new process, and uses every filter and every sort."""
    return Rounds([measure_once(browser, path, table) for _ in range(rounds)])


def measure_once(browser: Any, path: Path, table: Table) -> Measured:
    """Opens the page and uses every filter and every sort once."""
    found = Measured(path.stat().st_size / 1e6)
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(60_000)
    begin = time.perf_counter()
    page.goto(path.as_uri())
    page.wait_for_selector(".banner")
    found.first_view = 1000 * (time.perf_counter() - begin)
    begin = time.perf_counter()
    page.evaluate("location.hash = '#records'")
    page.wait_for_selector(".grid-row")
    found.table_view = 1000 * (time.perf_counter() - begin)
    sizes = [(ARRAYS[column.values.dtype.name], len(column)) for column in table.columns]
    found.plain_pass = sum(page.evaluate(PLAIN_PASS, size) for size in sizes)  # one by one: the loop knows its type
    for column in table.columns:
        title = column.title or column.name
        button = page.locator(f".grid-head button:has-text('{title}')")
        found.actions[f"sort by {title}"] = _act(page, column.name, lambda button=button: button.click())
    page.locator(".grid-head button:has-text('error')").click()
    up = page.locator(".grid-head button:has-text('error')")  # the other way, which nothing has prepared
    found.actions["sort by error ÷ bound, up"] = _act(page, "excess", up.click)
    choices = {"rank": "3", "phase": "backward", "verdict": "*wrong"}
    for name, value in choices.items():
        menu = page.locator(f"select[aria-label={name}]")
        found.actions[f"{name} = {value}"] = _act(page, name, lambda menu=menu, value=value: menu.select_option(value))
        _act(page, name, lambda menu=menu: menu.select_option(""))
    for name, value in {"module": "layers.7.", "error ÷ bound": ">3", "Search": "operator_1 mlp"}.items():
        box = page.locator(f"input[aria-label='{name}']")
        found.actions[f"{name}: {value}"] = _act(page, name, lambda box=box, value=value: box.fill(value))
        _act(page, name, lambda box=box: box.fill(""))
    found.memory = memory_of(browser)
    page.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as api:
        path = Path(folder) / "run.html"
        begin = time.perf_counter()
        table = write(path, options.rows)
        written = time.perf_counter() - begin
        browser = launch(api)
        found = measure(browser, path, table, options.rounds)
        browser.close()
    print(f"{options.rows:,} records of {len(table.columns)} columns: {found.rounds[0].file:.1f} MB, {written:.1f} s")
    for one in found.rounds:
        print(f"first view {one.first_view:.0f} ms, table {one.table_view:.0f} ms, memory {one.memory:.0f} MB")
    print(f"a plain pass over the columns: {found.plain_pass:.1f} ms")
    for name in found.rounds[0].actions:
        best, worst = found.best(name), found.worst(name)
        print(f"  {name:24} {best:5.0f} ms (slowest {worst:4.0f}) {best / found.plain_pass:5.1f} plain passes")
    median = statistics.median(found.best(name) for name in found.rounds[0].actions)
    print(f"median {median:.0f} ms; the slowest takes {found.slowest:.1f} plain passes")


if __name__ == "__main__":
    main()
