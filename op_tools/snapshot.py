"""Private copies of tensors that keep what matters: strides, offsets, sharing of memory, requires_grad.

Staging copies storages on the device they live on, which is quick and needs no sync; unpacking turns
staged copies into CPU tensors of the same layout, on whichever thread has the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch

from .devices import can_pin, event_class, module_of
from .opcall import Tensor, map_tensors, tensors_in

_PLAIN_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)})
# A small view of a large storage is cut out of it; a view of most of a storage keeps its offset.
_KEEP_WHOLE_BELOW: Final = 1 << 16
_KEEP_WHOLE_FACTOR: Final = 4


class Ref(NamedTuple):
    """A tensor of a staged tree: which storage, and how it lies in it."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool
    conjugated: bool
    negated: bool


class Whole(NamedTuple):
    """A tensor without strides (sparse, quantized, nested), copied as PyTorch copies it."""

    copy: Tensor
    requires_grad: bool


class Opaque(NamedTuple):
    """A tensor that cannot be copied: what it was."""

    kind: str


class Staged(NamedTuple):
    """Copies of all storages under a tree of arguments, still on their device."""

    tree: Any
    storages: tuple[Tensor, ...]
    event: Any
    nbytes: int
    opaque: tuple[str, ...] = ()  # kinds of tensors that could not be copied


def span_of(tensor: Tensor) -> tuple[int, int]:
    """First and last (exclusive) element of its storage that a tensor touches (`span_of(x[2:])`)."""
    first = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return first, first
    extent = sum((int(size) - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride()))
    return first, first + extent + 1


class _Group:
    """Tensors that share a storage."""

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        self.sample, self.storage = tensor, storage
        self.start, self.end = 1 << 62, 0
        self.members = 0

    def add(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        start, end = span_of(tensor)
        self.start, self.end = min(self.start, start * size), max(self.end, end * size)
        self.members += 1

    def bounds(self, total: int) -> tuple[int, int]:
        needed = self.end - self.start
        if total <= _KEEP_WHOLE_BELOW or total <= _KEEP_WHOLE_FACTOR * needed:
            return 0, total
        start = self.start - self.start % 64  # stay aligned for every dtype
        return start, self.end


def measure(value: Any) -> int:
    """Bytes that staging these arguments would need, at most (`measure((x, y))`)."""
    return sum(t.numel() * t.element_size() for t in tensors_in(value) if t.layout == torch.strided)


def stage(value: Any, event: bool = True) -> Staged:
    """Copy every storage under `value` on its own device (`stage((args, kwargs))`)."""
    groups: dict[int, _Group] = {}
    keys: dict[int, int] = {}
    for tensor in tensors_in(value):
        if _is_plain(tensor):
            storage = tensor.untyped_storage()
            key = keys[id(tensor)] = storage._cdata
            group = groups.get(key)
            if group is None:
                group = groups[key] = _Group(tensor, storage)
            group.add(tensor)
    storages: list[Tensor] = []
    placed: dict[int, tuple[int, int]] = {}
    nbytes = 0
    device = None
    for key, group in groups.items():
        copy, start = _copy_storage(group)
        placed[key] = (len(storages), start)
        storages.append(copy)
        nbytes += copy.numel() * copy.element_size()
        if copy.device.type != "cpu":
            device = copy.device

    opaque: list[str] = []

    def replace(tensor: Tensor) -> Any:
        if id(tensor) not in keys:
            odd = _stage_odd(tensor)
            if isinstance(odd, Opaque):
                opaque.append(odd.kind)
            return odd
        index, start = placed[keys[id(tensor)]]
        return Ref(
            index,
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()) - start // tensor.element_size(),
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    tree = map_tensors(value, replace)
    mark = None
    if event and device is not None:
        kind = event_class(device.type)
        if kind is not None:
            mark = kind()
            mark.record()
    return Staged(tree, tuple(storages), mark, nbytes, tuple(opaque))


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN_TYPES and tensor.layout == torch.strided and not tensor.is_quantized


def _copy_storage(group: _Group) -> tuple[Tensor, int]:
    sample, storage = group.sample, group.storage
    total = storage.nbytes()
    if group.members == 1 and total == sample.numel() * sample.element_size() and not sample.is_complex():
        copy = sample.detach().clone()  # one launch instead of three for a tensor that fills its storage
        if copy.stride() == sample.stride() and not sample.is_neg():
            return copy, 0
    start, end = group.bounds(total)
    flat = torch.empty(0, dtype=torch.uint8, device=sample.device)
    flat.set_(storage, start, (end - start,), (1,))
    return flat.clone(), start


def _stage_odd(tensor: Tensor) -> Whole | Opaque:
    try:
        if type(tensor) not in _PLAIN_TYPES:
            return Opaque(f"{type(tensor).__module__}.{type(tensor).__qualname__}")
        return Whole(tensor.detach().clone(), tensor.requires_grad)
    except Exception as error:
        return Opaque(f"{type(tensor).__name__} ({type(error).__name__})")


class _PinnedBuffer:
    """One reused pinned buffer: device memory reaches the host through it at full speed."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def fetch(self, source: Tensor) -> Tensor:
        size = source.numel()
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = torch.empty(max(size, 1 << 24), dtype=torch.uint8, pin_memory=True)
        view = self._buffer[:size]
        view.copy_(source, non_blocking=True)
        return view


class Unpacker:
    """Turns staged copies into CPU tensors; each thread has its own, with its own stream and buffer."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._pinned = _PinnedBuffer()

    def unpack(self, staged: Staged) -> Any:
        """The staged tree with CPU tensors (`Unpacker().unpack(stage(args))`)."""
        return rebuild(staged.tree, self.fetch(staged))

    def fetch(self, staged: Staged) -> list[Tensor]:
        """The bytes of the staged storages on the host."""
        return [self._to_host(_bytes_of(s), staged.event) for s in staged.storages]

    def _to_host(self, flat: Tensor, event: Any) -> Tensor:
        if flat.device.type == "cpu":
            return flat
        if not can_pin(flat.device.type):
            if event is not None:
                event.synchronize()
            return flat.cpu()
        module = module_of(flat.device.type)
        stream = self._streams.get(flat.device)
        if stream is None:
            stream = self._streams[flat.device] = module.Stream(flat.device)
        with module.stream(stream):
            if event is not None:
                stream.wait_event(event)
            pinned = self._pinned.fetch(flat)
            stream.synchronize()
        return pinned.clone()


def _bytes_of(copy: Tensor) -> Tensor:
    if copy.dtype == torch.uint8 and copy.dim() == 1:
        return copy
    flat = torch.empty(0, dtype=torch.uint8, device=copy.device)
    return flat.set_(copy.untyped_storage())


def rebuild(tree: Any, storages: Iterable[Tensor], cast: Mapping[torch.dtype, torch.dtype] | None = None) -> Any:
    """Tensors again, from a staged tree and the bytes of its storages; `cast` changes dtypes, not layouts."""
    flats = list(storages)
    changed: dict[tuple[int, torch.dtype], Tensor] = {}

    def storage_of(leaf: Ref, dtype: torch.dtype) -> Tensor:
        flat = flats[leaf.storage]
        if dtype == leaf.dtype:
            return flat
        key = (leaf.storage, leaf.dtype)  # tensors of one dtype keep sharing their memory
        if key not in changed:
            size = torch.empty(0, dtype=leaf.dtype).element_size()
            count = flat.numel() // size
            typed = torch.empty(0, dtype=leaf.dtype, device=flat.device)
            changed[key] = typed.set_(flat.untyped_storage(), 0, (count,), (1,)).to(dtype)
        return changed[key]

    def make(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            dtype = cast.get(leaf.dtype, leaf.dtype) if cast else leaf.dtype
            flat = storage_of(leaf, dtype)
            tensor = torch.empty(0, dtype=dtype, device=flat.device)
            tensor.set_(flat.untyped_storage(), leaf.offset, leaf.shape, leaf.stride)
            if leaf.conjugated:
                tensor = torch._conj(tensor)
            if leaf.negated:
                tensor = torch._neg_view(tensor)
            return tensor.requires_grad_(leaf.requires_grad)
        if isinstance(leaf, Whole):
            return leaf.copy.cpu().requires_grad_(leaf.requires_grad)
        return leaf

    return map_leaves(tree, make)


def map_leaves(value: Any, change: Any) -> Any:
    """Apply `change` to the staged leaves of a tree, keeping its containers."""
    if isinstance(value, (Ref, Whole, Opaque)):
        return change(value)
    kind = type(value)
    if kind is list:
        return [map_leaves(v, change) for v in value]
    if kind is tuple:
        return tuple([map_leaves(v, change) for v in value])
    if kind is dict:
        return {k: map_leaves(v, change) for k, v in value.items()}
    from .opcall import _rebuild, children

    parts = children(value)
    if parts is None:
        if kind is slice:
            return slice(*(map_leaves(v, change) for v in (value.start, value.stop, value.step)))
        return value
    return _rebuild(value, kind, [map_leaves(v, change) for v in parts[1]])
