"""Lower bounds of sigma for common operators, by formula: no probe has to run the call again.

Each formula counts some of the roundings that the probes of `rounding.py` draw at random, those that dominate where a
result is near zero, and leaves the others out. So it never exceeds what the probes would find: what it explains is
explained, and what it does not is probed. Squares are computed in float32: one digit is enough. One file per family.
"""

from __future__ import annotations

from typing import Final

from . import attention, elementwise, embedding, norms, optimizers
from .query import FORMULAS as FORMULAS
from .query import FormulaQuery as FormulaQuery
from .query import Terms as Terms
from .query import terms as terms
from .query import weights_of_products as weights_of_products

_FAMILIES: Final = (attention, elementwise, embedding, norms, optimizers)  # each registers its own
