"""One result beside its reference: what every standard of comparison is given, and how a row of it is made."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..call.description import Tensor
from ..call.operators.registry import CUDA
from ..view.rows import RIGHT, WRONG, Row
from .golden import GoldenResult
from .measures import Sides
from .rounding import Precision, precision_of, unit
from .uncertainty import Structure, Uncertainty, remembers


@dataclasses.dataclass(eq=False)
class CallUncertainty:
    """How uncertain the results of one part of a call are; found out only where somebody asks."""

    result: GoldenResult
    part: str
    device: Sequence[Any]  # what the device returned
    max_seconds: float | None
    structure: Structure | None = None
    _of_dtype: dict[torch.dtype, Uncertainty] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def whole(self) -> Uncertainty:
        """That of all results together."""
        return self._made(_coarsest(self.result, self.part, self.device), self.structure)

    def of(self, leaf: Any) -> Uncertainty:
        """That of one of the results. A single kernel is as precise as what it returns, all that it returns."""
        whole = self.whole
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()) or not whole.usable:
            return whole
        if leaf.dtype == whole.precision.dtype or (
            self.part == "grad_input" and self.result.source.rounded_to is not None
        ):
            return whole
        if not whole.structure.opaque and not whole.structure.one_kernel:
            return whole
        if leaf.dtype not in self._of_dtype:
            self._of_dtype[leaf.dtype] = self._made(leaf.dtype, whole.structure)
        return self._of_dtype[leaf.dtype]

    def _made(self, dtype: torch.dtype, structure: Structure | None) -> Uncertainty:
        precision = precision_of(dtype, self.result.source.device)
        return Uncertainty(self.result, self.part, precision, self.max_seconds, structure)

    @functools.cached_property
    def remembered(self) -> bool:
        """Whether the structure of such a call is known without running it; all tensors of the call are looked at."""
        return remembers(self.result, self.part)

    def known(self, leaf: Any) -> Uncertainty | None:
        """That of one of the results, if somebody has asked for its structure, which says what the call does."""
        whole = self.__dict__.get("whole")
        seen = whole is not None and "structure" in vars(whole) and whole.usable and not whole.structure.opaque
        return self.of(leaf) if seen else None

    @property
    def probes(self) -> int:
        """How many there have been."""
        asked = [u for u in (self.__dict__.get("whole"), *self._of_dtype.values()) if u is not None]
        return sum(u.probes + u.narrow_probes for u in asked)


def _coarsest(result: GoldenResult, part: str, device: Sequence[Any]) -> torch.dtype:
    """The dtype with the largest unit among the results (and the gradients that came in)."""
    tensors = [t for t in device if isinstance(t, Tensor)]
    if part == "grad_input":
        tensors += [t for t in result.source.grad_outputs or () if t is not None]
    low = result.source.autocast
    if low is not None and any(t.dtype == low for t in result.source.tensors):
        return low  # what lies between the steps of a composite call is kept in the lower precision
    dtypes = [t.dtype for t in tensors if t.is_floating_point() or t.is_complex()]
    if not dtypes:
        dtypes = [t.dtype for t in result.source.tensors if t.is_floating_point() or t.is_complex()] or [torch.float32]
    return max(dtypes, key=unit)


@dataclasses.dataclass
class Pair:
    """One leaf of what the device returned, and the same one of the golden run."""

    op: str
    part: str
    index: int | None  # in the name of its row
    position: int  # among the leaves
    device: Any
    golden: Any
    of_call: CallUncertainty | None
    units: float | None = None  # the largest error in units of rounding, if it is known
    tolerance_set: bool = False  # by the user
    allowances: bool = False  # see `Rules`

    def row(self, allclose: bool, largest: float, atol: float, rtol: float, info: str) -> Row:
        """A row of this pair whose differences are all as large as `largest`."""
        return Row(self.op, self.part, self.index, allclose, largest, largest, atol, rtol, info)

    @functools.cached_property
    def precision(self) -> Precision:
        """What the result may be expected to have."""
        dtype, call = self.device.dtype, self.of_call
        if call is not None and self.part == "grad_input" and call.result.source.rounded_to is not None:
            # gradients of arguments that autocast rounded: computed in the lower precision, handed out in float32
            dtype = max(dtype, call.result.source.rounded_to, key=unit)
        return precision_of(dtype)

    @property
    def unit_ratio(self) -> float:
        """The unit of rounding of the result's dtype, divided by that of its precision."""
        return precision_of(self.device.dtype).stored / self.precision.stored

    @property
    def has_tf32(self) -> bool:
        """Whether the call's arguments were float32 on a device that may multiply them in TF32."""
        source = None if self.of_call is None else self.of_call.result.source
        if source is None or source.device not in CUDA or source.rounded_to is not None:
            return False
        return any(t.dtype == torch.float32 for t in source.tensors)

    @functools.cached_property
    def sides(self) -> Sides:
        """Both, to be measured."""
        return Sides(self.device, self.golden)

    @property
    def uncertainty(self) -> Uncertainty | None:
        """How far rounding may move the result; None where nothing is known of the call."""
        return None if self.of_call is None else self.of_call.of(self.device)


def decided(row: Row, right: bool, reason: str, bound: float | Tensor | None = None) -> Row:
    """The row with its verdict; what is right needs no reason. An infinite bound: not the values are wrong."""
    return row._replace(verdict=RIGHT) if right else row._replace(verdict=WRONG, reason=reason, bound=bound)


def explained(row: Row, standard: str = "ulp") -> Row:
    """A row that is right although it is not allclose, with the reason why."""
    if "rounding" in row.error_info or "tie" in row.error_info:  # already said
        return row
    share = f" ({row.excess:.0%} of its bound)" if row.excess and standard == "ulp" else ""
    return row._replace(error_info=joined(row.error_info, right_because(standard) + share))


def right_because(standard: str) -> str:
    """Why something is right that is not allclose (`right_because("ulp") == "within rounding"`)."""
    return "within rounding" if standard == "ulp" else f"right by the standard {standard}"


def joined(*texts: str) -> str:
    """Those that say something, one after the other."""
    return "; ".join(t for t in texts if t)


def first_place(mask: Tensor) -> tuple[int, ...]:
    """Where the first element is that the mask has."""
    return tuple(mask.nonzero()[0].tolist())
