"""Faults on purpose: makes a chosen operator of the software accelerator wrong, slow or missing.

This is how one knows that a tool finds what it claims to find. A fault is one line of text,
the same in Python and in the environment variable ``DITORCH_SOFT_FAULTS``::

    OPERATOR: KIND[=VALUE][, CONDITION=VALUE ...]        several of them, separated by ";"

    addmm: noise=1e-2                          every result off by up to 1 %
    mm: accumulate=bfloat16, phase=backward    summed as if in bfloat16, in backward only
    add.Tensor: element=0.5, dtype=float16, nth=3
    avg_pool2d_backward: misread, layout=channels_last, arg=padding != 0
    c10d::allreduce_: drop_write               this rank keeps what it had
    *: no_float64

>>> from ditorch.soft import faults
>>> with faults.plant("mul.Tensor: nan") as fault:
...     (torch.ones(3, device="soft") * 2).isnan().sum().item()
1
>>> fault.hits
1

The same seed gives the same fault, call for call. ``grammar.py`` reads the text, ``expressions.py`` the conditions on
shapes and arguments (nothing in them is executed), ``planting.py`` puts faults in force, ``effects.py`` does the harm.
"""

from __future__ import annotations

from .grammar import KINDS, Fault, FaultSyntaxError, Slowdown, parse
from .planting import Planted, active, clear, from_environment, plant

__all__ = [
    "KINDS",
    "Fault",
    "FaultSyntaxError",
    "Planted",
    "Slowdown",
    "active",
    "clear",
    "from_environment",
    "parse",
    "plant",
]
