"""Runs PyTorch's operator database on the CPU and on soft and compares bit for bit.

Used by test_op_db.py, and by hand: ``python -m tests.device.soft.sweep --ops 'add|mul'``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What happened to one (operator, dtype) pair."""

    op: str
    dtype: str
    samples: int
    problem: str = ""  # empty: bit-identical

    @property
    def key(self) -> str:
        return f"{self.op} {self.dtype}"


def op_name(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def to_device(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy with the same storage size, strides and offset, which is a leaf."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        return tensor.detach().clone().to(device).requires_grad_(tensor.requires_grad)
    source = tensor.detach()
    conj, neg = source.is_conj(), source.is_neg()
    if conj:
        source = torch.conj(source)
    if neg:
        source = torch._neg_view(source)
    storage = torch.UntypedStorage(source.untyped_storage().nbytes(), device=device)
    storage.copy_(source.untyped_storage())
    moved = torch.empty(0, dtype=source.dtype, device=device)
    moved.set_(storage, source.storage_offset(), source.size(), source.stride())
    if neg:
        moved = torch._neg_view(moved)
    if conj:
        moved = torch.conj(moved)
    return moved.requires_grad_(tensor.requires_grad)


def moved(tree: Any, device: str) -> Any:
    """The same arguments for a device: tensors copied, devices renamed, generators replaced."""

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return to_device(value, device)
        if isinstance(value, torch.device) and value.type == "cpu":
            return torch.device(device)
        if isinstance(value, torch.Generator):
            return torch.Generator(device).manual_seed(value.initial_seed())
        return value

    seen: dict[int, Any] = {}  # the same tensor twice stays the same tensor
    return pytree.tree_map(lambda value: seen.setdefault(id(value), leaf(value)), tree)


def seed_everything() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def attempt(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    seed_everything()
    try:
        return function(), None
    except Exception as error:
        return None, error


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def difference(expected: Any, actual: Any) -> str:
    """Why two results are not bit-identical, or an empty string."""
    left, right = pytree.tree_leaves(expected), pytree.tree_leaves(actual)
    if len(left) != len(right):
        return f"{len(left)} results became {len(right)}"
    for index, (a, b) in enumerate(zip(left, right)):
        if not isinstance(a, torch.Tensor):
            same = a == b or (a != a and b != b) or isinstance(a, torch.device)
            if not same and not isinstance(a, (torch.Generator, torch.UntypedStorage)):
                return f"result {index}: {a!r} became {b!r}"
            continue
        if not isinstance(b, torch.Tensor):
            return f"result {index}: a tensor became {type(b).__name__}"
        if a.layout != b.layout:
            return f"result {index}: layout {a.layout} became {b.layout}"
        if a.layout != torch.strided:
            why = difference([tuple(a.shape), *parts(a)], [tuple(b.shape), *parts(b)])
            if why:
                return f"result {index} ({a.layout}): {why}"
            continue
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"result {index}: {a.dtype} {tuple(a.shape)} became {b.dtype} {tuple(b.shape)}"
        if a.stride() != b.stride() and a.numel() > 1:
            return f"result {index}: stride {a.stride()} became {b.stride()}"
        if (a.is_conj(), a.is_neg()) != (b.is_conj(), b.is_neg()):
            return f"result {index}: conj/neg bits differ"
        if not same_bits(a.detach().cpu(), b.detach().cpu()):
            return f"result {index}: values differ"
    return ""


def parts(tensor: torch.Tensor) -> list[Any]:
    """The dense tensors that a sparse one is made of."""
    if tensor.layout == torch.sparse_coo:
        return [tensor.is_coalesced(), tensor._indices(), tensor._values()]
    rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    places = (tensor.crow_indices(), tensor.col_indices()) if rows else (tensor.ccol_indices(), tensor.row_indices())
    return [*places, tensor.values()]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (t.resolve_conj().resolve_neg().flatten().clone(memory_format=torch.contiguous_format) for t in (a, b))
    if a.numel() == 0:
        return True
    raw_a, raw_b = (
        a.as_strided((a.numel(),), (1,)).view(torch.uint8),
        b.as_strided((b.numel(),), (1,)).view(torch.uint8),
    )
    if torch.equal(raw_a, raw_b):
        return True
    # Any NaN equals any other: the payload depends on instruction order, not on the value.
    if a.is_floating_point() or a.is_complex():
        wide_a, wide_b = (torch.view_as_real(t).double() if t.is_complex() else t.double() for t in (a, b))
        return torch.equal(wide_a.nan_to_num(nan=0), wide_b.nan_to_num(nan=0)) and torch.equal(
            wide_a.isnan(), wide_b.isnan()
        )
    return False


def gradients(output: Any, inputs: list[torch.Tensor]) -> Any:
    """Gradients of the differentiable results with respect to the inputs, with fixed cotangents."""
    results = [t for t in tensors(output) if t.requires_grad and (t.is_floating_point() or t.is_complex())]
    wanted = [t for t in inputs if t.requires_grad]
    if not results or not wanted:
        return ()
    cotangents = []
    for result in results:
        host = torch.linspace(-1, 1, max(result.numel(), 1), dtype=torch.float64)[: result.numel()].view(result.shape)
        cotangents.append(host.to(result.dtype).to(result.device))
    return torch.autograd.grad(results, wanted, cotangents, allow_unused=True)


@contextlib.contextmanager
def known_memory() -> Iterator[None]:
    """Fill uninitialized memory, so that results which show it can be compared."""
    torch._C._set_deterministic_algorithms(True, warn_only=True)  # the public name imports the compiler: 15 s
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(False)


def compare_sample(info: Any, sample: Any) -> str:
    """Forward and backward of one sample on both devices; why they differ, or an empty string."""
    why = _compare(info, sample)
    if why.endswith("values differ"):
        # empty() and lstsq's "gelsy" driver (its pivots) return what was in memory, on the CPU too.
        with known_memory():
            return _compare(info, sample)
    return why


def _compare(info: Any, sample: Any) -> str:
    args = (sample.input, sample.args, sample.kwargs)

    def run(device: str) -> tuple[Any, Any, Any]:
        values = first, rest, kwargs = moved(args, device)
        before = [t for t in tensors(values) if t.requires_grad]
        output = info.op(first, *rest, **kwargs)
        output = sample.output_process_fn_grad(output) if before else output
        return output, gradients(output, before), (first, rest, kwargs)

    expected, cpu_error = attempt(lambda: run("cpu"))
    actual, soft_error = attempt(lambda: run("soft"))
    if cpu_error is not None or soft_error is not None:
        if cpu_error is not None and soft_error is not None:
            return ""  # not supported by the CPU either
        if cpu_error is not None:
            return ""  # soft may do more than the CPU's kernel does for these samples
        return f"{type(soft_error).__name__}: {str(soft_error).splitlines()[0][:200] if str(soft_error) else ''}"
    for what, left, right in zip(("forward", "backward", "arguments"), expected, actual):
        why = difference(left, right)
        if why:
            return f"{what} {why}"
    return ""


def sweep_pair(info: Any, dtype: torch.dtype, most_samples: int | None = None) -> Outcome:
    """Compare all (or the first few) samples of an operator in one dtype."""
    name = str(dtype).removeprefix("torch.")
    count = 0
    differentiable = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_everything()
        samples = info.sample_inputs("cpu", dtype, requires_grad=differentiable)
        for sample in itertools.islice(samples, most_samples):
            count += 1
            problem = compare_sample(info, sample)
            if problem:
                return Outcome(op_name(info), name, count, problem)
    return Outcome(op_name(info), name, count)


def pairs(pattern: str = "") -> Iterator[tuple[Any, torch.dtype]]:
    """Every (OpInfo, dtype) that the CPU supports."""
    from ditorch.conformance.databases import import_test_helpers

    import_test_helpers()
    from torch.testing._internal.common_methods_invocations import op_db

    for info in sorted(op_db, key=op_name):
        if pattern and not re.fullmatch(pattern, op_name(info)):
            continue
        for dtype in sorted(info.supported_dtypes("cpu"), key=str):
            yield info, dtype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ops", default="", help="regular expression of operator names")
    parser.add_argument("--samples", type=int, default=None, help="compare only the first N samples")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th pair, starting at i")
    options = parser.parse_args()
    import ditorch.soft

    ditorch.soft.load()
    shard, of = map(int, options.shard.split("/"))
    good = total = 0
    for info, dtype in itertools.islice(pairs(options.ops), shard, None, of):
        outcome = sweep_pair(info, dtype, options.samples)
        total += 1
        good += not outcome.problem
        if outcome.problem:
            print(f"{outcome.key}: {outcome.problem}", flush=True)
    print(f"{good} of {total} pairs bit-identical ({100 * good / max(total, 1):.2f} %)")


if __name__ == "__main__":
    main()
