"""Standards of comparison: one file each. Its `judge(row, pair)` puts the verdict into a measured row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from ...view.rows import Row
from ..pair import Pair
from . import dual, seed, torch_testing, ulp


class Standard(NamedTuple):
    """A standard; `quick` ones make do with columns that are measured in one pass in lower precision."""

    judge: Callable[[Row, Pair], Row]
    quick: bool = False


STANDARDS: Final = {
    "ulp": Standard(ulp.judge, quick=True),
    "torch": Standard(torch_testing.judge),
    "dual": Standard(dual.judge),
    "seed": Standard(seed.judge),
}
