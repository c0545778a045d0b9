"""What explains an error that rounding in the result's own precision does not: TF32, or a known weakness of a kernel.

Where the user's settings let a device multiply float32 in TF32, products are judged by that precision. Where the
ledger of the conformance run knows that a device's own kernel computes in a lower precision, so is that kernel. It gets
a verdict of its own. Errors larger than that are wrong all the same.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib.util
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch

from ..call import facts
from ..view.rows import RIGHT, WEAK
from .rounding import SINGLE, Precision, Structure, unit

TF32: Final = 2.0**-11  # its unit of rounding
IN_TF32: Final = "in TF32, as torch.backends allows"
_MAX_CHAIN: Final = 16  # roundings of a term in a sum that a kernel does in a half type, in blocks
_RECURRENT: Final = {"lstm": "nn.LSTM", "gru": "nn.GRU", "rnn_tanh": "nn.RNN", "rnn_relu": "nn.RNN"}


class Allowance(NamedTuple):
    """A precision by which a result may be judged, and what to say of it."""

    precision: Precision
    verdict: str
    note: str


def of(
    op: str, phase: str, device: str, dtypes: Sequence[torch.dtype], structure: Structure, summed: int = 1
) -> Iterator[Allowance]:
    """What may explain an error of a call on a device; `dtypes` are those of its floating arguments and results.

    `summed` is how many numbers at most are added up to one of the result, where that is known.
    """
    if not dtypes:
        return
    coarsest = max(dtypes, key=unit)
    single = coarsest == torch.float32
    if single and structure.contracts and device == "cuda" and tf32_allowed(op):
        yield Allowance(_coarse(torch.float32, TF32, device), RIGHT, IN_TF32)
    reason = known_weakness(op, phase, device, coarsest)
    if reason:
        stored = TF32 if single else unit(coarsest)
        length = max(structure.longest_sum, summed)
        chained = math.sqrt(min(length, _MAX_CHAIN) / length)
        precision = _coarse(coarsest, stored, device, inner=SINGLE if single else stored * chained)
        yield Allowance(precision, WEAK, f"known weakness of this kernel: {reason}")


def _coarse(dtype: torch.dtype, stored: float, device: str, inner: float = SINGLE) -> Precision:
    """As if results were stored with one unit of rounding, and sums done with another."""
    precision = Precision(dtype, device)
    precision.stored, precision.inner = stored, inner
    return precision


def tf32_allowed(op: str) -> bool:
    """Whether this process lets CUDA multiply float32 in TF32 for an operator (`tf32_allowed("torch.mm")`)."""
    last = facts.last_name(op)
    flags = torch.backends.cudnn if last.startswith("conv") or last in facts.BY_CUDNN else torch.backends.cuda.matmul
    try:
        return bool(flags.allow_tf32)
    except RuntimeError:  # set in the old way and in the new one
        return True


def known_weakness(op: str, phase: str, device: str, dtype: torch.dtype) -> str:
    """What the ledger says of a call that a device is known to compute coarsely; empty where it says nothing.

    >>> known_weakness("torch.lstm", "forward", "cuda", torch.float32)[:22]
    "cuDNN's recurrent kern"
    """
    last, name = facts.last_name(op), op.removeprefix("torch.").removeprefix("Tensor.")
    kind = f"{str(dtype).removeprefix('torch.')}/{phase}"
    names = [f"ops/{name}/{kind}"] + ([f"modules/{_RECURRENT[last]}/{kind}"] if last in _RECURRENT else [])
    for pattern, reason in _ledger(device):
        if any(fnmatch.fnmatchcase(text, pattern) for text in names):
            return reason
    return ""


@functools.cache
def _ledger(device: str) -> tuple[tuple[str, str], ...]:
    """Patterns and reasons of what is wrong on a device; none where the device layer is not installed."""
    found = importlib.util.find_spec("ditorch")  # which is not imported: that would choose a device
    folders = found.submodule_search_locations if found is not None else None
    path = Path(next(iter(folders or [""]))) / "conformance" / "ledgers" / f"{device}.txt"
    if not path.is_file():
        return ()
    lines = [line.split(None, 2) for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return tuple((line[0], line[2]) for line in lines if len(line) == 3 and "wrong" in line[1].split(","))
