"""Lower bounds of sigma for common operators, by formula: no probe has to run the call again.

Each formula counts some of the roundings that the probes of `rounding.py` draw at random, those that dominate where a
result is near zero, and leaves the others out. So it never exceeds what the probes would find: what it explains is
explained, and what it does not is probed. Squares are computed in float32: one digit is enough. One file per family.
"""

from __future__ import annotations

from typing import Final

import torch

from ...call.operators.registry import last_name
from . import attention, elementwise, norms, optimizers, products
from .query import FORMULAS as FORMULAS
from .query import FormulaQuery as FormulaQuery
from .query import Terms as Terms
from .query import weights_of_products as weights_of_products

_FAMILIES: Final = (attention, elementwise, norms, optimizers, products)  # each registers its own
_BY_KERNELS: Final = {tuple(kernels.split("+")): formula for kernels, formula in FORMULAS.by_name.items()}


def terms(query: FormulaQuery) -> Terms | None:
    """The terms of one result, or None where no formula applies (`terms(FormulaQuery(...))`)."""
    structure = query.structure
    known = _BY_KERNELS.get(structure.kernels)
    if known is None and query.source.draws and last_name(query.source.name) in attention.FUSED_WITH_DROPOUT.functions:
        known = attention.FUSED_WITH_DROPOUT if query.backward else None
    if known is None:
        if not structure.sums_of_products or not structure.contracts:
            return None
    elif last_name(query.source.name) not in known.functions:
        return None
    try:
        with torch.no_grad():
            found = products.products(query) if known is None else known.terms(query)
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError):  # arguments that were not foreseen
        return None
    return found if found is not None and found.squares.shape == query.golden.shape else None
