"""Runs captured operators again: `python op_tools/run_op_from_data.py DIR --acc_check`."""

from __future__ import annotations

import os
import sys

if __package__ in (None, ""):  # run as a script: its own folder is first on the path, the package is not
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from op_tools.cli import run_from_data

if __name__ == "__main__":
    sys.exit(run_from_data())
