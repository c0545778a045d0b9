"""Which elements of a wrong result are wrong, and by how much: small pictures that the records keep of wrong calls."""

from __future__ import annotations

import dataclasses
import json
import linecache
import math
import re
from collections.abc import Sequence
from typing import Any, Final

import torch

from ..call.description import Tensor
from ..call.equality import leaves_of
from ..view.rows import Row
from .ladder import FORWARD, Job, asked

TABLE: Final = "wrong"
COLUMNS: Final = {
    "run": "INTEGER",
    "event": "INTEGER",
    "call_id": "INTEGER",
    "op": "TEXT",
    "phase": "TEXT",
    "name": "TEXT",  # of the worst tensor
    "reason": "TEXT",
    "excess": "REAL",
    "location": "TEXT",
    "module": "TEXT",
    "step": "INTEGER",
    "folder": "TEXT",  # of the saved call and its reproducer
    "source": "TEXT",  # JSON: lines around the call, with their numbers
    "picture": "TEXT",  # JSON: see `Picture`; empty where the values are not known
}
CONSEQUENCES: Final = {"run": "INTEGER", "event": "INTEGER", "from_wrong": "INTEGER", "reached": "INTEGER"}
AROUND: Final = 4  # lines of source before and after
_BINS: Final = (-10, 40)  # powers of two of error / bound
_ROWS, _COLUMNS = 24, 64  # of the map, at most
_MAX_ELEMENTS: Final = 1 << 26  # of results that are looked at
_LOCATION: Final = re.compile(r"^(.*?):(\d+) ")


@dataclasses.dataclass(frozen=True)
class Picture:
    """Errors of one tensor in units of what rounding allows: how many of which size, and where the wrong ones are.

    `counts[i]` errors lie between `edges[i]` and `edges[i + 1]`; `cells` are shares of wrong elements, row by row, of
    the tensor seen as a matrix with its last dimension across. `unit` says what an error of 1 is.
    """

    unit: str
    edges: list[float]
    counts: list[int]
    elements: int
    wrong: int
    nan: int
    shape: list[int]
    rows: int
    columns: int
    cells: list[float]

    def as_json(self) -> str:
        """The same as text (`Picture(...).as_json()`)."""
        return json.dumps(dataclasses.asdict(self))


def picture(device: Tensor, golden: Tensor, bound: Any) -> Picture | None:
    """The errors of a result, given the golden one and what rounding allows; None where nothing can be said.

    >>> picture(torch.tensor([1.0, 3.0]), torch.ones(2, dtype=torch.float64), 0.5).wrong
    1
    """
    if device.shape != golden.shape or not 0 < device.numel() <= _MAX_ELEMENTS or device.layout != torch.strided:
        return None
    wide = torch.complex128 if device.is_complex() or golden.is_complex() else torch.float64
    ours, theirs = device.detach().to(wide), golden.detach().to(wide)
    error = (ours - theirs).abs()
    error[(ours == theirs) | (ours.isnan() & theirs.isnan())] = 0.0  # inf - inf
    allowed, unit = _allowed(device, theirs, bound)
    share = torch.where(error == 0, 0.0, error / allowed.clamp_min(1e-300))
    nan = share.isnan()
    wrong = (share > 1) | nan
    edges, counts = _histogram(share[~nan].flatten())
    rows, columns, cells = _map(wrong)
    return Picture(
        *(unit, edges, counts, wrong.numel(), int(wrong.sum()), int(nan.sum()), list(device.shape)),
        *(rows, columns, cells),
    )


def _allowed(device: Tensor, golden: Tensor, bound: Any) -> tuple[Tensor, str]:
    """What rounding may do to each element, and what that is called."""
    if bound is not None:
        with_shape = torch.as_tensor(bound, dtype=torch.float64)
        if with_shape.numel() == 1 or with_shape.shape == golden.shape:
            return with_shape.abs().expand(golden.shape) if with_shape.numel() == 1 else with_shape.abs(), "bound"
    if device.is_floating_point() or device.is_complex():
        info = torch.finfo(device.dtype)
        return golden.abs().double().clamp_min(info.smallest_normal) * info.eps, "ulp"
    return torch.full(golden.shape, 0.5, dtype=torch.float64), "half"


def _histogram(share: Tensor) -> tuple[list[float], list[int]]:
    """Errors by powers of two, zeros in the first bin; empty bins at both ends are left out."""
    low, high = _BINS
    powers = torch.where(share > 0, share.log2().floor().clamp(low, high - 1), torch.tensor(low - 1.0)) - (low - 1)
    counts = torch.bincount(powers.to(torch.int64), minlength=high - low + 1).tolist()
    edges = [0.0, *[2.0**power for power in range(low, high + 1)]]
    last = max((place for place, count in enumerate(counts) if count), default=0)
    last = max(last, -low + 1)  # the bound itself is always shown
    first = next((place for place, count in enumerate(counts[1:], 1) if count), last)
    first = max(1, min(first, -low) - 1)
    if first > 1:  # what is smaller goes with the zeros
        return [0.0, *edges[first + 1 : last + 2]], [sum(counts[: first + 1]), *counts[first + 1 : last + 1]]
    return edges[: last + 2], counts[: last + 1]


def _map(wrong: Tensor) -> tuple[int, int, list[float]]:
    """The share of wrong elements in each tile of the tensor, seen as a matrix."""
    across = wrong.shape[-1] if wrong.dim() else 1
    matrix = wrong.reshape(-1, across).to(torch.float64)
    if matrix.shape[0] == 1 and across > _COLUMNS:  # a vector: in lines, one after the other
        width = math.ceil(across / min(_ROWS, math.ceil(across / _COLUMNS)))
        padded = torch.full((math.ceil(across / width) * width,), math.nan, dtype=torch.float64)
        padded[:across] = matrix[0]
        matrix = padded.reshape(-1, width)
    tiles = _pooled(_pooled(matrix, _ROWS).T, _COLUMNS).T
    return tiles.shape[0], tiles.shape[1], [round(x, 4) for x in tiles.flatten().tolist()]


def _pooled(matrix: Tensor, most: int) -> Tensor:
    """Means of neighbouring rows, so that at most so many are left; what is not a number does not count."""
    rows = matrix.shape[0]
    if rows <= most:
        return matrix.nan_to_num(0.0)
    size = math.ceil(rows / most)
    padded = torch.full((math.ceil(rows / size) * size, matrix.shape[1]), math.nan, dtype=matrix.dtype)
    padded[:rows] = matrix
    return padded.reshape(-1, size, matrix.shape[1]).nanmean(dim=1).nan_to_num(0.0)


def picture_of(job: Job, worst: Row) -> str:
    """The picture of the worst row of a judged job, as JSON; empty where its values are not on this host."""
    sides = _sides(job, worst)
    found = None if sides is None else picture(*sides, worst.bound)
    return "" if found is None else found.as_json()


def _sides(job: Job, row: Row) -> tuple[Tensor, Tensor] | None:
    result = job.golden
    if result is None or not job.values:
        return None
    ours: Sequence[Any]
    theirs: Sequence[Any]
    if job.phase == FORWARD and row.part == "output":
        ours, theirs = list(leaves_of(job.values[2])), list(leaves_of(result.outputs))
        place = row.index or 0
    elif job.phase != FORWARD and row.part == "grad_input":
        ours, theirs = list(job.values[1]), asked(result.grad_inputs or (), job.unasked)
        place = _place_of_gradient(job, row)
    else:
        return None
    if not 0 <= place < min(len(ours), len(theirs)):
        return None
    left, right = ours[place], theirs[place]
    return (left, right) if isinstance(left, Tensor) and isinstance(right, Tensor) else None


def _place_of_gradient(job: Job, row: Row) -> int:
    from ..call.arguments import numbers_of

    assert job.golden is not None
    source = job.golden.source
    place = numbers_of(job.call.op, source.args, source.kwargs).place(row.part, row.index)
    return -1 if place is None else place


def source_around(location: str) -> str:
    """The lines around `file:line function: text`, as JSON: the file, the line, and numbered lines; empty if unknown.

    They are kept with the record, since the file may be another one when somebody looks.
    """
    found = _LOCATION.match(location)
    if found is None:
        return ""
    file, line = found[1], int(found[2])
    whole = linecache.getlines(file)
    first = max(1, line - AROUND)
    lines = [[n, whole[n - 1].rstrip("\n")[:400]] for n in range(first, min(len(whole), line + AROUND) + 1)]
    return json.dumps({"file": file, "line": line, "lines": lines}) if lines else ""
