"""Pages for tests: one with every kind of block, one with very many rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ditorch_common.page import Column, Page, Table, View, blocks, write_page

HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
OPERATORS = ["torch.linear", "torch.bmm", "torch.softmax", "torch.add", "torch.gelu", HOSTILE]
VERDICTS = ["right", "wrong", "known weakness", "not comparable"]


def records(rows: int, seed: int = 0) -> Table:
    """Records as a run has them: operator, module, step, rank, verdict, excess, time."""
    draw = np.random.default_rng(seed)
    modules = [f"model.layers.{layer}.{part}" for layer in range(24) for part in ("attn.q", "attn.k", "mlp.up")]
    columns = [
        Column.words(
            "op", (draw.integers(0, len(OPERATORS), rows), OPERATORS), {"en": "operator", "zh": "算子"}, "code"
        ),
        Column.words("module", (draw.integers(0, len(modules), rows), modules), {"en": "module", "zh": "模块"}),
        Column.numbers("step", np.arange(rows) * 50 // max(rows, 1), {"en": "step", "zh": "步"}),
        Column.numbers("rank", draw.integers(0, 4, rows)),
        Column.words("verdict", (draw.choice(4, rows, p=[0.9, 0.02, 0.04, 0.04]), VERDICTS), kind="verdict"),
        Column.numbers("excess", draw.lognormal(0, 1, rows), {"en": "error ÷ bound", "zh": "误差 ÷ 界限"}, digits=3),
        Column.numbers("seconds", draw.lognormal(-9, 1, rows), {"en": "time", "zh": "时间"}, "s", 3),
    ]
    return Table("records", columns)


def verdict_blocks() -> list[dict[str, Any]]:
    source = [
        (40, "        k = self.k(x)"),
        (41, "        a = torch.softmax(q, -1)"),
        (42, f"        return a  # {HOSTILE}"),
    ]
    edges, counts = [0, 0.25, 0.5, 1, 2, 4, math.inf], [90_000, 2_000, 800, 30, 4, 1]
    cells = [1.0 if column >= 28 else 0.0 for _ in range(8) for column in range(32)]
    headline = {"en": "torch.softmax is wrong", "zh": "torch.softmax 错误"}
    return [
        blocks.banner("wrong", headline, ["model.layers.3.attn, model.py:41", HOSTILE]),
        blocks.code(source, 41, "model.py", {"en": "Where", "zh": "位置"}),
        blocks.list_of([{"en": "Let the CPU do it", "zh": "改由 CPU 执行"}], {"en": "What to do next", "zh": "下一步"}),
        blocks.command("python reproduce.py --device soft", {"en": "Reproduce it", "zh": "复现"}),
        blocks.facts([("dtype", "bfloat16"), (HOSTILE, HOSTILE)], {"en": "Numbers", "zh": "数值"}),
        blocks.histogram(
            edges, counts, {"en": "error in bounds", "zh": "误差"}, 1.0, {"en": "Errors", "zh": "误差分布"}
        ),
        blocks.tensor_map(
            8, 32, cells, [8, 128, 1024], ("rows", "columns"), {"en": "Which elements", "zh": "哪些元素"}
        ),
        blocks.group({"en": "How much", "zh": "多少"}, [blocks.text(f"all of it\n{HOSTILE}")], open=False),
        {"kind": "hologram", "title": ""},
    ]


def tree_nodes() -> list[tuple[int, str, str, list[Any], int]]:
    nodes: list[tuple[int, str, str, list[Any], int]] = [(-1, "model", "Module", ["right", 1.2], -1)]
    for layer in range(24):
        nodes.append((0, f"layers.{layer}", "Block", ["right", 0.05], -1))
        block = len(nodes) - 1
        for name in ("linear", "softmax", HOSTILE):
            verdict = "wrong" if (layer, name) == (3, "softmax") else "right"
            nodes.append((block, name, "call", [verdict, 0.001 * layer], 0))
    return nodes


def everything(rows: int = 3000) -> Page:
    """A page with every kind of block."""
    steps = np.arange(100)
    loss = 3 * np.exp(-steps / 40)
    nodes = tree_nodes()
    pairs = [
        (n[0], n[1] if i % 11 else None, n[1] if i % 13 else None, 3.0 * i, [n[3][1]]) for i, n in enumerate(nodes)
    ]
    spans = [(i % 3, i * 0.01, 0.009, f"op {i}", ["matmul", HOSTILE][i % 2]) for i in range(300)]
    heat = [None if cell % 37 == 0 else math.inf if cell == 500 else 1.1**cell for cell in range(24 * 30)]
    columns: list[blocks.TreeColumn] = [{"name": "verdict"}, {"name": "time", "unit": "s"}]
    views = [
        View("verdict", {"en": "Verdict", "zh": "结论"}, verdict_blocks()),
        View("diff", {"en": "Diff", "zh": "对比"}, [blocks.pair_tree([{"name": "time", "unit": "s"}], pairs)]),
        View(
            "graph", {"en": "Graph", "zh": "图"}, [blocks.tree(columns, nodes, [[blocks.facts([("from", HOSTILE)])]])]
        ),
        View(
            "time",
            {"en": "Time", "zh": "时间"},
            [
                blocks.bars([f"torch.op{i}" for i in range(29)] + [HOSTILE], list(range(30)), "s"),
                blocks.flame([(-1, "model", 1.0), (0, "layers.0", 0.5), (0, HOSTILE, 0.4), (1, "attn", 0.3)], "s"),
                blocks.timeline(["forward", "backward", HOSTILE], spans, "s"),
            ],
        ),
        View("overflow", "Overflow", [blocks.heat([HOSTILE] * 24, [str(i) for i in range(30)], heat, scale="log")]),
        View(
            "loss",
            {"en": "Loss", "zh": "损失"},
            [
                blocks.lines(
                    steps.tolist(),
                    [{"name": HOSTILE, "y": loss.tolist(), "band": ((loss - 0.2).tolist(), (loss + 0.2).tolist())}],
                    [{"x": 41, "text": HOSTILE}],
                    {"en": "step", "zh": "步"},
                )
            ],
        ),
        View(
            "captures", "Captures", [], {"en": "Run it with OpCapture to have some.", "zh": "请使用 OpCapture 运行。"}
        ),
        View(
            "records",
            {"en": "All records", "zh": "全部记录"},
            [blocks.table("records", filters=["op", "module", "step", "rank", "verdict", "excess"])],
        ),
        View(
            "two",
            "Two tables",
            [
                blocks.table(
                    "records", ["op", "excess"], where={"verdict": ["wrong", "known weakness"]}, title="Wrong"
                ),
                blocks.table("records", ["op", "step"], ["op"], ("step", "down"), title="All"),
                blocks.table("absent"),
            ],
        ),
    ]
    return Page(f"run 7 {HOSTILE}", views, [records(rows)], {"en": "on soft", "zh": "在 soft 上"})


def written(folder: Path, rows: int = 3000) -> Path:
    """The file of that page."""
    return write_page(everything(rows), folder / "run.html")
