"""What protects a replay from the capture: limits of memory, and operators that trust their arguments.

PyTorch's public operators check what they are given. Some that only PyTorch itself calls do not: with other indices or
sizes than their caller would pass they read and write outside of their tensors. Those are refused, or checked here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import re
import resource
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ..call import facts
from ..call.description import Tensor, map_tensors, tensors_in
from ..call.parameters import bound
from ..compat import no_torch_function
from ..files.archive import ArchiveError
from ..files.captures import CannotReplay, has_part, nbytes_of
from ..files.limits import MemoryLimit, check_memory, free_memory
from .captured import CapturedOp
from .outcome import Options

# --- memory ------------------------------------------------------------------------------------------------

_MIN_LIMIT: Final = 2 << 30  # bytes that any capture may take
_FACTOR: Final = 32  # times its files: snapshots, results, and the golden run in float64


def memory_limit(folder: Path, options: Options) -> int:
    """The most bytes that the replay of a capture may take (`memory_limit(folder, Options())`)."""
    if options.memory_limit:
        return options.memory_limit
    wanted = max(_MIN_LIMIT, _FACTOR * nbytes_of(folder))
    free = free_memory()
    return wanted if free is None else min(wanted, free // 2)


def check_results(op: CapturedOp, options: Options) -> None:
    """Refuse a call whose arguments or results, estimated without computing them, do not fit into memory."""
    given = max((t.numel() * t.element_size() for t in tensors_in((op.host_args, op.host_kwargs))), default=0)
    _check_bytes(op, options, given)  # with stride 0, a small file can hold a tensor of any size
    _check_bytes(op, options, _bytes_of_results(op))


def _check_bytes(op: CapturedOp, options: Options, needed: int) -> None:
    path = f"{op.folder / 'input.pth'}: {op.name}"
    if options.trusted:
        check_memory(needed, path)
        return
    limit = memory_limit(op.folder, options) if needed > _MIN_LIMIT // 64 else needed
    if needed > limit:
        raise MemoryLimit(
            f"{path} would take {needed / 2**30:,.1f} GiB; {limit / 2**30:,.1f} GiB is the memory limit of a capture "
            f"of {nbytes_of(op.folder):,} bytes here (--memory-limit)"
        )


def _bytes_of_results(op: CapturedOp) -> int:
    """Bytes of the tensors that a call returns, 0 where that cannot be known before it runs."""

    def without_data(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    def elsewhere(value: Any) -> Any:
        is_device = isinstance(value, torch.device) or (isinstance(value, str) and facts.is_device_text(value))
        return torch.device("meta") if is_device else value

    if _most_elements((op.host_args, op.host_kwargs)) < _MIN_LIMIT // 64:
        return 0
    if _confined and has_part(op.folder / "output.pth"):  # it is as large as that; if it lies, the system's limit holds
        return 0
    random = torch.random.fork_rng([]) if op.traits.random is not False else contextlib.nullcontext()
    try:
        with no_torch_function(), torch.no_grad(), random:
            args, kwargs = map_tensors((op.host_args, op.host_kwargs), without_data)
            if op.traits.factory and not any(True for _ in tensors_in(args)):
                kwargs = {**kwargs, "device": torch.device("meta")}
            result = op.traits.function(*map(elsewhere, args), **{k: elsewhere(v) for k, v in kwargs.items()})
            return sum(t.untyped_storage().nbytes() for t in tensors_in(result))
    except Exception:  # no kernel for it, results that depend on values, or arguments that make no sense
        return 0


def _most_elements(value: Any) -> int:
    """More elements than a call with such arguments is likely to return: all of one with all of another."""
    tensors, numbers = 1, 1
    for tensor in tensors_in(value):
        tensors += tensor.numel()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (tuple, list, torch.Size)):
            waiting.extend(one)
        elif isinstance(one, dict):
            waiting.extend(one.values())
        elif type(one) in (int, float) and 1 < abs(one) < math.inf:
            numbers *= int(abs(one))
    return tensors * max(tensors, numbers)


_recent: deque[int] = deque(maxlen=6)  # limits of the captures that may be under way
_confined = False


def confine(options: Options, jobs: int) -> None:
    """In a worker process: limit the memory from now on, and leave no core files (`confine(options, 2)`)."""
    global _confined
    faulthandler.disable()  # the parent says what happened
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _confined = not options.trusted


def limit_memory(folder: Path, options: Options) -> None:
    """Let a confined process take no more than a capture may (`limit_memory(folder, options)`)."""
    if not _confined:
        return
    _recent.append(memory_limit(folder, options))
    with contextlib.suppress(OSError, ValueError, StopIteration):
        with open("/proc/self/status") as status:
            used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = used + max(_recent)
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an operator failed for want of memory (`is_out_of_memory(MemoryError())`)."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        text in str(error) for text in ("can't allocate memory", "std::bad_alloc", "not enough memory")
    )


def loses_the_device(error: BaseException) -> bool:
    """Whether nothing can run on the device any more, as after an assertion in a kernel."""
    return any(text in str(error) for text in ("CUDA error", "device-side assert", "HIP error"))


# --- operators that trust their arguments --------------------------------------------------------------------

_REFUSED: Final = re.compile(
    r"_convert_indices_.*|_validate_sparse.*|.*_tensor_unsafe|_segment_reduce_backward|_ctc_loss.*|_embedding_bag.*"
    r"|_cudnn_.*|_thnn_.*|mkldnn_rnn.*|_fft_.*|_cdist_backward|_pdist_backward|_cholesky_solve_helper|_dyn_quant_.*"
    r"|_weight_norm_interface.*|reflection_pad.*_backward|_pack_padded_.*"
)


def check_arguments(op: CapturedOp) -> None:
    """Refuse calls that may read or write outside of their tensors; see the table below.

    >>> check_arguments(CapturedOp(folder, "cpu"))  # doctest: +SKIP
    """
    name = op.name.removeprefix("aten.").split(".")[0] if op.name.startswith("aten.") else facts.last_name(op.name)
    if _REFUSED.fullmatch(name):
        raise CannotReplay(f"{op.name} trusts its arguments and is not replayed from a file (--trust replays it)")
    rules = [rule for pattern, rule in _RULES if pattern.fullmatch(name)]
    if not rules:
        return
    given = bound(op.traits.function, op.name, op.host_args, op.host_kwargs)
    with no_torch_function(), torch.no_grad():
        for rule in rules:
            try:
                rule(given)
            except (KeyError, AttributeError, TypeError, IndexError):
                continue  # PyTorch says what is missing
            except ValueError as error:
                raise ArchiveError(f"{op.folder / 'input.pth'}: {op.name}: {error}") from None


_Given = Mapping[str, Any]


def _within(name: str, index: Any, size: int, negative: bool = False, ignored: int | None = None) -> None:
    if not isinstance(index, Tensor) or index.is_floating_point() or index.dtype == torch.bool or not index.numel():
        return
    plain = index if ignored is None else index[index != ignored]
    if not plain.numel():
        return
    low, high = (int(value) for value in torch.aminmax(plain))
    if high >= size or low < (-size if negative else 0):
        raise ValueError(f"{name} goes from {low} to {high}, outside of {size} elements")


def _of(given: _Given, *names: str) -> Any:
    return next(given[name] for name in names if name in given)


def _along_dim(given: _Given) -> None:
    tensor = _of(given, "input", "self")
    _within("index", given["index"], tensor.shape[given["dim"]] if tensor.dim() else 1)


def _flat(given: _Given) -> None:
    _within("index", given["index"], _of(given, "input", "self").numel(), negative=True)


def _rows(given: _Given) -> None:
    index = given["indices"] if "indices" in given else given["input"]
    _within("an index", index, given["weight"].shape[0])


def _bags(given: _Given) -> None:
    offsets, index = given.get("offsets"), given["indices"] if "indices" in given else given["input"]
    if isinstance(offsets, Tensor) and offsets.numel():
        _within("offsets", offsets, index.numel() + 1)
        if bool((offsets.diff() < 0).any()):
            raise ValueError("offsets do not increase")


def _classes(given: _Given) -> None:
    scores = _of(given, "input", "self")
    classes = scores.shape[1 if scores.dim() > 1 else 0]
    _within("target", given["target"], classes, ignored=int(given.get("ignore_index", -100)))


def _pooled(given: _Given) -> None:
    dims = 3 if "3d" in given["op"] else 2
    _within("indices", given["indices"], math.prod(given["self"].shape[-dims:]))
    if given["indices"].shape != given["grad_output"].shape:
        raise ValueError("grad_output and indices have different sizes")


def _embedding_backward(given: _Given) -> None:
    _within("indices", given["indices"], int(given["num_weights"]))
    if given["grad_output"].shape[:-1] != given["indices"].shape:
        raise ValueError("grad_output and indices have different sizes")


def _channels(given: _Given) -> None:
    tensor = _of(given, "input", "self")
    if tensor.dim() < 2:
        raise ValueError("the input has no channels")
    for name, value in given.items():
        if isinstance(value, Tensor) and any(part in name for part in ("weight", "bias", "mean", "var", "invstd")):
            if value.numel() not in (0, tensor.shape[1]):
                raise ValueError(f"{name} has {value.numel()} elements for {tensor.shape[1]} channels")
        elif name in ("grad_out", "grad_output") and value.shape != tensor.shape:
            raise ValueError(f"{name} and the input have different sizes")


def _each_dim(given: _Given) -> None:
    tensor, indices = _of(given, "self", "input"), given["indices"]
    if all(i is None or (isinstance(i, Tensor) and i.dtype in (torch.int32, torch.int64)) for i in indices):
        for dim, index in enumerate(indices):
            _within(f"indices[{dim}]", index, tensor.shape[dim], negative=True)


def _unsafe(given: _Given) -> None:
    if given.get("unsafe"):
        raise ValueError("unsafe=True: its lengths or indices would not be checked")


_RULES: Final[list[tuple[re.Pattern[str], Callable[[_Given], None]]]] = [
    (re.compile(pattern), rule)
    for pattern, rule in (
        (r"index_(select|add|copy|fill|reduce)_?|gather|(scatter|scatter_add|scatter_reduce)_?", _along_dim),
        (r"take|put_?", _flat),
        (r"embedding|embedding_bag", _rows),
        (r"embedding_bag", _bags),
        (r"(nll_loss|nll_loss2d|nll_loss_nd|cross_entropy|cross_entropy_loss)", _classes),
        (r".*pool.*_backward", _pooled),
        (r"embedding_(dense_|sparse_)?backward", _embedding_backward),
        (r"_?(native_)?batch_norm.*|_native_batch_norm.*", _channels),
        (r"(_unsafe_)?index(_put_?)?|_index_put_impl_|_unsafe_masked_index.*", _each_dim),
        (r"segment_reduce|_index_put_impl_", _unsafe),
    )
]
