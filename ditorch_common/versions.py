"""Which versions of Python and PyTorch are promised to work; `make test-matrix` runs them."""

from __future__ import annotations

import sys
from typing import Final

if not (3, 10) <= sys.version_info < (3, 14):  # pip refuses them, but a checkout on PYTHONPATH is not asked
    raise ImportError(f"ditorch and op_tools need Python 3.10 to 3.13, this is Python {sys.version.split()[0]}")

import torch

OLDEST: Final = (2, 6)


def check(torch_version: str) -> None:
    """Refuse a PyTorch that is too old, in one line, before anything fails in it (`check("2.13.0")`).

    >>> check("2.4.1")
    Traceback (most recent call last):
        ...
    ImportError: ditorch and op_tools need torch 2.6 or newer, this is torch 2.4.1: pip install -U torch
    """
    try:
        found = tuple(map(int, torch_version.split("+")[0].split(".")[:2]))
    except ValueError:  # a build of somebody's own
        return
    if found < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"ditorch and op_tools need torch {oldest} or newer, this is torch {torch_version}: pip install -U torch"
        )


check(torch.__version__)  # both packages import this first
