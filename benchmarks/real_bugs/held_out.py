"""Bugs of the same classes that nobody tuned the hunt for: kinds and conditions drawn at random over many operators.

    python -m benchmarks.real_bugs.held_out rows.jsonl --seed 1 --faults 120 --seconds 400

Conditions are those of reported bugs: a layout, a dtype, a size, an argument, a phase, one to three of them at once.
Where no call can meet them all, the fault counts as missed. The hunt has the calls that `--minutes 10` on two idle
cores leaves for an operator.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.real_bugs import asked
from benchmarks.real_bugs.bugs import Bug
from benchmarks.real_bugs.watched import planted

_PLAIN: Final = ("layout=noncontiguous", "layout=transposed", "layout=offset", "layout=expanded")
_IMAGES: Final = (*_PLAIN, "layout=channels_last", "layout=channels_last")
_DTYPES: Final = ("dtype=bfloat16", "dtype=float16", "dtype=float32")
_SIZES: Final = (
    *("n > 1000", "n > 10000", "s[-1] % 8 == 1", "s[-1] % 4 != 0", "s[-1] > 64", "s[-1] == 1", "s[0] == 1"),
    *("s[0] > 32", "s[-1] % 32 == 0", "n < 8", "s[0] % 2 == 1 and s[-1] > 16"),
)
_KINDS: Final = ("zero", "scale=1.1", "nan", "element=0.5", "tail=8:noise", "noise=0.1", "wrap=5")
_INDEX_KINDS: Final = ("indices", "zero", "constant=-1")


def _entry(
    listed: str, operator: str, *args: str, layouts: tuple[str, ...] = _PLAIN, kinds: tuple[str, ...] = _KINDS
) -> tuple[str, str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    return listed, operator, args, layouts, kinds


_F: Final = "nn.functional."
OPERATORS: Final = (
    _entry("mul", "mul.Tensor"),
    _entry("div.no_rounding_mode", "div.Tensor"),
    _entry("log", "log"),
    _entry("sqrt", "sqrt"),
    _entry("tanh", "tanh"),
    _entry("tanh", "tanh_backward"),
    _entry("sigmoid", "sigmoid"),
    _entry("where", "where.self"),
    _entry("clamp", "clamp"),
    _entry("maximum", "maximum"),
    _entry("addcmul", "addcmul", "value != 1"),
    _entry(_F + "gelu", "gelu", "approximate == 'tanh'"),
    _entry(_F + "gelu", "gelu_backward", "approximate == 'tanh'"),
    _entry(_F + "silu", "silu"),
    _entry(_F + "softplus", "softplus", "beta != 1", "threshold < 20"),
    _entry("mean", "mean", "keepdim"),
    _entry("amax", "amax", "keepdim"),
    _entry("prod", "prod"),
    _entry("var", "var", "keepdim"),
    _entry("linalg.vector_norm", "linalg_vector_norm", "ord != 2", "keepdim"),
    _entry("argmin", "argmin", "dim == 0", "keepdim", kinds=_INDEX_KINDS),
    _entry("cumsum", "cumsum", "dim == 0", "dim == 1"),
    _entry("mm", "mm"),
    _entry("bmm", "bmm"),
    _entry("addmm", "addmm", "beta != 1", "alpha != 1"),
    _entry("baddbmm", "baddbmm", "beta != 1", "alpha != 1"),
    _entry(_F + "linear", "addmm"),
    _entry(_F + "conv1d", "convolution", "stride != 1", "dilation != 1", "groups > 1", "padding != 0", "bias is None"),
    _entry(
        *(_F + "conv2d", "convolution", "stride != 1", "dilation != 1", "groups > 1", "padding != 0", "bias is None"),
        layouts=_IMAGES,
    ),
    _entry(_F + "conv2d", "convolution_backward", "stride != 1", "groups > 1", "padding != 0", layouts=_IMAGES),
    _entry(_F + "conv_transpose2d", "convolution", "output_padding != 0", "groups > 1", "stride != 1", layouts=_IMAGES),
    _entry(
        *(_F + "max_pool2d", "max_pool2d_with_indices", "padding != 0", "dilation != 1", "ceil_mode", "stride == 1"),
        layouts=_IMAGES,
        kinds=("scale=1.1", "zero", "noise=0.1"),
    ),
    _entry(_F + "max_pool2d", "max_pool2d_with_indices_backward", "padding != 0", "ceil_mode", layouts=_IMAGES),
    _entry(
        _F + "avg_pool2d", "avg_pool2d", "ceil_mode", "padding != 0", "divisor_override is not None", layouts=_IMAGES
    ),
    _entry(_F + "avg_pool3d", "avg_pool3d", "ceil_mode", "padding != 0", layouts=_IMAGES),
    _entry(_F + "adaptive_avg_pool2d", "_adaptive_avg_pool2d", layouts=_IMAGES),
    _entry(_F + "batch_norm", "native_batch_norm", "training", "running_mean is None", layouts=_IMAGES),
    _entry(_F + "group_norm", "native_group_norm", "group > 1", "weight is None", layouts=_IMAGES),
    _entry(_F + "group_norm", "native_group_norm_backward", "group > 1", layouts=_IMAGES),
    _entry(_F + "layer_norm", "native_layer_norm", "weight is None", "bias is not None"),
    _entry("softmax", "_softmax", "dim == 0", "dim == 1"),
    _entry("softmax", "_softmax_backward_data", "dim == 0", "dim == 1"),
    _entry("log_softmax", "_log_softmax", "dim == 0", "dim == 1"),
    _entry("gather", "gather", "dim == 0", "dim == 1"),
    _entry("index_select", "index_select", "dim == 0", "dim == 1"),
    _entry("scatter_add", "scatter_add", "dim == 0", "dim == 1"),
    _entry("masked_fill", "masked_fill"),
    _entry("topk", "topk", "not largest", "k > 2", "dim == 0", kinds=_INDEX_KINDS),
    _entry("sort", "sort", "descending", "dim == 0", kinds=_INDEX_KINDS),
    _entry("cat", "cat", "dim == 1", "dim == 0"),
    _entry("flip", "flip"),
    _entry("roll", "roll"),
    _entry("tril", "tril", "diagonal < 0", "diagonal > 0"),
    _entry(_F + "embedding", "embedding", "padding_idx >= 0"),
    _entry(_F + "embedding", "embedding_dense_backward", "padding_idx >= 0", "scale_grad_by_freq"),
    _entry(_F + "mse_loss", "mse_loss", "reduction == 0", "reduction == 2"),
    _entry(_F + "smooth_l1_loss", "smooth_l1_loss", "beta != 1", "reduction == 0"),
    _entry(_F + "binary_cross_entropy", "binary_cross_entropy", "weight is not None", "reduction == 2"),
    _entry(_F + "nll_loss", "nll_loss_forward", "weight is not None", "ignore_index >= 0"),
    _entry(_F + "interpolate.bilinear", "upsample_bilinear2d", "align_corners", layouts=_IMAGES),
    _entry(_F + "interpolate.bilinear", "upsample_bilinear2d_backward", "align_corners", layouts=_IMAGES),
    _entry(_F + "grid_sample", "grid_sampler_2d", "align_corners", "padding_mode == 1", layouts=_IMAGES),
    _entry(_F + "pad.reflect", "reflection_pad2d", layouts=_IMAGES),
    _entry(_F + "unfold", "im2col", "dilation != 1", "padding != 0", "stride != 1", layouts=_IMAGES),
    _entry(_F + "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu", "is_causal"),
)
"""Operator of the database, operator of aten that is made wrong, conditions on its arguments, layouts, kinds."""


def drawn(seed: int, number: int) -> Iterator[Bug]:
    """So many faults that can be planted (`list(drawn(1, 120))`)."""
    choose, found = random.Random(f"held out {seed}"), 0
    while found < number:
        listed, operator, args, layouts, kinds = choose.choice(OPERATORS)
        groups = [
            [*layouts],
            [*_DTYPES],
            [f"shape={s}" for s in _SIZES],
            *([[f"arg={a}" for a in args]] if args else []),
        ]
        many = choose.choices((1, 2, 3), (0.3, 0.5, 0.2))[0]
        conditions = [choose.choice(group) for group in choose.sample(groups, many)]
        kind = choose.choice(kinds)
        if kinds is not _INDEX_KINDS and "layout=noncontiguous" in conditions and choose.random() < 0.5:
            kind = "misread"
        text = f"{operator}: {', '.join([kind, *conditions])}"
        try:
            with planted(text):
                pass
        except ValueError:
            continue
        found += 1
        yield Bug(found, text, f"seed {seed}", text, lambda: lambda: None, operator, listed=(listed,))


def main() -> None:
    """Hunt for each fault that has no answer in the file yet, until the time is up; say how many were found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=120)
    parser.add_argument("--round", default="round-1")
    parser.add_argument("--seconds", type=float, default=400.0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    asked.load()
    ends = time.monotonic() + options.seconds
    rows: list[dict[str, Any]] = []
    if options.rows.exists():
        rows = [json.loads(line) for line in options.rows.read_text(encoding="utf-8").splitlines()]
    done = {row["fault"] for row in rows}
    with options.rows.open("a", encoding="utf-8") as file:
        for bug in drawn(options.seed, options.faults):
            if bug.fault in done:
                continue
            if time.monotonic() > ends:
                break
            answer = asked.hunted(bug, check=options.round)
            rows.append({"fault": bug.fault, "found": answer.found, "hits": answer.hits, "note": answer.note})
            rows[-1]["seconds"] = answer.seconds
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
    met = [row for row in rows if row["hits"]]
    print(f"{sum(row['found'] for row in rows)} of {len(rows)} found; {len(met)} were met by a call")
    for row in rows:
        if not row["found"]:
            print(f"missed, met {row['hits']} times: {row['fault']} ({row['note']})")


if __name__ == "__main__":
    main()
