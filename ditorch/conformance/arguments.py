"""The grammar of ``ditorch conformance``; importing it costs nothing, so that the other commands stay quick."""

from __future__ import annotations

import argparse
from pathlib import Path

from ditorch.conformance.cases import PARTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The grammar of ``ditorch conformance`` (`add_arguments(commands.add_parser("conformance"))`)."""
    parser.set_defaults(device=None)
    parser.epilog = (
        "Every run leaves in its folder a page, summaries, and BACKEND_summary_of_pytorch_test_case_testing.csv.tar: "
        "every test case with its result, the reason and the versions, in one CSV to hand on. "
        "tar xf unpacks it, pandas.read_csv reads it as it is."
    )
    parser.add_argument("--device", dest="devices", metavar="D", help="backend, or devices: soft, cuda, cuda:0,cuda:1")
    parser.add_argument("--ops", metavar="PATTERN", help="only these names (wildcards, several joined by commas)")
    parser.add_argument("--dtypes", help="only these dtypes, as in float32,bfloat16")
    parser.add_argument("--checks", help="only these checks, as in forward,backward")
    parser.add_argument("--what", default=",".join(PARTS), help=f"parts to run (default: {','.join(PARTS)})")
    parser.add_argument("--jobs", type=int, help="worker processes (default: one per core, on accelerators 12 at most)")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="seconds for one case (60), for one native test (300)"
    )
    parser.add_argument(
        "--samples", default="all", metavar="N", help="samples of each case: a number, or all (default)"
    )
    parser.add_argument("--resume", action="store_true", help="go on after an interruption")
    parser.add_argument("--fresh", action="store_true", help="replace the results that are in the folder")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: conformance_results/DEVICE)")
    parser.add_argument("--case", metavar="CASE", help="run one case alone and show it in full")
    parser.add_argument(
        "--hunt",
        action="store_true",
        help="try calls that the databases leave out: layouts, sizes, values, combinations of arguments",
    )
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="with --hunt: how long (default: 10)")
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="known failures (default: the backend's own)")
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="where workers run")
    parser.add_argument("--ray-address", default=None, metavar="A", help="cluster to join; without it, this machine")
    parser.add_argument(
        "--pytorch-src", type=Path, metavar="DIR", help="run the test files of a PyTorch checkout instead"
    )
    parser.add_argument("--files", metavar="PATTERN", help="with --pytorch-src: only these, as in test_ops.py,nn/*")
    actions = parser.add_subparsers(dest="action", metavar="diff|report|pack")
    report = actions.add_parser("report", help="write the page and the other files again, from results that are there")
    report.add_argument("folder", type=Path, help="folder of a run")
    # Not the option's own default: a sub-parser's defaults overwrite what was given before its name.
    report.add_argument("--ledger", type=Path, default=argparse.SUPPRESS, metavar="FILE", help="known failures")
    difference = actions.add_parser("diff", help="compare two results")
    difference.add_argument("before", type=Path, help="folder or summary.json")
    difference.add_argument("after", type=Path, help="folder or summary.json")
    difference.add_argument("--json", action="store_true")
    packing = actions.add_parser("pack", help="write BACKEND_summary_of_pytorch_test_case_testing.csv.tar from a page")
    packing.add_argument("source", type=Path, help="page of a run, or the folder that holds it as index.html")
    packing.add_argument("--out", type=Path, default=argparse.SUPPRESS, metavar="DIR", help="default: beside the page")
