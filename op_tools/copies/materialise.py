"""Private copies of the tensors of a call, on any device, in other dtypes, that lie in memory as the originals do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from ..call.description import Tensor, map_tensors, tensors_in
from ..compat import conj_view, neg_view

Cast = Mapping[torch.dtype, torch.dtype]

_CPU: Final = torch.device("cpu")
_COPY_WHOLE_BELOW: Final = 1 << 14  # elements of a storage; operators may look around a small tensor


class Enter(torch.autograd.Function):
    """Gives a copy a history, so that in-place operators may change it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, holder: list[Tensor]) -> Tensor:
        return holder[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


_enter: Final[Any] = Enter.apply


def span_of(tensor: Tensor) -> tuple[int, int]:
    """First and last (exclusive) element of its storage that a tensor touches (`span_of(x[2:])`)."""
    first = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return first, first
    extent = sum((int(size) - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride()))
    return first, first + extent + 1


class Copier:
    """Copies the tensors of a tree: strides, offsets, shared memory, conj and neg bits and requires_grad are kept.

    `device` None leaves them where they are. `cast` maps dtypes; float32 values are rounded to `rounded_to` first.
    `enter` gives copies that require gradients a history, for operators that write to them. `whole` copies all of each
    storage. Tensors with the same place in memory are one tensor to autograd, `distinct_leaves` makes them several.
    With `own_memory` the copy of each tensor has its own storage. `contiguous` gives up strides and sharing.

    >>> x = torch.ones(2, 2)
    >>> a, b = Copier(cast={torch.float32: torch.float64}).copy((x, x.t()))
    >>> a.dtype, a.data_ptr() == b.data_ptr(), b.stride()
    (torch.float64, True, (1, 2))
    """

    def __init__(
        self,
        device: torch.device | None = _CPU,
        cast: Cast | None = None,
        *,
        rounded_to: torch.dtype | None = None,
        grad: bool = True,
        enter: bool = False,
        whole: bool = False,
        distinct_leaves: bool = False,
        own_memory: bool = False,
        contiguous: bool = False,
    ) -> None:
        self.leaves: list[Tensor | None] = []  # for each tensor the one to differentiate by, None without a gradient
        self.rounded_to = rounded_to
        self._cast: Cast = cast or {}
        if rounded_to is not None:
            self._cast = {**self._cast, torch.float32: self._cast.get(torch.float32, torch.float32)}
        self._device, self._grad, self._enter = device, grad, enter
        self._whole, self._distinct_leaves = whole, distinct_leaves
        self._own_memory, self._contiguous = own_memory, contiguous
        self._spans: dict[Any, tuple[int, int]] = {}  # in bytes of the storage
        self._unmeasured: list[Tensor] = []  # whose spans are not among these: small storages are copied whole
        self._storages: dict[Any, tuple[Tensor, int]] = {}  # the copy, and which byte of the storage is its first
        self._made: dict[Any, tuple[Tensor, Tensor | None, int]] = {}  # the copy, its leaf, its version or -1

    def copy(self, value: Any, tensors: Iterable[Tensor] | None = None) -> Any:
        """The tree with copies in it; `tensors` are those that it holds, where that is known."""
        if not self._whole:
            self._unmeasured.extend(tensors_in(value) if tensors is None else tensors)
        return map_tensors(value, self._copied)

    def copy_of(self, tensor: Tensor) -> Tensor:
        """The copy of a tensor that has its own memory (`copier.copy_of(x)`)."""
        return self._made[id(tensor)][0]

    def wrote(self) -> bool:
        """Whether a copy has been written to since it was made (`copier.wrote()`)."""
        for copy, _, version in self._made.values():  # noqa: SIM110  (a generator would cost a call for each)
            if version >= 0 and copy._version != version:
                return True
        return False

    def _measure_spans(self) -> None:
        for tensor in filter(is_strided, self._unmeasured):
            size, (first, last) = tensor.element_size(), span_of(tensor)
            key = self._memory_of(tensor)
            low, high = self._spans.get(key, (first * size, last * size))
            self._spans[key] = (min(first * size, low), max(last * size, high))
        self._unmeasured.clear()

    def _memory_of(self, tensor: Tensor) -> Any:
        """Copies of tensors with equal keys share memory; what is cast is shared by tensors of one dtype."""
        if self._own_memory:
            return id(tensor)
        dtype, storage = tensor.dtype, tensor.untyped_storage()._cdata
        return (storage, dtype) if dtype in self._cast else storage

    def _copied(self, tensor: Tensor) -> Tensor:
        if self._distinct_leaves:
            key: Any = len(self._made)
        else:
            key = id(tensor) if self._own_memory else place_of(tensor)
        made = self._made.get(key)
        if made is None:
            keeps_layout = is_strided(tensor) and not self._contiguous
            copy = self._strided_copy(tensor) if keeps_layout else self._other_copy(tensor)
            leaf = None
            if self._grad and tensor.requires_grad:
                copy, leaf = self._with_leaf(copy)
            made = self._made[key] = (copy, leaf, -1 if copy.is_inference() else copy._version)
        self.leaves.append(made[1])
        return made[0]

    def _strided_copy(self, tensor: Tensor) -> Tensor:
        key = self._memory_of(tensor)
        turned = tensor.is_conj() or tensor.is_neg()
        found = self._storages.get(key)
        if found is None or self._own_memory:
            storage = tensor.untyped_storage()
            if not turned and storage.nbytes() == tensor.nbytes:
                copy = self._converted(tensor.detach(), self._cast.get(tensor.dtype))
                if copy.stride() == tensor.stride():  # a tensor that fills its storage
                    self._storages[key] = (copy, 0)
                    return copy
            found = self._storages[key] = self._copy_memory(tensor, storage, key)
        memory, start = found
        copy = torch.empty(0, dtype=self._cast.get(tensor.dtype, tensor.dtype), device=memory.device)
        offset = tensor.storage_offset() - start // tensor.element_size()
        copy.set_(memory.untyped_storage(), offset, tensor.shape, tensor.stride())
        return turned_like(copy, tensor) if turned else copy

    def _copy_memory(self, tensor: Tensor, storage: torch.UntypedStorage, key: Any) -> tuple[Tensor, int]:
        dtype, size = tensor.dtype, tensor.element_size()
        start, end = 0, storage.nbytes()
        if not self._whole and end > _COPY_WHOLE_BELOW * size:
            if self._unmeasured:
                self._measure_spans()
            start, end = self._spans[key]
        target = self._cast.get(dtype)
        if target is None:  # bytes, whatever they are seen as
            dtype, size, start = torch.uint8, 1, start - start % 64
        flat = torch.empty(0, dtype=dtype, device=tensor.device)
        flat.set_(storage, start // size, ((end - start) // size,), (1,))
        return self._converted(flat, target), start

    def _converted(self, tensor: Tensor, target: torch.dtype | None) -> Tensor:
        if self.rounded_to is not None and tensor.dtype == torch.float32:
            tensor = tensor.to(self.rounded_to)
        return tensor.to(self._device or tensor.device, target or tensor.dtype, copy=True)

    def _other_copy(self, tensor: Tensor) -> Tensor:
        copy = tensor.detach().to(self._device or tensor.device, copy=True)
        if copy.dtype in self._cast:
            copy = self._converted(copy, self._cast[copy.dtype])
        return copy.clone(memory_format=torch.contiguous_format) if self._contiguous and is_strided(copy) else copy

    def _with_leaf(self, copy: Tensor) -> tuple[Tensor, Tensor | None]:
        if not (copy.is_floating_point() or copy.is_complex()):
            return copy, None
        if not self._enter:
            return copy.requires_grad_(), copy
        leaf = torch.empty_like(copy).requires_grad_()
        with torch.enable_grad():
            return _enter(leaf, [copy]), leaf


def turned_like(copy: Tensor, tensor: Tensor) -> Tensor:
    """A copy of a tensor's memory, with the conj and neg bits of the tensor."""
    if tensor.is_conj():
        copy = conj_view(copy).detach()
    return neg_view(copy).detach() if tensor.is_neg() else copy


def is_strided(tensor: Tensor) -> bool:
    """Whether a tensor is plain strided memory (`is_strided(torch.ones(2))`)."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


def place_of(tensor: Tensor) -> Any:
    """Equal for arguments that may be the same tensor: the same memory seen in the same way. The storage is first."""
    if not is_strided(tensor):
        return id(tensor)
    storage, seen = tensor.untyped_storage()._cdata, (tensor.is_conj(), tensor.is_neg(), tensor.requires_grad)
    return storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), seen
