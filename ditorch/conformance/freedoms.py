"""What a correct device may do otherwise than the CPU: samples for others, and what no definition of a result fixes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

Tensor = torch.Tensor

EIGENVALUES = frozenset({"linalg.eig", "linalg.eigvals"})
LU = frozenset({"lu", "linalg.lu", "linalg.lu_factor", "linalg.lu_factor_ex"})
_SPATIAL = {"nn.functional.max_unpool1d": 1, "nn.functional.max_unpool2d": 2, "nn.functional.max_unpool3d": 3}
_SAVES_STATISTICS = frozenset({"native_batch_norm", "_native_batch_norm_legit"})


def not_for(name: str, args: Sequence[Any], kwargs: dict[str, Any], device_type: str) -> str:
    """Why PyTorch's documentation excludes these arguments on a device; empty if it does not.

    Samples are made on the CPU, and for these operators the database makes others for CUDA.

    >>> not_for("linalg.lstsq", (), {"driver": "gelsd"}, "cuda")
    'on CUDA the only driver is gels'
    """
    if device_type != "cuda":
        return ""
    if name == "linalg.lstsq" and kwargs.get("driver") not in (None, "gels"):
        return "on CUDA the only driver is gels"
    if (
        name == "linalg.ldl_solve"
        and kwargs.get("hermitian")
        and any(isinstance(a, Tensor) and a.is_complex() for a in args)
    ):
        return "on CUDA ldl_solve takes no Hermitian matrices"
    return ""


def crashes_on_cpu(name: str, args: Sequence[Any]) -> bool:
    """Whether the CPU's kernel reads memory that is not there: batch norm in evaluation without running statistics.

    >>> crashes_on_cpu("native_batch_norm", (torch.ones(1, 1), None, None, None, None, False, 0.5, 1e-5))
    True
    """
    statistics = args[3:5]
    return name in _SAVES_STATISTICS and len(args) > 5 and args[5] is False and any(s is None for s in statistics)


def determined(name: str, args: Sequence[Any], results: Any) -> Any:
    """The results that the call defines: in evaluation, batch norm saves no statistics, and returns what it likes.

    Example: ``determined("native_batch_norm", (*tensors, False, 0.1, 1e-5), (y, mean, inverse)) == (y,)``
    """
    if name not in _SAVES_STATISTICS or not isinstance(results, (list, tuple)):
        return results
    training = next((a for a in args if isinstance(a, bool)), True)
    return results if training else (results[0],)


def written_twice(name: str, args: Sequence[Any]) -> bool:
    """Whether several values go to one place, so that the last one, whichever that is, stays there.

    >>> written_twice("nn.functional.max_unpool1d", (torch.zeros(1, 2), torch.tensor([[3, 3]])))
    True
    """
    dims = _SPATIAL.get(name)
    return dims is not None and len(args) > 1 and _repeats(args[1], -dims)


def copied_twice(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The same for calls that copy to given indices; PyTorch's samples have none twice, the hunt's may.

    >>> copied_twice("index_copy", (torch.zeros(4), 0, torch.tensor([1, 1]), torch.ones(2)), {})
    True
    """
    if kwargs.get("accumulate") or kwargs.get("reduce") or any(a is True for a in args):
        return False
    if name == "index_copy" and len(args) > 2:
        return _repeats(args[2])
    if name == "put" and len(args) > 1:
        return _repeats(args[1])
    if name == "as_strided_scatter" and len(args) > 3:
        return _overlap(args[2], args[3])
    if name == "scatter" and len(args) > 3 and isinstance(args[3], Tensor):
        return _repeats_along(args[2], args[1])
    if name == "index_put" and len(args) > 1 and isinstance(args[1], (list, tuple)):
        given = [i for i in args[1] if isinstance(i, Tensor) and i.dtype != torch.bool]
        same = len(given) == len(args[1]) > 0 and len({i.shape for i in given}) == 1
        return same and torch.stack(given).flatten(1).unique(dim=1).shape[1] < given[0].numel()
    return False


def free_choice(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why a result is one of several that are equally right; empty where there is one alone.

    >>> free_choice("mode", (torch.tensor([3.0, 1.0, 1.0, 3.0]),), {})
    'several values are the most frequent ones'
    """
    if name == "topk" and (kwargs.get("sorted") is False or (len(args) > 4 and args[4] is False)):
        return "the largest elements may come in any order"
    if name == "mode" and args and isinstance(args[0], Tensor) and args[0].dim():
        dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
        if _most_frequent(args[0].detach(), dim):
            return "several values are the most frequent ones"
    return ""


def _most_frequent(values: Tensor, dim: int) -> bool:
    """Whether, along a dimension, more than one value is the most frequent one."""
    rows = values.double().movedim(dim, -1).sort(-1).values.contiguous()
    if not rows.numel():
        return False
    counts = torch.searchsorted(rows, rows, right=True) - torch.searchsorted(rows, rows)
    most = counts.amax(-1, keepdim=True)
    return bool(((counts == most).sum(-1, keepdim=True) > most).any())


def _overlap(sizes: Any, strides: Any) -> bool:
    """Whether two elements of a tensor with these sizes and strides share a place."""
    if math.prod(sizes) > 1 << 17:
        return True
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(sizes, strides):
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return _repeats(places)


def other_order(matrix: Tensor, ours: Tensor) -> bool:
    """Whether `ours` are the eigenvalues of a matrix, in another order than that of the CPU in double precision.

    >>> other_order(torch.diag(torch.tensor([1.0, 2.0])), torch.tensor([2.0, 1.0], dtype=torch.complex64))
    True
    """
    wide = matrix.detach().to(torch.complex128)
    theirs = torch.linalg.eigvals(wide)
    if theirs.shape != ours.shape or not ours.isfinite().all():
        return False
    apart = (ours.to(torch.complex128).unsqueeze(-1) - theirs.unsqueeze(-2)).abs()
    nearest = apart.argmin(-1)
    size = wide.abs().amax((-2, -1), keepdim=True)[..., 0]
    close = bool((apart.amin(-1) <= torch.finfo(ours.dtype).eps ** 0.5 * size).all())
    order = torch.arange(ours.shape[-1]).expand_as(nearest)
    return close and bool((nearest.sort(-1).values == order).all()) and not bool((nearest == order).all())


def same_branch(ours: Tensor, theirs: Tensor) -> Tensor:
    """Complex logarithms, moved by whole turns to where the others are: those of sums have no branch of right.

    >>> same_branch(torch.tensor([1 + 4j]), torch.tensor([1 + 4j - 2j * math.pi])).imag < 0
    tensor([True])
    """
    turns = ((theirs.imag.double() - ours.imag.double()) / math.tau).round()
    moved = torch.complex(ours.real.double(), ours.imag.double() + math.tau * turns)
    return torch.where(turns == 0, ours, moved.to(ours.dtype))


def _repeats(places: Any, first: int = 0) -> bool:
    """Whether a place stands twice in a tensor of them, or in one of its rows, which begin at dimension `first`."""
    if not isinstance(places, Tensor) or places.numel() < 2:
        return False
    return _repeats_along(places.flatten(first), -1)


def _repeats_along(places: Any, dim: Any) -> bool:
    if not isinstance(places, Tensor) or not isinstance(dim, int) or places.numel() < 2 or not places.dim():
        return False
    return bool((places.sort(dim).values.diff(dim=dim) == 0).any())


def layout(tensor: Tensor, address: int) -> tuple[int, tuple[int, ...]]:
    """Where the elements are; a dimension of one element has no stride, and no elements are nowhere.

    >>> layout(torch.empty(0, 3), 64)
    (0, ())
    """
    if tensor.numel() == 0:
        return 0, ()
    return address, tuple(s for n, s in zip(tensor.shape, tensor.stride()) if n > 1)


# --- overflow of eight-bit numbers ------------------------------------------------------------------------


def with_overflow_of(ours: Any, theirs: Any) -> Any:
    """Eight-bit results, NaN where ours is the largest number and theirs is NaN: both are what overflow gives.

    Example: ``with_overflow_of(device_result, cpu_result)``
    """
    if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor) and ours.shape == theirs.shape):
        return ours
    if ours.dtype != theirs.dtype or not ours.dtype.is_floating_point or ours.element_size() > 1:
        return ours
    wide = ours.float()
    beyond = theirs.float().isnan() & (wide.abs() == torch.finfo(ours.dtype).max)
    return wide.masked_fill(beyond, math.nan).to(ours.dtype)


# --- factors of complex matrices --------------------------------------------------------------------------

_COMPLEX_PRODUCT = 2 * math.sqrt(2)  # roundings of a product of complex numbers, beside one of real ones


def other_pivots(matrix: Tensor, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether `ours` is an LU factorisation of complex matrices as good as `theirs`, with other pivots.

    The largest element of a column is taken by |z| or by |re| + |im|, which LAPACK does: both keep the factors
    within the square root of two. What counts is that the product is the matrix, to rounding: Higham's bound.

    Example: ``other_pivots(a, device_factors, torch.linalg.lu_factor(a))``
    """
    if not matrix.is_complex() or any(a.shape != b.shape for a, b in zip(ours, theirs)):
        return False
    permutation, lower, upper = _factors(matrix, ours)
    if bool((permutation == _factors(matrix, theirs)[0]).all()):
        return False
    is_permutation = bool(((permutation == 0) | (permutation == 1)).all()) and all(
        bool((permutation.real.sum(dim) == 1).all()) for dim in (-1, -2)
    )
    unit = torch.finfo(matrix.dtype).eps / 2
    length = min(matrix.shape[-2:])
    triangular = (
        bool((lower.triu(1) == 0).all())
        and bool((upper.tril(-1) == 0).all())
        and bool((lower.diagonal(dim1=-2, dim2=-1) == 1).all())
    )
    small = bool((lower.abs() <= math.sqrt(2) * (1 + 16 * unit)).all())
    error = (matrix.to(torch.complex128) - permutation @ lower @ upper).abs()
    bound = _COMPLEX_PRODUCT * (length + 1) * unit * (permutation.real @ (lower.abs() @ upper.abs()))
    return is_permutation and triangular and small and bool((error <= bound).all())


def _factors(matrix: Tensor, results: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Permutation, lower and upper factor, in double precision, of what any of the LU functions returned."""
    if results[1].is_complex():
        *permutations, lower, upper = [t.to(torch.complex128) for t in results[:3]]
        if not permutations:  # of `linalg.lu`, the database compares the other two
            return _rows_of(matrix.to(torch.complex128), lower @ upper), lower, upper
        return permutations[0], lower, upper
    permutation, lower, upper = torch.lu_unpack(results[0].to(torch.complex128), results[1])
    return permutation.to(torch.complex128), lower, upper


def _rows_of(matrix: Tensor, product: Tensor) -> Tensor:
    """The matrix that brings the rows of a product into the order of the most similar rows of a matrix."""
    apart = (matrix.unsqueeze(-2) - product.unsqueeze(-3)).abs().sum(-1)
    return torch.nn.functional.one_hot(apart.argmin(-1), product.shape[-2]).to(torch.complex128)
