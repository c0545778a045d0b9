"""How far the bound lies above what correct kernels do: bound / largest error of each result, over PyTorch's op_db.

The kernels are the CPU's. A ratio of 10 means that an error ten times as large as the one that a correct kernel made in
the worst element of that result would still be called right; below 1 would be a false alarm.

    python -m benchmarks.tightness rows.jsonl --seconds 280       # goes on where the file ends
    python -m benchmarks.tightness rows.jsonl --seconds 0         # the tables of what is there, for docs/verdicts.md
    python -m benchmarks.tightness rows.jsonl --seconds 0 --every  # with all operators, for docs/tightness.md
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.verdict_op_db import Runner, op_name

PRODUCTS = ("mm", "matmul", "bmm", "addmm", "baddbmm", "nn.functional.linear", "nn.functional.bilinear", "addbmm")
"""Products of matrices: for these others have published figures."""
COMMON = (
    *("add", "mul", "div", "exp", "sum", "mean", "softmax", "log_softmax", "cumsum", "var", "std", "linalg.norm"),
    *("nn.functional.conv2d", "nn.functional.layer_norm", "nn.functional.batch_norm", "nn.functional.gelu"),
    *("nn.functional.scaled_dot_product_attention", "nn.functional.avg_pool2d", "nn.functional.cross_entropy"),
    *("nn.functional.silu", "nn.functional.interpolate.bilinear", "nn.functional.embedding_bag", "index_add"),
)
Ratios = Mapping[tuple[str, str], Sequence[float]]


def ordered(names: Sequence[str]) -> list[int]:
    """Products first, then what models use most, then the others by chance, so that a part of them stands for all."""
    rest = list(range(len(names)))
    random.Random(0).shuffle(rest)
    ranks = {name: number for number, name in enumerate((*PRODUCTS, *COMMON))}
    return sorted(rest, key=lambda index: ranks.get(names[index], len(ranks)))


def measure(path: Path, dtypes: Sequence[str], samples: int, seconds: float) -> None:
    """Add pairs of operators and dtypes to the file until the time is up."""
    ends = time.monotonic() + seconds
    runner = Runner("cpu", samples, tightness=True)
    done = {(row["op"], row["dtype"]) for row in read(path)}
    names = [op_name(info) for info in runner.op_db]
    with path.open("a", encoding="utf-8") as file:
        for index in ordered(names):
            for dtype in dtypes:
                if time.monotonic() > ends:
                    return
                known = runner.op_db[index].supported_dtypes("cpu")
                if (names[index], dtype) in done or getattr(torch, dtype) not in known:
                    continue
                outcome = runner.pair(index, dtype)
                row = {"op": outcome.op, "dtype": dtype, "samples": outcome.samples, "ratios": outcome.tightness}
                file.write(json.dumps(row) + "\n")
                file.flush()


def read(path: Path) -> Iterator[dict[str, object]]:
    """The rows of a file; none where there is no file."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def by_pair(rows: Iterable[Mapping[str, object]]) -> dict[tuple[str, str], list[float]]:
    """The finite ratios of each operator and dtype."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        ratios = row["ratios"]
        assert isinstance(ratios, list)
        kept = [float(ratio) for ratio in ratios if 0 < ratio < float("inf")]
        if kept:
            found[str(row["op"]), str(row["dtype"])] = kept
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of all does not exceed (`percentile([1, 2, 3], 0.99) == 3`)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def tables(found: Ratios, every: bool = False) -> str:
    """One line for all operators of a dtype, and one for each operator that is named above, or for every one."""
    by_dtype: dict[str, list[list[float]]] = defaultdict(list)
    for (_, dtype), ratios in found.items():
        by_dtype[dtype].append(list(ratios))
    lines = ["| dtype | operators | results | median | 99th percentile |", "| --- | ---: | ---: | ---: | ---: |"]
    for dtype, groups in by_dtype.items():
        everything = [ratio for ratios in groups for ratio in ratios]
        lines.append(f"| {dtype} | {len(groups)} | {len(everything)} | {_cells(everything)} |")
    dtypes = list(by_dtype)
    named = [op for op in (*PRODUCTS, *COMMON) if any((op, dtype) in found for dtype in dtypes)]
    if every:
        named = sorted({op for op, _ in found})
    lines += ["", "| operator | " + " | ".join(f"{d}: median, 99th" for d in dtypes) + " |"]
    lines += ["| --- |" + " ---: |" * len(dtypes)]
    for op in named:
        cells = [_cells(found[op, d]).replace(" | ", ", ") if (op, d) in found else "" for d in dtypes]
        lines.append(f"| `{op}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cells(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3g} | {percentile(ratios, 0.99):.3g}"


def main() -> None:
    """Measure for so long, then print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("rows", type=Path, help="file of results, one operator and dtype a line")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--samples", type=int, default=3, help="of op_db, for each operator and dtype")
    parser.add_argument("--seconds", type=float, default=280.0)
    parser.add_argument("--every", action="store_true", help="a line for each operator, not only for well-known ones")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.seconds > 0:
        measure(options.rows, options.dtypes.split(","), options.samples, options.seconds)
    print(tables(by_pair(read(options.rows)), options.every))


if __name__ == "__main__":
    main()
