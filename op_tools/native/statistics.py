"""Statistics of tensors, computed where they are and read back in batches.

On a GPU of NVIDIA one kernel reads many tensors, each once, and writes some rows of partial results, which another puts
together. Where Triton compiles it, it takes one tensor at a time. Elsewhere PyTorch's own reductions do it in several
passes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from ..call.devices import quiet
from ..compat import cuda_stream, in_fake_mode, in_func_transform
from . import compiling, ledger
from .kernels import Kernels, launch_in_cuda, launcher
from .layout import is_dense

Tensor = torch.Tensor

NAMES: Final = ("inf", "nan", "min", "max", "mean", "std", "norm")
_BATCH_SIZE: Final = 256  # tensors whose statistics go to the host together
_REDUCED_AS_IS: Final = frozenset({torch.float32, torch.float64})
_SYNCHRONOUS_DEVICES: Final = frozenset({"cpu", "soft"})  # devices whose results are there when a call returns
_WIDE: Final = {torch.float64: torch.float64, torch.complex128: torch.float64}


def completed(numels: Sequence[int], inf: Any, low: Any, high: Any, mean: Any, var: Any) -> Any:
    """Statistics of tensors of so many elements as rows in the order of NAMES, from what a device sends as columns.

    >>> completed([2], *np.array([[0.0], [1.0], [3.0], [2.0], [1.0]]))[0, 3]
    3.0
    """
    n = np.array(numels, dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        infinite, nan = inf > 0, np.isnan(low) | np.isnan(high)
        one_sided = infinite & ~nan
        if one_sided.any():  # as PyTorch has it, in whichever order the elements were added
            both = (low == -np.inf) & (high == np.inf)
            mean = np.where(one_sided, np.where(both, np.nan, np.where(low == -np.inf, low, high)), mean)
            var = np.where(one_sided, np.nan, var)
        variance = np.where(var < 0, 0.0, var)
        std = np.where(n > 1, np.sqrt(variance * n / np.maximum(n - 1, 1)), 0.0)
        norm = np.sqrt(n * (variance + mean * mean))
    return np.stack([infinite, nan, low, high, mean, std, norm], axis=1).astype(np.float64)


# -- with PyTorch's reductions --------------------------------------------------------------------------


class _Taken(NamedTuple):
    """A tensor that was added to a batch."""

    number: int
    numel: int
    variance: Tensor
    mean: Tensor
    infinite: Any


class TorchBatch:
    """Measurements of one device that have not been sent to the host yet: some reductions per tensor.

    It is made for tensors like one. `add` starts measuring a tensor (strided, floating or complex, not empty), which
    has a number; a `full` batch should be sent. `values` are what the host needs, as one tensor on the device; `land`
    takes the same tensor on the host, and returns a row of statistics for each of `numbers`, in the order of NAMES.
    """

    __slots__ = ("_slots", "_synchronous", "_taken", "extremes")

    def __init__(self, like: Tensor) -> None:
        self._synchronous = like.device.type in _SYNCHRONOUS_DEVICES
        dtype = _WIDE.get(like.dtype, torch.float32)
        self.extremes = torch.empty(2 * _BATCH_SIZE, dtype=dtype, device=like.device)
        self._slots = self.extremes.unbind()  # reductions write there: nothing is gathered afterwards
        self._taken: list[_Taken] = []  # one step for each, which Ctrl-C cannot divide

    def add(self, tensor: Tensor, number: int) -> None:
        low, high = self._slots[2 * len(self._taken) :][:2]
        with quiet():
            data = _as_real(tensor)
            if data.dtype not in _REDUCED_AS_IS:
                data = data.float()
            if not data.is_contiguous() and is_dense(data):
                data = data.as_strided((data.numel(),), (1,))  # the order does not matter, and a copy is saved
            torch.aminmax(data, out=(low, high))
            var, mean = torch.var_mean(data, correction=0)
            infinite: Any
            if self._synchronous:
                finite = math.isfinite(low.item()) and math.isfinite(high.item())
                infinite = not finite and bool(data.isinf().any())  # a NaN hides infinities
            else:
                infinite = data.isinf().any()
        self._taken.append(_Taken(number, data.numel(), var, mean, infinite))

    @property
    def numbers(self) -> list[int]:
        """The numbers of the tensors that were added."""
        return [one.number for one in self._taken]

    @property
    def full(self) -> bool:
        return len(self._taken) == _BATCH_SIZE

    def values(self) -> Tensor:
        extremes, found = self.extremes[: 2 * len(self._taken)], [one.infinite for one in self._taken]
        infinite = torch.tensor(found, device=extremes.device) if self._synchronous else torch.stack(found)
        moments = [one.variance for one in self._taken] + [one.mean for one in self._taken]
        return torch.cat([extremes, torch.stack(moments), infinite.to(extremes.dtype)])

    def land(self, values: Tensor) -> Any:
        n = len(self._taken)
        columns = values.numpy().astype(np.float64)
        var, mean, infinite = (columns[k * n : (k + 1) * n] for k in (2, 3, 4))
        numels = [one.numel for one in self._taken]
        return completed(numels, infinite, columns[: 2 * n : 2], columns[1 : 2 * n : 2], mean, var)


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


# -- with one kernel ------------------------------------------------------------------------------------

_ROWS: Final = 262_144  # of partial results in a batch, 12 MB
# Columns: count, mean, sum of squared distances from it, infinities, minimum, maximum; a NaN spreads to the last two.
_WIDTH: Final = 6
_MIN_SHARE: Final = 8_192  # elements that one program of the kernel takes at least
_MAX_PROGRAMS: Final = 512
_TABLE_BYTES: Final = 16 + 32 * 56  # the parameter of the kernel for many tensors
_KERNEL_DTYPES: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class _Table(NamedTuple):
    """The kernel that takes many tensors, as the driver knows it."""

    rows: Any  # of `native.ledger`: what launches it
    numbers: tuple[int, int]  # the address of the driver's function, the kernel
    together: int


class _FusedKernels(Kernels):
    """The kernels of one GPU; `table` only where NVRTC compiles it and C++ fills it."""

    def __init__(self, index: int) -> None:
        super().__init__(index, "statistics", arguments=4)
        self.table: _Table | None = None
        library = ledger.LIBRARY.loaded
        function = None if library is None else self.in_cuda("table", [_TABLE_BYTES])
        together = None if function is None else self.in_cuda("together", [8, 8, 8])
        if library is not None and function is not None and together is not None:
            self.table = _Table(library.Rows, (launcher(), function), together)


class FusedBatch:
    """The same with one kernel; it leaves rows of partial results, which are put together at the end.

    Where C++ launches the kernel, `native` is what does, for many tensors at once (`ledger.use(batch.native)`).
    """

    __slots__ = ("_address", "_kernels", "_streams", "_taken", "device", "native", "rows")

    def __init__(self, like: Tensor, kernels: _FusedKernels | None = None) -> None:
        kernels = kernels or fused(like.device.index)
        assert kernels is not None
        self._kernels, self.device = kernels, like.device
        self.rows = torch.empty((_ROWS, _WIDTH), dtype=torch.float64, device=like.device)
        self._address = self.rows.data_ptr()
        self._streams: set[int] = set()
        self._taken: list[tuple[int, int, int, int]] = []  # number, elements, first row, and the one behind the last
        self.native: Any = None
        if kernels.table is not None:
            where = (_WIDTH * 8, str(like.device), self._address, _ROWS, _MIN_SHARE, _MAX_PROGRAMS, cuda_stream)
            self.native = kernels.table.rows(*kernels.table.numbers, *where)

    @property
    def numbers(self) -> list[int]:
        """The numbers of the tensors that were added; C++ has them until `values` is called."""
        return [number for number, *_ in self._taken]

    def add(self, tensor: Tensor, number: int) -> None:
        if self.native is not None:
            if not self.native.measure([tensor], [number])[0]:
                self.native.measure([_in_one_piece(tensor)], [number])
            return
        if tensor.dtype not in _KERNEL_DTYPES or not is_dense(tensor):
            tensor = _in_one_piece(tensor)
        numel, kernels, free = tensor.numel(), self._kernels, self._taken[-1][-1] if self._taken else 0
        programs = 1 if numel <= _MIN_SHARE else min(-(-numel // _MIN_SHARE), _MAX_PROGRAMS)
        launch, stream = kernels.launch(tensor.dtype, programs), kernels.stream()
        numbers = (tensor.data_ptr(), self._address + free * (_WIDTH * 8), numel, -(-numel // programs))
        if kernels.current():
            launch(stream, *numbers)
        else:
            with torch.cuda.device(kernels.index):
                launch(stream, *numbers)
        self._streams.add(stream)
        self._taken.append((number, numel, free, free + programs))  # one step, which Ctrl-C cannot divide

    @property
    def full(self) -> bool:
        if self.native is not None:
            return bool(self.native.full)
        return bool(self._taken) and self._taken[-1][-1] > _ROWS - _MAX_PROGRAMS

    def values(self) -> Tensor:
        kernels = self._kernels
        if self.native is not None:
            numbers, numels, starts, streams = (np.frombuffer(one, np.int64).tolist() for one in self.native.take())
            self._taken, self._streams = list(zip(numbers, numels, starts, starts[1:])), set(streams)
        end = self._taken[-1][-1] if self._taken else 0
        if self._streams != {kernels.stream()}:  # the copy to the host waits for one stream only
            torch.cuda.synchronize(kernels.index)
        if kernels.table is None:
            return self.rows[:end]
        with torch.cuda.device(kernels.index):
            found = torch.empty((len(self._taken), _WIDTH), dtype=torch.float64, device=self.device)
            firsts = [*[start for _, _, start, _ in self._taken], end]
            first = torch.tensor(firsts, dtype=torch.int64, device=self.device)
            places = (self._address, first.data_ptr(), found.data_ptr())
            if self._taken:
                launch_in_cuda(kernels.table.together, kernels.stream(), len(self._taken), 32, *places)
        return found

    def land(self, values: Tensor) -> Any:
        starts = [start for _, _, start, _ in self._taken]
        if self._kernels.table is not None:
            starts = list(range(len(starts)))
        return completed([numel for _, numel, _, _ in self._taken], *put_together(values.numpy(), starts))


Batch = TorchBatch | FusedBatch


def batch_for(tensor: Tensor) -> tuple[Any, type[Batch]]:
    """The batch that a tensor belongs to: its key, and its kind."""
    device = tensor.device
    if device.type == "cuda" and fused(device.index) is not None:
        return device, FusedBatch
    return (device, _WIDE.get(tensor.dtype, torch.float32)), TorchBatch


def _in_one_piece(tensor: Tensor) -> Tensor:
    """The same elements one after the other, in a dtype that the kernel knows."""
    with quiet():
        tensor = _as_real(tensor.resolve_neg()).contiguous()
        return tensor if tensor.dtype in _KERNEL_DTYPES else tensor.float()


def put_together(rows: Any, starts: list[int]) -> Any:
    """Infinities, minimum, maximum, mean and variance of each tensor, as columns, from its rows of partial results.

    >>> put_together(np.array([[2.0, 1.0, 0.0, 0.0, 1.0, 1.0], [2.0, 3.0, 0.0, 0.0, 3.0, 3.0]]), [0])[:, 0]
    array([0., 1., 3., 2., 1.])
    """
    with np.errstate(invalid="ignore", over="ignore"):
        count, mean, distances, infinite, low, high = rows.T
        total = np.add.reduceat(count, starts)
        means = np.add.reduceat(count * mean, starts) / total
        lengths = np.diff([*starts, len(rows)])
        apart = mean - np.repeat(means, lengths)
        variances = np.add.reduceat(distances + count * apart * apart, starts) / total
        found = (
            np.add.reduceat(infinite, starts),
            np.minimum.reduceat(low, starts),  # a NaN stays one
            np.maximum.reduceat(high, starts),
            means,
            variances,
        )
    return np.stack(found)


BROKEN: Final[dict[int, str]] = {}  # GPUs whose kernel does not work, and why


def fused(index: int, wait: bool = False) -> _FusedKernels | None:
    """The kernels of a GPU, or None where no compiler is there, its answer is wrong, or tensors have no memory.

    Also None as long as they are compiled in the background, unless the caller will `wait`.
    """
    if in_fake_mode() or in_func_transform():
        return None
    if index not in _compilers:
        _compilers[index] = Kernels(index, "statistics", arguments=4).compile_beside()
    compiler = _compilers[index]
    if compiler is not None and compiler.building:
        if not wait:
            return None
        compiler.wait()
    return _tried(index, ledger.LIBRARY.get() is not None)


_compilers: Final[dict[int, compiling.Library | None]] = {}  # by GPU


@functools.cache
def _tried(index: int, many_at_once: bool) -> _FusedKernels | None:
    """The kernels of a GPU; anew once the library has been compiled that launches one for many tensors."""
    try:
        with quiet():
            kernels = _FusedKernels(index)
            if _agrees(kernels, index):
                return kernels
        BROKEN[index] = "the kernel finds other statistics than PyTorch"
    except ImportError:  # neither NVRTC nor Triton
        pass
    except Exception as error:
        BROKEN[index] = f"{type(error).__name__}: {str(error)[:200]}"
    return None


def _agrees(kernels: _FusedKernels, index: int) -> bool:
    """Whether the kernel finds in a trial what PyTorch finds; another compiler may read its arguments differently."""
    whole = torch.linspace(-3.0, 5.0, 20_001, dtype=torch.float64)
    with torch.cuda.device(index):
        wholes = [whole.to(dtype).cuda() for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)]
        trials = [data[first:] for data in wholes for first in (0, 1)]  # aligned and not
        trials += [wholes[0][: 3 * 6000].view(3, 10, 600).transpose(0, 1)[:, :, 7:590]]  # in stretches
        broken = [data.contiguous().clone() for data in trials]
        for data in broken:
            data.view(-1)[7], data.view(-1)[20] = math.inf, math.nan
        batch = FusedBatch(wholes[0], kernels)
        for number, data in enumerate(trials + broken):
            batch.add(data, number)
        rows = batch.land(batch.values().cpu())
    for data, row in zip(trials, rows):
        exact = data.cpu().double()
        expected = (0.0, 0.0, exact.min(), exact.max(), exact.mean(), exact.std(), exact.norm())
        if not all(math.isclose(a, float(b), rel_tol=1e-4, abs_tol=1e-5) for a, b in zip(row, expected)):
            return False
    return all(row[0] == row[1] == 1.0 and row[2] != row[2] and row[3] != row[3] for row in rows[len(trials) :])
